//! The pool of I/O channels that calls borrow: idle ones, and new ones as long as the space opens
//! any.
//!
//! A space has a limited number of channels, and each takes a session of every brick behind it. So
//! there may be fewer channels than calls; then a call waits until another returns its channel.
//! Idle channels are closed, which frees their sessions for other clients.
//!
//! Invariants: a call borrows one channel at a time, and does so before it takes any lock that the
//! holder of a channel may wait for. So a call with a channel never waits for a call without one.

use crate::error::{FsError, Result};
use crate::io::channel::{IoChannel, Wait};
use pagemesh_base::poison;
use pagemesh_base::space::{Space, SpaceError};
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// How long a call waits for a channel. A volume delays requests to a part without any copy for a
/// shorter time, so calls that hold a channel have ended by then.
const CHANNEL_WAIT_MAX: Duration = Duration::from_secs(30);
/// Pause after a failed attempt to open a channel: each attempt costs a connection to every brick.
const OPEN_RETRY: Duration = Duration::from_secs(5);
/// How long an idle channel stays open. Opening one takes milliseconds; a returning copy, or
/// another client, may need its sessions.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// A channel that no call uses.
struct IdleChannel {
    channel: IoChannel,
    /// First time that the poller saw it idle.
    idle_since: Option<Instant>,
}

#[derive(Default)]
struct ChannelPoolState {
    /// In order of return. The last one is borrowed first, so that the others become idle.
    idle: VecDeque<IdleChannel>,
    /// Calls that wait for a channel.
    waiters: usize,
    /// No call opens a new channel before this time.
    full_until: Option<Instant>,
}

pub(crate) struct ChannelPool {
    state: Mutex<ChannelPoolState>,
    /// Signals a returned channel, or that new ones may be opened.
    changed: Condvar,
    wait: Wait,
    space: Arc<dyn Space>,
}

impl ChannelPool {
    pub(crate) fn new(space: Arc<dyn Space>, wait: Wait) -> ChannelPool {
        ChannelPool {
            state: Mutex::default(),
            changed: Condvar::new(),
            wait,
            space,
        }
    }

    pub(crate) fn space(&self) -> &dyn Space {
        &*self.space
    }

    /// See [`crate::Fs::open_channel`].
    pub(crate) fn open(&self) -> Result<IoChannel> {
        IoChannel::open(&*self.space, self.wait)
    }

    /// See [`crate::Fs::borrow_channel`].
    pub(crate) fn borrow(&self) -> Result<PooledChannel<'_>> {
        let until = Instant::now() + CHANNEL_WAIT_MAX;
        loop {
            if let Some(channel) = self.wait_for_idle(until) {
                return Ok(self.wrap(channel));
            }
            let opened = IoChannel::open_ready(&*self.space, self.wait);
            let is_full = matches!(opened, Err(FsError::Space(SpaceError::Busy(_))));
            self.record_full(is_full);
            if !is_full || Instant::now() >= until {
                return opened.map(|channel| self.wrap(channel));
            }
        }
    }

    /// An idle channel, without waiting; `None` if there is none.
    pub(crate) fn try_borrow(&self) -> Option<PooledChannel<'_>> {
        self.try_take().map(|channel| self.wrap(channel))
    }

    /// Calls `run` with the caller's channel, or with a borrowed one.
    pub(crate) fn with_channel<T>(
        &self,
        channel: Option<&mut IoChannel>,
        run: impl FnOnce(&mut IoChannel) -> Result<T>,
    ) -> Result<T> {
        match channel {
            Some(channel) => run(channel),
            None => run(&mut *self.borrow()?),
        }
    }

    fn wrap(&self, channel: IoChannel) -> PooledChannel<'_> {
        PooledChannel {
            pool: self,
            channel: Some(channel),
        }
    }
}

impl ChannelPool {
    fn lock_state(&self) -> MutexGuard<'_, ChannelPoolState> {
        poison::lock(&self.state)
    }

    /// An idle channel, if there is one now.
    fn try_take(&self) -> Option<IoChannel> {
        self.lock_state().idle.pop_back().map(|spare| spare.channel)
    }

    /// Waits for an idle channel while no new one can be opened. `None`: the caller may try to open
    /// one.
    fn wait_for_idle(&self, until: Instant) -> Option<IoChannel> {
        let mut spares = self.lock_state();
        loop {
            if let Some(spare) = spares.idle.pop_back() {
                return Some(spare.channel);
            }
            let now = Instant::now();
            let full_until = spares.full_until?;
            if now >= full_until.min(until) {
                // One caller tries for all waiting ones.
                spares.full_until = Some(now + OPEN_RETRY);
                return None;
            }
            spares.waiters += 1;
            let woken = self
                .changed
                .wait_timeout(spares, full_until.min(until) - now);
            spares = poison::recover(woken).0;
            spares.waiters -= 1;
        }
    }

    /// Records whether the space refused a new channel.
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
        // Notification is a system call.
        if is_awaited {
            self.changed.notify_one();
        }
    }

    fn take_oldest(&self) -> Option<IdleChannel> {
        self.lock_state().idle.pop_front()
    }

    /// Polls idle channels, and closes those that have been idle for too long.
    pub(crate) fn poll_idle(&self, now: Instant, into: &mut Vec<RawFd>) -> Option<Instant> {
        let mut deadlines = Vec::new();
        let count = self.lock_state().idle.len();
        // One at a time: a call that finds the pool empty would open another.
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

/// A borrowed channel, for one call or several in sequence.
pub struct PooledChannel<'f> {
    pool: &'f ChannelPool,
    /// `Some` until the drop.
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
        if let Some(channel) = self.channel.take() {
            self.pool.return_channel(IdleChannel {
                channel,
                idle_since: None,
            });
        }
    }
}
