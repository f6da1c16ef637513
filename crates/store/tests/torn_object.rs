//! An entry of the object table that a power failure tears.

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::pool::{Pool, format};
use std::sync::Arc;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(7));
/// Crash images of each fence.
const IMAGES: u64 = 5000;

/// Objects that are lost in some crash while an epoch is raised.
fn lost_objects(defect: Option<Defect>) -> u64 {
    let media = Arc::new(Recorder::from_image(Image::filled(2 << 20, 0)));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a pool");
    pool.create(SLICE, 1 << 20).expect("room");
    pool.checkpoint().expect("a sound pool");
    media.take_crash_points();
    defect::set(defect);
    let raised = pool.raise_epoch(SLICE, Epoch(0x0102_0304));
    defect::set(None);
    raised.expect("no sessions");
    let points = media.take_crash_points();
    let images = points
        .iter()
        .flat_map(|point| (0..IMAGES).map(|seed| point.sample(seed)));
    let lost = images.map(|image| {
        let media = Arc::new(Recorder::unrecorded(image));
        let opened = Pool::open(media.clone(), media).expect("a pool");
        opened.1.objects_lost
    });
    lost.sum()
}

#[test]
fn torn_object_entry_is_restored_by_its_record() {
    assert_eq!(lost_objects(None), 0);
    assert!(lost_objects(Some(Defect::ObjectNotFenced)) > 0);
}
