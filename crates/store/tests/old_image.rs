//! Opens a pool that an earlier build wrote and a dying process left, and checks its contents.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{InFlightOp, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fuzz::image;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::pool::{FormatOptions, Pool, format_as};
use pagemesh_store::session::{LegSession, Session, clear, write};
use pagemesh_store::superblock::Superblock;
use std::path::Path;
use std::sync::Arc;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const PAGES: u64 = 256;
const PAGE: u64 = PAGE_BYTES as u64;
const RESOLUTION: &str = "a pool of version 1 that an earlier build wrote cannot be read any more: \
    undo the change, or, if the format was meant to change, see the top of docs/formats.md";

fn open(media: &Arc<Recorder>) -> Pool<Recorder> {
    let opened = Pool::open(media.clone(), media.clone());
    opened
        .unwrap_or_else(|cause| panic!("{RESOLUTION} ({cause})"))
        .0
}

fn session(pool: &mut Pool<Recorder>) -> Session<Recorder> {
    let number = pool.open_session(1, 1).expect("a session");
    Session::new(pool.mapping().clone(), number)
}

/// The writes: bytes at an offset; no bytes stand for a clear of two pages.
fn steps() -> Vec<(u64, Vec<u8>)> {
    let page = |byte| vec![byte; PAGE_BYTES];
    vec![
        (3 * PAGE, page(0x33)),
        (10 * PAGE, vec![0x1a; 4 * PAGE_BYTES]),
        (11 * PAGE, Vec::new()),
        (200 * PAGE + 100, vec![0xc5; 1000]),
        // Written after the checkpoint, and so in the journal only.
        (3 * PAGE, page(0x44)),
        (13 * PAGE, vec![0xd5; 64]),
        (20 * PAGE, Vec::new()),
        (30 * PAGE, page(0xe6)),
    ]
}

fn contents() -> Vec<u8> {
    let mut bytes = vec![0; (PAGES * PAGE) as usize];
    for (offset, data) in steps() {
        let at = offset as usize;
        match data.is_empty() {
            true => bytes[at..at + 2 * PAGE_BYTES].fill(0),
            false => bytes[at..at + data.len()].copy_from_slice(&data),
        }
    }
    bytes
}

fn make() -> Vec<u8> {
    let media = Arc::new(Recorder::new(8 << 20));
    let options = FormatOptions {
        pool_bytes: 2 << 20,
        ..FormatOptions::of(&*media)
    };
    format_as(&*media, Uuid::from_u128(1), options).expect("a pool");
    let mut pool = open(&media);
    let device = pool.plan_device(Uuid::from_u128(2), 3 << 20);
    pool.add_device(device.expect("room")).expect("a device");
    pool.create(SliceId(Uuid::from_u128(6)), PAGE)
        .expect("room");
    pool.create(SLICE, PAGES * PAGE).expect("room");
    pool.delete(SliceId(Uuid::from_u128(6))).expect("deleted");
    pool.raise_epoch(SLICE, Epoch(2)).expect("no sessions");
    let mut one = session(&mut pool);
    let handle = pool.handle(SLICE).expect("the slice");
    for (op, (offset, data)) in (1..).zip(steps()) {
        if op == 5 {
            // The last operation of this session may be missing on another leg.
            pool.close_session(one.number()).expect("ended");
            while pool.maintain().expect("a sound pool") {}
            pool.checkpoint().expect("a sound pool");
            one = session(&mut pool);
        }
        let stamp = Stamp {
            epoch: Epoch(2),
            op,
            open_ops: u32::from(op == 4),
        };
        let session = &mut one;
        let mut members = [LegSession { session, handle }];
        let done = match data.is_empty() {
            true => clear(&mut members, offset, 2 * PAGE, stamp),
            false => write(&mut members, offset, &data, stamp),
        };
        done.map_err(|failure| failure.cause).expect("room");
        if op < 4 {
            while pool.maintain().expect("a sound pool") {}
        }
    }
    media.visible_image().to_bytes()
}

#[test]
fn stored_pool_of_version_1_is_opened() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/pool-1.txt");
    let image = Image::from_bytes(&image::golden_image(&path, make));
    let mut pool = open(&Arc::new(Recorder::from_image(image)));
    let slices: Vec<_> = pool.list().map(|it| (it.slice, it.size_bytes)).collect();
    assert_eq!(slices, [(SLICE, PAGES * PAGE)], "{RESOLUTION}");
    let (_, entry) = pool.find(SLICE).expect(RESOLUTION);
    assert_eq!(entry.epoch, Epoch(2), "{RESOLUTION}");
    let listed = pool.in_flight(SLICE).expect(RESOLUTION).expect("a list");
    let told = InFlightOp {
        page: PageNo(200),
        count: 1,
        epoch: Epoch(2),
        op: 4,
    };
    assert!(listed.contains(&told), "{RESOLUTION}: {listed:?}");
    let mut one = session(&mut pool);
    let handle = pool.handle(SLICE).expect(RESOLUTION);
    let mut found = vec![0xee; (PAGES * PAGE) as usize];
    one.read(&handle, 0, &mut found, Epoch(2))
        .expect(RESOLUTION);
    assert!(found == contents(), "{RESOLUTION}");
    let births = one.births(&handle, PageNo(10), 5, Epoch(2));
    let expected = [2, 2, 2, 2, 0].map(Epoch);
    assert_eq!(births, Ok(expected.to_vec()), "{RESOLUTION}");
    // The pool can be used further.
    while pool.maintain().expect(RESOLUTION) {}
    pool.checkpoint().expect(RESOLUTION);
}

#[test]
fn pool_of_earlier_draft_is_refused() {
    let mut bytes = make();
    for page in bytes.chunks_mut(PAGE_BYTES).take(2) {
        let page: &mut [u8; PAGE_BYTES] = page.try_into().expect("a page");
        let mut superblock = Superblock::decode(page).expect("sound");
        superblock.features.incompatible = 1 << 63;
        *page = superblock.encode();
    }
    let media = Arc::new(Recorder::from_image(Image::from_bytes(&bytes)));
    let refused = Pool::open(media.clone(), media).map(drop);
    let cause = refused.expect_err("another draft").to_string();
    assert!(cause.contains("another draft"), "{cause}");
}

#[test]
fn stored_pool_of_version_0_is_refused() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/pool-0.txt");
    let image = Image::from_bytes(&image::read_image(&path));
    let media = Arc::new(Recorder::from_image(image));
    let opened = Pool::open(media.clone(), media).map(drop);
    let told = opened.expect_err("another version").to_string();
    assert!(told.contains("format version 0"), "{told}");
}
