//! The return of a stale leg by difference.
//!
//! 1. While it is still stale: what was in flight on it, or on its source, is
//!    copied, and it forgets its table. From here on it differs only where
//!    the source's pages carry the round's stamp.
//! 2. It becomes syncing: every write goes to it, too.
//! 3. The stamped pages are copied, paced, under range locks. Of a leg that is
//!    fresh nothing is known: pages that it or its source holds alone are copied,
//!    those that both hold are compared, and copied if they differ.
//! 4. It becomes in-sync.
//!
//! A leg that is to follow stays stale instead of becoming syncing, and is sent all
//! changes in their order from then on. It follows once it has those that were made
//! while it was copied to: then it has what the volume was at some time.

use super::control::Control;
use super::copy::{self, Holes, Party, chunks};
use super::follow;
use super::model::{LegKeep, Return};
use super::reform::lost_if_gone;
use super::runs::{merge, without};
use super::settle::differing;
use super::start::look_for_new_addresses;
use super::state::State;
use crate::limits::{
    RESYNC_BUSY_BYTES_PER_S, RESYNC_BUSY_FOR, RESYNC_CHUNKS_MAX, RETURN_RETRY_MAX, RETURN_RETRY_MIN,
};
use crate::status::Count;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::PageNo;
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{Run, SliceError, SliceReply, SliceRequest};
use pagemesh_base::units::PAGE_BYTES;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// Bytes of a column whose pages in use are asked for at once.
const LOOK_BYTES: u64 = 1 << 30;

/// What is done about pages that may differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    /// They are copied.
    Copy,
    /// They are copied if they do differ.
    Compare,
    /// They are cleared if they hold nothing any more.
    MakeRoom,
}

/// Where one return has come.
struct Way<'a> {
    state: &'a State,
    column: usize,
    leg: usize,
    control: Rc<Control>,
    /// Operations that others have begun, when that was last looked at.
    ops_of_others: Cell<u64>,
    /// They count as at work until then.
    is_busy_until: Cell<Duration>,
    /// When the next chunk may be copied meanwhile.
    may_go_on: Cell<Duration>,
}

impl<'a> Way<'a> {
    fn new(state: &'a State, column: usize, leg: usize, control: Rc<Control>) -> Way<'a> {
        Way {
            state,
            column,
            leg,
            control,
            ops_of_others: Cell::new(state.ops_of_others()),
            is_busy_until: Cell::default(),
            may_go_on: Cell::default(),
        }
    }
}

pub(super) async fn bring_back(state: Rc<State>, column: usize, leg: usize) {
    let mut wait = RETURN_RETRY_MIN;
    loop {
        let keep_state = || state.model().columns[column].legs[leg].leg.state;
        if keep_state() == LegState::Stale {
            state.sleep(wait).await;
        }
        // Nothing is copied to a leg that the authority may hold for one that follows.
        let may_follow = || state.model().columns[column].legs[leg].may_follow;
        let turn = || state.is_over() || !may_follow() && is_its_turn(&state, column, leg);
        state.until(turn).await;
        if state.is_over() || matches!(keep_state(), LegState::InSync | LegState::Following) {
            break;
        }
        match attempt(&state, column, leg).await {
            Ok(()) => {
                tracing::info!(volume = %state.name, column, leg, "a leg is back");
                state.hub.tally.add(Count::LegsReturned, 1);
                break;
            }
            Err(why) => {
                give_up(&state, column, leg, &why);
                wait = (wait * 2).min(RETURN_RETRY_MAX);
                // Lost while syncing, it is stale again soon.
                let settled = || state.is_over() || keep_state() != LegState::Syncing;
                state.until(settled).await;
                look_for_new_addresses(&state).await;
            }
        }
    }
    state.edit().columns[column].legs[leg].tended = false;
}

/// One leg of a column comes back at a time. While another one is stale, what
/// is copied carries the round's stamp, and the leg can later be the source
/// for the other; were both syncing, the copies would carry none.
fn is_its_turn(state: &State, column: usize, leg: usize) -> bool {
    let model = state.model();
    let mut legs = model.columns[column].legs.iter().enumerate();
    !legs.any(|(other, keep)| {
        let returns = keep.leg.state == LegState::Syncing || keep.promotion.is_some();
        other != leg && (returns || keep.resync.is_some())
    })
}

fn give_up(state: &State, column: usize, leg: usize, why: &str) {
    let written = state.model().columns[column].legs[leg].is_written();
    if written {
        state.lose(column, leg, why);
    }
    let mut model = state.edit();
    let keep = &mut model.columns[column].legs[leg];
    if let Some(control) = keep.control.take() {
        control.give_up(why);
    }
    keep.promotion = None;
    keep.resync = None;
    keep.shipping = false;
    keep.trouble = Some(why.to_owned());
}

async fn attempt(state: &Rc<State>, column: usize, leg: usize) -> Result<(), String> {
    begin_progress(state, column, leg);
    if state.model().columns[column].legs[leg].leg.asynchronous {
        return follow(state, column, leg).await;
    }
    let present = {
        let model = state.model();
        let keep = &model.columns[column].legs[leg];
        let syncing = keep.leg.state == LegState::Syncing;
        keep.control.clone().filter(|_| syncing)
    };
    let way = match present {
        Some(control) => Way::new(state, column, leg, control),
        None => {
            let way = prepare(state, column, leg).await?;
            way.become_state(LegState::Syncing).await?;
            way
        }
    };
    way.copy_all_that_differs().await?;
    way.become_state(LegState::InSync).await?;
    way.end_progress();
    Ok(())
}

/// Has the leg follow.
async fn follow(state: &Rc<State>, column: usize, leg: usize) -> Result<(), String> {
    let columns = state.model().columns.len();
    if columns > 1 {
        return Err(format!(
            "only copies of volumes of one column follow; this one has {columns}"
        ));
    }
    let way = prepare(state, column, leg).await?;
    let serial = {
        let mut model = state.edit();
        let keep = &mut model.columns[column].legs[leg];
        keep.shipping = true;
        keep.serial
    };
    way.ask(SliceRequest::KeepOrder).await?;
    let route = follow::Route {
        column,
        leg,
        serial,
        control: Rc::clone(&way.control),
        buffers: state.model().buffers(column, leg),
    };
    state.spawn(Box::pin(follow::run(Rc::clone(state), route)));
    // What was changed before carries the round's stamp by then.
    way.until(|| state.hub.view().1.ship() == serial).await?;
    // A guest that began before it knew does not say what it changes.
    drop(state.keep_guests_out().await);
    way.copy_all_that_differs().await?;
    let last = state.hub.ship.last();
    if !defect::is(Defect::FollowsTooEarly) {
        way.until(|| state.hub.ship.is_done(last)).await?;
    }
    {
        let keep = &mut state.edit().columns[column].legs[leg];
        keep.promotion = Some(LegState::Following);
        keep.may_follow = true;
    }
    way.until(|| follow::is_following(state, column, leg))
        .await?;
    way.end_progress();
    Ok(())
}

fn is_fresh(state: &State, column: usize, leg: usize) -> bool {
    state.model().columns[column].legs[leg].leg.fresh
}

fn begin_progress(state: &State, column: usize, leg: usize) {
    let since = state.now();
    state.edit().columns[column].legs[leg].resync = Some(Return {
        todo: 0,
        done: 0,
        since,
    });
}

async fn prepare(state: &State, column: usize, leg: usize) -> Result<Way<'_>, String> {
    if !state.model().columns[column].has_source() {
        return Err("there is no in-sync leg to copy from".into());
    }
    let call = state.start_connect(column, leg);
    let connection = state.connected(call).await.map_err(|e| e.to_string())?;
    let way = Way::new(state, column, leg, state.control(connection));
    let (epoch, round) = {
        let model = state.model();
        (model.epoch(), model.columns[column].told_round())
    };
    way.ask(SliceRequest::RaiseEpoch { epoch, round }).await?;
    // A leg that was left out for being full has no room for what is new
    // before it gives up what is gone. The stamps stay, so that
    // these pages are looked at again later.
    if state.model().columns[column].legs[leg].full {
        match is_fresh(state, column, leg) {
            true => way.copy_mapped(Pass::MakeRoom).await?,
            false => way.copy_stamped(Pass::MakeRoom).await?,
        }
        way.keep_full(false);
    }
    if !defect::is(Defect::InFlightNotCopied) {
        way.copy_in_flight().await?;
    }
    way.ask(SliceRequest::Flush).await?;
    way.ask(SliceRequest::Settled).await?;
    {
        let mut model = state.edit();
        let serial = model.next_serial();
        let keep = &mut model.columns[column].legs[leg];
        if keep.leg.state != LegState::Stale {
            return Err("the manager changed it meanwhile".into());
        }
        keep.control = Some(Rc::clone(&way.control));
        keep.serial = serial;
        keep.raised = None;
    }
    Ok(way)
}

/// Pages that a leg or its source hold something in. By their sums, data and holes
/// could be taken for each other.
struct MappedRuns {
    /// One of them.
    alone: Vec<Run>,
    /// Both.
    both: Vec<Run>,
}

impl Way<'_> {
    async fn ask(&self, request: SliceRequest) -> Result<SliceReply, String> {
        let answer = self.control.ask(self.state, request).await;
        if let Err(SliceError::StaleEpoch { current }) = &answer
            && *current > self.state.hub.held_epoch()
        {
            self.state.fence();
        }
        answer.map_err(|error| error.to_string())
    }

    async fn ask_source(
        &self,
        source: &Party,
        request: SliceRequest,
    ) -> Result<SliceReply, String> {
        let answer = source.control.ask(self.state, request).await;
        answer.map_err(|error| {
            self.blame(source.leg, &error);
            format!("its source failed: {error}")
        })
    }

    /// A source that is gone has to be seen to before anything else.
    fn blame(&self, leg: usize, error: &SliceError) {
        if leg != self.leg {
            lost_if_gone(self.state, self.column, leg, error);
        }
    }

    /// In-sync legs to copy from.
    fn sources(&self) -> Result<Vec<Party>, String> {
        let legs = self.state.model().columns[self.column].sources();
        let parties = copy::parties(self.state, self.column, legs);
        let parties = parties.filter(|parties| !parties.is_empty());
        parties.ok_or_else(|| "there is no in-sync leg to copy from".into())
    }

    /// While another leg is stale, this one may become its source.
    fn holes(&self) -> Holes {
        let model = self.state.model();
        let mut legs = model.columns[self.column].legs.iter().enumerate();
        let is_stale = |keep: &LegKeep| keep.leg.state == LegState::Stale;
        match legs.any(|(other, keep)| other != self.leg && is_stale(keep)) {
            true => Holes::Stamped,
            false => Holes::Cleared,
        }
    }

    fn keep_full(&self, full: bool) {
        self.state.edit().columns[self.column].legs[self.leg].full = full;
    }

    fn target(&self) -> Vec<Party> {
        vec![Party {
            leg: self.leg,
            control: Rc::clone(&self.control),
        }]
    }

    async fn copy_all_that_differs(&self) -> Result<(), String> {
        match is_fresh(self.state, self.column, self.leg) {
            true => {
                self.copy_mapped(Pass::Compare).await?;
                // Who is still away must hear of holes, too, which nobody maps.
                if self.holes() == Holes::Stamped {
                    self.copy_stamped(Pass::Copy).await?;
                }
            }
            false => self.copy_stamped(Pass::Copy).await?,
        }
        self.ask(SliceRequest::Flush).await?;
        // Before the barrier that follows notes the last copy as in flight.
        let told = copy::tell_complete(self.state, &self.target()).await;
        told.map_err(|failure| failure.error.to_string())
    }

    /// Waits until something is so; fails if the leg is lost before.
    async fn until(&self, is_so: impl Fn() -> bool) -> Result<(), String> {
        let serial = self.serial();
        let lost = || self.serial() != serial || serial == 0;
        let over = || self.state.is_over() || lost() || is_so();
        self.state.until(over).await;
        match !lost() && is_so() {
            true => Ok(()),
            false => Err("the leg was lost again".into()),
        }
    }

    /// The serial of the leg's connections, 0 if it has none.
    fn serial(&self) -> u64 {
        self.state.serial(self.column, self.leg)
    }

    fn end_progress(&self) {
        let keep = &mut self.state.edit().columns[self.column].legs[self.leg];
        keep.resync = None;
        keep.trouble = None;
    }

    fn progress(&self, todo: u64, done: u64) {
        let mut model = self.state.edit();
        if let Some(resync) = &mut model.columns[self.column].legs[self.leg].resync {
            resync.todo += todo;
            resync.done += done;
        }
    }

    async fn copy_in_flight(&self) -> Result<(), String> {
        let mut tables = vec![self.ask(SliceRequest::InFlight).await?];
        for source in self.sources()? {
            tables.push(self.ask_source(&source, SliceRequest::InFlight).await?);
        }
        let unknown = |table: &SliceReply| matches!(table, SliceReply::InFlight(None));
        if tables.iter().any(unknown) {
            let whole = Run {
                page: PageNo(0),
                count: self.bytes().div_ceil(PAGE_BYTES as u64),
            };
            return self.copy_unstamped(&[whole], Pass::Compare).await;
        }
        let mut runs = vec![];
        for table in tables {
            let SliceReply::InFlight(Some(entries)) = table else {
                return Err("it does not tell what was in flight".into());
            };
            runs.extend(entries.iter().map(|entry| Run {
                page: entry.page,
                count: u64::from(entry.count),
            }));
        }
        self.copy_unstamped(&merge(runs), Pass::Copy).await
    }

    /// Copies runs, but for pages that carry the round's stamp: their turn
    /// comes. With more sources than one, the stamps of one may be gone with
    /// it by then, and another does not have those of what was in flight on
    /// that one alone. A leg that is in-sync and out of reach counts: it may be the
    /// source by then, and lack what is stamped here.
    async fn copy_unstamped(&self, runs: &[Run], pass: Pass) -> Result<(), String> {
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
            let (stamped, next) = self.stamped(source, from).await?;
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

    /// Stamped pages of a source from one on, and where to go on.
    async fn stamped(
        &self,
        source: &Party,
        from: PageNo,
    ) -> Result<(Vec<Run>, Option<PageNo>), String> {
        let round = self.state.model().columns[self.column].round;
        if round == 0 {
            return Err("the layout names no round in which changes were tracked".into());
        }
        let request = SliceRequest::Dirty { round, from };
        let SliceReply::Dirty { runs, next } = self.ask_source(source, request).await? else {
            return Err("the source does not tell its changes".into());
        };
        // A leg that does not go on would be asked for ever.
        Ok((runs, next.filter(|next| *next > from)))
    }

    async fn copy_stamped(&self, pass: Pass) -> Result<(), String> {
        let mut from = PageNo(0);
        loop {
            let sources = self.sources()?;
            let (runs, next) = self.stamped(&sources[0], from).await?;
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

    /// Copies what either the source or the leg holds alone, and compares what both
    /// do. What neither does, and is written later, goes to both.
    async fn copy_mapped(&self, pass: Pass) -> Result<(), String> {
        let end = self.bytes();
        let windows = || {
            let starts = (0..end).step_by(LOOK_BYTES as usize);
            starts.map(|at| (at, (at + LOOK_BYTES).min(end)))
        };
        for (at, stop) in windows() {
            let mapped = self.mapped(at, stop).await?;
            let all = [mapped.alone, mapped.both].concat();
            self.progress(self.reach(&all).map(|(from, to)| to - from).sum(), 0);
        }
        for (at, stop) in windows() {
            let mapped = self.mapped(at, stop).await?;
            let pass_alone = match pass {
                Pass::Compare => Pass::Copy,
                other => other,
            };
            self.copy_all(&mapped.alone, pass_alone).await?;
            self.copy_all(&mapped.both, pass).await?;
        }
        Ok(())
    }

    async fn mapped(&self, at: u64, end: u64) -> Result<MappedRuns, String> {
        let source = self.sources()?.swap_remove(0);
        let own = self.mapped_of(&self.target()[0], at, end).await?;
        let theirs = self.mapped_of(&source, at, end).await?;
        let everywhere = 0..u64::MAX;
        let mut alone = without(&own, &theirs, everywhere.clone());
        alone.extend(without(&theirs, &own, everywhere.clone()));
        let alone = merge(alone);
        Ok(MappedRuns {
            both: without(&own, &alone, everywhere),
            alone,
        })
    }

    async fn mapped_of(&self, of: &Party, at: u64, end: u64) -> Result<Vec<Run>, String> {
        let found = copy::mapped(self.state, of, at, end).await;
        let runs = found.map_err(|failure| {
            self.blame(failure.leg, &failure.error);
            failure.error.to_string()
        })?;
        Ok(merge(runs))
    }

    /// The bytes of runs within the column.
    fn reach(&self, runs: &[Run]) -> impl Iterator<Item = (u64, u64)> {
        let page = PAGE_BYTES as u64;
        let end = self.bytes();
        runs.iter().map(move |run| {
            let stop = (run.page.0 + run.count).saturating_mul(page).min(end);
            (run.page.0.saturating_mul(page).min(end), stop)
        })
    }

    async fn copy_runs(&self, runs: &[Run], pass: Pass) -> Result<(), String> {
        let sum = self.reach(runs).map(|(from, to)| to - from).sum();
        self.progress(sum, 0);
        self.copy_all(runs, pass).await
    }

    async fn copy_all(&self, runs: &[Run], pass: Pass) -> Result<(), String> {
        let chunks = self
            .reach(runs)
            .flat_map(|(start, stop)| chunks(start, stop));
        let copies = chunks.map(|(offset, len)| self.copy_chunk(offset, len, pass));
        copy::at_once(self.state, RESYNC_CHUNKS_MAX, copies).await
    }

    async fn copy_chunk(&self, offset: u64, len: u64, pass: Pass) -> Result<(), String> {
        self.pace(len).await;
        {
            let _turn = self.state.lock(self.column, offset, len).await;
            let (sources, target) = (self.sources()?, self.target());
            // Equal pages that are not written get no stamp, and a leg that is
            // still stale may differ there from both.
            let compare = pass == Pass::Compare && self.holes() == Holes::Cleared;
            let places = match compare {
                true => differing(self.state, &sources[0], &target, offset, len).await,
                false => vec![(offset, len)],
            };
            for place in places {
                let holes = match pass {
                    Pass::MakeRoom => Holes::Only,
                    Pass::Copy | Pass::Compare => self.holes(),
                };
                let copied = copy::copy_chunk(self.state, &sources, &target, place, holes).await;
                copied.map_err(|failure| {
                    self.blame(failure.leg, &failure.error);
                    let full = failure.leg == self.leg && failure.error == SliceError::NoSpace;
                    if full {
                        self.keep_full(true);
                    }
                    format!("copying failed: {}", failure.error)
                })?;
                self.state.hub.tally.add(Count::BytesResynced, place.1);
            }
        }
        self.progress(0, len);
        Ok(())
    }

    /// Others at work come first: waits until as many bytes may be copied.
    async fn pace(&self, len: u64) {
        let now = self.state.now();
        let ops = self.state.ops_of_others();
        if self.ops_of_others.replace(ops) != ops {
            self.is_busy_until.set(now + RESYNC_BUSY_FOR);
        }
        if now < self.is_busy_until.get() {
            let takes = Duration::from_secs(len).checked_div(RESYNC_BUSY_BYTES_PER_S as u32);
            let begins = self.may_go_on.get().max(now);
            self.may_go_on.set(begins + takes.unwrap_or_default());
            self.state.sleep(begins - now).await;
        }
    }

    /// Asks for a new state of the leg, until channels see it.
    async fn become_state(&self, wanted: LegState) -> Result<(), String> {
        self.state.edit().columns[self.column].legs[self.leg].promotion = Some(wanted);
        let serial = self.serial();
        self.until(|| {
            let (_, view) = self.state.hub.view();
            let column = view.columns.get(self.column);
            let leg = column.and_then(|column| column.legs.get(self.leg));
            leg.is_some_and(|leg| leg.state == wanted && leg.serial == serial)
        })
        .await
    }
}
