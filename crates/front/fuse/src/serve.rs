//! Each operation of the kernel as calls of the file system.
//!
//! Nothing is remembered per open file: what matters of it (append, sync) comes
//! with every write.

use crate::attr::{KEPT, file_attr, file_type, ino, kept, time};
use crate::{Room, Trouble};
use bytes::Bytes;
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{
    Allocate, Attr, Caller, Changes, Fs, FsError, Ino, Kind, Listed, Make, NAME_MAX, Rename, Seek,
    SetXattr,
};
use rustix::fs::{FallocateFlags, OFlags};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// What the kernel sends at once, at most.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Bytes of one copy; whoever copies more asks again.
const COPIED_BYTES_MAX: u64 = 64 << 20;
/// Entries looked up for one answer, at most: more do not fit.
const LISTED_MAX: usize = 1024;
/// Requests in the background, such as asynchronous I/O.
const BACKGROUND_MAX: u16 = 64;
/// Access control lists, which the kernel would have to enforce.
const ACLS: &[u8] = b"system.posix_acl_";
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;
const XATTR_CREATE: i32 = 1;
const XATTR_REPLACE: i32 = 2;
pub(crate) const FIXED: FileHandle = FileHandle(0);
pub(crate) const OPENED: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

pub(crate) struct Served {
    fs: Arc<Fs>,
    trouble: Trouble,
    room: Room,
}

fn caller(request: &Request) -> Caller {
    Caller {
        uid: request.uid(),
        gid: request.gid(),
    }
}

fn generation(attr: &Attr) -> Generation {
    Generation(attr.generation.into())
}

fn has(flags: i32, flag: OFlags) -> bool {
    flags.cast_unsigned() & flag.bits() == flag.bits()
}

impl Served {
    pub(crate) fn new(fs: Arc<Fs>, trouble: Trouble, room: Room) -> Served {
        Served { fs, trouble, room }
    }

    fn errno(&self, error: &FsError) -> Errno {
        match error {
            FsError::Posix(_) | FsError::Space(SpaceError::NoSpace(_)) => {}
            FsError::Damaged { .. } => tracing::error!(%error, "a request failed"),
            FsError::Space(_) | FsError::Stopped(_) => (self.trouble)(error),
        }
        Errno::from_i32(error.errno().raw_os_error())
    }

    fn end(&self, result: pagemesh_fs::Result<()>, reply: ReplyEmpty) {
        match result {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn entry(&self, result: pagemesh_fs::Result<Attr>, reply: ReplyEntry) {
        match result {
            Ok(attr) => {
                reply.entry_with_ttls(&KEPT, &kept(&attr), &file_attr(&attr), generation(&attr));
            }
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn attr(&self, result: pagemesh_fs::Result<Attr>, reply: ReplyAttr) {
        match result {
            Ok(attr) => reply.attr(&kept(&attr), &file_attr(&attr)),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn xattr(&self, result: pagemesh_fs::Result<Vec<u8>>, size: u32, reply: ReplyXattr) {
        match result {
            Err(error) => reply.error(self.errno(&error)),
            Ok(value) if size == 0 => reply.size(value.len() as u32),
            Ok(value) if value.len() > size as usize => reply.error(Errno::ERANGE),
            Ok(value) => reply.data(&value),
        }
    }

    fn made(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        make: Make<'_>,
        mode: u32,
    ) -> pagemesh_fs::Result<Attr> {
        let mode = (mode & 0o7777) as u16;
        let (parent, name) = (ino(parent), name.as_bytes());
        self.fs.create(parent, name, make, mode, caller(request))
    }

    fn set_attr(
        &self,
        request: &Request,
        ino: Ino,
        changes: Changes,
        size: Option<u64>,
    ) -> pagemesh_fs::Result<Attr> {
        if let Some(size) = size {
            if request.uid() != 0 {
                self.fs.disarm(ino)?;
            }
            let attr = self.fs.set_size(&mut *self.fs.borrow()?, ino, size)?;
            if changes == Changes::default() {
                return Ok(attr);
            }
        }
        self.fs.set_attr(ino, changes)
    }

    fn write(&self, ino: Ino, offset: u64, write: &Write<'_>) -> pagemesh_fs::Result<()> {
        if write.how.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
            self.fs.disarm(ino)?;
        }
        let is_cached = write.how.contains(WriteFlags::FUSE_WRITE_CACHE);
        // What comes from a mapping has its place, however the file was opened.
        let at = match has(write.flags, OFlags::APPEND) && !is_cached {
            true => None,
            false => Some(offset),
        };
        let is_durable = has(write.flags, OFlags::DSYNC);
        let mut port = self.fs.borrow()?;
        let data = Bytes::copy_from_slice(write.data);
        self.fs.write(&mut port, ino, at, &data, is_durable)?;
        Ok(())
    }

    fn sync(&self, ino: Ino) -> pagemesh_fs::Result<()> {
        self.fs.sync(&mut *self.fs.borrow()?, ino)
    }
}

/// Settles with the kernel what both can.
pub(crate) fn negotiate(config: &mut KernelConfig) -> io::Result<()> {
    let wanted = [
        InitFlags::FUSE_EXPORT_SUPPORT,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        InitFlags::FUSE_ASYNC_DIO,
        InitFlags::FUSE_AUTO_INVAL_DATA,
        InitFlags::FUSE_CACHE_SYMLINKS,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    ];
    for flag in wanted {
        // An older kernel does without.
        if config.add_capabilities(flag).is_err() {
            tracing::info!(?flag, "the kernel does not have it");
        }
    }
    let fits = |value: u32| io::Error::other(format!("{value} would be accepted"));
    config.set_max_write(WRITE_BYTES_MAX).map_err(fits)?;
    let set = config.set_max_background(BACKGROUND_MAX);
    set.map_err(|value| fits(value.into()))?;
    Ok(())
}

struct Write<'w> {
    data: &'w [u8],
    flags: i32,
    how: WriteFlags,
}

fn how_to_rename(flags: RenameFlags) -> Option<Rename> {
    match flags {
        RenameFlags::RENAME_NOREPLACE => Some(Rename::NoReplace),
        RenameFlags::RENAME_EXCHANGE => Some(Rename::Exchange),
        flags if flags.is_empty() => Some(Rename::Replace),
        _ => None,
    }
}

fn how_to_allocate(mode: i32) -> Option<Allocate> {
    let mode = FallocateFlags::from_bits(mode.cast_unsigned())?;
    let keep_size = mode.contains(FallocateFlags::KEEP_SIZE);
    let rest = mode - FallocateFlags::KEEP_SIZE;
    match rest {
        rest if rest.is_empty() => Some(Allocate::Reserve { keep_size }),
        FallocateFlags::PUNCH_HOLE if keep_size => Some(Allocate::Punch),
        FallocateFlags::ZERO_RANGE => Some(Allocate::Zero { keep_size }),
        _ => None,
    }
}

impl Filesystem for Served {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        negotiate(config)
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = match name.as_bytes() {
            // Asked of files, too, by who exports the mount.
            b"." => self.fs.remember(ino(parent)),
            name => self.fs.lookup(ino(parent), name),
        };
        self.entry(found, reply);
    }

    fn forget(&self, _: &Request, number: INodeNo, lookups: u64) {
        self.fs.forget(ino(number), lookups);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.attr(self.fs.attr(ino(number)), reply);
    }

    fn setattr(
        &self,
        request: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let changes = Changes {
            mode: mode.map(|mode| (mode & 0o7777) as u16),
            uid,
            gid,
            atime: atime.map(time),
            mtime: mtime.map(time),
        };
        let set = self.set_attr(request, ino(number), changes, size);
        self.attr(set, reply);
    }

    fn readlink(&self, _: &Request, number: INodeNo, reply: ReplyData) {
        match self.fs.read_link(ino(number)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let make = match Kind::of_mode(mode as u16) {
            Some(Kind::File) => Make::File,
            None | Some(Kind::Directory | Kind::Symlink) => return reply.error(Errno::EINVAL),
            Some(kind) => Make::Special(kind, device),
        };
        self.entry(self.made(request, parent, name, make, mode), reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        let made = self.made(request, parent, name, Make::Directory, mode);
        self.entry(made, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.end(self.fs.unlink(ino(parent), name.as_bytes()), reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.end(self.fs.rmdir(ino(parent), name.as_bytes()), reply);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let make = Make::Symlink(target.as_os_str().as_bytes());
        self.entry(self.made(request, parent, name, make, 0o777), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let Some(how) = how_to_rename(flags) else {
            return reply.error(Errno::EINVAL);
        };
        let from = (ino(parent), name.as_bytes());
        let to = (ino(newparent), newname.as_bytes());
        self.end(self.fs.rename(from, to, how), reply);
    }

    fn link(&self, _: &Request, number: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let linked = self.fs.link(ino(number), ino(parent), name.as_bytes());
        self.entry(linked, reply);
    }

    fn open(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.fs.open(ino(number)) {
            Ok(_) => reply.opened(FIXED, OPENED),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let made = self.made(request, parent, name, Make::File, mode);
        let opened = made.and_then(|attr| self.fs.open(attr.ino));
        match opened {
            Ok(attr) => reply.created(
                &kept(&attr),
                &file_attr(&attr),
                generation(&attr),
                FIXED,
                OPENED,
            ),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn read(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let port = self.fs.borrow();
        let read = port.and_then(|mut port| self.fs.read(&mut port, ino(number), offset, size));
        match read {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn write(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        how: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let flags = flags.0;
        let write = Write { data, flags, how };
        match Served::write(self, ino(number), offset, &write) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // Nothing is held back. The kernel does not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.fs.release(ino(number));
        reply.ok();
    }

    fn fsync(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.end(self.sync(ino(number)), reply);
    }

    fn opendir(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.fs.open(ino(number)) {
            Ok(_) => reply.opened(FIXED, FopenFlags::empty()),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn readdir(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.fs.list(ino(number), offset, |listed| {
            let name = OsStr::from_bytes(&listed.name);
            let kind = file_type(listed.kind);
            !reply.add(INodeNo(listed.ino.0), listed.cookie, kind, name)
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn readdirplus(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let mut all: Vec<Listed> = Vec::new();
        let listed = self.fs.list(ino(number), offset, |listed| {
            all.push(listed.clone());
            all.len() < LISTED_MAX
        });
        if let Err(error) = listed {
            return reply.error(self.errno(&error));
        }
        for listed in all {
            // The kernel does not count these two as looked up.
            let is_dots = listed.name == b"." || listed.name == b"..";
            let attr = match is_dots {
                true => self.fs.attr(listed.ino),
                false => self.fs.remember(listed.ino),
            };
            // It went meanwhile.
            let Ok(attr) = attr else { continue };
            let name = OsStr::from_bytes(&listed.name);
            let (number, cookie) = (INodeNo(listed.ino.0), listed.cookie);
            let ttl = kept(&attr);
            let told = file_attr(&attr);
            if reply.add(number, cookie, name, &ttl, &told, generation(&attr)) {
                if !is_dots {
                    self.fs.forget(listed.ino, 1);
                }
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.fs.release(ino(number));
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, number: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.end(self.sync(ino(number)), reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        const PAGE: u64 = PAGE_BYTES as u64;
        let usage = self.fs.usage();
        let used = usage.used_bytes / PAGE;
        let within_limit = match usage.limit_bytes {
            0 => u64::MAX,
            limit => (limit / PAGE).saturating_sub(used),
        };
        let in_pools = (self.room)().map_or(u64::MAX, |bytes| bytes / PAGE);
        let free = match within_limit.min(in_pools) {
            u64::MAX => 0,
            free => free,
        };
        let blocks = used + free;
        let files = usage.inodes + free;
        let (block, name) = (PAGE_BYTES as u32, NAME_MAX as u32);
        reply.statfs(blocks, free, free, files, free, block, name, block);
    }

    fn setxattr(
        &self,
        _: &Request,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let name = name.as_bytes();
        if name.starts_with(ACLS) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let how = match flags {
            0 => SetXattr::Always,
            XATTR_CREATE => SetXattr::Create,
            XATTR_REPLACE => SetXattr::Replace,
            _ => return reply.error(Errno::EINVAL),
        };
        self.end(self.fs.set_xattr(ino(number), name, value, how), reply);
    }

    fn getxattr(&self, _: &Request, number: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name.as_bytes();
        if name.starts_with(ACLS) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        self.xattr(self.fs.xattr(ino(number), name), size, reply);
    }

    fn listxattr(&self, _: &Request, number: INodeNo, size: u32, reply: ReplyXattr) {
        let names = self.fs.xattr_names(ino(number)).map(|names| {
            let ended = names.into_iter().flat_map(|mut name| {
                name.push(0);
                name
            });
            ended.collect()
        });
        self.xattr(names, size, reply);
    }

    fn removexattr(&self, _: &Request, number: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes();
        if name.starts_with(ACLS) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        self.end(self.fs.remove_xattr(ino(number), name), reply);
    }

    fn fallocate(
        &self,
        request: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let Some(how) = how_to_allocate(mode) else {
            return reply.error(Errno::EOPNOTSUPP);
        };
        let ino = ino(number);
        let armed = match request.uid() {
            0 => Ok(()),
            _ => self.fs.disarm(ino),
        };
        let done = armed.and_then(|()| {
            let mut port = self.fs.borrow()?;
            self.fs.allocate(&mut port, ino, how, offset, length)
        });
        self.end(done, reply);
    }

    fn lseek(
        &self,
        _: &Request,
        number: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let what = match whence {
            SEEK_DATA => Seek::Data,
            SEEK_HOLE => Seek::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else {
            return reply.error(Errno::ENXIO);
        };
        let port = self.fs.borrow();
        let found = port.and_then(|mut port| self.fs.seek(&mut port, ino(number), offset, what));
        match found {
            Ok(found) => reply.offset(found.cast_signed()),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        _: FileHandle,
        source: u64,
        to: INodeNo,
        _: FileHandle,
        target: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let len = len.min(COPIED_BYTES_MAX);
        let (from, to) = ((ino(from), source), (ino(to), target));
        let armed = match request.uid() {
            0 => Ok(()),
            _ => self.fs.disarm(to.0),
        };
        let copied = armed.and_then(|()| {
            let mut port = self.fs.borrow()?;
            self.fs.copy(&mut port, from, to, len)
        });
        match copied {
            Ok(copied) => reply.written(copied as u32),
            Err(error) => reply.error(self.errno(&error)),
        }
    }
}
