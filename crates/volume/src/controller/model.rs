//! The controller's model of the volume: the layout, and the state of each leg.

use super::control::ControlConnection;
use crate::snapshot::{
    ColumnGate, ColumnSnapshot, LayoutSnapshot, LegSet, LegSnapshot, SegmentSnapshot,
};
use pagemesh_base::authority::{BrickAddress, LegChange};
use pagemesh_base::brick_name::BrickNames;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, Layout, Leg, LegState};
use pagemesh_base::slice::SliceRequest;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The progress of a leg's resync.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResyncProgress {
    pub todo: u64,
    pub done: u64,
    pub since: Duration,
}

pub(super) struct LegEntry {
    pub leg: Leg,
    /// The controller's connection; none if the leg is lost or stale.
    pub control: Option<Rc<ControlConnection>>,
    /// The serial of its connections. It rises with each loss and return.
    pub serial: u64,
    /// The last epoch that was announced to it.
    pub last_barrier: Option<Epoch>,
    pub last_error: Option<String>,
    /// The state that it is ready for.
    pub requested_state: Option<LegState>,
    pub resync: Option<ResyncProgress>,
    /// Its resync failed for lack of space.
    pub full: bool,
    /// Whether a resync task runs for it.
    pub has_task: bool,
    /// Whether changes are sent to it in order, over its connection.
    pub is_replicating: bool,
    /// Whether the authority may hold it for a replica. It is one, or the authority was asked
    /// to make it one and has not confirmed since that it is stale.
    pub may_be_replica: bool,
}

impl LegEntry {
    fn new(leg: &Leg) -> LegEntry {
        LegEntry {
            leg: leg.clone(),
            control: None,
            serial: 0,
            last_barrier: None,
            last_error: None,
            requested_state: None,
            resync: None,
            full: false,
            has_task: false,
            is_replicating: false,
            may_be_replica: leg.state == LegState::AsyncReplica,
        }
    }

    /// Whether a change is on it before the change is acknowledged.
    pub(super) fn is_written(&self) -> bool {
        matches!(self.leg.state, LegState::InSync | LegState::Syncing)
    }

    pub(super) fn is_lost(&self) -> bool {
        (self.is_written() || self.may_be_replica) && self.control.is_none()
    }

    /// The serial of the connection that changes are queued for. A replica counts until the
    /// authority knows that it is none: it may be promoted.
    pub(super) fn replication_serial(&self) -> Option<u64> {
        let is_sent = self.is_replicating && self.control.is_some();
        (self.may_be_replica || is_sent).then_some(self.serial)
    }

    pub(super) fn is_source(&self) -> bool {
        self.leg.state == LegState::InSync && self.control.is_some()
    }
}

pub(super) struct ColumnEntry {
    pub segment: usize,
    pub number: usize,
    /// The bytes of its slices.
    pub bytes: u64,
    /// The epoch of the oldest loss of a leg that is still behind, as in the layout.
    pub lost_since: Epoch,
    pub legs: Vec<LegEntry>,
    pub gate: ColumnGate,
    pub down_since: Option<Duration>,
    /// Whether its legs must be made equal before it serves.
    pub needs_recovery: bool,
    /// Whether a task tries to reconnect its legs.
    pub has_task: bool,
    /// The time of the last successful reconnect.
    pub reconnected_at: Option<Duration>,
}

impl ColumnEntry {
    pub(super) fn has_source(&self) -> bool {
        self.legs.iter().any(LegEntry::is_source)
    }

    /// Whether a leg has yet to hear of the present epoch.
    pub(super) fn needs_barrier(&self, epoch: Epoch) -> bool {
        if defect::is(Defect::NoBarrier) {
            return false;
        }
        let written = self.legs.iter().filter(|leg| leg.is_written());
        let mut connected = written.filter(|leg| leg.control.is_some());
        connected.any(|leg| leg.last_barrier != Some(epoch))
    }

    pub(super) fn has_stale(&self) -> bool {
        self.legs.iter().any(|leg| leg.leg.state == LegState::Stale)
    }

    pub(super) fn sources(&self) -> LegSet {
        LegSet::from_fn(|leg| self.legs.get(leg).is_some_and(LegEntry::is_source))
    }
}

#[derive(Default)]
pub(super) struct VolumeModel {
    pub layout: Option<Layout>,
    /// The epoch that names the attachment.
    pub attachment: Epoch,
    pub bricks: BTreeMap<BrickId, BrickAddress>,
    /// The names of these bricks.
    pub names: Arc<BrickNames>,
    pub columns: Vec<ColumnEntry>,
    pub fenced: bool,
    /// A change was requested, and its outcome is unknown.
    pub is_layout_uncertain: bool,
    /// The time of the next request to the manager.
    pub retry_at: Duration,
    pub retry_wait: Duration,
    pub serials: u64,
}

impl VolumeModel {
    pub(super) fn epoch(&self) -> Epoch {
        let epoch = self.layout.as_ref().map(|layout| layout.epoch);
        epoch.map_or(Epoch(0), Epoch::from)
    }

    /// Adopts a layout of the authority, which decides leg states. An older layout than the
    /// present one is ignored, since answers may overtake each other.
    pub(super) fn adopt(&mut self, layout: Layout, now: Duration) {
        if Epoch::from(layout.epoch) < self.epoch() {
            return;
        }
        let mut number = 0;
        for (segment_number, segment) in layout.segments.iter().enumerate() {
            for (column_number, column) in segment.columns.iter().enumerate() {
                if self.columns.len() == number {
                    self.columns.push(ColumnEntry {
                        segment: segment_number,
                        number: column_number,
                        bytes: segment.slice_bytes(),
                        lost_since: column.lost_since.into(),
                        legs: column.legs.iter().map(LegEntry::new).collect(),
                        gate: ColumnGate::Down,
                        down_since: Some(now),
                        needs_recovery: true,
                        has_task: false,
                        reconnected_at: None,
                    });
                }
                self.columns[number].adopt(column);
                number += 1;
            }
        }
        self.layout = Some(layout);
    }

    /// Whether changes are durable on a leg only after a flush.
    pub(super) fn buffers(&self, column: usize, leg: usize) -> bool {
        let brick = self.columns[column].legs[leg].leg.brick;
        self.bricks.get(&brick).is_none_or(BrickAddress::buffers)
    }

    pub(super) fn next_serial(&mut self) -> u64 {
        self.serials += 1;
        self.serials
    }

    /// Whether the authority must be asked for a change, or for the outcome of one. An earlier
    /// request without an answer may have been done, although it is not wanted any more.
    pub(super) fn needs_authority(&self) -> bool {
        self.is_layout_uncertain || !self.wanted_changes().is_empty()
    }

    /// The changes to request from the authority. Lost legs become stale if an in-sync leg is
    /// left, and legs get the states that they are ready for.
    pub(super) fn wanted_changes(&self) -> Vec<LegChange> {
        let goes_on = |keep: &LegEntry| {
            keep.may_be_replica && keep.serial == 0 && defect::is(Defect::ReplicaOfDeadClientKept)
        };
        let mut changes = vec![];
        for column in self.columns.iter().filter(|column| column.has_source()) {
            for (leg, keep) in column.legs.iter().enumerate() {
                let to = match keep.requested_state {
                    _ if keep.is_lost() && !goes_on(keep) => LegState::Stale,
                    Some(to) if keep.control.is_some() && to != keep.leg.state => to,
                    _ => continue,
                };
                changes.push(LegChange {
                    segment: column.segment,
                    column: column.number,
                    leg,
                    to,
                });
            }
        }
        changes
    }

    /// Records that the authority has made these changes.
    pub(super) fn record_changes(&mut self, changes: &[LegChange]) {
        for change in changes.iter().filter(|it| it.to == LegState::Stale) {
            let place = (change.segment, change.column);
            let mut columns = self.columns.iter_mut();
            let column = columns.find(|it| (it.segment, it.number) == place);
            if let Some(keep) = column.and_then(|it| it.legs.get_mut(change.leg)) {
                keep.may_be_replica = false;
            }
        }
    }

    /// Creates the snapshot for the channels. A lost leg has serial 0: writes wait.
    pub(super) fn snapshot(&self) -> LayoutSnapshot {
        let mut view = LayoutSnapshot {
            epoch: self.epoch(),
            size_bytes: 0,
            segments: vec![],
            columns: vec![],
            names: Arc::clone(&self.names),
            fenced: self.fenced,
        };
        let segments = self.layout.iter().flat_map(|layout| &layout.segments);
        for segment in segments {
            view.segments.push(SegmentSnapshot {
                start: view.size_bytes,
                bytes: segment.bytes,
                first_column: view.segments.iter().map(|s| s.column_count).sum(),
                column_count: segment.columns.len(),
            });
            view.size_bytes += segment.bytes;
        }
        let columns = self.columns.iter();
        view.columns = columns.map(|column| self.column_snapshot(column)).collect();
        view
    }

    /// The barrier of the present epoch, for the legs of a column.
    pub(super) fn barrier(&self, column: usize) -> SliceRequest {
        SliceRequest::RaiseEpoch {
            epoch: self.epoch(),
            lost_since: self.columns[column].lost_since,
        }
    }

    fn column_snapshot(&self, column: &ColumnEntry) -> ColumnSnapshot {
        let is_taken = |keep: &LegEntry| keep.control.is_some() && defect::is(Defect::StaleLegRead);
        let follows_the_dead = defect::is(Defect::ReplicaOfDeadClientKept);
        let buffers = |keep: &LegEntry| {
            let brick = self.bricks.get(&keep.leg.brick);
            brick.is_none_or(BrickAddress::buffers)
        };
        let leg = |keep: &LegEntry| LegSnapshot {
            brick: keep.leg.brick,
            slice: keep.leg.slice,
            state: match keep.leg.state {
                LegState::Stale if is_taken(keep) => LegState::InSync,
                // The leg is a replica of the previous client. No change is made before the
                // authority has recorded that it is no replica of this client.
                _ if keep.may_be_replica && keep.serial == 0 && !follows_the_dead => {
                    LegState::Syncing
                }
                LegState::AsyncReplica => LegState::Stale,
                state => state,
            },
            buffers: buffers(keep),
            serial: match keep.control {
                Some(_) if keep.is_written() || is_taken(keep) => keep.serial,
                _ => 0,
            },
        };
        ColumnSnapshot {
            legs: column.legs.iter().map(leg).collect(),
            gate: column.gate,
            replica_serial: column
                .legs
                .iter()
                .find_map(LegEntry::replication_serial)
                .unwrap_or(0),
        }
    }
}

impl ColumnEntry {
    fn adopt(&mut self, column: &pagemesh_base::layout::Column) {
        self.lost_since = column.lost_since.into();
        for (number, leg) in column.legs.iter().enumerate() {
            let Some(keep) = self.legs.get_mut(number) else {
                self.legs.push(LegEntry::new(leg));
                continue;
            };
            if (keep.leg.brick, keep.leg.slice) != (leg.brick, leg.slice) {
                let tended = keep.has_task;
                *keep = LegEntry::new(leg);
                keep.has_task = tended;
                continue;
            }
            keep.leg.clone_from(leg);
            keep.may_be_replica |= leg.state == LegState::AsyncReplica;
            if keep.requested_state == Some(leg.state) {
                keep.requested_state = None;
            }
            if leg.state == LegState::Stale
                && keep.requested_state.is_none()
                && !keep.is_replicating
            {
                keep.control = None;
            }
        }
    }
}
