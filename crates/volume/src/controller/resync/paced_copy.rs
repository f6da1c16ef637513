//! Copies runs of pages to a returning leg in chunks, each under its range lock.
//!
//! Invariants: requests of channels come first. While channels are busy, chunks keep the pace of
//! [`RESYNC_BUSY_BYTES_PER_S`].

use super::LegResync;
use crate::controller::compare::{ranges_of_other_birth, ranges_of_other_content_or_birth};
use crate::controller::copy::{self, CopyError, CopyKind, chunks};
use crate::controller::model::LegEntry;
use crate::limits::{RESYNC_BUSY_BYTES_PER_S, RESYNC_BUSY_FOR, RESYNC_CHUNKS_MAX};
use crate::status::Count;
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{PageRun, SliceError};
use pagemesh_base::units::PAGE_BYTES;
use std::time::Duration;

/// The handling of pages that may differ.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyMode {
    /// They were born since the loss, or freed. They are copied.
    CopyBorn,
    /// They are copied. Some may be born before the loss.
    Copy,
    /// They are compared, with their births, and copied if one differs.
    Compare,
    /// They are holes on both. They are copied if their births differ.
    CompareBirths,
    /// They are cleared if they are holes by now.
    FreeSpace,
}

impl LegResync<'_> {
    /// Whether another leg of the column is stale. This leg may become its only source. Then all
    /// pages that the other leg misses must be born since its loss on this one.
    pub(super) fn is_other_stale(&self) -> bool {
        let model = self.state.model();
        let mut legs = model.columns[self.column].legs.iter().enumerate();
        let is_stale = |keep: &LegEntry| keep.leg.state == LegState::Stale;
        legs.any(|(other, keep)| other != self.leg && is_stale(keep))
    }

    /// The handling of births. The list of operations in flight, which tells the pages that were
    /// born before the loss, stays on the source. So another leg could not learn of them from this
    /// one.
    fn copy_kind(&self, pass: CopyMode) -> CopyKind {
        match pass {
            CopyMode::FreeSpace => CopyKind::ClearOnly,
            CopyMode::Copy | CopyMode::Compare if self.is_other_stale() => CopyKind::BornNow,
            CopyMode::CopyBorn | CopyMode::Copy | CopyMode::Compare | CopyMode::CompareBirths => {
                CopyKind::KeepBirths
            }
        }
    }

    pub(super) fn set_full(&self, full: bool) {
        self.state.model_mut().columns[self.column].legs[self.leg].full = full;
    }

    pub(super) fn add_progress(&self, todo: u64, done: u64) {
        let mut model = self.state.model_mut();
        if let Some(resync) = &mut model.columns[self.column].legs[self.leg].resync {
            resync.todo += todo;
            resync.done += done;
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.state.model().columns[self.column].bytes
    }

    /// The byte ranges of runs within the column.
    pub(super) fn byte_ranges(&self, runs: &[PageRun]) -> impl Iterator<Item = (u64, u64)> {
        let page = PAGE_BYTES as u64;
        let end = self.bytes();
        runs.iter().map(move |run| {
            let stop = (run.page.0 + run.count).saturating_mul(page).min(end);
            (run.page.0.saturating_mul(page).min(end), stop)
        })
    }

    pub(super) async fn copy_runs(&self, runs: &[PageRun], pass: CopyMode) -> Result<(), String> {
        let sum = self.byte_ranges(runs).map(|(from, to)| to - from).sum();
        self.add_progress(sum, 0);
        self.copy_all(runs, pass).await
    }

    pub(super) async fn copy_all(&self, runs: &[PageRun], pass: CopyMode) -> Result<(), String> {
        let chunks = self
            .byte_ranges(runs)
            .flat_map(|(start, stop)| chunks(start, stop));
        let copies = chunks.map(|(offset, len)| self.copy_chunk(offset, len, pass));
        copy::run_concurrently(self.state, RESYNC_CHUNKS_MAX, copies).await
    }

    async fn copy_chunk(&self, offset: u64, len: u64, pass: CopyMode) -> Result<(), String> {
        // Most births are equal. A look at them needs no lock: a write meanwhile makes them equal.
        if pass == CopyMode::CompareBirths && self.other_births((offset, len)).await?.is_empty() {
            self.add_progress(0, len);
            return Ok(());
        }
        self.throttle(len).await;
        {
            let _turn = self.state.lock(self.column, offset, len).await;
            let (sources, target) = (self.sources()?, self.target());
            // Equal pages that are not written keep their births, and a leg that is still stale
            // may differ there from both.
            let places = match pass {
                CopyMode::Compare if !self.is_other_stale() => {
                    let (source, target) = (&sources[0], &target[0]);
                    let chunk = (offset, len);
                    let found =
                        ranges_of_other_content_or_birth(self.state, source, target, chunk).await;
                    found.map_err(|failure| self.copy_failed(&failure))?
                }
                CopyMode::CompareBirths => self.other_births((offset, len)).await?,
                _ => vec![(offset, len)],
            };
            for place in places {
                let kind = self.copy_kind(pass);
                let copied = copy::copy_chunk(self.state, &sources, &target, place, kind).await;
                copied.map_err(|failure| self.copy_failed(&failure))?;
                self.state
                    .shared
                    .counters
                    .add(Count::BytesResynced, place.1);
            }
        }
        self.add_progress(0, len);
        Ok(())
    }

    fn copy_failed(&self, failure: &CopyError) -> String {
        self.handle_source_error(failure.leg, &failure.error);
        if failure.leg == self.leg && failure.error == SliceError::NoSpace {
            self.set_full(true);
        }
        format!("copying failed: {}", failure.error)
    }

    /// The parts of a chunk with other births than on the source. None while another leg is stale: on
    /// this one, births may be higher for its sake.
    async fn other_births(&self, range: (u64, u64)) -> Result<Vec<(u64, u64)>, String> {
        if self.is_other_stale() {
            return Ok(vec![]);
        }
        let (sources, target) = (self.sources()?, self.target());
        let found = ranges_of_other_birth(self.state, &sources[0], &target[0], range).await;
        found.map_err(|failure| self.copy_failed(&failure))
    }

    /// Waits until the pace allows to copy this many bytes. Requests of channels come first.
    async fn throttle(&self, len: u64) {
        let now = self.state.now();
        let ops = self.state.channel_ops();
        if self.last_channel_ops.replace(ops) != ops {
            self.busy_until.set(now + RESYNC_BUSY_FOR);
        }
        if now < self.busy_until.get() {
            let takes = Duration::from_secs(len).checked_div(RESYNC_BUSY_BYTES_PER_S as u32);
            let begins = self.next_chunk_at.get().max(now);
            self.next_chunk_at.set(begins + takes.unwrap_or_default());
            self.state.sleep(begins - now).await;
        }
    }
}
