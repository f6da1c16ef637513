//! A file system in memory, mounted through the real kernel. For root, or whoever
//! has fusermount3.

#![allow(clippy::unwrap_used)]

#[path = "../../../fs/tests/support/memory.rs"]
#[allow(dead_code)]
mod memory;
#[path = "../../../brick/tests/support/skip.rs"]
mod skip;

use memory::Memory;
use pagemesh_fs::{Caller, Fs, MakeOptions, make};
use pagemesh_fuse::{MountOptions, Unmounter, mount, now};
use rustix::fs::{FallocateFlags, Mode, OFlags, RenameFlags, SeekFrom, XattrFlags};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

const LIMIT: u64 = 64 << 20;

/// A mount; dropping it unmounts.
struct Mount {
    dir: tempfile::TempDir,
    unmounter: Unmounter,
    serving: Option<JoinHandle<()>>,
}

impl Mount {
    /// None, and said so, where nobody may mount.
    fn new(memory: &Memory) -> Option<Mount> {
        let fs = Fs::mount(memory.shared(), memory::wait, now).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = MountOptions {
            source: "pagemesh:test".into(),
            threads: 3,
            allow_other: true,
        };
        let trouble = |error: &_| panic!("memory fails nothing: {error}");
        let mounted = mount(
            Arc::new(fs),
            dir.path(),
            &options,
            Box::new(trouble),
            Box::new(|| None),
        );
        let mut mounted = match mounted {
            Ok(mounted) => mounted,
            Err(cause) => {
                skip::skip(&format!("needs to mount with /dev/fuse: {cause}"));
                return None;
            }
        };
        let unmounter = mounted.unmounter();
        let serving = std::thread::spawn(move || mounted.serve().unwrap());
        Some(Mount {
            dir,
            unmounter,
            serving: Some(serving),
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.unmounter.unmount().is_err() {
            // A test that panicked has files open.
            let flags = rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH;
            rustix::mount::unmount(self.dir.path(), flags).unwrap();
        }
        let served = self.serving.take().unwrap().join();
        assert!(served.is_ok() || std::thread::panicking());
    }
}

fn made() -> Memory {
    let memory = Memory::new(1 << 40);
    let options = MakeOptions {
        uuid: uuid::Uuid::from_u128(1),
        hash_key: [2, 3],
        limit_bytes: LIMIT,
        owner: Caller { uid: 0, gid: 0 },
        mode: 0o777,
    };
    make(&memory.shared(), memory::wait, now, options).unwrap();
    memory
}

fn refused<T: std::fmt::Debug>(result: std::io::Result<T>, errno: Errno) {
    let code = result.expect_err("refused").raw_os_error();
    assert_eq!(code, Some(errno.raw_os_error()));
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn names_files_and_links_outlive_the_mount() {
    let memory = made();
    let Some(mount) = Mount::new(&memory) else {
        return;
    };
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::create_dir_all(mount.path("a/b")).unwrap();
    fs::write(mount.path("a/b/file"), &content).unwrap();
    fs::hard_link(mount.path("a/b/file"), mount.path("a/other")).unwrap();
    symlink("../file", mount.path("a/b/link")).unwrap();
    fs::rename(mount.path("a/b/link"), mount.path("a/b/moved")).unwrap();
    let long = "n".repeat(255);
    fs::write(mount.path(&long), b"x").unwrap();
    refused(
        fs::write(mount.path(&"n".repeat(256)), b""),
        Errno::NAMETOOLONG,
    );
    refused(
        fs::rename(mount.path("a"), mount.path("a/b/a")),
        Errno::INVAL,
    );
    refused(fs::remove_dir(mount.path("a")), Errno::NOTEMPTY);
    let told = fs::metadata(mount.path("a/other")).unwrap();
    assert_eq!((told.nlink(), told.size()), (2, 1_200_000));
    assert_eq!(told.blocks(), 1_200_000u64.div_ceil(4096) * 8);
    let ino = told.ino();
    for n in 0..2000 {
        File::create(mount.path(&format!("a/{n}"))).unwrap();
    }
    drop(mount);

    let mount = Mount::new(&memory).unwrap();
    assert_eq!(fs::read(mount.path("a/other")).unwrap(), content);
    assert_eq!(fs::metadata(mount.path("a/b/file")).unwrap().ino(), ino);
    let target = fs::read_link(mount.path("a/b/moved")).unwrap();
    assert_eq!(target, Path::new("../file"));
    assert_eq!(names(&mount.path("a")).len(), 2002);
    assert_eq!(names(&mount.path("a/b")), ["file", "moved"]);
    fs::remove_dir_all(mount.path("a")).unwrap();
    assert_eq!(names(mount.dir.path()), [long]);
}

#[test]
fn renames_have_flags() {
    let memory = made();
    let Some(mount) = Mount::new(&memory) else {
        return;
    };
    fs::write(mount.path("one"), b"1").unwrap();
    fs::write(mount.path("two"), b"2").unwrap();
    let cwd = File::open(mount.dir.path()).unwrap();
    let rename = |flags| rustix::fs::renameat_with(&cwd, "one", &cwd, "two", flags);
    assert_eq!(rename(RenameFlags::NOREPLACE), Err(Errno::EXIST));
    assert_eq!(rename(RenameFlags::WHITEOUT), Err(Errno::INVAL));
    rename(RenameFlags::EXCHANGE).unwrap();
    // The kernel would answer by itself.
    drop(cwd);
    drop(mount);
    let mount = Mount::new(&memory).unwrap();
    assert_eq!(fs::read(mount.path("one")).unwrap(), b"2");
    assert_eq!(fs::read(mount.path("two")).unwrap(), b"1");
}

#[test]
fn appends_of_many_do_not_overlap() {
    const EACH: usize = 200;
    let Some(mount) = Mount::new(&made()) else {
        return;
    };
    let path = mount.path("log");
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let path = &path;
            scope.spawn(move || {
                let mut options = OpenOptions::new();
                let mut file = options.create(true).append(true).open(path).unwrap();
                for _ in 0..EACH {
                    file.write_all(&[writer; 100]).unwrap();
                }
            });
        }
    });
    let log = fs::read(&path).unwrap();
    assert_eq!(log.len(), 4 * EACH * 100);
    let mut counts = [0; 4];
    for record in log.chunks(100) {
        assert!(record.iter().all(|&byte| byte == record[0]), "one record");
        counts[usize::from(record[0])] += 1;
    }
    assert_eq!(counts, [EACH; 4]);
}

#[test]
fn holes_are_found_and_made() {
    let Some(mount) = Mount::new(&made()) else {
        return;
    };
    let mut file = File::create_new(mount.path("holes")).unwrap();
    file.write_all_at(&[7; 8192], 1 << 20).unwrap();
    let at = |whence| rustix::fs::seek(&file, whence);
    assert_eq!(at(SeekFrom::Data(0)), Ok(1 << 20));
    assert_eq!(at(SeekFrom::Hole(1 << 20)), Ok((1 << 20) + 8192));
    assert_eq!(at(SeekFrom::Data((1 << 20) + 8192)), Err(Errno::NXIO));
    assert_eq!(file.metadata().unwrap().blocks(), 16);
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 1 << 20, 4096).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 8);
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 4096).unwrap();
    assert_eq!(file.metadata().unwrap().blocks(), 16);
    let collapse = rustix::fs::fallocate(&file, FallocateFlags::COLLAPSE_RANGE, 0, 4096);
    assert_eq!(collapse, Err(Errno::OPNOTSUPP));
    file.set_len(10).unwrap();
    file.set_len(20).unwrap();
    file.rewind().unwrap();
    let mut back = Vec::new();
    File::open(mount.path("holes"))
        .unwrap()
        .read_to_end(&mut back)
        .unwrap();
    assert_eq!(back, [0; 20]);
}

#[test]
fn attributes_are_as_they_were_set() {
    let Some(mount) = Mount::new(&made()) else {
        return;
    };
    let path = mount.path("file");
    fs::write(&path, b"x").unwrap();
    let name = |name: &str| name.to_owned();
    let set = |key: &str, value: &[u8], how| rustix::fs::setxattr(&path, name(key), value, how);
    set("user.key", b"value", XattrFlags::CREATE).unwrap();
    assert_eq!(set("user.key", b"", XattrFlags::CREATE), Err(Errno::EXIST));
    assert_eq!(set("user.no", b"", XattrFlags::REPLACE), Err(Errno::NODATA));
    let mut value = [0; 16];
    let acl = rustix::fs::getxattr(&path, "system.posix_acl_access", &mut value[..]);
    assert_eq!(acl, Err(Errno::OPNOTSUPP));
    let len = rustix::fs::getxattr(&path, "user.key", &mut value[..]).unwrap();
    assert_eq!(&value[..len], b"value");
    rustix::fs::removexattr(&path, "user.key").unwrap();
    assert_eq!(rustix::fs::listxattr(&path, &mut value[..]), Ok(0));

    fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
    std::os::unix::fs::chown(&path, Some(7), Some(8)).unwrap();
    let told = fs::metadata(&path).unwrap();
    assert_eq!(
        (told.uid(), told.gid(), told.mode() & 0o7777),
        (7, 8, 0o755)
    );
    let before_1970 = std::time::UNIX_EPOCH - std::time::Duration::from_millis(1500);
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(before_1970).unwrap();
    assert_eq!(file.metadata().unwrap().modified().unwrap(), before_1970);
}

#[test]
fn programs_run_and_are_replaced() {
    let Some(mount) = Mount::new(&made()) else {
        return;
    };
    // The kernel maps what it runs: the one mapping that needs no `unsafe`.
    let path = mount.path("script");
    fs::copy("/bin/true", &path).unwrap();
    let ran = std::process::Command::new(&path).status().unwrap();
    assert!(ran.success());
    fs::remove_file(&path).unwrap();
    fs::copy("/bin/false", &path).unwrap();
    let ran = std::process::Command::new(&path).status().unwrap();
    assert!(!ran.success());
}

#[test]
fn a_full_file_system_says_so_and_has_room_again() {
    let Some(mount) = Mount::new(&made()) else {
        return;
    };
    let path = mount.path("big");
    let mut file = OpenOptions::new()
        .create_new(true)
        .write(true)
        .custom_flags(OFlags::DSYNC.bits() as i32)
        .open(&path)
        .unwrap();
    let full = loop {
        if let Err(cause) = file.write_all(&[1; 1 << 20]) {
            break cause;
        }
    };
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    let told = rustix::fs::statvfs(mount.dir.path()).unwrap();
    assert!(told.f_bavail < 300, "{} left", told.f_bavail);
    assert_eq!(told.f_blocks * told.f_frsize, LIMIT);
    fs::remove_file(&path).unwrap();
    drop(file);
    // The kernel tells of the last close after it has returned.
    let free = || rustix::fs::statvfs(mount.dir.path()).unwrap().f_bavail;
    while free() < LIMIT / 4096 - 300 {
        std::thread::yield_now();
    }
    let flags = OFlags::TMPFILE | OFlags::WRONLY;
    let unnamed = rustix::fs::open(mount.dir.path(), flags, Mode::RUSR);
    assert_eq!(unnamed.err(), Some(Errno::OPNOTSUPP));
}
