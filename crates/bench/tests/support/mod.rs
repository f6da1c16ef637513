//! A space in memory, of two kinds: one completes within `submit`, the other later, from a thread,
//! and signals an eventfd.

#![allow(dead_code, reason = "each test file uses a part")]

use pagemesh_base::event_fd::EventFd;
use pagemesh_base::space::{
    Channel, Completion, Reply, Request, Space, SpaceError, Token, check_range,
};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum CompletionMode {
    Immediate,
    OnThread,
}

/// Counters of all channels of a space.
#[derive(Default)]
pub struct SpaceCounters {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub channels: AtomicUsize,
    pub depth_max: AtomicUsize,
    pub offsets: Mutex<Vec<u64>>,
    /// Bytes of the requests, in order.
    pub lens: Mutex<Vec<u64>>,
}

pub struct MemorySpace {
    size_bytes: u64,
    kind: CompletionMode,
    /// Requests after this number fail.
    pub requests_before_failure: u64,
    pub counters: Arc<SpaceCounters>,
}

impl MemorySpace {
    pub fn new(size_bytes: u64, kind: CompletionMode) -> MemorySpace {
        MemorySpace {
            size_bytes,
            kind,
            requests_before_failure: u64::MAX,
            counters: Arc::default(),
        }
    }
}

impl Space for MemorySpace {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        self.counters.channels.fetch_add(1, Ordering::Relaxed);
        let core = ChannelCore {
            size_bytes: self.size_bytes,
            requests_before_failure: self.requests_before_failure,
            counters: Arc::clone(&self.counters),
        };
        Ok(match self.kind {
            CompletionMode::Immediate => Box::new(ImmediateChannel {
                core,
                done: Vec::new(),
            }),
            CompletionMode::OnThread => Box::new(ThreadedChannel::start(core)),
        })
    }
}

struct ChannelCore {
    size_bytes: u64,
    requests_before_failure: u64,
    counters: Arc<SpaceCounters>,
}

impl ChannelCore {
    fn answer(&self, token: Token, request: &Request) -> Completion {
        let seen = &self.counters;
        let (offset, len, counter) = match request {
            Request::Read { offset, len } => (*offset, u64::from(*len), &seen.reads),
            Request::Write { offset, data, .. } => (*offset, data.len() as u64, &seen.writes),
            other => panic!("the driver asked {other:?}"),
        };
        counter.fetch_add(1, Ordering::Relaxed);
        seen.offsets.lock().expect("not poisoned").push(offset);
        seen.lens.lock().expect("not poisoned").push(len);
        let count = seen.reads.load(Ordering::Relaxed) + seen.writes.load(Ordering::Relaxed);
        let result = check_range(self.size_bytes, offset, len).and_then(|()| match request {
            _ if count > self.requests_before_failure => Err(SpaceError::Fenced),
            Request::Read { len, .. } => Ok(Reply::Data(vec![0; *len as usize])),
            _ => Ok(Reply::Done),
        });
        Completion { token, result }
    }
}

struct ImmediateChannel {
    core: ChannelCore,
    done: Vec<Completion>,
}

impl Channel for ImmediateChannel {
    fn submit(&mut self, token: Token, request: Request) {
        self.done.push(self.core.answer(token, &request));
        let depth = &self.core.counters.depth_max;
        depth.fetch_max(self.done.len(), Ordering::Relaxed);
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
    }

    fn poll_fds(&self, _into: &mut Vec<RawFd>) {
        panic!("everything completes at once: nothing to wait for");
    }
}

struct ThreadedChannel {
    requests: Option<Sender<(Token, Request)>>,
    completions: Receiver<Completion>,
    doorbell: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
    in_flight: usize,
    counters: Arc<SpaceCounters>,
}

impl ThreadedChannel {
    fn start(core: ChannelCore) -> ThreadedChannel {
        let bell = Arc::new(EventFd::new().expect("an eventfd"));
        let (requests, to_do) = channel::<(Token, Request)>();
        let (done, completions) = channel();
        let ring = Arc::clone(&bell);
        let seen = Arc::clone(&core.counters);
        let thread = thread::spawn(move || {
            for (token, request) in to_do {
                if done.send(core.answer(token, &request)).is_err() {
                    return;
                }
                ring.signal();
            }
        });
        ThreadedChannel {
            requests: Some(requests),
            completions,
            doorbell: bell,
            thread: Some(thread),
            in_flight: 0,
            counters: seen,
        }
    }
}

impl Channel for ThreadedChannel {
    fn submit(&mut self, token: Token, request: Request) {
        self.in_flight += 1;
        self.counters
            .depth_max
            .fetch_max(self.in_flight, Ordering::Relaxed);
        let requests = self.requests.as_ref().expect("open");
        requests.send((token, request)).expect("the thread lives");
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        // The doorbell first: a later completion rings it again.
        self.doorbell.drain();
        let before = into.len();
        into.extend(self.completions.try_iter());
        self.in_flight -= into.len() - before;
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        into.push(self.doorbell.as_raw_fd());
    }
}

impl Drop for ThreadedChannel {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the thread ended well");
        }
    }
}
