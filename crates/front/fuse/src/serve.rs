//! Each operation of the kernel as calls of the file system.
//!
//! Of an open file little is remembered ([`crate::opened`]): what matters of it for a write
//! (append, sync) comes with every write.

use crate::abi;
use crate::answer::{self, Answer, Listing};
use crate::attr::{kind_of_entry, time};
use crate::collect::{Begun, Hand};
use crate::events::{self, EventThread};
use crate::files::Files;
use crate::names;
use crate::opened::{OpenFile, Opened};
use crate::request::{Request, SetAttr, Span};
use crate::{Caching, Connect, Room, Trouble};
use bytes::Bytes;
use pagemesh_base::contact::CONNECT;
use pagemesh_base::mapping::WILL_MAP;
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::{
    Allocate, Attr, Caller, Changes, Fs, FsError, Ino, Kind, Listed, Make, NAME_MAX, Pipe, Rename,
    Result, Seek, SetXattr,
};
use rustix::fs::{FallocateFlags, OFlags, RenameFlags};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};

/// Bytes of one copy; whoever copies more asks again.
const COPIED_BYTES_MAX: u64 = 64 << 20;
/// Entries looked up for one answer, at most: more do not fit.
const LISTED_MAX: usize = 1024;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;
const PERMISSIONS: u32 = 0o7777;

pub(crate) struct Served {
    fs: Arc<Fs>,
    trouble: Trouble,
    room: Room,
    connect: Arc<OnceLock<Connect>>,
    pub(crate) opened: Opened,
    pub(crate) caching: Caching,
    events: Arc<EventThread>,
}

fn refuse<T>(errno: Errno) -> Result<T> {
    Err(errno.into())
}

fn has(flags: u32, flag: OFlags) -> bool {
    flags & flag.bits() == flag.bits()
}

fn entry(attr: &Attr) -> Answer {
    Answer::of(&answer::entry(attr))
}

fn attr(attr: &Attr) -> Answer {
    Answer::of(&answer::attr(attr))
}

fn written(bytes: usize) -> Answer {
    Answer::of(&abi::WriteOut {
        size: bytes as u32,
        unused: 0,
    })
}

/// The value of an attribute, or how long it is.
fn xattr(value: Vec<u8>, size: u32) -> Result<Answer> {
    match size {
        0 => Ok(Answer::of(&abi::GetXattrOut {
            size: value.len() as u32,
            unused: 0,
        })),
        size if value.len() > size as usize => refuse(Errno::RANGE),
        _ => Ok(Answer::Data(value)),
    }
}

/// Whether the old name gets a whiteout, too.
fn how_to_rename(flags: u32) -> Option<(Rename, bool)> {
    let flags = RenameFlags::from_bits(flags)?;
    let leaves_whiteout = flags.contains(RenameFlags::WHITEOUT);
    let how = match flags - RenameFlags::WHITEOUT {
        RenameFlags::NOREPLACE => Some(Rename::NoReplace),
        RenameFlags::EXCHANGE => Some(Rename::Exchange),
        flags if flags.is_empty() => Some(Rename::Replace),
        _ => None,
    };
    Some((how?, leaves_whiteout))
}

fn how_to_allocate(mode: u32) -> Option<Allocate> {
    let mode = FallocateFlags::from_bits(mode)?;
    let keep_size = mode.contains(FallocateFlags::KEEP_SIZE);
    let rest = mode - FallocateFlags::KEEP_SIZE;
    match rest {
        rest if rest.is_empty() => Some(Allocate::Reserve { keep_size }),
        FallocateFlags::PUNCH_HOLE if keep_size => Some(Allocate::Punch),
        FallocateFlags::ZERO_RANGE => Some(Allocate::Zero { keep_size }),
        _ => None,
    }
}

/// One request: who asks, and about which inode.
pub(crate) struct Asked<'a> {
    pub(crate) served: &'a Served,
    pub(crate) fs: &'a Fs,
    pub(crate) ino: Ino,
    caller: Caller,
    /// By its number in the process namespace of the mounting process.
    pub(crate) thread: u32,
}

impl Served {
    pub(crate) fn new(
        fs: Arc<Fs>,
        trouble: Trouble,
        room: Room,
        connect: Arc<OnceLock<Connect>>,
        caching: Caching,
        events: Arc<EventThread>,
    ) -> Served {
        Served {
            fs,
            trouble,
            room,
            connect,
            opened: Opened::default(),
            caching,
            events,
        }
    }

    fn errno(&self, error: &FsError) -> Errno {
        match error {
            FsError::Posix(_) | FsError::ReadOnly(_) | FsError::Space(SpaceError::NoSpace(_)) => {}
            FsError::Damaged { .. } => tracing::error!(%error, "a request failed"),
            FsError::Space(_) | FsError::Stopped(_) => (self.trouble)(error),
        }
        error.errno()
    }
}

/// Writes that one thread has begun.
struct Writes<'s> {
    served: &'s Served,
    /// While there are some.
    pipe: Option<Pipe<'s>>,
}

impl Hand for Writes<'_> {
    fn begin(&mut self, header: &abi::InHeader, request: &Request<'_>) -> Begun {
        if let Request::Fsync { file } = request {
            return self.begin_sync(Ino(header.node), *file);
        }
        let Request::Write {
            file,
            offset,
            data,
            flags,
            how,
        } = request
        else {
            return Begun::Not;
        };
        let Some(at) = place_of(*offset, *flags) else {
            return Begun::Not;
        };
        if how & (abi::WRITE_KILL_SUIDGID | abi::WRITE_CACHE) != 0 {
            return Begun::Not;
        }
        // The kernel drops its pages behind such a write, and nothing may wait for that here.
        let is_past_cache = how & abi::WRITE_LOCK_OWNER != 0;
        if is_past_cache && self.served.fs.has_cached_open(Ino(header.node)) {
            return Begun::Not;
        }
        if !is_past_cache {
            self.served.fs.note_pages(Ino(header.node));
        }
        // Who answers it alone may wait for a port, or open one.
        let Some(pipe) = self.pipe.take().or_else(|| self.served.fs.spare_pipe()) else {
            return Begun::Not;
        };
        let pipe = self.pipe.insert(pipe);
        let (ino, is_durable) = (Ino(header.node), has(*flags, OFlags::DSYNC));
        let fs = &self.served.fs;
        let begun = match fs.begin_write(pipe, header.unique, ino, at, data, is_durable) {
            Ok(true) => {
                // The kernel syncs behind the answer.
                self.served.opened.expect_sync(*file, *how);
                Begun::UnderWay
            }
            Ok(false) => Begun::Not,
            Err(error) => Begun::Ended(Answer::Error(self.served.errno(&error))),
        };
        self.put_away();
        begun
    }

    fn reap(&mut self, tell: &mut dyn FnMut(u64, Answer)) {
        let served = self.served;
        if let Some(pipe) = &mut self.pipe {
            pipe.reap(|unique, result| {
                let answer = match result {
                    Ok(bytes) => written(bytes),
                    Err(error) => Answer::Error(served.errno(&error)),
                };
                tell(unique, answer);
            });
        }
        self.put_away();
    }

    fn len(&self) -> usize {
        self.pipe.as_ref().map_or(0, Pipe::len)
    }

    fn wait(&mut self, other: Option<RawFd>) {
        if let Some(pipe) = &mut self.pipe {
            pipe.wait(other);
        }
    }
}

impl Writes<'_> {
    /// Ends the sync behind a durable write, if it has nothing to do.
    fn begin_sync(&self, ino: Ino, file: u64) -> Begun {
        let opened = self.served.opened.get(file);
        let is_done = |opened: &OpenFile| {
            opened.expects_sync() && self.served.fs.is_synced(ino, &opened.seen)
        };
        match opened.filter(|opened| is_done(opened)) {
            Some(opened) if opened.take_expected_sync() => Begun::Ended(Answer::DONE),
            _ => Begun::Not,
        }
    }

    /// A port that nobody has takes part in what the volume does meanwhile.
    fn put_away(&mut self) {
        if self.len() == 0 {
            self.pipe = None;
        }
    }
}

/// Where a write goes; none: to the end.
fn place_of(offset: u64, flags: u32) -> Option<u64> {
    (!has(flags, OFlags::APPEND)).then_some(offset)
}

impl Files for Served {
    fn hand(&self) -> Option<Box<dyn Hand + '_>> {
        Some(Box::new(Writes {
            served: self,
            pipe: None,
        }))
    }

    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> Answer {
        let asked = Asked {
            served: self,
            fs: &self.fs,
            ino: Ino(header.node),
            caller: Caller {
                uid: header.uid,
                gid: header.gid,
            },
            thread: header.pid,
        };
        let answer = asked.answer(request);
        answer.unwrap_or_else(|error| Answer::Error(self.errno(&error)))
    }
}

impl Asked<'_> {
    fn answer(&self, request: Request<'_>) -> Result<Answer> {
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
                    self.note_cached(file)?;
                }
                let mut port = self.fs.borrow()?;
                let bytes = self.fs.read(&mut port, self.ino, span.offset, span.size)?;
                Ok(Answer::Data(bytes))
            }
            Request::Lookup(name) => Ok(entry(&match name {
                // Asked of files, too, by who exports the mount.
                b"." => self.fs.remember(self.ino),
                name => self.fs.lookup(self.ino, name),
            }?)),
            Request::Forget(lookups) => {
                self.fs.forget(self.ino, lookups);
                Ok(Answer::DONE)
            }
            Request::ForgetAll(all) => {
                for one in all {
                    self.fs.forget(Ino(one.node), one.lookups);
                }
                Ok(Answer::DONE)
            }
            Request::GetAttr => Ok(attr(&self.fs.attr(self.ino)?)),
            Request::Statx => Ok(answer::statx(&self.fs.attr(self.ino)?)),
            Request::SetAttr(_) if self.served.events.is(self.thread) => {
                let attr = events::attr_soon(self.fs, self.ino)?;
                Ok(Answer::of(&answer::unkept_attr(&attr)))
            }
            Request::SetAttr(wished) => {
                let attr = self.set_attr(&wished)?;
                Ok(match self.fs.has_direct_clients(self.ino) {
                    true => Answer::of(&answer::unkept_attr(&attr)),
                    false => self::attr(&attr),
                })
            }
            Request::Open { flags } => {
                self.fs.open(self.ino)?;
                let opened = self.opened(self.ino, flags);
                let opened = opened.inspect_err(|_| self.fs.release(self.ino))?;
                Ok(Answer::of(&opened))
            }
            Request::OpenDir => {
                self.fs.open(self.ino)?;
                Ok(Answer::of(&abi::OpenOut::default()))
            }
            Request::Release { file } => {
                self.released(file);
                self.fs.release(self.ino);
                Ok(Answer::DONE)
            }
            Request::Flush => {
                self.fs.note_closed(self.ino);
                Ok(Answer::DONE)
            }
            Request::Fsync { file } => {
                self.sync(self.ino, file)?;
                Ok(Answer::DONE)
            }
            Request::ReadDir(span) => self.list(span),
            Request::ReadDirPlus(span) => self.list_with_attributes(span),
            Request::Statfs => Ok(self.statfs()),
            Request::Destroy => Ok(Answer::DONE),
            other => self.answer_name(other),
        }
    }

    /// What names, links, and makes.
    fn answer_name(&self, request: Request<'_>) -> Result<Answer> {
        match request {
            Request::Create { name, mode, flags } => {
                let mode = (mode & PERMISSIONS) as u16;
                let made = self.fs.create_opened(self.ino, name, mode, self.caller)?;
                self.made(&made, flags)
            }
            Request::CreateUnnamed { mode, flags } => {
                let mode = (mode & PERMISSIONS) as u16;
                let made = self.fs.create_unnamed(self.ino, mode, self.caller)?;
                self.made(&made, flags)
            }
            Request::Mknod { name, mode, device } => {
                let make = match Kind::of_mode(mode as u16) {
                    Some(Kind::File) => Make::File,
                    None | Some(Kind::Directory | Kind::Symlink) => return refuse(Errno::INVAL),
                    Some(kind) => Make::Special(kind, device),
                };
                Ok(entry(&self.make(name, make, mode)?))
            }
            Request::Mkdir { name, mode } => Ok(entry(&self.make(name, Make::Directory, mode)?)),
            Request::Symlink { name, target } => {
                Ok(entry(&self.make(name, Make::Symlink(target), 0o777)?))
            }
            Request::ReadLink => Ok(Answer::Data(self.fs.read_link(self.ino)?)),
            Request::Link { node, name } => Ok(entry(&self.fs.link(Ino(node), self.ino, name)?)),
            Request::Unlink(name) => self.fs.unlink(self.ino, name).map(|()| Answer::DONE),
            Request::Rmdir(name) => self.fs.rmdir(self.ino, name).map(|()| Answer::DONE),
            Request::Rename {
                name,
                to,
                new,
                flags,
            } => {
                let (how, leaves_whiteout) = how_to_rename(flags).ok_or(Errno::INVAL)?;
                let (from, to) = ((self.ino, name), (Ino(to), new));
                match leaves_whiteout {
                    false => self.fs.rename(from, to, how)?,
                    true => self.fs.rename_and_white_out(from, to, how, self.caller)?,
                }
                Ok(Answer::DONE)
            }
            other => self.answer_more(other),
        }
    }

    /// Attributes, and ranges of files.
    fn answer_more(&self, request: Request<'_>) -> Result<Answer> {
        match request {
            Request::GetXattr { name, size } => {
                let value = self.fs.xattr(self.ino, name);
                xattr(value.map_err(|error| names::missing(name, error))?, size)
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
                names::check(name)?;
                let how = match flags {
                    0 => SetXattr::Always,
                    XATTR_CREATE => SetXattr::Create,
                    XATTR_REPLACE => SetXattr::Replace,
                    _ => return refuse(Errno::INVAL),
                };
                self.fs.set_xattr(self.ino, name, value, how)?;
                Ok(Answer::DONE)
            }
            Request::RemoveXattr(name) => {
                let removed = self.fs.remove_xattr(self.ino, name);
                removed.map_err(|error| names::missing(name, error))?;
                Ok(Answer::DONE)
            }
            Request::Allocate {
                file,
                offset,
                length,
                mode,
            } => {
                let how = how_to_allocate(mode).ok_or(Errno::OPNOTSUPP)?;
                self.disarm(self.ino)?;
                let mut port = self.fs.borrow()?;
                self.fs.allocate(&mut port, self.ino, how, offset, length)?;
                drop(port);
                self.sync_if_asked(self.ino, file)?;
                Ok(Answer::DONE)
            }
            Request::Ioctl {
                command: WILL_MAP, ..
            } => {
                self.fs.bar_guests(self.ino)?;
                self.fs.tell_mapped_size(self.ino)?;
                Ok(Answer::of(&abi::IoctlOut::default()))
            }
            Request::Ioctl {
                command: CONNECT,
                argument,
            } => {
                let connect = self.served.connect.get().ok_or(Errno::NOSYS)?;
                connect(self.thread, argument)?;
                Ok(Answer::of(&abi::IoctlOut::default()))
            }
            // `ENOTTY` for who asked.
            Request::Ioctl { .. } => refuse(Errno::NOSYS),
            Request::Seek { offset, whence } => {
                let what = match whence {
                    SEEK_DATA => Seek::Data,
                    SEEK_HOLE => Seek::Hole,
                    _ => return refuse(Errno::INVAL),
                };
                let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
                let mut port = self.fs.borrow()?;
                let found = self.fs.seek(&mut port, self.ino, offset, what)?;
                Ok(Answer::of(&abi::LseekOut {
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
                self.disarm(to.0)?;
                let mut port = self.fs.borrow()?;
                let len = len.min(COPIED_BYTES_MAX);
                let copied = self.fs.copy(&mut port, from, to, len)?;
                drop(port);
                self.sync_if_asked(to.0, to_file)?;
                Ok(written(copied as usize))
            }
            _ => refuse(Errno::NOSYS),
        }
    }

    fn sync(&self, ino: Ino, file: u64) -> Result<()> {
        let port = &mut *self.fs.borrow()?;
        match self.served.opened.get(file) {
            Some(opened) if opened.take_expected_sync() => {
                self.fs.sync_written(port, ino, &opened.seen)
            }
            Some(opened) => self.fs.sync_opened(port, ino, &opened.seen),
            // A directory, all of which is durable in any case.
            None => self.fs.sync(port, ino),
        }
    }

    /// What changes a file opened with O_DSYNC or O_SYNC is durable when it returns.
    fn sync_if_asked(&self, ino: Ino, file: u64) -> Result<()> {
        match Opened::is_synced(file) {
            true => self.sync(ino, file),
            false => Ok(()),
        }
    }

    fn make(&self, name: &[u8], make: Make<'_>, mode: u32) -> Result<Attr> {
        let mode = (mode & PERMISSIONS) as u16;
        self.fs.create(self.ino, name, make, mode, self.caller)
    }

    /// Takes set-id bits from a file that somebody without the privilege for them changes.
    /// The kernel does not say who has it, but for writes and sizes.
    fn disarm(&self, ino: Ino) -> Result<()> {
        match self.caller.uid {
            0 => Ok(()),
            _ => self.fs.disarm(ino),
        }
    }

    fn set_attr(&self, wished: &SetAttr) -> Result<Attr> {
        let changes = Changes {
            mode: wished.mode.map(|mode| (mode & PERMISSIONS) as u16),
            uid: wished.uid,
            gid: wished.gid,
            atime: wished.atime.map(time),
            mtime: wished.mtime.map(time),
        };
        if let Some(size) = wished.size {
            if wished.disarms {
                self.fs.disarm(self.ino)?;
            }
            let attr = self.fs.set_size(&mut *self.fs.borrow()?, self.ino, size)?;
            if changes == Changes::default() {
                return Ok(attr);
            }
        }
        self.fs.set_attr(self.ino, changes)
    }

    fn write(&self, file: u64, offset: u64, data: &Bytes, flags: u32, how: u32) -> Result<Answer> {
        if how & abi::WRITE_KILL_SUIDGID != 0 {
            self.fs.disarm(self.ino)?;
        }
        if how & (abi::WRITE_CACHE | abi::WRITE_LOCK_OWNER) == 0 {
            self.note_cached(file)?;
        }
        let mut port = self.fs.borrow()?;
        if how & abi::WRITE_CACHE != 0 {
            self.fs.hold(&mut port, self.ino, offset, data)?;
            return Ok(written(data.len()));
        }
        let at = place_of(offset, flags);
        let is_durable = has(flags, OFlags::DSYNC);
        let bytes = self.fs.write(&mut port, self.ino, at, data, is_durable);
        drop(port);
        let bytes = bytes.inspect_err(|_| self.note_failed(how))?;
        self.note_written(how, offset, bytes.clone());
        self.served.opened.expect_sync(file, how);
        Ok(written((bytes.end - bytes.start) as usize))
    }

    fn list(&self, span: Span) -> Result<Answer> {
        let mut listing = Listing::new(span.size);
        self.fs.list(self.ino, span.offset, |listed| {
            let entry = (listed.ino.0, listed.cookie, kind_of_entry(listed.kind));
            listing.add(None, entry, &listed.name)
        })?;
        Ok(listing.end())
    }

    fn list_with_attributes(&self, span: Span) -> Result<Answer> {
        let mut all: Vec<Listed> = Vec::new();
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
                false => self.fs.remember(listed.ino),
            };
            // It went meanwhile.
            let Ok(attr) = attr else { continue };
            let entry = (listed.ino.0, listed.cookie, kind_of_entry(attr.kind));
            if !listing.add(Some(&answer::entry(&attr)), entry, &listed.name) {
                if !is_dots {
                    self.fs.forget(listed.ino, 1);
                }
                break;
            }
        }
        Ok(listing.end())
    }

    fn statfs(&self) -> Answer {
        const PAGE: u64 = PAGE_BYTES as u64;
        let usage = self.fs.usage();
        let used = usage.used_bytes / PAGE;
        let within_limit = match usage.limit_bytes {
            0 => u64::MAX,
            limit => (limit / PAGE).saturating_sub(used),
        };
        let in_pools = (self.served.room)().map_or(u64::MAX, |bytes| bytes / PAGE);
        let free = match within_limit.min(in_pools) {
            u64::MAX => 0,
            free => free,
        };
        Answer::of(&abi::StatfsOut {
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
