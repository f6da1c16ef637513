//! A space in memory, in two kinds: one completes inside `submit`, the other
//! later, from a thread, and rings an eventfd.

#![allow(dead_code, reason = "each test file uses a part")]

use pagemesh_base::space::{
    Channel, Completion, Reply, Request, Space, SpaceError, Token, check_range,
};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    AtOnce,
    Later,
}

/// What channels of a space have seen.
#[derive(Default)]
pub struct Seen {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub channels: AtomicUsize,
    pub depth_max: AtomicUsize,
    pub offsets: Mutex<Vec<u64>>,
    /// Bytes of the requests, in the same order.
    pub lens: Mutex<Vec<u64>>,
}

pub struct Memory {
    size_bytes: u64,
    kind: Kind,
    /// Requests after this many fail.
    pub good: u64,
    pub seen: Arc<Seen>,
}

impl Memory {
    pub fn new(size_bytes: u64, kind: Kind) -> Memory {
        Memory {
            size_bytes,
            kind,
            good: u64::MAX,
            seen: Arc::default(),
        }
    }
}

impl Space for Memory {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        self.seen.channels.fetch_add(1, Ordering::Relaxed);
        let core = Core {
            size_bytes: self.size_bytes,
            good: self.good,
            seen: Arc::clone(&self.seen),
        };
        Ok(match self.kind {
            Kind::AtOnce => Box::new(AtOnce {
                core,
                done: Vec::new(),
            }),
            Kind::Later => Box::new(Later::start(core)),
        })
    }
}

struct Core {
    size_bytes: u64,
    good: u64,
    seen: Arc<Seen>,
}

impl Core {
    fn answer(&self, token: Token, request: &Request) -> Completion {
        let seen = &self.seen;
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
            _ if count > self.good => Err(SpaceError::Fenced),
            Request::Read { len, .. } => Ok(Reply::Data(vec![0; *len as usize])),
            _ => Ok(Reply::Done),
        });
        Completion { token, result }
    }
}

struct AtOnce {
    core: Core,
    done: Vec<Completion>,
}

impl Channel for AtOnce {
    fn submit(&mut self, token: Token, request: Request) {
        self.done.push(self.core.answer(token, &request));
        let depth = &self.core.seen.depth_max;
        depth.fetch_max(self.done.len(), Ordering::Relaxed);
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
    }

    fn wait_on(&self, _into: &mut Vec<RawFd>) {
        panic!("everything completes at once: nothing to wait for");
    }
}

struct Later {
    requests: Option<Sender<(Token, Request)>>,
    completions: Receiver<Completion>,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    in_flight: usize,
    seen: Arc<Seen>,
}

impl Later {
    fn start(core: Core) -> Later {
        let bell = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd");
        let bell = Arc::new(bell);
        let (requests, to_do) = channel::<(Token, Request)>();
        let (done, completions) = channel();
        let ring = Arc::clone(&bell);
        let seen = Arc::clone(&core.seen);
        let thread = thread::spawn(move || {
            for (token, request) in to_do {
                if done.send(core.answer(token, &request)).is_err() {
                    return;
                }
                rustix::io::write(&ring, &1u64.to_ne_bytes()).expect("rung");
            }
        });
        Later {
            requests: Some(requests),
            completions,
            bell,
            thread: Some(thread),
            in_flight: 0,
            seen,
        }
    }
}

impl Channel for Later {
    fn submit(&mut self, token: Token, request: Request) {
        self.in_flight += 1;
        self.seen
            .depth_max
            .fetch_max(self.in_flight, Ordering::Relaxed);
        let requests = self.requests.as_ref().expect("open");
        requests.send((token, request)).expect("the thread lives");
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        // The bell first: what comes after it rings again.
        let _nothing_rang = rustix::io::read(&self.bell, &mut [0; 8]);
        let before = into.len();
        into.extend(self.completions.try_iter());
        self.in_flight -= into.len() - before;
    }

    fn wait_on(&self, into: &mut Vec<RawFd>) {
        into.push(self.bell.as_raw_fd());
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the thread ended well");
        }
    }
}
