//! A manager in memory: layouts under compare-and-swap, and outages before or
//! after a change is made.

use pagemesh_base::authority::ReplicaSnapshot;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{
    BrickId, Column, EpochNumber, Layout, Leg, LegState, Segment, SliceId, VolumeName,
};
use pagemesh_base::poison;
use pagemesh_volume::{
    Authority, AuthorityError, BrickAddress, CopyReport, LegChange, ResolvedLayout,
};
use std::sync::{Arc, Mutex};
use uuid::Uuid;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ManagerMode {
    Up,
    Down,
    /// The next change is made, but its reply is lost.
    LoseNextReply,
    /// As `LoseNextReply`, and no call succeeds from then on.
    LoseNextReplyThenDown,
}

pub(crate) struct ManagerState {
    pub layout: Layout,
    pub mode: ManagerMode,
    pub durability: String,
    /// The last report about copies.
    pub last_report: CopyReport,
    /// The snapshots of replicas in all reports.
    pub replica_snapshots: Vec<ReplicaSnapshot>,
    attachment: Epoch,
    /// The last epoch of a layout or a snapshot.
    last_epoch: u32,
}

#[derive(Clone)]
pub(crate) struct Manager(pub Arc<Mutex<ManagerState>>);

pub(crate) fn brick(number: u128) -> BrickId {
    BrickId(Uuid::from_u128(number + 1))
}

/// A segment with this number of columns and copies. Leg n of a column is on brick n.
pub(crate) fn segment(number: usize, columns: usize, copies: usize, bytes: u64) -> Segment {
    let leg = |column: usize, copy: usize| Leg {
        brick: brick(copy as u128),
        slice: SliceId(Uuid::from_u128(
            (number * 1000 + column * 10 + copy + 1) as u128,
        )),
        state: LegState::InSync,
        needs_full_resync: false,
        asynchronous: false,
        empty: false,
    };
    let column = |column| Column {
        legs: (0..copies).map(|copy| leg(column, copy)).collect(),
        lost_since: EpochNumber(0),
    };
    Segment {
        bytes,
        columns: (0..columns).map(column).collect(),
    }
}

impl Manager {
    pub(crate) fn new(segments: Vec<Segment>, durability: &str) -> Manager {
        let layout = Layout {
            volume: Uuid::nil(),
            name: "v".parse().expect("a name"),
            epoch: EpochNumber(1),
            segments,
        };
        Manager(Arc::new(Mutex::new(ManagerState {
            layout,
            mode: ManagerMode::Up,
            durability: durability.into(),
            last_report: CopyReport::default(),
            replica_snapshots: vec![],
            attachment: Epoch(0),
            last_epoch: 1,
        })))
    }

    pub(crate) fn layout(&self) -> Layout {
        poison::lock(&self.0).layout.clone()
    }

    /// An operator adds a segment.
    pub(crate) fn grow(&self, segment: Segment) {
        let mut store = poison::lock(&self.0);
        store.layout.segments.push(segment);
        store.layout.epoch = store.next_epoch();
    }

    /// An operator adds a copy on this brick to the only column.
    pub(crate) fn add_copy(&self, brick: BrickId, slice: SliceId, asynchronous: bool) {
        let mut store = poison::lock(&self.0);
        let column = &mut store.layout.segments[0].columns[0];
        column.legs.push(Leg {
            brick,
            slice,
            state: LegState::Stale,
            needs_full_resync: true,
            asynchronous,
            empty: true,
        });
        store.advance_epoch();
    }

    /// An operator promotes a copy of the only column.
    pub(crate) fn promote(&self, copy: usize) {
        let mut store = poison::lock(&self.0);
        let column = &mut store.layout.segments[0].columns[0];
        for (number, leg) in column.legs.iter_mut().enumerate() {
            let is_it = number == copy;
            leg.needs_full_resync = !is_it;
            leg.asynchronous &= !is_it;
            leg.state = match is_it {
                true => LegState::InSync,
                false => LegState::Stale,
            };
        }
        store.advance_epoch();
        store.attachment = Epoch(0);
    }

    /// Takes an epoch for a snapshot.
    pub(crate) fn reserve_epoch(&self) -> Epoch {
        poison::lock(&self.0).next_epoch().into()
    }

    pub(crate) fn set_mode(&self, how: ManagerMode) {
        poison::lock(&self.0).mode = how;
    }
}

impl ManagerState {
    fn attached(&self) -> ResolvedLayout {
        let legs = self
            .layout
            .segments
            .iter()
            .flat_map(|s| &s.columns)
            .flat_map(|c| &c.legs);
        let address = BrickAddress {
            durability: self.durability.clone(),
            map_socket: Some("socket".into()),
            ..BrickAddress::default()
        };
        ResolvedLayout {
            layout: self.layout.clone(),
            bricks: legs.map(|leg| (leg.brick, address.clone())).collect(),
        }
    }

    fn accept_call(&mut self) -> Result<bool, AuthorityError> {
        match self.mode {
            ManagerMode::Up => Ok(true),
            ManagerMode::Down => Err(AuthorityError::Unreachable("out".into())),
            ManagerMode::LoseNextReply => {
                self.mode = ManagerMode::Up;
                Ok(false)
            }
            ManagerMode::LoseNextReplyThenDown => {
                self.mode = ManagerMode::Down;
                Ok(false)
            }
        }
    }

    fn change(&mut self, change: &LegChange) {
        let column = &mut self.layout.segments[change.segment].columns[change.column];
        let leg = &mut column.legs[change.leg];
        if change.to == LegState::AsyncReplica {
            assert_eq!((leg.state, leg.asynchronous), (LegState::Stale, true));
        }
        leg.needs_full_resync |= leg.state == LegState::AsyncReplica;
        leg.state = change.to;
        leg.needs_full_resync &= !is_whole(leg);
        let in_sync = column
            .legs
            .iter()
            .filter(|leg| leg.state == LegState::InSync)
            .count();
        assert!(in_sync > 0, "the last in-sync leg was left out");
    }

    fn next_epoch(&mut self) -> EpochNumber {
        self.last_epoch += 1;
        EpochNumber(self.last_epoch)
    }

    /// Advances the epoch, and sets the epochs of new losses.
    fn advance_epoch(&mut self) {
        self.layout.epoch = self.next_epoch();
        let epoch = self.layout.epoch;
        let columns = self.layout.segments.iter_mut();
        for column in columns.flat_map(|segment| &mut segment.columns) {
            if column.legs.iter().all(is_whole) {
                column.lost_since = EpochNumber(0);
            } else if column.lost_since == EpochNumber(0) {
                column.lost_since = epoch;
            }
        }
    }
}

fn is_whole(leg: &Leg) -> bool {
    matches!(leg.state, LegState::InSync | LegState::AsyncReplica)
}

impl Authority for Manager {
    fn attach(&self, _name: &VolumeName, _client: &str) -> Result<ResolvedLayout, AuthorityError> {
        let mut store = poison::lock(&self.0);
        let heard = store.accept_call()?;
        store.layout.epoch = store.next_epoch();
        store.attachment = store.layout.epoch.into();
        if heard {
            Ok(store.attached())
        } else {
            Err(AuthorityError::Unreachable("no answer".into()))
        }
    }

    fn change_legs(
        &self,
        _name: &VolumeName,
        attachment: Epoch,
        expected: Epoch,
        changes: &[LegChange],
    ) -> Result<Layout, AuthorityError> {
        let mut store = poison::lock(&self.0);
        let heard = store.accept_call()?;
        if attachment != store.attachment {
            return Err(AuthorityError::Fenced);
        }
        let current = Epoch::from(store.layout.epoch);
        if current != expected {
            return Err(AuthorityError::Conflict { current });
        }
        changes.iter().for_each(|change| store.change(change));
        store.advance_epoch();
        if heard {
            Ok(store.layout.clone())
        } else {
            Err(AuthorityError::Unreachable("no answer".into()))
        }
    }

    fn layout(
        &self,
        _name: &VolumeName,
        attachment: Epoch,
        told: &CopyReport,
    ) -> Result<ResolvedLayout, AuthorityError> {
        let mut store = poison::lock(&self.0);
        store.accept_call()?;
        match attachment == store.attachment {
            true => {
                store.last_report = told.clone();
                let snapshots = &told.replica_snapshots;
                store.replica_snapshots.extend(snapshots);
                Ok(store.attached())
            }
            false => Err(AuthorityError::Fenced),
        }
    }

    fn detach(&self, _name: &VolumeName, _attachment: Epoch) -> Result<(), AuthorityError> {
        Ok(())
    }
}
