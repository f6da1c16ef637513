//! A process with files of two mounts.

use super::support::daemon::Daemon;
use super::support::mounted::{self, CLASSIC, TestMount};
use super::support::until;
use super::{direct_file, new_client, open_file};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::{Duration, Instant};

/// Much less than the time-out for a mount.
const PROMPT_MAX: Duration = Duration::from_secs(2);

/// A stopped mount that continues when this is dropped: otherwise a close of its file would hang.
struct StoppedDaemon<'d>(&'d Daemon);

impl Drop for StoppedDaemon<'_> {
    fn drop(&mut self) {
        self.0.signal("CONT");
    }
}

#[test]
fn hanging_mount_does_not_block_other_mount() {
    let Some(cluster) = mounted::cluster(&[256, 256], "64M") else {
        return;
    };
    cluster.ok(&["fs", "create", "other", "--size", "24M"]);
    let mount = TestMount::new(&cluster, "files", "map");
    let hangs = TestMount::try_new(&cluster, "other", "hangs", "map", CLASSIC);
    let hangs = hangs.unwrap_or_else(|ended| panic!("no mount: {ended:?}"));
    let (file, of_hanging) = (open_file(&mount, "file"), open_file(&hangs, "file"));
    file.write_all_at(&[1; 4096], 0).unwrap();
    let guest = new_client();
    // Fetched before the stop: afterwards the kernel would have to ask the mount for them.
    let found = of_hanging.metadata().unwrap();
    let open_hanging = || guest.open(found.dev(), found.ino(), of_hanging.as_raw_fd());
    let daemon = hangs.daemon.as_ref().unwrap();
    daemon.signal("STOP");
    let stopped = StoppedDaemon(daemon);
    let took = |open: &dyn Fn()| {
        let began = Instant::now();
        open();
        began.elapsed()
    };
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| took(&|| drop(open_hanging())));
        std::thread::sleep(Duration::from_millis(300));
        let healthy = took(&|| {
            let direct = direct_file(guest, &file);
            until("direct access is allowed", || {
                direct.read(&mut [0; 100], 0).is_some()
            });
        });
        let another = took(&|| drop(open_hanging()));
        let waited = waits.join().unwrap();
        assert!(waited > PROMPT_MAX, "{waited:?}: it did not hang");
        assert!(healthy < PROMPT_MAX, "{healthy:?} at the other mount");
        assert!(
            another < PROMPT_MAX,
            "{another:?} while another thread waits"
        );
        // The client does not ask the stopped mount again at once.
        let next = took(&|| drop(open_hanging()));
        assert!(next < PROMPT_MAX, "{next:?} after another thread waited");
    });
    drop(stopped);
    let direct = open_hanging();
    of_hanging.write_all_at(&[1; 4096], 0).unwrap();
    until("it allows direct access", || {
        direct.read(&mut [0; 100], 0).is_some()
    });
    drop((direct, file, of_hanging));
    hangs.stop(&cluster);
    mount.stop(&cluster);
}
