//! More threads where all that serve are stuck inside of requests.
//!
//! A request may wait for the end of a process that died inside of a direct operation. That process
//! ends only when its descriptors are closed, and closing one may take a request itself (`FLUSH`,
//! RFD 022). So a request must find a thread however many others wait: where every thread of a line
//! has been inside of a request for [`LOOK_EVERY`] and none has ended, the line gets one thread
//! more. Such a thread ends when one of the others is free again; in a ring it stays, as its entry
//! cannot be taken back from the kernel.

use crate::abi;
use crate::answer::Answer;
use crate::collect::Hand;
use crate::files::Files;
use crate::request::Request;
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Between two looks at lines whose threads are all inside of requests.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Threads of one line, at most.
const THREADS_MAX: usize = 256;

/// Threads that take requests from one queue of the kernel.
struct Line {
    first: usize,
    threads: AtomicUsize,
    /// Threads inside of a request.
    inside: AtomicUsize,
    /// Requests that have ended.
    ended: AtomicUsize,
}

/// Counts the threads inside of requests, and starts more.
pub(crate) struct Reserve {
    lines: Vec<Line>,
    /// Some line may be full.
    is_awake: AtomicBool,
    is_over: Mutex<bool>,
    changed: Condvar,
}

/// Starts one thread more for a line.
pub(crate) type Start = Box<dyn Fn(usize) -> io::Result<JoinHandle<()>> + Send>;

impl Line {
    fn is_full(&self) -> bool {
        self.inside.load(SeqCst) >= self.threads.load(SeqCst)
    }
}

impl Reserve {
    /// For so many lines of so many threads.
    pub(crate) fn new(lines: usize, threads: usize) -> Reserve {
        let line = |_| Line {
            first: threads,
            threads: AtomicUsize::new(threads),
            inside: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
        };
        Reserve {
            lines: (0..lines.max(1)).map(line).collect(),
            is_awake: AtomicBool::new(false),
            is_over: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The line of this thread: those of a ring stay on the processor of their queue.
    fn line(&self) -> &Line {
        match &self.lines[..] {
            [only] => only,
            all => &all[rustix::thread::sched_getcpu() % all.len()],
        }
    }

    fn enter(&self, line: &Line) {
        line.inside.fetch_add(1, SeqCst);
        if line.is_full() && !self.is_awake.swap(true, SeqCst) {
            let _lock = self.lock();
            self.changed.notify_all();
        }
    }

    fn leave(line: &Line) {
        line.ended.fetch_add(1, SeqCst);
        line.inside.fetch_sub(1, SeqCst);
    }

    /// Whether a line needs the threads that were started for it.
    pub(crate) fn needs_more(&self, number: usize) -> bool {
        let needs = |line: &Line| line.inside.load(SeqCst) >= line.first;
        self.lines.get(number).is_some_and(needs)
    }

    /// A thread that was started for a line ends.
    pub(crate) fn note_less(&self, number: usize) {
        if let Some(line) = self.lines.get(number) {
            line.threads.fetch_sub(1, SeqCst);
        }
    }

    /// No thread is started any more.
    pub(crate) fn end(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    /// Waits until a line may be full. False: it is over.
    fn await_full(&self) -> bool {
        let mut is_over = self.lock();
        while !self.is_awake.load(SeqCst) && !*is_over {
            let woken = self.changed.wait(is_over);
            is_over = woken.unwrap_or_else(PoisonError::into_inner);
        }
        !*is_over
    }

    /// False: it is over.
    fn pause(&self) -> bool {
        let is_over = self.lock();
        if *is_over {
            return false;
        }
        let woken = self.changed.wait_timeout(is_over, LOOK_EVERY);
        !*woken.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Starts threads where they are needed, until it is over. Then it waits for them.
    pub(crate) fn watch(&self, start: &Start) {
        let mut started: Vec<JoinHandle<()>> = Vec::new();
        while self.await_full() {
            let ended = |line: &Line| line.ended.load(SeqCst);
            let before: Vec<usize> = self.lines.iter().map(ended).collect();
            if !self.pause() {
                break;
            }
            for (number, line) in self.lines.iter().enumerate() {
                let is_stuck = line.is_full() && ended(line) == before[number];
                if is_stuck && line.threads.load(SeqCst) < THREADS_MAX {
                    line.threads.fetch_add(1, SeqCst);
                    match start(number) {
                        Ok(thread) => started.push(thread),
                        Err(cause) => {
                            line.threads.fetch_sub(1, SeqCst);
                            tracing::warn!(%cause, "the mount has no thread more for requests");
                        }
                    }
                }
            }
            started.retain(|thread| !thread.is_finished());
            self.is_awake.store(false, SeqCst);
            if self.lines.iter().any(Line::is_full) {
                self.is_awake.store(true, SeqCst);
            }
        }
        for thread in started {
            // It has said why it ended.
            let _ = thread.join();
        }
    }
}

/// Files whose requests are counted.
pub(crate) struct Watched {
    pub(crate) files: Arc<dyn Files>,
    pub(crate) reserve: Arc<Reserve>,
}

impl Files for Watched {
    fn handle(&self, header: &abi::InHeader, request: Request<'_>) -> Answer {
        let line = self.reserve.line();
        self.reserve.enter(line);
        let answer = self.files.handle(header, request);
        Reserve::leave(line);
        answer
    }

    fn hand(&self) -> Option<Box<dyn Hand + '_>> {
        self.files.hand()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn stuck_threads_are_replaced_one_by_one() {
        let reserve = Arc::new(Reserve::new(1, 2));
        let (told, started) = channel();
        let watched = Arc::clone(&reserve);
        let watch = std::thread::spawn(move || {
            let start: Start = Box::new(move |line| {
                told.send(line).map_err(io::Error::other)?;
                std::thread::Builder::new().spawn(|| {})
            });
            watched.watch(&start);
        });
        let line = reserve.line();
        reserve.enter(line);
        assert!(!reserve.is_awake.load(SeqCst), "one thread is left");
        reserve.enter(line);
        assert_eq!(started.recv(), Ok(0));
        reserve.enter(line);
        assert_eq!(started.recv(), Ok(0));
        assert!(reserve.needs_more(0));
        for _ in 0..3 {
            Reserve::leave(line);
        }
        assert!(!reserve.needs_more(0));
        reserve.end();
        watch.join().expect("it ends");
        assert_eq!(line.threads.load(SeqCst), 4);
    }
}
