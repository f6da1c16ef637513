//! Placement of the slices of a new segment.
//!
//! Pure: the same bricks and the same request give the same answer. Invariants: the copies of a
//! column are in different failure domains; all bricks of a segment have one durability class; no
//! brick is promised more than its capacity times the overprovisioning factor. If a placement
//! exists within these rules, the search finds one.
//!
//! Slices are thin, so promised bytes count, not bytes in use. If a pool uses more than was
//! promised (page tables, other users of the pool), the bytes in use count.

use crate::shape::{LayoutKind, Shape};
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::durability::Durability;
use pagemesh_base::layout::{BrickId, SEGMENTS_MAX, SLICE_BYTES_MAX};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of slices that a brick may be promised, for each byte of its capacity. Thin volumes are
/// rarely full, and a full pool fails writes cleanly. But a promise that no pool can hold must fail
/// at once.
pub const OVERPROVISION_FACTOR: u64 = 4;

const PAGE: u64 = PAGE_BYTES as u64;

/// A brick that can take slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrickCandidate {
    /// The id of the brick.
    pub brick: BrickId,
    /// The failure domain of the brick.
    pub domain: String,
    /// The durability class of the brick.
    pub durability: Durability,
    /// Bytes that slices can use.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes of all slices placed on the brick.
    pub provisioned_bytes: u64,
}

/// A request to place a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacementRequest {
    /// Columns and copies.
    pub shape: Shape,
    /// Bytes, rounded for the shape.
    pub bytes: u64,
    /// The required class; `None` takes the strongest class that has room.
    pub durability: Option<Durability>,
    /// Maximum of promised bytes for each byte of capacity.
    pub overprovision_factor: u64,
}

/// A segment and the bricks of its legs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedSegment {
    /// Bytes of the segment.
    pub bytes: u64,
    /// For each column, the brick of each copy.
    pub columns: Vec<Vec<BrickId>>,
}

/// The placement of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The class of all its bricks.
    pub durability: Durability,
    /// One segment; a concatenation has as many as it needs bricks.
    pub segments: Vec<PlacedSegment>,
}

/// The reason why no placement exists.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// No brick is alive.
    #[error("no brick{} is alive", class(*.0))]
    NoBricks(Option<Durability>),
    /// More copies than failure domains.
    #[error(
        "{copies} copies need {copies} failure domains, but the living bricks{} are in {domains}",
        durability.map_or_else(|| " of any one class".to_owned(), |_| class(*durability))
    )]
    TooFewDomains {
        /// Copies asked for.
        copies: usize,
        /// Available failure domains: the most in any one class.
        domains: usize,
        /// The required class.
        durability: Option<Durability>,
    },
    /// The volume is too large even for empty bricks.
    #[error(
        "{bytes} bytes in {copies} copies are more than {factor} times the {capacity_bytes} bytes that the living bricks{} have in all",
        class(*durability)
    )]
    BeyondCapacity {
        /// Bytes of the volume.
        bytes: u64,
        /// Copies of each byte.
        copies: usize,
        /// Maximum of promised bytes for each byte of capacity.
        factor: u64,
        /// Bytes of all usable bricks.
        capacity_bytes: u64,
        /// The required class.
        durability: Option<Durability>,
    },
    /// The volume is too large for the room that is left.
    #[error(
        "no bricks have room for {bytes} bytes in this layout; {largest_bytes} bytes would fit now"
    )]
    NoRoom {
        /// Bytes of the volume.
        bytes: u64,
        /// Bytes that fit in the same layout now.
        largest_bytes: u64,
    },
    /// The named brick has no room for the new copy.
    #[error("the brick {brick} has room for {room_bytes} bytes more, and not for {bytes}")]
    NoRoomOn {
        /// The brick.
        brick: BrickLabel,
        /// Requested bytes.
        bytes: u64,
        /// Bytes that the brick can still be promised.
        room_bytes: u64,
    },
}

fn class(durability: Option<Durability>) -> String {
    durability.map_or_else(String::new, |class| format!(" of class {class}"))
}

/// Places a request.
///
/// # Errors
/// When no placement exists.
pub fn place(
    candidates: &[BrickCandidate],
    request: &PlacementRequest,
) -> Result<Placement, PlacementError> {
    let fits = |class| request.durability.is_none_or(|wanted| wanted == class);
    let classes: BTreeSet<_> = candidates
        .iter()
        .map(|candidate| candidate.durability)
        .filter(|&class| fits(class))
        .collect();
    let pools: Vec<(Durability, Vec<BrickSpace>)> = classes
        .iter()
        .map(|&class| {
            (
                class,
                brick_spaces(candidates, class, request.overprovision_factor),
            )
        })
        .collect();
    let placed = pools.iter().find_map(|(durability, rooms)| {
        let segments = place_segments(rooms, &request.shape, request.bytes)?;
        Some(Placement {
            durability: *durability,
            segments,
        })
    });
    placed.ok_or_else(|| placement_error(candidates, &pools, request))
}

/// A column that gets one more copy.
#[derive(Clone, Debug)]
pub struct ColumnRequest {
    /// Bytes that the brick of the new leg promises.
    pub bytes: u64,
    /// The failure domains of its present copies.
    pub domains: BTreeSet<String>,
}

/// Finds a brick for one more copy of each column, by the same rules.
///
/// # Errors
/// When some column finds no brick.
pub fn place_leg(
    candidates: &[BrickCandidate],
    durability: Durability,
    factor: u64,
    columns: &[ColumnRequest],
) -> Result<Vec<BrickId>, PlacementError> {
    let mut rooms = brick_spaces(candidates, durability, factor);
    if rooms.is_empty() {
        return Err(PlacementError::NoBricks(Some(durability)));
    }
    let mut chosen = Vec::with_capacity(columns.len());
    for column in columns {
        let others = rooms.iter().enumerate();
        let apart: Vec<usize> = others
            .filter(|(_, room)| !column.domains.contains(&room.domain))
            .map(|(at, _)| at)
            .collect();
        let with_room = apart
            .iter()
            .filter(|&&at| rooms[at].headroom >= column.bytes);
        let best = with_room.min_by_key(|&&at| {
            let room = &rooms[at];
            (room.slices, std::cmp::Reverse(room.free), room.brick)
        });
        let Some(&best) = best else {
            return Err(match apart.iter().map(|&at| rooms[at].headroom).max() {
                None => PlacementError::TooFewDomains {
                    copies: column.domains.len() + 1,
                    domains: column.domains.len(),
                    durability: Some(durability),
                },
                Some(largest_bytes) => PlacementError::NoRoom {
                    bytes: column.bytes,
                    largest_bytes,
                },
            });
        };
        rooms[best].reserve(column.bytes);
        chosen.push(rooms[best].brick);
    }
    Ok(chosen)
}

/// The space of one brick.
#[derive(Clone, Debug)]
struct BrickSpace {
    brick: BrickId,
    domain: String,
    /// Capacity minus used or promised bytes, the larger of the two; negative if overprovisioned.
    free: i128,
    /// Bytes that can still be promised.
    headroom: u64,
    /// Slices of this segment already placed on the brick.
    slices: usize,
}

impl BrickSpace {
    fn reserve(&mut self, bytes: u64) {
        self.free -= i128::from(bytes);
        self.headroom -= bytes;
        self.slices += 1;
    }
}

fn brick_spaces(candidates: &[BrickCandidate], class: Durability, factor: u64) -> Vec<BrickSpace> {
    let of_class = candidates.iter().filter(|c| c.durability == class);
    let mut rooms: Vec<BrickSpace> = of_class
        .map(|c| BrickSpace {
            brick: c.brick,
            domain: c.domain.clone(),
            free: i128::from(c.capacity_bytes) - i128::from(c.used_bytes.max(c.provisioned_bytes)),
            headroom: c
                .capacity_bytes
                .saturating_mul(factor)
                .saturating_sub(c.provisioned_bytes),
            slices: 0,
        })
        .collect();
    rooms.sort_by_key(|room| room.brick);
    rooms
}

fn place_segments(rooms: &[BrickSpace], shape: &Shape, bytes: u64) -> Option<Vec<PlacedSegment>> {
    if shape.kind == LayoutKind::Concat {
        return place_concat(rooms, bytes);
    }
    let slice = bytes / shape.columns as u64;
    let columns = place_columns(rooms, shape, slice, BrickOrder::FewestSlices)
        .or_else(|| place_columns(rooms, shape, slice, BrickOrder::RoomiestDomain))?;
    Some(vec![PlacedSegment { bytes, columns }])
}

/// Places a concatenation: first on free space, the brick with the most first; then on the bytes
/// that bricks may be promised beyond it.
fn place_concat(rooms: &[BrickSpace], bytes: u64) -> Option<Vec<PlacedSegment>> {
    let mut order: Vec<&BrickSpace> = rooms.iter().collect();
    order.sort_by_key(|room| (std::cmp::Reverse(room.free), room.brick));
    let most = |room: &BrickSpace| (room.headroom / PAGE * PAGE).min(SLICE_BYTES_MAX);
    let free = |room: &BrickSpace| {
        let free = u64::try_from(room.free.max(0)).unwrap_or(u64::MAX);
        (free / PAGE * PAGE).min(most(room))
    };
    let mut left = bytes;
    let mut shares: Vec<u64> = Vec::with_capacity(order.len());
    for room in &order {
        let share = left.min(free(room));
        left -= share;
        shares.push(share);
    }
    for (share, room) in shares.iter_mut().zip(&order) {
        let more = left.min(most(room) - *share);
        left -= more;
        *share += more;
    }
    let segments: Vec<_> = order
        .iter()
        .zip(shares)
        .filter(|(_, share)| *share > 0)
        .map(|(room, bytes)| PlacedSegment {
            bytes,
            columns: vec![vec![room.brick]],
        })
        .collect();
    (left == 0 && segments.len() <= SEGMENTS_MAX).then_some(segments)
}

#[derive(Clone, Copy)]
enum BrickOrder {
    /// Bricks with the fewest slices of this segment first, then the freest.
    FewestSlices,
    /// Domains with room for the most slices first. This finds a placement whenever one exists,
    /// because a column uses a domain at most once.
    RoomiestDomain,
}

fn place_columns(
    rooms: &[BrickSpace],
    shape: &Shape,
    slice: u64,
    order: BrickOrder,
) -> Option<Vec<Vec<BrickId>>> {
    let mut rooms = rooms.to_vec();
    let mut columns = Vec::with_capacity(shape.columns);
    for _ in 0..shape.columns {
        columns.push(choose_column(&mut rooms, shape.copies, slice, order)?);
    }
    Some(columns)
}

fn choose_column(
    rooms: &mut [BrickSpace],
    copies: usize,
    slice: u64,
    order: BrickOrder,
) -> Option<Vec<BrickId>> {
    let mut slots: BTreeMap<String, u64> = BTreeMap::new();
    for room in rooms.iter() {
        let count = slots.entry(room.domain.clone()).or_default();
        *count = count.saturating_add(room.headroom / slice);
    }
    let mut candidates: Vec<usize> = (0..rooms.len())
        .filter(|&at| rooms[at].headroom >= slice)
        .collect();
    candidates.sort_by_key(|&at| {
        let room = &rooms[at];
        let even = (room.slices, std::cmp::Reverse(room.free), room.brick);
        match order {
            BrickOrder::FewestSlices => (0, even),
            BrickOrder::RoomiestDomain => (u64::MAX - slots[&room.domain], even),
        }
    });
    let mut domains = BTreeSet::new();
    candidates.retain(|&at| domains.insert(rooms[at].domain.clone()));
    let chosen = candidates.get(..copies)?;
    for &at in chosen {
        rooms[at].reserve(slice);
    }
    Some(chosen.iter().map(|&at| rooms[at].brick).collect())
}

fn placement_error(
    candidates: &[BrickCandidate],
    pools: &[(Durability, Vec<BrickSpace>)],
    request: &PlacementRequest,
) -> PlacementError {
    let (shape, durability) = (request.shape, request.durability);
    let domains = |rooms: &Vec<BrickSpace>| {
        let names: BTreeSet<_> = rooms.iter().map(|room| &room.domain).collect();
        names.len()
    };
    let Some(most_domains) = pools.iter().map(|(_, rooms)| domains(rooms)).max() else {
        return PlacementError::NoBricks(durability);
    };
    if most_domains < shape.copies {
        return PlacementError::TooFewDomains {
            copies: shape.copies,
            domains: most_domains,
            durability,
        };
    }
    let usable = candidates
        .iter()
        .filter(|c| pools.iter().any(|(class, _)| *class == c.durability));
    let capacity = usable.fold(0u64, |sum, c| sum.saturating_add(c.capacity_bytes));
    let needed = u128::from(request.bytes) * shape.copies as u128;
    if needed > u128::from(capacity) * u128::from(request.overprovision_factor) {
        return PlacementError::BeyondCapacity {
            bytes: request.bytes,
            copies: shape.copies,
            factor: request.overprovision_factor,
            capacity_bytes: capacity,
            durability,
        };
    }
    let largest = pools
        .iter()
        .map(|(_, rooms)| largest_fit(rooms, &shape, request.bytes));
    PlacementError::NoRoom {
        bytes: request.bytes,
        largest_bytes: largest.max().unwrap_or(0),
    }
}

/// The largest size below `bytes` that has a placement; every smaller size has one, too.
fn largest_fit(rooms: &[BrickSpace], shape: &Shape, bytes: u64) -> u64 {
    let grain = shape.grain_bytes();
    let (mut fits, mut fails) = (0, bytes / grain);
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        match place_segments(rooms, shape, middle * grain) {
            Some(_) => fits = middle,
            None => fails = middle,
        }
    }
    fits * grain
}
