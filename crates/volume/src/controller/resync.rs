//! The resync of a stale leg by difference.
//!
//! 1. While the leg is still stale, the operations in flight on it or on its source are
//!    copied, and it forgets its table. From then on it differs only in pages that carry the
//!    round's stamp on the source.
//! 2. The leg becomes syncing: every write goes to it, too.
//! 3. The stamped pages are copied, paced, under range locks. A leg that needs a full resync
//!    has unknown contents. Pages that only it or only its source holds are copied. Pages that
//!    both hold are compared, and copied if they differ.
//! 4. The leg becomes in-sync.
//!
//! A leg that is to become an asynchronous replica stays stale instead of syncing. From then on
//! it is sent all changes in order. It becomes a replica once it has the changes that were made
//! during the copy: then it holds a state that the volume was in.

use super::control::ControlConnection;
use super::copy::{self, HolePolicy, LegConnection, chunks};
use super::lifecycle::refresh_addresses;
use super::model::{LegEntry, ResyncProgress};
use super::reconfigure::lose_leg_if_gone;
use super::recover_in_flight::differing_ranges;
use super::replication_sender;
use super::runs::{merge, without};
use super::state::ControllerState;
use crate::limits::{
    RESYNC_BUSY_BYTES_PER_S, RESYNC_BUSY_FOR, RESYNC_CHUNKS_MAX, RESYNC_RETRY_MAX, RESYNC_RETRY_MIN,
};
use crate::status::Count;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::PageNo;
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{PageRun, SliceError, SliceReply, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// The bytes of a column for which the mapped pages are requested at once.
const EXTENTS_WINDOW_BYTES: u64 = 1 << 30;

/// The handling of pages that may differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyMode {
    /// They are copied.
    Copy,
    /// They are compared, and copied if they differ.
    Compare,
    /// They are cleared if they are holes by now.
    FreeSpace,
}

/// The state of one resync.
struct LegResync<'a> {
    state: &'a ControllerState,
    column: usize,
    leg: usize,
    control: Rc<ControlConnection>,
    /// The operation count of channels at the last look.
    last_channel_ops: Cell<u64>,
    /// Channels count as busy until then.
    busy_until: Cell<Duration>,
    /// The time at which the next chunk may be copied while channels are busy.
    next_chunk_at: Cell<Duration>,
}

impl<'a> LegResync<'a> {
    fn new(
        state: &'a ControllerState,
        column: usize,
        leg: usize,
        control: Rc<ControlConnection>,
    ) -> LegResync<'a> {
        LegResync {
            state,
            column,
            leg,
            control,
            last_channel_ops: Cell::new(state.channel_ops()),
            busy_until: Cell::default(),
            next_chunk_at: Cell::default(),
        }
    }
}

pub(super) async fn resync(state: Rc<ControllerState>, column: usize, leg: usize) {
    let mut wait = RESYNC_RETRY_MIN;
    loop {
        let keep_state = || state.model().columns[column].legs[leg].leg.state;
        if keep_state() == LegState::Stale {
            state.sleep(wait).await;
        }
        // Nothing is copied to a leg that the authority may hold for a replica.
        let may_follow = || state.model().columns[column].legs[leg].may_be_replica;
        let turn = || state.is_closing() || !may_follow() && may_start(&state, column, leg);
        state.wait_until(turn).await;
        if state.is_closing() || matches!(keep_state(), LegState::InSync | LegState::Following) {
            break;
        }
        match try_resync(&state, column, leg).await {
            Ok(()) => {
                tracing::info!(volume = %state.name, column, leg, "a leg was resynced");
                state.shared.counters.add(Count::LegsReturned, 1);
                break;
            }
            Err(why) => {
                abort(&state, column, leg, &why);
                wait = (wait * 2).min(RESYNC_RETRY_MAX);
                // A leg that was lost while syncing becomes stale again soon.
                let settled = || state.is_closing() || keep_state() != LegState::Syncing;
                state.wait_until(settled).await;
                refresh_addresses(&state).await;
            }
        }
    }
    state.model_mut().columns[column].legs[leg].has_task = false;
}

/// Whether the leg may start: one leg of a column resyncs at a time. While another leg is
/// stale, copied pages carry the round's stamp, so this leg can later be the source for the
/// other one. If both were syncing, the copies would carry no stamp.
fn may_start(state: &ControllerState, column: usize, leg: usize) -> bool {
    let model = state.model();
    let mut legs = model.columns[column].legs.iter().enumerate();
    !legs.any(|(other, keep)| {
        let returns = keep.leg.state == LegState::Syncing || keep.requested_state.is_some();
        other != leg && (returns || keep.resync.is_some())
    })
}

fn abort(state: &ControllerState, column: usize, leg: usize, why: &str) {
    let written = state.model().columns[column].legs[leg].is_written();
    if written {
        state.lose_leg(column, leg, why);
    }
    let mut model = state.model_mut();
    let keep = &mut model.columns[column].legs[leg];
    if let Some(control) = keep.control.take() {
        control.fail(why);
    }
    keep.requested_state = None;
    keep.resync = None;
    keep.is_replicating = false;
    keep.last_error = Some(why.to_owned());
}

async fn try_resync(state: &Rc<ControllerState>, column: usize, leg: usize) -> Result<(), String> {
    begin_progress(state, column, leg);
    if state.model().columns[column].legs[leg].leg.asynchronous {
        return start_replication(state, column, leg).await;
    }
    let present = {
        let model = state.model();
        let keep = &model.columns[column].legs[leg];
        let syncing = keep.leg.state == LegState::Syncing;
        keep.control.clone().filter(|_| syncing)
    };
    let way = match present {
        Some(control) => LegResync::new(state, column, leg, control),
        None => {
            let way = connect_and_prepare(state, column, leg).await?;
            way.promote_to(LegState::Syncing).await?;
            way
        }
    };
    way.copy_differences().await?;
    way.promote_to(LegState::InSync).await?;
    way.end_progress();
    Ok(())
}

/// Makes the leg an asynchronous replica.
async fn start_replication(
    state: &Rc<ControllerState>,
    column: usize,
    leg: usize,
) -> Result<(), String> {
    let columns = state.model().columns.len();
    if columns > 1 {
        return Err(format!(
            "only a volume of one column can have an asynchronous replica; this one has {columns}"
        ));
    }
    let way = connect_and_prepare(state, column, leg).await?;
    let serial = {
        let mut model = state.model_mut();
        let keep = &mut model.columns[column].legs[leg];
        keep.is_replicating = true;
        keep.serial
    };
    way.call(SliceRequest::KeepOrder).await?;
    let route = replication_sender::ReplicaRoute {
        column,
        leg,
        serial,
        control: Rc::clone(&way.control),
        buffers: state.model().buffers(column, leg),
    };
    state.spawn(Box::pin(replication_sender::run_sender(
        Rc::clone(state),
        route,
    )));
    // All changes before this snapshot carry the round's stamp by now.
    way.wait_until(|| state.shared.snapshot().1.replica_serial() == serial)
        .await?;
    // A direct operation that began before the lease named a replica does not record its
    // change.
    drop(state.block_direct_clients().await);
    way.copy_differences().await?;
    let last = state.shared.replication.last_number();
    if !defect::is(Defect::ReplicaReportedTooEarly) {
        way.wait_until(|| state.shared.replication.is_done(last))
            .await?;
    }
    {
        let keep = &mut state.model_mut().columns[column].legs[leg];
        keep.requested_state = Some(LegState::Following);
        keep.may_be_replica = true;
    }
    way.wait_until(|| replication_sender::is_replica(state, column, leg))
        .await?;
    way.end_progress();
    Ok(())
}

fn needs_full_resync(state: &ControllerState, column: usize, leg: usize) -> bool {
    state.model().columns[column].legs[leg].leg.fresh
}

fn begin_progress(state: &ControllerState, column: usize, leg: usize) {
    let since = state.now();
    state.model_mut().columns[column].legs[leg].resync = Some(ResyncProgress {
        todo: 0,
        done: 0,
        since,
    });
}

async fn connect_and_prepare(
    state: &ControllerState,
    column: usize,
    leg: usize,
) -> Result<LegResync<'_>, String> {
    if !state.model().columns[column].has_source() {
        return Err("there is no in-sync leg to copy from".into());
    }
    let call = state.start_connect(column, leg);
    let connection = state
        .connect_outcome(call)
        .await
        .map_err(|e| e.to_string())?;
    let way = LegResync::new(state, column, leg, state.control(connection));
    let (epoch, round) = {
        let model = state.model();
        (model.epoch(), model.columns[column].barrier_round())
    };
    way.call(SliceRequest::RaiseEpoch { epoch, round }).await?;
    // A leg that was left out because it was full must first free the pages that are holes by
    // now. The stamps stay, so these pages are looked at again later.
    if state.model().columns[column].legs[leg].full {
        match needs_full_resync(state, column, leg) {
            true => way.copy_mapped(CopyMode::FreeSpace).await?,
            false => way.copy_stamped(CopyMode::FreeSpace).await?,
        }
        way.set_full(false);
    }
    if !defect::is(Defect::InFlightNotCopied) {
        way.copy_in_flight().await?;
    }
    way.call(SliceRequest::Flush).await?;
    way.call(SliceRequest::ForgetInFlight).await?;
    {
        let mut model = state.model_mut();
        let serial = model.next_serial();
        let keep = &mut model.columns[column].legs[leg];
        if keep.leg.state != LegState::Stale {
            return Err("the manager changed the leg's state meanwhile".into());
        }
        keep.control = Some(Rc::clone(&way.control));
        keep.serial = serial;
        keep.last_barrier = None;
    }
    Ok(way)
}

/// The mapped pages of a leg and its source. Checksums alone could confuse data with holes.
struct MappedPages {
    /// Pages that are mapped on one of the two.
    on_one_leg: Vec<PageRun>,
    /// Pages that are mapped on both.
    on_both_legs: Vec<PageRun>,
}

impl LegResync<'_> {
    async fn call(&self, request: SliceRequest) -> Result<SliceReply, String> {
        let answer = self.control.call(self.state, request).await;
        if let Err(SliceError::StaleEpoch { current }) = &answer
            && *current > self.state.shared.held_epoch()
        {
            self.state.fence();
        }
        answer.map_err(|error| error.to_string())
    }

    async fn call_source(
        &self,
        source: &LegConnection,
        request: SliceRequest,
    ) -> Result<SliceReply, String> {
        let answer = source.control.call(self.state, request).await;
        answer.map_err(|error| {
            self.handle_source_error(source.leg, &error);
            format!("its source failed: {error}")
        })
    }

    /// Handles a source's error before anything else, since the source may be lost.
    fn handle_source_error(&self, leg: usize, error: &SliceError) {
        if leg != self.leg {
            lose_leg_if_gone(self.state, self.column, leg, error);
        }
    }

    /// The in-sync legs to copy from.
    fn sources(&self) -> Result<Vec<LegConnection>, String> {
        let legs = self.state.model().columns[self.column].sources();
        let parties = copy::leg_connections(self.state, self.column, legs);
        let parties = parties.filter(|parties| !parties.is_empty());
        parties.ok_or_else(|| "there is no in-sync leg to copy from".into())
    }

    /// The handling of holes. While another leg is stale, this one may become its source, so
    /// holes are stamped, too.
    fn hole_policy(&self) -> HolePolicy {
        let model = self.state.model();
        let mut legs = model.columns[self.column].legs.iter().enumerate();
        let is_stale = |keep: &LegEntry| keep.leg.state == LegState::Stale;
        match legs.any(|(other, keep)| other != self.leg && is_stale(keep)) {
            true => HolePolicy::ClearAndStamp,
            false => HolePolicy::Clear,
        }
    }

    fn set_full(&self, full: bool) {
        self.state.model_mut().columns[self.column].legs[self.leg].full = full;
    }

    fn target(&self) -> Vec<LegConnection> {
        vec![LegConnection {
            leg: self.leg,
            control: Rc::clone(&self.control),
        }]
    }

    async fn copy_differences(&self) -> Result<(), String> {
        match needs_full_resync(self.state, self.column, self.leg) {
            true => {
                self.copy_mapped(CopyMode::Compare).await?;
                // Legs that are still away must hear of holes, too, which no table of mapped
                // pages lists.
                if self.hole_policy() == HolePolicy::ClearAndStamp {
                    self.copy_stamped(CopyMode::Copy).await?;
                }
            }
            false => self.copy_stamped(CopyMode::Copy).await?,
        }
        self.call(SliceRequest::Flush).await?;
        // Without this, the next barrier would list the last copy as in flight.
        let told = copy::send_complete(self.state, &self.target()).await;
        told.map_err(|failure| failure.error.to_string())
    }

    /// Waits until a condition holds; fails if the leg is lost before.
    async fn wait_until(&self, is_so: impl Fn() -> bool) -> Result<(), String> {
        let serial = self.serial();
        let lost = || self.serial() != serial || serial == 0;
        let over = || self.state.is_closing() || lost() || is_so();
        self.state.wait_until(over).await;
        match !lost() && is_so() {
            true => Ok(()),
            false => Err("the leg was lost again".into()),
        }
    }

    /// The serial of the leg's connections; 0 if it has none.
    fn serial(&self) -> u64 {
        self.state.serial(self.column, self.leg)
    }

    fn end_progress(&self) {
        let keep = &mut self.state.model_mut().columns[self.column].legs[self.leg];
        keep.resync = None;
        keep.last_error = None;
    }

    fn add_progress(&self, todo: u64, done: u64) {
        let mut model = self.state.model_mut();
        if let Some(resync) = &mut model.columns[self.column].legs[self.leg].resync {
            resync.todo += todo;
            resync.done += done;
        }
    }

    async fn copy_in_flight(&self) -> Result<(), String> {
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
            return self.copy_unstamped(&[whole], CopyMode::Compare).await;
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
        self.copy_unstamped(&merge(runs), CopyMode::Copy).await
    }

    /// Copies runs, except for pages that carry the round's stamp: those are copied later. With
    /// more than one in-sync leg all runs are copied. The source may be lost with its stamps
    /// before the later copy, and another source does not have the stamps of operations that
    /// were in flight on the lost one alone. An in-sync leg out of reach counts, too: it may be
    /// the later source, and lack the stamped pages.
    async fn copy_unstamped(&self, runs: &[PageRun], pass: CopyMode) -> Result<(), String> {
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
            let (stamped, next) = self.stamped_runs(source, from).await?;
            let end = next.map_or(u64::MAX, |next| next.0);
            let unstamped = without(runs, &stamped, from.0..end);
            self.copy_runs(&unstamped, pass).await?;
            match next {
                Some(next) => from = next,
                None => break,
            }
        }
        Ok(())
    }

    /// The stamped pages of a source from a page on, and the page to go on from.
    async fn stamped_runs(
        &self,
        source: &LegConnection,
        from: PageNo,
    ) -> Result<(Vec<PageRun>, Option<PageNo>), String> {
        let round = self.state.model().columns[self.column].round;
        if round == 0 {
            return Err("the layout names no round in which changes were tracked".into());
        }
        let request = SliceRequest::Dirty { round, from };
        let SliceReply::Dirty { runs, next } = self.call_source(source, request).await? else {
            return Err("the source does not list its changes".into());
        };
        // A leg that makes no progress would be asked for ever.
        Ok((runs, next.filter(|next| *next > from)))
    }

    async fn copy_stamped(&self, pass: CopyMode) -> Result<(), String> {
        let mut from = PageNo(0);
        loop {
            let sources = self.sources()?;
            let (runs, next) = self.stamped_runs(&sources[0], from).await?;
            let skipped = usize::from(defect::is(Defect::RegionNotResynced)).min(runs.len());
            self.copy_runs(&runs[skipped..], pass).await?;
            match next {
                Some(next) => from = next,
                None => return Ok(()),
            }
        }
    }

    fn bytes(&self) -> u64 {
        self.state.model().columns[self.column].bytes
    }

    /// Copies the pages that only the source or only the leg holds, and compares those that
    /// both hold. A page that neither holds gets later writes on both.
    async fn copy_mapped(&self, pass: CopyMode) -> Result<(), String> {
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

    /// The byte ranges of runs within the column.
    fn byte_ranges(&self, runs: &[PageRun]) -> impl Iterator<Item = (u64, u64)> {
        let page = PAGE_BYTES as u64;
        let end = self.bytes();
        runs.iter().map(move |run| {
            let stop = (run.page.0 + run.count).saturating_mul(page).min(end);
            (run.page.0.saturating_mul(page).min(end), stop)
        })
    }

    async fn copy_runs(&self, runs: &[PageRun], pass: CopyMode) -> Result<(), String> {
        let sum = self.byte_ranges(runs).map(|(from, to)| to - from).sum();
        self.add_progress(sum, 0);
        self.copy_all(runs, pass).await
    }

    async fn copy_all(&self, runs: &[PageRun], pass: CopyMode) -> Result<(), String> {
        let chunks = self
            .byte_ranges(runs)
            .flat_map(|(start, stop)| chunks(start, stop));
        let copies = chunks.map(|(offset, len)| self.copy_chunk(offset, len, pass));
        copy::run_concurrently(self.state, RESYNC_CHUNKS_MAX, copies).await
    }

    async fn copy_chunk(&self, offset: u64, len: u64, pass: CopyMode) -> Result<(), String> {
        self.throttle(len).await;
        {
            let _turn = self.state.lock(self.column, offset, len).await;
            let (sources, target) = (self.sources()?, self.target());
            // Equal pages that are not written get no stamp, and a leg that is still stale may
            // differ there from both.
            let compare = pass == CopyMode::Compare && self.hole_policy() == HolePolicy::Clear;
            let places = match compare {
                true => differing_ranges(self.state, &sources[0], &target, offset, len).await,
                false => vec![(offset, len)],
            };
            for place in places {
                let holes = match pass {
                    CopyMode::FreeSpace => HolePolicy::ClearOnly,
                    CopyMode::Copy | CopyMode::Compare => self.hole_policy(),
                };
                let copied = copy::copy_chunk(self.state, &sources, &target, place, holes).await;
                copied.map_err(|failure| {
                    self.handle_source_error(failure.leg, &failure.error);
                    let full = failure.leg == self.leg && failure.error == SliceError::NoSpace;
                    if full {
                        self.set_full(true);
                    }
                    format!("copying failed: {}", failure.error)
                })?;
                self.state
                    .shared
                    .counters
                    .add(Count::BytesResynced, place.1);
            }
        }
        self.add_progress(0, len);
        Ok(())
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

    /// Requests a new state for the leg, and waits until channels see it.
    async fn promote_to(&self, wanted: LegState) -> Result<(), String> {
        self.state.model_mut().columns[self.column].legs[self.leg].requested_state = Some(wanted);
        let serial = self.serial();
        self.wait_until(|| {
            let (_, view) = self.state.shared.snapshot();
            let column = view.columns.get(self.column);
            let leg = column.and_then(|column| column.legs.get(self.leg));
            leg.is_some_and(|leg| leg.state == wanted && leg.serial == serial)
        })
        .await
    }
}
