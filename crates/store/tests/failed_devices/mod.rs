//! Pools that lose a further device: it is named as failed, and its pages are damaged, never older.

mod bed;
mod lost_nodes;

use bed::{
    Client, DEVICE, FIRST_BYTES, FIRST_LEAF_PAGES, Kind, LATE_PAGES, Model, PAGE, PAGES, SLICE,
    checked, crashed_pool, damaged_or_newer_pages, damaged_pages, maintain, page_bytes, state_of,
    written_pool,
};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Media, Recorder};
use pagemesh_store::devices::DeviceState;
use pagemesh_store::pool::ObjectError;
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::superblock::Superblock;
use std::sync::Arc;

#[test]
fn pages_of_a_failed_device_are_damaged_never_older() {
    for kind in [Kind::Memory, Kind::File] {
        let (image, model) = crashed_pool(kind, FIRST_LEAF_PAGES);
        let media = kind.recorder(image);
        let mut pool = kind.open(&media, &[DEVICE]).expect("a pool");
        assert_eq!(state_of(&pool), Some(DeviceState::Failed));
        let damaged = damaged_pages(&mut pool, &model).expect("never older");
        let is_late = |page: &&u64| **page < LATE_PAGES;
        assert!(damaged.iter().filter(is_late).count() > 0, "{damaged:?}");
        assert!((20..300).contains(&damaged.len()), "{damaged:?}");
        assert!(pool.usage().capacity_bytes < FIRST_BYTES);
        // Both superblocks know it, and no opening needs the device.
        drop(pool);
        let image = media.visible_image();
        for page in 0..2 {
            let bytes = image.to_bytes();
            let page = bytes[page * PAGE_BYTES..].first_chunk().expect("a page");
            let block = Superblock::decode(page).expect("sound");
            assert_eq!(block.geometry.devices.failed().count(), 1);
        }
        let mut bytes = image.to_bytes();
        bytes[FIRST_BYTES as usize..].fill(0x77);
        let media = kind.recorder(Image::from_bytes(&bytes));
        let mut pool = kind.open(&media, &[]).expect("a pool");
        assert_eq!(damaged_pages(&mut pool, &model), Ok(damaged));
    }
}

#[test]
fn unreadable_pages_that_are_dropped_would_be_older() {
    let (image, model) = crashed_pool(Kind::File, FIRST_LEAF_PAGES);
    let media = Kind::File.recorder(image);
    defect::set(Some(Defect::UnreadableDropped));
    let opened = Kind::File.open(&media, &[DEVICE]);
    defect::set(None);
    let found = damaged_pages(&mut opened.expect("a pool"), &model);
    assert!(found.is_err_and(|text| text.contains("is not of version")));
}

#[test]
fn failed_device_leaves_once_its_pages_are_repaired() {
    for kind in [Kind::Memory, Kind::File] {
        let (image, mut model) = crashed_pool(kind, FIRST_LEAF_PAGES);
        let media = kind.recorder(image);
        let mut pool = kind.open(&media, &[DEVICE]).expect("a pool");
        let damaged = damaged_pages(&mut pool, &model).expect("never older");
        assert!(!pool.remove_device(DEVICE).expect("a sound pool"));
        let refused = pool.cancel_drain(DEVICE);
        assert!(
            matches!(refused, Err(ObjectError::DeviceFailed(_))),
            "{refused:?}"
        );
        // The first device has room for some of them.
        let mut client = Client::new(&mut pool);
        let room = pool.usage().free_bytes / PAGE;
        let (now, later) = damaged.split_at(damaged.len().min(room as usize / 2));
        now.iter()
            .for_each(|&page| client.write_maintained(&mut pool, page, &mut model));
        client.end(&mut pool);
        maintain(&mut pool);
        pool.checkpoint().expect("a sound pool");
        let left = damaged_pages(&mut pool, &model).expect("never older");
        assert_eq!(left, later);
        let (report, _) = checked(&media, kind);
        assert!(report.is_complete, "{:?}", report.findings);
        pool.delete(SLICE).expect("deleted");
        (0..8).for_each(|_| maintain(&mut pool));
        assert!(pool.remove_device(DEVICE).expect("a sound pool"));
        assert_eq!(state_of(&pool), None);
        let usage = pool.usage();
        assert_eq!(usage.free_bytes, usage.capacity_bytes);
        pool.close().expect("a sound pool");
        let pool = kind.open(&media, &[]).expect("a pool");
        assert_eq!(pool.usage().free_bytes, usage.free_bytes);
        let (report, _) = checked(&media, kind);
        assert!(report.is_sound(), "{:?}", report.findings);
    }
}

#[test]
fn lost_page_table_refuses_reads_and_writes_below_it() {
    for kind in [Kind::Memory, Kind::File] {
        let (image, model) = crashed_pool(kind, PAGES);
        let media = kind.recorder(image);
        let mut pool = kind.open(&media, &[DEVICE]).expect("a pool");
        let damaged = damaged_pages(&mut pool, &model).expect("never older");
        // The leaf of the last pages lies on the failed device.
        assert!((512..PAGES).all(|page| damaged.contains(&page)));
        let mut client = Client::new(&mut pool);
        maintain(&mut pool);
        for page in [512, 600, PAGES - 1] {
            let refused = client.write(page, 99);
            let is_damaged = matches!(refused, Err(StoreError::Damaged { .. }));
            assert!(is_damaged, "{kind:?} {page}: {refused:?}");
        }
        client.end(&mut pool);
        assert!(!pool.remove_device(DEVICE).expect("a sound pool"));
        pool.delete(SLICE).expect("deleted");
        (0..8).for_each(|_| maintain(&mut pool));
        assert!(pool.remove_device(DEVICE).expect("a sound pool"));
        pool.close().expect("a sound pool");
        // Frames of pages below the lost leaf are in use, and nothing names them.
        let (_, plan) = checked(&media, kind);
        plan.apply(&*media).expect("repaired");
        let (report, _) = checked(&media, kind);
        assert!(report.is_sound(), "{:?}", report.findings);
        let pool = kind.open(&media, &[]).expect("a pool");
        let usage = pool.usage();
        assert_eq!(usage.free_bytes, usage.capacity_bytes);
    }
}

#[test]
fn crash_while_a_device_is_named_as_failed_loses_no_more() {
    for kind in [Kind::Memory, Kind::File] {
        let (image, model) = crashed_pool(kind, FIRST_LEAF_PAGES);
        let media = kind.recorder(image);
        kind.open(&media, &[DEVICE]).expect("a pool");
        let (mut images, mut named) = (0, 0);
        for point in media.take_crash_points() {
            for image in point.images(64, 8, 17) {
                images += 1;
                // The device is there again, or it is not.
                for failed in [&[][..], &[DEVICE]] {
                    let media = Arc::new(Recorder::unrecorded(image.clone()));
                    let mut pool = kind.open(&media, failed).expect("a pool");
                    let damaged = damaged_pages(&mut pool, &model);
                    let damaged = damaged.unwrap_or_else(|wrong| panic!("{kind:?}: {wrong}"));
                    let is_failed = state_of(&pool) == Some(DeviceState::Failed);
                    named += u32::from(is_failed && failed.is_empty());
                    assert!(is_failed || damaged.is_empty(), "{damaged:?}");
                }
            }
        }
        assert!(images >= 5 && named > 0, "{images} images, {named} named");
    }
}

/// As [`crashed_pool`], with later writes to the late pages that were not flushed: their records are there, and their data on
/// the device is not.
fn pool_with_lost_writes(kind: Kind) -> (Image, Model) {
    let (pool, media, mut client, model) = written_pool(kind, PAGES, 0..FIRST_LEAF_PAGES);
    let before = Recorder::unrecorded(media.visible_image());
    for page in 0..LATE_PAGES {
        let written = client.write(page, model[page as usize] + 1);
        written.expect("granted frames");
    }
    pool.flush().expect("a sound medium");
    let devices = pool.mapping().geometry().devices;
    let device = devices.iter().next().expect("the device").bytes();
    let lost = Recorder::unrecorded(media.crash_point().image(0));
    let (mut found, mut old) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
    let mut count = 0;
    for at in device.step_by(PAGE_BYTES) {
        lost.read(at, &mut found);
        before.read(at, &mut old);
        // Other pages may have the same bytes.
        let is_late = |page| found[..] == page_bytes(page, model[page as usize] + 1);
        if found != old && (0..LATE_PAGES).any(is_late) {
            lost.write(at, &[0; PAGE_BYTES]);
            count += 1;
        }
    }
    assert!(count > 0, "{kind:?}: no late page lies on the device");
    (lost.visible_image(), model)
}

/// A device loses writes, and returns after a crash of the opening that took it for failed.
fn returned_device_keeps_flushed_pages() -> Result<(), String> {
    let kind = Kind::File;
    let (image, model) = pool_with_lost_writes(kind);
    let media = kind.recorder(image);
    kind.open(&media, &[DEVICE]).expect("a pool");
    for point in media.take_crash_points() {
        for image in point.images(64, 8, 17) {
            let media = Arc::new(Recorder::unrecorded(image));
            let mut pool = kind.open(&media, &[]).expect("a pool");
            let damaged = damaged_or_newer_pages(&mut pool, &model, 0..LATE_PAGES)?;
            let is_failed = state_of(&pool) == Some(DeviceState::Failed);
            if !is_failed && !damaged.is_empty() {
                return Err(format!("{damaged:?} are damaged"));
            }
        }
    }
    Ok(())
}

#[test]
fn device_that_returns_after_a_crash_keeps_flushed_pages() {
    returned_device_keeps_flushed_pages().unwrap_or_else(|wrong| panic!("{wrong}"));
}

#[test]
fn failure_that_is_named_after_replay_is_found() {
    defect::set(Some(Defect::FailureNamedAfterReplay));
    let found = returned_device_keeps_flushed_pages();
    defect::set(None);
    assert!(found.is_err());
}
