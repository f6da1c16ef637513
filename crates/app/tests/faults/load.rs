//! A checked load of writes, reads, discards and flushes on an export.
//!
//! Every connection changes its own blocks, and each block has one request at a time. So the
//! possible contents of a block are always known.

use crate::faults::nbd::{Command, FUA, NbdConnection};
use crate::faults::oracle::{BLOCK, BlockOracle, BlockState};
use pagemesh_base::poison;
use pagemesh_base::rng::SplitMix64;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Blocks of the longest request.
const SPAN: u64 = 8;
/// How long a test waits for the progress of a load.
const PROGRESS_LIMIT: Duration = Duration::from_secs(60);

/// Percentages of requests; the rest are writes.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestMix {
    pub reads: u64,
    pub trims: u64,
    pub zeroes: u64,
    pub fua: u64,
}

#[derive(Clone, Debug)]
pub struct LoadPlan {
    pub connections: usize,
    /// The number of connections that only read.
    pub readers: usize,
    /// Requests in flight on each connection.
    pub depth: usize,
    pub mix: RequestMix,
    /// Requests between two flushes.
    pub flush_every: Option<u64>,
    /// Whether a change is durable only after FUA or a flush on any connection: for legs of class
    /// `file-sync` in a power failure.
    pub needs_flush: bool,
    /// Requests per second of each connection; no limit if `None`.
    pub rate: Option<u32>,
}

impl Default for LoadPlan {
    fn default() -> LoadPlan {
        LoadPlan {
            connections: 2,
            readers: 0,
            depth: 8,
            mix: RequestMix {
                reads: 20,
                ..RequestMix::default()
            },
            flush_every: None,
            needs_flush: false,
            rate: None,
        }
    }
}

/// The results of a load.
#[derive(Clone, Debug, Default)]
pub struct LoadReport {
    pub requests: u64,
    /// The duration of the slowest request.
    pub longest: Duration,
    /// The duration of the slowest read.
    pub longest_read: Duration,
    pub bytes_written: u64,
    /// Error replies, and blocks with wrong contents.
    pub failures: Vec<String>,
    /// Connections that broke.
    pub broken: usize,
}

impl LoadReport {
    /// Asserts that the only failures are requests of this kind with this error.
    #[track_caller]
    pub fn assert_only_errors(&self, errno: u32, request: &str) {
        let told = format!("errno {errno} for {request}");
        let failures = self.failures.iter();
        let strange: Vec<_> = failures.filter(|what| !what.starts_with(&told)).collect();
        assert!(strange.is_empty(), "{strange:#?}");
    }
}

#[derive(Default)]
struct LoadShared {
    stop: AtomicBool,
    answered: AtomicU64,
    broken: AtomicU64,
    /// Blocks and changes that were acknowledged on any connection and that no flush covers yet.
    acknowledged: Mutex<Vec<(u64, u64)>>,
    /// The last change at the time of a flush that reported lost writes. The report counts for all
    /// connections: no later flush covers changes that were in flight then.
    doubtful_change: AtomicU64,
}

impl LoadShared {
    fn acknowledged(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        poison::lock(&self.acknowledged)
    }
}

/// A load that is running.
pub struct RunningLoad {
    shared: Arc<LoadShared>,
    workers: Vec<JoinHandle<LoadReport>>,
}

impl RunningLoad {
    /// Connects, and starts the load.
    #[track_caller]
    pub fn start(
        oracle: &Arc<BlockOracle>,
        socket: &Path,
        export: &str,
        plan: &LoadPlan,
    ) -> RunningLoad {
        let shared = Arc::new(LoadShared::default());
        let worker = |lane: usize| {
            // The connections use both kinds of replies.
            let nbd = NbdConnection::connect(socket, export, lane.is_multiple_of(2))
                .expect("the export takes us");
            let seed = oracle.seed() ^ oracle.mark().rotate_left(32) ^ lane as u64;
            let mut worker = LoadWorker {
                oracle: oracle.clone(),
                shared: shared.clone(),
                plan: plan.clone(),
                index: lane as u64,
                rng: SplitMix64::new(seed),
                flight: HashMap::new(),
                blocks_in_flight: vec![],
                cookies: 0,
                report: LoadReport::default(),
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
        RunningLoad { shared, workers }
    }

    /// Requests answered so far.
    pub fn answered(&self) -> u64 {
        self.shared.answered.load(Ordering::Relaxed)
    }

    /// Waits for this many more answers.
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

    /// Sends no more requests; those in flight may still be answered.
    pub fn ask_to_stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }

    /// Waits for the requests in flight, and ends the load.
    pub fn finish(self) -> LoadReport {
        self.ask_to_stop();
        let mut sum = LoadReport::default();
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

impl LoadReport {
    /// Asserts that no request failed and that no connection broke.
    #[track_caller]
    pub fn assert_success(&self) {
        assert!(self.failures.is_empty(), "failures: {:#?}", self.failures);
        assert_eq!(self.broken, 0, "connections broke");
        assert!(self.requests > 0, "nothing was done");
    }
}

/// A request in flight.
struct InFlightRequest {
    command: Command,
    flags: u16,
    block: u64,
    count: u64,
    change: u64,
    since: Instant,
    /// The changes that a flush makes durable.
    covers: Vec<(u64, u64)>,
}

struct LoadWorker {
    oracle: Arc<BlockOracle>,
    shared: Arc<LoadShared>,
    plan: LoadPlan,
    index: u64,
    rng: SplitMix64,
    flight: HashMap<u64, InFlightRequest>,
    /// Blocks of the requests in flight.
    blocks_in_flight: Vec<(u64, u64)>,
    cookies: u64,
    report: LoadReport,
}

impl LoadWorker {
    fn run(&mut self, mut nbd: NbdConnection) -> io::Result<()> {
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
            self.complete(&flight, reply.errno, &reply.data);
        }
    }

    /// Limits the load to its requests per second.
    fn keep_rate(&self, began: Instant) {
        let Some(rate) = self.plan.rate else {
            return;
        };
        let due = Duration::from_secs(self.cookies) / rate;
        std::thread::sleep(due.saturating_sub(began.elapsed()));
    }

    fn issue(&mut self, nbd: &mut NbdConnection) -> io::Result<()> {
        self.cookies += 1;
        let cookie = self.cookies;
        let (command, flags) = self.choose_command();
        let mut flight = InFlightRequest {
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
            (flight.block, flight.count) = self.pick_blocks();
            self.blocks_in_flight.push((flight.block, flight.count));
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
                self.oracle.block(number).begin(BlockState { change, zero });
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

    fn choose_command(&mut self) -> (Command, u16) {
        if (self.index as usize) < self.plan.readers {
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

    /// A random run of blocks of this connection without a request in flight.
    fn pick_blocks(&mut self) -> (u64, u64) {
        let lanes = self.plan.connections as u64;
        let spans = self.oracle.len() / SPAN / lanes;
        loop {
            let span = self.rng.below(spans) * lanes + self.index;
            // Most requests are for one block.
            let count = match self.rng.below(4) {
                0 => 1 + self.rng.below(SPAN),
                _ => 1,
            };
            let block = span * SPAN + self.rng.below(SPAN - count + 1);
            let meets = |held: &(u64, u64)| held.0 < block + count && block < held.0 + held.1;
            if !self.blocks_in_flight.iter().any(meets) {
                return (block, count);
            }
        }
    }

    fn complete(&mut self, flight: &InFlightRequest, errno: u32, data: &[u8]) {
        let took = flight.since.elapsed();
        self.report.longest = self.report.longest.max(took);
        if flight.command == Command::Read {
            self.report.longest_read = self.report.longest_read.max(took);
        }
        self.report.requests += 1;
        self.blocks_in_flight
            .retain(|held| *held != (flight.block, flight.count));
        if errno != 0 {
            let what = flight.command;
            let place = (flight.block, flight.count);
            let what = format!("errno {errno} for {what:?} of {place:?} after {took:?}");
            self.report.failures.push(what);
            if flight.command == Command::Flush {
                let mark = self.oracle.mark();
                self.shared
                    .doubtful_change
                    .fetch_max(mark, Ordering::Relaxed);
            }
        } else {
            self.acknowledge(flight, data);
        }
        self.shared.answered.fetch_add(1, Ordering::Relaxed);
    }

    fn acknowledge(&mut self, flight: &InFlightRequest, data: &[u8]) {
        let numbers = flight.block..flight.block + flight.count;
        match flight.command {
            Command::Flush => {
                // `covers` is empty if changes are durable without a flush.
                let doubtful = self.shared.doubtful_change.load(Ordering::Relaxed);
                let covers = flight.covers.iter();
                for &(number, change) in covers.filter(|(_, change)| *change > doubtful) {
                    self.oracle.block(number).confirm(change);
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
                        if !self.oracle.block(number).confirm(flight.change) {
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
