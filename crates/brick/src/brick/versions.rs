//! Reads of the versions that snapshots see.
//!
//! Invariants:
//! - A read does not hold the pool's lock while it copies pages, except after several tries in vain.
//! - A leaf names frames that no other page gets before the owner frees them. Before the owner frees a frame that a leaf
//!   may name, it ends the generation of leaves ([`PoolMapping::version_generation`]). A copy counts only if the
//!   generation was the same before and after it.
//!
//! [`PoolMapping::version_generation`]: pagemesh_store::pool_mapping::PoolMapping::version_generation

use super::Brick;
use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::poison::lock;
use pagemesh_base::slice::{
    SLICE_IO_BYTES_MAX, SliceError, SliceReply, SliceRequest, VERSION_LEAF_BYTES, VERSION_LOST,
};
use pagemesh_base::space::{EXTENTS_MAX, Extent};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use pagemesh_store::pool::Pool;
use pagemesh_store::versions::VersionLeaf;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard};

/// Leaves in the cache, of some KiB each. A listing of changes puts two of each leaf into it, which reads take later.
const CACHED_LEAVES_MAX: usize = 8192;
/// Leaves that one listing of extents looks at. A longer range is listed in several requests.
const LISTED_LEAVES_MAX: u64 = 1024;
/// Copies without the pool's lock before a read takes it: a pool that moves pages to disks ends generations often.
const UNLOCKED_TRIES: usize = 4;
const PAGE: u64 = PAGE_BYTES as u64;
/// Pages of a leaf.
const LEAF_PAGES: u64 = 512;

/// A slice, a snapshot of it, and the number of a leaf.
type LeafKey = (SliceId, Epoch, u64);

struct CachedLeaf {
    leaf: VersionLeaf,
    /// The size of the slice.
    size_bytes: u64,
}

/// The leaves that reads of snapshots have looked up.
#[derive(Default)]
pub(super) struct VersionCache {
    leaves: Mutex<CachedLeaves>,
}

#[derive(Default)]
struct CachedLeaves {
    generation: u64,
    recent: HashMap<LeafKey, Arc<CachedLeaf>>,
    /// Leaves that were recent before. The cache forgets them once the recent ones are half of it.
    earlier: HashMap<LeafKey, Arc<CachedLeaf>>,
}

impl VersionCache {
    fn leaves(&self, generation: u64) -> MutexGuard<'_, CachedLeaves> {
        let mut leaves = lock(&self.leaves);
        if leaves.generation < generation {
            *leaves = CachedLeaves {
                generation,
                ..CachedLeaves::default()
            };
        }
        leaves
    }

    fn find(&self, generation: u64, key: &LeafKey) -> Option<Arc<CachedLeaf>> {
        let leaves = self.leaves(generation);
        if leaves.generation != generation {
            return None;
        }
        let found = leaves.recent.get(key);
        found.or_else(|| leaves.earlier.get(key)).cloned()
    }

    fn insert(&self, generation: u64, key: LeafKey, leaf: &Arc<CachedLeaf>) {
        let mut leaves = self.leaves(generation);
        if leaves.generation != generation {
            return;
        }
        if leaves.recent.len() >= CACHED_LEAVES_MAX / 2 {
            leaves.earlier = std::mem::take(&mut leaves.recent);
        }
        leaves.recent.insert(key, Arc::clone(leaf));
    }
}

/// The source of the leaves of one request.
enum LeafSource<'a, M: Media> {
    /// The cache, or the pool after locking it.
    Cache(u64),
    /// The locked pool.
    Locked(MutexGuard<'a, Pool<M>>),
}

/// A snapshot of a slice, as one request reads it.
struct VersionReader<'a, M: Media> {
    brick: &'a Brick<M>,
    slice: SliceId,
    snapshot: Epoch,
    source: LeafSource<'a, M>,
}

impl<M: Media> VersionReader<'_, M> {
    /// A leaf of a range, after a check that the slice has the whole range.
    fn leaf(&mut self, leaf: u64, range: (u64, u64)) -> Result<Arc<CachedLeaf>, SliceError> {
        let key = (self.slice, self.snapshot, leaf);
        let generation = match &mut self.source {
            LeafSource::Locked(pool) => return look_up(self.brick, pool, key, range).map(Arc::new),
            LeafSource::Cache(generation) => *generation,
        };
        if let Some(found) = self.brick.versions.find(generation, &key) {
            check_range(found.size_bytes, range)?;
            return Ok(found);
        }
        let mut pool = self.brick.pool();
        let found = Arc::new(look_up(self.brick, &mut pool, key, range)?);
        if self.brick.mapping.version_generation() == generation {
            self.brick.versions.insert(generation, key, &found);
        }
        Ok(found)
    }

    /// Calls `visit` with each page of a range and its frame, until that returns false.
    fn visit(
        &mut self,
        (offset, len): (u64, u64),
        mut visit: impl FnMut(PageNo, Option<FrameNo>) -> Result<bool, SliceError>,
    ) -> Result<(), SliceError> {
        if len == 0 {
            return Ok(());
        }
        let pages = offset / PAGE..offset.saturating_add(len).div_ceil(PAGE);
        for leaf in leaves_of(&pages) {
            let found = self.leaf(leaf, (offset, len))?;
            let first = leaf * LEAF_PAGES;
            for page in first.max(pages.start)..(first + LEAF_PAGES).min(pages.end) {
                let index = (page - first) as usize;
                if found.leaf.is_lost(index) {
                    return Err(SliceError::Damaged {
                        offset: page * PAGE,
                    });
                }
                if !visit(PageNo(page), found.leaf.frame(index))? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, offset: u64, len: u32) -> Result<SliceReply, SliceError> {
        let mapping = Arc::clone(&self.brick.mapping);
        let (mut data, mut at) = (vec![0; len as usize], 0);
        self.visit((offset, u64::from(len)), |page, frame| {
            let within = ((offset + at as u64) % PAGE) as usize;
            let count = (data.len() - at).min(PAGE_BYTES - within);
            if let Some(frame) = frame {
                let mut whole = [0; PAGE_BYTES];
                mapping.read_version(frame, page, &mut whole)?;
                data[at..at + count].copy_from_slice(&whole[within..within + count]);
            }
            at += count;
            Ok(true)
        })?;
        Ok(SliceReply::Data(data))
    }

    /// The frames of a leaf, for a process that maps the pool.
    fn frames(&mut self, leaf: u64) -> Result<SliceReply, SliceError> {
        let start = leaf.saturating_mul(LEAF_PAGES * PAGE);
        let found = self.leaf(leaf, (start, 0))?;
        let words = (0..LEAF_PAGES as usize).map(|index| match found.leaf.is_lost(index) {
            true => VERSION_LOST,
            false => found.leaf.frame(index).map_or(0, |frame| frame.0 + 1),
        });
        let data: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        debug_assert_eq!(data.len(), VERSION_LEAF_BYTES);
        Ok(SliceReply::Data(data))
    }

    fn extents(&mut self, offset: u64, len: u64) -> Result<SliceReply, SliceError> {
        // The end of the whole range is checked, and not only of the part that is listed.
        let listed = len.min(LISTED_LEAVES_MAX * LEAF_PAGES * PAGE);
        if listed < len {
            self.visit((offset, len), |_, _| Ok(false))?;
        }
        let end = offset.saturating_add(listed);
        let mut list = ExtentList::new(offset, end);
        self.visit((offset, listed), |page, frame| {
            Ok(list.push(page, frame.is_some()))
        })?;
        Ok(SliceReply::Extents(list.extents))
    }

    /// Whether the slice has a snapshot of this epoch.
    fn has_snapshot(&self, epoch: Epoch) -> Result<bool, SliceError> {
        let report = |cause| self.brick.report_error(cause);
        let found = match &self.source {
            LeafSource::Locked(pool) => pool.snapshots_of(self.slice),
            LeafSource::Cache(_) => self.brick.pool().snapshots_of(self.slice),
        };
        Ok(found.map_err(report)?.contains(&epoch))
    }

    /// The changes since an epoch: of an earlier snapshot, or of a bookmark, which has none any more.
    ///
    /// Two snapshots see the same bytes of a page if they see the same frame: a frame that a snapshot sees is not
    /// changed, and no other page gets it. Without the earlier snapshot, births tell: a page that changed since was
    /// born at its epoch or later, as a hole too.
    fn changes(&mut self, from: Epoch, offset: u64, len: u64) -> Result<SliceReply, SliceError> {
        if from == Epoch(0) {
            return self.extents(offset, len);
        }
        let listed = len.min(LISTED_LEAVES_MAX * LEAF_PAGES * PAGE);
        if listed < len {
            self.visit((offset, len), |_, _| Ok(false))?;
        }
        let mut list = ExtentList::new(offset, offset.saturating_add(listed));
        let to = self.snapshot;
        let has_from = self.has_snapshot(from)?;
        let pages = offset / PAGE..list.end.div_ceil(PAGE);
        for leaf in leaves_of(&pages) {
            // Both leaves come from one generation, or the request starts again.
            let now = self.leaf(leaf, (offset, listed))?;
            let before = match has_from {
                true => {
                    self.snapshot = from;
                    let before = self.leaf(leaf, (offset, listed));
                    self.snapshot = to;
                    Some(before?)
                }
                false => None,
            };
            let first = leaf * LEAF_PAGES;
            for page in first.max(pages.start)..(first + LEAF_PAGES).min(pages.end) {
                let index = (page - first) as usize;
                let differs = match &before {
                    Some(before) => {
                        let is_lost = now.leaf.is_lost(index) || before.leaf.is_lost(index);
                        is_lost || now.leaf.frame(index) != before.leaf.frame(index)
                    }
                    None => now.leaf.may_be_born_since(index, from),
                };
                if !list.push(PageNo(page), differs) {
                    return Ok(SliceReply::Extents(list.extents));
                }
            }
        }
        Ok(SliceReply::Extents(list.extents))
    }
}

/// Extents of consecutive pages of a range, as one answer lists them.
struct ExtentList {
    extents: Vec<Extent>,
    begin: u64,
    end: u64,
}

impl ExtentList {
    fn new(begin: u64, end: u64) -> ExtentList {
        let extents = Vec::new();
        ExtentList {
            extents,
            begin,
            end,
        }
    }

    /// Adds the next page. False: the list is full, and the page is not in it.
    fn push(&mut self, page: PageNo, mapped: bool) -> bool {
        let (from, to) = (page.0 * PAGE, (page.0 + 1) * PAGE);
        let len = to.min(self.end) - from.max(self.begin);
        let is_full = self.extents.len() == EXTENTS_MAX;
        match self.extents.last_mut() {
            Some(last) if last.mapped == mapped => last.len += len,
            _ if is_full => return false,
            _ => self.extents.push(Extent { len, mapped }),
        }
        true
    }
}

/// The leaves of a run of pages.
fn leaves_of(pages: &Range<u64>) -> Range<u64> {
    pages.start / LEAF_PAGES..pages.end.div_ceil(LEAF_PAGES)
}

fn check_range(size_bytes: u64, (offset, len): (u64, u64)) -> Result<(), SliceError> {
    match offset.checked_add(len).is_some_and(|end| end <= size_bytes) {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!(
            "{len} bytes at {offset} of {size_bytes}"
        ))),
    }
}

fn look_up<M: Media>(
    brick: &Brick<M>,
    pool: &mut Pool<M>,
    (slice, snapshot, leaf): LeafKey,
    range: (u64, u64),
) -> Result<CachedLeaf, SliceError> {
    let report = |cause| brick.report_error(cause);
    let (_, entry) = pool.find(slice).map_err(report)?;
    if !pool
        .snapshots_of(slice)
        .map_err(report)?
        .contains(&snapshot)
    {
        return Err(SliceError::Refused(format!(
            "slice {slice} has no snapshot of epoch {snapshot}; read another copy that has it"
        )));
    }
    check_range(entry.size_bytes, range)?;
    let leaf = pool.version_leaf(slice, snapshot, leaf).map_err(report)?;
    let size_bytes = entry.size_bytes;
    Ok(CachedLeaf { leaf, size_bytes })
}

impl<M: Media> Brick<M> {
    /// Executes a read of a snapshot. What a snapshot sees never changes, so no epoch refuses its readers.
    pub(super) fn read_snapshot(
        &self,
        slice: SliceId,
        request: &SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        match *request {
            SliceRequest::ReadVersion {
                snapshot,
                offset,
                len,
            } => self.read_version(slice, snapshot, (offset, len)),
            SliceRequest::VersionExtents {
                snapshot,
                offset,
                len,
            } => self.version_extents(slice, snapshot, (offset, len)),
            SliceRequest::VersionChanges {
                from,
                to,
                offset,
                len,
            } => self.version_changes(slice, (from, to), (offset, len)),
            SliceRequest::VersionLeaf { snapshot, leaf } => {
                self.with_versions(slice, snapshot, |reader| reader.frames(leaf))
            }
            _ => Err(SliceError::Refused("it reads no snapshot".into())),
        }
    }

    /// The bytes of a range as a snapshot sees them.
    fn read_version(
        &self,
        slice: SliceId,
        snapshot: Epoch,
        (offset, len): (u64, u32),
    ) -> Result<SliceReply, SliceError> {
        if len > SLICE_IO_BYTES_MAX {
            let cause = format!("{len} is more than {SLICE_IO_BYTES_MAX}");
            return Err(SliceError::OutOfRange(cause));
        }
        self.with_versions(slice, snapshot, |reader| reader.read(offset, len))
    }

    /// The extents of a range as a snapshot sees it: at least one, unless the range is empty.
    fn version_extents(
        &self,
        slice: SliceId,
        snapshot: Epoch,
        (offset, len): (u64, u64),
    ) -> Result<SliceReply, SliceError> {
        self.with_versions(slice, snapshot, |reader| reader.extents(offset, len))
    }

    /// The parts of a range that may have changed between an epoch and a snapshot: at least one extent, unless the range
    /// is empty.
    fn version_changes(
        &self,
        slice: SliceId,
        (from, to): (Epoch, Epoch),
        (offset, len): (u64, u64),
    ) -> Result<SliceReply, SliceError> {
        if from >= to {
            let cause = format!("changes from snapshot {from} to {to}, which is not later");
            return Err(SliceError::OutOfRange(cause));
        }
        if len == 0 {
            return Ok(SliceReply::Extents(Vec::new()));
        }
        self.with_versions(slice, to, |reader| reader.changes(from, offset, len))
    }

    fn with_versions(
        &self,
        slice: SliceId,
        snapshot: Epoch,
        read: impl Fn(&mut VersionReader<'_, M>) -> Result<SliceReply, SliceError>,
    ) -> Result<SliceReply, SliceError> {
        let reader = |source| VersionReader {
            brick: self,
            slice,
            snapshot,
            source,
        };
        for _ in 0..UNLOCKED_TRIES {
            let generation = self.mapping.version_generation();
            let result = read(&mut reader(LeafSource::Cache(generation)));
            // The load must not move up before the copies.
            fence(Ordering::Acquire);
            if self.mapping.version_generation() == generation {
                return result;
            }
        }
        read(&mut reader(LeafSource::Locked(self.pool())))
    }
}
