//! The pure state machine of a layout: which change may follow which.
//!
//! Invariants: every column keeps an in-sync leg; the epoch only rises, by one
//! with each change; a column's round is non-zero exactly while one of its
//! legs is neither in-sync nor follows, and a new round is the one after the last (15 is
//! followed by 1). A change happens as a whole or not at all.
//!
//! No clock, no I/O, no randomness; who may ask for a change is not decided
//! here.

use crate::shape::VOLUME_BYTES_MAX;
use pagemesh_base::layout::{
    COLUMNS_MAX, Column, EpochNumber, LEGS_MAX, Layout, Leg, LegState, SEGMENTS_MAX, Segment,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The highest degraded round: what a slot's track bits hold.
pub const ROUND_MAX: u8 = 15;

/// A layout and what must be remembered beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// The layout.
    pub layout: Layout,
    /// The last round that was used, of each segment and column. A round is
    /// not used twice in a row, or pages stamped before would count as new.
    pub last_rounds: Vec<Vec<u8>>,
}

/// What a leg becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegTurn {
    /// Which segment of the layout.
    pub segment: usize,
    /// Which of its columns.
    pub column: usize,
    /// Which of its legs.
    pub leg: usize,
    /// Its next state.
    pub to: LegState,
}

/// A change of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A client takes the volume.
    Attach,
    /// Legs change their states, if the epoch is still the expected one.
    Legs {
        /// The epoch of the layout that led to the wish.
        expected: EpochNumber,
        /// Each leg at most once.
        turns: Vec<LegTurn>,
    },
    /// The volume grows.
    Grow(Vec<Segment>),
    /// Each column gets a leg more: by segment and column.
    AddCopy(Vec<Vec<Leg>>),
    /// Each column loses its leg of this number.
    RemoveCopy(usize),
    /// Where the leg of this number is not in-sync, it becomes so, and the others stale
    /// and fresh: what they hold beyond it is given up. It does not follow any more.
    Promote(usize),
}

/// Why a change is not made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// Somebody was faster.
    #[error("the layout is at epoch {}, not {}", current.0, expected.0)]
    Conflict {
        /// The layout's epoch.
        current: EpochNumber,
        /// The one the wish was made for.
        expected: EpochNumber,
    },
    /// No such place in the layout.
    #[error("the layout has no leg {leg} in column {column} of segment {segment}")]
    NoSuchLeg {
        /// Segment.
        segment: usize,
        /// Column.
        column: usize,
        /// Leg.
        leg: usize,
    },
    /// One leg twice in one change.
    #[error("leg {leg} of column {column} of segment {segment} is named twice")]
    NamedTwice {
        /// Segment.
        segment: usize,
        /// Column.
        column: usize,
        /// Leg.
        leg: usize,
    },
    /// Not a step a leg can take.
    #[error("a leg that is {} cannot become {}", word(*from), word(*to))]
    Step {
        /// What it is.
        from: LegState,
        /// What was wished.
        to: LegState,
    },
    /// Nobody would hold what was acknowledged.
    #[error("column {column} of segment {segment} would have no in-sync leg left")]
    LastInSync {
        /// Segment.
        segment: usize,
        /// Column.
        column: usize,
    },
    /// A change of nothing.
    #[error("the change names no leg")]
    Empty,
    /// Other segments or columns than the volume has.
    #[error("the new copy does not have the volume's columns")]
    OtherColumns,
    /// No place for one more.
    #[error("a column has {LEGS_MAX} copies at most")]
    TooManyCopies,
    /// No such copy in some column.
    #[error("the volume has no copy {0}; copies are counted from 0")]
    NoSuchCopy(usize),
    /// It never held all of the volume.
    #[error("copy {0} has never been in-sync, and lacks parts of the volume")]
    NeverInSync(usize),
    /// Grown too often.
    #[error("the volume would have more than {SEGMENTS_MAX} segments")]
    TooManySegments,
    /// Changed four billion times.
    #[error("the volume's epochs are used up")]
    EpochsUsedUp,
}

/// The state as it is written in JSON.
#[must_use]
pub fn word(state: LegState) -> &'static str {
    match state {
        LegState::InSync => "in-sync",
        LegState::Stale => "stale",
        LegState::Syncing => "syncing",
        LegState::Following => "following",
    }
}

impl Ledger {
    /// The ledger of a new volume.
    #[must_use]
    pub fn new(layout: Layout) -> Ledger {
        let last_rounds = layout.segments.iter().map(no_rounds).collect();
        Ledger {
            layout,
            last_rounds,
        }
    }

    /// Whether it is one that changes lead to; one that was read from a disk
    /// may be anything.
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
                && segment.columns.iter().zip(rounds).all(is_sound)
        };
        (1..=SEGMENTS_MAX).contains(&segments.len())
            && bytes.is_some_and(|bytes| bytes <= VOLUME_BYTES_MAX)
            && segments.len() == self.last_rounds.len()
            && segments.iter().zip(&self.last_rounds).all(sound)
    }

    /// What the ledger is after a change.
    ///
    /// # Errors
    /// When the change may not be made; the ledger stays as it is.
    pub fn apply(&self, change: &Change) -> Result<Ledger, ChangeError> {
        let mut next = self.clone();
        match change {
            Change::Attach => {}
            Change::Legs { expected, turns } => next.turn(*expected, turns)?,
            Change::Grow(segments) => next.grow(segments)?,
            Change::AddCopy(legs) => next.add_copy(legs)?,
            Change::RemoveCopy(copy) => next.remove_copy(*copy)?,
            Change::Promote(copy) => next.promote(*copy)?,
        }
        let epoch = next.layout.epoch.0.checked_add(1);
        next.layout.epoch = EpochNumber(epoch.ok_or(ChangeError::EpochsUsedUp)?);
        Ok(next)
    }

    fn grow(&mut self, segments: &[Segment]) -> Result<(), ChangeError> {
        if segments.is_empty() || self.layout.segments.len() + segments.len() > SEGMENTS_MAX {
            return Err(ChangeError::TooManySegments);
        }
        self.last_rounds.extend(segments.iter().map(no_rounds));
        self.layout.segments.extend_from_slice(segments);
        Ok(())
    }

    fn add_copy(&mut self, copy: &[Vec<Leg>]) -> Result<(), ChangeError> {
        let segments = &mut self.layout.segments;
        let columns = |legs: &Vec<Leg>, segment: &Segment| legs.len() == segment.columns.len();
        let alike = copy.len() == segments.len();
        if !alike || !copy.iter().zip(&*segments).all(|(it, of)| columns(it, of)) {
            return Err(ChangeError::OtherColumns);
        }
        for (segment, legs) in segments.iter_mut().zip(copy) {
            for (column, leg) in segment.columns.iter_mut().zip(legs) {
                if column.legs.len() >= LEGS_MAX {
                    return Err(ChangeError::TooManyCopies);
                }
                column.legs.push(Leg {
                    state: LegState::Stale,
                    fresh: true,
                    empty: true,
                    ..leg.clone()
                });
            }
        }
        self.settle_all()
    }

    fn remove_copy(&mut self, copy: usize) -> Result<(), ChangeError> {
        for column in self.columns_with(copy)? {
            column.legs.remove(copy);
        }
        self.settle_all()
    }

    fn promote(&mut self, copy: usize) -> Result<(), ChangeError> {
        for column in self.columns_with(copy)? {
            if column.legs[copy].empty {
                return Err(ChangeError::NeverInSync(copy));
            }
            if column.legs[copy].state == LegState::InSync {
                continue;
            }
            for (number, leg) in column.legs.iter_mut().enumerate() {
                (leg.state, leg.fresh) = match number == copy {
                    true => (LegState::InSync, false),
                    false => (LegState::Stale, true),
                };
                leg.asynchronous &= number != copy;
            }
        }
        self.settle_all()
    }

    /// All columns, each of which has a leg of this number.
    fn columns_with(&mut self, copy: usize) -> Result<Vec<&mut Column>, ChangeError> {
        let segments = self.layout.segments.iter_mut();
        let columns: Vec<_> = segments.flat_map(|segment| &mut segment.columns).collect();
        match columns.iter().all(|column| copy < column.legs.len()) {
            true => Ok(columns),
            false => Err(ChangeError::NoSuchCopy(copy)),
        }
    }

    fn settle_all(&mut self) -> Result<(), ChangeError> {
        for segment in 0..self.layout.segments.len() {
            for column in 0..self.layout.segments[segment].columns.len() {
                self.settle(segment, column)?;
            }
        }
        Ok(())
    }

    fn turn(&mut self, expected: EpochNumber, turns: &[LegTurn]) -> Result<(), ChangeError> {
        let current = self.layout.epoch;
        if current != expected {
            return Err(ChangeError::Conflict { current, expected });
        }
        if turns.is_empty() {
            return Err(ChangeError::Empty);
        }
        let mut seen = BTreeSet::new();
        for turn in turns {
            if !seen.insert((turn.segment, turn.column, turn.leg)) {
                return Err(ChangeError::NamedTwice {
                    segment: turn.segment,
                    column: turn.column,
                    leg: turn.leg,
                });
            }
            self.step(turn)?;
        }
        let columns: BTreeSet<_> = turns.iter().map(|t| (t.segment, t.column)).collect();
        columns
            .into_iter()
            .try_for_each(|(segment, column)| self.settle(segment, column))
    }

    fn step(&mut self, turn: &LegTurn) -> Result<(), ChangeError> {
        let segments = self.layout.segments.get_mut(turn.segment);
        let leg = segments
            .and_then(|segment| segment.columns.get_mut(turn.column))
            .and_then(|column| column.legs.get_mut(turn.leg))
            .ok_or(ChangeError::NoSuchLeg {
                segment: turn.segment,
                column: turn.column,
                leg: turn.leg,
            })?;
        match (leg.state, turn.to) {
            (LegState::InSync | LegState::Syncing, LegState::Stale)
            | (LegState::Syncing, LegState::InSync) => {}
            (LegState::Stale, LegState::Syncing) if !leg.asynchronous => {}
            (LegState::Stale, LegState::Following) if leg.asynchronous => {}
            // A wish that it follow may be on its way yet: it meets another epoch.
            (LegState::Stale, LegState::Stale) if leg.asynchronous => {}
            // No round tells what it had yet to get.
            (LegState::Following, LegState::Stale) => leg.fresh = true,
            (from, to) => return Err(ChangeError::Step { from, to }),
        }
        leg.state = turn.to;
        if is_whole(leg.state) {
            (leg.fresh, leg.empty) = (false, false);
        }
        Ok(())
    }

    /// Checks a column whose legs have changed, and gives it its round.
    fn settle(&mut self, segment: usize, column: usize) -> Result<(), ChangeError> {
        let it = &mut self.layout.segments[segment].columns[column];
        let last = &mut self.last_rounds[segment][column];
        if in_sync(it) == 0 {
            return Err(ChangeError::LastInSync { segment, column });
        }
        match it.legs.iter().all(|leg| is_whole(leg.state)) {
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

/// Whether a leg lacks nothing that a round would have to tell.
#[must_use]
pub fn is_whole(state: LegState) -> bool {
    matches!(state, LegState::InSync | LegState::Following)
}

fn no_rounds(segment: &Segment) -> Vec<u8> {
    segment.columns.iter().map(|column| column.round).collect()
}

fn is_sound((column, last): (&Column, &u8)) -> bool {
    let all = column.legs.iter().all(|leg| is_whole(leg.state));
    let follows = |leg: &Leg| leg.state == LegState::Following;
    (1..=LEGS_MAX).contains(&column.legs.len())
        && in_sync(column) > 0
        && *last <= ROUND_MAX
        && column.round == if all { 0 } else { *last }
        && (all || *last > 0)
        && column
            .legs
            .iter()
            .all(|leg| leg.asynchronous || !follows(leg))
}

fn in_sync(column: &Column) -> usize {
    let in_sync = |leg: &&Leg| leg.state == LegState::InSync;
    column.legs.iter().filter(in_sync).count()
}
