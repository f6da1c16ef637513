//! Sessions that stand still inside of an operation and hold lock words that others wait
//! for.
//!
//! Nothing else ends them: who needs frames or room in a lane goes on without them, and
//! barriers are rare. Invariants: nobody is ended in whose way nobody is, nor who runs: that
//! one may wait for the lock of another.

use crate::brick::{Brick, WINDOW_MAX};
use crate::process;
use pagemesh_pmem::Media;
use std::time::Instant;

/// A session that others wait for, and since when it is known to be inside of that operation.
struct Awaited {
    session: u32,
    operation: u64,
    since: Instant,
}

/// Those that others wait for; as many as there are sessions, at most.
#[derive(Default)]
pub(crate) struct Still(Vec<Awaited>);

impl Still {
    /// Takes in that others wait for a session's operation. Since when this is known.
    pub(crate) fn note(&mut self, session: u32, operation: u64) -> Instant {
        let of_it = |known: &&Awaited| known.session == session && known.operation == operation;
        if let Some(known) = self.0.iter().find(of_it) {
            return known.since;
        }
        self.0.retain(|known| known.session != session);
        let since = Instant::now();
        self.0.push(Awaited {
            session,
            operation,
            since,
        });
        since
    }
}

impl<M: Media> Brick<M> {
    /// Ends processes that are stopped inside of an operation others have waited for as long
    /// as one may take. They tell again and again.
    pub(crate) fn end_still(&self) {
        for session in self.view().control().take_awaited() {
            let (operation, pid, started) = {
                let pool = self.pool();
                let operation = pool.operation(session).filter(|_| pool.is_open(session));
                (operation, pool.process(session), pool.started(session))
            };
            let Some(operation) = operation else { continue };
            let since = self.still().note(session, operation);
            if since.elapsed() < WINDOW_MAX || !process::is_stopped(pid) {
                continue;
            }
            // It may have left since it was looked at, and been stopped elsewhere.
            if self.pool().operation(session) != Some(operation) {
                continue;
            }
            tracing::warn!(
                session,
                pid,
                "ending a process that is stopped in an operation others wait for"
            );
            if let Err(cause) = process::end(pid, started) {
                tracing::error!(pid, %cause, "a session is stuck");
            }
        }
    }
}
