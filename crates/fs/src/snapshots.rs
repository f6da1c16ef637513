//! The snapshots of a file system that fronts show as `.snapshot/NAME`: opened at their first use, shared by all fronts of a process,
//! and closed when they are idle.
//!
//! The source may be slow or dead, so one call at a time lists the snapshots, and one opens a snapshot; others wait for its result.
//! A front with threads that must not wait for long gives a limit, and gets `EAGAIN` after it.
//!
//! Invariants:
//! - At most [`OPEN_SNAPSHOTS_MAX`] snapshots stay open, and [`SNAPSHOT_CALLS_MAX`] calls of the source run. A request that still uses a
//!   closed snapshot keeps it until its end.
//! - No lock is held over I/O.

use crate::Fs;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The name of the directory with the snapshots.
pub const SNAPSHOT_DIR: &[u8] = b".snapshot";
/// Snapshots that are open at once. Each has caches, and recovery data if it was in the middle of writes.
pub const OPEN_SNAPSHOTS_MAX: usize = 8;
/// An open snapshot that was not used for this long is closed.
pub const SNAPSHOT_IDLE_MAX: Duration = Duration::from_secs(300);
/// The age of a list of snapshots that shows whether the snapshots have changed.
pub const SNAPSHOT_LIST_AGE: Duration = Duration::from_secs(2);
/// The age of a list that is still shown while the source does not answer.
pub const SNAPSHOT_LIST_AGE_MAX: Duration = Duration::from_secs(60);
/// The pause after a list that could not be made, in which an earlier list is shown.
const LIST_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Calls of a source at once, for one file system: lookups of names, and opens of different snapshots.
pub const SNAPSHOT_CALLS_MAX: usize = 4;

/// A snapshot of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotEntry {
    /// Its name.
    pub name: String,
    /// Its identity: no other snapshot of the file system ever has it.
    pub id: u32,
}

/// The snapshots of a file system, and the way to open them.
pub trait SnapshotSource: Send + Sync {
    /// All, the newest first.
    ///
    /// # Errors
    /// `EIO` if they cannot be listed.
    fn list(&self) -> Result<Vec<SnapshotEntry>, Errno>;

    /// The identity of the snapshot that has this name now.
    ///
    /// # Errors
    /// `ENOENT` if there is none, `EIO` if that cannot be found out.
    fn find(&self, name: &str) -> Result<u32, Errno>;

    /// Opens the file system of a snapshot.
    ///
    /// # Errors
    /// `ESTALE` if the snapshot was deleted, `EIO` if it cannot be read.
    fn open(&self, id: u32) -> Result<Arc<Fs>, Errno>;
}

/// See the module.
pub struct OpenSnapshots {
    source: Box<dyn SnapshotSource>,
    state: Mutex<State>,
    /// A call of the source has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    open: OpenTable,
    /// The snapshots that a thread opens.
    opening: HashSet<u32>,
    /// Lookups of names, and opens.
    calls: usize,
    list: ListState,
}

/// The last list, and the call that makes the next one.
#[derive(Default)]
struct ListState {
    last: Option<Arc<[SnapshotEntry]>>,
    /// The begin of the call that made it.
    begun: Option<Instant>,
    failed: Option<(Instant, Errno)>,
    is_running: bool,
}

impl ListState {
    /// The last list, if its call began at this time or later.
    fn since(&self, begin: Option<Instant>) -> Option<Arc<[SnapshotEntry]>> {
        match self.begun >= begin {
            true => self.last.clone(),
            false => None,
        }
    }
}

/// The open file systems, with the time of their last use.
#[derive(Default)]
struct OpenTable(HashMap<u32, (Arc<Fs>, Instant)>);

impl OpenTable {
    fn get(&mut self, id: u32, now: Instant) -> Option<Arc<Fs>> {
        let (fs, used) = self.0.get_mut(&id)?;
        *used = now;
        Some(Arc::clone(fs))
    }

    /// Removes the snapshots that are idle.
    fn take_idle(&mut self, now: Instant) -> Vec<Arc<Fs>> {
        let is_idle = |used: Instant| now.saturating_duration_since(used) >= SNAPSHOT_IDLE_MAX;
        let idle = self.0.extract_if(|_, (_, used)| is_idle(*used));
        idle.map(|(_, (fs, _))| fs).collect()
    }

    /// Removes the one that was used least recently, if there is no room for another.
    fn take_oldest(&mut self) -> Option<Arc<Fs>> {
        if self.0.len() < OPEN_SNAPSHOTS_MAX {
            return None;
        }
        let oldest = self.0.iter().min_by_key(|(_, (_, used))| *used);
        let oldest = oldest.map(|(id, _)| *id)?;
        self.0.remove(&oldest).map(|(fs, _)| fs)
    }
}

/// The end of a wait.
#[derive(Clone, Copy)]
struct Deadline(Option<Instant>);

impl Deadline {
    fn after(limit: Option<Duration>) -> Deadline {
        Deadline(limit.map(|limit| Instant::now() + limit))
    }

    /// Waits for the end of a call of the source. Returns whether time is left.
    fn wait(self, ended: &Condvar, state: &mut MutexGuard<'_, State>) -> bool {
        match self.0 {
            None => {
                ended.wait(state);
                true
            }
            Some(until) => {
                ended.wait_until(state, until);
                Instant::now() < until
            }
        }
    }
}

/// A call of the source, counted until its drop, also after a panic.
struct RunningCall<'a> {
    snapshots: &'a OpenSnapshots,
    opens: Option<u32>,
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        let mut state = self.snapshots.state.lock();
        state.calls -= 1;
        if let Some(id) = self.opens {
            state.opening.remove(&id);
        }
        drop(state);
        self.snapshots.ended.notify_all();
    }
}

/// The call that lists the snapshots. The drop stores its result; an error if it panicked.
struct RunningList<'a> {
    snapshots: &'a OpenSnapshots,
    begun: Instant,
    result: Result<Arc<[SnapshotEntry]>, Errno>,
}

impl Drop for RunningList<'_> {
    fn drop(&mut self) {
        let mut state = self.snapshots.state.lock();
        let list = &mut state.list;
        list.is_running = false;
        match &self.result {
            Ok(listed) => {
                list.last = Some(Arc::clone(listed));
                list.begun = Some(self.begun);
                list.failed = None;
            }
            Err(errno) => list.failed = Some((Instant::now(), *errno)),
        }
        drop(state);
        self.snapshots.ended.notify_all();
    }
}

impl OpenSnapshots {
    /// The snapshots of a source. None is open.
    #[must_use]
    pub fn new(source: Box<dyn SnapshotSource>) -> OpenSnapshots {
        OpenSnapshots {
            source,
            state: Mutex::default(),
            ended: Condvar::new(),
        }
    }

    /// The snapshots of now, the newest first. If the source fails, the list of at most [`SNAPSHOT_LIST_AGE_MAX`] ago. `limit` is for
    /// the wait for another thread's call.
    ///
    /// # Errors
    /// As [`SnapshotSource::list`]; `EAGAIN` after the limit.
    pub fn list(&self, limit: Option<Duration>) -> Result<Arc<[SnapshotEntry]>, Errno> {
        self.list_since(Instant::now(), limit)
    }

    /// As [`OpenSnapshots::list`], but the list may be as old as [`SNAPSHOT_LIST_AGE`].
    ///
    /// # Errors
    /// As [`OpenSnapshots::list`].
    pub fn recent_list(&self, limit: Option<Duration>) -> Result<Arc<[SnapshotEntry]>, Errno> {
        let now = Instant::now();
        let since = now.checked_sub(SNAPSHOT_LIST_AGE).unwrap_or(now);
        self.list_since(since, limit)
    }

    fn list_since(
        &self,
        since: Instant,
        limit: Option<Duration>,
    ) -> Result<Arc<[SnapshotEntry]>, Errno> {
        let (now, deadline) = (Instant::now(), Deadline::after(limit));
        let shown_since = now.checked_sub(SNAPSHOT_LIST_AGE_MAX);
        let mut state = self.state.lock();
        loop {
            if let Some(listed) = state.list.since(Some(since)) {
                return Ok(listed);
            }
            let shown = state.list.since(shown_since);
            // A call that failed after this one began is its result, too.
            let failed = state.list.failed.filter(|(at, _)| match shown {
                Some(_) => now.saturating_duration_since(*at) < LIST_RETRY_PAUSE,
                None => *at >= now,
            });
            if let Some((_, errno)) = failed {
                return shown.ok_or(errno);
            }
            if !state.list.is_running {
                state.list.is_running = true;
                break;
            }
            if !deadline.wait(&self.ended, &mut state) {
                return shown.ok_or(Errno::AGAIN);
            }
        }
        let shown = state.list.since(shown_since);
        drop(state);
        self.run_list().or_else(|errno| shown.ok_or(errno))
    }

    fn run_list(&self) -> Result<Arc<[SnapshotEntry]>, Errno> {
        let mut running = RunningList {
            snapshots: self,
            begun: Instant::now(),
            result: Err(Errno::IO),
        };
        running.result = self.source.list().map(Arc::from);
        running.result.clone()
    }

    /// Begins a call of the source, once there is room for it. None: another thread has opened the snapshot meanwhile.
    fn begin_call(
        &self,
        opens: Option<u32>,
        limit: Option<Duration>,
    ) -> Result<CallOrFs<'_>, Errno> {
        let deadline = Deadline::after(limit);
        let mut state = self.state.lock();
        loop {
            if let Some(id) = opens
                && let Some(fs) = state.open.get(id, Instant::now())
            {
                return Ok(CallOrFs::Open(fs));
            }
            let is_opening = opens.is_some_and(|id| state.opening.contains(&id));
            if !is_opening && state.calls < SNAPSHOT_CALLS_MAX {
                state.calls += 1;
                state.opening.extend(opens);
                let snapshots = self;
                return Ok(CallOrFs::Call(RunningCall { snapshots, opens }));
            }
            if !deadline.wait(&self.ended, &mut state) {
                return Err(Errno::AGAIN);
            }
        }
    }

    /// As [`SnapshotSource::find`]. `limit` is for the wait for calls of other threads.
    ///
    /// # Errors
    /// As [`SnapshotSource::find`]; `EAGAIN` after the limit.
    pub fn find(&self, name: &str, limit: Option<Duration>) -> Result<u32, Errno> {
        let call = self.begin_call(None, limit)?;
        let found = self.source.find(name);
        drop(call);
        self.note_found(name, found);
        found
    }

    /// Drops a list that the result of a lookup contradicts.
    fn note_found(&self, name: &str, found: Result<u32, Errno>) {
        let known = match found {
            Ok(id) => Some(id),
            Err(Errno::NOENT) => None,
            Err(_) => return,
        };
        let mut state = self.state.lock();
        let listed = state.list.last.iter().flat_map(|it| it.iter());
        let listed = listed.filter(|it| it.name == name).map(|it| it.id).next();
        if listed != known {
            state.list.begun = None;
        }
    }

    /// The file system of a snapshot, opened if it is not. `limit` is for the wait for calls of other threads.
    ///
    /// # Errors
    /// As [`SnapshotSource::open`]; `EAGAIN` after the limit.
    pub fn fs(&self, id: u32, limit: Option<Duration>) -> Result<Arc<Fs>, Errno> {
        let call = match self.begin_call(Some(id), limit)? {
            CallOrFs::Open(fs) => return Ok(fs),
            CallOrFs::Call(call) => call,
        };
        let opened = self.source.open(id)?;
        let now = Instant::now();
        let mut state = self.state.lock();
        let idle = state.open.take_idle(now);
        let oldest = state.open.take_oldest();
        state.open.0.insert(id, (Arc::clone(&opened), now));
        drop(state);
        drop(call);
        drop((idle, oldest));
        Ok(opened)
    }

    /// Closes a snapshot that failed a read, if it was deleted. Returns whether it was. `limit` is for the wait for another thread's call.
    #[must_use]
    pub fn close_deleted(&self, id: u32, limit: Option<Duration>) -> bool {
        let failed_at = Instant::now();
        let _ = self.list(limit);
        // A list that is shown while the source fails may be older than the snapshot.
        let listed = self.state.lock().list.since(Some(failed_at));
        let is_deleted = listed.is_some_and(|all| all.iter().all(|it| it.id != id));
        if is_deleted {
            let closed = self.state.lock().open.0.remove(&id);
            drop(closed);
        }
        is_deleted
    }

    /// Closes all.
    pub fn close_all(&self) {
        let closed = std::mem::take(&mut self.state.lock().open);
        drop(closed);
    }
}

/// The result of [`OpenSnapshots::begin_call`].
enum CallOrFs<'a> {
    /// The caller calls the source.
    Call(RunningCall<'a>),
    /// The snapshot is open.
    Open(Arc<Fs>),
}
