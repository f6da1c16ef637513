//! Sessions that stand still inside of an operation and hold lock words that others wait
//! for.
//!
//! Nothing else ends them: who needs frames or room in a lane goes on without them, and
//! barriers are rare. Invariants: nobody is ended in whose way nobody is. Who runs may wait for
//! the lock of another: of those that stay for long, whoever was told of first is ended.

use crate::brick::{Brick, RESUME_AFTER, WINDOW_MAX};
use crate::process;
use pagemesh_base::resume;
use pagemesh_pmem::Media;
use pagemesh_store::pool::Pool;
use std::time::{Duration, Instant};

/// How long one that does not come out may be waited for: a debugger stopped it, its container is
/// frozen, or its memory does not come. Who waits gives the leg up a little later.
const LATE_MAX: Duration = Duration::from_secs(8);
/// The same for one that a signal stopped, and that did not come out when it ran.
const STOPPED_MAX: Duration = Duration::from_secs(4);
/// So often must others have told of it meanwhile, ten times a second: the machine may have
/// stood still as a whole.
const TOLD_MIN: u32 = 40;

/// A session that others wait for.
#[derive(Clone, Copy)]
pub(crate) struct Awaited {
    session: u32,
    operation: u64,
    /// Since when it is known to be inside of that operation.
    pub(crate) since: Instant,
    /// How often that was told.
    told: u32,
}

/// Those that others wait for; as many as there are sessions, at most.
#[derive(Default)]
pub(crate) struct Still(Vec<Awaited>);

impl Still {
    /// Takes in that others wait for a session's operation. What is known of it.
    pub(crate) fn note(&mut self, session: u32, operation: u64) -> Awaited {
        self.0
            .retain(|known| known.session != session || known.operation == operation);
        if let Some(known) = self.0.iter_mut().find(|known| known.session == session) {
            known.told = known.told.saturating_add(1);
            return *known;
        }
        let awaited = Awaited {
            session,
            operation,
            since: Instant::now(),
            told: 1,
        };
        self.0.push(awaited);
        awaited
    }

    /// Whom others have waited for the longest, and for long, among sessions that are inside of
    /// these operations.
    pub(crate) fn first_of(&self, inside: &[(u32, u64)]) -> Option<u32> {
        let is_meant = |known: &&Awaited| {
            let is_awaited = known.since.elapsed() >= WINDOW_MAX / 2 && known.told > 1;
            is_awaited && inside.contains(&(known.session, known.operation))
        };
        let meant = self.0.iter().filter(is_meant);
        Some(meant.min_by_key(|known| known.since)?.session)
    }
}

impl Awaited {
    /// Whether its process is run for a moment if it is stopped. That takes a fifth of a second where it does
    /// not help, and others must be looked at meanwhile.
    fn is_to_run(&self) -> bool {
        self.told <= 4 || self.told.is_multiple_of(10)
    }

    fn is_late(&self) -> bool {
        self.since.elapsed() >= LATE_MAX && self.told >= TOLD_MIN
    }
}

impl<M: Media> Brick<M> {
    /// Lets processes that a signal stopped inside of an operation others wait for run until they are
    /// outside, and of those that stay there for very long kills the first. Others tell of them again and
    /// again.
    pub(crate) fn end_still(&self) {
        let noted: Vec<_> = {
            let pool = self.pool();
            let noted = self.note_awaited(&pool).into_iter();
            noted.map(|it| (it, pool.process(it.session))).collect()
        };
        let mut first_late: Option<Awaited> = None;
        for (awaited, pid) in noted {
            if awaited.since.elapsed() >= RESUME_AFTER && awaited.is_to_run() {
                self.resume(awaited.session, pid);
            }
            let stopped = resume::stop_of(pid) == Some(resume::Stop::Signal);
            if stopped && awaited.since.elapsed() >= STOPPED_MAX {
                self.end_awaited(awaited);
            } else if awaited.is_late() && first_late.is_none_or(|it| awaited.since < it.since) {
                first_late = Some(awaited);
            }
        }
        if let Some(late) = first_late {
            self.end_awaited(late);
        }
    }

    /// Takes in for whom others have waited since the last look.
    pub(crate) fn note_awaited(&self, pool: &Pool<M>) -> Vec<Awaited> {
        let told = self.view().control().take_awaited().into_iter();
        let operation = |session: u32| pool.operation(session).filter(|_| pool.is_open(session));
        told.filter_map(|session| Some(self.still().note(session, operation(session)?)))
            .collect()
    }

    fn end_awaited(&self, awaited: Awaited) {
        let Awaited {
            session, operation, ..
        } = awaited;
        let (pid, started) = {
            let pool = self.pool();
            // It may have left since it was looked at, and be stopped elsewhere.
            if pool.operation(session) != Some(operation) {
                return;
            }
            (pool.process(session), pool.started(session))
        };
        let waited = awaited.since.elapsed();
        let name = resume::name_of(pid);
        let stopped = resume::stop_of(pid);
        tracing::warn!(
            session,
            pid,
            name,
            ?stopped,
            ?waited,
            "ending a process that stands still in an operation others wait for"
        );
        if let Err(cause) = process::end(pid, started) {
            tracing::error!(pid, %cause, "a session is stuck");
        }
    }
}
