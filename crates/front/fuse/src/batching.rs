//! Serving several requests at once: a thread that has begun a request takes others while the
//! volume waits for its legs, so that they share messages and wake-ups.
//!
//! A thread begins only requests that may take long and block no others ([`AsyncWriter`]). It
//! answers any other request before it takes the next one, and after all begun requests have ended,
//! as the other request may have to wait for them.
//!
//! While a thread batches requests, idle threads stay away from the device: each would take a
//! request away from the batch. If requests end at once, as over `map`, no thread batches, or stops
//! after a while, and all threads wait at the device.

use crate::classic::{Classic, ReceiveResult};
use crate::reply::FuseReply;
use crate::request::RawRequest;
use crate::request_handler::{AsyncWriter, BeginResult, RequestHandler};
use pagemesh_base::poison::{self, recover};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// Most requests that a thread has begun and not answered.
const PENDING_MAX: usize = 64;

/// Consecutive requests that ended at once, after which a thread stops batching.
pub(crate) const IMMEDIATE_MAX: u32 = 64;

/// Limits the threads that take requests from a device.
#[derive(Debug)]
pub(crate) struct BatchingLimiter {
    batchers_max: usize,
    /// Changed under the lock, as `parked`.
    batchers: AtomicUsize,
    /// Threads that stay away from the device.
    parked: AtomicUsize,
    is_stopping: Mutex<bool>,
    changed: Condvar,
}

impl BatchingLimiter {
    /// A limiter for so many processors; programs need some of them, too.
    pub(crate) fn new(processors: usize) -> BatchingLimiter {
        BatchingLimiter {
            batchers_max: (processors / 2).max(1),
            batchers: AtomicUsize::new(0),
            parked: AtomicUsize::new(0),
            is_stopping: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        poison::lock(&self.is_stopping)
    }

    fn is_at_limit(&self) -> bool {
        self.batchers.load(Ordering::Relaxed) >= self.batchers_max
    }

    /// Waits until another thread is needed at the device.
    fn wait_until_needed(&self) {
        if !self.is_at_limit() {
            return;
        }
        let mut is_over = self.lock();
        self.parked.fetch_add(1, Ordering::Relaxed);
        while self.is_at_limit() && !*is_over {
            let woken = self.changed.wait(is_over);
            is_over = recover(woken);
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }

    fn try_begin_batching(&self) -> bool {
        let _lock = self.lock();
        let is_free = !self.is_at_limit();
        self.batchers
            .fetch_add(usize::from(is_free), Ordering::Relaxed);
        is_free
    }

    /// Records that a thread leaves the device for a request that may take long. A parked thread
    /// takes its place, so that the device always has a thread.
    fn leave_device(&self, collected: bool) {
        // A thread that is about to park has seen a batching thread, which leaves under the lock.
        if collected || self.parked.load(Ordering::Relaxed) > 0 {
            let _lock = self.lock();
            self.batchers
                .fetch_sub(usize::from(collected), Ordering::Relaxed);
            if !self.is_at_limit() {
                self.changed.notify_one();
            }
        }
    }

    /// Ends batching, as there are no requests to batch: all threads are needed at the device.
    fn stop_batching(&self) {
        let _lock = self.lock();
        self.batchers.fetch_sub(1, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn stop(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }
}

/// The state of one serving thread.
struct BatchingServer<'s> {
    line: &'s mut Classic,
    files: &'s dyn RequestHandler,
    async_writer: Box<dyn AsyncWriter + 's>,
    limiter: &'s BatchingLimiter,
    is_batching: bool,
    /// Consecutive requests that ended at once, while this thread batches.
    immediate_requests: u32,
}

impl Drop for BatchingServer<'_> {
    fn drop(&mut self) {
        self.leave_device();
        // The mount is gone, or will be aborted.
        self.limiter.stop();
    }
}

/// Serves until the mount is gone.
pub(crate) fn serve<'s>(
    line: &'s mut Classic,
    files: &'s dyn RequestHandler,
    hand: Box<dyn AsyncWriter + 's>,
    turns: &'s BatchingLimiter,
) -> io::Result<()> {
    let mut server = BatchingServer {
        line,
        files,
        async_writer: hand,
        limiter: turns,
        is_batching: false,
        immediate_requests: 0,
    };
    while server.serve_some()? {}
    Ok(())
}

impl BatchingServer<'_> {
    /// False: the mount is gone.
    fn serve_some(&mut self) -> io::Result<bool> {
        if self.async_writer.len() == 0 {
            if !self.is_batching {
                self.limiter.wait_until_needed();
            }
            let Some(incoming) = self.line.receive()? else {
                return Ok(false);
            };
            self.handle_request(incoming);
        } else if self.is_batching {
            while self.async_writer.len() < PENDING_MAX {
                match self.line.try_receive()? {
                    ReceiveResult::Request(incoming) => self.handle_request(incoming),
                    ReceiveResult::Empty => break,
                    ReceiveResult::Unmounted => return Ok(false),
                }
            }
        }
        self.reap();
        if self.async_writer.len() == 0 {
            self.record_immediate();
        } else {
            self.immediate_requests = 0;
            self.is_batching = self.is_batching || self.limiter.try_begin_batching();
            let has_room = self.is_batching && self.async_writer.len() < PENDING_MAX;
            self.async_writer
                .wait(has_room.then(|| self.line.descriptor()));
            self.reap();
        }
        Ok(true)
    }

    /// Counts a request that ended at once: a leg that was slow for a moment must not leave one
    /// thread alone at the device.
    fn record_immediate(&mut self) {
        self.immediate_requests = self.immediate_requests.saturating_add(1);
        if self.is_batching && self.immediate_requests >= IMMEDIATE_MAX {
            self.is_batching = false;
            self.limiter.stop_batching();
        }
    }

    fn reap(&mut self) {
        let line = &*self.line;
        self.async_writer
            .reap(&mut |unique, answer| line.answer(unique, &answer));
    }

    fn handle_request(&mut self, incoming: RawRequest) {
        let header = incoming.header;
        let answer = match incoming.decode() {
            Ok(request) => match self.async_writer.begin(&header, &request) {
                BeginResult::Pending => return,
                BeginResult::Complete(answer) => answer,
                BeginResult::NotStarted => {
                    self.drain();
                    self.files.handle(&header, request)
                }
            },
            Err(errno) => FuseReply::Error(errno),
        };
        if !incoming.has_no_reply() {
            // Drops the references to the buffer's memory.
            drop(incoming);
            self.line.answer(header.unique, &answer);
        }
    }

    /// Answers all requests that were begun, while another thread takes new ones.
    fn drain(&mut self) {
        self.leave_device();
        while self.async_writer.len() > 0 {
            self.reap();
            if self.async_writer.len() > 0 {
                self.async_writer.wait(None);
            }
        }
    }

    fn leave_device(&mut self) {
        self.limiter
            .leave_device(std::mem::take(&mut self.is_batching));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parked threads come back, one for each thread that leaves the device.
    #[test]
    fn thread_that_leaves_the_device_is_replaced() {
        const AWAY: usize = 3;
        let turns = BatchingLimiter::new(2);
        assert!(turns.try_begin_batching());
        assert!(
            !turns.try_begin_batching(),
            "one is enough for two processors"
        );
        let back = AtomicUsize::new(0);
        let until = |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..AWAY {
                scope.spawn(|| {
                    turns.wait_until_needed();
                    back.fetch_add(1, Ordering::SeqCst);
                });
            }
            until(&|| turns.parked.load(Ordering::SeqCst) == AWAY);
            turns.leave_device(false);
            assert_eq!(back.load(Ordering::SeqCst), 0, "another one collects");
            for left in 1..=AWAY {
                turns.leave_device(left == 1);
                until(&|| back.load(Ordering::SeqCst) >= left);
                assert!(turns.parked.load(Ordering::SeqCst) <= AWAY - left);
            }
        });
        turns.wait_until_needed();
        assert!(turns.try_begin_batching());
        std::thread::scope(|scope| {
            (0..AWAY).for_each(|_| drop(scope.spawn(|| turns.wait_until_needed())));
            until(&|| turns.parked.load(Ordering::SeqCst) == AWAY);
            turns.stop_batching();
        });
        assert!(turns.try_begin_batching());
        turns.stop();
        turns.wait_until_needed();
    }
}
