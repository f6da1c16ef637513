//! The ports that calls borrow: spare ones, and more as long as the space opens any.
//!
//! A space has so many channels, and each takes a session of every brick behind it, so
//! there may be fewer ports than calls at hand. Then a call waits for a port that another
//! gives back. Ports that are idle are closed: their sessions are for others.
//!
//! Invariants: a call borrows one port at a time, and before it locks anything that those
//! who have one may wait for. So who has one never waits for who has none.

use crate::Fs;
use crate::error::{FsError, Result};
use crate::io::{Pipe, Port};
use pagemesh_base::space::SpaceError;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a call waits for a port: longer than a volume lets requests wait for a part
/// without any copy, so that those who have one are over by then.
const PORT_LIMIT: Duration = Duration::from_secs(30);
/// How soon it is tried again to open a further port, once there was no room for one: each
/// try costs a connection to every brick.
const OPEN_RETRY: Duration = Duration::from_secs(5);
/// For so long a spare port is kept: opening one takes milliseconds, and a copy that comes
/// back, or another client, may need its sessions.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// A port that nobody uses.
struct Spare {
    port: Port,
    /// Since when, as far as somebody looked.
    idle_since: Option<Instant>,
}

#[derive(Default)]
struct Spares {
    /// Given back in this order. The last is lent first, so that the others get idle.
    ports: VecDeque<Spare>,
    /// Calls that wait for one.
    waiting: usize,
    /// Until then nobody opens a further one.
    full_until: Option<Instant>,
}

#[derive(Default)]
pub(crate) struct Ports {
    spares: Mutex<Spares>,
    /// One was given back, or further ones may be opened.
    changed: Condvar,
}

impl Ports {
    fn spares(&self) -> MutexGuard<'_, Spares> {
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A spare one, if there is one now.
    fn take(&self) -> Option<Port> {
        self.spares().ports.pop_back().map(|spare| spare.port)
    }

    /// A spare one, after a while if no further one can be opened now; none: the caller
    /// may try to open one.
    fn await_spare(&self, until: Instant) -> Option<Port> {
        let mut spares = self.spares();
        loop {
            if let Some(spare) = spares.ports.pop_back() {
                return Some(spare.port);
            }
            let now = Instant::now();
            let full_until = spares.full_until?;
            if now >= full_until.min(until) {
                // One tries for all who wait.
                spares.full_until = Some(now + OPEN_RETRY);
                return None;
            }
            spares.waiting += 1;
            let woken = self
                .changed
                .wait_timeout(spares, full_until.min(until) - now);
            spares = woken.unwrap_or_else(PoisonError::into_inner).0;
            spares.waiting -= 1;
        }
    }

    /// A further one could be opened, or could not.
    fn note_full(&self, is_full: bool) {
        let full_until = is_full.then(|| Instant::now() + OPEN_RETRY);
        let before = std::mem::replace(&mut self.spares().full_until, full_until);
        if before.is_some() && !is_full {
            self.changed.notify_all();
        }
    }

    fn put(&self, spare: Spare) {
        let mut spares = self.spares();
        spares.ports.push_back(spare);
        let is_awaited = spares.waiting > 0;
        drop(spares);
        // A system call.
        if is_awaited {
            self.changed.notify_one();
        }
    }

    fn take_first(&self) -> Option<Spare> {
        self.spares().ports.pop_front()
    }

    /// Tends spare ones, and closes those that have been idle for long.
    fn tend(&self, now: Instant, into: &mut Vec<RawFd>) -> Option<Instant> {
        let mut deadlines = Vec::new();
        let count = self.spares().ports.len();
        // One at a time: who finds none opens another.
        for _ in 0..count {
            let Some(mut spare) = self.take_first() else {
                break;
            };
            let since = *spare.idle_since.get_or_insert(now);
            if now.saturating_duration_since(since) > IDLE_MAX {
                continue;
            }
            deadlines.extend(spare.port.tend(into));
            self.put(spare);
        }
        deadlines.into_iter().min()
    }
}

/// A port for one call, or several one after the other.
pub struct Borrowed<'f> {
    ports: &'f Ports,
    /// Some until it is dropped.
    port: Option<Port>,
}

impl Deref for Borrowed<'_> {
    type Target = Port;

    fn deref(&self) -> &Port {
        self.port.as_ref().expect("it is given back once")
    }
}

impl DerefMut for Borrowed<'_> {
    fn deref_mut(&mut self) -> &mut Port {
        self.port.as_mut().expect("it is given back once")
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if let Some(port) = self.port.take() {
            self.ports.put(Spare {
                port,
                idle_since: None,
            });
        }
    }
}

impl Fs {
    /// A thread's way to the files. It serves one call at a time.
    ///
    /// # Errors
    /// When the volume opens no further channel; it may tell only the first call.
    pub fn port(&self) -> Result<Port> {
        Port::open(&*self.space, self.wait)
    }

    /// A spare port, or a further one. When no further one can be opened, it waits until
    /// one is given back. Not for who has one.
    ///
    /// # Errors
    /// What the volume says; that it has no further channel only after a long wait.
    pub fn borrow(&self) -> Result<Borrowed<'_>> {
        let until = Instant::now() + PORT_LIMIT;
        loop {
            if let Some(port) = self.ports.await_spare(until) {
                return Ok(self.lend(port));
            }
            let opened = Port::open_ready(&*self.space, self.wait);
            let is_full = matches!(opened, Err(FsError::Space(SpaceError::Busy(_))));
            self.ports.note_full(is_full);
            if !is_full || Instant::now() >= until {
                return opened.map(|port| self.lend(port));
            }
        }
    }

    /// For several writes at once ([`Fs::begin_write`]). To be dropped when it is empty
    /// and nothing is at hand: others may wait for its port.
    ///
    /// # Errors
    /// As [`Fs::borrow`].
    pub fn pipe(&self) -> Result<Pipe<'_>> {
        Ok(Pipe::new(self.borrow()?))
    }

    /// The same without any wait, if there is a spare port.
    pub fn spare_pipe(&self) -> Option<Pipe<'_>> {
        let port = self.ports.take()?;
        Some(Pipe::new(self.lend(port)))
    }

    fn lend(&self, port: Port) -> Borrowed<'_> {
        Borrowed {
            ports: &self.ports,
            port: Some(port),
        }
    }

    /// Lets ports that nobody uses take part in what the volume does meanwhile, such as
    /// the return of a copy, and closes those that nobody has used for long by now. To be
    /// called when one of the descriptors is readable that it names, at the time that it
    /// returns, and once in a while. It does not wait.
    pub fn tend(&self, now: Instant, into: &mut Vec<RawFd>) -> Option<Instant> {
        // Whoever holds one of these uses it.
        let core = self.core.try_lock().ok();
        let core = core.and_then(|mut core| core.tend(into));
        let commits = self.commits.try_lock().ok();
        let commits = commits.and_then(|mut commits| commits.tend(into));
        let spares = self.ports.tend(now, into);
        [core, commits, spares].into_iter().flatten().min()
    }
}
