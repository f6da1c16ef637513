//! Who is connected to a server: accepting, counting, and the end of all.
//!
//! Invariants: connections are counted; strangers, who have not yet shown that
//! they may be here, apart from those who have, each up to a limit. A place is
//! given back when it is dropped, whatever became of its thread.

use crate::limits::{ACCEPT_PAUSE, STOP_LIMIT};
use crate::stop::Stop;
use crate::stream::wait_any;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The connections of one server.
pub(crate) struct Guests {
    stop: Stop,
    strangers_max: usize,
    known_max: usize,
    counts: Mutex<Counts>,
    left: Condvar,
}

#[derive(Default)]
struct Counts {
    strangers: usize,
    known: usize,
}

impl Counts {
    fn all(&self) -> usize {
        self.strangers + self.known
    }
}

/// One connection's place; a stranger's at first.
pub(crate) struct Place {
    guests: Arc<Guests>,
    is_known: bool,
}

impl Guests {
    pub(crate) fn new(strangers_max: usize, known_max: usize) -> io::Result<Guests> {
        Ok(Guests {
            stop: Stop::new()?,
            strangers_max,
            known_max,
            counts: Mutex::default(),
            left: Condvar::new(),
        })
    }

    /// What ends them.
    pub(crate) fn stop(&self) -> &Stop {
        &self.stop
    }

    /// Those who are no strangers.
    pub(crate) fn known(&self) -> usize {
        self.counts().known
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts from a listener that does not block, until [`Stop`] is said.
    pub(crate) fn accept_all<T>(
        &self,
        listener: &impl AsFd,
        accept: impl Fn() -> io::Result<T>,
        mut admit: impl FnMut(T),
    ) {
        while !self.stop.is_said() {
            let mut fds = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
            ];
            if let Err(cause) = wait_any(&mut fds, None) {
                tracing::error!(%cause, "cannot wait for connections");
                return;
            }
            match accept() {
                Ok(accepted) => admit(accepted),
                Err(cause) if is_passing(&cause) => {}
                Err(cause) => {
                    tracing::warn!(%cause, "cannot accept connections; trying again");
                    let mut fds = [PollFd::new(&self.stop, PollFlags::IN)];
                    let _ = wait_any(&mut fds, Some(Instant::now() + ACCEPT_PAUSE));
                }
            }
        }
    }

    /// A stranger's place, if there is one.
    pub(crate) fn enter(self: &Arc<Guests>) -> Option<Place> {
        let mut counts = self.counts();
        if counts.strangers == self.strangers_max {
            return None;
        }
        counts.strangers += 1;
        Some(Place {
            guests: self.clone(),
            is_known: false,
        })
    }

    /// Waits, for a limited time, until all places are given back; tells how
    /// many are not.
    pub(crate) fn await_empty(&self) -> usize {
        let waited = self
            .left
            .wait_timeout_while(self.counts(), STOP_LIMIT, |counts| counts.all() > 0);
        let (counts, _) = waited.unwrap_or_else(PoisonError::into_inner);
        counts.all()
    }
}

impl Place {
    /// Makes a stranger a known guest; false if all such places are taken.
    pub(crate) fn promote(&mut self) -> bool {
        let mut counts = self.guests.counts();
        if counts.known >= self.guests.known_max {
            return false;
        }
        counts.strangers -= 1;
        counts.known += 1;
        self.is_known = true;
        true
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.guests.counts();
        match self.is_known {
            true => counts.known -= 1,
            false => counts.strangers -= 1,
        }
        self.guests.left.notify_all();
    }
}

/// Errors of accept that concern one connection only.
fn is_passing(cause: &io::Error) -> bool {
    matches!(
        cause.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}
