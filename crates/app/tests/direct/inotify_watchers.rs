//! Watchers of files and directories (inotify) together with direct clients.

use super::support::mounted::{self, TestMount};
use super::support::until;
use super::{direct_file, new_client, open_file};
use crate::by_both;
use rustix::fd::OwnedFd;
use rustix::fs::inotify::{self, CreateFlags, Event, ReadFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, StatxFlags, StatxTimestamp, statx};
use rustix::io::Errno;
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::unix::fs::FileExt;
use std::path::Path;

by_both! {
    direct_writes_reach_watchers
}

/// A watcher of one file or directory.
struct InotifyWatcher(OwnedFd);

impl InotifyWatcher {
    fn of(path: &Path) -> InotifyWatcher {
        let watcher = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watcher, path, WatchFlags::ALL_EVENTS).unwrap();
        InotifyWatcher(watcher)
    }

    /// The names in the pending events: the empty name is the watched file itself. Asserts that all
    /// events are writes.
    fn take_events(&self) -> Vec<String> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.0, &mut buffer);
        let mut names = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => names.push(modified_name(&event)),
                Err(Errno::AGAIN) => return names,
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    fn await_write(&self, name: &str) {
        until("the watcher has an event", || {
            self.take_events().iter().any(|found| found == name)
        });
    }
}

fn modified_name(event: &Event<'_>) -> String {
    assert_eq!(event.events(), ReadFlags::MODIFY, "{event:?}");
    let name = event.file_name().map(|name| name.to_str().unwrap());
    name.unwrap_or_default().to_owned()
}

/// The times and the size, as the mount reports them now.
fn fresh_attributes(file: &File) -> [(i64, u32); 3] {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    let found = statx(file, c"", flags, StatxFlags::BASIC_STATS).unwrap();
    let time = |time: StatxTimestamp| (time.tv_sec, time.tv_nsec);
    let size = (found.stx_size as i64, 0);
    [time(found.stx_mtime), time(found.stx_ctime), size]
}

fn direct_writes_reach_watchers(fuse: &'static str) {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", fuse);
    let file = open_file(&mount, "file");
    file.write_all_at(&[1; 3 * 4096], 0).unwrap();
    let direct = direct_file(new_client(), &file);
    let [of_file, of_directory] = [mount.path("file"), mount.dir.clone()];
    let [of_file, of_directory] = [&of_file, &of_directory].map(|path| InotifyWatcher::of(path));
    // Within the file, and beyond its end: then the file grows.
    for (round, offset) in [0, 4096, 3 * 4096, 4 * 4096].into_iter().enumerate() {
        let bytes = [round as u8; 4096];
        until("the client writes", || {
            direct.write(&bytes, offset) == Some(bytes.len())
        });
        let before = fresh_attributes(&file);
        of_file.await_write("");
        of_directory.await_write("file");
        assert_eq!(fresh_attributes(&file), before, "nothing changed");
    }
    drop((direct, file));
    // The notification of watchers does not keep the mount busy.
    mount.stop(&cluster);
    cluster.check_identical("files");
}
