//! A space whose copies may be gone for a while, as a volume tells it: each channel's next
//! flush fails once. Or they are out of reach, and changes fail that may have been made.

use super::memory::Memory;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

#[derive(Clone)]
pub struct Lossy {
    pub memory: Memory,
    losses: Arc<AtomicU64>,
    flushes: Arc<AtomicU64>,
    /// Transactions that fail from now on.
    failing: Arc<AtomicU64>,
    /// Which requests fail as well, and how many more of them.
    refused: Arc<Mutex<Option<Refused>>>,
}

type Refused = (fn(&Request) -> bool, u64);

impl Lossy {
    pub fn new(memory: &Memory) -> Lossy {
        Lossy {
            memory: memory.clone(),
            losses: Arc::default(),
            flushes: Arc::default(),
            failing: Arc::default(),
            refused: Arc::default(),
        }
    }

    /// Lets so many transactions fail; every second one is made all the same.
    pub fn fail(&self, transactions: u64) {
        self.failing.store(transactions, Ordering::SeqCst);
    }

    /// Lets so many of the requests fail that are like this; they change nothing.
    pub fn refuse(&self, is_like: fn(&Request) -> bool, requests: u64) {
        *self.refused.lock().unwrap() = Some((is_like, requests));
    }

    /// Requests that [`Lossy::refuse`] would still have fail.
    pub fn refusing(&self) -> u64 {
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

    /// Transactions that would still fail.
    pub fn failing(&self) -> u64 {
        self.failing.load(Ordering::SeqCst)
    }

    /// All copies were gone.
    pub fn lose(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
    }

    /// Flushes that succeeded.
    pub fn flushes(&self) -> u64 {
        self.flushes.load(Ordering::SeqCst)
    }
}

impl Space for Lossy {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn losses(&self) -> u64 {
        self.losses.load(Ordering::SeqCst)
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        Ok(Box::new(Way {
            inner: self.memory.open()?,
            told: self.losses(),
            space: self.clone(),
            done: Vec::new(),
        }))
    }
}

struct Way {
    inner: Box<dyn Channel>,
    told: u64,
    space: Lossy,
    done: Vec<Completion>,
}

impl Channel for Way {
    fn submit(&mut self, token: Token, request: Request) {
        if self.space.is_refused(&request) {
            self.done.push(Completion {
                token,
                result: Err(SpaceError::Unavailable("no copy is in reach".into())),
            });
            return;
        }
        if request == Request::Flush {
            let losses = self.space.losses();
            if std::mem::replace(&mut self.told, losses) != losses {
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
            && let Some(left) = self.space.failing().checked_sub(1)
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

    fn wait_on(&self, _: &mut Vec<RawFd>) {}
}
