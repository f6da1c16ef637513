//! A file system that does nothing: it takes every write and forgets it. What a
//! write to it takes is what the kernel and the FUSE library take of any.

use crate::attr::KEPT;
use crate::serve::{FIXED, OPENED, negotiate};
use crate::{MountError, MountOptions, Unmounter, config};
use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

const ROOT: u64 = 1;

/// The mount of a file system that does nothing.
pub struct NullMount(Session<Null>);

/// Mounts it as [`crate::mount`] does, with the same options.
///
/// # Errors
/// When the kernel refuses.
pub fn mount_null(dir: &Path, options: &MountOptions) -> Result<NullMount, MountError> {
    let session = Session::new(Null::default(), dir, &config(options));
    session.map(NullMount).map_err(|cause| MountError::Refused {
        dir: dir.to_owned(),
        cause,
    })
}

impl NullMount {
    /// Unmounts from another thread.
    pub fn unmounter(&mut self) -> Unmounter {
        Unmounter(self.0.unmount_callable())
    }

    /// Serves until it is unmounted.
    ///
    /// # Errors
    /// When the device fails.
    pub fn serve(self) -> io::Result<()> {
        self.0.run()
    }
}

#[derive(Default)]
struct Known {
    /// By directory and name.
    names: HashMap<(u64, OsString), u64>,
    files: HashMap<u64, FileAttr>,
}

#[derive(Default)]
struct Null(Mutex<Known>);

impl Null {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attr(&self, number: u64) -> Option<FileAttr> {
        match number {
            ROOT => Some(attr(ROOT, FileType::Directory)),
            _ => self.known().files.get(&number).copied(),
        }
    }

    fn tell(&self, number: INodeNo, reply: ReplyAttr) {
        match self.attr(number.0) {
            Some(found) => reply.attr(&KEPT, &found),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn make(&self, parent: INodeNo, name: &OsStr, kind: FileType) -> FileAttr {
        let mut known = self.known();
        let number = ROOT + 1 + known.files.len() as u64;
        let made = attr(number, kind);
        known.names.insert((parent.0, name.to_owned()), number);
        known.files.insert(number, made);
        made
    }
}

fn attr(number: u64, kind: FileType) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: 0o700,
        nlink: 1,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Null {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        negotiate(config)
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let number = self
            .known()
            .names
            .get(&(parent.0, name.to_owned()))
            .copied();
        match number.and_then(|number| self.attr(number)) {
            Some(found) => reply.entry(&KEPT, &found, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.tell(number, reply);
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if let Some(found) = self.known().files.get_mut(&number.0) {
            found.size = size.unwrap_or(found.size);
        }
        self.tell(number, reply);
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let made = self.make(parent, name, FileType::Directory);
        reply.entry(&KEPT, &made, Generation(0));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        // Its number stays taken: another file is never mistaken for it.
        let was_there = self.known().names.remove(&(parent.0, name.to_owned()));
        match was_there {
            Some(_) => reply.ok(),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FIXED, OPENED);
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let made = self.make(parent, name, FileType::RegularFile);
        reply.created(&KEPT, &made, Generation(0), FIXED, OPENED);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: i32,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EOPNOTSUPP);
    }
}
