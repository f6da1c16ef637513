//! The load generator: one thread sends the calls of a schedule over many connections, and reads the answers.
//!
//! Invariants:
//! - The loop is open: no call waits for the answer to another one. If [`super::call_table::CALLS_MAX`] calls are in flight, further ones wait,
//!   and their latency counts from the time at which they were due all the same.
//! - Memory is bounded: calls in flight, and one buffer for all replies.
//! - A status that is not expected is counted and never becomes a latency.

use super::call_table::{CALLS_MAX, CallTable, PendingCall};
use super::calls;
use super::connections::LoadConnections;
use super::file_set::FileSet;
use super::mix::OperationMix;
use super::pacing::Pacing;
use super::point::{PointFigures, PointRecorder};
use super::priority::GeneratorPriority;
use super::schedule::{Arrivals, Schedule};
use super::sizes::BLOCK_BYTES;
use super::workload::{Request, Workload};
use crate::error::BenchError;
use crate::load::{Rng, random_bytes, thread_cpu};
use crate::process::process_cpu;
use pagemesh_nfs_client::Credential;
use std::iter::Peekable;
use std::time::{Duration, Instant};

/// From one look for calls without an answer to the next.
const TIMEOUT_CHECK: Duration = Duration::from_millis(100);
/// The time from one look for calls that are due, to the next, of a generator that need not be precise.
const IMPRECISE_PAUSE: Duration = Duration::from_millis(1);

/// The times at which calls are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LoadKind {
    /// By the schedule, by a precise thread of high priority.
    Scheduled,
    /// By the schedule, beside a measurement: without polls and without a higher priority.
    Beside,
    /// As many calls in flight all the time, without a schedule: the most that the server can do.
    InFlight(usize),
}

/// A load at one rate.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// The times of calls.
    pub kind: LoadKind,
    /// Calls per second of the schedule.
    pub rate_per_s: f64,
    /// The gaps.
    pub arrivals: Arrivals,
    /// The operations.
    pub mix: OperationMix,
    /// The seed of the schedule and of the calls.
    pub seed: u64,
    /// The time before the measured part.
    pub warmup: Duration,
    /// The measured time.
    pub runtime: Duration,
    /// Limit of the wait for an answer.
    pub timeout: Duration,
}

/// Runs a load, and waits until each of its calls has an answer or is too old. `server_pids` are measured, too.
///
/// # Errors
/// If the server closes a connection or breaks the protocol. Calls with an unexpected status are figures and no errors.
pub fn run_load(
    connections: &mut LoadConnections,
    set: &mut FileSet,
    options: &LoadOptions,
    server_pids: &[u32],
) -> Result<PointFigures, BenchError> {
    check(options)?;
    let priority = (options.kind != LoadKind::Beside).then(GeneratorPriority::raise);
    let server_cpu = || -> Option<Duration> { server_pids.iter().map(|it| process_cpu(*it)).sum() };
    let (cpu, before, began) = (thread_cpu(), server_cpu(), Instant::now());
    let files = set.files.len() as u64;
    let mut run = LoadRun::new(connections, set, options);
    run.run()?;
    let (sent_bytes, received_bytes) = (run.sent_bytes, run.received_bytes);
    let (has_timeouts, polled) = (run.has_timeouts, run.pacing.polled_ns());
    let mut figures = run.recorder.figures(options.rate_per_s);
    let wall = began.elapsed().as_secs_f64();
    let percent = |used: Duration| used.as_secs_f64() / wall * 100.0;
    let used = thread_cpu().saturating_sub(cpu);
    // Another thread may have had the processor during a poll.
    let polled = Duration::from_nanos(polled).min(used);
    figures.generator_cpu_percent = percent(used - polled);
    figures.generator_polling_percent = percent(polled);
    if let Some(priority) = &priority {
        figures.generator_scheduling = priority.scheduling().name().to_owned();
    }
    figures.server_cpu_percent = before
        .zip(server_cpu())
        .filter(|_| !server_pids.is_empty())
        .map(|(before, after)| percent(after.saturating_sub(before)));
    figures.files = files;
    (figures.sent_bytes, figures.received_bytes) = (sent_bytes, received_bytes);
    if has_timeouts {
        // A late answer must not meet a call of the next run.
        connections.reopen()?;
    }
    Ok(figures)
}

fn check(options: &LoadOptions) -> Result<(), BenchError> {
    let text = match options.kind {
        LoadKind::InFlight(calls) if (1..CALLS_MAX).contains(&calls) => return Ok(()),
        LoadKind::InFlight(calls) => {
            format!("{calls} calls in flight are not 1 to {}", CALLS_MAX - 1)
        }
        _ if options.rate_per_s.is_finite() && options.rate_per_s > 0.0 => return Ok(()),
        _ => format!("{} calls per second are no rate", options.rate_per_s),
    };
    Err(BenchError::Option(text))
}

struct LoadRun<'r> {
    connections: &'r mut LoadConnections,
    set: &'r mut FileSet,
    kind: LoadKind,
    schedule: Peekable<Schedule>,
    pacing: Pacing,
    workload: Workload,
    recorder: PointRecorder,
    calls: CallTable,
    caller: Credential,
    payload: Vec<u8>,
    timeout_ns: u64,
    /// The end of the schedule.
    end_ns: u64,
    start: Instant,
    /// Whether calls wait because too many are in flight.
    is_held: bool,
    /// The last time at which they did.
    held_ns: u64,
    has_timeouts: bool,
    next_connection: usize,
    sent_bytes: u64,
    received_bytes: u64,
}

impl<'r> LoadRun<'r> {
    fn new(
        connections: &'r mut LoadConnections,
        set: &'r mut FileSet,
        options: &LoadOptions,
    ) -> LoadRun<'r> {
        let length = options.warmup + options.runtime;
        let mut rng = Rng::new(options.seed);
        let (schedule_seed, seed) = (rng.next_u64(), rng.next_u64());
        let rate_per_s = match options.kind {
            LoadKind::InFlight(_) => 0.0,
            _ => options.rate_per_s,
        };
        let schedule = Schedule::new(options.arrivals, rate_per_s, length, schedule_seed);
        LoadRun {
            connections,
            set,
            kind: options.kind,
            schedule: schedule.peekable(),
            pacing: Pacing::new(),
            workload: Workload::new(options.mix, seed),
            recorder: PointRecorder::new(options.warmup, options.runtime),
            calls: CallTable::new(),
            caller: Credential::sys(0, 0),
            payload: random_bytes(&mut rng, 2 * BLOCK_BYTES as usize),
            timeout_ns: options.timeout.as_nanos() as u64,
            end_ns: length.as_nanos() as u64,
            start: Instant::now(),
            is_held: false,
            held_ns: 0,
            has_timeouts: false,
            next_connection: 0,
            sent_bytes: 0,
            received_bytes: 0,
        }
    }

    fn now_ns(&self) -> u64 {
        self.start.elapsed().as_nanos() as u64
    }

    fn run(&mut self) -> Result<(), BenchError> {
        self.start = Instant::now();
        let mut check_ns = TIMEOUT_CHECK.as_nanos() as u64;
        loop {
            let now_ns = self.send_due_calls()?;
            if now_ns >= check_ns {
                check_ns = now_ns + TIMEOUT_CHECK.as_nanos() as u64;
                self.give_up_old_calls(now_ns);
            }
            if self.is_sent(now_ns) && self.calls.len() == 0 {
                return Ok(());
            }
            let next_ns = match self.is_held {
                true => check_ns,
                false => self
                    .schedule
                    .peek()
                    .map_or(check_ns, |due| check_ns.min(*due)),
            };
            for (at, has_room) in self.wait(next_ns)? {
                if has_room {
                    self.connections.flush(at)?;
                }
                self.read(at)?;
            }
        }
    }

    /// Whether all calls of the run are sent.
    fn is_sent(&mut self, now_ns: u64) -> bool {
        match self.kind {
            LoadKind::InFlight(_) => now_ns >= self.end_ns,
            _ => self.schedule.peek().is_none(),
        }
    }

    /// Waits for answers or room up to a time, and polls through the last part before it.
    fn wait(&mut self, until_ns: u64) -> Result<Vec<(usize, bool)>, BenchError> {
        let mut now_ns = self.now_ns();
        let sleep = |from_ns: u64, to_ns: u64| Duration::from_nanos(to_ns.saturating_sub(from_ns));
        if let Some(rested_ns) = self.pacing.rest_until(now_ns) {
            std::thread::sleep(sleep(now_ns, rested_ns));
            now_ns = self.now_ns();
            self.pacing.slept(rested_ns, now_ns);
        }
        if self.kind != LoadKind::Scheduled {
            let limit = sleep(now_ns, until_ns);
            return self.connections.wait(limit.max(IMPRECISE_PAUSE));
        }
        match self.pacing.sleep_until(now_ns, until_ns) {
            Some(planned_ns) => {
                let ready = self.connections.wait(sleep(now_ns, planned_ns))?;
                if ready.is_empty() {
                    self.pacing.slept(planned_ns, self.now_ns());
                }
                Ok(ready)
            }
            None => {
                let ready = self.connections.ready()?;
                if ready.is_empty() {
                    self.pacing.polled(self.now_ns().saturating_sub(now_ns));
                }
                Ok(ready)
            }
        }
    }

    /// Sends the calls that are due. Returns the time.
    fn send_due_calls(&mut self) -> Result<u64, BenchError> {
        loop {
            let now_ns = self.now_ns();
            if let LoadKind::InFlight(most) = self.kind {
                if self.calls.len() >= most || now_ns >= self.end_ns {
                    return Ok(now_ns);
                }
                self.send(now_ns, now_ns)?;
                continue;
            }
            self.is_held = self.calls.is_full();
            if self.is_held {
                self.held_ns = now_ns;
                return Ok(now_ns);
            }
            match self.schedule.next_if(|due| *due <= now_ns) {
                Some(due_ns) => self.send(due_ns, now_ns)?,
                None => return Ok(now_ns),
            }
        }
    }

    fn send(&mut self, due_ns: u64, now_ns: u64) -> Result<(), BenchError> {
        self.recorder.due(due_ns);
        // The server and not the generator is the reason of a delay while too many calls are in flight.
        if due_ns >= self.held_ns {
            self.recorder.sent(due_ns, now_ns);
        }
        let request = self.workload.draw(self.set);
        let call = PendingCall {
            operation: request.operation(),
            expected: request.expected_status().number(),
            due_ns,
            sent_ns: now_ns,
            creates: match request {
                Request::Create { directory, number } => Some((directory, number)),
                _ => None,
            },
        };
        let Some(xid) = self.calls.add(call) else {
            return Ok(());
        };
        // Pages differ, so that no server saves the second one.
        let payload = &self.payload[xid as usize % BLOCK_BYTES as usize..];
        let record = calls::encode(&request, self.set, (xid, &self.caller), payload);
        self.sent_bytes += record.len() as u64;
        let at = self.next_connection;
        self.next_connection = (at + 1) % self.connections.count();
        self.connections.push(at, &record);
        self.connections.flush(at)
    }

    fn read(&mut self, at: usize) -> Result<(), BenchError> {
        let (start, received) = (self.start, &mut self.received_bytes);
        let (calls, recorder, set) = (&mut self.calls, &mut self.recorder, &mut *self.set);
        self.connections.read(at, |reply| {
            *received += reply.bytes;
            // The answer may be to a call that was given up.
            let Some(call) = calls.take(reply.xid) else {
                return;
            };
            if reply.status != Some(call.expected) {
                recorder.failed(call.operation, call.due_ns, reply.status);
                return;
            }
            let now_ns = start.elapsed().as_nanos() as u64;
            recorder.answered(call.operation, call.due_ns, now_ns);
            set.spares.extend(call.creates);
        })
    }

    /// Gives up calls without an answer, and calls that could not be sent long after the schedule.
    fn give_up_old_calls(&mut self, now_ns: u64) {
        for call in self
            .calls
            .take_sent_before(now_ns.saturating_sub(self.timeout_ns))
        {
            self.has_timeouts = true;
            self.recorder.timed_out(call.operation, call.due_ns, now_ns);
        }
        if now_ns > self.end_ns + self.timeout_ns {
            for due_ns in self.schedule.by_ref() {
                let operation = self.workload.draw_unsent();
                self.recorder.due(due_ns);
                self.recorder.timed_out(operation, due_ns, now_ns);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::mpsc;

    const MS: Duration = Duration::from_millis(1);

    /// Answers the calls of one connection until it ends.
    fn answer(
        mut stream: TcpStream,
        number: &mut u64,
        stall: Option<(u64, Duration)>,
        status: &impl Fn(u64) -> Option<u32>,
    ) {
        let mut mark = [0; 4];
        while stream.read_exact(&mut mark).is_ok() {
            let len = u32::from_be_bytes(mark) & 0x7fff_ffff;
            let mut record = vec![0; len as usize];
            if stream.read_exact(&mut record).is_err() {
                return;
            }
            *number += 1;
            if let Some((_, pause)) = stall.filter(|it| it.0 == *number) {
                std::thread::sleep(pause);
            }
            let Some(status) = status(*number) else {
                continue;
            };
            let mut reply = (28u32 | 1 << 31).to_be_bytes().to_vec();
            reply.extend(&record[..4]);
            for word in [1, 0, 0, 0, 0, status] {
                reply.extend(u32::to_be_bytes(word));
            }
            if stream.write_all(&reply).is_err() {
                return;
            }
        }
    }

    /// Answers each call with this status, but `None` with none. It sleeps before the call of that number.
    fn serve(
        stall: Option<(u64, Duration)>,
        status: impl Fn(u64) -> Option<u32> + Send + 'static,
    ) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        std::thread::spawn(move || {
            let mut number = 0;
            // A second client comes after time-outs of the first one.
            while let Ok((stream, _)) = listener.accept() {
                answer(stream, &mut number, stall, &status);
            }
        });
        address
    }

    fn options(rate_per_s: f64) -> LoadOptions {
        LoadOptions {
            kind: LoadKind::Scheduled,
            rate_per_s,
            arrivals: Arrivals::Fixed,
            mix: OperationMix::READS,
            seed: 1,
            warmup: 50 * MS,
            runtime: 1000 * MS,
            timeout: 5000 * MS,
        }
    }

    fn load(server: SocketAddr, options: &LoadOptions) -> PointFigures {
        let mut connections = LoadConnections::open(server, 1).expect("connected");
        let mut set = FileSet::made_up(100);
        run_load(&mut connections, &mut set, options, &[]).expect("it runs")
    }

    #[test]
    fn stall_of_the_server_shows_in_percentiles() {
        // A closed loop would count the stall once in 1000 calls: at p99.9, and not at p90.
        let pause = 400 * MS;
        let server = serve(Some((500, pause)), |_| Some(0));
        let found = load(server, &options(1000.0));
        assert_eq!(found.scheduled, 1000);
        assert_eq!(found.answered, 1000);
        assert!(found.latencies.p99_ns > 380_000_000, "{found:?}");
        assert!(found.latencies.p90_ns > 290_000_000, "{found:?}");
        assert!(found.mean_ms() > 70.0, "{found:?}");
    }

    #[test]
    fn calls_in_flight_are_as_many_as_asked_for() {
        let server = serve(None, |_| Some(0));
        let mut options = options(f64::NAN);
        options.kind = LoadKind::InFlight(32);
        options.runtime = 200 * MS;
        let found = load(server, &options);
        assert!(found.answered > 0, "{found:?}");
        assert_eq!(found.answered, found.scheduled);
        // No call is due before it is sent, so its latency is of 32 calls before it at most.
        let most_ms = found.latencies.max_ns / 1_000_000;
        assert!(found.mean_ms() > 0.0 && most_ms < 5000, "{found:?}");
        options.kind = LoadKind::InFlight(0);
        let mut connections = LoadConnections::open(server, 1).expect("connected");
        let mut set = FileSet::made_up(100);
        assert!(run_load(&mut connections, &mut set, &options, &[]).is_err());
    }

    #[test]
    fn unexpected_status_is_no_answer() {
        let server = serve(None, |n| Some(if n % 2 == 0 { 0 } else { 5 }));
        let found = load(server, &options(500.0));
        assert_eq!(found.failed_count() + found.answered, found.scheduled);
        assert_eq!(found.failed[0].status, "IO");
        assert_eq!(found.latencies.count, found.answered);
        assert!(found.void.is_some());
    }

    #[test]
    fn call_without_an_answer_is_a_timeout() {
        let server = serve(None, |n| (n > 200).then_some(0));
        let mut options = options(1000.0);
        options.timeout = 300 * MS;
        let found = load(server, &options);
        assert!(found.timeouts >= 140, "{found:?}");
        assert_eq!(found.timeouts + found.answered, found.scheduled);
        assert!(found.latencies.max_ns >= 300_000_000, "{found:?}");
    }

    #[test]
    fn closed_connection_is_an_error() {
        let (sent, address) = mpsc::channel();
        let server = std::thread::spawn(move || {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            sent.send(listener.local_addr().expect("bound"))
                .expect("asked");
            drop(listener.accept());
        });
        let address = address.recv().expect("bound");
        let mut connections = LoadConnections::open(address, 1).expect("connected");
        server.join().expect("it ended");
        let mut set = FileSet::made_up(100);
        let found = run_load(&mut connections, &mut set, &options(100.0), &[]);
        let text = found.expect_err("closed").to_string();
        assert!(text.contains("127.0.0.1"), "{text}");
    }

    #[test]
    fn senseless_options_are_refused() {
        let server = serve(None, |_| Some(0));
        assert!(LoadConnections::open(server, 0).is_err());
        let mut connections = LoadConnections::open(server, 1).expect("connected");
        let mut set = FileSet::made_up(100);
        let found = run_load(&mut connections, &mut set, &options(0.0), &[]);
        assert!(found.is_err());
    }
}
