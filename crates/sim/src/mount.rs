//! A program on a mounted file system. A file system blocks its caller, so the program has a thread
//! of its own. The thread never runs concurrently with the rest of the simulation: one of the two
//! has the baton, and the other waits for it.
//!
//! The file system's requests to its volume are passed on with the baton, so that only the
//! simulation uses channels and the rest of the cluster.

use crate::direct_clients::shared_files::{
    FileReply, FileRequest, SharedFiles, without_shared_files,
};
use pagemesh_base::defect;
use pagemesh_base::poison::lock;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{Fs, IoChannel, MkfsOptions, Time, mkfs};
use pagemesh_fs_model::{FsModel, OWNER, Op, OpResult, read, run_op};
use pagemesh_volume::direct_access::DirectSegment;
use pagemesh_volume::{DrivenVolume, FlushState};
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// More than operations at small offsets can fill, and too little for a reserve.
const LIMIT_BYTES: u64 = 3 << 20;

/// Time for which a program sleeps in a timed wait.
const TIMED_WAIT: Duration = Duration::from_millis(100);

/// Time between two polls for direct clients.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The next job of a program.
pub(crate) enum MountJob {
    Op(Op),
    /// Makes all durable.
    Sync,
    /// Reads everything.
    Read,
    /// Runs a request on one of the direct clients' files.
    FileRequest(usize, FileRequest),
}

/// The program's reply when it gives the baton away.
pub(crate) enum ProgramReply {
    /// It waits for its volume.
    Waiting,
    /// It waits for its volume, or until some time has passed.
    WaitingTimed,
    /// It polls again soon.
    Polling,
    /// It has mounted a file system with these contents.
    Mounted(Result<FsModel, String>),
    OpDone(OpResult<()>),
    Contents(Result<FsModel, String>),
    FileRequestDone(OpResult<FileReply>),
    /// Its thread panicked with this message.
    Panicked(String),
}

enum ProgramCommand {
    /// Continue: the wait may be over.
    Continue,
    Run(MountJob),
}

/// Requests and answers between the file system and its volume.
#[derive(Default)]
struct VolumeTraffic {
    size_bytes: u64,
    /// The state at the last time when the program got the baton.
    flush_state: FlushState,
    opened: u32,
    closed: Vec<u32>,
    requests: Vec<(u32, Token, Request)>,
    completions: BTreeMap<u32, Vec<Completion>>,
    /// The process is dead: it makes no more requests, and all calls fail.
    is_process_dead: bool,
}

type SharedTraffic = Arc<Mutex<VolumeTraffic>>;

/// The volume as the file system sees it.
struct ProgramSpace(SharedTraffic);

impl Space for ProgramSpace {
    fn size_bytes(&self) -> u64 {
        lock(&self.0).size_bytes
    }

    fn has_write_cache(&self) -> bool {
        lock(&self.0).flush_state.has_write_cache
    }

    fn needs_flush(&self) -> bool {
        lock(&self.0).flush_state.needs_flush
    }

    fn lost_writes(&self) -> u64 {
        lock(&self.0).flush_state.lost_writes
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let mut traffic = lock(&self.0);
        traffic.opened += 1;
        Ok(Box::new(ProgramChannel {
            number: traffic.opened,
            traffic: Arc::clone(&self.0),
            pending: BTreeSet::new(),
        }))
    }
}

struct ProgramChannel {
    number: u32,
    traffic: SharedTraffic,
    pending: BTreeSet<u64>,
}

impl Channel for ProgramChannel {
    fn submit(&mut self, token: Token, request: Request) {
        self.pending.insert(token.0);
        lock(&self.traffic)
            .requests
            .push((self.number, token, request));
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        let mut traffic = lock(&self.traffic);
        for ended in traffic.completions.remove(&self.number).unwrap_or_default() {
            self.pending.remove(&ended.token.0);
            into.push(ended);
        }
        if traffic.is_process_dead {
            let cut_off = std::mem::take(&mut self.pending).into_iter();
            into.extend(cut_off.map(|token| Completion {
                token: Token(token),
                result: Err(SpaceError::Fenced),
            }));
        }
    }

    fn poll_fds(&self, _: &mut Vec<RawFd>) {}
}

impl Drop for ProgramChannel {
    fn drop(&mut self) {
        lock(&self.traffic).closed.push(self.number);
    }
}

/// The program's side of the baton.
struct ProgramThread {
    commands: Receiver<ProgramCommand>,
    replies: Sender<ProgramReply>,
}

thread_local! {
    static PROGRAM_THREAD: RefCell<Option<ProgramThread>> = const { RefCell::new(None) };
    static TICKS: Cell<u32> = const { Cell::new(0) };
}

/// Gives the baton away until it comes back; none at the end of the process.
fn yield_to_simulation(said: ProgramReply) -> Option<ProgramCommand> {
    PROGRAM_THREAD.with_borrow(|seat| {
        let seat = seat.as_ref()?;
        seat.replies.send(said).ok()?;
        seat.commands.recv().ok()
    })
}

fn wait_for_volume(_: &[RawFd], until: Option<Instant>) {
    yield_to_simulation(match until {
        Some(_) => ProgramReply::WaitingTimed,
        None => ProgramReply::Waiting,
    });
}

/// Lets others run before the next poll; false at the end of the process.
pub(crate) fn yield_and_poll() -> bool {
    yield_to_simulation(ProgramReply::Polling).is_some()
}

/// A clock that ticks at each call.
fn clock() -> Time {
    TICKS.set(TICKS.get() + 1);
    Time {
        sec: 1_000_000 + i64::from(TICKS.get() / 1000),
        nsec: TICKS.get() % 1000,
    }
}

/// Mounts the file system, or makes one first if none need exist.
fn mount_or_make(space: &Arc<dyn Space>, may_make: bool) -> Result<Fs, String> {
    let mount = || Fs::mount(Arc::clone(space), wait_for_volume, clock);
    let mounted = match mount() {
        Err(_) if may_make => {
            let options = MkfsOptions {
                uuid: Uuid::from_u128(1),
                hash_key: [2, 3],
                limit_bytes: LIMIT_BYTES,
                owner: OWNER,
                mode: 0o755,
            };
            mkfs(space, wait_for_volume, clock, options).and_then(|()| mount())
        }
        mounted => mounted,
    };
    let fs = mounted.map_err(|error| error.to_string())?;
    while fs.free_deferred_piece() {}
    match (fs.damage(), fs.deferred_inodes()) {
        (Some(damage), _) => Err(damage.to_string()),
        (None, 0) => Ok(fs),
        (None, left) => Err(format!("{left} inodes are left to be freed")),
    }
}

fn sync(fs: &Fs, port: &mut IoChannel) -> OpResult<()> {
    fs.sync_all(port).map_err(|error| error.errno())
}

/// The program: mounts, reports the contents, and runs its jobs.
fn run_program(space: &Arc<dyn Space>, may_make: bool, segment: Option<Arc<DirectSegment>>) {
    let fs = mount_or_make(space, may_make);
    let port = fs.and_then(|fs| {
        let mut port = fs.open_channel().map_err(|error| error.to_string())?;
        let hall = segment.map(|segment| SharedFiles::new(&fs, &mut port, segment));
        let hall = hall.transpose().map_err(|error| error.to_string())?;
        Ok((fs, port, hall))
    });
    let (fs, mut port, mut hall) = match port {
        Ok(all) => all,
        Err(why) => {
            yield_to_simulation(ProgramReply::Mounted(Err(why)));
            return;
        }
    };
    let has_guests = hall.is_some();
    let read = |port: &mut IoChannel| {
        let model = read(&fs, port)?;
        Ok(match has_guests {
            true => without_shared_files(model),
            false => model,
        })
    };
    let mut next = yield_to_simulation(ProgramReply::Mounted(read(&mut port)));
    while let Some(baton) = next {
        next = match baton {
            ProgramCommand::Run(MountJob::Op(op)) => {
                yield_to_simulation(ProgramReply::OpDone(run_op(&fs, &mut port, &op)))
            }
            ProgramCommand::Run(MountJob::Sync) => {
                yield_to_simulation(ProgramReply::OpDone(sync(&fs, &mut port)))
            }
            ProgramCommand::Run(MountJob::Read) => {
                // Frees the deleted inodes that were out of reach before.
                while fs.free_deferred_piece() {}
                yield_to_simulation(ProgramReply::Contents(read(&mut port)))
            }
            ProgramCommand::Run(MountJob::FileRequest(file, ask)) => {
                let hall = hall.as_mut().expect("a mount with direct clients");
                yield_to_simulation(ProgramReply::FileRequestDone(
                    hall.answer(&fs, &mut port, file, &ask),
                ))
            }
            ProgramCommand::Continue => yield_to_simulation(ProgramReply::Waiting),
        };
    }
}

/// Whether a failed operation's error means that the volume failed.
pub(crate) fn is_volume_error(errno: Errno) -> bool {
    errno == Errno::IO || errno == Errno::ROFS
}

/// The simulation's side of the baton.
pub(crate) struct ProgramHandle {
    traffic: SharedTraffic,
    /// By number; none if the volume refused to open the channel.
    channels: BTreeMap<u32, Option<Box<dyn Channel>>>,
    commands: Option<Sender<ProgramCommand>>,
    replies: Receiver<ProgramReply>,
    thread: Option<JoinHandle<()>>,
    /// The program has a job and waits for its volume.
    is_busy: bool,
    wait: Option<Duration>,
    wait_until: Option<Duration>,
    opened: u32,
}

impl ProgramHandle {
    /// Starts a program, which begins to mount.
    pub(crate) fn new(
        driven: &DrivenVolume,
        may_make: bool,
        segment: Option<Arc<DirectSegment>>,
    ) -> (ProgramHandle, ProgramReply) {
        let traffic = SharedTraffic::default();
        lock(&traffic).size_bytes = driven.size_bytes();
        lock(&traffic).flush_state = driven.flush_state();
        let (baton, taken) = channel();
        let (say, said) = channel();
        let space: Arc<dyn Space> = Arc::new(ProgramSpace(Arc::clone(&traffic)));
        let carried = defect::capture();
        let thread = std::thread::spawn(move || {
            carried.install();
            let last = say.clone();
            PROGRAM_THREAD.set(Some(ProgramThread {
                commands: taken,
                replies: say,
            }));
            let lived = catch_unwind(AssertUnwindSafe(|| run_program(&space, may_make, segment)));
            if let Err(payload) = lived {
                let text = payload.downcast_ref::<String>().cloned();
                let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
                // At the end of the process no receiver is left.
                let _ = last.send(ProgramReply::Panicked(text.unwrap_or_default()));
            }
            PROGRAM_THREAD.set(None);
        });
        let mut mount = ProgramHandle {
            traffic,
            channels: BTreeMap::new(),
            commands: Some(baton),
            replies: said,
            thread: Some(thread),
            is_busy: true,
            wait: None,
            wait_until: None,
            opened: 0,
        };
        let said = mount.receive_reply();
        (mount, said)
    }

    /// Whether the program has no job.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_busy
    }

    /// Number of channels in use.
    pub(crate) fn channel_count(&self) -> usize {
        self.channels.values().flatten().count()
    }

    /// Gives the idle program a job.
    pub(crate) fn start_job(&mut self, driven: &DrivenVolume, job: MountJob) -> ProgramReply {
        assert!(self.is_idle(), "one job at a time");
        self.send_command(driven, ProgramCommand::Run(job))
    }

    /// Lets channels make progress, and the program if its wait may be over. None if there is no
    /// new reply.
    pub(crate) fn poll(&mut self, driven: &DrivenVolume, now: Duration) -> Option<ProgramReply> {
        self.forward_requests(driven);
        let mut traffic = lock(&self.traffic);
        for (number, channel) in &mut self.channels {
            if let Some(channel) = channel {
                let into = traffic.completions.entry(*number).or_default();
                channel.reap(into);
            }
        }
        let is_answered = traffic.completions.values().any(|ended| !ended.is_empty());
        drop(traffic);
        let rested = self
            .wait
            .is_some_and(|rest| now >= *self.wait_until.get_or_insert(now + rest));
        if !self.is_busy || !is_answered && !rested {
            return None;
        }
        let said = self.send_command(driven, ProgramCommand::Continue);
        self.forward_requests(driven);
        Some(said)
    }

    /// Forwards the program's requests to the volume.
    fn forward_requests(&mut self, driven: &DrivenVolume) {
        let mut traffic = lock(&self.traffic);
        for number in self.opened + 1..=traffic.opened {
            self.channels.insert(number, driven.open().ok());
        }
        self.opened = traffic.opened;
        let asked = std::mem::take(&mut traffic.requests);
        for (number, token, request) in asked {
            match self.channels.get_mut(&number) {
                Some(Some(channel)) => channel.submit(token, request),
                _ => traffic
                    .completions
                    .entry(number)
                    .or_default()
                    .push(Completion {
                        token,
                        result: Err(SpaceError::Unavailable("no channel was opened".into())),
                    }),
            }
        }
        for number in std::mem::take(&mut traffic.closed) {
            self.channels.remove(&number);
        }
    }

    fn send_command(&mut self, driven: &DrivenVolume, baton: ProgramCommand) -> ProgramReply {
        lock(&self.traffic).flush_state = driven.flush_state();
        let sent = self.commands.as_ref().map(|to| to.send(baton));
        assert!(matches!(sent, Some(Ok(()))), "the program listens");
        self.receive_reply()
    }

    fn receive_reply(&mut self) -> ProgramReply {
        let said = self.replies.recv();
        let said = said.unwrap_or_else(|_| ProgramReply::Panicked("the program has ended".into()));
        self.wait = match said {
            ProgramReply::WaitingTimed => Some(TIMED_WAIT),
            ProgramReply::Polling => Some(POLL_INTERVAL),
            _ => None,
        };
        self.wait_until = None;
        self.is_busy = self.wait.is_some() || matches!(said, ProgramReply::Waiting);
        said
    }
}

impl Drop for ProgramHandle {
    /// Acts as a crash: no more requests reach the volume.
    fn drop(&mut self) {
        self.channels.clear();
        lock(&self.traffic).is_process_dead = true;
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // The thread reported its panic before.
            let _ = thread.join();
        }
    }
}
