//! Attributes of files on a mount, compared with the results of the same calls on a tmpfs. Needs
//! root and /dev/fuse.

use crate::support;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Gid, Mode, StatxFlags, Uid, XattrFlags, chmod, chown,
    copy_file_range, fallocate, ftruncate, getxattr, listxattr, removexattr, setxattr, statx,
};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use support::Pools;
use support::mounted::{self, TestMount};
use support::skip::skip;

const CAPABILITIES: &str = "security.capability";
/// `cap_net_raw=ep`, as setcap(8) writes it: version 2, the effective bit, and two masks.
const NET_RAW: [u8; 20] = {
    let mut value = [0; 20];
    (value[0], value[3], value[5]) = (1, 2, 0x20);
    value
};
const KEPT: &str = "user.kept";

/// The errno of a call, or none.
fn errno<T>(result: rustix::io::Result<T>) -> Option<Errno> {
    result.err()
}

type FileChange = (&'static str, fn(&File, &Path));

/// Operations that change a file, and operations that only read it.
const CHANGES: [FileChange; 12] = [
    ("overwrite", |file, _| file.write_all_at(b"new", 2).unwrap()),
    ("extend", |file, _| {
        file.write_all_at(b"new", 20_000).unwrap()
    }),
    ("append", |_, path| {
        let mut file = File::options().append(true).open(path).unwrap();
        file.write_all(b"new").unwrap();
    }),
    ("cut", |file, _| ftruncate(file, 5).unwrap()),
    ("stretch", |file, _| ftruncate(file, 90_000).unwrap()),
    ("same size", |file, _| ftruncate(file, 16_384).unwrap()),
    ("open to cut", |_, path| drop(File::create(path).unwrap())),
    ("allocate", |file, _| {
        fallocate(file, FallocateFlags::empty(), 0, 60_000).unwrap();
    }),
    ("punch", |file, _| {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, how, 0, 8192).unwrap();
    }),
    ("copy", |file, path| {
        let from = path.with_file_name("source");
        fs::write(&from, vec![7; 9000]).unwrap();
        let from = File::open(from).unwrap();
        assert!(copy_file_range(from, None, file, Some(&mut 0), 9000).unwrap() > 0);
    }),
    ("give away", |_, path| {
        chown(path, Some(Uid::from_raw(1)), Some(Gid::from_raw(1))).unwrap();
    }),
    ("look", |_, path| {
        let mut bytes = Vec::new();
        File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
        chmod(path, Mode::from_raw_mode(0o4711)).unwrap();
        setxattr(path, KEPT, b"2", XattrFlags::empty()).unwrap();
    }),
];

/// For each operation: whether the capabilities and the other attribute remain, and the mode.
fn after_changes(dir: &Path) -> Vec<(&'static str, bool, bool, u32)> {
    let path = dir.join("program");
    CHANGES
        .into_iter()
        .map(|(name, change)| {
            let file = File::create(&path).unwrap();
            file.write_all_at(&[1; 16_384], 0).unwrap();
            chown(&path, Some(Uid::ROOT), Some(Gid::ROOT)).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o4755)).unwrap();
            setxattr(&path, KEPT, b"1", XattrFlags::empty()).unwrap();
            setxattr(&path, CAPABILITIES, &NET_RAW, XattrFlags::empty()).unwrap();
            change(&file, &path);
            let has = |name| getxattr(&path, name, &mut [0; 64]).is_ok();
            let found = (
                name,
                has(CAPABILITIES),
                has(KEPT),
                path.metadata().unwrap().mode(),
            );
            fs::remove_file(&path).unwrap();
            found
        })
        .collect()
}

#[test]
fn change_by_root_clears_capabilities() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let reference = Pools::Memory.dir();
    let expected = after_changes(reference.path());
    let kept: Vec<&str> = expected.iter().filter(|it| it.1).map(|it| it.0).collect();
    assert_eq!(kept, ["look"], "{expected:?}");
    for fuse in ["classic", "auto"] {
        let mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
        assert_eq!(after_changes(&mount.dir), expected);
        mount.stop(&cluster);
    }
}

#[test]
fn attributes_of_unknown_name_spaces_are_refused() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    let path = mount.path("file");
    fs::write(&path, b"").unwrap();
    let set = |name: &str| errno(setxattr(&path, name, b"x", XattrFlags::empty()));
    for name in ["foo.bar", "system.foo", "userx"] {
        assert_eq!(set(name), Some(Errno::OPNOTSUPP), "{name}");
        let found = errno(getxattr(&path, name, &mut [0; 8]));
        assert_eq!(found, Some(Errno::OPNOTSUPP), "{name}");
        assert_eq!(errno(removexattr(&path, name)), Some(Errno::OPNOTSUPP));
    }
    assert_eq!(set("user."), Some(Errno::INVAL));
    for name in ["user.a", "trusted.a", "security.a"] {
        assert_eq!(set(name), None, "{name}");
    }
    let mut names = vec![0; 100];
    let len = listxattr(&path, &mut names).unwrap();
    names.truncate(len);
    assert_eq!(names, b"user.a\0trusted.a\0security.a\0");
    assert_eq!(
        errno(getxattr(&path, "user.b", &mut [0; 8])),
        Some(Errno::NODATA)
    );
    // Linux allows `user.` attributes on files and directories only.
    mount.sh("mkfifo fifo; ln -s file link");
    let fifo = mount.path("fifo");
    let refused = errno(setxattr(&fifo, "user.a", b"x", XattrFlags::empty()));
    assert_eq!(refused, Some(Errno::PERM));
    mount.stop(&cluster);
}

#[test]
fn statx_returns_creation_time() {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = kernel.split(['.', '-']).map(|it| it.parse().unwrap_or(0));
    let release: (u32, u32) = (numbers.next().unwrap(), numbers.next().unwrap());
    if release < (6, 6) {
        return skip("needs Linux 6.6, which asks for it");
    }
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let mount = TestMount::new(&cluster, "files", "auto");
    let path = mount.path("file");
    let made = |path: &Path| {
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let told = statx(CWD, path, AtFlags::empty(), wanted).unwrap();
        let is_told = StatxFlags::from_bits_retain(told.stx_mask).contains(StatxFlags::BTIME);
        is_told.then_some((told.stx_btime.tv_sec, told.stx_btime.tv_nsec, told.stx_size))
    };
    let earlier = mount.dir.metadata().unwrap();
    let earlier = (earlier.ctime(), earlier.ctime_nsec());
    fs::write(&path, b"one").unwrap();
    let (sec, nsec, size) = made(&path).unwrap();
    assert_eq!(size, 3);
    let changed = path.metadata().unwrap();
    let changed = (changed.ctime(), changed.ctime_nsec());
    assert!(earlier < (sec, i64::from(nsec)) && (sec, i64::from(nsec)) <= changed);
    let before = (sec, nsec);
    fs::write(&path, b"other").unwrap();
    mount.sh("touch -d 2001-02-03 file; chmod 600 file; mv file moved");
    let moved = mount.path("moved");
    assert_eq!(made(&moved), Some((before.0, before.1, 5)));
    mount.stop(&cluster);
    let mount = TestMount::new(&cluster, "files", "auto");
    assert_eq!(made(&moved), Some((before.0, before.1, 5)));
    assert!(moved.metadata().unwrap().created().is_ok());
    mount.stop(&cluster);
}
