//! Serving several requests at once: a thread that has begun one goes on to take others
//! while the volume waits for its legs, so that they share messages and wake-ups.
//!
//! Only what may take long and holds nobody up is begun like that ([`Hand`]); anything
//! else is answered before the next is taken, after what was begun has ended: it may have
//! to wait for it.
//!
//! As long as a thread collects requests, others that have nothing to do stay away from
//! the device: each would take one away from it. Where requests end at once, as over
//! `map`, nobody collects, or no more after a while, and all threads wait at the device.

use crate::abi;
use crate::answer::Answer;
use crate::classic::{Classic, Look};
use crate::files::Files;
use crate::request::{Incoming, Request};
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Requests that a thread has begun and not answered, at most.
const BEGUN_MAX: usize = 64;

/// Requests in a row that ended at once, after which nothing is collected any more.
pub(crate) const AT_ONCE_MAX: u32 = 64;

/// What became of a request that should begin.
pub(crate) enum Begun {
    /// It is told of when it has ended.
    UnderWay,
    /// It has ended already.
    Ended(Answer),
    /// It cannot go on beside others; nothing has happened.
    Not,
}

/// What a thread has begun.
pub(crate) trait Hand {
    fn begin(&mut self, header: &abi::InHeader, request: &Request<'_>) -> Begun;

    /// Makes progress without blocking, and tells the answers of what has ended.
    fn reap(&mut self, tell: &mut dyn FnMut(u64, Answer));

    /// Requests under way.
    fn len(&self) -> usize;

    /// Sleeps until there may be something to reap, or the other descriptor is readable.
    fn wait(&mut self, other: Option<RawFd>);
}

/// Who takes requests from a device.
#[derive(Debug)]
pub(crate) struct Turns {
    collectors_max: usize,
    /// Changed under the lock, as the next.
    collectors: AtomicUsize,
    /// Threads that stay away.
    parked: AtomicUsize,
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl Turns {
    /// For so many processors, of which programs need some, too.
    pub(crate) fn new(processors: usize) -> Turns {
        Turns {
            collectors_max: (processors / 2).max(1),
            collectors: AtomicUsize::new(0),
            parked: AtomicUsize::new(0),
            is_over: Mutex::new(false),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.is_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn are_enough(&self) -> bool {
        self.collectors.load(Ordering::Relaxed) >= self.collectors_max
    }

    /// Waits until another thread is of use at the device.
    fn await_need(&self) {
        if !self.are_enough() {
            return;
        }
        let mut is_over = self.lock();
        self.parked.fetch_add(1, Ordering::Relaxed);
        while self.are_enough() && !*is_over {
            let woken = self.changed.wait(is_over);
            is_over = woken.unwrap_or_else(PoisonError::into_inner);
        }
        self.parked.fetch_sub(1, Ordering::Relaxed);
    }

    fn collect(&self) -> bool {
        let _lock = self.lock();
        let is_free = !self.are_enough();
        self.collectors
            .fetch_add(usize::from(is_free), Ordering::Relaxed);
        is_free
    }

    /// A thread leaves the device for what may take long: one that stays away takes its
    /// place, so that nobody waits while there is one.
    fn leave(&self, collected: bool) {
        // Who is about to park has seen a collector, which leaves under the lock.
        if collected || self.parked.load(Ordering::Relaxed) > 0 {
            let _lock = self.lock();
            self.collectors
                .fetch_sub(usize::from(collected), Ordering::Relaxed);
            if !self.are_enough() {
                self.changed.notify_one();
            }
        }
    }

    /// Nothing is there to collect: all are of use at the device.
    fn disband(&self) {
        let _lock = self.lock();
        self.collectors.fetch_sub(1, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn end(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }
}

/// One thread's serving.
struct Server<'s> {
    line: &'s mut Classic,
    files: &'s dyn Files,
    hand: Box<dyn Hand + 's>,
    turns: &'s Turns,
    collects: bool,
    /// Requests in a row that ended at once, while this one collects.
    at_once: u32,
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        self.leave();
        // The mount is no more, or will be cut off.
        self.turns.end();
    }
}

/// Serves until the mount is no more.
pub(crate) fn serve<'s>(
    line: &'s mut Classic,
    files: &'s dyn Files,
    hand: Box<dyn Hand + 's>,
    turns: &'s Turns,
) -> io::Result<()> {
    let mut server = Server {
        line,
        files,
        hand,
        turns,
        collects: false,
        at_once: 0,
    };
    while server.serve_some()? {}
    Ok(())
}

impl Server<'_> {
    /// False: the mount is no more.
    fn serve_some(&mut self) -> io::Result<bool> {
        if self.hand.len() == 0 {
            if !self.collects {
                self.turns.await_need();
            }
            let Some(incoming) = self.line.receive()? else {
                return Ok(false);
            };
            self.take(incoming);
        } else if self.collects {
            while self.hand.len() < BEGUN_MAX {
                match self.line.look()? {
                    Look::Found(incoming) => self.take(incoming),
                    Look::Nothing => break,
                    Look::Over => return Ok(false),
                }
            }
        }
        self.reap();
        if self.hand.len() == 0 {
            self.note_at_once();
        } else {
            self.at_once = 0;
            self.collects = self.collects || self.turns.collect();
            let has_room = self.collects && self.hand.len() < BEGUN_MAX;
            self.hand.wait(has_room.then(|| self.line.descriptor()));
            self.reap();
        }
        Ok(true)
    }

    /// A leg that was slow for a moment must not leave one thread alone at the device.
    fn note_at_once(&mut self) {
        self.at_once = self.at_once.saturating_add(1);
        if self.collects && self.at_once >= AT_ONCE_MAX {
            self.collects = false;
            self.turns.disband();
        }
    }

    fn reap(&mut self) {
        let line = &*self.line;
        self.hand
            .reap(&mut |unique, answer| line.answer(unique, &answer));
    }

    fn take(&mut self, incoming: Incoming) {
        let header = incoming.header;
        let answer = match incoming.decode() {
            Ok(request) => match self.hand.begin(&header, &request) {
                Begun::UnderWay => return,
                Begun::Ended(answer) => answer,
                Begun::Not => {
                    self.finish();
                    self.files.handle(&header, request)
                }
            },
            Err(errno) => Answer::Error(errno),
        };
        if !incoming.is_one_way() {
            // With it goes what holds the line's memory.
            drop(incoming);
            self.line.answer(header.unique, &answer);
        }
    }

    /// Answers all that was begun, while another thread takes requests.
    fn finish(&mut self) {
        self.leave();
        while self.hand.len() > 0 {
            self.reap();
            if self.hand.len() > 0 {
                self.hand.wait(None);
            }
        }
    }

    fn leave(&mut self) {
        self.turns.leave(std::mem::take(&mut self.collects));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that stay away come back, one for each that leaves the device.
    #[test]
    fn who_leaves_the_device_is_replaced() {
        const AWAY: usize = 3;
        let turns = Turns::new(2);
        assert!(turns.collect());
        assert!(!turns.collect(), "one is enough for two processors");
        let back = AtomicUsize::new(0);
        let until = |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..AWAY {
                scope.spawn(|| {
                    turns.await_need();
                    back.fetch_add(1, Ordering::SeqCst);
                });
            }
            until(&|| turns.parked.load(Ordering::SeqCst) == AWAY);
            turns.leave(false);
            assert_eq!(back.load(Ordering::SeqCst), 0, "another one collects");
            for left in 1..=AWAY {
                turns.leave(left == 1);
                until(&|| back.load(Ordering::SeqCst) >= left);
                assert!(turns.parked.load(Ordering::SeqCst) <= AWAY - left);
            }
        });
        turns.await_need();
        assert!(turns.collect());
        std::thread::scope(|scope| {
            (0..AWAY).for_each(|_| drop(scope.spawn(|| turns.await_need())));
            until(&|| turns.parked.load(Ordering::SeqCst) == AWAY);
            turns.disband();
        });
        assert!(turns.collect());
        turns.end();
        turns.await_need();
    }
}
