//! A mount and the threads that serve it.

use crate::abi::{self, init};
use crate::answer::Answer;
use crate::busy::Keeper;
use crate::classic::{self, Classic};
use crate::collect::{self, Turns};
use crate::crew::{self, Crew, Role};
use crate::device::{Device, How};
use crate::files::{DATA_BYTES_MAX, Files};
use crate::reserve::{Reserve, Start, Watched};
use crate::ring::{self, Queues};
use crate::{Caching, MountError, MountOptions, THREADS_MAX, Transport};
use pagemesh_base::awake;
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
/// From so many on the kernel tells callers to slow down.
const CONGESTION: u16 = BACKGROUND_MAX / 4 * 3;
const PAGES_MAX: u16 = (DATA_BYTES_MAX / 4096) as u16;
/// The kernel asks a second time if it speaks another major version.
const INITS_MAX: usize = 2;

/// What is settled with the kernel, where it can.
const WANTED: [(u64, &str); 10] = [
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
    (init::ASYNC_DIO, "asynchronous direct I/O"),
    (init::CACHE_SYMLINKS, "keeping of symbolic links"),
    (init::HANDLE_KILLPRIV_V2, "taking away of set-id bits here"),
];

/// The same where no file is opened to be cached.
const WANTED_BYPASSED: [(u64, &str); 2] = [
    (init::AUTO_INVAL_DATA, "forgetting of what changed"),
    (init::DIRECT_IO_ALLOW_MMAP, "shared mappings"),
];

/// The same for files that are read and written through the page cache. Direct clients change none
/// of them, so no change of a time makes the kernel drop pages.
const WANTED_CACHED: [(u64, &str); 2] = [
    (
        init::EXPLICIT_INVAL_DATA,
        "cached pages that stay valid when a file changes",
    ),
    (
        init::DIRECT_IO_ALLOW_MMAP,
        "shared mappings under the library",
    ),
];

/// A mount that is served.
pub(crate) struct Session {
    pub(crate) device: Arc<Device>,
    pub(crate) transport: Transport,
    threads: Vec<Option<JoinHandle<io::Result<()>>>>,
    turns: Arc<Turns>,
    keeper: Keeper,
    ended: Receiver<usize>,
    watch: Option<Watch>,
}

/// Why there is no session.
enum Refused {
    /// The kernel offered a ring and then did not take it.
    Ring(io::Error),
    Other(io::Error),
}

impl From<io::Error> for Refused {
    fn from(cause: io::Error) -> Refused {
        Refused::Other(cause)
    }
}

impl Session {
    pub(crate) fn start(
        dir: &Path,
        options: &MountOptions,
        files: &Arc<dyn Files>,
    ) -> Result<Session, MountError> {
        let queues = match options.transport {
            Transport::Classic => None,
            _ => match ring::queues() {
                Ok(queues) => Some(queues),
                Err(why) => {
                    without_ring(options, why)?;
                    None
                }
            },
        };
        let refused = |cause| MountError::Refused {
            dir: dir.to_owned(),
            cause,
        };
        match Session::mount(dir, options, files, queues) {
            Ok(session) => Ok(session),
            Err(Refused::Other(cause)) => Err(refused(cause)),
            Err(Refused::Ring(cause)) => {
                without_ring(options, format!("the kernel refused it: {cause}"))?;
                match Session::mount(dir, options, files, None) {
                    Ok(session) => Ok(session),
                    Err(Refused::Other(cause) | Refused::Ring(cause)) => Err(refused(cause)),
                }
            }
        }
    }

    /// With a ring if so many queues are said and the kernel offers it.
    fn mount(
        dir: &Path,
        options: &MountOptions,
        files: &Arc<dyn Files>,
        queues: Option<usize>,
    ) -> Result<Session, Refused> {
        let how = How {
            source: &options.source,
            allow_other: options.allow_other,
        };
        let device = Arc::new(Device::mount(dir, &how)?);
        let (ending, ended) = channel();
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let mut session = Session {
            device,
            transport: Transport::Classic,
            threads: Vec::new(),
            turns: Arc::new(Turns::new(processors)),
            keeper: Keeper::start(options.may_keep_awake.then(|| awake::DEVICE.into()))?,
            ended,
            watch: None,
        };
        // From here on a drop unmounts.
        let is_offered = greet(&session.device.file, queues.is_some(), options.caching)?;
        let threads = options.threads.clamp(1, THREADS_MAX);
        let each = queues.map_or(threads, |queues| ring::entries(queues, threads).first);
        let reserve = Arc::new(Reserve::new(queues.unwrap_or(1), each));
        let files: &Arc<dyn Files> = &(Arc::new(Watched {
            files: Arc::clone(files),
            reserve: Arc::clone(&reserve),
        }) as Arc<dyn Files>);
        let mut crews = Vec::new();
        match queues {
            Some(_) if !is_offered => {
                let cause = io::Error::other("it does not offer it for this mount");
                return Err(Refused::Ring(cause));
            }
            Some(queues) => crews = session.start_rings(&ending, files, queues, threads)?,
            None => {
                for _ in 1..threads {
                    let device = Arc::new(session.device.another()?);
                    session.start_classic(&ending, files, device)?;
                }
            }
        }
        let device = Arc::clone(&session.device.file);
        session.start_classic(&ending, files, device)?;
        session.start_watch(files, &reserve, crews)?;
        Ok(session)
    }

    /// Starts the thread that starts more threads where all others are stuck.
    fn start_watch(
        &mut self,
        files: &Arc<dyn Files>,
        reserve: &Arc<Reserve>,
        crews: Vec<Arc<Crew>>,
    ) -> io::Result<()> {
        let (device, files) = (Arc::clone(&self.device), Arc::clone(files));
        let noter = self.keeper.noter();
        let watched = Arc::clone(reserve);
        let reserve = Arc::clone(reserve);
        let start: Start = Box::new(move |line| {
            let files = Arc::clone(&files);
            let thread = std::thread::Builder::new().name("fuse-more".into());
            let ended = |served: io::Result<()>| {
                if let Err(cause) = served {
                    tracing::warn!(%cause, "a further thread of the mount ended");
                }
            };
            match crews.get(line / ring::QUEUES_OF_A_CREW) {
                Some(crew) => {
                    let (crew, role) = (Arc::clone(crew), Role::Follower(line as u16));
                    thread.spawn(move || ended(crew::serve(&crew, &*files, role, |_| {})))
                }
                None => {
                    let mut more = Classic::new(Arc::new(device.another()?), noter.clone());
                    let reserve = Arc::clone(&reserve);
                    thread.spawn(move || {
                        let is_needed = || reserve.needs_more(line);
                        ended(classic::serve_while(&mut more, &*files, is_needed));
                        reserve.note_less(line);
                    })
                }
            }
        });
        let thread = std::thread::Builder::new().name("fuse-reserve".into());
        let ended = Arc::clone(&watched);
        let thread = thread.spawn(move || watched.watch(&start))?;
        self.watch = Some(Watch(ended, Some(thread)));
        Ok(())
    }

    fn start_classic(
        &mut self,
        ending: &Sender<usize>,
        files: &Arc<dyn Files>,
        device: Arc<OwnedFd>,
    ) -> io::Result<()> {
        let files = Arc::clone(files);
        let turns = Arc::clone(&self.turns);
        let noter = self.keeper.noter();
        // Where there is a ring, what is left for the device is served one by one.
        let is_alone = self.transport == Transport::Classic;
        self.spawn("fuse", ending, move || {
            let mut line = Classic::new(device, noter);
            match files.hand().filter(|_| is_alone) {
                Some(hand) => collect::serve(&mut line, &*files, hand, &turns),
                None => classic::serve(&mut line, &*files),
            }
        })
    }

    fn start_rings(
        &mut self,
        ending: &Sender<usize>,
        files: &Arc<dyn Files>,
        queues: usize,
        threads: usize,
    ) -> Result<Vec<Arc<Crew>>, Refused> {
        self.transport = Transport::IoUring;
        let entries = ring::entries(queues, threads);
        let (told, answers) = channel();
        let queues: Vec<u16> = (0..queues as u16).collect();
        let mut crews = Vec::new();
        for queues in queues.chunks(ring::QUEUES_OF_A_CREW) {
            let device = Queues(Arc::clone(&self.device.file));
            let crew = Arc::new(Crew::new(device, self.keeper.noter(), queues, entries));
            crews.push(Arc::clone(&crew));
            for role in crew.roles() {
                let (crew, files, told) = (Arc::clone(&crew), Arc::clone(files), told.clone());
                self.spawn("fuse-ring", ending, move || {
                    crew::serve(&crew, &*files, role, |failed| {
                        // Whoever starts it waits for this.
                        let _ = told.send(failed);
                        drop(told);
                    })
                })?;
            }
        }
        drop(told);
        match answers.iter().flatten().next() {
            Some(cause) => Err(Refused::Ring(cause)),
            None => Ok(crews),
        }
    }

    /// Starts a thread that serves.
    fn spawn(
        &mut self,
        name: &str,
        ending: &Sender<usize>,
        serve: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<()> {
        let number = self.threads.len();
        let ending = Ending(ending.clone(), number);
        let thread = std::thread::Builder::new()
            .name(format!("{name}-{number}"))
            .spawn(move || {
                let _ending = ending;
                serve()
            })?;
        self.threads.push(Some(thread));
        Ok(())
    }

    /// Waits until the mount is no more, or something cannot be served any more; then
    /// everybody is cut off. Says when the first of those who serve ends.
    pub(crate) fn serve(mut self, is_ending: impl Fn()) -> io::Result<()> {
        for _ in 0..self.threads.len() {
            let Ok(number) = self.ended.recv() else { break };
            is_ending();
            let Some(thread) = self.threads[number].take() else {
                continue;
            };
            let served = thread.join();
            let served = served.unwrap_or_else(|_| Err(io::Error::other("a server panicked")));
            if let Err(cause) = served {
                if let Err(cause) = self.device.cut_off() {
                    tracing::error!(%cause, "cannot end the mount");
                }
                return Err(cause);
            }
        }
        self.watch = None;
        Ok(())
    }
}

/// The thread that starts others. Dropped, those have ended, as the mount has.
struct Watch(Arc<Reserve>, Option<JoinHandle<()>>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.end();
        if let Some(thread) = self.1.take() {
            // A panic was told already.
            let _ = thread.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // It was not served, or that failed, or it is gone already.
        // One that is in use is cut off, here or in another mount namespace.
        let _ = self.device.unmount();
        if let Err(cause) = self.device.cut_off() {
            tracing::warn!(%cause, "cannot unmount");
        }
    }
}

/// Says that a thread has ended, however it did.
struct Ending(Sender<usize>, usize);

impl Drop for Ending {
    fn drop(&mut self) {
        // Nobody waits for it if the mount is not served.
        let _ = self.0.send(self.1);
    }
}

fn without_ring(options: &MountOptions, why: String) -> Result<(), MountError> {
    match options.transport {
        Transport::IoUring => Err(MountError::NoRing(why)),
        _ => {
            tracing::info!(%why, "the mount is served without io_uring");
            Ok(())
        }
    }
}

/// Answers the first request. Whether the ring was wanted and is offered.
fn greet(device: &OwnedFd, wants_ring: bool, caching: Caching) -> io::Result<bool> {
    // It must hold the longest request that could be.
    let mut buffer = vec![0; DATA_BYTES_MAX as usize];
    for _ in 0..INITS_MAX {
        let len = classic::read(device, &mut buffer)?;
        let gone = || io::Error::other("the mount is gone already");
        let message = &buffer[..len.ok_or_else(gone)?];
        let strange = || io::Error::other("the kernel begins with what is no greeting");
        let (header, rest) = abi::InHeader::read_from_prefix(message).map_err(|_| strange())?;
        if header.opcode != abi::op::INIT || rest.len() < 8 {
            return Err(strange());
        }
        // The end may be missing in older versions.
        let mut told = abi::InitIn::default();
        let len = rest.len().min(size_of::<abi::InitIn>());
        told.as_mut_bytes()[..len].copy_from_slice(&rest[..len]);
        if told.major > abi::MAJOR {
            let answer = abi::InitOut {
                major: abi::MAJOR,
                minor: abi::MINOR,
                ..abi::InitOut::default()
            };
            classic::write(device, header.unique, &Answer::of(&answer));
            continue;
        }
        if (told.major, told.minor) < (abi::MAJOR, abi::MINOR_MIN) {
            classic::write(device, header.unique, &Answer::Error(Errno::PROTO));
            return Err(io::Error::other(format!(
                "the kernel speaks FUSE {}.{}; it must be {}.{} at least (Linux 5.4)",
                told.major,
                told.minor,
                abi::MAJOR,
                abi::MINOR_MIN
            )));
        }
        let (answer, has_ring) = settle(&told, wants_ring, caching);
        classic::write(device, header.unique, &Answer::of(&answer));
        return Ok(has_ring);
    }
    Err(io::Error::other(
        "the kernel insists on another version of FUSE",
    ))
}

/// What both sides can.
fn settle(told: &abi::InitIn, wants_ring: bool, caching: Caching) -> (abi::InitOut, bool) {
    let mut offered = u64::from(told.flags);
    if offered & init::EXT != 0 {
        offered |= u64::from(told.flags2) << 32;
    }
    let mut flags = offered & init::EXT;
    let by_caching: &[(u64, &str)] = match caching {
        Caching::Bypassed => &WANTED_BYPASSED,
        Caching::PageCache => &WANTED_CACHED,
    };
    for &(flag, what) in WANTED.iter().chain(by_caching) {
        match offered & flag {
            0 => tracing::info!(what, "the kernel does without"),
            flag => flags |= flag,
        }
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
    fn nothing_is_settled_that_was_not_offered() {
        let told = abi::InitIn {
            flags: init::ASYNC_READ as u32,
            // Without the flag that says so it means nothing.
            flags2: u32::MAX,
            ..abi::InitIn::default()
        };
        let (answer, has_ring) = settle(&told, true, Caching::Bypassed);
        assert_eq!((answer.flags, answer.flags2), (told.flags, 0));
        assert!(!has_ring);
        let told = abi::InitIn {
            flags: u32::MAX,
            ..told
        };
        assert!(settle(&told, true, Caching::Bypassed).1);
        let (answer, has_ring) = settle(&told, false, Caching::Bypassed);
        assert!(!has_ring);
        assert_eq!(answer.flags2, (init::DIRECT_IO_ALLOW_MMAP >> 32) as u32);
    }
}
