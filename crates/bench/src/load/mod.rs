//! Runs a workload on a space: threads, queue depth, block size, share of reads, order; by time or
//! by count; seeded, so that a run can be repeated.

mod rng;
mod worker;

pub(crate) use rng::Rng;
pub use worker::LoadWorker;
pub(crate) use worker::{SOURCE_BYTES, random_bytes, thread_cpu};

use crate::error::BenchError;
use crate::stats::Latencies;
use pagemesh_base::space::{REQUEST_BYTES_MAX, REQUESTS_MAX, Space};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Most threads of one run: more than any intended machine has cores.
pub const THREADS_MAX: usize = 1024;

/// The order of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessOrder {
    /// Uniformly random blocks.
    Random,
    /// The next block; each thread starts in a part of its own.
    Sequential,
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunLimit {
    /// After this time.
    Time(Duration),
    /// After this number of operations in all.
    Operations(u64),
}

impl RunLimit {
    fn from(self, start: Instant) -> (Instant, u64) {
        match self {
            RunLimit::Time(time) => (start + time, u64::MAX),
            // A year: practically no end, and far from overflow.
            RunLimit::Operations(count) => (start + Duration::from_secs(31_536_000), count),
        }
    }

    fn share(self, nth: u64, of: u64) -> RunLimit {
        match self {
            RunLimit::Time(time) => RunLimit::Time(time),
            RunLimit::Operations(count) => {
                RunLimit::Operations(count / of + u64::from(nth < count % of))
            }
        }
    }
}

/// The requests of each thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestMix {
    /// Requests in flight per thread.
    pub queue_depth: usize,
    /// Bytes per request.
    pub block_bytes: u32,
    /// Percentage of reads.
    pub read_percent: u8,
    /// Their order.
    pub order: AccessOrder,
    /// Whether writes complete only when they are durable.
    pub durable: bool,
    /// Seed of the sequence of requests.
    pub seed: u64,
    /// Length of the used part of the space, from its start; `None`: all of it.
    pub span_bytes: Option<u64>,
}

impl Default for RequestMix {
    /// Random writes of 4 KiB, one at a time.
    fn default() -> RequestMix {
        RequestMix {
            queue_depth: 1,
            block_bytes: 4096,
            read_percent: 0,
            order: AccessOrder::Random,
            durable: false,
            seed: 1,
            span_bytes: None,
        }
    }
}

impl RequestMix {
    /// Number of blocks in the used part of a space.
    fn blocks_of(&self, size_bytes: u64) -> Result<u64, BenchError> {
        let option = |text: String| Err(BenchError::Option(text));
        if !(1..=REQUESTS_MAX).contains(&self.queue_depth) {
            let depth = self.queue_depth;
            return option(format!(
                "a queue depth of {depth} is not 1 to {REQUESTS_MAX}"
            ));
        }
        if !(1..=REQUEST_BYTES_MAX).contains(&self.block_bytes) {
            let bytes = self.block_bytes;
            return option(format!(
                "blocks of {bytes} bytes are not 1 to {REQUEST_BYTES_MAX}"
            ));
        }
        if self.read_percent > 100 {
            return option(format!("{} % reads are more than all", self.read_percent));
        }
        let span = self.span_bytes.unwrap_or(size_bytes).min(size_bytes);
        match span / u64::from(self.block_bytes) {
            0 => option(format!(
                "the {span} bytes to be used hold no block of {}; use a larger volume",
                self.block_bytes
            )),
            blocks => Ok(blocks),
        }
    }
}

/// The result of a run.
#[derive(Clone, Debug, Default)]
pub struct LoadResult {
    /// Latencies of reads.
    pub reads: Latencies,
    /// Latencies of writes.
    pub writes: Latencies,
    /// Wall time of the longest thread.
    pub wall: Duration,
    /// CPU time of the submitting threads, including kernel time.
    pub cpu: Duration,
    /// Bytes read and written.
    pub bytes: u64,
}

impl LoadResult {
    #[inline]
    fn record(&mut self, read: bool, latency: Duration, count: u64) {
        match read {
            true => self.reads.record_many(latency, count),
            false => self.writes.record_many(latency, count),
        }
    }

    /// Reads and writes.
    pub fn operations(&self) -> u64 {
        self.reads.count() + self.writes.count()
    }

    /// Operations per second.
    pub fn rate(&self) -> f64 {
        self.operations() as f64 / self.wall.as_secs_f64()
    }

    /// Latencies of both.
    pub fn all_latencies(&self) -> Latencies {
        let mut all = self.reads.clone();
        all.merge(&self.writes);
        all
    }

    /// Wall time per operation of one thread that never waits for other threads.
    pub fn wall_ns_per_operation(&self) -> f64 {
        self.wall.as_nanos() as f64 / self.operations() as f64
    }

    /// CPU time per operation.
    pub fn cpu_ns_per_operation(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.operations() as f64
    }

    fn merge(&mut self, other: &LoadResult) {
        self.reads.merge(&other.reads);
        self.writes.merge(&other.writes);
        self.wall = self.wall.max(other.wall);
        self.cpu += other.cpu;
        self.bytes += other.bytes;
    }
}

/// Runs the same mix on `threads` threads with a channel each. All start together, after every
/// channel is open.
///
/// # Errors
/// The first thread's error, after all have stopped.
pub fn run(
    space: &dyn Space,
    mix: &RequestMix,
    threads: usize,
    limit: RunLimit,
) -> Result<LoadResult, BenchError> {
    if !(1..=THREADS_MAX).contains(&threads) {
        let text = format!("{threads} threads are not 1 to {THREADS_MAX}");
        return Err(BenchError::Option(text));
    }
    let of = threads as u64;
    let workers: Result<Vec<LoadWorker>, BenchError> = (0..of)
        .map(|nth| LoadWorker::open(space, mix, nth, of))
        .collect();
    let shares = workers?.into_iter().zip(0..of).map(|(worker, nth)| {
        let share = limit.share(nth, of);
        (worker, share)
    });
    run_workers(shares.collect())
}

/// Spreads `places` over at most `threads_max` threads with a channel each. Each place is a closed
/// loop of its own: one request in flight, the next one as soon as it has completed. The mix's own
/// queue depth is not used.
///
/// # Errors
/// If the options are invalid, or the space refuses a channel.
pub(crate) fn open_loops(
    space: &dyn Space,
    mix: &RequestMix,
    places: usize,
    threads_max: usize,
) -> Result<Vec<LoadWorker>, BenchError> {
    if places == 0 || !(1..=THREADS_MAX).contains(&threads_max) {
        let text = format!(
            "{places} requests in flight on {threads_max} threads; use at least one, and 1 to \
             {THREADS_MAX} threads"
        );
        return Err(BenchError::Option(text));
    }
    let threads = places.min(threads_max);
    let open = |nth: usize| {
        let share = RequestMix {
            queue_depth: places / threads + usize::from(nth < places % threads),
            ..mix.clone()
        };
        LoadWorker::open(space, &share, nth as u64, threads as u64)
    };
    (0..threads).map(open).collect()
}

/// The longest block that [`fill`] writes.
const FILL_BLOCK_BYTES_MAX: u64 = 256 << 10;

/// Writes the first `span_bytes` once, a multiple of 4096, so that reads are not answered from
/// holes.
///
/// **Data loss:** the previous content of this part is overwritten.
///
/// # Errors
/// If the length is invalid for the space, or a request fails.
pub fn fill(space: &dyn Space, span_bytes: u64) -> Result<(), BenchError> {
    if span_bytes == 0 || !span_bytes.is_multiple_of(4096) || span_bytes > space.size_bytes() {
        let text = format!(
            "{span_bytes} bytes to fill are not whole pages of 4096 within {}",
            space.size_bytes()
        );
        return Err(BenchError::Option(text));
    }
    // The largest power of two that divides the length.
    let block = (1 << span_bytes.trailing_zeros().min(63)).min(FILL_BLOCK_BYTES_MAX);
    let mix = RequestMix {
        queue_depth: 4,
        block_bytes: block as u32,
        order: AccessOrder::Sequential,
        span_bytes: Some(span_bytes),
        ..RequestMix::default()
    };
    let blocks = span_bytes / block;
    LoadWorker::open(space, &mix, 0, 1)?.run(RunLimit::Operations(blocks))?;
    Ok(())
}

/// Runs workers with different mixes concurrently, each on a thread of its own.
///
/// # Errors
/// The first failed worker's error, after all have stopped.
pub(crate) fn run_workers(workers: Vec<(LoadWorker, RunLimit)>) -> Result<LoadResult, BenchError> {
    let start = Barrier::new(workers.len());
    let results: Vec<Result<LoadResult, BenchError>> = thread::scope(|scope| {
        let start = &start;
        let spawn = |(mut worker, limit): (LoadWorker, RunLimit)| {
            scope.spawn(move || {
                start.wait();
                worker.run(limit)
            })
        };
        let running: Vec<_> = workers.into_iter().map(spawn).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| {
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        running.into_iter().map(join).collect()
    });
    let mut outcome = LoadResult::default();
    for result in results {
        outcome.merge(&result?);
    }
    Ok(outcome)
}
