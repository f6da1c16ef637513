//! A load of writes, reads, discards and flushes on an export, each checked.
//!
//! Every connection changes blocks of its own, and each block by one request
//! at a time; so what a block may hold is always known.

use crate::nbd::{Command, FUA, Nbd};
use crate::oracle::{BLOCK, Oracle, Rng, State};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Blocks of the longest request.
const SPAN: u64 = 8;
/// How long a test waits for a load to come along.
const PROGRESS_LIMIT: Duration = Duration::from_secs(60);

/// Parts of a hundred requests; the rest are writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mix {
    pub reads: u64,
    pub trims: u64,
    pub zeroes: u64,
    pub fua: u64,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub connections: usize,
    /// So many of them only read.
    pub readers: usize,
    /// Requests in flight on each.
    pub depth: usize,
    pub mix: Mix,
    /// Requests between two flushes.
    pub flush_every: Option<u64>,
    /// Only a flush on any connection, or FUA, makes a change sure: for legs of
    /// class `file-sync` whose power fails.
    pub needs_flush: bool,
    /// Requests per second of each connection; none is as fast as it goes.
    pub rate: Option<u32>,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            connections: 2,
            readers: 0,
            depth: 8,
            mix: Mix {
                reads: 20,
                ..Mix::default()
            },
            flush_every: None,
            needs_flush: false,
            rate: None,
        }
    }
}

/// What became of a load.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub requests: u64,
    /// The longest that a request took.
    pub longest: Duration,
    /// The longest that a read took.
    pub longest_read: Duration,
    pub bytes_written: u64,
    /// Errors that were answered, and blocks that were read wrong.
    pub failures: Vec<String>,
    /// Connections that broke.
    pub broken: usize,
}

impl Report {
    /// Asserts that nothing failed but such requests, and they with this error.
    #[track_caller]
    pub fn expect_at_worst(&self, errno: u32, request: &str) {
        let told = format!("errno {errno} for {request}");
        let failures = self.failures.iter();
        let strange: Vec<_> = failures.filter(|what| !what.starts_with(&told)).collect();
        assert!(strange.is_empty(), "{strange:#?}");
    }
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    answered: AtomicU64,
    broken: AtomicU64,
    /// Blocks and changes that were acknowledged on any connection and are not
    /// covered by a flush yet.
    acknowledged: Mutex<Vec<(u64, u64)>>,
    /// The last change when a flush told that some may be lost. It speaks of
    /// all connections: no later flush covers what was on its way then.
    doubtful: AtomicU64,
}

impl Shared {
    fn acknowledged(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        let changes = self.acknowledged.lock();
        changes.unwrap_or_else(PoisonError::into_inner)
    }
}

/// A load that is running.
pub struct Load {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<Report>>,
}

impl Load {
    /// Connects, and starts.
    #[track_caller]
    pub fn start(oracle: &Arc<Oracle>, socket: &Path, export: &str, plan: &Plan) -> Load {
        let shared = Arc::new(Shared::default());
        let worker = |lane: usize| {
            // Both kinds of replies are spoken.
            let nbd =
                Nbd::connect(socket, export, lane.is_multiple_of(2)).expect("the export takes us");
            let seed = oracle.seed() ^ oracle.mark().rotate_left(32) ^ lane as u64;
            let mut worker = Worker {
                oracle: oracle.clone(),
                shared: shared.clone(),
                plan: plan.clone(),
                lane: lane as u64,
                rng: Rng(seed),
                flight: HashMap::new(),
                held: vec![],
                cookies: 0,
                report: Report::default(),
            };
            std::thread::spawn(move || {
                if worker.run(nbd).is_err() {
                    worker.report.broken = 1;
                    worker.shared.broken.fetch_add(1, Ordering::Relaxed);
                }
                worker.report
            })
        };
        let workers = (0..plan.connections).map(worker).collect();
        Load { shared, workers }
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Waits for so many more answers.
    #[track_caller]
    pub fn await_answers(&self, more: u64) {
        let (wanted, until) = (self.answered() + more, Instant::now() + PROGRESS_LIMIT);
        while self.answered() < wanted {
            assert!(Instant::now() < until, "the load makes no progress");
            let broken = self.shared.broken.load(Ordering::Relaxed);
            assert_eq!(broken, 0, "connections broke");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// No more requests; those in flight may still be answered.
    pub fn ask_to_stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }

    /// Waits for the requests in flight, and ends.
    pub fn finish(self) -> Report {
        self.ask_to_stop();
        let mut sum = Report::default();
        for worker in self.workers {
            let one = worker.join().expect("a worker does not panic");
            sum.requests += one.requests;
            sum.longest = sum.longest.max(one.longest);
            sum.longest_read = sum.longest_read.max(one.longest_read);
            sum.bytes_written += one.bytes_written;
            sum.failures.extend(one.failures);
            sum.broken += one.broken;
        }
        sum
    }
}

impl Report {
    /// Nothing failed, and every connection held.
    #[track_caller]
    pub fn expect_good(&self) {
        assert!(self.failures.is_empty(), "failures: {:#?}", self.failures);
        assert_eq!(self.broken, 0, "connections broke");
        assert!(self.requests > 0, "nothing was done");
    }
}

/// A request on its way.
struct Flight {
    command: Command,
    flags: u16,
    block: u64,
    count: u64,
    change: u64,
    since: Instant,
    /// What a flush makes sure.
    covers: Vec<(u64, u64)>,
}

struct Worker {
    oracle: Arc<Oracle>,
    shared: Arc<Shared>,
    plan: Plan,
    lane: u64,
    rng: Rng,
    flight: HashMap<u64, Flight>,
    /// Blocks that a request in flight is about.
    held: Vec<(u64, u64)>,
    cookies: u64,
    report: Report,
}

impl Worker {
    fn run(&mut self, mut nbd: Nbd) -> io::Result<()> {
        let began = Instant::now();
        loop {
            let stopped = self.shared.stop.load(Ordering::Relaxed);
            while !stopped && self.flight.len() < self.plan.depth {
                self.keep_rate(began);
                self.issue(&mut nbd)?;
            }
            if self.flight.is_empty() {
                return Ok(());
            }
            let reply = nbd.reply()?;
            let Some(flight) = self.flight.remove(&reply.cookie) else {
                return Err(io::Error::other("an answer to nothing"));
            };
            self.settle(&flight, reply.errno, &reply.data);
        }
    }

    /// The shape of the load: so many requests in a second.
    fn keep_rate(&self, began: Instant) {
        let Some(rate) = self.plan.rate else {
            return;
        };
        let due = Duration::from_secs(self.cookies) / rate;
        std::thread::sleep(due.saturating_sub(began.elapsed()));
    }

    fn issue(&mut self, nbd: &mut Nbd) -> io::Result<()> {
        self.cookies += 1;
        let cookie = self.cookies;
        let (command, flags) = self.choose();
        let mut flight = Flight {
            command,
            flags,
            block: 0,
            count: 0,
            change: 0,
            since: Instant::now(),
            covers: vec![],
        };
        if command == Command::Flush {
            flight.covers = std::mem::take(&mut *self.shared.acknowledged());
        } else {
            (flight.block, flight.count) = self.pick();
            self.held.push((flight.block, flight.count));
        }
        let mut data = vec![];
        if !matches!(command, Command::Flush | Command::Read) {
            flight.change = self.oracle.next_change();
            let zero = command != Command::Write;
            if !zero {
                data.resize(flight.count as usize * BLOCK, 0);
            }
            for at in 0..flight.count {
                let number = flight.block + at;
                let change = flight.change;
                self.oracle.block(number).begin(State { change, zero });
                if !zero {
                    let into = &mut data[at as usize * BLOCK..][..BLOCK];
                    self.oracle.content(number, change, into);
                }
            }
        }
        let (offset, len) = (
            flight.block * BLOCK as u64,
            flight.count as u32 * BLOCK as u32,
        );
        self.flight.insert(cookie, flight);
        nbd.send(cookie, (command, flags), offset, len, &data)
    }

    fn choose(&mut self) -> (Command, u16) {
        if (self.lane as usize) < self.plan.readers {
            return (Command::Read, 0);
        }
        let every = self.plan.flush_every;
        if every.is_some_and(|every| self.cookies.is_multiple_of(every)) {
            return (Command::Flush, 0);
        }
        let mix = self.plan.mix;
        let mut at = self.rng.below(100);
        let kinds = [
            (mix.reads, (Command::Read, 0)),
            (mix.trims, (Command::Trim, 0)),
            (mix.zeroes, (Command::Zero, 0)),
            (mix.fua, (Command::Write, FUA)),
        ];
        for (part, kind) in kinds {
            if at < part {
                return kind;
            }
            at -= part;
        }
        (Command::Write, 0)
    }

    /// A run of blocks of this connection that nothing in flight is about.
    fn pick(&mut self) -> (u64, u64) {
        let lanes = self.plan.connections as u64;
        let spans = self.oracle.len() / SPAN / lanes;
        loop {
            let span = self.rng.below(spans) * lanes + self.lane;
            // Most requests are of one block.
            let count = match self.rng.below(4) {
                0 => 1 + self.rng.below(SPAN),
                _ => 1,
            };
            let block = span * SPAN + self.rng.below(SPAN - count + 1);
            let meets = |held: &(u64, u64)| held.0 < block + count && block < held.0 + held.1;
            if !self.held.iter().any(meets) {
                return (block, count);
            }
        }
    }

    fn settle(&mut self, flight: &Flight, errno: u32, data: &[u8]) {
        let took = flight.since.elapsed();
        self.report.longest = self.report.longest.max(took);
        if flight.command == Command::Read {
            self.report.longest_read = self.report.longest_read.max(took);
        }
        self.report.requests += 1;
        self.held
            .retain(|held| *held != (flight.block, flight.count));
        if errno != 0 {
            let what = flight.command;
            let place = (flight.block, flight.count);
            let what = format!("errno {errno} for {what:?} of {place:?} after {took:?}");
            self.report.failures.push(what);
            if flight.command == Command::Flush {
                let mark = self.oracle.mark();
                self.shared.doubtful.fetch_max(mark, Ordering::Relaxed);
            }
        } else {
            self.acknowledge(flight, data);
        }
        self.shared.answered.fetch_add(1, Ordering::Relaxed);
    }

    fn acknowledge(&mut self, flight: &Flight, data: &[u8]) {
        let numbers = flight.block..flight.block + flight.count;
        match flight.command {
            Command::Flush => {
                // Nothing is there if changes are sure without it.
                let doubtful = self.shared.doubtful.load(Ordering::Relaxed);
                let covers = flight.covers.iter();
                for &(number, change) in covers.filter(|(_, change)| *change > doubtful) {
                    self.oracle.block(number).settle(change);
                }
            }
            Command::Read => {
                for (number, found) in numbers.zip(data.chunks_exact(BLOCK)) {
                    if let Err(what) = self.oracle.check(number, found, false) {
                        self.report.failures.push(format!("a read: {what}"));
                    }
                }
            }
            Command::Write | Command::Trim | Command::Zero => {
                let bytes = flight.count * BLOCK as u64;
                self.report.bytes_written += bytes;
                for number in numbers {
                    if !self.plan.needs_flush || flight.flags & FUA != 0 {
                        if !self.oracle.block(number).settle(flight.change) {
                            let change = flight.change;
                            let what = format!("change {change} of block {number} is lost");
                            self.report.failures.push(what);
                        }
                    } else {
                        self.shared.acknowledged().push((number, flight.change));
                    }
                }
            }
        }
    }
}
