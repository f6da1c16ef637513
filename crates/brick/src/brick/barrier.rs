//! Barriers: the wait until sessions have left their operations.
//!
//! Invariants: a process that stays in an operation is killed, because nothing else prevents its
//! late stores; a stopped one runs first, so that it can leave. Other threads get the pool while a
//! barrier waits.

use super::Brick;
use crate::process;
use crate::stalled_sessions::StalledSessions;
use pagemesh_base::poison::recover;
use pagemesh_base::resume::{self, StopReason};
use pagemesh_pmem::Media;
use pagemesh_store::pool::{ObjectError, Pool};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// Processes that one barrier kills before it gives up: each takes a second to be found.
const KILLS_MAX: usize = 8;
/// How long a session may stay in an operation that the brick waits for, before its process is
/// killed. No operation takes nearly as long, even on a loaded machine.
pub(crate) const OPERATION_LIMIT: Duration = Duration::from_secs(1);
/// How long a session of a process that a signal stopped may stay in an operation that others wait
/// for. Then the brick runs the process until the session has left the operation.
pub(crate) const RESUME_AFTER: Duration = Duration::from_millis(100);
/// The same for a process that a debugger stopped: below the ten seconds that a client waits for a
/// barrier or a lock.
const TRACED_LIMIT: Duration = Duration::from_secs(7);
/// How long the pool stays unlocked between two checks of such a session.
const RECHECK_PAUSE: Duration = Duration::from_millis(1);
/// How long after its process's end a connection is expected to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// How long a process may stay in an operation after its connection has ended: an operation takes
/// microseconds unless the process is stopped.
const EXIT_LIMIT: Duration = Duration::from_secs(1);
/// The first interval of the checks whether it has left.
const EXIT_PAUSE: Duration = Duration::from_millis(1);
/// The longest interval, for a process that cannot be killed: each check locks the pool.
const EXIT_PAUSE_MAX: Duration = Duration::from_secs(1);

impl<M: Media> Brick<M> {
    /// Waits until a session has left every operation. Its process may outlive its connection, for
    /// example when this brick ends. A late store of that process must not reach frames that the
    /// pool has granted to others.
    pub(super) fn wait_until_outside(&self, number: u32) {
        let (pid, started) = {
            let pool = self.pool();
            (pool.process_id(number), pool.process_start_time(number))
        };
        if pid == std::process::id() {
            // The thread that ends the session is the one that used it.
            return;
        }
        let began = Instant::now();
        let mut is_told = false;
        // A process that executed another program has no thread left in the operation.
        let is_there = || process::is_running(pid, started) && !self.is_unmapped_by(pid);
        while self.revoke_session(number) && is_there() {
            let waited = began.elapsed();
            if waited >= RESUME_AFTER {
                self.resume(number, pid);
            }
            if !is_told && waited > EXIT_LIMIT {
                is_told = true;
                tracing::warn!(number, pid, "killing a process that stays in an operation");
                if let Err(cause) = process::kill(pid, started) {
                    tracing::error!(number, pid, %cause, "cannot kill a process that stays in an operation: the brick does not reuse its journal and frames before the process ends or the brick restarts");
                }
            }
            std::thread::sleep(recheck_pause(waited));
        }
    }

    fn is_unmapped_by(&self, pid: u32) -> bool {
        self.owner_lock
            .as_ref()
            .is_some_and(|it| it.is_unmapped_by(pid))
    }

    /// A function of its own, so that the pool does not stay locked.
    fn revoke_session(&self, number: u32) -> bool {
        self.pool().revoke(number)
    }

    /// Runs `run`, which waits for all operations to end, and retries it while a session is stuck.
    /// A client's process that stays in an operation is killed: nothing else prevents its late
    /// stores. A session that was only just found in an operation, after others came and went, is
    /// not killed.
    pub(crate) fn retry_while_stuck<T>(
        &self,
        mut run: impl FnMut(&mut Pool<M>) -> Result<T, ObjectError>,
    ) -> Result<T, ObjectError> {
        let mut pool = self.pool();
        let mut tries = 0;
        let mut still = StalledSessions::default();
        loop {
            // Reads of snapshots may have looked up frames while the pool was not locked.
            let result = run(&mut pool);
            let Err(ObjectError::SessionStuck {
                session,
                operation,
                pid,
            }) = result
            else {
                return result;
            };
            self.record_awaited(&pool);
            let waited = still.record(session, operation).since.elapsed();
            if waited >= RESUME_AFTER {
                let stopped = stopped_sessions(&pool);
                // Other threads need the pool meanwhile.
                drop(pool);
                for (session, pid) in stopped {
                    self.resume(session, pid);
                }
                pool = self.pool();
            }
            if waited < OPERATION_LIMIT || has_traced_session(&pool) && waited < TRACED_LIMIT {
                // The clean-up of dead sessions needs the pool.
                let waited = self.session_closed.wait_timeout(pool, RECHECK_PAUSE);
                pool = recover(waited).0;
                continue;
            }
            still = StalledSessions::default();
            tries += 1;
            if dead_session(&pool).is_some() && tries < KILLS_MAX {
                pool = self.wait_for_dead_cleanup(pool);
                continue;
            }
            let (session, pid) = self.blocking_session(&pool).unwrap_or((session, pid));
            tracing::warn!(session, pid, "killing a process that stays in an operation");
            if tries == KILLS_MAX {
                return result;
            }
            if let Err(cause) = process::kill(pid, pool.process_start_time(session)) {
                tracing::error!(pid, %cause, "cannot kill the process of a stuck session");
                return result;
            }
            pool = self.wait_for_close(pool, session);
        }
    }

    /// Runs a process that a signal stopped until its session has left every operation.
    pub(crate) fn resume(&self, session: u32, pid: u32) {
        if resume::stop_reason(pid) != Some(StopReason::Signal) {
            return;
        }
        let control = self.mapping.control();
        let is_outside = || control.op_in_progress(session).is_none();
        let is_out = resume::run_until_outside(pid, &is_outside);
        let name = resume::process_name(pid);
        tracing::info!(
            session,
            pid,
            name,
            is_out,
            "ran a stopped process so that it leaves its operation"
        );
    }

    /// The session in an operation that blocks the others, and its process: one that is stopped, or
    /// else the one awaited for long. None: each of them may only be slow.
    fn blocking_session(&self, pool: &Pool<M>) -> Option<(u32, u32)> {
        let inside = pool.sessions_in_op();
        let is_stopped = |number: &u32| process::is_stopped(pool.process_id(*number));
        let stopped = inside.iter().copied().find(is_stopped);
        let first = stopped.or_else(|| {
            let operation = |number| Some((number, pool.op_in_progress(number)?));
            let inside: Vec<_> = inside.into_iter().filter_map(operation).collect();
            self.stalled().longest_awaited(&inside)
        })?;
        Some((first, pool.process_id(first)))
    }

    /// Waits until the sessions of dead processes are cleaned up. Their lock words block other
    /// sessions, which would be taken for stalled ones. The clean-up needs the pool lock, so the
    /// wait releases it.
    fn wait_for_dead_cleanup<'a>(
        &self,
        mut pool: MutexGuard<'a, Pool<M>>,
    ) -> MutexGuard<'a, Pool<M>> {
        while let Some(dead) = dead_session(&pool) {
            pool = self.wait_for_close(pool, dead);
            if pool.is_open(dead) {
                break;
            }
        }
        pool
    }

    /// Waits until a dead session's connection was closed.
    fn wait_for_close<'a>(
        &self,
        pool: MutexGuard<'a, Pool<M>>,
        session: u32,
    ) -> MutexGuard<'a, Pool<M>> {
        let open = |pool: &mut Pool<M>| pool.is_open(session);
        let waited = self
            .session_closed
            .wait_timeout_while(pool, CLOSE_LIMIT, open);
        recover(waited).0
    }
}

/// The interval of the checks of a process that has been awaited for `waited`.
fn recheck_pause(waited: Duration) -> Duration {
    let late = waited.saturating_sub(EXIT_LIMIT);
    (EXIT_PAUSE + late / 8).min(EXIT_PAUSE_MAX)
}

/// Sessions in an operation, with their processes, that a signal stopped.
fn stopped_sessions<M: Media>(pool: &Pool<M>) -> Vec<(u32, u32)> {
    let inside = pool.sessions_in_op().into_iter();
    let all = inside.map(|session| (session, pool.process_id(session)));
    all.filter(|&(_, pid)| resume::stop_reason(pid) == Some(StopReason::Signal))
        .collect()
}

/// Whether a debugger holds a process in an operation.
fn has_traced_session<M: Media>(pool: &Pool<M>) -> bool {
    let mut inside = pool.sessions_in_op().into_iter();
    inside.any(|session| {
        matches!(
            resume::stop_reason(pool.process_id(session)),
            Some(StopReason::Tracer(_))
        )
    })
}

/// A session in an operation though its process has ended.
fn dead_session<M: Media>(pool: &Pool<M>) -> Option<u32> {
    let mut inside = pool.sessions_in_op().into_iter();
    inside.find(|&number| {
        !process::is_running(pool.process_id(number), pool.process_start_time(number))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stuck_process_is_polled_ever_more_rarely() {
        let looks_within = |time: Duration| {
            let (mut waited, mut looks) = (Duration::ZERO, 0);
            while waited < time {
                waited += recheck_pause(waited);
                looks += 1;
            }
            looks
        };
        assert_eq!(looks_within(EXIT_LIMIT), 1000, "each millisecond");
        assert!(looks_within(Duration::from_secs(60)) < 1000 + 150);
        assert!(looks_within(Duration::from_secs(3600)) < 1000 + 3700);
        // A killed process is gone within milliseconds, and the brick must notice that.
        assert!(recheck_pause(EXIT_LIMIT + Duration::from_millis(50)) < Duration::from_millis(10));
    }
}
