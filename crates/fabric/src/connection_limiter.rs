//! The connections of a server: accepting, counting and stopping them.
//!
//! Invariants: authenticated and unauthenticated connections are counted separately, each up to a
//! limit. A slot is released when it is dropped, however its thread ended.

use crate::limits::{ACCEPT_PAUSE, STOP_LIMIT};
use crate::stop::StopSignal;
use pagemesh_base::poison::{lock, recover};
use pagemesh_base::wait::until_ready;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Instant;

/// The connections of one server.
pub(crate) struct ConnectionLimiter {
    stop: StopSignal,
    unauthenticated_max: usize,
    authenticated_max: usize,
    counts: Mutex<ConnectionCounts>,
    slot_released: Condvar,
}

#[derive(Default)]
struct ConnectionCounts {
    unauthenticated: usize,
    authenticated: usize,
}

impl ConnectionCounts {
    fn all(&self) -> usize {
        self.unauthenticated + self.authenticated
    }
}

/// One connection's slot. It counts as unauthenticated at first.
pub(crate) struct ConnectionSlot {
    limiter: Arc<ConnectionLimiter>,
    is_authenticated: bool,
}

impl ConnectionLimiter {
    pub(crate) fn new(strangers_max: usize, known_max: usize) -> io::Result<ConnectionLimiter> {
        Ok(ConnectionLimiter {
            stop: StopSignal::new()?,
            unauthenticated_max: strangers_max,
            authenticated_max: known_max,
            counts: Mutex::default(),
            slot_released: Condvar::new(),
        })
    }

    /// The signal that stops all connections.
    pub(crate) fn stop(&self) -> &StopSignal {
        &self.stop
    }

    /// The number of authenticated connections.
    pub(crate) fn authenticated(&self) -> usize {
        self.counts().authenticated
    }

    fn counts(&self) -> MutexGuard<'_, ConnectionCounts> {
        lock(&self.counts)
    }

    /// Accepts from a non-blocking listener until the [`StopSignal`] is signaled.
    pub(crate) fn accept_all<T>(
        &self,
        listener: &impl AsFd,
        accept: impl Fn() -> io::Result<T>,
        mut admit: impl FnMut(T),
    ) {
        while !self.stop.is_signaled() {
            let mut fds = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
            ];
            if let Err(cause) = until_ready(&mut fds, None) {
                tracing::error!(%cause, "cannot wait for connections");
                return;
            }
            match accept() {
                Ok(accepted) => admit(accepted),
                Err(cause) if is_transient(&cause) => {}
                Err(cause) => {
                    tracing::warn!(%cause, "cannot accept connections; trying again");
                    let mut fds = [PollFd::new(&self.stop, PollFlags::IN)];
                    let _ = until_ready(&mut fds, Some(Instant::now() + ACCEPT_PAUSE));
                }
            }
        }
    }

    /// A slot for an unauthenticated connection, or none when all are in use.
    pub(crate) fn acquire_slot(self: &Arc<ConnectionLimiter>) -> Option<ConnectionSlot> {
        let mut counts = self.counts();
        if counts.unauthenticated == self.unauthenticated_max {
            return None;
        }
        counts.unauthenticated += 1;
        Some(ConnectionSlot {
            limiter: self.clone(),
            is_authenticated: false,
        })
    }

    /// Waits, for a limited time, until all slots are released. Returns the number of slots in use.
    pub(crate) fn wait_until_empty(&self) -> usize {
        let waited = self
            .slot_released
            .wait_timeout_while(self.counts(), STOP_LIMIT, |counts| counts.all() > 0);
        let (counts, _) = recover(waited);
        counts.all()
    }
}

impl ConnectionSlot {
    /// Counts the connection as authenticated; false if all authenticated slots are in use.
    pub(crate) fn promote(&mut self) -> bool {
        let mut counts = self.limiter.counts();
        if counts.authenticated >= self.limiter.authenticated_max {
            return false;
        }
        counts.unauthenticated -= 1;
        counts.authenticated += 1;
        self.is_authenticated = true;
        true
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut counts = self.limiter.counts();
        if self.is_authenticated {
            counts.authenticated -= 1;
        } else {
            counts.unauthenticated -= 1;
        }
        self.limiter.slot_released.notify_all();
    }
}

/// Errors of accept that concern one connection only.
fn is_transient(cause: &io::Error) -> bool {
    matches!(
        cause.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}
