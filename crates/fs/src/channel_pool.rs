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
use crate::io::{IoChannel, WriteQueue};
use pagemesh_base::space::SpaceError;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a call waits for a port: longer than a volume lets requests wait for a part
/// without any copy, so that those who have one are over by then.
const CHANNEL_WAIT_MAX: Duration = Duration::from_secs(30);
/// How soon it is tried again to open a further port, once there was no room for one: each
/// try costs a connection to every brick.
const OPEN_RETRY: Duration = Duration::from_secs(5);
/// For so long a spare port is kept: opening one takes milliseconds, and a copy that comes
/// back, or another client, may need its sessions.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// A port that nobody uses.
struct IdleChannel {
    channel: IoChannel,
    /// Since when, as far as somebody looked.
    idle_since: Option<Instant>,
}

#[derive(Default)]
struct ChannelPoolState {
    /// Given back in this order. The last is lent first, so that the others get idle.
    idle: VecDeque<IdleChannel>,
    /// Calls that wait for one.
    waiters: usize,
    /// Until then nobody opens a further one.
    full_until: Option<Instant>,
}

#[derive(Default)]
pub(crate) struct ChannelPool {
    state: Mutex<ChannelPoolState>,
    /// One was given back, or further ones may be opened.
    changed: Condvar,
}

impl ChannelPool {
    fn lock_state(&self) -> MutexGuard<'_, ChannelPoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A spare one, if there is one now.
    fn try_take(&self) -> Option<IoChannel> {
        self.lock_state().idle.pop_back().map(|spare| spare.channel)
    }

    /// A spare one, after a while if no further one can be opened now; none: the caller
    /// may try to open one.
    fn wait_for_idle(&self, until: Instant) -> Option<IoChannel> {
        let mut spares = self.lock_state();
        loop {
            if let Some(spare) = spares.idle.pop_back() {
                return Some(spare.channel);
            }
            let now = Instant::now();
            let full_until = spares.full_until?;
            if now >= full_until.min(until) {
                // One tries for all who wait.
                spares.full_until = Some(now + OPEN_RETRY);
                return None;
            }
            spares.waiters += 1;
            let woken = self
                .changed
                .wait_timeout(spares, full_until.min(until) - now);
            spares = woken.unwrap_or_else(PoisonError::into_inner).0;
            spares.waiters -= 1;
        }
    }

    /// A further one could be opened, or could not.
    fn record_full(&self, is_full: bool) {
        let full_until = is_full.then(|| Instant::now() + OPEN_RETRY);
        let before = std::mem::replace(&mut self.lock_state().full_until, full_until);
        if before.is_some() && !is_full {
            self.changed.notify_all();
        }
    }

    fn return_channel(&self, spare: IdleChannel) {
        let mut spares = self.lock_state();
        spares.idle.push_back(spare);
        let is_awaited = spares.waiters > 0;
        drop(spares);
        // A system call.
        if is_awaited {
            self.changed.notify_one();
        }
    }

    fn take_oldest(&self) -> Option<IdleChannel> {
        self.lock_state().idle.pop_front()
    }

    /// Tends spare ones, and closes those that have been idle for long.
    fn poll_idle(&self, now: Instant, into: &mut Vec<RawFd>) -> Option<Instant> {
        let mut deadlines = Vec::new();
        let count = self.lock_state().idle.len();
        // One at a time: who finds none opens another.
        for _ in 0..count {
            let Some(mut spare) = self.take_oldest() else {
                break;
            };
            let since = *spare.idle_since.get_or_insert(now);
            if now.saturating_duration_since(since) > IDLE_MAX {
                continue;
            }
            deadlines.extend(spare.channel.poll(into));
            self.return_channel(spare);
        }
        deadlines.into_iter().min()
    }
}

/// A port for one call, or several one after the other.
pub struct PooledChannel<'f> {
    pool: &'f ChannelPool,
    /// Some until it is dropped.
    channel: Option<IoChannel>,
}

impl Deref for PooledChannel<'_> {
    type Target = IoChannel;

    fn deref(&self) -> &IoChannel {
        self.channel.as_ref().expect("it is given back once")
    }
}

impl DerefMut for PooledChannel<'_> {
    fn deref_mut(&mut self) -> &mut IoChannel {
        self.channel.as_mut().expect("it is given back once")
    }
}

impl Drop for PooledChannel<'_> {
    fn drop(&mut self) {
        if let Some(port) = self.channel.take() {
            self.pool.return_channel(IdleChannel {
                channel: port,
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
    pub fn open_channel(&self) -> Result<IoChannel> {
        IoChannel::open(&*self.space, self.wait)
    }

    /// A spare port, or a further one. When no further one can be opened, it waits until
    /// one is given back. Not for who has one.
    ///
    /// # Errors
    /// What the volume says; that it has no further channel only after a long wait.
    pub fn borrow_channel(&self) -> Result<PooledChannel<'_>> {
        let until = Instant::now() + CHANNEL_WAIT_MAX;
        loop {
            if let Some(port) = self.channel_pool.wait_for_idle(until) {
                return Ok(self.wrap_channel(port));
            }
            let opened = IoChannel::open_ready(&*self.space, self.wait);
            let is_full = matches!(opened, Err(FsError::Space(SpaceError::Busy(_))));
            self.channel_pool.record_full(is_full);
            if !is_full || Instant::now() >= until {
                return opened.map(|channel| self.wrap_channel(channel));
            }
        }
    }

    /// For several writes at once ([`Fs::begin_write`]). To be dropped when it is empty
    /// and nothing is at hand: others may wait for its port.
    ///
    /// # Errors
    /// As [`Fs::borrow_channel`].
    pub fn write_queue(&self) -> Result<WriteQueue<'_>> {
        Ok(WriteQueue::new(self.borrow_channel()?))
    }

    /// The same without any wait, if there is a spare port.
    pub fn try_write_queue(&self) -> Option<WriteQueue<'_>> {
        let channel = self.channel_pool.try_take()?;
        Some(WriteQueue::new(self.wrap_channel(channel)))
    }

    fn wrap_channel(&self, channel: IoChannel) -> PooledChannel<'_> {
        PooledChannel {
            pool: &self.channel_pool,
            channel: Some(channel),
        }
    }

    /// Lets ports that nobody uses take part in what the volume does meanwhile, such as
    /// the return of a copy, and closes those that nobody has used for long by now. To be
    /// called when one of the descriptors is readable that it names, at the time that it
    /// returns, and once in a while. It does not wait.
    pub fn poll_idle_channels(&self, now: Instant, into: &mut Vec<RawFd>) -> Option<Instant> {
        // Whoever holds one of these uses it.
        let core = self.core.try_lock().ok();
        let core = core.and_then(|mut core| core.poll_channel(into));
        let commits = self.commit_channel.try_lock().ok();
        let commits = commits.and_then(|mut commits| commits.poll(into));
        let spares = self.channel_pool.poll_idle(now, into);
        [core, commits, spares].into_iter().flatten().min()
    }
}
