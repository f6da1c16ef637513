//! Pools of several devices.

use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::{Epoch, FrameNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Media, Recorder};
use pagemesh_store::check::{CheckOptions, PoolReport, check};
use pagemesh_store::devices::{Device, DeviceIdentity};
use pagemesh_store::pool::{FormatOptions, ObjectError, Pool, format_as};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::recovery::PoolError;
use pagemesh_store::scrub::{ScrubCursor, ScrubReport};
use pagemesh_store::session::{LegSession, Session, write};
use pagemesh_store::test_api::{ControlInternals, PoolInternals};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const FIRST_BYTES: u64 = 2 << 20;
const DEVICE_BYTES: u64 = 3 << 20;
/// More than the first device holds.
const PAGES: u64 = 800;

/// A pool with a second device, and an object that needs both.
struct TwoDevicePool {
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    device: Device,
}

fn open(media: &Arc<Recorder>) -> Result<Pool<Recorder>, PoolError> {
    Ok(Pool::open(media.clone(), media.clone())?.0)
}

fn session(pool: &mut Pool<Recorder>) -> Session<Recorder> {
    let number = pool.open_session(1, 1).expect("a session");
    Session::new(pool.mapping().clone(), number)
}

fn page_bytes(page: u64) -> Vec<u8> {
    (0..PAGE_BYTES)
        .map(|at| (page * 31 + at as u64 * 7) as u8)
        .collect()
}

fn filled_pool() -> TwoDevicePool {
    let bytes = vec![0xa5; (FIRST_BYTES + DEVICE_BYTES + (2 << 20)) as usize];
    let media = Arc::new(Recorder::unrecorded(Image::from_bytes(&bytes)));
    let options = FormatOptions {
        pool_bytes: FIRST_BYTES,
        ..FormatOptions::of(&*media)
    };
    format_as(&*media, Uuid::from_u128(1), options).expect("a pool");
    let mut pool = open(&media).expect("a pool");
    pool.create(SLICE, PAGES * PAGE).expect("room");
    let device = pool.plan_device(Uuid::from_u128(2), DEVICE_BYTES);
    let device = device.expect("a possible device");
    pool.add_device(device).expect("a sound medium");
    let mut one = session(&mut pool);
    let handle = pool.handle(SLICE).expect("the slice");
    for page in 0..PAGES {
        let stamp = Stamp {
            epoch: Epoch(0),
            op: page + 1,
            open_ops: 0,
        };
        let mut members = [LegSession {
            session: &mut one,
            handle,
        }];
        let written = write(&mut members, page * PAGE, &page_bytes(page), stamp);
        written.map_err(|failure| failure.cause).expect("room");
        while pool.maintain().expect("a sound pool") {}
    }
    pool.close_session(one.number()).expect("ended");
    TwoDevicePool {
        media,
        pool,
        device,
    }
}

fn assert_contents(pool: &mut Pool<Recorder>) {
    let mut one = session(pool);
    let handle = pool.handle(SLICE).expect("the slice");
    let mut found = vec![0; PAGE_BYTES];
    for page in 0..PAGES {
        let read = one.read(&handle, page * PAGE, &mut found, Epoch(0));
        read.expect("a sound page");
        assert!(found == page_bytes(page), "page {page}");
    }
    pool.close_session(one.number()).expect("ended");
}

fn checked(media: &Recorder) -> PoolReport {
    let scratch = Recorder::unrecorded(media.visible_image());
    let mut options = CheckOptions {
        is_ordered: true,
        reads_data: true,
        progress: &mut |_, _| {},
    };
    check(&scratch, &mut options).expect("a pool").0
}

fn scrub(pool: &mut Pool<Recorder>) -> Result<ScrubReport, ObjectError> {
    let mut report = ScrubReport::default();
    let mut next = Some(ScrubCursor::default());
    while let Some(cursor) = next {
        next = pool.scrub(cursor, &mut report)?;
    }
    Ok(report)
}

#[test]
fn pool_uses_and_frees_frames_of_all_devices() {
    let TwoDevicePool {
        media,
        pool,
        device,
    } = filled_pool();
    let both = pool.usage().capacity_bytes;
    assert!(both > FIRST_BYTES && both < FIRST_BYTES + DEVICE_BYTES);
    pool.close().expect("a sound pool");
    let found = checked(&media);
    assert!(found.is_sound(), "{:?}", found.findings);
    assert_eq!(found.pages_summed, PAGES);
    let mut pool = open(&media).expect("a pool");
    assert_eq!(pool.usage().capacity_bytes, both);
    assert_contents(&mut pool);
    pool.delete(SLICE).expect("deleted");
    for _ in 0..6 {
        while pool.maintain().expect("a sound pool") {}
    }
    assert_eq!(pool.usage().free_bytes, both);
    assert_eq!(pool.mapping().geometry().devices.iter().count(), 1);
    let mut header = [0; PAGE_BYTES];
    media.read((device.first_page * PAGE) as usize, &mut header);
    let identity = DeviceIdentity {
        pool: Uuid::from_u128(1),
        device: Uuid::from_u128(2),
        opening: pool.superblock().incarnation,
    };
    assert_eq!(Device::identify(&header), Some(identity));
}

/// The contents of the pool after the newer superblock was damaged.
fn damaged_superblock_outcome() -> Result<(), PoolError> {
    let TwoDevicePool { media, pool, .. } = filled_pool();
    let newest = (pool.superblock().generation % 2) as usize * PAGE_BYTES;
    let mut image = media.visible_image();
    image.set_word(newest + 512, 1);
    let media = Arc::new(Recorder::unrecorded(image));
    assert_contents(&mut open(&media)?);
    Ok(())
}

#[test]
fn older_superblock_knows_a_device_that_joined() {
    damaged_superblock_outcome().expect("the older superblock suffices");
    // Before the next checkpoint rewrites the older one: nothing was written since the device joined.
    let older_knows = |defect| {
        let TwoDevicePool { media, .. } = pool_without_writes(defect);
        let copies = [0, PAGE_BYTES].map(|at| {
            let mut page = [0; PAGE_BYTES];
            media.read(at, &mut page);
            let block = pagemesh_store::superblock::Superblock::decode(&page);
            block.expect("sound").geometry.devices.iter().count()
        });
        copies == [1, 1]
    };
    assert!(older_knows(None));
    assert!(!older_knows(Some(Defect::DeviceInOneSuperblock)));
}

fn pool_without_writes(defect: Option<Defect>) -> TwoDevicePool {
    let len = (FIRST_BYTES + DEVICE_BYTES + (2 << 20)) as usize;
    let media = Arc::new(Recorder::unrecorded(Image::filled(len, 0)));
    let options = FormatOptions {
        pool_bytes: FIRST_BYTES,
        ..FormatOptions::of(&*media)
    };
    format_as(&*media, Uuid::from_u128(1), options).expect("a pool");
    let mut pool = open(&media).expect("a pool");
    let device = pool.plan_device(Uuid::from_u128(2), DEVICE_BYTES);
    let device = device.expect("a possible device");
    defect::set(defect);
    let added = pool.add_device(device);
    defect::set(None);
    added.expect("a sound medium");
    TwoDevicePool {
        media,
        pool,
        device,
    }
}

#[test]
fn damaged_bitmap_of_a_device_is_rebuilt() {
    let TwoDevicePool {
        media,
        mut pool,
        device,
    } = filled_pool();
    pool.checkpoint().expect("a sound pool");
    let line = pool
        .mapping()
        .geometry()
        .devices
        .iter()
        .next()
        .map(|it| it.first_page + 2);
    let at = (line.expect("a device") * PAGE) as usize;
    media.store(at, media.load(at) ^ 0xff00);
    assert_eq!(scrub(&mut pool).expect("a sound pool").bitmap_lines, 1);
    assert!(checked(&media).is_sound());
    pool.close().expect("a sound pool");
    media.store(at, media.load(at) ^ 0xff00);
    let mut pool = open(&media).expect("rebuilt");
    assert_contents(&mut pool);
    assert!(checked(&media).is_sound());
    let first = device.frames().start;
    let numbers = *pool.mapping().geometry();
    assert!(numbers.frame_numbers().contains(FrameNo(first)));
    assert!(!numbers.frame_numbers().contains(FrameNo(first - 1)));
}

#[test]
fn missing_device_is_refused() {
    let TwoDevicePool { media, pool, .. } = filled_pool();
    drop(pool);
    let whole = media.visible_image().to_bytes();
    let short = Image::from_bytes(&whole[..FIRST_BYTES as usize]);
    let refused = open(&Arc::new(Recorder::unrecorded(short))).map(drop);
    assert!(
        matches!(refused, Err(PoolError::Truncated { .. })),
        "{refused:?}"
    );
}

/// Images of a pool after its first opening and after two more. The end of the first device divides each.
fn images_of_openings() -> ([Vec<u8>; 3], usize) {
    let TwoDevicePool {
        media,
        pool,
        device,
    } = filled_pool();
    pool.close().expect("a sound pool");
    let image = || media.visible_image().to_bytes();
    let first = image();
    let [second, third] = [(); 2].map(|()| {
        open(&media).expect("a pool").close().expect("a sound pool");
        image()
    });
    ([first, second, third], device.bytes().start)
}

/// Opens the first device of one image with the second device of another.
fn open_mixed(first: &[u8], second: &[u8], at: usize) -> Result<(), PoolError> {
    let bytes = [&first[..at], &second[at..]].concat();
    let media = Arc::new(Recorder::unrecorded(Image::from_bytes(&bytes)));
    let mut pool = open(&media)?;
    assert_contents(&mut pool);
    pool.close()?;
    assert!(checked(&media).is_sound());
    Ok(())
}

#[test]
fn stale_copy_of_a_device_is_refused() {
    let ([first, second, third], at) = images_of_openings();
    for (newer, older) in [(&second, &first), (&third, &first), (&third, &second)] {
        let refused = open_mixed(newer, older, at);
        let is_stale = matches!(refused, Err(PoolError::StaleDevice { .. }));
        assert!(is_stale, "{refused:?}");
    }
    open_mixed(&third, &third, at).expect("the device itself");
}

#[test]
fn stale_copy_of_the_first_device_is_refused() {
    let ([first, _, third], at) = images_of_openings();
    let refused = open_mixed(&first, &third, at);
    let is_stale = matches!(refused, Err(PoolError::StaleFirstDevice { .. }));
    assert!(is_stale, "{refused:?}");
}

#[test]
fn crash_between_headers_and_superblocks_opens() {
    // The headers have the next number, and the superblocks do not.
    let ([first, second, _], at) = images_of_openings();
    open_mixed(&first, &second, at).expect("the state at a crash");
}

#[test]
fn device_with_a_damaged_header_copy_opens() {
    let ([image, ..], at) = images_of_openings();
    for copy in [0, PAGE_BYTES] {
        let mut damaged = image.clone();
        damaged[at + copy + 20] ^= 1;
        open_mixed(&damaged, &damaged, at).expect("the other copy suffices");
    }
    let mut damaged = image;
    for copy in [0, PAGE_BYTES] {
        damaged[at + copy + 20] ^= 1;
    }
    let refused = open_mixed(&damaged, &damaged, at);
    let is_refused = matches!(refused, Err(PoolError::NoDeviceHeader(_)));
    assert!(is_refused, "{refused:?}");
}

#[test]
fn check_of_a_pool_keeps_its_headers() {
    let ([image, ..], at) = images_of_openings();
    let media = Recorder::unrecorded(Image::from_bytes(&image));
    assert!(checked(&media).is_sound());
    let after = media.visible_image().to_bytes();
    assert!(after[at..at + 2 * PAGE_BYTES] == image[at..at + 2 * PAGE_BYTES]);
}

#[test]
fn plan_that_is_no_longer_valid_is_refused() {
    let TwoDevicePool {
        mut pool, device, ..
    } = pool_without_writes(None);
    let refused = pool.add_device(device);
    assert!(
        matches!(refused, Err(PoolError::DeviceChanged)),
        "{refused:?}"
    );
    assert!(pool.usage().free_bytes > FIRST_BYTES);
}

fn write_page(
    pool: &mut Pool<Recorder>,
    session: &mut Session<Recorder>,
    handle: Handle,
    page: u64,
) {
    while pool.maintain().expect("a sound pool") {}
    write_granted(session, handle, page);
    while pool.maintain().expect("a sound pool") {}
}

/// Writes a page without the owner: the session has frames.
fn write_granted(session: &mut Session<Recorder>, handle: Handle, page: u64) {
    let stamp = Stamp {
        epoch: Epoch(0),
        // Rising, so that earlier operations count as complete.
        op: NEXT_OP.fetch_add(1, Ordering::Relaxed),
        open_ops: 0,
    };
    let mut members = [LegSession { session, handle }];
    let written = write(&mut members, page * PAGE, &page_bytes(page), stamp);
    written.map_err(|failure| failure.cause).expect("room");
}

static NEXT_OP: AtomicU64 = AtomicU64::new(1);

/// Slices and pages of the test below. The filler takes most of the first device, and is deleted.
const FILLER: SliceId = SliceId(Uuid::from_u128(8));
const FILLER_PAGES: u64 = 300;
const EARLY_PAGES: u64 = 250;
const LATE_PAGES: u64 = 8;

#[test]
fn cancelled_drain_frees_no_granted_frame() {
    let TwoDevicePool {
        mut pool, device, ..
    } = pool_without_writes(None);
    pool.create(FILLER, FILLER_PAGES * PAGE).expect("room");
    pool.create(SLICE, PAGES * PAGE).expect("room");
    let mut one = session(&mut pool);
    let filler = pool.handle(FILLER).expect("the slice");
    (0..FILLER_PAGES).for_each(|page| write_page(&mut pool, &mut one, filler, page));
    let handle = pool.handle(SLICE).expect("the slice");
    (0..EARLY_PAGES).for_each(|page| write_page(&mut pool, &mut one, handle, page));
    pool.delete(FILLER).expect("deleted");
    for _ in 0..12 {
        while pool.maintain().expect("a sound pool") {}
    }
    // A session that is stalled in an operation keeps the grants from being recalled.
    let stalled = session(&mut pool);
    let mapping = pool.mapping().clone();
    let active = mapping.control().session_cells(stalled.number()).active();
    active.fetch_add(1, Ordering::SeqCst);
    let stuck = pool.start_drain(device.id);
    assert!(
        matches!(stuck, Err(ObjectError::SessionStuck { .. })),
        "{stuck:?}"
    );
    active.fetch_add(1, Ordering::SeqCst);
    // These take granted frames of the device, and no checkpoint passes them.
    (EARLY_PAGES..EARLY_PAGES + LATE_PAGES).for_each(|page| write_granted(&mut one, handle, page));
    pool.cancel_drain(device.id).expect("a sound pool");
    pool.close_session(stalled.number()).expect("ended");
    let mut two = session(&mut pool);
    // More pages than there are frames: each free frame is used.
    for page in (EARLY_PAGES + LATE_PAGES..PAGES)
        .cycle()
        .take(3 * PAGES as usize)
    {
        write_page(&mut pool, &mut two, handle, page);
    }
    assert_contents(&mut pool);
}

#[test]
fn drain_without_room_elsewhere_is_refused() {
    let TwoDevicePool {
        mut pool, device, ..
    } = filled_pool();
    let refused = pool.start_drain(device.id);
    let is_refused = matches!(refused, Err(ObjectError::NoRoomToDrain { .. }));
    assert!(is_refused, "{refused:?}");
    let early = pool.remove_device(device.id);
    assert!(
        matches!(early, Err(ObjectError::NotDraining(_))),
        "{early:?}"
    );
}
