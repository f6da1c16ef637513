//! Tests of a recovery's order of stores, and of the pages that it corrects.

use super::repair::FlippedPage;
use super::replay::Replay;
use super::*;
use crate::format::geometry::frame_at;
use crate::format::record::{Change, NO_SUMS, Record};
use crate::format::slot::Slot;
use crate::owner::pool::{Pool, format};
use pagemesh_base::ids::{FrameNo, PageNo};
use pagemesh_pmem::Recorder;
use std::sync::Arc;
use uuid::Uuid;

/// Whether the pool has a superblock after any loss during a recovery, if a process died
/// earlier while it wrote one.
fn has_a_superblock() -> bool {
    let fresh = Recorder::new(2 << 20);
    format(&fresh, Uuid::from_u128(7)).expect("a pool");
    let image = fresh.crash_point().all_persisted();
    let media = Arc::new(Recorder::from_image(image));
    let mut next = read_superblock(&*media).expect("sound");
    next.generation += 1;
    // The writer dies before the fence; the machine continues.
    let page = next.encode();
    let (_, _unfenced) = Recorder::stream_page(&[(&*media, next.offset())], &page);
    media.take_crash_points();
    Pool::open(media.clone(), media.clone()).expect("sound");
    media.take_crash_points().iter().all(|point| {
        (0..200).all(|seed| {
            let image = point.sample(seed);
            read_superblock(&Recorder::from_image(image)).is_ok()
        })
    })
}

/// A replay from the older superblock has records of frames with other users by now.
#[test]
fn page_is_corrected_only_by_last_record_of_its_frame() {
    let fresh = Recorder::new(2 << 20);
    format(&fresh, Uuid::from_u128(7)).expect("a pool");
    let block = read_superblock(&fresh).expect("sound");
    let frames = block.geometry.first_frames();
    let frame = FrameNo(frames.end - 1);
    let at = frame_at(frame);
    let names = |seq: u64| {
        let change = Change {
            old: Slot::EMPTY,
            new: Slot::EMPTY.map(frame),
            sums: NO_SUMS,
        };
        JournalEntry::Map(Record {
            seq: Seq(seq),
            changes: vec![change],
            ..Record::empty()
        })
    };
    let flipped = |seq: u64| FlippedPage {
        seq: Seq(seq),
        object: ObjectId(0),
        page: PageNo(0),
        frame,
        bit: 77,
    };
    let mut replay = Replay::new(&fresh, &block, false);
    let before = fresh.load(at + 8);
    let mut all = vec![flipped(3)];
    replay.correct_pages(&mut all, &[names(3), names(5)]);
    assert!(all.is_empty() && fresh.load(at + 8) == before);
    all.extend([flipped(3), flipped(5)]);
    replay.correct_pages(&mut all, &[names(3), names(5)]);
    assert_eq!(all.len(), 1);
    assert_eq!(fresh.load(at + 8), before ^ 1 << 13);
    let _fenced = fresh.fence(
        replay
            .stores
            .drain(..)
            .reduce(UnfencedStores::and)
            .expect("one"),
    );
}

#[test]
fn recovery_keeps_its_initial_superblock() {
    assert!(has_a_superblock());
    pagemesh_base::defect::set(Some(Defect::SuperblockNotFlushed));
    assert!(!has_a_superblock());
    pagemesh_base::defect::set(None);
}
