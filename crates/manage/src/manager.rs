//! The manager's state: what the store holds, and what only matters while the
//! manager runs (heartbeats, and what is under way).
//!
//! Invariants: memory follows the store, so a failed commit changes nothing;
//! the lock is held over commits and never over calls to bricks.

use crate::clock::Clock;
use crate::fault::Fault;
use crate::placement::{Candidate, OVERPROVISION_FACTOR};
use crate::records::{BrickRecord, Doomed, VolumeRecord};
use crate::store::{Store, StoreError};
use crate::wire::{BrickAddress, BrickScrub, ScrubState, ScrubWish, Status, TellCopies};
use pagemesh_base::layout::{BrickId, Segment, SliceId, VolumeName};
use pagemesh_base::slice::{BrickControl, SliceError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;
use uuid::Uuid;

/// How often a brick sends a heartbeat: often enough that a loss is seen
/// within seconds, seldom enough that idle bricks cost nothing.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// Without a heartbeat for so long a brick counts as dead: three are missing.
pub const DEAD_AFTER: Duration = Duration::from_secs(7);
/// Volumes: all of them are kept in memory and listed in one answer.
pub const VOLUMES_MAX: usize = 4096;
/// Bricks, for the same reason.
pub const BRICKS_MAX: usize = 1024;
/// Slices to delete, beyond which none are made: a brick that loses requests
/// to make slices must not fill the store. Deleting goes on beyond it.
pub const DOOMED_MAX: usize = 1 << 16;

/// How the manager reaches bricks.
pub trait Bricks: Send + Sync {
    /// A connection for control to the brick at `host:port`; opening it may
    /// block for a bounded time.
    ///
    /// # Errors
    /// When the brick cannot be reached or does not know the cluster's key.
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError>;
}

/// What can be set.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Without a heartbeat for so long a brick counts as dead.
    pub dead_after: Duration,
    /// Bytes of slices that a brick may be promised per byte of capacity.
    pub overprovision_factor: u64,
    /// Names volumes and slices; no two may ever be the same.
    pub new_id: fn() -> Uuid,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            dead_after: DEAD_AFTER,
            overprovision_factor: OVERPROVISION_FACTOR,
            new_id: Uuid::new_v4,
        }
    }
}

/// The manager, without its HTTP server. Calls block: on the store's disk,
/// and where they say so on bricks.
pub struct Manager {
    pub(crate) store: Store,
    pub(crate) bricks: Arc<dyn Bricks>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) settings: Settings,
    /// By its clock, when it began.
    since: Duration,
    book: Mutex<Book>,
    /// Wakes the sweep when a brick with slices to delete returns.
    pub(crate) returned: tokio::sync::Notify,
}

/// A brick and its heartbeats.
#[derive(Clone, Debug)]
pub(crate) struct Brick {
    pub record: BrickRecord,
    pub seen: Option<Seen>,
    /// What it was asked to do and has not fulfilled yet.
    pub wish: Option<ScrubWish>,
    /// What the sweep told last, so that it tells changes only.
    pub told_alive: bool,
}

/// The last heartbeat.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub at: Duration,
    pub sessions: u32,
    pub scrub: Option<BrickScrub>,
}

/// A slice and where it is, or will be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub brick: BrickId,
    pub slice: SliceId,
    pub bytes: u64,
}

/// A slice to delete.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Doom {
    pub record: Doomed,
    /// When its brick first said that there is none.
    pub absent_since: Option<Duration>,
}

impl Doom {
    pub(crate) fn new(record: Doomed) -> Doom {
        Doom {
            record,
            absent_since: None,
        }
    }
}

/// Everything the lock guards.
#[derive(Default)]
pub(crate) struct Book {
    pub bricks: BTreeMap<BrickId, Brick>,
    pub volumes: BTreeMap<VolumeName, VolumeRecord>,
    pub doomed: BTreeMap<(BrickId, SliceId), Doom>,
    /// Slices being made for a volume that is created or grown.
    pub building: BTreeMap<VolumeName, Vec<Place>>,
    /// The last doomed slice that the sweep has tried.
    pub swept_to: Option<(BrickId, SliceId)>,
    /// What clients told last of copies that follow, and when. It is worth nothing to a
    /// manager that starts, so it is not stored.
    pub told: BTreeMap<VolumeName, (Duration, TellCopies)>,
}

/// The slices of segments.
pub(crate) fn places(segments: &[Segment]) -> impl Iterator<Item = Place> {
    segments.iter().flat_map(|segment| {
        let legs = segment.columns.iter().flat_map(|column| &column.legs);
        legs.map(|leg| Place {
            brick: leg.brick,
            slice: leg.slice,
            bytes: segment.slice_bytes(),
        })
    })
}

/// The same, with the bytes that bricks are promised to them.
pub(crate) fn promised(
    segments: &[Segment],
    files_bytes: Option<u64>,
) -> impl Iterator<Item = Place> {
    places(segments).map(move |place| Place {
        bytes: place.bytes.min(files_bytes.unwrap_or(u64::MAX)),
        ..place
    })
}

impl Book {
    /// Every slice that is, or is about to be, part of a volume.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> {
        let volumes = self.volumes.values();
        volumes
            .flat_map(|volume| promised(&volume.ledger.layout.segments, volume.files_bytes))
            .chain(self.building.values().flatten().cloned())
    }

    pub(crate) fn is_building(&self, slice: SliceId) -> bool {
        let mut places = self.building.values().flatten();
        places.any(|place| place.slice == slice)
    }

    pub(crate) fn volume(&self, name: &VolumeName) -> Result<&VolumeRecord, Fault> {
        let volume = self.volumes.get(name);
        volume.ok_or_else(|| Fault::NoSuchVolume(name.clone()))
    }

    /// Bytes and number of slices by brick.
    pub(crate) fn provisioned(&self) -> BTreeMap<BrickId, (u64, usize)> {
        let mut sums: BTreeMap<BrickId, (u64, usize)> = BTreeMap::new();
        for place in self.places() {
            let (bytes, slices) = sums.entry(place.brick).or_default();
            *bytes = bytes.saturating_add(place.bytes);
            *slices += 1;
        }
        sums
    }

    /// Where the bricks of segments are.
    pub(crate) fn addresses(&self, segments: &[Segment]) -> BTreeMap<BrickId, BrickAddress> {
        let known = |place: Place| {
            let record = &self.bricks.get(&place.brick)?.record;
            let address = BrickAddress {
                tcp: record.address.clone(),
                map_socket: record.map_socket.clone(),
                durability: record.durability,
            };
            Some((place.brick, address))
        };
        places(segments).filter_map(known).collect()
    }
}

impl Manager {
    /// Reads the store and goes on where the last manager ended. Bricks are
    /// dead until their first heartbeat.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn new(
        store: Store,
        bricks: Arc<dyn Bricks>,
        clock: Arc<dyn Clock>,
        settings: Settings,
    ) -> Result<Manager, StoreError> {
        let contents = store.load()?;
        let brick = |record: BrickRecord| Brick {
            record,
            seen: None,
            wish: None,
            told_alive: false,
        };
        let volume = |record: VolumeRecord| (record.ledger.layout.name.clone(), record);
        let doom = |record: Doomed| ((record.brick, record.slice), Doom::new(record));
        let book = Book {
            bricks: contents
                .bricks
                .into_iter()
                .map(|record| (record.brick, brick(record)))
                .collect(),
            volumes: contents.volumes.into_iter().map(volume).collect(),
            doomed: contents.doomed.into_iter().map(doom).collect(),
            ..Book::default()
        };
        Ok(Manager {
            since: clock.elapsed(),
            store,
            bricks,
            clock,
            settings,
            book: Mutex::new(book),
            returned: tokio::sync::Notify::new(),
        })
    }

    /// Memory is only ever replaced after a commit, so what a panic leaves
    /// behind is whole.
    pub(crate) fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, unless another call has it, which may be waiting for the store.
    pub(crate) fn book_unless_in_use(&self) -> Option<MutexGuard<'_, Book>> {
        match self.book.try_lock() {
            Ok(book) => Some(book),
            Err(TryLockError::Poisoned(panicked)) => Some(panicked.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether nothing was heard of a brick for so long that it is taken for dead, though
    /// this manager was there to hear it.
    pub(crate) fn is_dead(&self, brick: &Brick) -> bool {
        let heard = brick.seen.map_or(self.since, |seen| seen.at);
        self.clock.elapsed().saturating_sub(heard) >= self.settings.dead_after
    }

    pub(crate) fn is_alive(&self, brick: &Brick) -> bool {
        let now = self.clock.elapsed();
        let recent = |seen: Seen| now.saturating_sub(seen.at) < self.settings.dead_after;
        brick.seen.is_some_and(recent)
    }

    /// The bricks that new slices may go to.
    pub(crate) fn candidates(&self, book: &Book) -> Vec<Candidate> {
        let provisioned = book.provisioned();
        let alive = book.bricks.values().filter(|brick| self.is_alive(brick));
        alive
            .map(|Brick { record, .. }| Candidate {
                brick: record.brick,
                domain: record.domain.clone(),
                durability: record.durability,
                capacity_bytes: record.capacity_bytes,
                used_bytes: record.used_bytes,
                provisioned_bytes: provisioned.get(&record.brick).map_or(0, |sum| sum.0),
            })
            .collect()
    }

    /// The cluster at a glance.
    #[must_use]
    pub fn status(&self) -> Status {
        let book = self.book();
        let sum = |of: fn(&BrickRecord) -> u64| {
            let figures = book.bricks.values().map(|brick| of(&brick.record));
            figures.fold(0u64, u64::saturating_add)
        };
        let provisioned = book.provisioned();
        let volumes = || book.volumes.values();
        let seen = book.bricks.values().filter_map(|brick| brick.seen);
        let scrubs: Vec<BrickScrub> = seen.filter_map(|seen| seen.scrub).collect();
        let count = |of: fn(&BrickScrub) -> u64| {
            let counts = scrubs.iter().map(of);
            counts.fold(0u64, u64::saturating_add)
        };
        let scrubbing = |brick: &&Brick| {
            let scrub = brick.seen.and_then(|seen| seen.scrub);
            let runs = scrub.is_some_and(|scrub| scrub.state == ScrubState::Running);
            runs && self.is_alive(brick)
        };
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            bricks: book.bricks.len(),
            bricks_alive: book.bricks.values().filter(|b| self.is_alive(b)).count(),
            capacity_bytes: sum(|record| record.capacity_bytes),
            used_bytes: sum(|record| record.used_bytes),
            provisioned_bytes: provisioned
                .values()
                .fold(0, |all, sum| all.saturating_add(sum.0)),
            overprovision_factor: self.settings.overprovision_factor,
            volumes: book.volumes.len(),
            volumes_attached: volumes().filter(|v| v.attachment.is_some()).count(),
            volumes_degraded: volumes()
                .filter(|v| v.ledger.layout.columns().any(|column| column.round != 0))
                .count(),
            pending_deletions: book.doomed.len(),
            bricks_scrubbing: book.bricks.values().filter(scrubbing).count(),
            scrubs_mended: count(|scrub| scrub.mended),
            scrubs_damaged: count(BrickScrub::damaged),
        }
    }
}
