//! Where the slices of a new segment go.
//!
//! Pure: the same bricks and the same wish give the same answer. Invariants:
//! the copies of a column lie in different failure domains; all bricks of a
//! segment are of one durability class; no brick is promised more than its
//! capacity times the overprovisioning factor. If a placement exists within
//! these rules, one is found.
//!
//! Slices are thin, so bytes promised count, not bytes in use, except where
//! more is in use than was promised (page tables, other users of the pool).

use crate::durability::Durability;
use crate::shape::{Kind, Shape};
use pagemesh_base::layout::{BrickId, SEGMENTS_MAX, SLICE_BYTES_MAX};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};

/// Bytes of slices that a brick may be promised, for each byte of its
/// capacity. Thin volumes are rarely full, and a full pool fails writes
/// cleanly; but a promise that can never be kept should fail at once.
pub const OVERPROVISION_FACTOR: u64 = 4;

const PAGE: u64 = PAGE_BYTES as u64;

/// A brick that could take slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub brick: BrickId,
    /// What fails together.
    pub domain: String,
    /// Its class.
    pub durability: Durability,
    /// Bytes that slices can use.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes of all slices placed there.
    pub provisioned_bytes: u64,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Columns and copies.
    pub shape: Shape,
    /// Bytes, fitted to the shape.
    pub bytes: u64,
    /// The class it must be; none takes the strongest class that has room.
    pub durability: Option<Durability>,
    /// Bytes promised for each byte of capacity, at most.
    pub factor: u64,
}

/// A segment and the bricks of its legs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedSegment {
    /// Bytes of the segment.
    pub bytes: u64,
    /// For each column, the brick of each copy.
    pub columns: Vec<Vec<BrickId>>,
}

/// Where a wish goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The class of all its bricks.
    pub durability: Durability,
    /// One, or for a concatenation as many as it takes bricks.
    pub segments: Vec<PlacedSegment>,
}

/// Why there is no place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// No brick to look at.
    #[error("no brick{} is alive", class(*.0))]
    NoBricks(Option<Durability>),
    /// More copies than domains.
    #[error(
        "{copies} copies need {copies} failure domains, but the living bricks{} are in {domains}",
        durability.map_or_else(|| " of any one class".to_owned(), |_| class(*durability))
    )]
    TooFewDomains {
        /// Copies asked for.
        copies: usize,
        /// Domains there are: the most in any one class.
        domains: usize,
        /// The class asked for.
        durability: Option<Durability>,
    },
    /// Too large, whatever is deleted.
    #[error(
        "{bytes} bytes in {copies} copies are more than {factor} times the {capacity_bytes} bytes that the living bricks{} have in all",
        class(*durability)
    )]
    BeyondCapacity {
        /// Bytes of the volume.
        bytes: u64,
        /// Copies of each byte.
        copies: usize,
        /// Bytes promised per byte of capacity, at most.
        factor: u64,
        /// Bytes of all bricks that could be used.
        capacity_bytes: u64,
        /// The class asked for.
        durability: Option<Durability>,
    },
    /// Too large for now.
    #[error(
        "no bricks have room for {bytes} bytes in this layout; {largest_bytes} bytes would fit now"
    )]
    NoRoom {
        /// Bytes of the volume.
        bytes: u64,
        /// Bytes that would fit in the same layout.
        largest_bytes: u64,
    },
    /// A brick that already has a copy has no room for more of it.
    #[error("the brick {brick} has room for {room_bytes} bytes more, and not for {bytes}")]
    NoRoomOn {
        /// Which.
        brick: BrickId,
        /// Bytes that are wanted.
        bytes: u64,
        /// Bytes that it can be promised.
        room_bytes: u64,
    },
}

fn class(durability: Option<Durability>) -> String {
    durability.map_or_else(String::new, |class| format!(" of class {class}"))
}

/// Finds places.
///
/// # Errors
/// When there is none.
pub fn place(candidates: &[Candidate], wish: &Wish) -> Result<Placement, PlaceError> {
    let fits = |class| wish.durability.is_none_or(|wanted| wanted == class);
    let classes: BTreeSet<_> = candidates
        .iter()
        .map(|candidate| candidate.durability)
        .filter(|&class| fits(class))
        .collect();
    let pools: Vec<(Durability, Vec<Room>)> = classes
        .iter()
        .map(|&class| (class, rooms(candidates, class, wish.factor)))
        .collect();
    let placed = pools.iter().find_map(|(durability, rooms)| {
        let segments = place_in(rooms, &wish.shape, wish.bytes)?;
        Some(Placement {
            durability: *durability,
            segments,
        })
    });
    placed.ok_or_else(|| explain(candidates, &pools, wish))
}

/// A column that is to get a copy more.
#[derive(Clone, Debug)]
pub struct Thin {
    /// Bytes that a brick is promised to it.
    pub bytes: u64,
    /// The failure domains of the copies that it has.
    pub domains: BTreeSet<String>,
}

/// Finds a brick for a further copy of each column, by the same rules.
///
/// # Errors
/// When there is none for some column.
pub fn place_copy(
    candidates: &[Candidate],
    durability: Durability,
    factor: u64,
    columns: &[Thin],
) -> Result<Vec<BrickId>, PlaceError> {
    let mut rooms = rooms(candidates, durability, factor);
    if rooms.is_empty() {
        return Err(PlaceError::NoBricks(Some(durability)));
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
                None => PlaceError::TooFewDomains {
                    copies: column.domains.len() + 1,
                    domains: column.domains.len(),
                    durability: Some(durability),
                },
                Some(largest_bytes) => PlaceError::NoRoom {
                    bytes: column.bytes,
                    largest_bytes,
                },
            });
        };
        rooms[best].take(column.bytes);
        chosen.push(rooms[best].brick);
    }
    Ok(chosen)
}

/// What one brick has left.
#[derive(Clone, Debug)]
struct Room {
    brick: BrickId,
    domain: String,
    /// Capacity less what is used or promised; may be overdrawn.
    free: i128,
    /// What may still be promised.
    headroom: u64,
    /// Slices of this segment already put here.
    slices: usize,
}

impl Room {
    fn take(&mut self, bytes: u64) {
        self.free -= i128::from(bytes);
        self.headroom -= bytes;
        self.slices += 1;
    }
}

fn rooms(candidates: &[Candidate], class: Durability, factor: u64) -> Vec<Room> {
    let of_class = candidates.iter().filter(|c| c.durability == class);
    let mut rooms: Vec<Room> = of_class
        .map(|c| Room {
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

fn place_in(rooms: &[Room], shape: &Shape, bytes: u64) -> Option<Vec<PlacedSegment>> {
    if shape.kind == Kind::Concat {
        return chain(rooms, bytes);
    }
    let slice = bytes / shape.columns as u64;
    let columns = spread(rooms, shape, slice, Order::Evenly)
        .or_else(|| spread(rooms, shape, slice, Order::Roomiest))?;
    Some(vec![PlacedSegment { bytes, columns }])
}

/// A concatenation: first what bricks have free, the freest first, and only
/// then what they may be promised beyond.
fn chain(rooms: &[Room], bytes: u64) -> Option<Vec<PlacedSegment>> {
    let mut order: Vec<&Room> = rooms.iter().collect();
    order.sort_by_key(|room| (std::cmp::Reverse(room.free), room.brick));
    let most = |room: &Room| (room.headroom / PAGE * PAGE).min(SLICE_BYTES_MAX);
    let free = |room: &Room| {
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
enum Order {
    /// Bricks with the fewest slices of this segment first, then the freest.
    Evenly,
    /// Domains with room for the most slices first: finds a placement
    /// whenever there is one, as a column uses a domain at most once.
    Roomiest,
}

fn spread(rooms: &[Room], shape: &Shape, slice: u64, order: Order) -> Option<Vec<Vec<BrickId>>> {
    let mut rooms = rooms.to_vec();
    let mut columns = Vec::with_capacity(shape.columns);
    for _ in 0..shape.columns {
        columns.push(choose_column(&mut rooms, shape.copies, slice, order)?);
    }
    Some(columns)
}

fn choose_column(
    rooms: &mut [Room],
    copies: usize,
    slice: u64,
    order: Order,
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
            Order::Evenly => (0, even),
            Order::Roomiest => (u64::MAX - slots[&room.domain], even),
        }
    });
    let mut domains = BTreeSet::new();
    candidates.retain(|&at| domains.insert(rooms[at].domain.clone()));
    let chosen = candidates.get(..copies)?;
    for &at in chosen {
        rooms[at].take(slice);
    }
    Some(chosen.iter().map(|&at| rooms[at].brick).collect())
}

fn explain(candidates: &[Candidate], pools: &[(Durability, Vec<Room>)], wish: &Wish) -> PlaceError {
    let (shape, durability) = (wish.shape, wish.durability);
    let domains = |rooms: &Vec<Room>| {
        let names: BTreeSet<_> = rooms.iter().map(|room| &room.domain).collect();
        names.len()
    };
    let Some(most_domains) = pools.iter().map(|(_, rooms)| domains(rooms)).max() else {
        return PlaceError::NoBricks(durability);
    };
    if most_domains < shape.copies {
        return PlaceError::TooFewDomains {
            copies: shape.copies,
            domains: most_domains,
            durability,
        };
    }
    let usable = candidates
        .iter()
        .filter(|c| pools.iter().any(|(class, _)| *class == c.durability));
    let capacity = usable.fold(0u64, |sum, c| sum.saturating_add(c.capacity_bytes));
    let needed = u128::from(wish.bytes) * shape.copies as u128;
    if needed > u128::from(capacity) * u128::from(wish.factor) {
        return PlaceError::BeyondCapacity {
            bytes: wish.bytes,
            copies: shape.copies,
            factor: wish.factor,
            capacity_bytes: capacity,
            durability,
        };
    }
    let largest = pools
        .iter()
        .map(|(_, rooms)| largest(rooms, &shape, wish.bytes));
    PlaceError::NoRoom {
        bytes: wish.bytes,
        largest_bytes: largest.max().unwrap_or(0),
    }
}

/// The most bytes below `bytes` that have a place; what fits less fits, too.
fn largest(rooms: &[Room], shape: &Shape, bytes: u64) -> u64 {
    let grain = shape.grain_bytes();
    let (mut fits, mut fails) = (0, bytes / grain);
    while fails - fits > 1 {
        let middle = fits + (fails - fits) / 2;
        match place_in(rooms, shape, middle * grain) {
            Some(_) => fits = middle,
            None => fails = middle,
        }
    }
    fits * grain
}
