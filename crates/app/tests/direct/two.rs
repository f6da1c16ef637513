//! A process with files of two mounts.

use super::support::daemon::Daemon;
use super::support::mounted::{self, CLASSIC, Mounted};
use super::support::until;
use super::{direct, guest, opened};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

/// Much less than a mount is waited for.
const SOON: Duration = Duration::from_secs(2);

/// A mount that stands still until this is dropped: else nobody could close a file of it.
struct Stopped<'d>(&'d Daemon);

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        self.0.signal("CONT");
    }
}

#[test]
fn a_mount_that_hangs_holds_up_nobody_at_another() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    cluster.ok(&["fs", "create", "other", "--size", "24M"]);
    let mount = Mounted::new(&cluster, "files", "map");
    let hangs = Mounted::try_new(&cluster, "other", "hangs", "map", CLASSIC);
    let hangs = hangs.unwrap_or_else(|ended| panic!("no mount: {ended:?}"));
    let (file, of_hanging) = (opened(&mount, "file"), opened(&hangs, "file"));
    file.write_all_at(&[1; 4096], 0).unwrap();
    let guest = guest();
    // The kernel would have to ask whose file it is.
    let found = of_hanging.metadata().unwrap();
    let open_hanging = || guest.open(found.dev(), found.ino(), of_hanging.as_raw_fd());
    let daemon = hangs.daemon.as_ref().unwrap();
    daemon.signal("STOP");
    let stopped = Stopped(daemon);
    let took = |open: &dyn Fn()| {
        let began = Instant::now();
        open();
        began.elapsed()
    };
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| took(&|| drop(open_hanging())));
        std::thread::sleep(Duration::from_millis(300));
        let healthy = took(&|| {
            let direct = direct(guest, &file);
            until("guests are let in", || {
                direct.read(&mut [0; 100], 0).is_some()
            });
        });
        let another = took(&|| drop(open_hanging()));
        let waited = waits.join().unwrap();
        assert!(waited > SOON, "{waited:?}: it did not hang");
        assert!(healthy < SOON, "{healthy:?} at the other mount");
        assert!(another < SOON, "{another:?} beside who waits already");
        // It is not asked again at once.
        let next = took(&|| drop(open_hanging()));
        assert!(next < SOON, "{next:?} behind who waited");
    });
    drop(stopped);
    let direct = open_hanging();
    of_hanging.write_all_at(&[1; 4096], 0).unwrap();
    until("it lets guests in", || {
        direct.read(&mut [0; 100], 0).is_some()
    });
    drop((direct, file, of_hanging));
    hangs.stop(&cluster);
    mount.stop(&cluster);
}
