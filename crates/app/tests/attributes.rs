//! Attributes of files on a mount, compared with the results of the same calls on a tmpfs. Needs
//! root and /dev/fuse.

use crate::support;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, Gid, Mode, StatxFlags, Uid, XattrFlags, chmod, chown,
    copy_file_range, fallocate, fchown, ftruncate, getxattr, listxattr, removexattr, setxattr,
    statx,
};
use rustix::io::Errno;
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
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

/// A user, its group, and its other groups.
type User = (&'static str, u32, u32, &'static [u32]);

type UserChange = (&'static str, fn(&File));
/// The name of a user, and of an operation; the modes after it.
type UserCase = (&'static str, &'static str, Vec<u32>);

const OWNER_UID: u32 = 50;
const OWNER_GID: u32 = 60;
const OTHER_GID: u32 = 61;
const USERS: [User; 6] = [
    ("root", 0, 0, &[]),
    ("outsider", 1000, 1000, &[]),
    ("member by its group", 1000, OWNER_GID, &[]),
    ("member by another group", 1000, 1000, &[7, OWNER_GID]),
    ("owner", OWNER_UID, OWNER_GID, &[OTHER_GID]),
    ("owner outside the group", OWNER_UID, 1000, &[OTHER_GID]),
];
const SET_ID_MODES: [u32; 5] = [0o6666, 0o6777, 0o2666, 0o2676, 0o4666];

/// Operations of programs without privilege.
const USER_CHANGES: [UserChange; 9] = [
    ("overwrite", |file| file.write_all_at(b"new", 2).unwrap()),
    ("extend", |file| file.write_all_at(b"new", 20_000).unwrap()),
    ("cut", |file| ftruncate(file, 5).unwrap()),
    ("stretch", |file| ftruncate(file, 90_000).unwrap()),
    ("same size", |file| ftruncate(file, 16_384).unwrap()),
    ("allocate", |file| {
        fallocate(file, FallocateFlags::empty(), 0, 60_000).unwrap();
    }),
    ("punch", |file| {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(file, how, 0, 8192).unwrap();
    }),
    ("copy", |file| {
        let (mut from, mut to) = (8192, 0);
        let copied = copy_file_range(file, Some(&mut from), file, Some(&mut to), 4096);
        assert_eq!(copied, Ok(4096));
    }),
    ("change the group", |file| {
        // Only an owner in the new group, and root, may.
        let _ = fchown(file, None, Some(Gid::from_raw(OTHER_GID)));
    }),
];

/// Runs a function as another user. Credentials belong to threads.
fn as_user((_, uid, gid, groups): User, run: impl FnOnce() + Send) {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let groups: Vec<Gid> = groups.iter().map(|&it| Gid::from_raw(it)).collect();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            set_thread_groups(&groups).unwrap();
            set_thread_res_gid(gid, gid, gid).unwrap();
            set_thread_res_uid(uid, uid, uid).unwrap();
            run();
        });
    });
}

/// For each user and operation: the modes after it, from [`SET_ID_MODES`].
fn modes_after_changes(dir: &Path) -> Vec<UserCase> {
    let path = dir.join("program");
    let mode_after = |user, change: fn(&File), mode| {
        let mut options = File::options();
        let options = options.read(true).write(true).create_new(true);
        let file = options.open(&path).unwrap();
        file.write_all_at(&[1; 16_384], 0).unwrap();
        let (uid, gid) = (Uid::from_raw(OWNER_UID), Gid::from_raw(OWNER_GID));
        fchown(&file, Some(uid), Some(gid)).unwrap();
        file.set_permissions(PermissionsExt::from_mode(mode))
            .unwrap();
        as_user(user, || change(&file));
        fs::remove_file(&path).unwrap();
        file.metadata().unwrap().mode() & 0o7777
    };
    let cases = USERS.into_iter().flat_map(|user| {
        USER_CHANGES.map(|(name, change)| {
            let modes = SET_ID_MODES.map(|mode| mode_after(user, change, mode));
            (user.0, name, modes.to_vec())
        })
    });
    cases.collect()
}

#[test]
fn changes_clear_setid_bits_as_elsewhere() {
    let Some(cluster) = mounted::cluster(&[64, 64], "50M") else {
        return;
    };
    let reference = Pools::Memory.dir();
    let expected = modes_after_changes(reference.path());
    let of = |user, change| {
        let found = expected.iter().find(|it| (it.0, it.1) == (user, change));
        found.unwrap().2.clone()
    };
    assert_eq!(of("outsider", "punch")[0], 0o666);
    assert_eq!(of("member by another group", "overwrite")[0], 0o2666);
    assert_eq!(of("owner outside the group", "change the group")[2], 0o666);
    assert_eq!(of("root", "cut"), SET_ID_MODES);
    for fuse in ["classic", "auto"] {
        let mount = TestMount::with_fuse(&cluster, "files", "auto", fuse);
        assert_eq!(modes_after_changes(&mount.dir), expected);
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
