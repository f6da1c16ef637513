//! The pure state machine of a layout: which changes are legal.
//!
//! Invariants: every column keeps an in-sync leg. The epoch only rises, by one with each change. A
//! column's round is non-zero exactly while one of its legs is neither in-sync nor an asynchronous replica in step. A new
//! round is the one after the last (1 comes after 15). A change happens as a whole or not at all.
//!
//! No clock, no I/O, no randomness. The callers check whether a client may request a change.

use crate::shape::VOLUME_BYTES_MAX;
use pagemesh_base::layout::{
    COLUMNS_MAX, Column, EpochNumber, LEGS_MAX, Layout, Leg, LegState, SEGMENTS_MAX, Segment,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The highest degraded round: the largest value of a slot's track bits.
pub const ROUND_MAX: u8 = 15;

/// A layout, and the rounds that it must remember.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayoutState {
    /// The layout.
    pub layout: Layout,
    /// The last used round of each segment and column. A round is never used twice in a row;
    /// otherwise pages stamped in the earlier one would count as new.
    pub last_rounds: Vec<Vec<u8>>,
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
    /// The volume has used all four billion epochs.
    #[error("the volume's epochs are used up")]
    EpochOverflow,
}

impl LayoutState {
    /// The layout state of a new volume.
    #[must_use]
    pub fn new(layout: Layout) -> LayoutState {
        let last_rounds = layout.segments.iter().map(initial_rounds).collect();
        LayoutState {
            layout,
            last_rounds,
        }
    }

    /// Whether legal changes can lead to this state; a state read from disk may be anything.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let segments = &self.layout.segments;
        let bytes = segments
            .iter()
            .try_fold(0u64, |sum, segment| sum.checked_add(segment.bytes));
        let sound = |(segment, rounds): (&Segment, &Vec<u8>)| {
            let columns = segment.columns.len();
            (1..=COLUMNS_MAX).contains(&columns)
                && segment.bytes.is_multiple_of(columns as u64)
                && columns == rounds.len()
                && segment.columns.iter().zip(rounds).all(is_column_sound)
        };
        (1..=SEGMENTS_MAX).contains(&segments.len())
            && bytes.is_some_and(|bytes| bytes <= VOLUME_BYTES_MAX)
            && segments.len() == self.last_rounds.len()
            && segments.iter().zip(&self.last_rounds).all(sound)
    }

    /// The layout state after a change.
    ///
    /// # Errors
    /// When the change is illegal; the current state stays unchanged.
    pub fn apply(&self, change: &LayoutChange) -> Result<LayoutState, LayoutChangeError> {
        let mut next = self.clone();
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
        let epoch = next.layout.epoch.0.checked_add(1);
        next.layout.epoch = EpochNumber(epoch.ok_or(LayoutChangeError::EpochOverflow)?);
        Ok(next)
    }

    fn grow(&mut self, segments: &[Segment]) -> Result<(), LayoutChangeError> {
        if segments.is_empty() || self.layout.segments.len() + segments.len() > SEGMENTS_MAX {
            return Err(LayoutChangeError::TooManySegments);
        }
        self.last_rounds.extend(segments.iter().map(initial_rounds));
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
        self.update_all_rounds()
    }

    fn remove_leg(&mut self, copy: usize) -> Result<(), LayoutChangeError> {
        for column in self.columns_with_leg(copy)? {
            column.legs.remove(copy);
        }
        self.update_all_rounds()
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
        self.update_all_rounds()
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

    fn update_all_rounds(&mut self) -> Result<(), LayoutChangeError> {
        for segment in 0..self.layout.segments.len() {
            for column in 0..self.layout.segments[segment].columns.len() {
                self.update_round(segment, column)?;
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
        let columns: BTreeSet<_> = turns.iter().map(|t| (t.segment, t.column)).collect();
        columns
            .into_iter()
            .try_for_each(|(segment, column)| self.update_round(segment, column))
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
            // No round records which changes an asynchronous replica lacked.
            (LegState::AsyncReplica, LegState::Stale) => leg.needs_full_resync = true,
            (from, to) => return Err(LayoutChangeError::IllegalTransition { from, to }),
        }
        leg.state = turn.to;
        if is_up_to_date(leg.state) {
            (leg.needs_full_resync, leg.empty) = (false, false);
        }
        Ok(())
    }

    /// Checks a changed column, and sets its round.
    fn update_round(&mut self, segment: usize, column: usize) -> Result<(), LayoutChangeError> {
        let it = &mut self.layout.segments[segment].columns[column];
        let last = &mut self.last_rounds[segment][column];
        if count_in_sync(it) == 0 {
            return Err(LayoutChangeError::LastInSync { segment, column });
        }
        match it.legs.iter().all(|leg| is_up_to_date(leg.state)) {
            true => it.round = 0,
            false if it.round == 0 => {
                *last = *last % ROUND_MAX + 1;
                it.round = *last;
            }
            false => {}
        }
        Ok(())
    }
}

/// Whether a leg needs no round to track its missing writes.
#[must_use]
pub fn is_up_to_date(state: LegState) -> bool {
    matches!(state, LegState::InSync | LegState::AsyncReplica)
}

fn initial_rounds(segment: &Segment) -> Vec<u8> {
    segment.columns.iter().map(|column| column.round).collect()
}

fn is_column_sound((column, last): (&Column, &u8)) -> bool {
    let all = column.legs.iter().all(|leg| is_up_to_date(leg.state));
    let is_replica = |leg: &Leg| leg.state == LegState::AsyncReplica;
    (1..=LEGS_MAX).contains(&column.legs.len())
        && count_in_sync(column) > 0
        && *last <= ROUND_MAX
        && column.round == if all { 0 } else { *last }
        && (all || *last > 0)
        && column
            .legs
            .iter()
            .all(|leg| leg.asynchronous || !is_replica(leg))
}

fn count_in_sync(column: &Column) -> usize {
    let in_sync = |leg: &&Leg| leg.state == LegState::InSync;
    column.legs.iter().filter(in_sync).count()
}
