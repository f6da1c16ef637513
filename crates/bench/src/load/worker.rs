//! One thread's closed loop over one channel.
//!
//! Invariants:
//! - Exactly `queue_depth` requests are in flight while the limit is not reached, and none when
//!   `run` returns: rounds do not leak into each other.
//! - Latency is from before `submit` to after the `reap` that brought the completion. With a queue
//!   depth of one, a single clock reading ends one operation and starts the next.
//! - It never spins: when nothing is reaped it waits on the channel's descriptors and deadline.
//!   Whether to spin is the channel's choice.

use super::rng::Rng;
use super::{AccessOrder, LoadResult, RequestMix, RunLimit};
use crate::error::BenchError;
use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Reply, Request, Space, Token};
use popol::{Event, Sources, interest};
use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// In a run by count, one of this many operations is timed.
const TIMED_STRIDE: u64 = 8;

/// Longer than a volume waits for a lost leg before it fails requests.
const STALL_MAX: Duration = Duration::from_secs(120);
/// Bytes of the source of writes, plus one block. It is small enough to stay in the second-level
/// cache, so that the source's memory is not measured.
pub(crate) const SOURCE_BYTES: usize = 256 << 10;

/// A channel and its workload.
pub struct LoadWorker {
    channel: Box<dyn Channel>,
    mix: RequestMix,
    random: Rng,
    blocks: u64,
    next_block: u64,
    source: Bytes,
    slots: Vec<InFlightRequest>,
    free_slots: Vec<usize>,
    completions: Vec<Completion>,
    channel_waiter: ChannelWaiter,
}

#[derive(Clone, Copy)]
struct InFlightRequest {
    started: Instant,
    read: bool,
}

impl LoadWorker {
    /// Opens a channel. `nth` of `of` distinguishes threads: their seeds, and the start of
    /// sequential ones.
    ///
    /// # Errors
    /// If the options are invalid for the space, or it refuses a channel.
    pub fn open(
        space: &dyn Space,
        mix: &RequestMix,
        nth: u64,
        of: u64,
    ) -> Result<LoadWorker, BenchError> {
        let blocks = mix.blocks_of(space.size_bytes())?;
        let channel = space
            .open()
            .map_err(BenchError::space("opening a channel"))?;
        let mut random = Rng::new(mix.seed ^ nth.wrapping_mul(0xd6e8_feb8_6659_fd93));
        let source = random_bytes(&mut random, SOURCE_BYTES + mix.block_bytes as usize);
        let flight = InFlightRequest {
            started: Instant::now(),
            read: false,
        };
        Ok(LoadWorker {
            channel,
            mix: mix.clone(),
            random,
            blocks,
            next_block: (u128::from(blocks) * u128::from(nth) / u128::from(of.max(1))) as u64,
            source: Bytes::from(source),
            slots: vec![flight; mix.queue_depth],
            free_slots: (0..mix.queue_depth).rev().collect(),
            completions: Vec::with_capacity(mix.queue_depth),
            channel_waiter: ChannelWaiter::default(),
        })
    }

    /// Changes the share of reads from here on.
    pub fn set_read_percent(&mut self, read_percent: u8) {
        self.mix.read_percent = read_percent.min(100);
    }

    /// Runs to the limit and waits for all completions.
    ///
    /// # Errors
    /// If a request fails, gets a reply of the wrong kind, or none completes for two minutes. The
    /// channel must not be used any more then.
    pub fn run(&mut self, limit: RunLimit) -> Result<LoadResult, BenchError> {
        let mut outcome = LoadResult::default();
        let cpu = thread_cpu();
        let start = Instant::now();
        match self.mix.queue_depth {
            1 => self.run_depth_one(start, limit, &mut outcome)?,
            _ => self.run_pipelined(start, limit, &mut outcome)?,
        }
        outcome.wall = start.elapsed();
        outcome.cpu = thread_cpu().saturating_sub(cpu);
        outcome.bytes = outcome.operations() * u64::from(self.mix.block_bytes);
        Ok(outcome)
    }

    /// Makes all earlier writes durable.
    ///
    /// # Errors
    /// As [`LoadWorker::run`].
    pub fn flush(&mut self) -> Result<(), BenchError> {
        self.channel.submit(Token(0), Request::Flush);
        self.reap()?;
        let completion = self.completions.pop().expect("reap brought one");
        completion.result.map_err(BenchError::space("a flush"))?;
        Ok(())
    }

    fn run_depth_one(
        &mut self,
        start: Instant,
        limit: RunLimit,
        outcome: &mut LoadResult,
    ) -> Result<(), BenchError> {
        let (end, mut count) = limit.from(start);
        // A clock reading takes a twentieth of a mapped write. So runs by count time one operation
        // of a few, which stands for them all.
        let alike = matches!(self.mix.read_percent, 0 | 100);
        let stride = match limit {
            RunLimit::Operations(_) if alike => TIMED_STRIDE,
            _ => 1,
        };
        while count > 0 {
            let now = Instant::now();
            if now >= end {
                break;
            }
            let read = self.execute_one(now)?;
            let latency = now.elapsed();
            let alike = count.min(stride);
            outcome.record(read, latency, alike);
            for _ in 1..alike {
                self.execute_one(now)?;
            }
            count -= alike;
        }
        Ok(())
    }

    /// Executes one request. Returns whether it was a read.
    fn execute_one(&mut self, now: Instant) -> Result<bool, BenchError> {
        self.submit(0, now);
        self.reap()?;
        let read = self.slots[0].read;
        let completion = self.completions.pop().expect("reap brought one");
        self.check_completion(completion)?;
        Ok(read)
    }

    fn run_pipelined(
        &mut self,
        start: Instant,
        limit: RunLimit,
        outcome: &mut LoadResult,
    ) -> Result<(), BenchError> {
        let (end, mut count) = limit.from(start);
        let mut now = start;
        loop {
            while count > 0
                && now < end
                && let Some(slot) = self.free_slots.pop()
            {
                now = Instant::now();
                self.submit(slot, now);
                count -= 1;
            }
            if self.free_slots.len() == self.slots.len() {
                return Ok(());
            }
            self.reap()?;
            now = Instant::now();
            while let Some(completion) = self.completions.pop() {
                let slot = self.check_completion(completion)?;
                let InFlightRequest { started, read } = self.slots[slot];
                outcome.record(read, now - started, 1);
                self.free_slots.push(slot);
            }
        }
    }

    fn submit(&mut self, slot: usize, now: Instant) {
        let read = match self.mix.read_percent {
            0 => false,
            100 => true,
            percent => self.random.below(100) < u64::from(percent),
        };
        self.slots[slot] = InFlightRequest { started: now, read };
        let len = self.mix.block_bytes;
        let offset = self.next_offset();
        let request = match read {
            true => Request::Read { offset, len },
            false => Request::Write {
                offset,
                data: self.next_data(),
                durable: self.mix.durable,
            },
        };
        self.channel.submit(Token(slot as u64), request);
    }

    fn next_offset(&mut self) -> u64 {
        let block = match self.mix.order {
            AccessOrder::Random => self.random.below(self.blocks),
            AccessOrder::Sequential => {
                let block = self.next_block;
                self.next_block = (block + 1) % self.blocks;
                block
            }
        };
        block * u64::from(self.mix.block_bytes)
    }

    /// The next part of the source, on a page boundary.
    fn next_data(&mut self) -> Bytes {
        let len = self.mix.block_bytes as usize;
        let at = self.random.below((SOURCE_BYTES >> 12) as u64 + 1) as usize;
        self.source.slice(at << 12..(at << 12) + len)
    }

    /// Reaps at least one completion.
    fn reap(&mut self) -> Result<(), BenchError> {
        self.channel.reap(&mut self.completions);
        if !self.completions.is_empty() {
            return Ok(());
        }
        let give_up = Instant::now() + STALL_MAX;
        while self.completions.is_empty() {
            self.channel_waiter.wait(self.channel.as_ref(), give_up)?;
            self.channel.reap(&mut self.completions);
        }
        Ok(())
    }

    /// Checks that the completion matches its request. Returns the request's slot.
    fn check_completion(&self, completion: Completion) -> Result<usize, BenchError> {
        let slot = completion.token.0 as usize;
        let (during, wanted) = match self.slots[slot].read {
            true => ("a read", self.mix.block_bytes as usize),
            false => ("a write", 0),
        };
        match completion.result {
            Err(cause) => Err(BenchError::space(during)(cause)),
            Ok(Reply::Done) if wanted == 0 => Ok(slot),
            Ok(Reply::Data(data)) if data.len() == wanted => Ok(slot),
            Ok(_) => Err(BenchError::WrongReply(during)),
        }
    }
}

/// CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}

pub(crate) fn random_bytes(random: &mut Rng, len: usize) -> Vec<u8> {
    let words = (0..len.div_ceil(8)).flat_map(|_| random.next_u64().to_le_bytes());
    words.take(len).collect()
}

/// Waits for a channel, with reused buffers.
#[derive(Default)]
struct ChannelWaiter {
    fds: Vec<RawFd>,
    events: Vec<Event<RawFd>>,
}

impl ChannelWaiter {
    fn wait(&mut self, channel: &dyn Channel, give_up: Instant) -> Result<(), BenchError> {
        self.fds.clear();
        self.events.clear();
        channel.poll_fds(&mut self.fds);
        let mut sources = Sources::with_capacity(self.fds.len());
        for fd in &self.fds {
            sources.register(*fd, fd, interest::READ);
        }
        let now = Instant::now();
        if now >= give_up {
            return Err(BenchError::Stalled(STALL_MAX.as_secs()));
        }
        let until = channel.deadline().map_or(give_up, |at| at.min(give_up));
        // poll(2) counts milliseconds: a shorter wait would be a spin.
        let timeout = match until.saturating_duration_since(now) {
            Duration::ZERO => Duration::ZERO,
            some => some.max(Duration::from_millis(1)),
        };
        match sources.wait_timeout(&mut self.events, timeout) {
            Ok(_) => Ok(()),
            Err(error) => match error.kind() {
                io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => Ok(()),
                _ => Err(BenchError::system("wait for a completion (poll)")(error)),
            },
        }
    }
}
