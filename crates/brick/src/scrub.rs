//! When a brick scrubs what its pool keeps beside pages, and how slowly.
//!
//! The housekeeper does a step, then a pause, until the pass has ended; between
//! two passes it sleeps as before.

use crate::brick::Brick;
use pagemesh_pmem::Media;
use pagemesh_store::scrub::{ScrubCursor, ScrubReport};
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
    pub pass: Option<ScrubReport>,
    /// How much of it is done.
    pub percent: Option<u8>,
    /// What all of them have mended.
    pub corrected: u64,
    /// What the last one found, and how long ago it ended.
    pub last: Option<(ScrubReport, Duration)>,
}

#[derive(Clone, Copy, Default)]
struct PoolScrubPass {
    next: ScrubCursor,
    found: ScrubReport,
    percent: u8,
}

#[derive(Default)]
pub(crate) struct ScrubSchedule {
    interval: Option<Duration>,
    /// The next step, or the next pass.
    next_at: Option<Instant>,
    pass: Option<PoolScrubPass>,
    passes: u64,
    corrected: u64,
    last: Option<(ScrubReport, Instant)>,
}

impl<M: Media> Brick<M> {
    fn scrubs(&self) -> MutexGuard<'_, ScrubSchedule> {
        self.scrubs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Scrubs from time to time, the first time soon; with none only when asked.
    /// Nothing is scrubbed before this or [`Brick::start_scrub`].
    pub fn plan_scrubs(&self, every: Option<Duration>, now: Instant) {
        let mut scrubs = self.scrubs();
        scrubs.interval = every;
        if scrubs.pass.is_none() {
            scrubs.next_at = every.map(|every| now + every.min(SCRUB_DELAY));
        }
        drop(scrubs);
        self.mapping().control().ring_doorbell();
    }

    /// Begins a scrub now, unless one is under way.
    pub fn start_scrub(&self, now: Instant) {
        let mut scrubs = self.scrubs();
        if scrubs.pass.is_none() {
            scrubs.next_at = Some(now);
        }
        drop(scrubs);
        self.mapping().control().ring_doorbell();
    }

    /// Ends the scrub that is under way; the next one begins anew.
    pub fn stop_scrub(&self, now: Instant) {
        let mut scrubs = self.scrubs();
        if scrubs.pass.take().is_some() {
            scrubs.next_at = scrubs.interval.map(|every| now + every);
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
            corrected: scrubs.corrected,
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
        self.report_scrubbed(&pass.found, &found);
        scrubs.corrected += found.corrected() - pass.found.corrected();
        match stepped {
            Ok(Some((next, percent))) => {
                scrubs.pass = Some(PoolScrubPass {
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
                scrubs.next_at = scrubs.interval.map(|every| now + every);
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

    fn report_scrubbed(&self, before: &ScrubReport, found: &ScrubReport) {
        let pool = self.id();
        if found.corrected() > before.corrected() {
            tracing::warn!(
                %pool, superblocks = found.superblocks, records = found.records,
                left_behind = found.skipped_journals, in_flight = found.in_flight,
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
