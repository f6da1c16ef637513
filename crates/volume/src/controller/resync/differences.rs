//! The pages on which a returning leg may differ from its source: pages of operations in flight at the
//! loss, pages born since, or all mapped ones.

use super::paced_copy::CopyMode;
use super::{LegResync, needs_full_resync};
use crate::controller::copy::{self, LegConnection};
use crate::controller::runs::{merge, without};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{PageRun, SliceReply, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;

/// The bytes of a column for which the mapped pages are requested at once.
const EXTENTS_WINDOW_BYTES: u64 = 1 << 30;
/// Each page that was ever written was born at this epoch or later.
const FIRST_BIRTH: Epoch = Epoch(1);

/// The mapped pages of a leg and its source. Checksums alone could confuse data with holes.
struct MappedPages {
    /// Pages that are mapped on one of the two.
    on_one_leg: Vec<PageRun>,
    /// Pages that are mapped on both.
    on_both_legs: Vec<PageRun>,
}

impl LegResync<'_> {
    pub(super) async fn copy_differences(&self) -> Result<(), String> {
        match needs_full_resync(self.state, self.column, self.leg) {
            true => {
                self.copy_mapped(CopyMode::Compare).await?;
                match self.is_other_stale() {
                    // Legs that are still away must hear of holes, too, which no table of mapped
                    // pages lists.
                    true => self.copy_born(CopyMode::CopyBorn).await?,
                    // Holes have births as well.
                    false => self.copy_born(CopyMode::CompareBirths).await?,
                }
            }
            false => self.copy_born(CopyMode::CopyBorn).await?,
        }
        self.call(SliceRequest::Flush).await?;
        // Without this, the next barrier would list the last copy as in flight.
        let told = copy::send_complete(self.state, &self.target()).await;
        told.map_err(|failure| failure.error.to_string())
    }

    pub(super) async fn copy_in_flight(&self) -> Result<(), String> {
        let mut tables = vec![self.call(SliceRequest::InFlight).await?];
        for source in self.sources()? {
            tables.push(self.call_source(&source, SliceRequest::InFlight).await?);
        }
        let unknown = |table: &SliceReply| matches!(table, SliceReply::InFlight(None));
        if tables.iter().any(unknown) {
            let whole = PageRun {
                page: PageNo(0),
                count: self.bytes().div_ceil(PAGE_BYTES as u64),
            };
            return self.copy_born_before(&[whole], CopyMode::Compare).await;
        }
        let mut runs = vec![];
        for table in tables {
            let SliceReply::InFlight(Some(entries)) = table else {
                return Err("it does not list the operations in flight".into());
            };
            runs.extend(entries.iter().map(|entry| PageRun {
                page: entry.page,
                count: u64::from(entry.count),
            }));
        }
        self.copy_born_before(&merge(runs), CopyMode::Copy).await
    }

    /// Copies runs, except for pages born since the loss: those are copied later. With more than one
    /// in-sync leg all runs are copied. The source may be lost before the later copy, and another
    /// source does not have the births of operations that were in flight on the lost one alone. An
    /// in-sync leg out of reach counts, too: it may be the later source, and lack those pages.
    async fn copy_born_before(&self, runs: &[PageRun], pass: CopyMode) -> Result<(), String> {
        let sources = self.sources()?;
        let in_sync = {
            let model = self.state.model();
            let legs = model.columns[self.column].legs.iter();
            legs.filter(|keep| keep.leg.state == LegState::InSync)
                .count()
        };
        let (1, [source]) = (in_sync, sources.as_slice()) else {
            return self.copy_runs(runs, pass).await;
        };
        let mut from = PageNo(0);
        while !runs.is_empty() {
            let (born, next) = self.born_runs(source, from, pass).await?;
            let end = next.map_or(u64::MAX, |next| next.0);
            let before = without(runs, &born, from.0..end);
            self.copy_runs(&before, pass).await?;
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        Ok(())
    }

    /// The pages of a source that were born since the loss, from a page on, and the page to go on
    /// from. A comparison of births gets all that were ever born.
    async fn born_runs(
        &self,
        source: &LegConnection,
        from: PageNo,
        pass: CopyMode,
    ) -> Result<(Vec<PageRun>, Option<PageNo>), String> {
        let since = match pass {
            CopyMode::CompareBirths => FIRST_BIRTH,
            _ => self.state.model().columns[self.column].lost_since,
        };
        if since == Epoch(0) {
            return Err("the layout names no epoch at which the leg was lost".into());
        }
        let request = SliceRequest::Dirty { since, from };
        let SliceReply::Dirty { runs, next } = self.call_source(source, request).await? else {
            return Err("the source does not list its changes".into());
        };
        // A leg that makes no progress would be asked for ever.
        Ok((runs, next.filter(|next| *next > from)))
    }

    pub(super) async fn copy_born(&self, pass: CopyMode) -> Result<(), String> {
        let mut from = PageNo(0);
        loop {
            let sources = self.sources()?;
            let (mut runs, next) = self.born_runs(&sources[0], from, pass).await?;
            if pass == CopyMode::CompareBirths {
                runs = self.holes_of(&sources[0], &runs).await?;
            }
            let skipped = usize::from(defect::is(Defect::RegionNotResynced)).min(runs.len());
            self.copy_runs(&runs[skipped..], pass).await?;
            match next {
                Some(next) => from = next,
                None => return Ok(()),
            }
        }
    }

    /// The pages of these runs that are holes on the source.
    async fn holes_of(
        &self,
        source: &LegConnection,
        runs: &[PageRun],
    ) -> Result<Vec<PageRun>, String> {
        let bounds = self.byte_ranges(runs);
        let (from, end) = bounds.fold((u64::MAX, 0), |(from, end), (at, stop)| {
            (from.min(at), end.max(stop))
        });
        let mut mapped = vec![];
        for at in (from..end).step_by(EXTENTS_WINDOW_BYTES as usize) {
            let stop = (at + EXTENTS_WINDOW_BYTES).min(end);
            mapped.extend(self.mapped_runs_of(source, at, stop).await?);
        }
        Ok(without(runs, &merge(mapped), 0..u64::MAX))
    }

    /// Copies the pages that only the source or only the leg holds, and compares those that
    /// both hold. A page that neither holds gets later writes on both.
    pub(super) async fn copy_mapped(&self, pass: CopyMode) -> Result<(), String> {
        let end = self.bytes();
        let windows = || {
            let starts = (0..end).step_by(EXTENTS_WINDOW_BYTES as usize);
            starts.map(|at| (at, (at + EXTENTS_WINDOW_BYTES).min(end)))
        };
        for (at, stop) in windows() {
            let mapped = self.mapped_pages(at, stop).await?;
            let all = [mapped.on_one_leg, mapped.on_both_legs].concat();
            self.add_progress(self.byte_ranges(&all).map(|(from, to)| to - from).sum(), 0);
        }
        for (at, stop) in windows() {
            let mapped = self.mapped_pages(at, stop).await?;
            let pass_alone = match pass {
                CopyMode::Compare => CopyMode::Copy,
                other => other,
            };
            self.copy_all(&mapped.on_one_leg, pass_alone).await?;
            self.copy_all(&mapped.on_both_legs, pass).await?;
        }
        Ok(())
    }

    async fn mapped_pages(&self, at: u64, end: u64) -> Result<MappedPages, String> {
        let source = self.sources()?.swap_remove(0);
        let own = self.mapped_runs_of(&self.target()[0], at, end).await?;
        let theirs = self.mapped_runs_of(&source, at, end).await?;
        let everywhere = 0..u64::MAX;
        let mut alone = without(&own, &theirs, everywhere.clone());
        alone.extend(without(&theirs, &own, everywhere.clone()));
        let alone = merge(alone);
        Ok(MappedPages {
            on_both_legs: without(&own, &alone, everywhere),
            on_one_leg: alone,
        })
    }

    async fn mapped_runs_of(
        &self,
        of: &LegConnection,
        at: u64,
        end: u64,
    ) -> Result<Vec<PageRun>, String> {
        let found = copy::mapped_runs(self.state, of, at, end).await;
        let runs = found.map_err(|failure| {
            self.handle_source_error(failure.leg, &failure.error);
            failure.error.to_string()
        })?;
        Ok(merge(runs))
    }
}
