//! When and how fast a brick scrubs the metadata of its pool.
//!
//! The maintenance thread does a step, then pauses, until the pass has ended. Between two passes it
//! sleeps as before.

use crate::brick::Brick;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_store::geometry::Geometry;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::scrub::{ScrubCursor, ScrubReport};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// The pause between two steps of a scrub. A step takes about a millisecond, so waiting sessions
/// hardly notice it.
pub const SCRUB_PAUSE: Duration = Duration::from_millis(100);
/// The latest start of the first scrub. Opening the pool has checked everything except its page
/// tables.
pub const SCRUB_DELAY: Duration = Duration::from_secs(3600);

/// Whether a pool is being scrubbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubState {
    /// None is planned.
    Off,
    /// The next scrub is scheduled.
    Waiting,
    /// A scrub is running.
    Running,
}

/// The scrubs of a pool since it was opened.
#[derive(Clone, Copy, Debug)]
pub struct ScrubStatus {
    /// The current state.
    pub state: ScrubState,
    /// Completed scrubs.
    pub passes: u64,
    /// The time to the next scrub, if none is running.
    pub next_in: Option<Duration>,
    /// The findings of the running scrub so far.
    pub pass: Option<ScrubReport>,
    /// The progress of the running scrub, in percent.
    pub percent: Option<u8>,
    /// Places that all scrubs have corrected.
    pub corrected: u64,
    /// The findings of the last scrub, and the time since its end.
    pub last: Option<(ScrubReport, Duration)>,
}

#[derive(Clone, Copy, Default)]
struct PoolScrubPass {
    next: ScrubStage,
    found: ScrubReport,
    percent: u8,
}

/// The position of a pass.
#[derive(Clone, Copy)]
enum ScrubStage {
    /// Bytes that stay in memory are compared with the disk, from this one on.
    Resident(usize),
    /// The pool's structures are checked.
    Pool(ScrubCursor),
}

impl Default for ScrubStage {
    fn default() -> ScrubStage {
        ScrubStage::Resident(0)
    }
}

#[derive(Default)]
pub(crate) struct ScrubSchedule {
    interval: Option<Duration>,
    /// The time of the next step, or of the next pass.
    next_at: Option<Instant>,
    pass: Option<PoolScrubPass>,
    passes: u64,
    corrected: u64,
    last: Option<(ScrubReport, Instant)>,
}

impl<M: Media> Brick<M> {
    fn scrubs(&self) -> MutexGuard<'_, ScrubSchedule> {
        lock(&self.scrubs)
    }

    /// Schedules scrubs at this interval, the first one soon; with none only on request. No scrub
    /// runs before this call or [`Brick::start_scrub`].
    pub fn plan_scrubs(&self, every: Option<Duration>, now: Instant) {
        let mut scrubs = self.scrubs();
        scrubs.interval = every;
        if scrubs.pass.is_none() {
            scrubs.next_at = every.map(|every| now + every.min(SCRUB_DELAY));
        }
        drop(scrubs);
        self.mapping().control().ring_doorbell();
    }

    /// Starts a scrub now, unless one is running.
    pub fn start_scrub(&self, now: Instant) {
        let mut scrubs = self.scrubs();
        if scrubs.pass.is_none() {
            scrubs.next_at = Some(now);
        }
        drop(scrubs);
        self.mapping().control().ring_doorbell();
    }

    /// Stops the running scrub. The next one starts from the beginning.
    pub fn stop_scrub(&self, now: Instant) {
        let mut scrubs = self.scrubs();
        if scrubs.pass.take().is_some() {
            scrubs.next_at = scrubs.interval.map(|every| now + every);
        }
    }

    /// The status of scrubs.
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

    /// Does a step if one is due. Returns the time to the next.
    pub fn scrub_if_due(&self, now: Instant) -> Option<Duration> {
        let mut scrubs = self.scrubs();
        let at = scrubs.next_at?;
        if at > now {
            return Some(at - now);
        }
        let pass = *scrubs.pass.get_or_insert_default();
        drop(scrubs);
        let mut found = pass.found;
        let stepped = self.scrub_step(pass.next, &mut found);
        let mut scrubs = self.scrubs();
        if scrubs.pass.is_none() && stepped.is_ok() {
            // Stopped meanwhile.
            return scrubs.next_at.map(|at| at.saturating_duration_since(now));
        }
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

    /// Does a step. Returns the position of the next, and the progress in percent.
    fn scrub_step(
        &self,
        stage: ScrubStage,
        found: &mut ScrubReport,
    ) -> Result<Option<(ScrubStage, u8)>, ObjectError> {
        let cursor = match stage {
            ScrubStage::Pool(cursor) => cursor,
            ScrubStage::Resident(from) => {
                let compared = self.mapping().media().compare_resident(from);
                count_lines(self.mapping().geometry(), &compared.damaged_lines, found);
                match compared.next {
                    Some(next) => return Ok(Some((ScrubStage::Resident(next), 0))),
                    None => ScrubCursor::default(),
                }
            }
        };
        let mut pool = self.pool();
        let next = pool.scrub(cursor, found)?;
        Ok(next.map(|next| (ScrubStage::Pool(next), pool.scrub_progress(next))))
    }

    fn report_scrubbed(&self, before: &ScrubReport, found: &ScrubReport) {
        let pool = self.id();
        if found.corrected() > before.corrected() {
            tracing::warn!(
                %pool, superblocks = found.superblocks, records = found.records,
                skipped_journals = found.skipped_journals, in_flight = found.in_flight,
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

/// Counts lines that differed on the disk, by the structures that they hold.
fn count_lines(geometry: &Geometry, lines: &[usize], found: &mut ScrubReport) {
    let mut last_superblock = None;
    for &line in lines {
        let at = line as u64;
        if at < geometry.journal_region.start {
            let number = line / PAGE_BYTES;
            found.superblocks += u64::from(last_superblock.replace(number) != Some(number));
        } else if at < geometry.journal_region.end() {
            found.records += 1;
        } else if (geometry.in_flight.start..geometry.in_flight.end()).contains(&at) {
            found.in_flight += 1;
        } else if (geometry.objects.start..geometry.objects.end()).contains(&at) {
            found.objects += 1;
        } else {
            found.bitmap_lines += 1;
        }
    }
}
