//! The resync of a stale leg by difference.
//!
//! 1. While the leg is still stale, the operations in flight on it or on its source are
//!    copied, and it forgets its table. Some of them are older than its loss. From then on it differs
//!    only in pages that were born on the source at the epoch of its loss or later.
//! 2. The leg becomes syncing: every write goes to it, too.
//! 3. The pages born since are copied with their births, paced, under range locks. A leg that needs a full resync
//!    has unknown contents. Pages that only it or only its source holds are copied. Pages that
//!    both hold are compared, and copied if they differ.
//! 4. The leg becomes in-sync.
//!
//! A leg that is to become an asynchronous replica stays stale instead of syncing. From then on
//! it is sent all changes in order. It becomes a replica once it has the changes that were made
//! during the copy: then it holds a state that the volume was in.
//!
//! A leg that left because it was full first frees the pages that its source has freed
//! ([`CopyMode::FreeSpace`]).

mod differences;
mod paced_copy;

use crate::controller::control::ControlConnection;
use crate::controller::copy::{self, LegConnection};
use crate::controller::layout_query::refresh_addresses;
use crate::controller::leg_errors::lose_leg_if_gone;
use crate::controller::model::ResyncProgress;
use crate::controller::replication_sender;
use crate::controller::state::ControllerState;
use crate::limits::{RESYNC_RETRY_MAX, RESYNC_RETRY_MIN};
use crate::status::Count;
use paced_copy::CopyMode;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::LegState;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

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
        if state.is_closing() || matches!(keep_state(), LegState::InSync | LegState::AsyncReplica) {
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
/// stale, copied pages are born since its loss, so this leg can later be the source for the other
/// one. If both were syncing, copies of pages in flight would keep older births.
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
            way.request_state(LegState::Syncing).await?;
            way
        }
    };
    way.copy_differences().await?;
    way.request_state(LegState::InSync).await?;
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
    // Changes keep their epochs on the way to the replica. They may be newer than the epoch of an earlier connection,
    // so the first barrier does not fence what that one still carries. The second one finds its epoch in force, and
    // revokes the older connections.
    let barrier = state.model().barrier(column);
    if !defect::is(Defect::EpochNotAnnounced) {
        way.call(barrier).await?;
    }
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
    // All changes before this snapshot were born since the loss, or are in flight.
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
        keep.requested_state = Some(LegState::AsyncReplica);
        keep.may_be_replica = true;
    }
    way.wait_until(|| replication_sender::is_replica(state, column, leg))
        .await?;
    way.end_progress();
    Ok(())
}

fn needs_full_resync(state: &ControllerState, column: usize, leg: usize) -> bool {
    state.model().columns[column].legs[leg]
        .leg
        .needs_full_resync
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
    let barrier = state.model().barrier(column);
    way.call(barrier).await?;
    // A leg that was left out because it was full must first free the pages that are holes by
    // now. The births stay, so these pages are looked at again later.
    if state.model().columns[column].legs[leg].full {
        match needs_full_resync(state, column, leg) {
            true => way.copy_mapped(CopyMode::FreeSpace).await?,
            false => way.copy_born(CopyMode::FreeSpace).await?,
        }
        way.set_full(false);
    }
    // A source lists the operations that were in flight at the loss once it has heard of the loss.
    let has_barrier = || {
        let model = state.model();
        !model.columns[column].needs_barrier(model.epoch())
    };
    state
        .wait_until(|| state.is_closing() || has_barrier())
        .await;
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

    fn target(&self) -> Vec<LegConnection> {
        vec![LegConnection {
            leg: self.leg,
            control: Rc::clone(&self.control),
        }]
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

    /// Requests a new state for the leg, and waits until channels see it.
    async fn request_state(&self, wanted: LegState) -> Result<(), String> {
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
