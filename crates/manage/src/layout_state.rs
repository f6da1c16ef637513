//! The pure state machine of a layout: which changes are legal.
//!
//! Invariants: every column keeps an in-sync leg. The epoch only rises, with each change to the first number above the
//! old one and above the last reserved one. A column names the epoch of its oldest loss exactly while one of its legs is neither in-sync nor an asynchronous
//! replica in step. A change happens as a whole or not at all.
//!
//! No clock, no I/O, no randomness. The callers check whether a client may request a change.

use crate::shape::VOLUME_BYTES_MAX;
use pagemesh_base::ids::EPOCH_MAX;
use pagemesh_base::layout::{
    COLUMNS_MAX, Column, EpochNumber, LEGS_MAX, Layout, Leg, LegState, SEGMENTS_MAX, Segment,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// A layout that only legal changes make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutState {
    /// The layout.
    pub layout: Layout,
    /// The last epoch that a snapshot took; 0 if none did. A snapshot leaves the layout's epoch as it is, because
    /// clients take another epoch for a change of the layout. The next epoch of the layout is higher than both.
    #[serde(default = "no_epoch", skip_serializing_if = "is_no_epoch")]
    pub reserved: EpochNumber,
}

fn no_epoch() -> EpochNumber {
    EpochNumber(0)
}

fn is_no_epoch(epoch: &EpochNumber) -> bool {
    epoch.0 == 0
}

/// A transition of one leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegTransition {
    /// The segment of the layout.
    pub segment: usize,
    /// The column of the segment.
    pub column: usize,
    /// The leg of the column.
    pub leg: usize,
    /// Its next state.
    pub to: LegState,
}

/// A change of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayoutChange {
    /// A client attaches the volume.
    Attach,
    /// Legs change their states, if the epoch is still the expected one.
    Legs {
        /// The epoch of the layout that the request is based on.
        expected: EpochNumber,
        /// Each leg at most once.
        transitions: Vec<LegTransition>,
    },
    /// The volume grows.
    Grow(Vec<Segment>),
    /// Each column gets one more leg: by segment and column.
    AddLeg(Vec<Vec<Leg>>),
    /// Each column loses its leg of this number.
    RemoveLeg(usize),
    /// Promotes the leg of this number. In columns where it is not in-sync, it becomes in-sync and
    /// the other legs become stale and need a full resync. The leg is no longer asynchronous.
    ///
    /// **Data loss:** writes that only the other legs hold are given up.
    Promote(usize),
}

/// The reason why a change is illegal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutChangeError {
    /// Another change came first.
    #[error("the layout is at epoch {}, not {}", current.0, expected.0)]
    Conflict {
        /// The layout's epoch.
        current: EpochNumber,
        /// The epoch that the request is based on.
        expected: EpochNumber,
    },
    /// The layout has no such leg.
    #[error("the layout has no leg {leg} in column {column} of segment {segment}")]
    NoSuchLeg {
        /// Segment.
        segment: usize,
        /// Column.
        column: usize,
        /// Leg.
        leg: usize,
    },
    /// The change names one leg twice.
    #[error("leg {leg} of column {column} of segment {segment} is named twice")]
    DuplicateLeg {
        /// Segment.
        segment: usize,
        /// Column.
        column: usize,
        /// Leg.
        leg: usize,
    },
    /// The leg may not take this step.
    #[error("a leg that is {from} cannot become {to}")]
    IllegalTransition {
        /// The current state.
        from: LegState,
        /// The requested state.
        to: LegState,
    },
    /// No in-sync leg would hold the acknowledged writes.
    #[error("column {column} of segment {segment} would have no in-sync leg left")]
    LastInSync {
        /// Segment.
        segment: usize,
        /// Column.
        column: usize,
    },
    /// The change is empty.
    #[error("the change names no leg")]
    NoLegNamed,
    /// The new legs do not match the segments and columns of the volume.
    #[error("the new copy does not have the volume's columns")]
    ColumnMismatch,
    /// The columns have the maximum number of legs.
    #[error("a column has {LEGS_MAX} copies at most")]
    TooManyLegs,
    /// Some column has no such leg.
    #[error("the volume has no copy {0}; copies are counted from 0")]
    NoSuchLegIndex(usize),
    /// The copy never held the whole volume.
    #[error("copy {0} has never been in-sync, and lacks parts of the volume")]
    NeverInSync(usize),
    /// The volume has grown too often.
    #[error("the volume would have more than {SEGMENTS_MAX} segments")]
    TooManySegments,
    /// The volume has used every epoch.
    #[error("the volume has used all {EPOCH_MAX} epochs; copy its data to a new volume")]
    EpochOverflow,
}

impl LayoutState {
    /// The layout state of a new volume.
    #[must_use]
    pub fn new(layout: Layout) -> LayoutState {
        LayoutState {
            layout,
            reserved: no_epoch(),
        }
    }

    /// The first epoch above all that were used.
    fn next_epoch(&self) -> Result<EpochNumber, LayoutChangeError> {
        let last = self.layout.epoch.max(self.reserved);
        let next = last.0.checked_add(1).filter(|&epoch| epoch <= EPOCH_MAX);
        next.map(EpochNumber)
            .ok_or(LayoutChangeError::EpochOverflow)
    }

    /// Reserves an epoch for a snapshot. The layout and its epoch stay.
    ///
    /// # Errors
    /// When all epochs are used.
    pub fn reserve_epoch(&self) -> Result<LayoutState, LayoutChangeError> {
        Ok(LayoutState {
            layout: self.layout.clone(),
            reserved: self.next_epoch()?,
        })
    }

    /// Whether legal changes can lead to this state; a state read from disk may be anything.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let segments = &self.layout.segments;
        let bytes = segments
            .iter()
            .try_fold(0u64, |sum, segment| sum.checked_add(segment.bytes));
        let epoch = self.layout.epoch;
        let sound = |segment: &Segment| {
            let columns = segment.columns.len();
            (1..=COLUMNS_MAX).contains(&columns)
                && segment.bytes.is_multiple_of(columns as u64)
                && segment.columns.iter().all(|it| is_column_sound(it, epoch))
        };
        (1..=SEGMENTS_MAX).contains(&segments.len())
            && bytes.is_some_and(|bytes| bytes <= VOLUME_BYTES_MAX)
            && epoch.0 <= EPOCH_MAX
            && self.reserved.0 <= EPOCH_MAX
            && segments.iter().all(sound)
    }

    /// The layout state after a change.
    ///
    /// # Errors
    /// When the change is illegal; the current state stays unchanged.
    pub fn apply(&self, change: &LayoutChange) -> Result<LayoutState, LayoutChangeError> {
        let mut next = self.clone();
        let epoch = self.next_epoch()?;
        match change {
            LayoutChange::Attach => {}
            LayoutChange::Legs {
                expected,
                transitions: turns,
            } => next.apply_transitions(*expected, turns)?,
            LayoutChange::Grow(segments) => next.grow(segments)?,
            LayoutChange::AddLeg(legs) => next.add_leg(legs)?,
            LayoutChange::RemoveLeg(copy) => next.remove_leg(*copy)?,
            LayoutChange::Promote(copy) => next.promote(*copy)?,
        }
        next.layout.epoch = epoch;
        next.update_losses()?;
        Ok(next)
    }

    fn grow(&mut self, segments: &[Segment]) -> Result<(), LayoutChangeError> {
        if segments.is_empty() || self.layout.segments.len() + segments.len() > SEGMENTS_MAX {
            return Err(LayoutChangeError::TooManySegments);
        }
        self.layout.segments.extend_from_slice(segments);
        Ok(())
    }

    fn add_leg(&mut self, copy: &[Vec<Leg>]) -> Result<(), LayoutChangeError> {
        let segments = &mut self.layout.segments;
        let columns = |legs: &Vec<Leg>, segment: &Segment| legs.len() == segment.columns.len();
        let alike = copy.len() == segments.len();
        if !alike || !copy.iter().zip(&*segments).all(|(it, of)| columns(it, of)) {
            return Err(LayoutChangeError::ColumnMismatch);
        }
        for (segment, legs) in segments.iter_mut().zip(copy) {
            for (column, leg) in segment.columns.iter_mut().zip(legs) {
                if column.legs.len() >= LEGS_MAX {
                    return Err(LayoutChangeError::TooManyLegs);
                }
                column.legs.push(Leg {
                    state: LegState::Stale,
                    needs_full_resync: true,
                    empty: true,
                    ..leg.clone()
                });
            }
        }
        Ok(())
    }

    fn remove_leg(&mut self, copy: usize) -> Result<(), LayoutChangeError> {
        for column in self.columns_with_leg(copy)? {
            column.legs.remove(copy);
        }
        Ok(())
    }

    fn promote(&mut self, copy: usize) -> Result<(), LayoutChangeError> {
        for column in self.columns_with_leg(copy)? {
            if column.legs[copy].empty {
                return Err(LayoutChangeError::NeverInSync(copy));
            }
            if column.legs[copy].state == LegState::InSync {
                continue;
            }
            for (number, leg) in column.legs.iter_mut().enumerate() {
                (leg.state, leg.needs_full_resync) = match number == copy {
                    true => (LegState::InSync, false),
                    false => (LegState::Stale, true),
                };
                leg.asynchronous &= number != copy;
            }
        }
        Ok(())
    }

    /// All columns, if each has a leg of this number.
    fn columns_with_leg(&mut self, copy: usize) -> Result<Vec<&mut Column>, LayoutChangeError> {
        let segments = self.layout.segments.iter_mut();
        let columns: Vec<_> = segments.flat_map(|segment| &mut segment.columns).collect();
        match columns.iter().all(|column| copy < column.legs.len()) {
            true => Ok(columns),
            false => Err(LayoutChangeError::NoSuchLegIndex(copy)),
        }
    }

    /// Checks each column, and sets the epoch of its oldest loss. The survivors are at the layout's
    /// epoch before they change anything that a lost leg misses, except for the operations in flight.
    fn update_losses(&mut self) -> Result<(), LayoutChangeError> {
        let epoch = self.layout.epoch;
        for (segment, of) in self.layout.segments.iter_mut().enumerate() {
            for (column, it) in of.columns.iter_mut().enumerate() {
                if count_in_sync(it) == 0 {
                    return Err(LayoutChangeError::LastInSync { segment, column });
                }
                match it.legs.iter().all(|leg| is_up_to_date(leg.state)) {
                    true => it.lost_since = EpochNumber(0),
                    false if it.lost_since == EpochNumber(0) => it.lost_since = epoch,
                    false => {}
                }
            }
        }
        Ok(())
    }

    fn apply_transitions(
        &mut self,
        expected: EpochNumber,
        turns: &[LegTransition],
    ) -> Result<(), LayoutChangeError> {
        let current = self.layout.epoch;
        if current != expected {
            return Err(LayoutChangeError::Conflict { current, expected });
        }
        if turns.is_empty() {
            return Err(LayoutChangeError::NoLegNamed);
        }
        let mut seen = BTreeSet::new();
        for turn in turns {
            if !seen.insert((turn.segment, turn.column, turn.leg)) {
                return Err(LayoutChangeError::DuplicateLeg {
                    segment: turn.segment,
                    column: turn.column,
                    leg: turn.leg,
                });
            }
            self.apply_transition(turn)?;
        }
        Ok(())
    }

    fn apply_transition(&mut self, turn: &LegTransition) -> Result<(), LayoutChangeError> {
        let segments = self.layout.segments.get_mut(turn.segment);
        let leg = segments
            .and_then(|segment| segment.columns.get_mut(turn.column))
            .and_then(|column| column.legs.get_mut(turn.leg))
            .ok_or(LayoutChangeError::NoSuchLeg {
                segment: turn.segment,
                column: turn.column,
                leg: turn.leg,
            })?;
        match (leg.state, turn.to) {
            (LegState::InSync | LegState::Syncing, LegState::Stale)
            | (LegState::Syncing, LegState::InSync) => {}
            (LegState::Stale, LegState::Syncing) if !leg.asynchronous => {}
            (LegState::Stale, LegState::AsyncReplica) if leg.asynchronous => {}
            // A client's older request to let it follow may still arrive; it then fails with an
            // epoch conflict.
            (LegState::Stale, LegState::Stale) if leg.asynchronous => {}
            // No epoch tells which changes an asynchronous replica lacked.
            (LegState::AsyncReplica, LegState::Stale) => leg.needs_full_resync = true,
            (from, to) => return Err(LayoutChangeError::IllegalTransition { from, to }),
        }
        leg.state = turn.to;
        if is_up_to_date(leg.state) {
            (leg.needs_full_resync, leg.empty) = (false, false);
        }
        Ok(())
    }
}

/// Whether a leg misses no writes that a column must remember.
#[must_use]
pub fn is_up_to_date(state: LegState) -> bool {
    matches!(state, LegState::InSync | LegState::AsyncReplica)
}

fn is_column_sound(column: &Column, epoch: EpochNumber) -> bool {
    let all = column.legs.iter().all(|leg| is_up_to_date(leg.state));
    let is_replica = |leg: &Leg| leg.state == LegState::AsyncReplica;
    (1..=LEGS_MAX).contains(&column.legs.len())
        && count_in_sync(column) > 0
        && column.lost_since <= epoch
        && (column.lost_since == EpochNumber(0)) == all
        && column
            .legs
            .iter()
            .all(|leg| leg.asynchronous || !is_replica(leg))
}

fn count_in_sync(column: &Column) -> usize {
    let in_sync = |leg: &&Leg| leg.state == LegState::InSync;
    column.legs.iter().filter(in_sync).count()
}
