//! Starts more threads when all serving threads are stuck in requests.
//!
//! A request may wait for the end of a process that died in a direct operation. That process ends
//! only when its descriptors are closed, and closing one may take a request itself (`FLUSH`, RFD
//! 022). So a request must find a thread however many others wait. If every thread of a queue has
//! been in a request for [`CHECK_INTERVAL`] and none has ended, the queue gets one more thread.
//! That thread ends when one of the others is free again. In a ring it stays, as the kernel does
//! not give back its entry.

use crate::abi;
use crate::reply::FuseReply;
use crate::request::Request;
use crate::request_handler::{AsyncWriter, RequestHandler};
use pagemesh_base::poison::{self, recover};
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// Delay between two checks of queues with all threads in requests.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// Most threads of one queue.
const THREADS_MAX: usize = 256;

/// Threads that take requests from one queue of the kernel.
struct QueueThreads {
    base_threads: usize,
    threads: AtomicUsize,
    /// Threads in a request.
    busy_threads: AtomicUsize,
    /// Requests that have ended.
    completed_requests: AtomicUsize,
}

/// Counts the threads in requests, and starts more.
pub(crate) struct ExtraThreads {
    queues: Vec<QueueThreads>,
    /// A queue may be full.
    may_be_full: AtomicBool,
    is_stopping: Mutex<bool>,
    changed: Condvar,
}

/// Starts one more thread for a queue.
pub(crate) type StartThread = Box<dyn Fn(usize) -> io::Result<JoinHandle<()>> + Send>;

impl QueueThreads {
    fn is_full(&self) -> bool {
        self.busy_threads.load(SeqCst) >= self.threads.load(SeqCst)
    }
}

impl ExtraThreads {
    /// For so many queues with so many threads each.
    pub(crate) fn new(lines: usize, threads: usize) -> ExtraThreads {
        let line = |_| QueueThreads {
            base_threads: threads,
            threads: AtomicUsize::new(threads),
            busy_threads: AtomicUsize::new(0),
            completed_requests: AtomicUsize::new(0),
        };
        ExtraThreads {
            queues: (0..lines.max(1)).map(line).collect(),
            may_be_full: AtomicBool::new(false),
            is_stopping: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        poison::lock(&self.is_stopping)
    }

    /// The queue of this thread: threads of a ring are pinned to the processor of their queue.
    fn current_queue(&self) -> &QueueThreads {
        match &self.queues[..] {
            [only] => only,
            all => &all[rustix::thread::sched_getcpu() % all.len()],
        }
    }

    fn begin_request(&self, line: &QueueThreads) {
        line.busy_threads.fetch_add(1, SeqCst);
        if line.is_full() && !self.may_be_full.swap(true, SeqCst) {
            let _lock = self.lock();
            self.changed.notify_all();
        }
    }

    fn end_request(line: &QueueThreads) {
        line.completed_requests.fetch_add(1, SeqCst);
        line.busy_threads.fetch_sub(1, SeqCst);
    }

    /// Whether a queue needs the threads that were started for it.
    pub(crate) fn needs_more(&self, number: usize) -> bool {
        let needs = |line: &QueueThreads| line.busy_threads.load(SeqCst) >= line.base_threads;
        self.queues.get(number).is_some_and(needs)
    }

    /// Records the end of a thread that was started for a queue.
    pub(crate) fn record_exit(&self, number: usize) {
        if let Some(line) = self.queues.get(number) {
            line.threads.fetch_sub(1, SeqCst);
        }
    }

    /// Starts no more threads.
    pub(crate) fn stop(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    /// Waits until a queue may be full. False: the mount ends.
    fn wait_until_full(&self) -> bool {
        let mut is_over = self.lock();
        while !self.may_be_full.load(SeqCst) && !*is_over {
            let woken = self.changed.wait(is_over);
            is_over = recover(woken);
        }
        !*is_over
    }

    /// False: the mount ends.
    fn pause(&self) -> bool {
        let is_over = self.lock();
        if *is_over {
            return false;
        }
        let woken = self.changed.wait_timeout(is_over, CHECK_INTERVAL);
        !*recover(woken).0
    }

    /// Starts threads where they are needed, until the mount ends. Then it waits for them.
    pub(crate) fn run(&self, start: &StartThread) {
        let mut started: Vec<JoinHandle<()>> = Vec::new();
        while self.wait_until_full() {
            let ended = |line: &QueueThreads| line.completed_requests.load(SeqCst);
            let before: Vec<usize> = self.queues.iter().map(ended).collect();
            if !self.pause() {
                break;
            }
            for (number, line) in self.queues.iter().enumerate() {
                let is_stuck = line.is_full() && ended(line) == before[number];
                if is_stuck && line.threads.load(SeqCst) < THREADS_MAX {
                    line.threads.fetch_add(1, SeqCst);
                    match start(number) {
                        Ok(thread) => started.push(thread),
                        Err(cause) => {
                            line.threads.fetch_sub(1, SeqCst);
                            tracing::warn!(%cause, "cannot start another thread for requests of the mount");
                        }
                    }
                }
            }
            started.retain(|thread| !thread.is_finished());
            self.may_be_full.store(false, SeqCst);
            if self.queues.iter().any(QueueThreads::is_full) {
                self.may_be_full.store(true, SeqCst);
            }
        }
        for thread in started {
            // It has reported its error.
            let _ = thread.join();
        }
    }
}

/// A handler that counts its requests.
pub(crate) struct CountedHandler {
    pub(crate) handler: Arc<dyn RequestHandler>,
    pub(crate) extra_threads: Arc<ExtraThreads>,
}

impl RequestHandler for CountedHandler {
    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> FuseReply {
        let line = self.extra_threads.current_queue();
        self.extra_threads.begin_request(line);
        let answer = self.handler.handle(header, request);
        ExtraThreads::end_request(line);
        answer
    }

    fn async_writer(&self) -> Option<Box<dyn AsyncWriter + '_>> {
        self.handler.async_writer()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn stuck_threads_are_replaced_one_by_one() {
        let reserve = Arc::new(ExtraThreads::new(1, 2));
        let (told, started) = channel();
        let watched = Arc::clone(&reserve);
        let watch = std::thread::spawn(move || {
            let start: StartThread = Box::new(move |line| {
                told.send(line).map_err(io::Error::other)?;
                std::thread::Builder::new().spawn(|| {})
            });
            watched.run(&start);
        });
        let line = reserve.current_queue();
        reserve.begin_request(line);
        assert!(!reserve.may_be_full.load(SeqCst), "one thread is left");
        reserve.begin_request(line);
        assert_eq!(started.recv(), Ok(0));
        reserve.begin_request(line);
        assert_eq!(started.recv(), Ok(0));
        assert!(reserve.needs_more(0));
        for _ in 0..3 {
            ExtraThreads::end_request(line);
        }
        assert!(!reserve.needs_more(0));
        reserve.stop();
        watch.join().expect("it ends");
        assert_eq!(line.threads.load(SeqCst), 4);
    }
}
