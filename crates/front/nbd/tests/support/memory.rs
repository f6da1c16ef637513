//! A space in memory: bytes, and the set of written 4 KiB pages. Requests take effect inside
//! `submit`; the test chooses when they complete.

#![allow(dead_code, clippy::unwrap_used)] // Not every user needs all of it, and all are tests.

use bytes::Bytes;
use pagemesh_base::event_fd::EventFd;
use pagemesh_base::space::{
    Channel, Completion, EXTENTS_MAX, Extent, Reply, Request, Space, SpaceError, Token, check_range,
};
use rustix::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

pub const PAGE: u64 = 4096;

/// When requests complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionMode {
    /// Inside `submit`.
    AtOnce,
    /// Later and in another order, which follows from the seed.
    Shuffled(u64),
    /// When the test calls [`Memory::release`].
    Held,
}

struct SpaceContent {
    bytes: Vec<u8>,
    mapped: Vec<bool>,
}

#[derive(Default)]
pub struct SpaceCounters {
    pub flushes: AtomicUsize,
    pub durable_writes: AtomicUsize,
    pub submitted: AtomicUsize,
    pub channels: AtomicUsize,
}

struct SpaceState {
    content: RwLock<SpaceContent>,
    mode: CompletionMode,
    released: AtomicBool,
    wake_fds: Mutex<Vec<Arc<EventFd>>>,
    fault: Mutex<Option<SpaceError>>,
    counters: SpaceCounters,
    channels_opened: AtomicU64,
}

#[derive(Clone)]
pub struct Memory(Arc<SpaceState>);

impl Memory {
    pub fn new(size_bytes: u64, mode: CompletionMode) -> Self {
        Self(Arc::new(SpaceState {
            content: RwLock::new(SpaceContent {
                bytes: vec![0; size_bytes as usize],
                mapped: vec![false; size_bytes.div_ceil(PAGE) as usize],
            }),
            mode,
            released: AtomicBool::new(false),
            wake_fds: Mutex::default(),
            fault: Mutex::default(),
            counters: SpaceCounters::default(),
            channels_opened: AtomicU64::new(0),
        }))
    }

    pub fn counters(&self) -> &SpaceCounters {
        &self.0.counters
    }

    /// Completes held requests, also later ones.
    pub fn release(&self) {
        self.0.released.store(true, Ordering::SeqCst);
        for wake in self.0.wake_fds.lock().unwrap().iter() {
            wake.signal();
        }
    }

    /// Sets the error of every request from now on; none: requests succeed.
    pub fn fail_with(&self, error: Option<SpaceError>) {
        *self.0.fault.lock().unwrap() = error;
    }

    pub fn grow(&self, size_bytes: u64) {
        let mut content = self.0.content.write().unwrap();
        content.bytes.resize(size_bytes as usize, 0);
        content
            .mapped
            .resize(size_bytes.div_ceil(PAGE) as usize, false);
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.content.read().unwrap().bytes.clone()
    }
}

impl Space for Memory {
    fn size_bytes(&self) -> u64 {
        self.0.content.read().unwrap().bytes.len() as u64
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let fault = self.0.fault.lock().unwrap().clone();
        if let Some(error @ SpaceError::Unavailable(_)) = fault {
            return Err(error);
        }
        let wake = Arc::new(EventFd::new().unwrap());
        self.0.wake_fds.lock().unwrap().push(Arc::clone(&wake));
        self.0.counters.channels.fetch_add(1, Ordering::SeqCst);
        let seed = match self.0.mode {
            CompletionMode::Shuffled(seed) => {
                seed ^ self.0.channels_opened.fetch_add(1, Ordering::SeqCst)
            }
            CompletionMode::AtOnce | CompletionMode::Held => 0,
        };
        Ok(Box::new(MemoryChannel {
            inner: Arc::clone(&self.0),
            wake,
            ended: Vec::new(),
            random: seed | 1,
        }))
    }
}

struct MemoryChannel {
    inner: Arc<SpaceState>,
    wake: Arc<EventFd>,
    ended: Vec<Completion>,
    random: u64,
}

impl Drop for MemoryChannel {
    fn drop(&mut self) {
        self.inner.counters.channels.fetch_sub(1, Ordering::SeqCst);
        let wake = &self.wake;
        let mut wakes = self.inner.wake_fds.lock().unwrap();
        wakes.retain(|other| !Arc::ptr_eq(other, wake));
    }
}

impl MemoryChannel {
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn wake(&self) {
        self.wake.signal();
    }

    fn clear_wake(&self) {
        self.wake.drain();
    }
}

impl Channel for MemoryChannel {
    fn ready(&mut self) -> Result<bool, SpaceError> {
        match &*self.inner.fault.lock().unwrap() {
            Some(error @ (SpaceError::Busy(_) | SpaceError::Fenced)) => Err(error.clone()),
            _ => Ok(true),
        }
    }

    fn submit(&mut self, token: Token, request: Request) {
        let result = self.inner.perform(request);
        self.ended.push(Completion { token, result });
        if matches!(self.inner.mode, CompletionMode::Shuffled(_)) {
            self.wake();
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        match self.inner.mode {
            CompletionMode::AtOnce => into.append(&mut self.ended),
            CompletionMode::Held => {
                self.clear_wake();
                if self.inner.released.load(Ordering::SeqCst) {
                    into.append(&mut self.ended);
                }
            }
            CompletionMode::Shuffled(_) => {
                self.clear_wake();
                let mut count = self.next_random() as usize % (self.ended.len() + 1);
                while count > 0 {
                    let place = self.next_random() as usize % self.ended.len();
                    into.push(self.ended.swap_remove(place));
                    count -= 1;
                }
                if !self.ended.is_empty() {
                    self.wake();
                }
            }
        }
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        if self.inner.mode != CompletionMode::AtOnce {
            into.push(self.wake.as_raw_fd());
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let waits = self.inner.mode == CompletionMode::AtOnce && !self.ended.is_empty();
        waits.then(Instant::now)
    }
}

impl SpaceState {
    fn perform(&self, request: Request) -> Result<Reply, SpaceError> {
        if self.mode != CompletionMode::AtOnce {
            self.counters.submitted.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(error) = self.fault.lock().unwrap().clone() {
            return Err(error);
        }
        match request {
            Request::Read { offset, len } => self.read(offset, len),
            Request::Write {
                offset,
                data,
                durable,
            } => self.write(offset, &data, durable),
            Request::Discard { offset, len } => self.clear(offset, len),
            Request::WriteZeroes {
                offset,
                len,
                durable,
            } => {
                self.count_write(durable);
                self.clear(offset, len)
            }
            Request::Transact { .. } => {
                let why = "clients of NBD have no transactions";
                Err(SpaceError::Unsupported(why.into()))
            }
            Request::Flush => {
                self.counters.flushes.fetch_add(1, Ordering::SeqCst);
                Ok(Reply::Done)
            }
            Request::Extents { offset, len } => self.extents(offset, len),
        }
    }

    fn count_write(&self, durable: bool) {
        if durable {
            self.counters.durable_writes.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn read(&self, offset: u64, len: u32) -> Result<Reply, SpaceError> {
        let content = self.content.read().unwrap();
        check_range(content.bytes.len() as u64, offset, len.into())?;
        let start = offset as usize;
        Ok(Reply::Data(
            content.bytes[start..start + len as usize].to_vec(),
        ))
    }

    fn write(&self, offset: u64, data: &Bytes, durable: bool) -> Result<Reply, SpaceError> {
        self.count_write(durable);
        let mut content = self.content.write().unwrap();
        check_range(content.bytes.len() as u64, offset, data.len() as u64)?;
        let start = offset as usize;
        let end = start + data.len();
        content.bytes[start..end].copy_from_slice(data);
        let page = PAGE as usize;
        content.mapped[start / page..end.div_ceil(page)].fill(true);
        Ok(Reply::Done)
    }

    fn clear(&self, offset: u64, len: u64) -> Result<Reply, SpaceError> {
        let mut content = self.content.write().unwrap();
        check_range(content.bytes.len() as u64, offset, len)?;
        let (start, end) = (offset as usize, (offset + len) as usize);
        content.bytes[start..end].fill(0);
        let page = PAGE as usize;
        let (first, last) = (start.div_ceil(page), end / page);
        if first < last {
            content.mapped[first..last].fill(false);
        }
        Ok(Reply::Done)
    }

    fn extents(&self, offset: u64, len: u64) -> Result<Reply, SpaceError> {
        let content = self.content.read().unwrap();
        check_range(content.bytes.len() as u64, offset, len)?;
        let end = offset + len;
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end && extents.len() < EXTENTS_MAX {
            let next = ((at / PAGE + 1) * PAGE).min(end);
            let mapped = content.mapped[(at / PAGE) as usize];
            match extents.last_mut() {
                Some(last) if last.mapped == mapped => last.len += next - at,
                _ => extents.push(Extent {
                    len: next - at,
                    mapped,
                }),
            }
            at = next;
        }
        Ok(Reply::Extents(extents))
    }
}
