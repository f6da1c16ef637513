//! Sessions that stand still inside of an operation and hold lock words that others wait
//! for.
//!
//! Nothing else ends them: who needs frames or room in a lane goes on without them, and
//! barriers are rare. Invariants: nobody is ended in whose way nobody is. Who runs may wait for
//! the lock of another: of those that stay for long, whoever was told of first is ended.

use crate::brick::{Brick, OPERATION_LIMIT, RESUME_AFTER};
use crate::process;
use pagemesh_base::resume;
use pagemesh_pmem::Media;
use pagemesh_store::pool::Pool;
use std::time::{Duration, Instant};

/// How long one that does not come out may be waited for: a debugger stopped it, its container is
/// frozen, or its memory does not come. Who waits gives the leg up a little later.
const UNRESPONSIVE_LIMIT: Duration = Duration::from_secs(8);
/// The same for one that a signal stopped, and that did not come out when it ran.
const STOPPED_LIMIT: Duration = Duration::from_secs(4);
/// So often must others have told of it meanwhile, ten times a second: the machine may have
/// stood still as a whole.
const REPORTS_MIN: u32 = 40;

/// A session that others wait for.
#[derive(Clone, Copy)]
pub(crate) struct AwaitedSession {
    session: u32,
    operation: u64,
    /// Since when it is known to be inside of that operation.
    pub(crate) since: Instant,
    /// How often that was told.
    reports: u32,
}

/// Those that others wait for; as many as there are sessions, at most.
#[derive(Default)]
pub(crate) struct StalledSessions(Vec<AwaitedSession>);

impl StalledSessions {
    /// Takes in that others wait for a session's operation. What is known of it.
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

    /// Whom others have waited for the longest, and for long, among sessions that are inside of
    /// these operations.
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
    /// Whether its process is run for a moment if it is stopped. That takes a fifth of a second where it does
    /// not help, and others must be looked at meanwhile.
    fn should_resume(&self) -> bool {
        self.reports <= 4 || self.reports.is_multiple_of(10)
    }

    fn is_unresponsive(&self) -> bool {
        self.since.elapsed() >= UNRESPONSIVE_LIMIT && self.reports >= REPORTS_MIN
    }
}

impl<M: Media> Brick<M> {
    /// Lets processes that a signal stopped inside of an operation others wait for run until they are
    /// outside, and of those that stay there for very long kills the first. Others tell of them again and
    /// again.
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

    /// Takes in for whom others have waited since the last look.
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
            // It may have left since it was looked at, and be stopped elsewhere.
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
            "ending a process that stands still in an operation others wait for"
        );
        if let Err(cause) = process::kill(pid, started) {
            tracing::error!(pid, %cause, "a session is stuck");
        }
    }
}
