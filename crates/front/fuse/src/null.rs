//! A file system that accepts and drops every write. A write to it costs only the time of the
//! kernel and the transport.

use crate::abi;
use crate::attr::CacheTimeout;
use crate::caching::open_reply;
use crate::reply::{self, FuseReply};
use crate::request::Request;
use crate::request_handler::RequestHandler;
use crate::session::FuseSession;
use crate::{Caching, MountError, MountOptions, Transport, Unmounter};
use pagemesh_base::poison;
use pagemesh_fs::{Attr, Ino, InodeKind, Time};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

const ROOT: u64 = 1;

/// The mount of a null file system.
pub struct NullMount(FuseSession);

/// Mounts a null file system as [`crate::mount`] does, with the same options.
///
/// # Errors
/// If the kernel refuses.
pub fn mount_null(dir: &Path, options: &MountOptions) -> Result<NullMount, MountError> {
    let files: Arc<dyn RequestHandler> = Arc::new(NullFs {
        state: Mutex::default(),
        caching: options.caching,
    });
    FuseSession::start(dir, options, &files).map(NullMount)
}

impl NullMount {
    /// Unmounts from another thread.
    #[must_use]
    pub fn unmounter(&self) -> Unmounter {
        Unmounter {
            device: Arc::clone(&self.0.device),
            fs: Weak::new(),
        }
    }

    /// The transport of requests: never [`Transport::Auto`].
    #[must_use]
    pub fn transport(&self) -> Transport {
        self.0.transport
    }

    /// Waits until it is unmounted.
    ///
    /// # Errors
    /// If the device fails.
    pub fn serve(self) -> io::Result<()> {
        self.0.serve(|| {})
    }
}

#[derive(Default)]
struct NullState {
    /// By directory and name.
    names: HashMap<(u64, Vec<u8>), u64>,
    files: HashMap<u64, Attr>,
}

struct NullFs {
    state: Mutex<NullState>,
    caching: Caching,
}

impl NullFs {
    fn lock_state(&self) -> MutexGuard<'_, NullState> {
        poison::lock(&self.state)
    }

    fn attr(&self, number: u64) -> Result<Attr, Errno> {
        match number {
            ROOT => Ok(attr(ROOT, InodeKind::Directory)),
            _ => self
                .lock_state()
                .files
                .get(&number)
                .cloned()
                .ok_or(Errno::NOENT),
        }
    }

    fn lookup(&self, parent: u64, name: &[u8]) -> Result<Attr, Errno> {
        let number = self
            .lock_state()
            .names
            .get(&(parent, name.to_owned()))
            .copied();
        self.attr(number.ok_or(Errno::NOENT)?)
    }

    fn make(&self, parent: u64, name: &[u8], kind: InodeKind) -> Attr {
        let mut known = self.lock_state();
        let number = ROOT + 1 + known.files.len() as u64;
        let made = attr(number, kind);
        known.names.insert((parent, name.to_owned()), number);
        known.files.insert(number, made.clone());
        made
    }

    fn answer(&self, node: u64, request: Request<'_>) -> Result<FuseReply, Errno> {
        Ok(match request {
            Request::Lookup(name) => {
                FuseReply::new(&reply::entry(&self.lookup(node, name)?, CacheTimeout::LONG))
            }
            Request::GetAttr => FuseReply::new(&reply::attr(&self.attr(node)?, CacheTimeout::LONG)),
            Request::SetAttr(wished) => {
                if let Some(found) = self.lock_state().files.get_mut(&node) {
                    found.size = wished.size.unwrap_or(found.size);
                }
                FuseReply::new(&reply::attr(&self.attr(node)?, CacheTimeout::LONG))
            }
            Request::Mkdir { name, .. } => {
                let made = self.make(node, name, InodeKind::Directory);
                FuseReply::new(&reply::entry(&made, CacheTimeout::LONG))
            }
            // Its number stays in use, so that no other file gets it.
            Request::Unlink(name) => match self.lock_state().names.remove(&(node, name.to_owned()))
            {
                Some(_) => FuseReply::DONE,
                None => return Err(Errno::NOENT),
            },
            Request::Open { .. } => FuseReply::new(&open_reply(self.caching)),
            Request::OpenDir => FuseReply::new(&abi::OpenOut::default()),
            Request::Create { name, .. } => {
                let made = self.make(node, name, InodeKind::File);
                FuseReply::from_pair(
                    &reply::entry(&made, CacheTimeout::LONG),
                    &open_reply(self.caching),
                )
            }
            Request::Write { data, .. } => FuseReply::new(&abi::WriteOut {
                size: data.len() as u32,
                unused: 0,
            }),
            Request::Fsync { .. } | Request::Release { .. } | Request::Destroy => FuseReply::DONE,
            Request::Statfs => FuseReply::new(&abi::StatfsOut::default()),
            Request::Allocate { .. } => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::NOSYS),
        })
    }
}

fn attr(number: u64, kind: InodeKind) -> Attr {
    let never = Time { sec: 0, nsec: 0 };
    Attr {
        ino: Ino(number),
        generation: 0,
        kind,
        mode: 0o700,
        links: 1,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        size: 0,
        pages: 0,
        atime: never,
        mtime: never,
        ctime: never,
        btime: never,
        device: 0,
        has_volatile_size: false,
    }
}

impl RequestHandler for NullFs {
    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> FuseReply {
        let answer = self.answer(header.node, request);
        answer.unwrap_or_else(FuseReply::Error)
    }
}
