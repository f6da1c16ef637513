//! Sessions that are stalled in an operation and hold lock words that other sessions wait for.
//!
//! Nothing else ends them: a session that needs frames or journal room continues without them, and
//! barriers are rare. Invariants: a process is killed only if its session blocks another. A session
//! that runs may itself wait for the lock of another. Therefore, of the sessions that stay in an
//! operation for long, only the one reported first is killed.
//!
//! # Time limits
//!
//! A stopped client's floor holds the checkpoint back, but other sessions continue by a partial
//! checkpoint. Barriers wait for the session: they poll, and release the pool between polls, so
//! that dead sessions can be retired. The brick acts after these times:
//!
//! | after | for a session that others wait for, [`Brick::end_stalled`] | for a barrier, `Brick::retry_while_stuck` |
//! |---|---|---|
//! | [`RESUME_AFTER`] (100 ms) | runs a process that a signal stopped, until it has left the operation | the same |
//! | [`OPERATION_LIMIT`] (1 s) | – | kills the process, unless a debugger holds one of the processes in an operation |
//! | `STOPPED_LIMIT` (4 s) | kills a process that a signal stopped and that is still in the operation | – |
//! | `TRACED_LIMIT` (7 s) | – | kills the process also then |
//! | [`UNRESPONSIVE_LIMIT`] (8 s) | kills any process, but only the one reported first, and after at least 40 reports | – |

use crate::brick::{Brick, OPERATION_LIMIT, RESUME_AFTER};
use crate::process;
use pagemesh_base::resume;
use pagemesh_pmem::Media;
use pagemesh_store::pool::Pool;
use std::time::{Duration, Instant};

/// How long to wait for a session that does not leave its operation: a debugger stopped its
/// process, its container is frozen, or its memory does not arrive. Waiting sessions give the leg
/// up a little later.
const UNRESPONSIVE_LIMIT: Duration = Duration::from_secs(8);
/// The same for a process that a signal stopped and that did not leave the operation when it was
/// run.
const STOPPED_LIMIT: Duration = Duration::from_secs(4);
/// Reports by waiting sessions, ten a second, that are needed too: the whole machine may have been
/// paused.
const REPORTS_MIN: u32 = 40;

/// A session that others wait for.
#[derive(Clone, Copy)]
pub(crate) struct AwaitedSession {
    session: u32,
    operation: u64,
    /// When its operation was first reported.
    pub(crate) since: Instant,
    /// How often it was reported.
    reports: u32,
}

/// The sessions that others wait for; at most as many as there are sessions.
#[derive(Default)]
pub(crate) struct StalledSessions(Vec<AwaitedSession>);

impl StalledSessions {
    /// Records a report that others wait for a session's operation. Returns its record.
    pub(crate) fn record(&mut self, session: u32, operation: u64) -> AwaitedSession {
        self.0
            .retain(|known| known.session != session || known.operation == operation);
        if let Some(known) = self.0.iter_mut().find(|known| known.session == session) {
            known.reports = known.reports.saturating_add(1);
            return *known;
        }
        let awaited = AwaitedSession {
            session,
            operation,
            since: Instant::now(),
            reports: 1,
        };
        self.0.push(awaited);
        awaited
    }

    /// The session that others have awaited longest, and for long, among the sessions in these
    /// operations.
    pub(crate) fn longest_awaited(&self, inside: &[(u32, u64)]) -> Option<u32> {
        let is_meant = |known: &&AwaitedSession| {
            let is_awaited = known.since.elapsed() >= OPERATION_LIMIT / 2 && known.reports > 1;
            is_awaited && inside.contains(&(known.session, known.operation))
        };
        let meant = self.0.iter().filter(is_meant);
        Some(meant.min_by_key(|known| known.since)?.session)
    }
}

impl AwaitedSession {
    /// Whether its process, if stopped, is run now. A run that does not help takes a fifth of a
    /// second, and other sessions must be checked meanwhile.
    fn should_resume(&self) -> bool {
        self.reports <= 4 || self.reports.is_multiple_of(10)
    }

    fn is_unresponsive(&self) -> bool {
        self.since.elapsed() >= UNRESPONSIVE_LIMIT && self.reports >= REPORTS_MIN
    }
}

impl<M: Media> Brick<M> {
    /// Runs the processes that a signal stopped in an operation that others wait for, until their
    /// sessions have left it. Of the sessions that stay there too long, it kills the process of the
    /// first. Waiting sessions report again and again.
    pub(crate) fn end_stalled(&self) {
        let noted: Vec<_> = {
            let pool = self.pool();
            let noted = self.record_awaited(&pool).into_iter();
            noted.map(|it| (it, pool.process_id(it.session))).collect()
        };
        let mut first_late: Option<AwaitedSession> = None;
        for (awaited, pid) in noted {
            if awaited.since.elapsed() >= RESUME_AFTER && awaited.should_resume() {
                self.resume(awaited.session, pid);
            }
            let stopped = resume::stop_reason(pid) == Some(resume::StopReason::Signal);
            if stopped && awaited.since.elapsed() >= STOPPED_LIMIT {
                self.end_awaited(awaited);
            } else if awaited.is_unresponsive()
                && first_late.is_none_or(|it| awaited.since < it.since)
            {
                first_late = Some(awaited);
            }
        }
        if let Some(late) = first_late {
            self.end_awaited(late);
        }
    }

    /// Records the sessions that others have reported since the last check.
    pub(crate) fn record_awaited(&self, pool: &Pool<M>) -> Vec<AwaitedSession> {
        let told = self
            .mapping()
            .control()
            .take_blocking_sessions()
            .into_iter();
        let operation = |session: u32| {
            pool.op_in_progress(session)
                .filter(|_| pool.is_open(session))
        };
        told.filter_map(|session| Some(self.stalled().record(session, operation(session)?)))
            .collect()
    }

    fn end_awaited(&self, awaited: AwaitedSession) {
        let AwaitedSession {
            session, operation, ..
        } = awaited;
        let (pid, started) = {
            let pool = self.pool();
            // The session may have left since the check, and be stopped in another operation.
            if pool.op_in_progress(session) != Some(operation) {
                return;
            }
            (pool.process_id(session), pool.process_start_time(session))
        };
        let waited = awaited.since.elapsed();
        let name = resume::process_name(pid);
        let stopped = resume::stop_reason(pid);
        tracing::warn!(
            session,
            pid,
            name,
            ?stopped,
            ?waited,
            "killing a process that is stalled in an operation that others wait for"
        );
        if let Err(cause) = process::kill(pid, started) {
            tracing::error!(pid, %cause, "cannot kill the process of a stuck session");
        }
    }
}
