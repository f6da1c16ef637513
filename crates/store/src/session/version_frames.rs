//! Reads of snapshots by a process that maps the pool.
//!
//! The owner tells which frames a snapshot sees in a leaf of 512 pages. The reader keeps the answer, and copies pages from
//! these frames itself.
//!
//! Invariants:
//! - The reader loads the generation of versions before it asks, and the answer holds for this generation. The owner ends
//!   the generation before it frees a frame that a snapshot saw, so a copy counts only if the generation is the same after
//!   it.
//! - The owner does all other reads, also those of damaged pages.

use crate::format::table::NODE_SLOTS;
use crate::shared::pool_mapping::{Handle, PoolMapping};
use pagemesh_base::ids::{Epoch, FrameNo};
use pagemesh_base::slice::{VERSION_LEAF_BYTES, VERSION_LOST};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

const PAGE: u64 = PAGE_BYTES as u64;
/// Leaves of one reader: 32 MiB for 16 GiB of pages.
const LEAVES_MAX: usize = 8192;

type Leaf = [u64; NODE_SLOTS as usize];

/// The frames that snapshots of one slice see, as far as its reader knows them.
#[derive(Default)]
pub struct VersionFrames {
    generation: u64,
    leaves: HashMap<(Epoch, u64), Box<Leaf>>,
}

/// A generation in which frames may be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionGeneration(u64);

impl VersionFrames {
    /// The present generation; none if the owner does not keep it up to date. Answers of earlier ones are forgotten.
    pub fn generation<M: Media>(&mut self, mapping: &PoolMapping<M>) -> Option<VersionGeneration> {
        let generation = mapping.version_generation();
        if self.generation != generation {
            self.generation = generation;
            self.leaves.clear();
        }
        (generation != 0).then_some(VersionGeneration(generation))
    }

    /// The leaves of a range that the owner must be asked for.
    pub fn unknown_leaves(
        &self,
        snapshot: Epoch,
        (offset, len): (u64, u32),
    ) -> impl Iterator<Item = u64> + use<'_> {
        let leaves = leaves_of(offset, len);
        leaves.filter(move |leaf| !self.leaves.contains_key(&(snapshot, *leaf)))
    }

    /// Keeps an answer of the owner to a question of this generation.
    pub fn insert(
        &mut self,
        asked: VersionGeneration,
        (snapshot, leaf): (Epoch, u64),
        answer: &[u8],
    ) {
        let is_present = self.generation == asked.0;
        if !is_present || answer.len() != VERSION_LEAF_BYTES {
            return;
        }
        if self.leaves.len() >= LEAVES_MAX {
            self.leaves.clear();
        }
        let mut frames = Box::new([0; NODE_SLOTS as usize]);
        for (frame, bytes) in frames.iter_mut().zip(answer.as_chunks().0) {
            *frame = u64::from_le_bytes(*bytes);
        }
        self.leaves.insert((snapshot, leaf), frames);
    }

    /// The bytes of a range as a snapshot sees them; none if the owner has to read them.
    pub fn read<M: Media>(
        &self,
        mapping: &PoolMapping<M>,
        handle: &Handle,
        snapshot: Epoch,
        (offset, len): (u64, u32),
    ) -> Option<Vec<u8>> {
        let end = offset.checked_add(u64::from(len))?;
        if end > mapping.size_bytes(handle) || mapping.is_owner_gone() {
            return None;
        }
        let mut data = vec![0; len as usize];
        let mut rest = &mut data[..];
        let mut known: Option<(u64, &Leaf)> = None;
        let mut at = offset;
        while at < end {
            let (page, within) = (at / PAGE, (at % PAGE) as usize);
            let leaf = page / NODE_SLOTS;
            let frames = match known {
                Some((number, frames)) if number == leaf => frames,
                _ => &**self.leaves.get(&(snapshot, leaf))?,
            };
            known = Some((leaf, frames));
            let count = (PAGE_BYTES - within).min((end - at) as usize);
            let (part, after) = rest.split_at_mut(count);
            match (frames[(page % NODE_SLOTS) as usize], part.as_mut_array()) {
                (VERSION_LOST, _) => return None,
                (0, _) => {}
                (frame, Some(whole)) => self.copy(mapping, FrameNo(frame - 1), whole)?,
                (frame, None) => {
                    let mut whole = [0; PAGE_BYTES];
                    self.copy(mapping, FrameNo(frame - 1), &mut whole)?;
                    part.copy_from_slice(&whole[within..within + count]);
                }
            }
            rest = after;
            at += count as u64;
        }
        Some(data)
    }

    fn copy<M: Media>(
        &self,
        mapping: &PoolMapping<M>,
        frame: FrameNo,
        into: &mut [u8; PAGE_BYTES],
    ) -> Option<()> {
        let copied = mapping.copy_version(frame, into);
        // The load must not move up before the copy.
        fence(Ordering::Acquire);
        (copied && mapping.version_generation() == self.generation).then_some(())
    }
}

fn leaves_of(offset: u64, len: u32) -> Range<u64> {
    let end = offset.saturating_add(u64::from(len)).div_ceil(PAGE);
    offset / PAGE / NODE_SLOTS..end.div_ceil(NODE_SLOTS)
}
