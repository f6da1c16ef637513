//! Bytes of files at their place in a pool, which a program reads without a copy.
//!
//! Invariants: the pool of an ended brick is unmapped at once; readers see that by
//! [`ConsistentMapping::is_unchanged`].

use crate::shared::shared_file_map::FileExtent;
use pagemesh_base::poison::lock;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{MappedMedia, ReadMapping};
use pagemesh_store::consistent_read::ConsistentRead;
use pagemesh_store::pool_mapping::PoolMapping;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

/// A pool that this process has mapped, and its read mapping.
type PoolReadMapping = (Weak<PoolMapping<MappedMedia>>, Arc<ReadMapping>);

/// Read mappings of the pools that a mount has mapped.
#[derive(Default)]
pub(super) struct ReadMappings(Mutex<Vec<PoolReadMapping>>);

impl ReadMappings {
    /// The read mapping of a pool that a leg of this mount has. The caller holds a slot of the
    /// mount, so the pool stays mapped meanwhile.
    pub(super) fn of_pool(&self, pool: &Arc<PoolMapping<MappedMedia>>) -> Option<Arc<ReadMapping>> {
        let mut mappings = lock(&self.0);
        let is_its = |known: &Weak<PoolMapping<MappedMedia>>| {
            std::ptr::eq(known.as_ptr(), Arc::as_ptr(pool))
        };
        if let Some((_, mapping)) = mappings.iter().find(|(known, _)| is_its(known)) {
            return Some(Arc::clone(mapping));
        }
        let mapping = Arc::new(ReadMapping::of(pool.media()).ok()?);
        mappings.push((Arc::downgrade(pool), Arc::clone(&mapping)));
        Some(mapping)
    }

    /// Unmaps the pools of ended bricks: otherwise the next brick would have to kill this process.
    pub(super) fn unmap_ended(&self) {
        lock(&self.0).retain(|(pool, mapping)| {
            let is_there = pool.upgrade().is_some_and(|pool| !pool.is_owner_gone());
            // If the system has no resources to unmap it, the brick kills this process.
            is_there || mapping.detach().is_err()
        });
    }
}

/// Bytes of a file at their place in a pool, see [`DirectFile::map_consistent`](super::DirectFile::map_consistent). Writers do not
/// wait for a reader: the bytes may change while they are read. [`ConsistentMapping::is_unchanged`]
/// detects that afterwards.
pub struct ConsistentMapping {
    pub(super) consistent_read: Box<ConsistentRead<MappedMedia>>,
    pub(super) mapping: Arc<ReadMapping>,
    pub(super) extents: Vec<FileExtent>,
}

impl ConsistentMapping {
    /// The bytes in order, in pieces of at most a page. The pieces can be read as long as this
    /// mapping lives.
    pub fn slices(&self) -> impl Iterator<Item = (NonNull<u8>, usize)> + '_ {
        let page = PAGE_BYTES as u64;
        let parts = self.extents.iter().flat_map(move |run| {
            let (mut at, end) = (run.offset, run.offset + run.len);
            std::iter::from_fn(move || {
                let within = at % page;
                let len = (page - within).min(end - at);
                at += len;
                (len > 0).then_some((within as usize, len as usize))
            })
        });
        let places = self.consistent_read.page_offsets().zip(parts);
        places.map(|(place, (within, len))| (self.mapping.at(place + within, len), len))
    }

    /// Whether everything that was read so far belongs to one consistent state of the file.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        self.consistent_read.is_unchanged() && !self.mapping.is_detached()
    }
}
