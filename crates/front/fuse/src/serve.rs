//! Maps each operation of the kernel to calls of the file system.
//!
//! The server remembers little of an open file ([`crate::open_files`]): every write carries the
//! flags that it needs (append, sync).

use crate::abi;
use crate::attr::{dirent_type, resolve_time};
use crate::batching::{AsyncWriter, BeginResult};
use crate::events::{self, EventThread};
use crate::names;
use crate::open_files::{OpenFile, OpenFiles};
use crate::reply::{self, FuseReply, Listing};
use crate::request::{ReadRange, Request, SetAttr};
use crate::request_handler::RequestHandler;
use crate::{Caching, ConnectHook, ErrorHook, FreeSpaceFn};
use bytes::Bytes;
use pagemesh_base::mount_connection::CONNECT_IOCTL;
use pagemesh_base::proc_maps::WILL_MAP_IOCTL;
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{
    AllocateMode, Attr, AttrChanges, CreateKind, Credentials, DirEntry, Fs, FsError, Ino,
    InodeKind, NAME_MAX, RenameMode, Result, SeekTarget, SetXattrMode, WriteQueue,
};
use rustix::fs::{FallocateFlags, OFlags, RenameFlags};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};

/// Bytes of one copy; callers with more ask again.
const COPIED_BYTES_MAX: u64 = 64 << 20;
/// Most entries that are looked up for one answer: more do not fit.
const LISTED_MAX: usize = 1024;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;
const PERMISSIONS: u32 = 0o7777;

pub(crate) struct FsHandler {
    fs: Arc<Fs>,
    error_hook: ErrorHook,
    free_space: FreeSpaceFn,
    connect_hook: Arc<OnceLock<ConnectHook>>,
    pub(crate) open_files: OpenFiles,
    pub(crate) caching: Caching,
    event_thread: Arc<EventThread>,
}

fn refuse<T>(errno: Errno) -> Result<T> {
    Err(errno.into())
}

fn has_flag(flags: u32, flag: OFlags) -> bool {
    flags & flag.bits() == flag.bits()
}

fn entry(attr: &Attr) -> FuseReply {
    FuseReply::new(&reply::entry(attr))
}

fn attr(attr: &Attr) -> FuseReply {
    FuseReply::new(&reply::attr(attr))
}

fn written(bytes: usize) -> FuseReply {
    FuseReply::new(&abi::WriteOut {
        size: bytes as u32,
        unused: 0,
    })
}

/// The value of an attribute, or its length.
fn xattr(value: Vec<u8>, size: u32) -> Result<FuseReply> {
    match size {
        0 => Ok(FuseReply::new(&abi::GetXattrOut {
            size: value.len() as u32,
            unused: 0,
        })),
        size if value.len() > size as usize => refuse(Errno::RANGE),
        _ => Ok(FuseReply::Data(value)),
    }
}

/// Returns the mode, and whether the old name gets a whiteout, too.
fn rename_mode(flags: u32) -> Option<(RenameMode, bool)> {
    let flags = RenameFlags::from_bits(flags)?;
    let leaves_whiteout = flags.contains(RenameFlags::WHITEOUT);
    let how = match flags - RenameFlags::WHITEOUT {
        RenameFlags::NOREPLACE => Some(RenameMode::NoReplace),
        RenameFlags::EXCHANGE => Some(RenameMode::Exchange),
        flags if flags.is_empty() => Some(RenameMode::Replace),
        _ => None,
    };
    Some((how?, leaves_whiteout))
}

fn allocate_mode(mode: u32) -> Option<AllocateMode> {
    let mode = FallocateFlags::from_bits(mode)?;
    let keep_size = mode.contains(FallocateFlags::KEEP_SIZE);
    let rest = mode - FallocateFlags::KEEP_SIZE;
    match rest {
        rest if rest.is_empty() => Some(AllocateMode::Reserve { keep_size }),
        FallocateFlags::PUNCH_HOLE if keep_size => Some(AllocateMode::Punch),
        FallocateFlags::ZERO_RANGE => Some(AllocateMode::Zero { keep_size }),
        _ => None,
    }
}

/// One request: the caller, and the inode.
pub(crate) struct RequestContext<'a> {
    pub(crate) handler: &'a FsHandler,
    pub(crate) fs: &'a Fs,
    pub(crate) ino: Ino,
    caller: Credentials,
    /// The caller's thread, by its number in the process namespace of the mounting process.
    pub(crate) thread: u32,
}

impl FsHandler {
    pub(crate) fn new(
        fs: Arc<Fs>,
        error_hook: ErrorHook,
        free_space: FreeSpaceFn,
        connect: Arc<OnceLock<ConnectHook>>,
        caching: Caching,
        events: Arc<EventThread>,
    ) -> FsHandler {
        FsHandler {
            fs,
            error_hook,
            free_space,
            connect_hook: connect,
            open_files: OpenFiles::default(),
            caching,
            event_thread: events,
        }
    }

    fn errno(&self, error: &FsError) -> Errno {
        match error {
            FsError::Posix(_) | FsError::ReadOnly(_) | FsError::Space(SpaceError::NoSpace(_)) => {}
            FsError::Damaged { .. } => tracing::error!(%error, "a request failed"),
            FsError::Space(_) | FsError::Stopped(_) => (self.error_hook)(error),
        }
        error.errno()
    }
}

/// Writes that one thread has begun.
struct QueuedWrites<'s> {
    served: &'s FsHandler,
    /// Present while there are such writes.
    queue: Option<WriteQueue<'s>>,
}

impl AsyncWriter for QueuedWrites<'_> {
    fn begin(&mut self, header: &abi::InHeader, request: &Request<'_>) -> BeginResult {
        if let Request::Fsync { file } = request {
            return self.skip_redundant_sync(Ino(header.node), *file);
        }
        let Request::Write {
            file,
            offset,
            data,
            flags,
            how,
        } = request
        else {
            return BeginResult::NotStarted;
        };
        let Some(at) = write_offset(*offset, *flags) else {
            return BeginResult::NotStarted;
        };
        if how & (abi::WRITE_KILL_SUIDGID | abi::WRITE_CACHE) != 0 {
            return BeginResult::NotStarted;
        }
        // The kernel drops its pages after such a write, and this thread must not wait for that.
        let is_past_cache = how & abi::WRITE_LOCK_OWNER != 0;
        if is_past_cache && self.served.fs.has_cached_open(Ino(header.node)) {
            return BeginResult::NotStarted;
        }
        if !is_past_cache {
            self.served.fs.record_kernel_pages(Ino(header.node));
        }
        // A thread that serves the write synchronously may wait for a channel, or open one.
        let Some(pipe) = self
            .queue
            .take()
            .or_else(|| self.served.fs.try_write_queue())
        else {
            return BeginResult::NotStarted;
        };
        let pipe = self.queue.insert(pipe);
        let (ino, is_durable) = (Ino(header.node), has_flag(*flags, OFlags::DSYNC));
        let fs = &self.served.fs;
        let begun = match fs.begin_write(pipe, header.unique, ino, at, data, is_durable) {
            Ok(true) => {
                // The kernel sends a sync after the answer.
                self.served.open_files.expect_sync(*file, *how);
                BeginResult::Pending
            }
            Ok(false) => BeginResult::NotStarted,
            Err(error) => BeginResult::Complete(FuseReply::Error(self.served.errno(&error))),
        };
        self.release_idle_queue();
        begun
    }

    fn reap(&mut self, tell: &mut dyn FnMut(u64, FuseReply)) {
        let served = self.served;
        if let Some(pipe) = &mut self.queue {
            pipe.reap(|unique, result| {
                let answer = match result {
                    Ok(bytes) => written(bytes),
                    Err(error) => FuseReply::Error(served.errno(&error)),
                };
                tell(unique, answer);
            });
        }
        self.release_idle_queue();
    }

    fn len(&self) -> usize {
        self.queue.as_ref().map_or(0, WriteQueue::len)
    }

    fn wait(&mut self, other: Option<RawFd>) {
        if let Some(pipe) = &mut self.queue {
            pipe.wait(other);
        }
    }
}

impl QueuedWrites<'_> {
    /// Answers the sync after a durable write at once, if it has nothing to do.
    fn skip_redundant_sync(&self, ino: Ino, file: u64) -> BeginResult {
        let opened = self.served.open_files.get(file);
        let is_done = |opened: &OpenFile| {
            opened.expects_sync() && self.served.fs.has_nothing_to_sync(ino, &opened.lost_writes)
        };
        match opened.filter(|opened| is_done(opened)) {
            Some(opened) if opened.take_expected_sync() => BeginResult::Complete(FuseReply::DONE),
            _ => BeginResult::NotStarted,
        }
    }

    /// Releases an idle channel, so that it takes part in the volume's other work meanwhile.
    fn release_idle_queue(&mut self) {
        if self.len() == 0 {
            self.queue = None;
        }
    }
}

/// The offset of a write; none: to the end.
fn write_offset(offset: u64, flags: u32) -> Option<u64> {
    (!has_flag(flags, OFlags::APPEND)).then_some(offset)
}

impl RequestHandler for FsHandler {
    fn async_writer(&self) -> Option<Box<dyn AsyncWriter + '_>> {
        Some(Box::new(QueuedWrites {
            served: self,
            queue: None,
        }))
    }

    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> FuseReply {
        let asked = RequestContext {
            handler: self,
            fs: &self.fs,
            ino: Ino(header.node),
            caller: Credentials {
                uid: header.uid,
                gid: header.gid,
            },
            thread: header.pid,
        };
        let answer = asked.dispatch(request);
        answer.unwrap_or_else(|error| FuseReply::Error(self.errno(&error)))
    }
}

impl RequestContext<'_> {
    fn dispatch(&self, request: Request<'_>) -> Result<FuseReply> {
        match request {
            Request::Write {
                file,
                offset,
                data,
                flags,
                how,
            } => self.write(file, offset, &data, flags, how),
            Request::Read { file, span, how } => {
                if how & abi::READ_LOCK_OWNER == 0 {
                    self.before_cached_request(file)?;
                }
                let mut channel = self.fs.borrow_channel()?;
                let bytes = self
                    .fs
                    .read(&mut channel, self.ino, span.offset, span.size)?;
                Ok(FuseReply::Data(bytes))
            }
            Request::Lookup(name) => Ok(entry(&match name {
                // A server that exports the mount asks this of files, too.
                b"." => self.fs.lookup_ino(self.ino),
                name => self.fs.lookup(self.ino, name),
            }?)),
            Request::Forget(lookups) => {
                self.fs.forget(self.ino, lookups);
                Ok(FuseReply::DONE)
            }
            Request::ForgetAll(all) => {
                for one in all {
                    self.fs.forget(Ino(one.node), one.lookups);
                }
                Ok(FuseReply::DONE)
            }
            Request::GetAttr => Ok(attr(&self.fs.attr(self.ino)?)),
            Request::Statx => Ok(reply::statx(&self.fs.attr(self.ino)?)),
            Request::SetAttr(_) if self.handler.event_thread.is_event_thread(self.thread) => {
                let attr = events::attr_with_timeout(self.fs, self.ino)?;
                Ok(FuseReply::new(&reply::uncached_attr(&attr)))
            }
            Request::SetAttr(wished) => {
                let attr = self.set_attr(&wished)?;
                Ok(match self.fs.has_direct_clients(self.ino) {
                    true => FuseReply::new(&reply::uncached_attr(&attr)),
                    false => self::attr(&attr),
                })
            }
            Request::Open { flags } => {
                self.fs.open(self.ino)?;
                let opened = self.open_file(self.ino, flags);
                let opened = opened.inspect_err(|_| self.fs.release(self.ino))?;
                Ok(FuseReply::new(&opened))
            }
            Request::OpenDir => {
                self.fs.open(self.ino)?;
                Ok(FuseReply::new(&abi::OpenOut::default()))
            }
            Request::Release { file } => {
                self.close_file(file);
                self.fs.release(self.ino);
                Ok(FuseReply::DONE)
            }
            Request::Flush => {
                self.fs.record_close(self.ino);
                Ok(FuseReply::DONE)
            }
            Request::Fsync { file } => {
                self.sync(self.ino, file)?;
                Ok(FuseReply::DONE)
            }
            Request::ReadDir(span) => self.list(span),
            Request::ReadDirPlus(span) => self.list_with_attributes(span),
            Request::Statfs => Ok(self.statfs()),
            Request::Destroy => Ok(FuseReply::DONE),
            other => self.dispatch_name_op(other),
        }
    }

    /// Operations that look up, link and create names.
    fn dispatch_name_op(&self, request: Request<'_>) -> Result<FuseReply> {
        match request {
            Request::Create { name, mode, flags } => {
                let mode = (mode & PERMISSIONS) as u16;
                let made = self.fs.create_opened(self.ino, name, mode, self.caller)?;
                self.created_reply(&made, flags)
            }
            Request::CreateUnnamed { mode, flags } => {
                let mode = (mode & PERMISSIONS) as u16;
                let made = self.fs.create_unnamed(self.ino, mode, self.caller)?;
                self.created_reply(&made, flags)
            }
            Request::Mknod { name, mode, device } => {
                let make = match InodeKind::of_mode(mode as u16) {
                    Some(InodeKind::File) => CreateKind::File,
                    None | Some(InodeKind::Directory | InodeKind::Symlink) => {
                        return refuse(Errno::INVAL);
                    }
                    Some(kind) => CreateKind::Special(kind, device),
                };
                Ok(entry(&self.make(name, make, mode)?))
            }
            Request::Mkdir { name, mode } => {
                Ok(entry(&self.make(name, CreateKind::Directory, mode)?))
            }
            Request::Symlink { name, target } => Ok(entry(&self.make(
                name,
                CreateKind::Symlink(target),
                0o777,
            )?)),
            Request::ReadLink => Ok(FuseReply::Data(self.fs.read_link(self.ino)?)),
            Request::Link { node, name } => Ok(entry(&self.fs.link(Ino(node), self.ino, name)?)),
            Request::Unlink(name) => self.fs.unlink(self.ino, name).map(|()| FuseReply::DONE),
            Request::Rmdir(name) => self.fs.rmdir(self.ino, name).map(|()| FuseReply::DONE),
            Request::Rename {
                name,
                to,
                new,
                flags,
            } => {
                let (how, leaves_whiteout) = rename_mode(flags).ok_or(Errno::INVAL)?;
                let (from, to) = ((self.ino, name), (Ino(to), new));
                match leaves_whiteout {
                    false => self.fs.rename(from, to, how)?,
                    true => self.fs.rename_with_whiteout(from, to, how, self.caller)?,
                }
                Ok(FuseReply::DONE)
            }
            other => self.dispatch_range_op(other),
        }
    }

    /// Extended attributes, and ranges of files.
    fn dispatch_range_op(&self, request: Request<'_>) -> Result<FuseReply> {
        match request {
            Request::GetXattr { name, size } => {
                let value = self.fs.xattr(self.ino, name);
                xattr(
                    value.map_err(|error| names::missing_xattr_error(name, error))?,
                    size,
                )
            }
            Request::ListXattr { size } => {
                let names = self.fs.xattr_names(self.ino)?;
                let ended = names.into_iter().flat_map(|mut name| {
                    name.push(0);
                    name
                });
                xattr(ended.collect(), size)
            }
            Request::SetXattr { name, value, flags } => {
                names::check_xattr_name(name)?;
                let how = match flags {
                    0 => SetXattrMode::Always,
                    XATTR_CREATE => SetXattrMode::Create,
                    XATTR_REPLACE => SetXattrMode::Replace,
                    _ => return refuse(Errno::INVAL),
                };
                self.fs.set_xattr(self.ino, name, value, how)?;
                Ok(FuseReply::DONE)
            }
            Request::RemoveXattr(name) => {
                let removed = self.fs.remove_xattr(self.ino, name);
                removed.map_err(|error| names::missing_xattr_error(name, error))?;
                Ok(FuseReply::DONE)
            }
            Request::Allocate {
                file,
                offset,
                length,
                mode,
            } => {
                let how = allocate_mode(mode).ok_or(Errno::OPNOTSUPP)?;
                self.clear_setid(self.ino)?;
                let mut channel = self.fs.borrow_channel()?;
                self.fs
                    .allocate(&mut channel, self.ino, how, offset, length)?;
                drop(channel);
                self.sync_if_opened_sync(self.ino, file)?;
                Ok(FuseReply::DONE)
            }
            Request::Ioctl {
                command: WILL_MAP_IOCTL,
                ..
            } => {
                self.fs.disable_direct_access(self.ino)?;
                self.fs.notify_mmapped_size(self.ino)?;
                Ok(FuseReply::new(&abi::IoctlOut::default()))
            }
            Request::Ioctl {
                command: CONNECT_IOCTL,
                argument,
            } => {
                let connect = self.handler.connect_hook.get().ok_or(Errno::NOSYS)?;
                connect(self.thread, argument)?;
                Ok(FuseReply::new(&abi::IoctlOut::default()))
            }
            // The caller gets `ENOTTY`.
            Request::Ioctl { .. } => refuse(Errno::NOSYS),
            Request::Seek { offset, whence } => {
                let what = match whence {
                    SEEK_DATA => SeekTarget::Data,
                    SEEK_HOLE => SeekTarget::Hole,
                    _ => return refuse(Errno::INVAL),
                };
                let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
                let mut channel = self.fs.borrow_channel()?;
                let found = self.fs.seek(&mut channel, self.ino, offset, what)?;
                Ok(FuseReply::new(&abi::LseekOut {
                    offset: found.cast_signed(),
                }))
            }
            Request::Copy {
                from,
                to_file,
                to_node,
                to,
                len,
            } => {
                let (from, to) = ((self.ino, from), (Ino(to_node), to));
                self.clear_setid(to.0)?;
                let mut channel = self.fs.borrow_channel()?;
                let len = len.min(COPIED_BYTES_MAX);
                let copied = self.fs.copy(&mut channel, from, to, len)?;
                drop(channel);
                self.sync_if_opened_sync(to.0, to_file)?;
                Ok(written(copied as usize))
            }
            _ => refuse(Errno::NOSYS),
        }
    }

    fn sync(&self, ino: Ino, file: u64) -> Result<()> {
        let channel = &mut *self.fs.borrow_channel()?;
        match self.handler.open_files.get(file) {
            Some(opened) if opened.take_expected_sync() => {
                self.fs
                    .sync_after_durable_write(channel, ino, &opened.lost_writes)
            }
            Some(opened) => self.fs.sync_open_file(channel, ino, &opened.lost_writes),
            // A directory, all of which is durable in any case.
            None => self.fs.sync(channel, ino),
        }
    }

    /// A change of a file that was opened with O_DSYNC or O_SYNC is durable when it returns.
    fn sync_if_opened_sync(&self, ino: Ino, file: u64) -> Result<()> {
        match OpenFiles::is_synced(file) {
            true => self.sync(ino, file),
            false => Ok(()),
        }
    }

    fn make(&self, name: &[u8], make: CreateKind<'_>, mode: u32) -> Result<Attr> {
        let mode = (mode & PERMISSIONS) as u16;
        self.fs.create(self.ino, name, make, mode, self.caller)
    }

    /// Clears the set-id bits of a file that a caller without the privilege for them changes. The
    /// kernel reports the privilege only for writes and sizes, so here root counts as privileged.
    fn clear_setid(&self, ino: Ino) -> Result<()> {
        match self.caller.uid {
            0 => Ok(()),
            _ => self.fs.clear_setid(ino),
        }
    }

    fn set_attr(&self, wished: &SetAttr) -> Result<Attr> {
        let changes = AttrChanges {
            mode: wished.mode.map(|mode| (mode & PERMISSIONS) as u16),
            uid: wished.uid,
            gid: wished.gid,
            atime: wished.atime.map(resolve_time),
            mtime: wished.mtime.map(resolve_time),
        };
        if let Some(size) = wished.size {
            if wished.clears_setid {
                self.fs.clear_setid(self.ino)?;
            }
            let attr = self
                .fs
                .set_size(&mut *self.fs.borrow_channel()?, self.ino, size)?;
            if changes == AttrChanges::default() {
                return Ok(attr);
            }
        }
        self.fs.set_attr(self.ino, changes)
    }

    fn write(
        &self,
        file: u64,
        offset: u64,
        data: &Bytes,
        flags: u32,
        how: u32,
    ) -> Result<FuseReply> {
        if how & abi::WRITE_KILL_SUIDGID != 0 {
            self.fs.clear_setid(self.ino)?;
        }
        if how & (abi::WRITE_CACHE | abi::WRITE_LOCK_OWNER) == 0 {
            self.before_cached_request(file)?;
        }
        let mut channel = self.fs.borrow_channel()?;
        if how & abi::WRITE_CACHE != 0 {
            self.fs
                .buffer_mmap_write(&mut channel, self.ino, offset, data)?;
            return Ok(written(data.len()));
        }
        let at = write_offset(offset, flags);
        let is_durable = has_flag(flags, OFlags::DSYNC);
        let bytes = self.fs.write(&mut channel, self.ino, at, data, is_durable);
        drop(channel);
        let bytes = bytes.inspect_err(|_| self.before_failed_write_reply(how))?;
        self.before_write_reply(how, offset, bytes.clone());
        self.handler.open_files.expect_sync(file, how);
        Ok(written((bytes.end - bytes.start) as usize))
    }

    fn list(&self, span: ReadRange) -> Result<FuseReply> {
        let mut listing = Listing::new(span.size);
        self.fs.list(self.ino, span.offset, |listed| {
            let entry = (listed.ino.0, listed.cookie, dirent_type(listed.kind));
            listing.add(None, entry, &listed.name)
        })?;
        Ok(listing.finish())
    }

    fn list_with_attributes(&self, span: ReadRange) -> Result<FuseReply> {
        let mut all: Vec<DirEntry> = Vec::new();
        self.fs.list(self.ino, span.offset, |listed| {
            all.push(listed.clone());
            all.len() < LISTED_MAX
        })?;
        let mut listing = Listing::new(span.size);
        for listed in all {
            // The kernel does not count these two as looked up.
            let is_dots = listed.name == b"." || listed.name == b"..";
            let attr = match is_dots {
                true => self.fs.attr(listed.ino),
                false => self.fs.lookup_ino(listed.ino),
            };
            // It was removed meanwhile.
            let Ok(attr) = attr else { continue };
            let entry = (listed.ino.0, listed.cookie, dirent_type(attr.kind));
            if !listing.add(Some(&reply::entry(&attr)), entry, &listed.name) {
                if !is_dots {
                    self.fs.forget(listed.ino, 1);
                }
                break;
            }
        }
        Ok(listing.finish())
    }

    fn statfs(&self) -> FuseReply {
        const PAGE: u64 = PAGE_BYTES as u64;
        let usage = self.fs.usage();
        let used = usage.used_bytes / PAGE;
        let within_limit = match usage.limit_bytes {
            0 => u64::MAX,
            limit => (limit / PAGE).saturating_sub(used),
        };
        let in_pools = (self.handler.free_space)().map_or(u64::MAX, |bytes| bytes / PAGE);
        let free = match within_limit.min(in_pools) {
            u64::MAX => 0,
            free => free,
        };
        FuseReply::new(&abi::StatfsOut {
            blocks: used + free,
            free,
            available: free,
            files: usage.inodes + free,
            files_free: free,
            block_bytes: PAGE_BYTES as u32,
            name_max: NAME_MAX as u32,
            fragment_bytes: PAGE_BYTES as u32,
            ..abi::StatfsOut::default()
        })
    }
}

#[cfg(test)]
mod tests;
