//! Permissions of callers, compared with a file system of this machine's kernel. The test needs root, and a temporary
//! directory with ACLs.

#[path = "../../brick/tests/support/skip.rs"]
mod skip;

use crate::support;
use bytes::Bytes;
use pagemesh_fs::{
    AccessMask, Acl, AclEntry, AclKind, AclTag, AttrChanges, Caller, CreateKind, CreateMode,
    Credentials, FileId, Fs, FsError, Ino, IoChannel, SetAttributes, SetTime, Time,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rustix::fs::{
    Access, AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, XattrFlags,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::memory::MemorySpace;
use support::new_fs;
use support::server::{NOTHING, SIZE};

const CASES: u32 = 2000;

/// Owner, permissions and access ACL of an inode.
#[derive(Clone, Debug)]
struct Spec {
    uid: u32,
    gid: u32,
    mode: u16,
    access: Option<Acl>,
    default: Option<Acl>,
}

#[derive(Clone, Debug)]
struct User {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

#[derive(Clone, Debug)]
enum Op {
    /// 4 read, 2 write, 1 execute.
    Access(u32),
    Write,
    Truncate,
    Chmod(u16),
    Chown(Option<u32>, Option<u32>),
    TouchNow,
    SetTimes,
    SetAcl(Acl),
    Remove,
    Rename,
    Create(u16),
    MakeDirectory(u16),
}

/// A directory with a file, another directory with a file or without, and an operation of a user.
#[derive(Clone, Debug)]
struct Case {
    directory: Spec,
    file: Spec,
    other: Spec,
    target: Option<Spec>,
    user: User,
    op: Op,
}

fn id() -> impl Strategy<Value = u32> {
    prop_oneof![1 => Just(0u32), 6 => 1u32..5]
}

fn rights() -> impl Strategy<Value = u16> {
    prop_oneof![3 => Just(7u16), 2 => 0u16..8]
}

fn acl() -> impl Strategy<Value = Acl> {
    let named = prop::collection::vec((any::<bool>(), 1u32..5, rights()), 0..3);
    (rights(), rights(), rights(), rights(), named).prop_map(
        |(owner, group, other, mask, named)| {
            let mut entries = vec![
                (AclTag::UserObj, owner),
                (AclTag::GroupObj, group),
                (AclTag::Other, other),
            ];
            if !named.is_empty() {
                entries.push((AclTag::Mask, mask));
            }
            entries.extend(
                named
                    .into_iter()
                    .map(|(is_user, id, rights)| match is_user {
                        true => (AclTag::User(id), rights),
                        false => (AclTag::Group(id), rights),
                    }),
            );
            entries.sort_by_key(|(tag, _)| *tag);
            let entry = |(tag, rights)| AclEntry { tag, rights };
            Acl::new(entries.into_iter().map(entry).collect()).unwrap()
        },
    )
}

fn mode() -> impl Strategy<Value = u16> {
    (0u16..8, rights(), rights(), rights())
        .prop_map(|(special, owner, group, other)| special << 9 | owner << 6 | group << 3 | other)
}

fn spec(is_directory: bool) -> impl Strategy<Value = Spec> {
    let default = prop::option::of(acl()).prop_map(move |acl| acl.filter(|_| is_directory));
    let all = (id(), id(), mode(), prop::option::of(acl()), default);
    all.prop_map(|(uid, gid, mode, access, default)| Spec {
        uid,
        gid,
        mode,
        access,
        default,
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (1u32..8).prop_map(Op::Access),
        Just(Op::Write),
        Just(Op::Truncate),
        mode().prop_map(Op::Chmod),
        (id(), prop::option::of(id())).prop_map(|(uid, gid)| Op::Chown(Some(uid), gid)),
        id().prop_map(|gid| Op::Chown(None, Some(gid))),
        Just(Op::TouchNow),
        Just(Op::SetTimes),
        acl().prop_map(Op::SetAcl),
        Just(Op::Remove),
        Just(Op::Rename),
        mode().prop_map(Op::Create),
        // mkdir(2) gives no set-id bits, and NFS does.
        mode().prop_map(|mode| Op::MakeDirectory(mode & 0o1777)),
    ]
}

fn case() -> impl Strategy<Value = Case> {
    let user = (id(), id(), prop::collection::vec(1u32..5, 0..3));
    let user = user.prop_map(|(uid, gid, groups)| User { uid, gid, groups });
    let target = prop::option::of(spec(false));
    let all = (spec(true), spec(false), spec(true), target, user, op());
    all.prop_map(|(directory, file, other, target, user, op)| Case {
        directory,
        file,
        other,
        target,
        user,
        op,
    })
}

/// An inode after a case: mode, owner, group, ACLs.
type PermissionState = (u16, u32, u32, Option<Acl>, Option<Acl>);

/// The outcome of a case, and the inodes that it may change.
type Outcome = (Result<(), Errno>, Vec<Option<PermissionState>>);

/// The names of inodes that a case may change or make.
const LEFT: [&str; 5] = ["d/file", "d/new", "o/target", "d", "o"];

fn kernel_set(path: &Path, spec: &Spec) {
    let (uid, gid) = (Uid::from_raw(spec.uid), Gid::from_raw(spec.gid));
    rustix::fs::chown(path, Some(uid), Some(gid)).unwrap();
    rustix::fs::chmod(path, Mode::from_raw_mode(spec.mode.into())).unwrap();
    let acls = [
        (AclKind::Access, &spec.access),
        (AclKind::Default, &spec.default),
    ];
    for (kind, acl) in acls {
        if let Some(acl) = acl {
            kernel_set_acl(path, kind, acl).unwrap();
        }
    }
}

fn kernel_set_acl(path: &Path, kind: AclKind, acl: &Acl) -> Result<(), Errno> {
    let name = kind.attribute();
    rustix::fs::setxattr(path, name, &acl.encode(), XattrFlags::empty())
}

fn kernel_acl(path: &Path, kind: AclKind) -> Option<Acl> {
    let mut value = [0; 4096];
    let len = rustix::fs::getxattr(path, kind.attribute(), &mut value[..]).ok()?;
    Acl::decode(&value[..len]).unwrap()
}

fn kernel_left(path: &Path) -> Option<PermissionState> {
    let stat = rustix::fs::stat(path).ok()?;
    let acls = [AclKind::Access, AclKind::Default].map(|kind| kernel_acl(path, kind));
    let [access, default] = acls;
    Some((
        (stat.st_mode & 0o7777) as u16,
        stat.st_uid,
        stat.st_gid,
        access,
        default,
    ))
}

/// The operation by the kernel. The thread has the rights of the user.
fn kernel_op(at: &Path, op: &Op) -> Result<(), Errno> {
    let file = at.join("d/file");
    let new = at.join("d/new");
    let bits = |mode: u16| Mode::from_raw_mode(mode.into());
    let times = |time: Timespec| Timestamps {
        last_access: time,
        last_modification: time,
    };
    match op {
        Op::Access(wanted) => {
            let mut access = Access::empty();
            access.set(Access::READ_OK, wanted & 4 != 0);
            access.set(Access::WRITE_OK, wanted & 2 != 0);
            access.set(Access::EXEC_OK, wanted & 1 != 0);
            rustix::fs::accessat(CWD, file, access, AtFlags::EACCESS)
        }
        Op::Write => {
            let file = rustix::fs::open(file, OFlags::WRONLY, Mode::empty())?;
            rustix::io::write(file, b"x").map(drop)
        }
        Op::Truncate => {
            let file = rustix::fs::open(file, OFlags::WRONLY, Mode::empty())?;
            rustix::fs::ftruncate(file, 100)
        }
        Op::Chmod(mode) => rustix::fs::chmod(file, bits(*mode)),
        Op::Chown(uid, gid) => {
            rustix::fs::chown(file, uid.map(Uid::from_raw), gid.map(Gid::from_raw))
        }
        Op::TouchNow => {
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_NOW,
            };
            rustix::fs::utimensat(CWD, file, &times(now), AtFlags::empty())
        }
        Op::SetTimes => {
            let time = Timespec {
                tv_sec: 5,
                tv_nsec: 6,
            };
            rustix::fs::utimensat(CWD, file, &times(time), AtFlags::empty())
        }
        Op::SetAcl(acl) => kernel_set_acl(&file, AclKind::Access, acl),
        Op::Remove => rustix::fs::unlink(file),
        Op::Rename => rustix::fs::rename(file, at.join("o/target")),
        Op::Create(mode) => rustix::fs::mknodat(CWD, new, FileType::RegularFile, bits(*mode), 0),
        Op::MakeDirectory(mode) => rustix::fs::mkdir(new, bits(*mode)),
    }
}

fn run_in_kernel(at: &Path, case: &Case) -> Outcome {
    rustix::fs::mkdir(at, Mode::from_raw_mode(0o755)).unwrap();
    for (name, spec) in [("d", &case.directory), ("o", &case.other)] {
        std::fs::create_dir(at.join(name)).unwrap();
        // Files below must not inherit the ACL yet.
        let made = [
            ("d", "file", Some(&case.file)),
            ("o", "target", case.target.as_ref()),
        ];
        for (_, child, of_child) in made.into_iter().filter(|(of, ..)| *of == name) {
            if let Some(of_child) = of_child {
                let path = at.join(name).join(child);
                std::fs::write(&path, b"content").unwrap();
                kernel_set(&path, of_child);
            }
        }
        kernel_set(&at.join(name), spec);
    }
    let result = std::thread::scope(|scope| {
        let user = &case.user;
        let run = scope.spawn(move || {
            let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
            set_thread_groups(&groups).unwrap();
            let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
            set_thread_res_gid(gid, gid, gid).unwrap();
            set_thread_res_uid(uid, uid, uid).unwrap();
            kernel_op(at, &case.op)
        });
        run.join().unwrap()
    });
    (
        result,
        LEFT.map(|name| kernel_left(&at.join(name))).to_vec(),
    )
}

/// The file system under test, and a directory for each case.
struct Ours {
    fs: Arc<Fs>,
    channel: IoChannel,
}

fn errno<T>(result: Result<T, FsError>) -> Result<(), Errno> {
    result.map(drop).map_err(|error| error.errno())
}

impl Ours {
    fn make(&self, parent: Ino, name: &str, make: CreateKind<'_>, spec: &Spec) -> FileId {
        let owner = Credentials {
            uid: spec.uid,
            gid: spec.gid,
        };
        let made = self.fs.create(parent, name.as_bytes(), make, 0o700, owner);
        let id = made.unwrap().file_id();
        self.fs.forget(id.ino, 1);
        id
    }

    fn set(&self, id: FileId, spec: &Spec) {
        let changes = AttrChanges {
            mode: Some(spec.mode),
            ..AttrChanges::default()
        };
        self.fs.set_attr(id.ino, changes).unwrap();
        let acls = [
            (AclKind::Access, &spec.access),
            (AclKind::Default, &spec.default),
        ];
        for (kind, acl) in acls.into_iter().filter(|(_, acl)| acl.is_some()) {
            self.fs.set_acl(id.ino, kind, acl.as_ref(), false).unwrap();
        }
    }

    fn left(&self, at: Ino, path: &str) -> Option<PermissionState> {
        let mut ino = at;
        for name in path.split('/') {
            ino = self.fs.lookup(ino, name.as_bytes()).ok()?.ino;
            self.fs.forget(ino, 1);
        }
        let attr = self.fs.attr(ino).unwrap();
        let acl = |kind| self.fs.acl(ino, kind).unwrap();
        let (access, default) = (acl(AclKind::Access), acl(AclKind::Default));
        Some((attr.mode, attr.uid, attr.gid, access, default))
    }

    fn run(&mut self, number: u32, case: &Case) -> Outcome {
        let root = Spec {
            uid: 0,
            gid: 0,
            mode: 0o755,
            access: None,
            default: None,
        };
        let name = number.to_string();
        let at = self.make(Ino::ROOT, &name, CreateKind::Directory, &root);
        let directory = self.make(at.ino, "d", CreateKind::Directory, &case.directory);
        let other = self.make(at.ino, "o", CreateKind::Directory, &case.other);
        let file = self.make(directory.ino, "file", CreateKind::File, &case.file);
        let content = Bytes::from_static(b"content");
        let (fs, channel) = (Arc::clone(&self.fs), &mut self.channel);
        fs.write(channel, file.ino, Some(0), &content, false)
            .unwrap();
        self.set(file, &case.file);
        if let Some(target) = &case.target {
            let id = self.make(other.ino, "target", CreateKind::File, target);
            self.set(id, target);
        }
        self.set(directory, &case.directory);
        self.set(other, &case.other);
        let result = self.op((directory, other, file), case);
        let left = LEFT.map(|path| self.left(at.ino, path));
        (result, left.to_vec())
    }

    /// The operation, after a lookup of the file.
    fn op(
        &mut self,
        (directory, other, file): (FileId, FileId, FileId),
        case: &Case,
    ) -> Result<(), Errno> {
        let User { uid, gid, groups } = &case.user;
        let caller = &Caller::new(*uid, *gid, groups).unwrap();
        let fs = Arc::clone(&self.fs);
        match &case.op {
            Op::Remove => errno(fs.remove_at(directory, b"file", caller).result),
            Op::Rename => {
                let (from, to) = ((directory, &b"file"[..]), (other, &b"target"[..]));
                errno(fs.rename_at(from, to, caller).result)
            }
            Op::Create(mode) => {
                let (how, attrs) = (CreateMode::Guarded, bits(*mode));
                errno(fs.create_at(directory, b"new", how, &attrs, caller).result)
            }
            Op::MakeDirectory(mode) => {
                let attrs = bits(*mode);
                errno(
                    fs.make_directory_at(directory, b"new", &attrs, caller)
                        .result,
                )
            }
            _ => {
                errno(fs.lookup_at(directory, b"file", caller).result)?;
                self.file_op(file, case, caller)
            }
        }
    }

    fn file_op(&mut self, file: FileId, case: &Case, caller: &Caller) -> Result<(), Errno> {
        let (fs, channel) = (&self.fs, &mut self.channel);
        let wanted = match &case.op {
            Op::Access(wanted) => {
                let mask = access_mask(*wanted);
                let granted = fs.access_mask(file, caller, mask).unwrap().0;
                return match granted == mask {
                    true => Ok(()),
                    false => Err(Errno::ACCESS),
                };
            }
            Op::Write => {
                let pin = fs.pin(file).unwrap();
                let data = Bytes::from_static(b"x");
                let written = fs.write_at(&pin, 0, &data, false, caller);
                pin.release(channel);
                return errno(written.result);
            }
            Op::SetAcl(acl) => {
                let change = [(AclKind::Access, Some(acl.clone()))];
                return errno(fs.set_acls(file, &change, caller).result);
            }
            Op::Truncate => SetAttributes {
                size: Some(100),
                ..NOTHING
            },
            Op::Chmod(mode) => bits(*mode),
            Op::Chown(uid, gid) => SetAttributes {
                uid: *uid,
                gid: *gid,
                ..NOTHING
            },
            Op::TouchNow => times(SetTime::Now),
            Op::SetTimes => times(SetTime::At(Time { sec: 5, nsec: 6 })),
            Op::Remove | Op::Rename | Op::Create(_) | Op::MakeDirectory(_) => {
                unreachable!("{case:?}")
            }
        };
        errno(fs.set_attributes(file, &wanted, None, caller).result)
    }
}

fn bits(mode: u16) -> SetAttributes {
    SetAttributes {
        mode: Some(mode),
        ..NOTHING
    }
}

fn times(time: SetTime) -> SetAttributes {
    SetAttributes {
        atime: Some(time),
        mtime: Some(time),
        ..NOTHING
    }
}

fn access_mask(wanted: u32) -> AccessMask {
    let rights = [
        (4, AccessMask::READ),
        (2, AccessMask::MODIFY),
        (1, AccessMask::EXECUTE),
    ];
    let rights = rights.iter().filter(|(bit, _)| wanted & bit != 0);
    AccessMask(rights.fold(0, |mask, (_, right)| mask | right.0))
}

/// NFS servers let the owner write always, as the module of the rules says.
fn is_deviation(case: &Case, kernel: &Outcome) -> bool {
    let writes = matches!(case.op, Op::Write | Op::Truncate);
    writes && case.user.uid == case.file.uid && kernel.0 == Err(Errno::ACCESS)
}

fn temporary_directory() -> Option<tempfile::TempDir> {
    if !rustix::process::geteuid().is_root() {
        skip::skip("needs root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    if kernel_set_acl(dir.path(), AclKind::Default, &Acl::of_mode(0o700)).is_err() {
        skip::skip("needs a temporary directory with ACLs");
        return None;
    }
    rustix::fs::removexattr(dir.path(), AclKind::Default.attribute()).unwrap();
    rustix::fs::chmod(dir.path(), Mode::from_raw_mode(0o755)).unwrap();
    Some(dir)
}

#[test]
fn callers_have_the_rights_that_the_kernel_gives() {
    let Some(dir) = temporary_directory() else {
        return;
    };
    rustix::process::umask(Mode::empty());
    let memory = MemorySpace::new(SIZE);
    let (fs, channel) = new_fs(&memory);
    let fs = Arc::new(fs);
    let ours = std::cell::RefCell::new((0, Ours { fs, channel }));
    let config = Config {
        cases: CASES,
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    };
    let random = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, random);
    let result = runner.run(&case(), |case| {
        let (number, ours) = &mut *ours.borrow_mut();
        *number += 1;
        let at: PathBuf = dir.path().join(number.to_string());
        let kernel = run_in_kernel(&at, &case);
        let found = ours.run(*number, &case);
        if !is_deviation(&case, &kernel) {
            prop_assert_eq!(found, kernel);
        }
        std::fs::remove_dir_all(&at).unwrap();
        Ok(())
    });
    result.unwrap();
}
