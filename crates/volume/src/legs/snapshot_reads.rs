//! Reads of snapshots by a mapped leg, without the pool's owner.
//!
//! A read of unknown frames goes to the owner, and so do questions for its leaves, before it. Their answers are for later
//! reads.

use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::{SliceCompletion, SliceReply, SliceRequest};
use pagemesh_pmem::Media;
use pagemesh_store::pool_mapping::{Handle, PoolMapping};
use pagemesh_store::version_frames::{VersionFrames, VersionGeneration};

/// Questions that have no answer yet.
const QUESTIONS_MAX: usize = 8;
/// Questions have tags from here on. Those of requests are counted from 0.
const FIRST_TAG: u64 = 1 << 63;

/// A leaf that the owner was asked for.
struct Question {
    tag: u64,
    generation: VersionGeneration,
    leaf: (Epoch, u64),
}

/// The frames of snapshots that a mapped leg has got, and its open questions.
#[derive(Default)]
pub(super) struct SnapshotReads {
    frames: VersionFrames,
    questions: Vec<Question>,
    last_tag: u64,
}

impl SnapshotReads {
    /// The bytes of a range as a snapshot sees them; none if the owner has to read them.
    pub(super) fn read<M: Media>(
        &mut self,
        mapping: &PoolMapping<M>,
        handle: &Handle,
        snapshot: Epoch,
        range: (u64, u32),
    ) -> Option<Vec<u8>> {
        self.frames.generation(mapping)?;
        self.frames.read(mapping, handle, snapshot, range)
    }

    /// The questions to the owner before it reads a range.
    pub(super) fn ask<M: Media>(
        &mut self,
        mapping: &PoolMapping<M>,
        snapshot: Epoch,
        range: (u64, u32),
    ) -> Vec<(u64, SliceRequest)> {
        let Some(generation) = self.frames.generation(mapping) else {
            return Vec::new();
        };
        let mut asked = Vec::new();
        for leaf in self.frames.unknown_leaves(snapshot, range) {
            let is_asked =
                |it: &Question| it.leaf == (snapshot, leaf) && it.generation == generation;
            if self.questions.len() == QUESTIONS_MAX || self.questions.iter().any(is_asked) {
                break;
            }
            self.last_tag += 1;
            let tag = FIRST_TAG + self.last_tag;
            self.questions.push(Question {
                tag,
                generation,
                leaf: (snapshot, leaf),
            });
            asked.push((tag, SliceRequest::VersionLeaf { snapshot, leaf }));
        }
        asked
    }

    /// Takes the answer of a question. False if it is one of a request.
    pub(super) fn take_answer(&mut self, answer: &SliceCompletion) -> bool {
        let at = self.questions.iter().position(|it| it.tag == answer.tag);
        let Some(question) = at.map(|at| self.questions.swap_remove(at)) else {
            return false;
        };
        if let Ok(SliceReply::Data(frames)) = &answer.result {
            self.frames
                .insert(question.generation, question.leaf, frames);
        }
        true
    }
}
