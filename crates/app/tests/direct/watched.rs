//! Watchers of files and directories (inotify) beside direct clients.

use super::support::mounted::{self, Mounted};
use super::support::until;
use super::{direct, guest, opened};
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

/// Watches one file or directory.
struct Watcher(OwnedFd);

impl Watcher {
    fn of(path: &Path) -> Watcher {
        let watcher = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        inotify::add_watch(&watcher, path, WatchFlags::ALL_EVENTS).unwrap();
        Watcher(watcher)
    }

    /// Names in the events that came: the empty one is the watched file itself. Nothing but
    /// writes may have come.
    fn take(&self) -> Vec<String> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = Reader::new(&self.0, &mut buffer);
        let mut names = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => names.push(written(&event)),
                Err(Errno::AGAIN) => return names,
                Err(errno) => panic!("{errno}"),
            }
        }
    }

    fn await_write(&self, name: &str) {
        until("the watcher is told", || {
            self.take().iter().any(|found| found == name)
        });
    }
}

fn written(event: &Event<'_>) -> String {
    assert_eq!(event.events(), ReadFlags::MODIFY, "{event:?}");
    let name = event.file_name().map(|name| name.to_str().unwrap());
    name.unwrap_or_default().to_owned()
}

/// Times and size, as the mount tells them now.
fn asked(file: &File) -> [(i64, u32); 3] {
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
    let mount = Mounted::by(&cluster, "files", "map", fuse);
    let file = opened(&mount, "file");
    file.write_all_at(&[1; 3 * 4096], 0).unwrap();
    let direct = direct(guest(), &file);
    let [of_file, of_directory] = [mount.path("file"), mount.dir.clone()];
    let [of_file, of_directory] = [&of_file, &of_directory].map(|path| Watcher::of(path));
    // Within the file, and behind its end: then it grows.
    for (round, offset) in [0, 4096, 3 * 4096, 4 * 4096].into_iter().enumerate() {
        let bytes = [round as u8; 4096];
        until("the client writes", || {
            direct.write(&bytes, offset) == Some(bytes.len())
        });
        let before = asked(&file);
        of_file.await_write("");
        of_directory.await_write("file");
        assert_eq!(asked(&file), before, "nothing changed");
    }
    drop((direct, guest, file));
    // What tells the watchers does not keep the mount in use.
    mount.stop(&cluster);
    cluster.check_identical("files");
}
