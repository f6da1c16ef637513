//! The channels' view of a volume: an immutable snapshot that the controller replaces, and the
//! placement computed from it.

use crate::limits::{ATOMIC_RUN_BYTES, REGION_BYTES};
use pagemesh_base::brick_name::BrickNames;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, LEGS_MAX, LegState, STRIPE_BYTES, SliceId};
use pagemesh_base::slice::SLICE_IO_BYTES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use std::sync::Arc;

/// A set of legs of one column.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LegSet(u8);

impl LegSet {
    pub const NONE: LegSet = LegSet(0);

    pub const fn of(leg: usize) -> LegSet {
        LegSet(1 << leg)
    }
    pub fn from_fn(wanted: impl Fn(usize) -> bool) -> LegSet {
        let legs = (0..LEGS_MAX).filter(|&leg| wanted(leg));
        LegSet(legs.fold(0, |mask, leg| mask | 1 << leg))
    }
    pub fn contains(self, leg: usize) -> bool {
        self.0 & (1 << leg) != 0
    }
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }
    pub fn is_superset(self, other: LegSet) -> bool {
        other.0 & !self.0 == 0
    }
    pub fn intersection(self, other: LegSet) -> LegSet {
        LegSet(self.0 & other.0)
    }
    pub fn union(self, other: LegSet) -> LegSet {
        LegSet(self.0 | other.0)
    }
    pub fn difference(self, other: LegSet) -> LegSet {
        LegSet(self.0 & !other.0)
    }
    pub fn add(&mut self, leg: usize) {
        self.0 |= 1 << leg;
    }
    pub fn remove(&mut self, leg: usize) {
        self.0 &= !(1 << leg);
    }
    pub fn legs(self) -> impl Iterator<Item = usize> {
        (0..LEGS_MAX).filter(move |&leg| self.contains(leg))
    }
}

/// One leg, as channels see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LegSnapshot {
    pub brick: BrickId,
    pub slice: SliceId,
    pub state: LegState,
    /// Whether a write is durable only after a flush.
    pub buffers: bool,
    /// Rises with each new connection of the leg. A connection with another serial is not used.
    pub serial: u64,
}

/// Whether requests to a column are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnGate {
    Open,
    /// There is no in-sync leg: requests wait.
    Down,
    /// Requests waited too long: they fail.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnSnapshot {
    pub legs: Vec<LegSnapshot>,
    pub gate: ColumnGate,
    /// The serial of the replica's connection; 0 if there is none. Channels treat the replica
    /// as stale.
    pub replica_serial: u64,
}

impl ColumnSnapshot {
    fn legs_where(&self, wanted: impl Fn(&LegSnapshot) -> bool) -> LegSet {
        LegSet::from_fn(|leg| self.legs.get(leg).is_some_and(&wanted))
    }

    /// The legs that must have a write before it completes.
    pub fn written(&self) -> LegSet {
        self.legs_where(|leg| leg.state != LegState::Stale)
    }

    pub fn in_sync(&self) -> LegSet {
        self.legs_where(|leg| leg.state == LegState::InSync)
    }

    pub fn buffering(&self) -> LegSet {
        self.legs_where(|leg| leg.buffers)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSnapshot {
    /// The first byte in the volume.
    pub start: u64,
    pub bytes: u64,
    /// The number of the segment's first column among all columns of the volume.
    pub first_column: usize,
    pub column_count: usize,
}

#[derive(Clone, Debug)]
pub struct LayoutSnapshot {
    pub epoch: Epoch,
    pub size_bytes: u64,
    pub segments: Vec<SegmentSnapshot>,
    pub columns: Vec<ColumnSnapshot>,
    /// The names of the bricks, for error messages.
    pub names: Arc<BrickNames>,
    pub fenced: bool,
}

/// Snapshots are equal if requests take the same way by them. A brick that only has another name is
/// no reason to publish a snapshot and to revoke the lease of direct clients.
impl PartialEq for LayoutSnapshot {
    fn eq(&self, other: &LayoutSnapshot) -> bool {
        let LayoutSnapshot {
            epoch,
            size_bytes,
            segments,
            columns,
            names: _,
            fenced,
        } = self;
        *epoch == other.epoch
            && *size_bytes == other.size_bytes
            && *segments == other.segments
            && *columns == other.columns
            && *fenced == other.fenced
    }
}

impl Eq for LayoutSnapshot {}

/// A part of a request that lies in one column without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnExtent {
    pub column: usize,
    /// The first byte in the column's slices.
    pub offset: u64,
    pub len: u64,
    /// The first byte in the volume.
    pub volume_offset: u64,
}

impl LayoutSnapshot {
    /// The snapshot of a volume that is not attached yet.
    pub fn empty() -> LayoutSnapshot {
        LayoutSnapshot {
            epoch: Epoch(0),
            size_bytes: 0,
            segments: vec![],
            columns: vec![],
            names: Arc::default(),
            fenced: false,
        }
    }

    /// The serial of the replica's connection; 0 if there is none. Only volumes of one column
    /// have replicas.
    pub fn replica_serial(&self) -> u64 {
        match self.columns.as_slice() {
            [only] => only.replica_serial,
            _ => 0,
        }
    }

    /// Whether some written leg makes writes durable only with a flush. A stale leg or a
    /// replica is no reason to flush the others.
    pub fn buffers(&self) -> bool {
        let buffers =
            |column: &ColumnSnapshot| !column.written().intersection(column.buffering()).is_empty();
        self.columns.iter().any(buffers)
    }

    /// The first part of a range that is read or written as one. It crosses no segment, stripe
    /// or region border.
    pub fn io_extent(&self, at: u64, end: u64) -> Option<ColumnExtent> {
        let mut place = self.contiguous_extent(at, end)?;
        place.len = place
            .len
            .min(u64::from(SLICE_IO_BYTES_MAX))
            .min(REGION_BYTES - place.offset % REGION_BYTES);
        Some(place)
    }

    /// The first part of a range that every leg either writes or refuses as a whole. Full legs
    /// may differ in where their space ends. If a leg could write a part of the piece before it
    /// refuses, the legs would differ, and no error would show that.
    pub fn atomic_extent(&self, at: u64, end: u64) -> Option<ColumnExtent> {
        let mut place = self.io_extent(at, end)?;
        place.len = atomic_len(place.offset, place.len);
        Some(place)
    }

    /// The first part of a range that lies in one column without a gap.
    pub fn contiguous_extent(&self, at: u64, end: u64) -> Option<ColumnExtent> {
        let segment = match self.segments.as_slice() {
            [only] => only,
            many => many.iter().rfind(|segment| segment.start <= at)?,
        };
        let within = at - segment.start;
        let mut len = end.min(segment.start + segment.bytes).checked_sub(at)?;
        if len == 0 {
            return None;
        }
        let (column, offset) = if segment.column_count == 1 {
            (segment.first_column, within)
        } else {
            let columns = segment.column_count as u64;
            let (unit, inside) = (within / STRIPE_BYTES, within % STRIPE_BYTES);
            len = len.min(STRIPE_BYTES - inside);
            let column = segment.first_column + (unit % columns) as usize;
            (column, unit / columns * STRIPE_BYTES + inside)
        };
        Some(ColumnExtent {
            column,
            offset,
            len,
            volume_offset: at,
        })
    }

    /// The part of a column that a range of the volume covers. Stripes map a run of the volume
    /// to one run of each column.
    pub fn column_range(&self, column: usize, from: u64, to: u64) -> (u64, u64) {
        let Some(segment) = self.segments.iter().rfind(|s| s.first_column <= column) else {
            return (0, 0);
        };
        let number = (column - segment.first_column) as u64;
        let below = |byte: u64| {
            let within = byte
                .clamp(segment.start, segment.start + segment.bytes)
                .saturating_sub(segment.start);
            if segment.column_count == 1 {
                return within;
            }
            let row = STRIPE_BYTES * segment.column_count as u64;
            let rest = (within % row).saturating_sub(number * STRIPE_BYTES);
            within / row * STRIPE_BYTES + rest.min(STRIPE_BYTES)
        };
        (below(from), below(to))
    }

    /// The byte of the volume that lies at a byte of a column.
    pub fn volume_offset(&self, column: usize, offset: u64) -> u64 {
        let Some(segment) = self.segments.iter().rfind(|s| s.first_column <= column) else {
            return offset;
        };
        if segment.column_count == 1 {
            return segment.start + offset;
        }
        let (row, inside) = (offset / STRIPE_BYTES, offset % STRIPE_BYTES);
        let unit = row * segment.column_count as u64 + (column - segment.first_column) as u64;
        segment.start + unit * STRIPE_BYTES + inside
    }
}

/// The length of the first part of a change that a leg makes or refuses as one: a part of a
/// page, or whole pages of one run.
pub fn atomic_len(offset: u64, len: u64) -> u64 {
    let page = PAGE_BYTES as u64;
    let within = offset % page;
    if within != 0 || len < page {
        return len.min(page - within);
    }
    (len - len % page).min(ATOMIC_RUN_BYTES - offset % ATOMIC_RUN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn renamed_brick_leaves_snapshot_equal() {
        let mut renamed = view(&[(1, 2)]);
        let name = "brick-2".parse().expect("a name");
        let id = pagemesh_base::layout::BrickId(uuid::Uuid::from_u128(1));
        renamed.names = Arc::new([(id, name)].into_iter().collect());
        assert_eq!(renamed, view(&[(1, 2)]));
        assert_ne!(renamed, view(&[(1, 3)]));
    }

    fn view(segments: &[(usize, u64)]) -> LayoutSnapshot {
        let mut view = LayoutSnapshot {
            epoch: Epoch(1),
            size_bytes: 0,
            segments: vec![],
            columns: vec![],
            names: Arc::default(),
            fenced: false,
        };
        let column = ColumnSnapshot {
            legs: vec![],
            gate: ColumnGate::Open,
            replica_serial: 0,
        };
        for &(columns, units) in segments {
            let bytes = units * columns as u64 * STRIPE_BYTES;
            view.segments.push(SegmentSnapshot {
                start: view.size_bytes,
                bytes,
                first_column: view.columns.len(),
                column_count: columns,
            });
            view.size_bytes += bytes;
            view.columns
                .extend(std::iter::repeat_n(column.clone(), columns));
        }
        view
    }

    #[test]
    fn volume_buffers_only_if_a_written_leg_buffers() {
        let leg = |state, buffers| LegSnapshot {
            brick: BrickId::default(),
            slice: SliceId::default(),
            state,
            buffers,
            serial: 1,
        };
        let with = |other| {
            let mut view = view(&[(1, 1)]);
            view.columns[0].legs = vec![leg(LegState::InSync, false), other];
            view.buffers()
        };
        assert!(!with(leg(LegState::InSync, false)));
        assert!(with(leg(LegState::InSync, true)));
        assert!(with(leg(LegState::Syncing, true)));
        assert!(!with(leg(LegState::Stale, true)));
    }

    proptest! {
        /// Pieces tile the range. A column's run is the union of its pieces. The inverse
        /// mapping leads to the same byte.
        #[test]
        fn extents_and_column_ranges_agree(
            segments in prop::collection::vec((1usize..5, 1u64..5), 1..4),
            offset in 0u64..2 << 20, len in 1u64..2 << 20,
        ) {
            let view = view(&segments);
            let end = (offset + len).min(view.size_bytes);
            let mut at = offset.min(end);
            let mut covered = vec![None::<(u64, u64)>; view.columns.len()];
            while at < end {
                let place = view.io_extent(at, end).expect("within");
                prop_assert_eq!(place.volume_offset, at);
                prop_assert_eq!(view.volume_offset(place.column, place.offset), at);
                let run = &mut covered[place.column];
                let first = run.map_or(place.offset, |r| r.0);
                prop_assert_eq!(run.map_or(place.offset, |r| r.1), place.offset);
                *run = Some((first, place.offset + place.len));
                at += place.len;
            }
            for (column, run) in covered.iter().enumerate() {
                let (from, to) = view.column_range(column, offset.min(end), end);
                prop_assert_eq!(run.unwrap_or((from, from)), (from, to));
            }
        }
    }
}
