//! A mount and the threads that serve it.

use crate::abi::{self, DATA_BYTES_MAX, Dialect, init};
use crate::batching::{self, BatchingLimiter};
use crate::busy::CpuAwakeThread;
use crate::classic::{self, Classic};
use crate::device::{Device, DeviceOptions};
use crate::extra_threads::{CountedHandler, ExtraThreads, StartThread};
use crate::reply::FuseReply;
use crate::request_handler::RequestHandler;
use crate::ring;
use crate::worker_pool::{self, RingQueues, Role, WorkerPool};
use crate::{Caching, MountError, MountOptions, THREADS_MAX, Transport};
use pagemesh_base::cpu_latency;
use rustix::io::Errno;
use std::io;
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use zerocopy::{FromBytes, IntoBytes};

/// Requests in the background, such as asynchronous I/O.
const BACKGROUND_MAX: u16 = 64;
/// Above this number the kernel throttles callers.
const CONGESTION: u16 = BACKGROUND_MAX / 4 * 3;
const PAGES_MAX: u16 = (DATA_BYTES_MAX / 4096) as u16;
/// The kernel sends INIT again if it speaks another major version.
const INITS_MAX: usize = 2;

/// Features to negotiate with the kernel, where it has them.
const FEATURES: [(u64, &str); 9] = [
    (init::ASYNC_READ, "asynchronous reads"),
    (init::BIG_WRITES, "writes of more than a page"),
    (init::MAX_PAGES, "requests of 1 MiB"),
    (init::EXPORT_SUPPORT, "export by NFS"),
    (init::PARALLEL_DIROPS, "parallel operations in a directory"),
    (init::DO_READDIRPLUS, "listings with attributes"),
    (
        init::READDIRPLUS_AUTO,
        "listings with attributes when they help",
    ),
    (init::CACHE_SYMLINKS, "caching of symbolic links"),
    (
        init::HANDLE_KILLPRIV_V2,
        "clearing of set-id bits by the mount",
    ),
];

/// Features for ACLs, all of them or none: the kernel asks the mount for ACLs and evaluates them, the mount applies the umask or the
/// default ACL to new inodes, and it learns whether a new ACL clears set-group-id.
const ACL_FEATURES: u64 = init::POSIX_ACL | init::DONT_MASK | init::SETXATTR_EXT;

/// Further features of a mount that opens no file for caching. `ASYNC_DIO` is not among them: each asynchronous write
/// would take a background slot until the kernel has dropped its pages. The kernel then may wait for a slot itself,
/// to write a page of a mapping back.
const FEATURES_WITHOUT_CACHE: [(u64, &str); 2] = [
    (init::AUTO_INVAL_DATA, "dropping of pages that changed"),
    (init::DIRECT_IO_ALLOW_MMAP, "shared mappings"),
];

/// Further features of a mount with files that go through the page cache. Direct clients change
/// none of them, so the kernel keeps pages when a time changes.
const FEATURES_WITH_CACHE: [(u64, &str); 3] = [
    (init::ASYNC_DIO, "asynchronous direct I/O"),
    (
        init::EXPLICIT_INVAL_DATA,
        "cached pages that stay valid when a file changes",
    ),
    (
        init::DIRECT_IO_ALLOW_MMAP,
        "shared mappings under the library",
    ),
];

/// A served mount.
pub(crate) struct FuseSession {
    pub(crate) device: Arc<Device>,
    pub(crate) transport: Transport,
    dialect: Dialect,
    threads: Vec<Option<JoinHandle<io::Result<()>>>>,
    batching_limiter: Arc<BatchingLimiter>,
    cpu_awake_thread: CpuAwakeThread,
    thread_exits: Receiver<usize>,
    extra_threads: Option<ExtraThreadsGuard>,
}

/// Why a session could not start.
enum SessionError {
    /// The kernel offered the ring and then refused it.
    Ring(io::Error),
    Other(io::Error),
}

impl From<io::Error> for SessionError {
    fn from(cause: io::Error) -> SessionError {
        SessionError::Other(cause)
    }
}

impl FuseSession {
    pub(crate) fn start(
        dir: &Path,
        options: &MountOptions,
        files: &Arc<dyn RequestHandler>,
    ) -> Result<FuseSession, MountError> {
        let queues = match options.transport {
            Transport::Classic => None,
            _ => match ring::queues() {
                Ok(queues) => Some(queues),
                Err(why) => {
                    check_ring_optional(options, why)?;
                    None
                }
            },
        };
        let refused = |cause| MountError::Refused {
            dir: dir.to_owned(),
            cause,
        };
        match FuseSession::mount(dir, options, files, queues) {
            Ok(session) => Ok(session),
            Err(SessionError::Other(cause)) => Err(refused(cause)),
            Err(SessionError::Ring(cause)) => {
                check_ring_optional(options, format!("the kernel refused it: {cause}"))?;
                match FuseSession::mount(dir, options, files, None) {
                    Ok(session) => Ok(session),
                    Err(SessionError::Other(cause) | SessionError::Ring(cause)) => {
                        Err(refused(cause))
                    }
                }
            }
        }
    }

    /// Mounts, with a ring if `queues` is given and the kernel offers the ring.
    fn mount(
        dir: &Path,
        options: &MountOptions,
        files: &Arc<dyn RequestHandler>,
        queues: Option<usize>,
    ) -> Result<FuseSession, SessionError> {
        let how = DeviceOptions {
            source: &options.source,
            allow_other: options.allow_other,
            flags: options.flags,
        };
        let device = Arc::new(Device::mount(dir, &how)?);
        let (ending, ended) = channel();
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut session = FuseSession {
            device,
            transport: Transport::Classic,
            dialect: Dialect::default(),
            threads: Vec::new(),
            batching_limiter: Arc::new(BatchingLimiter::new(processors)),
            cpu_awake_thread: CpuAwakeThread::start(
                options
                    .may_keep_cpus_awake
                    .then(|| cpu_latency::CPU_DMA_LATENCY_DEVICE.into()),
            )?,
            thread_exits: ended,
            extra_threads: None,
        };
        // From here on dropping the session unmounts.
        let wants_ring = queues.is_some();
        let (dialect, is_offered) = handshake(&session.device.file, wants_ring, options.caching)?;
        session.dialect = dialect;
        let threads = options.threads.clamp(1, THREADS_MAX);
        let each = queues.map_or(threads, |queues| ring::entries(queues, threads).initial);
        let reserve = Arc::new(ExtraThreads::new(queues.unwrap_or(1), each));
        let files: &Arc<dyn RequestHandler> = &(Arc::new(CountedHandler {
            handler: Arc::clone(files),
            extra_threads: Arc::clone(&reserve),
        }) as Arc<dyn RequestHandler>);
        let mut pools = Vec::new();
        match queues {
            Some(_) if !is_offered => {
                let cause = io::Error::other("it does not offer it for this mount");
                return Err(SessionError::Ring(cause));
            }
            Some(queues) => pools = session.start_rings(&ending, files, queues, threads)?,
            None => {
                for _ in 1..threads {
                    let device = Arc::new(session.device.clone_connection()?);
                    session.start_classic(&ending, files, device)?;
                }
            }
        }
        let device = Arc::clone(&session.device.file);
        session.start_classic(&ending, files, device)?;
        session.start_extra_threads(files, &reserve, pools)?;
        Ok(session)
    }

    /// Starts the thread that starts more threads when all others are stuck.
    fn start_extra_threads(
        &mut self,
        files: &Arc<dyn RequestHandler>,
        reserve: &Arc<ExtraThreads>,
        pools: Vec<Arc<WorkerPool>>,
    ) -> io::Result<()> {
        let (device, files) = (Arc::clone(&self.device), Arc::clone(files));
        let dialect = self.dialect;
        let noter = self.cpu_awake_thread.request_counter();
        let watched = Arc::clone(reserve);
        let reserve = Arc::clone(reserve);
        let start: StartThread = Box::new(move |line| {
            let files = Arc::clone(&files);
            let thread = std::thread::Builder::new().name("fuse-more".into());
            let ended = |served: io::Result<()>| {
                if let Err(cause) = served {
                    tracing::warn!(%cause, "an additional thread of the mount failed");
                }
            };
            match pools.get(line / ring::QUEUES_PER_POOL) {
                Some(pool) => {
                    let (pool, role) = (Arc::clone(pool), Role::Follower(line as u16));
                    thread.spawn(move || ended(worker_pool::serve(&pool, &*files, role, |_| {})))
                }
                None => {
                    let connection = Arc::new(device.clone_connection()?);
                    let mut more = Classic::new(connection, noter.clone(), dialect);
                    let reserve = Arc::clone(&reserve);
                    thread.spawn(move || {
                        let is_needed = || reserve.needs_more(line);
                        ended(classic::serve_while(&mut more, &*files, is_needed));
                        reserve.record_exit(line);
                    })
                }
            }
        });
        let thread = std::thread::Builder::new().name("fuse-reserve".into());
        let ended = Arc::clone(&watched);
        let thread = thread.spawn(move || watched.run(&start))?;
        self.extra_threads = Some(ExtraThreadsGuard(ended, Some(thread)));
        Ok(())
    }

    fn start_classic(
        &mut self,
        ending: &Sender<usize>,
        files: &Arc<dyn RequestHandler>,
        device: Arc<OwnedFd>,
    ) -> io::Result<()> {
        let files = Arc::clone(files);
        let turns = Arc::clone(&self.batching_limiter);
        let noter = self.cpu_awake_thread.request_counter();
        // If there is a ring, the requests left for the device are served one by one.
        let is_alone = self.transport == Transport::Classic;
        let dialect = self.dialect;
        self.spawn("fuse", ending, move || {
            let mut line = Classic::new(device, noter, dialect);
            match files.async_writer().filter(|_| is_alone) {
                Some(hand) => batching::serve(&mut line, &*files, hand, &turns),
                None => classic::serve(&mut line, &*files),
            }
        })
    }

    fn start_rings(
        &mut self,
        ending: &Sender<usize>,
        files: &Arc<dyn RequestHandler>,
        queues: usize,
        threads: usize,
    ) -> Result<Vec<Arc<WorkerPool>>, SessionError> {
        self.transport = Transport::IoUring;
        let entries = ring::entries(queues, threads);
        let (told, answers) = channel();
        let queues: Vec<u16> = (0..queues as u16).collect();
        let mut pools = Vec::new();
        for queues in queues.chunks(ring::QUEUES_PER_POOL) {
            let device = RingQueues(Arc::clone(&self.device.file), self.dialect);
            let pool = Arc::new(WorkerPool::new(
                device,
                self.cpu_awake_thread.request_counter(),
                queues,
                entries,
            ));
            pools.push(Arc::clone(&pool));
            for role in pool.roles() {
                let (pool, files, told) = (Arc::clone(&pool), Arc::clone(files), told.clone());
                self.spawn("fuse-ring", ending, move || {
                    worker_pool::serve(&pool, &*files, role, |failed| {
                        // The starting thread waits for this.
                        let _ = told.send(failed);
                        drop(told);
                    })
                })?;
            }
        }
        drop(told);
        match answers.iter().flatten().next() {
            Some(cause) => Err(SessionError::Ring(cause)),
            None => Ok(pools),
        }
    }

    /// Starts a serving thread.
    fn spawn(
        &mut self,
        name: &str,
        ending: &Sender<usize>,
        serve: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let number = self.threads.len();
        let ending = ExitNotifier(ending.clone(), number);
        let thread = std::thread::Builder::new()
            .name(format!("{name}-{number}"))
            .spawn(move || {
                let _ending = ending;
                serve()
            })?;
        self.threads.push(Some(thread));
        Ok(())
    }

    /// Waits until the mount is gone, or a thread fails; then it ends the connection for all users.
    /// Calls `is_ending` when a serving thread ends.
    pub(crate) fn serve(mut self, is_ending: impl Fn()) -> io::Result<()> {
        for _ in 0..self.threads.len() {
            let Ok(number) = self.thread_exits.recv() else {
                break;
            };
            is_ending();
            let Some(thread) = self.threads[number].take() else {
                continue;
            };
            let served = thread.join();
            let served = served.unwrap_or_else(|_| Err(io::Error::other("a server panicked")));
            if let Err(cause) = served {
                if let Err(cause) = self.device.abort() {
                    tracing::error!(%cause, "cannot end the mount");
                }
                return Err(cause);
            }
        }
        self.extra_threads = None;
        Ok(())
    }
}

/// The thread that starts others. Dropping it waits for its end; the mount has ended by then.
struct ExtraThreadsGuard(Arc<ExtraThreads>, Option<JoinHandle<()>>);

impl Drop for ExtraThreadsGuard {
    fn drop(&mut self) {
        self.0.stop();
        if let Some(thread) = self.1.take() {
            // The panic was reported already.
            let _ = thread.join();
        }
    }
}

impl Drop for FuseSession {
    fn drop(&mut self) {
        // The mount was not served, or serving failed, or it is gone already. A mount that is in
        // use is aborted, here or in another mount namespace.
        let _ = self.device.unmount();
        if let Err(cause) = self.device.abort() {
            tracing::warn!(%cause, "cannot unmount");
        }
    }
}

/// Reports that a thread has ended, in any way.
struct ExitNotifier(Sender<usize>, usize);

impl Drop for ExitNotifier {
    fn drop(&mut self) {
        // No receiver is left if the mount is not served.
        let _ = self.0.send(self.1);
    }
}

fn check_ring_optional(options: &MountOptions, why: String) -> Result<(), MountError> {
    match options.transport {
        Transport::IoUring => Err(MountError::NoRing(why)),
        _ => {
            tracing::info!(%why, "the mount is served without io_uring");
            Ok(())
        }
    }
}

/// Answers the first request. Returns the form of requests, and whether the ring was wanted and is offered.
fn handshake(device: &OwnedFd, wants_ring: bool, caching: Caching) -> io::Result<(Dialect, bool)> {
    // The kernel requires room for the longest possible request.
    let mut buffer = vec![0; DATA_BYTES_MAX as usize];
    for _ in 0..INITS_MAX {
        let len = classic::read(device, &mut buffer)?;
        let gone = || io::Error::other("the mount is gone already");
        let message = &buffer[..len.ok_or_else(gone)?];
        let strange = || io::Error::other("the kernel's first request is not INIT");
        let (header, rest) = abi::InHeader::read_from_prefix(message).map_err(|_| strange())?;
        if header.opcode != abi::op::INIT || rest.len() < 8 {
            return Err(strange());
        }
        // Older versions send a shorter structure.
        let mut told = abi::InitIn::default();
        let len = rest.len().min(size_of::<abi::InitIn>());
        told.as_mut_bytes()[..len].copy_from_slice(&rest[..len]);
        if told.major > abi::MAJOR {
            let answer = abi::InitOut {
                major: abi::MAJOR,
                minor: abi::MINOR,
                ..abi::InitOut::default()
            };
            classic::write(device, header.unique, &FuseReply::new(&answer));
            continue;
        }
        if (told.major, told.minor) < (abi::MAJOR, abi::MINOR_MIN) {
            classic::write(device, header.unique, &FuseReply::Error(Errno::PROTO));
            return Err(io::Error::other(format!(
                "the kernel speaks FUSE {}.{}; it must be {}.{} at least (Linux 5.4)",
                told.major,
                told.minor,
                abi::MAJOR,
                abi::MINOR_MIN
            )));
        }
        let (answer, has_ring) = negotiate(&told, wants_ring, caching);
        classic::write(device, header.unique, &FuseReply::new(&answer));
        let dialect = Dialect {
            has_acls: u64::from(answer.flags) & ACL_FEATURES == ACL_FEATURES,
        };
        return Ok((dialect, has_ring));
    }
    Err(io::Error::other(
        "the kernel insists on another version of FUSE",
    ))
}

/// The features that both sides have.
fn negotiate(told: &abi::InitIn, wants_ring: bool, caching: Caching) -> (abi::InitOut, bool) {
    let mut offered = u64::from(told.flags);
    if offered & init::EXT != 0 {
        offered |= u64::from(told.flags2) << 32;
    }
    let mut flags = offered & init::EXT;
    let by_caching: &[(u64, &str)] = match caching {
        Caching::Bypassed => &FEATURES_WITHOUT_CACHE,
        Caching::PageCache => &FEATURES_WITH_CACHE,
    };
    for &(flag, what) in FEATURES.iter().chain(by_caching) {
        match offered & flag {
            0 => tracing::info!(what, "the kernel does not offer a feature"),
            flag => flags |= flag,
        }
    }
    match offered & ACL_FEATURES {
        ACL_FEATURES => flags |= ACL_FEATURES,
        _ => tracing::warn!("the kernel does not evaluate ACLs of mounts; none can be set here"),
    }
    let has_ring = wants_ring && offered & init::OVER_IO_URING != 0;
    if has_ring {
        flags |= init::OVER_IO_URING;
    }
    let answer = abi::InitOut {
        major: abi::MAJOR,
        minor: abi::MINOR,
        readahead_max: told.readahead_max,
        flags: flags as u32,
        flags2: (flags >> 32) as u32,
        background_max: BACKGROUND_MAX,
        congestion: CONGESTION,
        write_max: DATA_BYTES_MAX,
        time_ns: 1,
        pages_max: PAGES_MAX,
        ..abi::InitOut::default()
    };
    (answer, has_ring)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_offered_features_are_negotiated() {
        let told = abi::InitIn {
            flags: init::ASYNC_READ as u32,
            // Without `EXT` the upper half has no meaning.
            flags2: u32::MAX,
            ..abi::InitIn::default()
        };
        let (answer, has_ring) = negotiate(&told, true, Caching::Bypassed);
        assert_eq!((answer.flags, answer.flags2), (told.flags, 0));
        assert!(!has_ring);
        let told = abi::InitIn {
            flags: u32::MAX,
            ..told
        };
        assert!(negotiate(&told, true, Caching::Bypassed).1);
        let (answer, has_ring) = negotiate(&told, false, Caching::Bypassed);
        assert!(!has_ring);
        assert_eq!(u64::from(answer.flags) & ACL_FEATURES, ACL_FEATURES);
        let told_without_one = abi::InitIn {
            flags: told.flags & !(init::SETXATTR_EXT as u32),
            ..told
        };
        let (without_acls, _) = negotiate(&told_without_one, false, Caching::Bypassed);
        assert_eq!(u64::from(without_acls.flags) & ACL_FEATURES, 0);
        assert_eq!(answer.flags2, (init::DIRECT_IO_ALLOW_MMAP >> 32) as u32);
        let has_async_writes = |caching| {
            let (answer, _) = negotiate(&told, false, caching);
            u64::from(answer.flags) & init::ASYNC_DIO != 0
        };
        assert!(has_async_writes(Caching::PageCache));
        assert!(!has_async_writes(Caching::Bypassed));
    }
}
