//! Snapshots on the asynchronous replica (RFD 030, Replicas).
//!
//! 1. [`ReplicaCut::begin`]: the replica's brick prepares the snapshot together with the other legs, over the connection
//!    of the replication. The stamp is raised only after its answer, or without the replica.
//! 2. The sender keeps the epochs of stamps. So each change has the same side of the cut on the replica as on the other
//!    legs, although the order of the queue is not the order of the stamps.
//! 3. [`ReplicaCut::finish`]: all older changes have ended, so each of them has a number up to the last one. Once the
//!    replica has that number, durably, it has all of the snapshot.
//! 4. [`report_complete`] tells the manager.
//!
//! Invariants: a snapshot of a replica whose connection ended before step 3 was done is not reported. The replica never
//! delays a cut for longer than [`REPLICA_PREPARE_LIMIT`].

use super::control::ControlConnection;
use super::layout_query::refresh_addresses;
use super::pending_snapshots::PendingSnapshot;
use super::replication_sender;
use super::state::ControllerState;
use crate::limits::{
    MANAGER_RETRY_MAX, MANAGER_RETRY_MIN, REPLICA_PREPARE_LIMIT, REPLICA_SNAPSHOTS_MAX,
};
use pagemesh_base::authority::ReplicaSnapshot;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SliceError, SliceReply, SliceRequest};
use std::cell::RefCell;
use std::rc::Rc;

/// Only volumes of one column have replicas.
const REPLICA_COLUMN: usize = 0;

/// The part of the replica in a cut.
pub(super) struct ReplicaCut {
    snapshot: ReplicaSnapshot,
    serial: u64,
    control: Rc<ControlConnection>,
    tag: u64,
}

impl ReplicaCut {
    /// Lets the replica prepare a snapshot; none if no replica is in step.
    pub(super) fn begin(state: &ControllerState, snapshot: Epoch) -> Option<ReplicaCut> {
        if state.model().columns.len() != 1 {
            return None;
        }
        let replica = replication_sender::replica(state, REPLICA_COLUMN)?;
        let (serial, slice) = {
            let model = state.model();
            let keep = &model.columns[REPLICA_COLUMN].legs[replica.leg];
            (keep.serial, keep.leg.slice)
        };
        let request = SliceRequest::PrepareSnapshot { snapshot };
        let tag = replica.control.submit(state, request);
        Some(ReplicaCut {
            snapshot: ReplicaSnapshot { slice, snapshot },
            serial,
            control: replica.control,
            tag,
        })
    }

    /// Waits until the replica has prepared the snapshot; none if it did not in time.
    pub(super) async fn prepared(self, state: &ControllerState) -> Option<ReplicaCut> {
        let until = state.now() + REPLICA_PREPARE_LIMIT;
        let answer = RefCell::new(None);
        state
            .wait_until(|| {
                let mut answer = answer.borrow_mut();
                if answer.is_none() {
                    *answer = self.control.try_answer(state, self.tag);
                }
                state.wake_at(until);
                answer.is_some() || state.is_closing() || state.now() >= until
            })
            .await;
        let snapshot = self.snapshot.snapshot;
        match answer.take() {
            Some(Ok(SliceReply::Done)) => return Some(self),
            Some(Ok(_)) => {}
            Some(Err(cause)) => log_failure(state, snapshot, &cause),
            None => {
                let cause = SliceError::Lost("it did not answer in time".into());
                log_failure(state, snapshot, &cause);
                state.spawn(Box::pin(self.drop_late_answer()));
            }
        }
        None
    }

    /// Takes an answer that comes after the wait for it.
    async fn drop_late_answer(self) {
        self.control.late_answer(self.tag).await;
    }

    /// The stamp was raised: the controller's own writes to the replica are younger than the snapshot.
    pub(super) fn raise_stamp(&self) {
        self.control.raise_stamp(self.snapshot.snapshot);
    }

    /// All older changes have ended.
    pub(super) fn finish(self, state: &Rc<ControllerState>) {
        let Some(number) = state.shared.replication.last_number_on(self.serial) else {
            return;
        };
        let mut snapshots = state.replica_snapshots.borrow_mut();
        if snapshots.pending.len() == REPLICA_SNAPSHOTS_MAX {
            return;
        }
        snapshots.pending.push(PendingSnapshot {
            snapshot: self.snapshot,
            serial: self.serial,
            number,
        });
        if !std::mem::replace(&mut snapshots.has_task, true) {
            state.spawn(Box::pin(run_reports(Rc::clone(state))));
        }
    }
}

fn log_failure(state: &ControllerState, snapshot: Epoch, cause: &SliceError) {
    tracing::warn!(volume = %state.name, %snapshot, %cause, "the asynchronous replica gets no part of a snapshot");
}

/// Moves the snapshots that the replica has by now.
fn collect(state: &ControllerState) {
    let replication = &state.shared.replication;
    let is_done = |serial, number| replication.is_done_on(serial, number);
    state.replica_snapshots.borrow_mut().collect(is_done);
}

/// Reports complete snapshots until none is left.
async fn run_reports(state: Rc<ControllerState>) {
    let mut retry_wait = MANAGER_RETRY_MIN;
    loop {
        let is_due = || {
            collect(&state);
            let snapshots = state.replica_snapshots.borrow();
            state.is_closing() || !snapshots.complete.is_empty() || snapshots.pending.is_empty()
        };
        state.wait_until(is_due).await;
        if state.is_closing() || state.replica_snapshots.borrow().complete.is_empty() {
            break;
        }
        refresh_addresses(&state).await;
        if state.replica_snapshots.borrow().complete.is_empty() {
            retry_wait = MANAGER_RETRY_MIN;
        } else {
            state.sleep(retry_wait).await;
            retry_wait = (retry_wait * 2).min(MANAGER_RETRY_MAX);
        }
    }
    state.replica_snapshots.borrow_mut().has_task = false;
}

/// Reports the snapshots that the replica has, once, before the volume is detached.
pub(super) async fn report_complete(state: &ControllerState) {
    collect(state);
    if !state.replica_snapshots.borrow().complete.is_empty() {
        refresh_addresses(state).await;
    }
}
