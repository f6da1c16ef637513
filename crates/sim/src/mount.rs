//! A program on a mounted file system. It has a thread of its own, since a file system
//! waits where it is called, and never runs beside the rest of the simulation: one of
//! both has the baton, and the other waits for it.
//!
//! What the file system asks of its volume is handed over with the baton, so that
//! channels, and all that belongs to the cluster, are used by the simulation alone.

use crate::cluster::guard;
use crate::guests::mount::{Ask, Hall, Reply, without_files};
use pagemesh_base::defect;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_fs::{Fs, MakeOptions, Port, Time, make};
use pagemesh_fs_model::{Model, OWNER, Op, Outcome, read, run};
use pagemesh_volume::Driven;
use pagemesh_volume::guests::Segment;
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

/// More than operations of near reach can fill, and too little for a reserve.
const LIMIT_BYTES: u64 = 3 << 20;

/// How long a program rests that waits for some time to pass.
const REST: Duration = Duration::from_millis(100);

/// How long between two looks at guests.
const NAP: Duration = Duration::from_micros(50);

/// What a program does next.
pub(crate) enum Job {
    Op(Op),
    /// Makes all durable.
    Sync,
    /// Reads everything.
    Read,
    /// Does something with one of the files that guests reach.
    Ask(usize, Ask),
}

/// What a program says when it gives the baton away.
pub(crate) enum Said {
    /// It waits for its volume.
    Waits,
    /// It waits for its volume, or until some time has passed.
    Rests,
    /// It looks again soon.
    Naps,
    /// It has a file system, which holds this.
    Mounted(Result<Model, String>),
    Ran(Outcome<()>),
    Held(Result<Model, String>),
    Replied(Outcome<Reply>),
    /// It ended, with these words.
    Panicked(String),
}

enum Baton {
    /// What it waited for may be there.
    GoOn,
    Do(Job),
}

/// What goes between the file system and its volume.
#[derive(Default)]
struct Traffic {
    size_bytes: u64,
    opened: u32,
    closed: Vec<u32>,
    asked: Vec<(u32, Token, Request)>,
    ended: BTreeMap<u32, Vec<Completion>>,
    /// The process is over: nothing is asked any more, and everything fails.
    is_cut: bool,
}

type Shared = Arc<Mutex<Traffic>>;

/// The volume as the file system sees it.
struct Seam(Shared);

impl Space for Seam {
    fn size_bytes(&self) -> u64 {
        guard(&self.0).size_bytes
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let mut traffic = guard(&self.0);
        traffic.opened += 1;
        Ok(Box::new(Way {
            number: traffic.opened,
            traffic: Arc::clone(&self.0),
            pending: BTreeSet::new(),
        }))
    }
}

struct Way {
    number: u32,
    traffic: Shared,
    pending: BTreeSet<u64>,
}

impl Channel for Way {
    fn submit(&mut self, token: Token, request: Request) {
        self.pending.insert(token.0);
        guard(&self.traffic)
            .asked
            .push((self.number, token, request));
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        let mut traffic = guard(&self.traffic);
        for ended in traffic.ended.remove(&self.number).unwrap_or_default() {
            self.pending.remove(&ended.token.0);
            into.push(ended);
        }
        if traffic.is_cut {
            let cut_off = std::mem::take(&mut self.pending).into_iter();
            into.extend(cut_off.map(|token| Completion {
                token: Token(token),
                result: Err(SpaceError::Fenced),
            }));
        }
    }

    fn wait_on(&self, _: &mut Vec<RawFd>) {}
}

impl Drop for Way {
    fn drop(&mut self) {
        guard(&self.traffic).closed.push(self.number);
    }
}

/// The program's side of the baton.
struct Seat {
    baton: Receiver<Baton>,
    say: Sender<Said>,
}

thread_local! {
    static SEAT: RefCell<Option<Seat>> = const { RefCell::new(None) };
    static TICKS: Cell<u32> = const { Cell::new(0) };
}

/// Gives the baton away until it comes back; nothing at the end of the process.
fn pass(said: Said) -> Option<Baton> {
    SEAT.with_borrow(|seat| {
        let seat = seat.as_ref()?;
        seat.say.send(said).ok()?;
        seat.baton.recv().ok()
    })
}

fn wait(_: &[RawFd], until: Option<Instant>) {
    pass(match until {
        Some(_) => Said::Rests,
        None => Said::Waits,
    });
}

/// Lets others go on before it looks again; false at the end of the process.
pub(crate) fn pass_nap() -> bool {
    pass(Said::Naps).is_some()
}

/// A clock that ticks when it is looked at.
fn clock() -> Time {
    TICKS.set(TICKS.get() + 1);
    Time {
        sec: 1_000_000 + i64::from(TICKS.get() / 1000),
        nsec: TICKS.get() % 1000,
    }
}

/// Mounts what is there, or makes it first, if nothing need be there.
fn mount(space: &Arc<dyn Space>, may_make: bool) -> Result<Fs, String> {
    let mount = || Fs::mount(Arc::clone(space), wait, clock);
    let mounted = match mount() {
        Err(_) if may_make => {
            let options = MakeOptions {
                uuid: Uuid::from_u128(1),
                hash_key: [2, 3],
                limit_bytes: LIMIT_BYTES,
                owner: OWNER,
                mode: 0o755,
            };
            make(space, wait, clock, options).and_then(|()| mount())
        }
        mounted => mounted,
    };
    let fs = mounted.map_err(|error| error.to_string())?;
    while fs.free_some() {}
    match (fs.damage(), fs.left()) {
        (Some(damage), _) => Err(damage.to_string()),
        (None, 0) => Ok(fs),
        (None, left) => Err(format!("{left} inodes are left to be freed")),
    }
}

fn sync(fs: &Fs, port: &mut Port) -> Outcome<()> {
    fs.sync_all(port).map_err(|error| error.errno())
}

/// The program: mounts, tells what is there, and does what it is told.
fn live(space: &Arc<dyn Space>, may_make: bool, segment: Option<Arc<Segment>>) {
    let fs = mount(space, may_make);
    let port = fs.and_then(|fs| {
        let mut port = fs.port().map_err(|error| error.to_string())?;
        let hall = segment.map(|segment| Hall::new(&fs, &mut port, segment));
        let hall = hall.transpose().map_err(|error| error.to_string())?;
        Ok((fs, port, hall))
    });
    let (fs, mut port, mut hall) = match port {
        Ok(all) => all,
        Err(why) => {
            pass(Said::Mounted(Err(why)));
            return;
        }
    };
    let has_guests = hall.is_some();
    let read = |port: &mut Port| {
        let model = read(&fs, port)?;
        Ok(match has_guests {
            true => without_files(model),
            false => model,
        })
    };
    let mut next = pass(Said::Mounted(read(&mut port)));
    while let Some(baton) = next {
        next = match baton {
            Baton::Do(Job::Op(op)) => pass(Said::Ran(run(&fs, &mut port, &op))),
            Baton::Do(Job::Sync) => pass(Said::Ran(sync(&fs, &mut port))),
            Baton::Do(Job::Read) => {
                // What was out of reach when it was deleted.
                while fs.free_some() {}
                pass(Said::Held(read(&mut port)))
            }
            Baton::Do(Job::Ask(file, ask)) => {
                let hall = hall.as_mut().expect("it has guests");
                pass(Said::Replied(hall.answer(&fs, &mut port, file, &ask)))
            }
            Baton::GoOn => pass(Said::Waits),
        };
    }
}

/// What an operation that failed says if the volume failed.
pub(crate) fn is_volumes(errno: Errno) -> bool {
    errno == Errno::IO || errno == Errno::ROFS
}

/// The simulation's side of the baton.
pub(crate) struct Mount {
    traffic: Shared,
    /// By number; nothing where the volume opened none.
    channels: BTreeMap<u32, Option<Box<dyn Channel>>>,
    baton: Option<Sender<Baton>>,
    said: Receiver<Said>,
    thread: Option<JoinHandle<()>>,
    /// It has a job, and waits for its volume.
    is_busy: bool,
    rests: Option<Duration>,
    rests_until: Option<Duration>,
    opened: u32,
}

impl Mount {
    /// Begins to mount.
    pub(crate) fn new(
        size_bytes: u64,
        may_make: bool,
        segment: Option<Arc<Segment>>,
    ) -> (Mount, Said) {
        let traffic = Shared::default();
        guard(&traffic).size_bytes = size_bytes;
        let (baton, taken) = channel();
        let (say, said) = channel();
        let space: Arc<dyn Space> = Arc::new(Seam(Arc::clone(&traffic)));
        let carried = defect::carry();
        let thread = std::thread::spawn(move || {
            carried.take_up();
            let last = say.clone();
            SEAT.set(Some(Seat { baton: taken, say }));
            let lived = catch_unwind(AssertUnwindSafe(|| live(&space, may_make, segment)));
            if let Err(payload) = lived {
                let text = payload.downcast_ref::<String>().cloned();
                let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
                // Nobody listens at the end of the process.
                let _ = last.send(Said::Panicked(text.unwrap_or_default()));
            }
            SEAT.set(None);
        });
        let mut mount = Mount {
            traffic,
            channels: BTreeMap::new(),
            baton: Some(baton),
            said,
            thread: Some(thread),
            is_busy: true,
            rests: None,
            rests_until: None,
            opened: 0,
        };
        let said = mount.listen();
        (mount, said)
    }

    /// Whether it has nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        !self.is_busy
    }

    /// Channels that it uses.
    pub(crate) fn channels(&self) -> usize {
        self.channels.values().flatten().count()
    }

    /// Gives it something to do; it must have nothing.
    pub(crate) fn begin(&mut self, job: Job) -> Said {
        assert!(self.is_idle(), "one job at a time");
        self.hand_over(Baton::Do(job))
    }

    /// Lets channels make progress; what it waited for may be there then. Nothing if it
    /// says nothing new.
    pub(crate) fn turn(&mut self, driven: &Driven, now: Duration) -> Option<Said> {
        self.ask(driven);
        let mut traffic = guard(&self.traffic);
        for (number, channel) in &mut self.channels {
            if let Some(channel) = channel {
                let into = traffic.ended.entry(*number).or_default();
                channel.reap(into);
            }
        }
        let is_answered = traffic.ended.values().any(|ended| !ended.is_empty());
        drop(traffic);
        let rested = self
            .rests
            .is_some_and(|rest| now >= *self.rests_until.get_or_insert(now + rest));
        if !self.is_busy || !is_answered && !rested {
            return None;
        }
        let said = self.hand_over(Baton::GoOn);
        self.ask(driven);
        Some(said)
    }

    /// Takes what it asked to the volume.
    fn ask(&mut self, driven: &Driven) {
        let mut traffic = guard(&self.traffic);
        for number in self.opened + 1..=traffic.opened {
            self.channels.insert(number, driven.open().ok());
        }
        self.opened = traffic.opened;
        let asked = std::mem::take(&mut traffic.asked);
        for (number, token, request) in asked {
            match self.channels.get_mut(&number) {
                Some(Some(channel)) => channel.submit(token, request),
                _ => traffic.ended.entry(number).or_default().push(Completion {
                    token,
                    result: Err(SpaceError::Unavailable("no channel was opened".into())),
                }),
            }
        }
        for number in std::mem::take(&mut traffic.closed) {
            self.channels.remove(&number);
        }
    }

    fn hand_over(&mut self, baton: Baton) -> Said {
        let sent = self.baton.as_ref().map(|to| to.send(baton));
        assert!(matches!(sent, Some(Ok(()))), "the program listens");
        self.listen()
    }

    fn listen(&mut self) -> Said {
        let said = self.said.recv();
        let said = said.unwrap_or_else(|_| Said::Panicked("it is over".into()));
        self.rests = match said {
            Said::Rests => Some(REST),
            Said::Naps => Some(NAP),
            _ => None,
        };
        self.rests_until = None;
        self.is_busy = self.rests.is_some() || matches!(said, Said::Waits);
        said
    }
}

impl Drop for Mount {
    /// As a crash: nothing reaches the volume any more.
    fn drop(&mut self) {
        self.channels.clear();
        guard(&self.traffic).is_cut = true;
        self.baton = None;
        if let Some(thread) = self.thread.take() {
            // What it died of was said before.
            let _ = thread.join();
        }
    }
}
