//! A space that simulates lost copies as a volume reports them: the next flush of each channel
//! fails once. Or the copies are unreachable, and changes fail although they may be made.

use super::memory::MemorySpace;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Clone)]
pub struct LossySpace {
    pub memory: MemorySpace,
    lost_writes: Arc<AtomicU64>,
    flushes: Arc<AtomicU64>,
    /// Whether no change was made since the last flush.
    is_flushed: Arc<AtomicBool>,
    /// Number of transactions that fail from now on.
    failing: Arc<AtomicU64>,
    /// The requests that fail as well, and their number.
    refused: Arc<Mutex<Option<RefusalRule>>>,
}

type RefusalRule = (fn(&Request) -> bool, u64);

impl LossySpace {
    pub fn new(memory: &MemorySpace) -> LossySpace {
        LossySpace {
            memory: memory.clone(),
            lost_writes: Arc::default(),
            flushes: Arc::default(),
            is_flushed: Arc::default(),
            failing: Arc::default(),
            refused: Arc::default(),
        }
    }

    /// Makes this many transactions fail; every second one is applied all the same.
    pub fn fail_transactions(&self, transactions: u64) {
        self.failing.store(transactions, Ordering::SeqCst);
    }

    /// Makes this many requests that match fail; they change nothing.
    pub fn refuse_requests(&self, is_like: fn(&Request) -> bool, requests: u64) {
        *self.refused.lock().unwrap() = Some((is_like, requests));
    }

    /// Requests that [`LossySpace::refuse_requests`] will still make fail.
    pub fn refusals_left(&self) -> u64 {
        self.refused.lock().unwrap().map_or(0, |(_, left)| left)
    }

    fn is_refused(&self, request: &Request) -> bool {
        let mut refused = self.refused.lock().unwrap();
        let Some((is_like, left)) = refused.as_mut() else {
            return false;
        };
        let is_refused = *left > 0 && is_like(request);
        *left -= u64::from(is_refused);
        is_refused
    }

    /// Transactions that will still fail.
    pub fn failures_left(&self) -> u64 {
        self.failing.load(Ordering::SeqCst)
    }

    /// Simulates the loss of all copies for a while.
    pub fn lose_writes(&self) {
        self.lost_writes.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of flushes that succeeded.
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::SeqCst)
    }
}

impl Space for LossySpace {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn lost_writes(&self) -> u64 {
        self.lost_writes.load(Ordering::SeqCst)
    }

    fn needs_flush(&self) -> bool {
        !self.is_flushed.load(Ordering::SeqCst)
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(LossyChannel {
            inner: self.memory.open()?,
            lost_writes_reported: self.lost_writes(),
            space: self.clone(),
            done: Vec::new(),
        }))
    }
}

struct LossyChannel {
    inner: Box<dyn Channel>,
    lost_writes_reported: u64,
    space: LossySpace,
    done: Vec<Completion>,
}

impl Channel for LossyChannel {
    fn submit(&mut self, token: Token, request: Request) {
        if self.space.is_refused(&request) {
            self.done.push(Completion {
                token,
                result: Err(SpaceError::Unavailable("no copy is in reach".into())),
            });
            return;
        }
        let is_read = matches!(request, Request::Read { .. } | Request::Extents { .. });
        if !is_read {
            let is_flushed = request == Request::Flush;
            self.space.is_flushed.store(is_flushed, Ordering::SeqCst);
        }
        if request == Request::Flush {
            let losses = self.space.lost_writes();
            if std::mem::replace(&mut self.lost_writes_reported, losses) != losses {
                let why = "every copy was gone for a while".into();
                self.done.push(Completion {
                    token,
                    result: Err(SpaceError::Unavailable(why)),
                });
                return;
            }
            self.space.flushes.fetch_add(1, Ordering::SeqCst);
        }
        if let Request::Transact { .. } = request
            && let Some(left) = self.space.failures_left().checked_sub(1)
        {
            self.space.failing.store(left, Ordering::SeqCst);
            if left % 2 == 1 {
                self.inner.submit(token, request);
                self.inner.reap(&mut Vec::new());
            }
            self.done.push(Completion {
                token,
                result: Err(SpaceError::Unavailable("no copy is in reach".into())),
            });
            return;
        }
        self.inner.submit(token, request);
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
        self.inner.reap(into);
    }

    fn poll_fds(&self, _: &mut Vec<RawFd>) {}
}
