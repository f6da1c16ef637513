//! When a brick scrubs what its pool keeps beside pages, and how slowly.
//!
//! The housekeeper does a step, then a pause, until the pass has ended; between
//! two passes it sleeps as before.

use crate::brick::Brick;
use pagemesh_pmem::Media;
use pagemesh_store::scrub::{Cursor, Scrubbed};
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The pause between two steps of a scrub, each of which takes about a
/// millisecond: sessions that wait for the housekeeper hardly notice.
pub const SCRUB_PAUSE: Duration = Duration::from_millis(100);
/// When the first scrub begins at the latest. Opening the pool has read all but
/// its page tables.
pub const SCRUB_DELAY: Duration = Duration::from_secs(3600);

/// Whether a pool is being scrubbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubState {
    /// None is planned.
    Off,
    /// The next one has its time.
    Waiting,
    /// One is under way.
    Running,
}

/// The scrubs of a pool since it was opened.
#[derive(Clone, Copy, Debug)]
pub struct ScrubStatus {
    /// What is going on.
    pub state: ScrubState,
    /// Scrubs that came to their end.
    pub passes: u64,
    /// The time to the next one, if none is under way.
    pub next_in: Option<Duration>,
    /// What the one under way has found by now.
    pub pass: Option<Scrubbed>,
    /// How much of it is done.
    pub percent: Option<u8>,
    /// What all of them have mended.
    pub mended: u64,
    /// What the last one found, and how long ago it ended.
    pub last: Option<(Scrubbed, Duration)>,
}

#[derive(Clone, Copy, Default)]
struct Pass {
    next: Cursor,
    found: Scrubbed,
    percent: u8,
}

#[derive(Default)]
pub(crate) struct Scrubs {
    every: Option<Duration>,
    /// The next step, or the next pass.
    next_at: Option<Instant>,
    pass: Option<Pass>,
    passes: u64,
    mended: u64,
    last: Option<(Scrubbed, Instant)>,
}

impl<M: Media> Brick<M> {
    fn scrubs(&self) -> MutexGuard<'_, Scrubs> {
        self.scrubs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Scrubs from time to time, the first time soon; with none only when asked.
    /// Nothing is scrubbed before this or [`Brick::start_scrub`].
    pub fn plan_scrubs(&self, every: Option<Duration>, now: Instant) {
        let mut scrubs = self.scrubs();
        scrubs.every = every;
        if scrubs.pass.is_none() {
            scrubs.next_at = every.map(|every| now + every.min(SCRUB_DELAY));
        }
        drop(scrubs);
        self.view().control().ring();
    }

    /// Begins a scrub now, unless one is under way.
    pub fn start_scrub(&self, now: Instant) {
        let mut scrubs = self.scrubs();
        if scrubs.pass.is_none() {
            scrubs.next_at = Some(now);
        }
        drop(scrubs);
        self.view().control().ring();
    }

    /// Ends the scrub that is under way; the next one begins anew.
    pub fn stop_scrub(&self, now: Instant) {
        let mut scrubs = self.scrubs();
        if scrubs.pass.take().is_some() {
            scrubs.next_at = scrubs.every.map(|every| now + every);
        }
    }

    /// What is known of scrubs.
    #[must_use]
    pub fn scrub_status(&self, now: Instant) -> ScrubStatus {
        let scrubs = self.scrubs();
        let next_at = scrubs.next_at.filter(|_| scrubs.pass.is_none());
        ScrubStatus {
            state: match (&scrubs.pass, next_at) {
                (Some(_), _) => ScrubState::Running,
                (None, Some(_)) => ScrubState::Waiting,
                (None, None) => ScrubState::Off,
            },
            passes: scrubs.passes,
            next_in: next_at.map(|at| at.saturating_duration_since(now)),
            pass: scrubs.pass.map(|pass| pass.found),
            percent: scrubs.pass.map(|pass| pass.percent),
            mended: scrubs.mended,
            last: scrubs
                .last
                .map(|(found, ended)| (found, now.saturating_duration_since(ended))),
        }
    }

    /// Does a step if it is time for one. The time to the next.
    pub fn scrub_if_due(&self, now: Instant) -> Option<Duration> {
        let mut scrubs = self.scrubs();
        let at = scrubs.next_at?;
        if at > now {
            return Some(at - now);
        }
        let pass = scrubs.pass.unwrap_or_default();
        let mut found = pass.found;
        let mut pool = self.pool();
        let stepped = pool.scrub(pass.next, &mut found);
        let percent = |next| pool.scrub_progress(next);
        let stepped = stepped.map(|next| next.map(|next| (next, percent(next))));
        drop(pool);
        self.tell_scrubbed(&pass.found, &found);
        scrubs.mended += found.mended() - pass.found.mended();
        match stepped {
            Ok(Some((next, percent))) => {
                scrubs.pass = Some(Pass {
                    next,
                    found,
                    percent,
                });
                scrubs.next_at = Some(now + SCRUB_PAUSE);
            }
            Ok(None) => {
                scrubs.pass = None;
                scrubs.passes += 1;
                scrubs.last = Some((found, now));
                scrubs.next_at = scrubs.every.map(|every| now + every);
                tracing::info!(pool = %self.id(), ?found, "a scrub of the pool ended");
            }
            Err(cause) => {
                scrubs.pass = None;
                scrubs.next_at = None;
                drop(scrubs);
                self.fail(&cause);
                return None;
            }
        }
        scrubs.next_at.map(|at| at - now)
    }

    fn tell_scrubbed(&self, before: &Scrubbed, found: &Scrubbed) {
        let pool = self.id();
        if found.mended() > before.mended() {
            tracing::warn!(
                %pool, superblocks = found.superblocks, records = found.records,
                left_behind = found.left_behind, in_flight = found.in_flight,
                bitmap_lines = found.bitmap_lines, objects = found.objects, slots = found.slots,
                "the medium had damaged the pool, and a scrub mended it; \
                 a medium that loses bits should be replaced"
            );
        }
        if found.damaged > before.damaged {
            tracing::error!(
                %pool, damaged = found.damaged,
                "the medium has damaged the pool; stop the brick and run `pagemesh pool check` on it"
            );
        }
    }
}
