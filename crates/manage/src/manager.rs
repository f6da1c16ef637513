//! The manager's state: the contents of the store, and the state that matters only while the
//! manager runs (heartbeats and operations in progress).
//!
//! Invariants: memory changes only after the store, so a failed commit changes nothing. Callers
//! hold the lock over commits and never over calls to bricks.

use crate::access::{AccessState, TokenBook};
use crate::api_counters::ApiCounters;
use crate::call::CallContext;
use crate::clock::Clock;
use crate::device_book::DeviceBook;
use crate::events::{EventRing, Feed};
use crate::fault::Fault;
use crate::figure_history::Figures;
use crate::holder_signs::TrackedHolder;
use crate::key_index::KeyIndex;
use crate::nfs_book::NfsExports;
use crate::placement::{BrickCandidate, OVERPROVISION_FACTOR};
use crate::published::PublishedState;
use crate::records::{BrickRecord, PendingDelete, VolumeRecord};
use crate::slices::{SliceLocation, slice_locations};
use crate::snapshots::schedules::ScheduleTable;
use crate::snapshots::{CutOrders, CutTimes, SnapshotState, SnapshotTable};
use crate::store::{Store, StoreContents, StoreError};
use crate::volume_table::VolumeTable;
use crate::wire::{
    BrickAddress, BrickScrub, BrickTier, ClusterStatus, ReportReplication, ScrubRequest,
    ScrubState, SlicePages,
};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{BrickId, Segment, SliceId, VolumeName};
use pagemesh_base::slice::{BrickControl, SliceError};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;
use uuid::Uuid;

/// Interval of a brick's heartbeats: short enough to notice a loss within seconds, long enough that
/// an idle brick costs nothing.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(2);
/// A brick without a heartbeat for this long counts as dead: three are missing.
pub const DEAD_AFTER: Duration = Duration::from_secs(7);
/// Maximum number of volumes: memory holds all of them, and one answer lists them.
pub const VOLUMES_MAX: usize = 4096;
/// Maximum number of bricks, for the same reason.
pub const BRICKS_MAX: usize = 1024;
/// Maximum number of pending deletes; beyond it the manager creates no slices. A brick that loses
/// requests to create slices must not fill the store. Deletion continues beyond it.
pub const PENDING_DELETES_MAX: usize = 1 << 16;
/// Volumes with series of their own in `/metrics`, by default: each has about 90, of which Prometheus takes
/// thousands easily.
pub const METRIC_VOLUMES: usize = 20;

/// Limit of an order to an NFS server: its next report, the end of requests in progress, and a margin.
const NFS_ORDER_LIMIT: Duration = Duration::from_secs(25);

/// How the manager reaches bricks.
pub trait BrickConnector: Send + Sync {
    /// Opens a control connection to the brick at `host:port`; this may block for a bounded time.
    ///
    /// # Errors
    /// When the brick cannot be reached or does not know the cluster's key.
    fn control(&self, address: &str) -> Result<Box<dyn BrickControl>, SliceError>;
}

/// The times of streams of changes.
#[derive(Clone, Copy, Debug)]
pub struct WatchTimes {
    /// Clients get the summary of the cluster and the bricks that have changed this often: heartbeats
    /// change used bytes and scrubs, and come as often.
    pub compare_every: Duration,
    /// Clients get the summary of the cluster this often even if it has not changed. So they know the
    /// age of all that they show.
    pub status_every: Duration,
    /// A stream without messages for this long gets a comment, so that its client notices a lost
    /// connection.
    pub comment_every: Duration,
    /// A stream ends this long after its credential has become invalid.
    pub check_every: Duration,
    /// A stream ends if its client takes no message for this long.
    pub write_limit: Duration,
}

impl Default for WatchTimes {
    fn default() -> WatchTimes {
        WatchTimes {
            compare_every: HEARTBEAT_INTERVAL,
            status_every: Duration::from_secs(10),
            comment_every: Duration::from_secs(15),
            check_every: Duration::from_secs(5),
            write_limit: Duration::from_secs(30),
        }
    }
}

/// The manager's settings.
#[derive(Clone, Copy, Debug)]
pub struct ManagerSettings {
    /// A brick without a heartbeat for this long counts as dead.
    pub dead_after: Duration,
    /// Bytes of slices that a brick may be promised, for each byte of capacity.
    pub overprovision_factor: u64,
    /// Generates ids of volumes and slices; they must never repeat.
    pub new_id: fn() -> Uuid,
    /// The times of streams of changes.
    pub watch: WatchTimes,
    /// Most volumes with series of their own in `/metrics`.
    pub metric_volumes: usize,
    /// The times of cuts for snapshots.
    pub cut: CutTimes,
    /// Limit of an order to an NFS server, which reports each 10 s. It is shorter than the limit of a request.
    pub nfs_order: Duration,
}

impl Default for ManagerSettings {
    fn default() -> ManagerSettings {
        ManagerSettings {
            dead_after: DEAD_AFTER,
            overprovision_factor: OVERPROVISION_FACTOR,
            new_id: Uuid::new_v4,
            watch: WatchTimes::default(),
            metric_volumes: METRIC_VOLUMES,
            cut: CutTimes::default(),
            nfs_order: NFS_ORDER_LIMIT,
        }
    }
}

/// A handle of the manager, without its HTTP server. Calls block on the store's disk; calls that say
/// so also block on bricks. Clones share all state; each has a request of its own to act for.
#[derive(Clone)]
pub struct Manager {
    pub(crate) store: Arc<Store>,
    pub(crate) bricks: Arc<dyn BrickConnector>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) settings: ManagerSettings,
    /// The clock's time at the manager's start.
    pub(crate) started_at: Duration,
    state: Arc<Mutex<ManagerState>>,
    /// The wall clock's time at the manager's start, for people.
    pub(crate) started_unix_ms: u64,
    pub(crate) events: Arc<Mutex<EventRing>>,
    pub(crate) feed: Arc<Feed>,
    /// The state that watching clients have.
    pub(crate) published: Arc<Mutex<PublishedState>>,
    pub(crate) figures: Arc<Figures>,
    pub(crate) nfs_exports: Arc<NfsExports>,
    pub(crate) api_counters: Arc<ApiCounters>,
    /// The tokens.
    pub(crate) access: Arc<AccessState>,
    /// Orders to cut volumes for snapshots.
    pub(crate) cut_orders: Arc<CutOrders>,
    /// Wakes the sweep when a brick with slices to delete returns, or a snapshot was given up.
    pub(crate) brick_returned: Arc<tokio::sync::Notify>,
    /// The request that this handle acts for.
    pub(crate) call: CallContext,
}

/// A brick and its heartbeats.
#[derive(Clone, Debug)]
pub(crate) struct BrickState {
    pub record: BrickRecord,
    pub last_heartbeat: Option<LastHeartbeat>,
    /// The scrub request that the brick has not carried out yet.
    pub scrub_request: Option<ScrubRequest>,
    /// The actor of the last scrub request.
    pub scrub_actor: Option<String>,
    /// The devices of its pool, and requests to change them.
    pub devices: DeviceBook,
    /// The tier of its pool, if it has one.
    pub tier: Option<BrickTier>,
    /// The pages of its slices in memory and on flash.
    pub tier_pages: Arc<BTreeMap<SliceId, SlicePages>>,
    /// The last state that the sweep logged, so that it logs changes only.
    pub logged_alive: bool,
}

/// The last heartbeat.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastHeartbeat {
    pub received_at: Duration,
    pub sessions: u32,
    pub scrub: Option<BrickScrub>,
}

/// A pending delete.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TrackedDelete {
    pub record: PendingDelete,
    /// The time of the brick's first answer that it has no such slice.
    pub absent_since: Option<Duration>,
}

impl TrackedDelete {
    pub(crate) fn new(record: PendingDelete) -> TrackedDelete {
        TrackedDelete {
            record,
            absent_since: None,
        }
    }
}

/// The state that the lock guards.
#[derive(Default)]
pub(crate) struct ManagerState {
    pub bricks: BTreeMap<BrickId, BrickState>,
    pub volumes: VolumeTable,
    pub pending_deletes: BTreeMap<(BrickId, SliceId), TrackedDelete>,
    /// Slices of volumes that are being created or grown.
    pub creating: BTreeMap<VolumeName, Vec<SliceLocation>>,
    /// The last pending delete that the sweep tried.
    pub sweep_cursor: Option<(BrickId, SliceId)>,
    /// The last reports of clients about their copies, and the time of each. A restarted manager
    /// has no use for them, so the store does not hold them.
    pub replication_reports: BTreeMap<VolumeName, (Duration, ReportReplication)>,
    /// The signs of life of clients, for the same reason.
    pub holders: BTreeMap<VolumeName, TrackedHolder>,
    /// The kept answers of calls with keys.
    pub keys: KeyIndex,
    /// The snapshots of volumes.
    pub snapshots: SnapshotTable,
    /// The schedules of snapshots.
    pub schedules: ScheduleTable,
    /// The progress of copies of versions to legs that lack them.
    pub version_copies: crate::snapshots::VersionCopies,
}

impl ManagerState {
    pub(crate) fn is_being_created(&self, slice: SliceId) -> bool {
        let mut places = self.creating.values().flatten();
        places.any(|place| place.slice == slice)
    }

    pub(crate) fn volume(&self, name: &VolumeName) -> Result<&VolumeRecord, Fault> {
        let volume = self.volumes.get(name);
        volume.ok_or_else(|| Fault::NoSuchVolume(name.clone()))
    }

    /// Promised bytes and number of slices, by brick.
    pub(crate) fn provisioned(&self) -> BTreeMap<BrickId, (u64, usize)> {
        let mut sums = self.volumes.promised();
        for place in self.creating.values().flatten() {
            let (bytes, slices) = sums.entry(place.brick).or_default();
            *bytes = bytes.saturating_add(place.bytes);
            *slices += 1;
        }
        sums
    }

    /// The addresses of the bricks of segments.
    pub(crate) fn addresses(&self, segments: &[Segment]) -> BTreeMap<BrickId, BrickAddress> {
        let known = |place: SliceLocation| {
            let record = &self.bricks.get(&place.brick)?.record;
            let address = BrickAddress {
                name: record.name.clone(),
                tcp: record.address.clone(),
                map_socket: record.map_socket.clone(),
                durability: record.durability,
            };
            Some((place.brick, address))
        };
        slice_locations(segments).filter_map(known).collect()
    }
}

impl Manager {
    /// Reads the store and continues from the last manager's state. Bricks are dead until their
    /// first heartbeat.
    ///
    /// # Errors
    /// When the store cannot be read, or cannot take the event of the start.
    pub fn new(
        store: Store,
        bricks: Arc<dyn BrickConnector>,
        clock: Arc<dyn Clock>,
        settings: ManagerSettings,
    ) -> Result<Manager, StoreError> {
        let mut contents = store.load()?;
        let tokens = std::mem::take(&mut contents.tokens);
        let tokens = TokenBook::new(tokens, contents.token_mark_unix_s, clock.elapsed());
        let access = Arc::new(AccessState::new(tokens, contents.admin_token_made));
        let brick = |record: BrickRecord| BrickState {
            record,
            last_heartbeat: None,
            scrub_request: None,
            scrub_actor: None,
            devices: DeviceBook::default(),
            tier: None,
            tier_pages: Arc::default(),
            logged_alive: false,
        };
        let doom =
            |record: PendingDelete| ((record.brick, record.slice), TrackedDelete::new(record));
        let snapshots = load_snapshots(&mut contents, clock.elapsed());
        let book = ManagerState {
            snapshots,
            schedules: ScheduleTable::new(std::mem::take(&mut contents.schedules)),
            bricks: contents
                .bricks
                .into_iter()
                .map(|record| (record.brick, brick(record)))
                .collect(),
            volumes: VolumeTable::new(contents.volumes),
            keys: KeyIndex::new(&contents.answers),
            pending_deletes: contents.pending_deletes.into_iter().map(doom).collect(),
            ..ManagerState::default()
        };
        let ring = EventRing::new(contents.events, contents.dropped_event_seq);
        let started_unix_ms = clock.unix_ms();
        let manager = Manager {
            started_at: clock.elapsed(),
            store: Arc::new(store),
            bricks,
            clock,
            settings,
            state: Arc::new(Mutex::new(book)),
            started_unix_ms,
            feed: Arc::new(Feed::new(ring.last_seq())),
            published: Arc::default(),
            events: Arc::new(Mutex::new(ring)),
            access,
            figures: Arc::new(Figures::new(settings.metric_volumes)),
            nfs_exports: Arc::default(),
            api_counters: Arc::default(),
            cut_orders: Arc::default(),
            brick_returned: Arc::default(),
            call: CallContext::default(),
        };
        manager.record_start()?;
        Ok(manager)
    }

    /// The same manager, for another request.
    #[must_use]
    pub fn acting_for(&self, call: CallContext) -> Manager {
        Manager {
            call,
            ..self.clone()
        }
    }

    /// The actor of the request, as events name it.
    pub(crate) fn actor(&self) -> String {
        self.call.actor.to_string()
    }

    /// Whether the store failed to write a change, so that the manager takes none.
    #[must_use]
    pub fn has_store_failed(&self) -> bool {
        self.store.has_failed()
    }

    /// Locks the state. A panic leaves it consistent, because code replaces it only after a commit;
    /// so a poisoned lock is usable.
    pub(crate) fn state(&self) -> MutexGuard<'_, ManagerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the state, unless another call holds the lock, perhaps during a commit.
    pub(crate) fn try_state(&self) -> Option<MutexGuard<'_, ManagerState>> {
        match self.state.try_lock() {
            Ok(book) => Some(book),
            Err(TryLockError::Poisoned(panicked)) => Some(panicked.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether a brick counts as dead: no heartbeat arrived for the configured time, counted from
    /// the last heartbeat or else from this manager's start.
    pub(crate) fn is_dead(&self, brick: &BrickState) -> bool {
        let heard = brick
            .last_heartbeat
            .map_or(self.started_at, |seen| seen.received_at);
        self.clock.elapsed().saturating_sub(heard) >= self.settings.dead_after
    }

    pub(crate) fn is_alive(&self, brick: &BrickState) -> bool {
        let now = self.clock.elapsed();
        let recent =
            |seen: LastHeartbeat| now.saturating_sub(seen.received_at) < self.settings.dead_after;
        brick.last_heartbeat.is_some_and(recent)
    }

    /// The bricks that new slices may use.
    pub(crate) fn candidates(&self, book: &ManagerState) -> Vec<BrickCandidate> {
        let provisioned = book.provisioned();
        let alive = book.bricks.values().filter(|brick| self.is_alive(brick));
        alive
            .map(|BrickState { record, .. }| BrickCandidate {
                brick: record.brick,
                domain: record.domain.clone(),
                durability: record.durability,
                capacity_bytes: record.capacity_bytes,
                used_bytes: record.used_bytes,
                provisioned_bytes: provisioned.get(&record.brick).map_or(0, |sum| sum.0),
            })
            .collect()
    }

    /// A summary of the cluster.
    #[must_use]
    pub fn status(&self) -> ClusterStatus {
        self.status_of(&self.state())
    }

    pub(crate) fn status_of(&self, book: &ManagerState) -> ClusterStatus {
        let sum = |of: fn(&BrickRecord) -> u64| {
            let figures = book.bricks.values().map(|brick| of(&brick.record));
            figures.fold(0u64, u64::saturating_add)
        };
        let provisioned = book.provisioned();
        let volumes = || book.volumes.entries().values();
        let schedules = self.count_schedules(book);
        let seen = book
            .bricks
            .values()
            .filter_map(|brick| brick.last_heartbeat);
        let scrubs: Vec<BrickScrub> = seen.filter_map(|seen| seen.scrub).collect();
        let count = |of: fn(&BrickScrub) -> u64| {
            let counts = scrubs.iter().map(of);
            counts.fold(0u64, u64::saturating_add)
        };
        let scrubbing = |brick: &&BrickState| {
            let scrub = brick.last_heartbeat.and_then(|seen| seen.scrub);
            let runs = scrub.is_some_and(|scrub| scrub.state == ScrubState::Running);
            runs && self.is_alive(brick)
        };
        ClusterStatus {
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
            volumes_attached: volumes()
                .filter(|it| it.record.attachment.is_some())
                .count(),
            volumes_degraded: volumes().filter(|it| it.summary.is_degraded).count(),
            pending_deletions: book.pending_deletes.len(),
            bricks_scrubbing: book.bricks.values().filter(scrubbing).count(),
            scrubs_corrected: count(|scrub| scrub.corrected),
            scrubs_damaged: count(BrickScrub::damaged),
            store_failed: self.store.has_failed(),
            schedules: schedules.ok + schedules.warning + schedules.critical,
            schedules_warning: schedules.warning,
            schedules_critical: schedules.critical,
        }
    }
}

/// The snapshots of a store. A cut that ran when the manager ended is void: the bricks drop the snapshot.
fn load_snapshots(contents: &mut StoreContents, now: Duration) -> SnapshotTable {
    let layouts = contents.volumes.iter().map(|it| &it.layout_state.layout);
    let names: BTreeMap<Uuid, VolumeName> =
        layouts.map(|it| (it.volume, it.name.clone())).collect();
    let mut table = SnapshotTable::default();
    for layout in std::mem::take(&mut contents.snapshot_layouts) {
        if let Some(name) = names.get(&layout.volume) {
            table.put_layout(name, Arc::new(layout));
        }
    }
    for mut record in std::mem::take(&mut contents.snapshots) {
        if record.state == SnapshotState::Preparing {
            record.state = match defect::is(Defect::UncommittedSnapshotListed) {
                true => SnapshotState::Committed,
                false => SnapshotState::Deleting,
            };
        }
        if let Some(name) = names.get(&record.volume) {
            table.put(name, record, now);
        }
    }
    for bookmark in std::mem::take(&mut contents.bookmarks) {
        if let Some(name) = names.get(&bookmark.volume) {
            table.put_bookmark(name, bookmark);
        }
    }
    table
}
