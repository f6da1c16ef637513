//! The owner's side of a pool: opening, objects, sessions, epochs.
//!
//! Invariants:
//! - one owner at a time (the caller holds a lock on the pool's file);
//! - objects change by records in the owner's own journal, journal 0;
//! - an entry of the object table is used again only after a checkpoint has passed the record that
//!   freed it;
//! - the owner does not delay sessions: they need it only for frames and for room in their journal.

mod tier;

use super::checkpoint::CheckpointPass;
pub use super::devices::PreparedDevice;
pub use super::error::ObjectError;
use crate::defect::{self, Defect};
use crate::format::bitmap::Bitmap;
use crate::format::device_paths::DevicePaths;
use crate::format::geometry::{Geometry, OBJECT_BYTES};
use crate::format::in_flight;
use crate::format::object::{Object, ObjectRole, ObjectState};
use crate::format::superblock::{BitmapEnds, Features, Superblock};
use crate::format::version_log::VersionLogPlace;
use crate::owner::frame_allocator::FrameAllocator;
use crate::owner::session_table::SessionTable;
use crate::owner::version_store::{CloneWork, VersionStore};
use crate::recovery::{
    PoolError, RecoveryResult, RecoverySummary, read_superblock_of_first, recover, write_superblock,
};
use crate::session::Session;
use crate::session::leaf_cache::LeafCache;
use crate::shared::control::Control;
use crate::shared::error::StoreError;
use crate::shared::pool_mapping::PoolMapping;
use pagemesh_base::ids::{Epoch, Incarnation, ObjectId, Seq};
use pagemesh_base::layout::SliceId;
use pagemesh_base::media_bytes::MediaBytes;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Media, StatedClass, UnfencedStores};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tier::TierState;
pub use tier::TierUsage;
use uuid::Uuid;

/// The owner's session.
pub(crate) const OWNER_SESSION: u32 = 0;

/// A pool, opened by its owner.
pub struct Pool<M> {
    pub(crate) mapping: Arc<PoolMapping<M>>,
    pub(crate) superblock: Superblock,
    pub(crate) frame_allocator: FrameAllocator,
    pub(crate) sessions: SessionTable,
    pub(crate) owner_session: Session<M>,
    pub(crate) leaf_cache: LeafCache,
    pub(crate) checkpoint_pass: CheckpointPass,
    pub(crate) in_flight: in_flight::InFlightTable,
    pub(crate) objects: HashMap<ObjectId, Object>,
    pub(super) by_slice: HashMap<SliceId, ObjectId>,
    /// Entries that the medium damaged, and the slices that they claim to belong to.
    pub(super) lost_objects: Vec<(ObjectId, SliceId)>,
    /// Free entries, and freed entries that wait for a checkpoint.
    pub(super) free_objects: Vec<ObjectId>,
    pub(super) freed_objects: Vec<(Seq, ObjectId)>,
    /// Objects with frames that are being freed: the seq of their deletion.
    pub(crate) deleting: Vec<(Seq, ObjectId)>,
    /// Deletions that wait until the operations in progress have ended.
    pub(super) pending_deletes: HashMap<SliceId, (Seq, ObjectId)>,
    /// Journal records with a flipped bit that were corrected.
    pub(crate) corrected_records: u64,
    /// Superblocks rewritten since the last scrub.
    pub(crate) rewritten_superblocks: u64,
    /// The corrections that a scrub has counted.
    pub(crate) reported_records: u64,
    pub(crate) reported_slots: u64,
    pub(crate) has_failed: bool,
    pub(super) tier: TierState,
    pub(super) versions: VersionStore,
    pub(super) clones: CloneWork,
    /// Bytes that the owner wrote, apart from its journal and the in-flight table.
    pub(super) owner_bytes: MediaBytes,
}

/// The usage of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The size of all frames, without those of draining devices.
    pub capacity_bytes: u64,
    /// Bytes neither in use nor granted to a session.
    pub free_bytes: u64,
    /// Open sessions, without the owner's own.
    pub sessions: u32,
}

/// Formats a medium as a pool.
///
/// **Data loss:** everything on the medium is lost.
///
/// # Errors
/// When the medium is too small or too large, or fails.
pub fn format<M: Media>(media: &M, pool: Uuid) -> Result<(), PoolError> {
    format_as(media, pool, FormatOptions::of(media))
}

/// The properties of a new pool.
#[derive(Clone, Copy, Debug)]
pub struct FormatOptions {
    /// The size of its first device.
    pub pool_bytes: u64,
    /// Its journals, one more than its sessions. None: by its size.
    pub journals: Option<u32>,
    /// The durability class that its creator states.
    pub stated: Option<StatedClass>,
    /// The boot of the machine that ends the pool.
    pub boot: Option<Uuid>,
}

impl FormatOptions {
    /// Those of a pool that takes a whole medium and has the medium's class.
    pub fn of<M: Media>(media: &M) -> FormatOptions {
        FormatOptions {
            pool_bytes: media.len_bytes() as u64,
            journals: None,
            stated: None,
            boot: None,
        }
    }
}

/// As [`format()`], with options.
///
/// # Errors
/// As [`format()`].
pub fn format_as<M: Media>(media: &M, pool: Uuid, options: FormatOptions) -> Result<(), PoolError> {
    let FormatOptions {
        pool_bytes,
        journals,
        stated,
        boot,
    } = options;
    let geometry = Geometry::plan_with(pool_bytes, journals)?;
    for region in [geometry.objects, geometry.in_flight] {
        for at in (region.start..region.end()).step_by(PAGE_BYTES) {
            zero_page_if_needed(media, at as usize);
        }
    }
    for tables in geometry.device_frames() {
        Bitmap::format(media, &tables, pool);
    }
    let block = Superblock {
        pool,
        generation: 1,
        incarnation: Incarnation(0),
        epoch: Epoch(1),
        checkpoint: Seq(1),
        used_frames: 0,
        bitmap_ends: BitmapEnds::of_new(&geometry),
        objects_end: 0,
        journals_end: OWNER_SESSION + 1,
        stated,
        boot,
        features: Features::NEW,
        journal_heads: vec![0; geometry.journals as usize],
        device_paths: DevicePaths::default(),
        version_log: VersionLogPlace::default(),
        geometry,
    };
    zero_page_if_needed(media, 0);
    media.sync()?;
    write_superblock(media, &block)?;
    Ok(())
}

fn zero_page_if_needed<M: Media>(media: &M, at: usize) {
    let mut page = [0; PAGE_BYTES];
    media.read(at, &mut page);
    if page.iter().any(|&byte| byte != 0) {
        let (_, stores) = M::stream_page(&[(media, at)], &[0; PAGE_BYTES]);
        let _fenced = media.fence(stores);
    }
}

impl<M: Media> Pool<M> {
    /// Recovers a pool and opens it. On a `file-sync` medium `overlay` is a private mapping of that
    /// medium; otherwise it is the same medium.
    ///
    /// # Errors
    /// When the medium holds no pool, or a damaged one.
    pub fn open(media: Arc<M>, overlay: Arc<M>) -> Result<(Pool<M>, RecoverySummary), PoolError> {
        Pool::open_without(media, overlay, &[])
    }

    /// The same without devices that have failed. The pool names them as failed, and does not use them again.
    ///
    /// **Data loss:** the pages on these devices are damaged from then on.
    ///
    /// # Errors
    /// As [`Pool::open`].
    pub fn open_without(
        media: Arc<M>,
        overlay: Arc<M>,
        failed: &[Uuid],
    ) -> Result<(Pool<M>, RecoverySummary), PoolError> {
        let ordered = Arc::ptr_eq(&media, &overlay);
        let trial = (!ordered).then_some(&*overlay);
        let RecoveryResult {
            block,
            bitmap,
            summary: recovered,
            ..
        } = recover(&*media, ordered, trial, failed)?;
        let geometry = block.geometry;
        let heat_frames = media
            .buffers_from()
            .map_or(0, |_| geometry.first_frames().end);
        let (journals, opening) = (geometry.journals, block.incarnation);
        let control = Control::create(journals, heat_frames, opening, block.checkpoint)?;
        let mapping = PoolMapping::new(
            media,
            overlay,
            control,
            geometry,
            block.pool,
            block.incarnation,
        );
        let mapping = Arc::new(mapping);
        let journals = SessionTable::new(&mapping, &block);
        let mut pool = Pool {
            frame_allocator: FrameAllocator::new(bitmap),
            owner_session: Session::for_owner(mapping.clone(), OWNER_SESSION),
            in_flight: in_flight::InFlightTable::load(&*mapping.data, geometry.in_flight),
            sessions: journals,
            leaf_cache: LeafCache::new(),
            checkpoint_pass: CheckpointPass::default(),
            objects: HashMap::new(),
            by_slice: HashMap::new(),
            lost_objects: Vec::new(),
            free_objects: Vec::new(),
            freed_objects: Vec::new(),
            deleting: Vec::new(),
            pending_deletes: HashMap::new(),
            corrected_records: 0,
            rewritten_superblocks: 0,
            reported_records: 0,
            reported_slots: 0,
            has_failed: false,
            tier: TierState::default(),
            versions: VersionStore::default(),
            clones: CloneWork::default(),
            owner_bytes: MediaBytes::default(),
            mapping,
            superblock: block,
        };
        pool.load_objects()?;
        pool.withhold_unreadable();
        pool.sessions.open(&pool.mapping, OWNER_SESSION, 0, 0);
        pool.load_versions().map_err(|cause| match cause {
            ObjectError::Pool(cause) => cause,
            cause => PoolError::Snapshots(cause.to_string()),
        })?;
        Ok((pool, recovered))
    }

    /// The superblock of a medium, which may end with the first device, without opening it.
    ///
    /// # Errors
    /// As [`Pool::open`].
    pub fn peek(media: &M) -> Result<Superblock, PoolError> {
        read_superblock_of_first(media)
    }

    fn load_objects(&mut self) -> Result<(), PoolError> {
        for index in 0..self.superblock.objects_end {
            let object = ObjectId(index);
            let mut bytes = [0; OBJECT_BYTES as usize];
            self.mapping
                .data
                .read(self.mapping.entry_at(object), &mut bytes);
            let Ok((entry, _)) = Object::decode_redundant(&bytes) else {
                self.lost_objects
                    .push((object, Object::claimed_slice(&bytes)));
                continue;
            };
            match entry.state {
                ObjectState::Free => self.free_objects.push(object),
                ObjectState::Deleting => self.deleting.push((Seq(0), object)),
                ObjectState::Live if matches!(entry.role, ObjectRole::VersionsOf(_)) => {}
                ObjectState::Live => {
                    self.by_slice.insert(entry.slice, object);
                }
            }
            self.objects.insert(object, entry);
        }
        Ok(())
    }

    /// The mapping that the sessions share.
    #[must_use]
    pub fn mapping(&self) -> &Arc<PoolMapping<M>> {
        &self.mapping
    }

    /// Records with a flipped bit that the owner corrected since the opening.
    #[must_use]
    pub fn corrected_records(&self) -> u64 {
        self.corrected_records
    }

    /// Slots above the leaves with a flipped bit that the owner or a session corrected since the
    /// opening.
    #[must_use]
    pub fn corrected_slots(&self) -> u64 {
        self.mapping
            .control
            .corrected_slots()
            .load(Ordering::Relaxed)
    }

    /// The usage of the pool.
    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            capacity_bytes: self.mapping.geometry().granted_bytes(),
            free_bytes: self.frame_allocator.free() * PAGE_BYTES as u64,
            sessions: self.sessions.open_count() - 1,
        }
    }

    /// Runs an operation of the owner's session; takes a checkpoint and runs it again if it lacks
    /// room.
    pub(crate) fn with_retry<T>(
        &mut self,
        mut run: impl FnMut(&mut Session<M>) -> Result<T, StoreError>,
    ) -> Result<T, ObjectError> {
        match run(&mut self.owner_session) {
            Err(StoreError::TimedOut) => {
                self.checkpoint()?;
                Ok(run(&mut self.owner_session)?)
            }
            result => Ok(result?),
        }
    }

    pub(crate) fn fence(&self, stores: Option<UnfencedStores>) {
        if let Some(stores) = stores {
            let _fenced = self.mapping.data.fence(stores);
        }
    }

    /// Opens a session for a process, which uses it by [`Session::new`].
    ///
    /// # Errors
    /// When all are in use.
    pub fn open_session(&mut self, pid: u32, start_time: u64) -> Result<u32, ObjectError> {
        if self.has_failed {
            return Err(PoolError::Failed.into());
        }
        let count = self.mapping.geometry().journals;
        let number = self
            .sessions
            .free_number()
            .ok_or(ObjectError::SessionsFull(count - 1))?;
        if number >= self.superblock.journals_end {
            // Recovery must know the journal before the session appends to it.
            if !defect::is(Defect::NewerSuperblockNotChecked) {
                self.ensure_newer_superblock()?;
            }
            self.superblock.journals_end = number + 1;
            self.superblock.generation += 1;
            if !defect::is(Defect::JournalNotNamed) {
                self.write_superblock()?;
            }
        }
        self.sessions.open(&self.mapping, number, pid, start_time);
        self.refill(number);
        Ok(number)
    }

    /// Keeps a session from beginning another operation. Returns whether one is in progress.
    #[must_use]
    pub fn revoke(&self, number: u32) -> bool {
        let cells = self.mapping.control.session_cells(number);
        cells.revoked().store(1, Ordering::SeqCst);
        cells.active().load(Ordering::SeqCst) % 2 == 1
    }

    /// Whether a session is kept from beginning another operation.
    #[must_use]
    pub fn is_revoked(&self, number: u32) -> bool {
        let cells = self.mapping.control.session_cells(number);
        cells.revoked().load(Ordering::SeqCst) != 0
    }

    /// Ends a session. Its process or thread is gone, or the session was revoked and has no
    /// operation in progress. Rolls its last operation forward or discards it, lists operations
    /// that may be missing on other legs, and frees its locks and frames.
    ///
    /// # Errors
    /// When the pool fails.
    pub fn close_session(&mut self, number: u32) -> Result<(), ObjectError> {
        assert_ne!(number, OWNER_SESSION, "the owner's session stays");
        self.retire_session(number)
    }

    /// Whether a session is open.
    #[must_use]
    pub fn is_open(&self, number: u32) -> bool {
        self.sessions.open_numbers().contains(&number)
    }

    /// The process of a session, as recorded when it was opened.
    #[must_use]
    pub fn process_id(&self, number: u32) -> u32 {
        let cells = self.mapping.control.session_cells(number);
        cells.pid().load(Ordering::Relaxed)
    }

    /// The start time of a session's process, as recorded when it was opened.
    #[must_use]
    pub fn process_start_time(&self, number: u32) -> u64 {
        let cells = self.mapping.control.session_cells(number);
        cells.start_time().load(Ordering::Relaxed)
    }

    /// The number of the operation that a session has in progress, by the session's own count.
    #[must_use]
    pub fn op_in_progress(&self, number: u32) -> Option<u64> {
        self.mapping.control.op_in_progress(number)
    }

    /// Sessions with an operation in progress.
    #[must_use]
    pub fn sessions_in_op(&self) -> Vec<u32> {
        let mut open = self.sessions.open_numbers();
        open.retain(|&number| self.op_in_progress(number).is_some());
        open
    }

    /// Makes everything committed so far durable.
    ///
    /// # Errors
    /// When the medium failed.
    pub fn flush(&self) -> Result<(), PoolError> {
        if !defect::is(Defect::FlushNotSynced) {
            self.mapping.data.sync()?;
        }
        Ok(())
    }

    /// Closes the pool in order: everything is checkpointed, and nothing is left to replay.
    ///
    /// # Errors
    /// When the pool fails.
    pub fn close(mut self) -> Result<(), PoolError> {
        self.checkpoint()?;
        self.mapping.mark_owner_gone();
        Ok(())
    }
}
