//! A pool with more sessions than heads of journals fit into the page of a superblock.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::poison::lock;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::geometry::{BadSize, Geometry, JOURNALS_MAX};
use pagemesh_store::pool::{FormatOptions, ObjectError, Pool, format_as};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, write};
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const JOURNALS: u32 = 320;
const POOL_BYTES: usize = 16 << 20;
/// Crash images of each fence.
const IMAGES: u64 = 3;

fn open(media: Recorder) -> (Arc<Recorder>, Pool<Recorder>) {
    let media = Arc::new(media);
    let opened = Pool::open(media.clone(), media.clone());
    (media, opened.expect("a pool").0)
}

fn new_pool() -> Image {
    let media = Recorder::unrecorded(Image::filled(POOL_BYTES, 0x1234));
    let options = FormatOptions {
        journals: Some(JOURNALS),
        ..FormatOptions::of(&media)
    };
    format_as(&media, Uuid::from_u128(1), options).expect("a pool");
    let (media, mut pool) = open(media.without_crash_points());
    pool.create(SLICE, u64::from(JOURNALS) * PAGE)
        .expect("room");
    pool.close().expect("a sound pool");
    media.visible_image()
}

/// A session that runs the owner's maintenance itself when it lacks frames.
fn session(pool: &Arc<Mutex<Pool<Recorder>>>) -> Session<Recorder> {
    let mut locked = lock(pool);
    let number = locked.open_session(1, 1).expect("a session");
    let mapping = locked.mapping().clone();
    drop(locked);
    let owner = Arc::downgrade(pool);
    Session::new(mapping, number).in_owner_process(Box::new(move || {
        let owner = owner.upgrade().expect("the pool outlives its sessions");
        lock(&owner).maintain().expect("a sound pool");
    }))
}

fn write_page(handle: Handle, one: &mut Session<Recorder>, page: u64, op: u64) {
    let stamp = Stamp {
        epoch: Epoch(0),
        op,
        open_ops: 0,
    };
    let data = [op as u8; PAGE_BYTES];
    let mut members = [LegSession {
        session: one,
        handle,
    }];
    let written = write(&mut members, page * PAGE, &data, stamp);
    written.map_err(|failure| failure.cause).expect("room");
}

fn assert_pages(pool: &mut Pool<Recorder>, expected: impl Fn(u64) -> u8) {
    let number = pool.open_session(1, 1).expect("a session");
    let mut one = Session::new(pool.mapping().clone(), number);
    let handle = pool.handle(SLICE).expect("the slice");
    let mut found = [0; PAGE_BYTES];
    for page in 0..u64::from(JOURNALS) - 1 {
        let read = one.read(&handle, page * PAGE, &mut found, Epoch(0));
        read.expect("a sound page");
        assert!(
            found.iter().all(|&byte| byte == expected(page)),
            "page {page}"
        );
    }
    pool.close_session(number).expect("ended");
}

#[test]
fn every_session_survives_a_crash_at_each_fence() {
    let (media, pool) = open(Recorder::from_image(new_pool()));
    let handle = pool.handle(SLICE).expect("the slice");
    let pool = Arc::new(Mutex::new(pool));
    let mut sessions: Vec<Session<Recorder>> = (1..JOURNALS).map(|_| session(&pool)).collect();
    let full = lock(&pool).open_session(1, 1);
    assert!(
        matches!(full, Err(ObjectError::SessionsFull(319))),
        "{full:?}"
    );
    for (page, one) in (0..).zip(&mut sessions) {
        write_page(handle, one, page, 1);
        media.take_crash_points();
    }
    // The last session's head moves: it lies behind the superblocks.
    lock(&pool).checkpoint().expect("a sound pool");
    write_page(handle, &mut sessions[318], 318, 2);
    lock(&pool).checkpoint().expect("a sound pool");
    let points = media.take_crash_points();
    assert!(points.len() > 4, "{} fences", points.len());
    for (number, point) in points.iter().enumerate() {
        for seed in 0..IMAGES {
            let (_, mut pool) = open(Recorder::unrecorded(point.sample(seed)));
            let mut last = [0; PAGE_BYTES];
            let session = pool.open_session(1, 1).expect("a session");
            let mut one = Session::new(pool.mapping().clone(), session);
            let handle = pool.handle(SLICE).expect("the slice");
            let read = one.read(&handle, 318 * PAGE, &mut last, Epoch(0));
            read.unwrap_or_else(|cause| panic!("fence {number}, seed {seed}: {cause}"));
            assert!([1, 2].contains(&last[0]), "fence {number}, seed {seed}");
            assert_pages(&mut pool, |page| match page {
                318 => last[0],
                _ => 1,
            });
        }
    }
    let (_, mut pool) = open(Recorder::unrecorded(media.crash_point().all_persisted()));
    assert_pages(&mut pool, |page| if page == 318 { 2 } else { 1 });
}

#[test]
fn number_of_sessions_beyond_a_limit_is_refused() {
    let plan = |bytes, journals| Geometry::plan_with(bytes, Some(journals));
    assert_eq!(plan(16 << 20, 3), Err(BadSize::Sessions(2)));
    assert_eq!(plan(16 << 20, 600), Err(BadSize::Sessions(599)));
    assert_eq!(
        plan(1 << 40, JOURNALS_MAX + 1),
        Err(BadSize::Sessions(4096))
    );
    assert!(plan(1 << 40, JOURNALS_MAX).is_ok());
}
