//! Maps each operation of the kernel to calls of the file system, one file per group of operations:
//! contents of files, names, attributes, and writes that are begun in batches.
//!
//! The server remembers little of an open file ([`crate::open_files`]): every write carries the
//! flags that it needs (append, sync).

mod attributes;
mod files;
mod namespace;
mod queued_writes;
#[cfg(test)]
mod tests;

use crate::abi;
use crate::attr::CacheTimeout;
use crate::direct_io::{self, LIMITS_IOCTL};
use crate::events::EventThread;
use crate::notifier::KernelNotifier;
use crate::open_files::OpenFiles;
use crate::reply::{self, FuseReply};
use crate::request::Request;
use crate::request_handler::{AsyncWriter, RequestHandler};
use crate::{Caching, ConnectHook, ErrorHook, FreeSpaceFn, MountOptions};
pub(crate) use attributes::xattr;
use pagemesh_base::mount_connection::CONNECT_IOCTL;
use pagemesh_base::proc_maps::WILL_MAP_IOCTL;
use pagemesh_base::space::SpaceError;
use pagemesh_fs::{Attr, Credentials, Fs, FsError, Ino, Result};
use queued_writes::QueuedWrites;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::sync::{Arc, OnceLock};

/// The mode bits that the kernel may set, besides the kind of the inode.
const PERMISSIONS: u32 = 0o7777;

pub(crate) struct FsHandler {
    fs: Arc<Fs>,
    error_hook: ErrorHook,
    free_space: FreeSpaceFn,
    connect_hook: Arc<OnceLock<ConnectHook>>,
    pub(crate) open_files: Arc<OpenFiles>,
    pub(crate) caching: Caching,
    /// Whether each file counts as opened with O_SYNC.
    pub(crate) is_sync: bool,
    /// How long the kernel may cache names and attributes.
    pub(crate) cache: CacheTimeout,
    event_thread: Arc<EventThread>,
    /// Started if another front changes the file system, too.
    pub(crate) notifier: Arc<KernelNotifier>,
}

fn refuse<T>(errno: Errno) -> Result<T> {
    Err(errno.into())
}

pub(crate) fn has_flag(flags: u32, flag: OFlags) -> bool {
    flags & flag.bits() == flag.bits()
}

fn written(bytes: usize) -> FuseReply {
    FuseReply::new(&abi::WriteOut {
        size: bytes as u32,
        unused: 0,
    })
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
    /// Whether a write to an open file is durable before it is answered.
    fn is_write_durable(&self, file: u64, flags: u32) -> bool {
        if OpenFiles::is_synced(file) {
            return true;
        }
        let expects_sync = || {
            let opened = self.open_files.get(file);
            opened.is_some_and(|opened| opened.sync_pattern.expects_sync_after_write())
        };
        has_flag(flags, OFlags::DSYNC) || self.fs.has_write_cache() && expects_sync()
    }

    /// Records a write to an open file.
    fn record_write(&self, file: u64, how: u32) {
        self.open_files.expect_sync(file, how);
        if self.fs.has_write_cache()
            && let Some(opened) = self.open_files.get(file)
        {
            opened.sync_pattern.record_write();
        }
    }

    pub(crate) fn new(
        fs: Arc<Fs>,
        error_hook: ErrorHook,
        free_space: FreeSpaceFn,
        connect: Arc<OnceLock<ConnectHook>>,
        options: &MountOptions,
        events: Arc<EventThread>,
        notifier: Arc<KernelNotifier>,
    ) -> FsHandler {
        FsHandler {
            fs,
            error_hook,
            free_space,
            connect_hook: connect,
            open_files: Arc::default(),
            caching: options.caching,
            is_sync: options.flags.is_sync,
            cache: match options.is_shared {
                true => CacheTimeout::NONE,
                false => CacheTimeout::LONG,
            },
            event_thread: events,
            notifier,
        }
    }

    /// Whether another front changes the file system, too.
    pub(crate) fn is_shared(&self) -> bool {
        self.cache == CacheTimeout::NONE
    }

    /// The live file system.
    pub(crate) fn fs(&self) -> &Fs {
        &self.fs
    }

    fn errno(&self, error: &FsError) -> Errno {
        match error {
            FsError::Posix(_)
            | FsError::ReadOnly(_)
            | FsError::Snapshot
            | FsError::Space(SpaceError::NoSpace(_)) => {}
            FsError::Damaged { .. } => tracing::error!(%error, "a request failed"),
            FsError::Space(_) | FsError::Stopped(_) => (self.error_hook)(error),
        }
        error.errno()
    }
}

impl RequestHandler for FsHandler {
    fn async_writer(&self) -> Option<Box<dyn AsyncWriter + '_>> {
        Some(Box::new(QueuedWrites::new(self)))
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
    fn entry(&self, attr: &Attr) -> FuseReply {
        FuseReply::new(&reply::entry(attr, self.handler.cache))
    }

    /// Serves operations on open files. The other groups follow, the rarest last.
    fn dispatch(&self, request: Request<'_>) -> Result<FuseReply> {
        match request {
            Request::Write {
                file,
                offset,
                data,
                flags,
                how,
            } => self.write(file, offset, &data, flags, how),
            Request::Read {
                file,
                span,
                flags,
                how,
            } => self.read(file, span, flags, how),
            Request::Open { flags } => self.open(flags),
            Request::OpenDir => self.open_dir(),
            Request::Release { file } => Ok(self.release(file)),
            Request::Flush => Ok(self.flush()),
            Request::Fsync { file, is_data_only } => self.fsync(file, is_data_only),
            Request::Allocate {
                file,
                offset,
                length,
                mode,
            } => self.allocate(file, offset, length, mode),
            Request::Seek { offset, whence } => self.seek(offset, whence),
            Request::Copy {
                from,
                to_file,
                to_node,
                to,
                len,
            } => self.copy((self.ino, from), (Ino(to_node), to), to_file, len),
            Request::Ioctl { command, argument } => self.ioctl(command, argument),
            Request::Destroy => Ok(FuseReply::DONE),
            other => self.dispatch_name_op(other),
        }
    }

    fn ioctl(&self, command: u32, argument: &[u8]) -> Result<FuseReply> {
        match command {
            WILL_MAP_IOCTL => {
                self.fs.disable_direct_access(self.ino)?;
                self.fs.notify_mmapped_size(self.ino)?;
            }
            CONNECT_IOCTL => {
                let connect = self.handler.connect_hook.get().ok_or(Errno::NOSYS)?;
                connect(self.thread, argument)?;
            }
            LIMITS_IOCTL => return direct_io::limits_reply(self.fs.attr(self.ino)?.kind),
            // The caller gets `ENOTTY`.
            _ => return refuse(Errno::NOSYS),
        }
        Ok(FuseReply::new(&abi::IoctlOut::default()))
    }
}
