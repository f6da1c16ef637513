//! The byte-range locks of one file: an interval map for each owner.
//!
//! POSIX and RFC 8881 section 12 give the rules: a lock of an owner replaces its earlier
//! locks in the range, ranges of one owner and kind that touch are one, and an unlock may split a
//! range. A write lock conflicts with every lock of another owner in its range, a read lock with
//! write locks. The owner is a type of the caller, so that several protocols can share a table.
//!
//! Invariants: ranges of one owner do not overlap; touching ranges of one owner differ in kind; an
//! owner without ranges has no entry; the count covers all ranges.
//!
//! A lock looks at each other owner once, by a search in its ranges: the time is in proportion to the
//! owners of the file, times the logarithm of their ranges.

use std::collections::BTreeMap;

/// A range of bytes, both ends included. A range to the end of the file has `u64::MAX` as its last
/// byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockRange {
    first: u64,
    last: u64,
}

impl LockRange {
    /// The range from `first` to `last`; none if it is empty.
    #[must_use]
    pub fn new(first: u64, last: u64) -> Option<Self> {
        (first <= last).then_some(Self { first, last })
    }

    /// The range of an offset and a length of NFSv4, where all ones is a length to the end. None if
    /// the length is zero, or the end is beyond 2^64 - 1: NFS4ERR_INVAL.
    #[must_use]
    pub fn from_wire(offset: u64, length: u64) -> Option<Self> {
        let last = match length {
            0 => None,
            u64::MAX => Some(u64::MAX),
            _ => offset.checked_add(length)?.checked_sub(1),
        };
        Self::new(offset, last?)
    }

    /// The offset and the length of NFSv4.
    #[must_use]
    pub fn to_wire(self) -> (u64, u64) {
        let length = match self.last {
            u64::MAX => u64::MAX,
            last => last - self.first + 1,
        };
        (self.first, length)
    }

    /// The first byte.
    #[must_use]
    pub fn first(self) -> u64 {
        self.first
    }

    /// The last byte.
    #[must_use]
    pub fn last(self) -> u64 {
        self.last
    }

    fn overlaps(self, other: Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Whether they overlap or one starts after the end of the other.
    fn touches(self, other: Self) -> bool {
        self.first <= other.last.saturating_add(1) && other.first <= self.last.saturating_add(1)
    }

    fn union(self, other: Self) -> Self {
        Self {
            first: self.first.min(other.first),
            last: self.last.max(other.last),
        }
    }
}

/// The kind of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LockKind {
    /// READ_LT: shared.
    Read,
    /// WRITE_LT: exclusive.
    Write,
}

impl LockKind {
    fn conflicts(self, other: Self) -> bool {
        self == Self::Write || other == Self::Write
    }
}

/// A lock of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock<O> {
    /// The owner.
    pub owner: O,
    /// The range.
    pub range: LockRange,
    /// The kind.
    pub kind: LockKind,
}

/// Bounds of a table.
#[derive(Clone, Copy, Debug)]
pub struct LockTableLimits {
    /// Ranges of one owner.
    pub ranges_per_owner_max: usize,
    /// Ranges of all owners.
    pub ranges_max: usize,
}

/// The reason that a table does not grant a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockRefusal<O> {
    /// Another owner has this lock.
    Conflict(Lock<O>),
    /// The change needs more ranges than the bounds allow.
    Full,
}

/// The table has as many ranges as its bounds allow, and the change needs another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the file or the lock owner has too many ranges; unlock some first")]
pub struct TableFull;

/// The ranges of one owner by their first byte.
type Ranges = BTreeMap<u64, (u64, LockKind)>;

/// The locks of one file.
#[derive(Clone, Debug)]
pub struct LockTable<O> {
    owners: BTreeMap<O, Ranges>,
    ranges: usize,
}

impl<O> Default for LockTable<O> {
    fn default() -> Self {
        Self {
            owners: BTreeMap::new(),
            ranges: 0,
        }
    }
}

/// The ranges that a change of one owner removes and inserts.
struct RangeChange {
    removed: Vec<u64>,
    inserted: Vec<(LockRange, LockKind)>,
}

impl RangeChange {
    /// The change that gives `range` this kind, or frees it.
    fn new(ranges: &Ranges, range: LockRange, kind: Option<LockKind>) -> Self {
        let (mut removed, mut inserted) = (Vec::new(), Vec::new());
        let mut merged = range;
        let upper = range.last.saturating_add(1);
        for (&first, &(last, piece_kind)) in ranges.range(..=upper).rev() {
            let piece = LockRange { first, last };
            if !piece.touches(range) {
                break;
            }
            if kind == Some(piece_kind) {
                removed.push(first);
                merged = merged.union(piece);
            } else if piece.overlaps(range) {
                removed.push(first);
                inserted.extend(remainders(piece, range).map(|it| (it, piece_kind)));
            }
        }
        inserted.extend(kind.map(|kind| (merged, kind)));
        Self { removed, inserted }
    }

    /// Whether the count, of ranges before the change, grows beyond the limit.
    fn exceeds(&self, count: usize, limit: usize) -> bool {
        let grows = self.inserted.len() > self.removed.len();
        grows && count + self.inserted.len() - self.removed.len() > limit
    }
}

/// The parts of a piece outside of the range.
fn remainders(piece: LockRange, range: LockRange) -> impl Iterator<Item = LockRange> {
    let before = range.first.checked_sub(1);
    let before = before.and_then(|last| LockRange::new(piece.first, last));
    let after = range.last.checked_add(1);
    let after = after.and_then(|first| LockRange::new(first, piece.last));
    before.into_iter().chain(after)
}

/// The last range in conflict with a lock of another owner.
fn conflict_in(ranges: &Ranges, range: LockRange, kind: LockKind) -> Option<(LockRange, LockKind)> {
    let below = ranges.range(..=range.last).rev();
    let overlapping = below.take_while(|(_, (last, _))| *last >= range.first);
    let mut conflicts = overlapping.filter(|(_, (_, piece))| kind.conflicts(*piece));
    let (&first, &(last, kind)) = conflicts.next()?;
    Some((LockRange { first, last }, kind))
}

impl<O: Copy + Ord> LockTable<O> {
    /// A lock of another owner that conflicts; `owner` is none for an owner without locks.
    #[must_use]
    pub fn conflict(&self, owner: Option<O>, range: LockRange, kind: LockKind) -> Option<Lock<O>> {
        let others = self.owners.iter().filter(|(it, _)| Some(**it) != owner);
        others
            .filter_map(|(owner, ranges)| {
                let (range, kind) = conflict_in(ranges, range, kind)?;
                Some(Lock {
                    owner: *owner,
                    range,
                    kind,
                })
            })
            .next()
    }

    /// Locks a range, and replaces the locks that the owner has in it.
    ///
    /// # Errors
    /// If another owner has a lock in conflict, or the bounds are reached. Nothing has changed then.
    pub fn lock(&mut self, lock: Lock<O>, limits: LockTableLimits) -> Result<(), LockRefusal<O>> {
        if let Some(found) = self.conflict(Some(lock.owner), lock.range, lock.kind) {
            return Err(LockRefusal::Conflict(found));
        }
        self.change(lock.owner, lock.range, Some(lock.kind), limits)
            .map_err(|TableFull| LockRefusal::Full)
    }

    /// Unlocks a range. Parts that the owner has not locked are no error.
    ///
    /// # Errors
    /// If the unlock splits a range, and the bounds are reached. Nothing has changed then.
    pub fn unlock(
        &mut self,
        owner: O,
        range: LockRange,
        limits: LockTableLimits,
    ) -> Result<(), TableFull> {
        self.change(owner, range, None, limits)
    }

    fn change(
        &mut self,
        owner: O,
        range: LockRange,
        kind: Option<LockKind>,
        limits: LockTableLimits,
    ) -> Result<(), TableFull> {
        let empty = Ranges::new();
        let ranges = self.owners.get(&owner).unwrap_or(&empty);
        let change = RangeChange::new(ranges, range, kind);
        if change.exceeds(ranges.len(), limits.ranges_per_owner_max)
            || change.exceeds(self.ranges, limits.ranges_max)
        {
            return Err(TableFull);
        }
        if change.removed.is_empty() && change.inserted.is_empty() {
            return Ok(());
        }
        let ranges = self.owners.entry(owner).or_default();
        for first in &change.removed {
            ranges.remove(first);
        }
        for (range, kind) in &change.inserted {
            ranges.insert(range.first, (range.last, *kind));
        }
        self.ranges = self.ranges + change.inserted.len() - change.removed.len();
        if ranges.is_empty() {
            self.owners.remove(&owner);
        }
        Ok(())
    }

    /// Frees all locks of an owner. Whether there were any.
    pub fn release(&mut self, owner: O) -> bool {
        let released = self.owners.remove(&owner);
        self.ranges -= released.as_ref().map_or(0, BTreeMap::len);
        released.is_some()
    }

    /// The number of ranges of an owner.
    #[must_use]
    pub fn owner_ranges(&self, owner: O) -> usize {
        self.owners.get(&owner).map_or(0, BTreeMap::len)
    }

    /// The number of ranges of all owners.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ranges
    }

    /// Whether there is no lock.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges == 0
    }

    /// The locks, by owner and first byte.
    pub fn iter(&self) -> impl Iterator<Item = Lock<O>> {
        self.owners.iter().flat_map(|(&owner, ranges)| {
            ranges.iter().map(move |(&first, &(last, kind))| Lock {
                owner,
                range: LockRange { first, last },
                kind,
            })
        })
    }
}

#[cfg(test)]
mod tests;
