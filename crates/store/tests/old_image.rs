//! Opens pools that earlier builds wrote and a dying process left, and checks their contents. The newest image of
//! each kind has exactly the bytes that this build writes, so an unintended change of the format is found.

use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{InFlightOp, SliceReply, SliceRequest, Stamp};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fuzz::image;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::pool::{FormatOptions, Pool, format_as};
use pagemesh_store::requests::{ExecuteOutcome, execute};
use pagemesh_store::session::{LegSession, Session, clear, write};
use pagemesh_store::superblock::Superblock;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const PAGES: u64 = 256;
const PAGE: u64 = PAGE_BYTES as u64;
const POOL_BYTES: usize = 2 << 20;
const DEVICE_BYTES: u64 = 3 << 20;
/// The epoch of the writes, and the birth of the copied pages.
const EPOCH: Epoch = Epoch(2);
const COPIED_BIRTH: Epoch = Epoch(1);
const RESOLUTION: &str = "a pool of version 1 that an earlier build wrote cannot be read any more: \
    undo the change (the format is frozen, see docs/rfd/028-format-1.md)";

/// The kinds of pools that images are kept of.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// One device.
    Plain,
    /// Two devices of one kind.
    Devices,
    /// A device of memory, and one of flash behind it.
    Flash,
}

const KINDS: [Kind; 3] = [Kind::Plain, Kind::Devices, Kind::Flash];

impl Kind {
    /// The images, the newest last. They are never replaced.
    fn images(self) -> &'static [&'static str] {
        match self {
            Kind::Plain => &["pool-1.txt"],
            Kind::Devices => &["pool-1-devices.txt"],
            Kind::Flash => &["pool-1-flash.txt"],
        }
    }

    fn media(self, image: Image) -> Arc<Recorder> {
        Arc::new(match self {
            Kind::Plain | Kind::Devices => Recorder::from_image(image),
            Kind::Flash => Recorder::tiered(image, POOL_BYTES).without_crash_points(),
        })
    }

    fn open(self, bytes: &[u8]) -> (Arc<Recorder>, Pool<Recorder>) {
        let media = self.media(Image::from_bytes(bytes));
        let opened = Pool::open(media.clone(), media.clone());
        let (pool, _) = opened.unwrap_or_else(|cause| panic!("{self:?}: {RESOLUTION} ({cause})"));
        (media, pool)
    }

    /// A pool with a part of its changes in the journals only.
    fn make(self) -> Vec<u8> {
        let bytes = match self {
            Kind::Plain => POOL_BYTES,
            Kind::Devices | Kind::Flash => 4 * POOL_BYTES,
        };
        let media = self.media(Image::from_bytes(&vec![0; bytes]));
        let options = FormatOptions {
            pool_bytes: POOL_BYTES as u64,
            ..FormatOptions::of(&*media)
        };
        format_as(&*media, Uuid::from_u128(1), options).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a pool");
        if !matches!(self, Kind::Plain) {
            let device = pool.plan_device(Uuid::from_u128(2), DEVICE_BYTES);
            pool.add_device(device.expect("room")).expect("a device");
        }
        pool.create(SliceId(Uuid::from_u128(6)), PAGE)
            .expect("room");
        pool.create(SLICE, PAGES * PAGE).expect("room");
        pool.delete(SliceId(Uuid::from_u128(6))).expect("deleted");
        pool.raise_epoch(SLICE, EPOCH).expect("no sessions");
        change(self, &mut pool);
        media.visible_image().to_bytes()
    }
}

fn path(name: &str) -> PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    data.join(name)
}

fn session(pool: &mut Pool<Recorder>) -> Session<Recorder> {
    let number = pool.open_session(1, 1).expect("a session");
    Session::new(pool.mapping().clone(), number)
}

fn maintain(pool: &mut Pool<Recorder>) {
    while pool.maintain().expect("a sound pool") {}
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

/// The copy after the last write.
fn copy() -> SliceRequest {
    SliceRequest::Copy {
        page: PageNo(40),
        births: vec![COPIED_BIRTH; 2],
        data: vec![0xb7; 2 * PAGE_BYTES].into(),
        stamp: stamp(steps().len() as u64 + 1),
    }
}

fn stamp(op: u64) -> Stamp {
    Stamp {
        epoch: EPOCH,
        op,
        open_ops: u32::from(op == 4),
    }
}

fn contents() -> Vec<u8> {
    let mut bytes = vec![0; (PAGES * PAGE) as usize];
    let copied = (40 * PAGE, vec![0xb7; 2 * PAGE_BYTES]);
    for (offset, data) in steps().into_iter().chain([copied]) {
        let at = offset as usize;
        match data.is_empty() {
            true => bytes[at..at + 2 * PAGE_BYTES].fill(0),
            false => bytes[at..at + data.len()].copy_from_slice(&data),
        }
    }
    bytes
}

fn change(kind: Kind, pool: &mut Pool<Recorder>) {
    let mut one = session(pool);
    let handle = pool.handle(SLICE).expect("the slice");
    for (op, (offset, data)) in (1..).zip(steps()) {
        if op == 5 {
            if matches!(kind, Kind::Flash) {
                demote(pool);
            }
            // The last operation of this session may be missing on another leg.
            pool.close_session(one.number()).expect("ended");
            maintain(pool);
            pool.checkpoint().expect("a sound pool");
            one = session(pool);
        }
        let session = &mut one;
        let mut members = [LegSession { session, handle }];
        let done = match data.is_empty() {
            true => clear(&mut members, offset, 2 * PAGE, stamp(op)),
            false => write(&mut members, offset, &data, stamp(op)),
        };
        done.map_err(|failure| failure.cause).expect("room");
        if op < 4 {
            maintain(pool);
        }
    }
    let copied = execute(&mut one, handle, EPOCH, copy());
    assert!(
        matches!(copied, ExecuteOutcome::Done(Ok(SliceReply::Done))),
        "{copied:?}"
    );
}

/// Moves two pages to flash.
fn demote(pool: &mut Pool<Recorder>) {
    let mut mover = session(pool);
    let handle = pool.handle(SLICE).expect("the slice");
    let mapping = pool.mapping().clone();
    let mut moves = mover
        .copy_pages(&handle, 10..14, |_| true)
        .expect("the slice");
    let frames = pool.reserve_flash(moves.len() as u64);
    assert_eq!((moves.len(), frames.len()), (2, 2));
    for (copy, frame) in moves.iter_mut().zip(frames) {
        copy.write_to_flash(&mapping, frame);
    }
    mover.sync_moves().expect("a sound medium");
    mover.commit_moves(&handle, &mut moves).expect("room");
    pool.end_moves(&moves, &[]);
    assert!(moves.iter().all(|it| it.is_moved()));
    pool.close_session(mover.number()).expect("ended");
}

fn check(kind: Kind, bytes: &[u8]) {
    let (_, mut pool) = kind.open(bytes);
    let slices: Vec<_> = pool.list().map(|it| (it.slice, it.size_bytes)).collect();
    assert_eq!(slices, [(SLICE, PAGES * PAGE)], "{RESOLUTION}");
    let (_, entry) = pool.find(SLICE).expect(RESOLUTION);
    assert_eq!(entry.epoch, EPOCH, "{RESOLUTION}");
    let listed = pool.in_flight(SLICE).expect(RESOLUTION).expect("a list");
    let told = InFlightOp {
        page: PageNo(200),
        count: 1,
        epoch: EPOCH,
        op: 4,
    };
    assert!(listed.contains(&told), "{RESOLUTION}: {listed:?}");
    let mut one = session(&mut pool);
    let handle = pool.handle(SLICE).expect(RESOLUTION);
    let mut found = vec![0xee; (PAGES * PAGE) as usize];
    one.read(&handle, 0, &mut found, EPOCH).expect(RESOLUTION);
    assert!(found == contents(), "{kind:?}: {RESOLUTION}");
    let births = one.births(&handle, PageNo(10), 5, EPOCH);
    let expected = [2, 2, 2, 2, 0].map(Epoch);
    assert_eq!(births, Ok(expected.to_vec()), "{RESOLUTION}");
    let births = one.births(&handle, PageNo(40), 2, EPOCH);
    assert_eq!(births, Ok(vec![COPIED_BIRTH; 2]), "{RESOLUTION}");
    // The pool can be used further.
    maintain(&mut pool);
    pool.checkpoint().expect(RESOLUTION);
}

#[test]
fn stored_pools_of_version_1_are_opened() {
    for kind in KINDS {
        for name in kind.images() {
            check(kind, &image::golden_image(&path(name), || kind.make()));
        }
    }
}

#[test]
fn new_pool_has_the_bytes_of_the_stored_one() {
    for kind in KINDS {
        let newest = kind.images().last().expect("an image");
        let (made, kept) = (kind.make(), image::read_image(&path(newest)));
        let differs = (0..made.len().max(kept.len())).find(|&at| made.get(at) != kept.get(at));
        let places = differs.map(|at| (at / PAGE_BYTES, at % PAGE_BYTES));
        assert_eq!(
            places, None,
            "page and byte in which a new pool differs from {newest}. If the change only writes other valid values \
             or chooses other places, add an image with a new name to `Kind::images`. Otherwise it changes the \
             frozen format, and needs a feature bit"
        );
    }
}

/// The bytes of a pool with other features in both superblocks.
fn with_features(change: impl Fn(&mut Superblock)) -> Vec<u8> {
    let mut bytes = Kind::Plain.make();
    for page in bytes.chunks_mut(PAGE_BYTES).take(2) {
        let page: &mut [u8; PAGE_BYTES] = page.try_into().expect("a page");
        let mut superblock = Superblock::decode(page).expect("sound");
        change(&mut superblock);
        *page = superblock.encode();
    }
    bytes
}

fn refusal(bytes: &[u8]) -> String {
    let media = Kind::Plain.media(Image::from_bytes(bytes));
    let opened = Pool::open(media.clone(), media).map(drop);
    opened.expect_err("refused").to_string()
}

#[test]
fn pool_of_a_draft_is_refused() {
    for bit in 61..64 {
        let bytes = with_features(|block| block.features.incompatible = 1 << bit);
        let cause = refusal(&bytes);
        assert!(cause.contains("draft of format version 1"), "{cause}");
        assert!(cause.contains("pagemesh replica"), "{cause}");
    }
}

#[test]
fn pool_with_unknown_features_is_refused() {
    let later = refusal(&with_features(|it| it.features.incompatible = 1 << 5));
    assert!(later.contains("0x20") && later.contains("later"), "{later}");
    let later = refusal(&with_features(|it| it.features.read_compatible = 1 << 6));
    assert!(later.contains("0x40") && later.contains("later"), "{later}");
}

#[test]
fn unknown_compatible_features_are_kept() {
    let bytes = with_features(|block| block.features.compatible = 1 << 7);
    let (media, mut pool) = Kind::Plain.open(&bytes);
    pool.create(SliceId(Uuid::from_u128(8)), PAGE)
        .expect("room");
    pool.checkpoint().expect("a sound pool");
    drop(pool);
    let bytes = media.visible_image().to_bytes();
    for page in bytes.as_chunks::<PAGE_BYTES>().0.iter().take(2) {
        let block = Superblock::decode(page).expect("sound");
        assert_eq!(block.features.compatible, 1 << 7);
    }
}

#[test]
fn stored_pool_of_version_0_is_refused() {
    let told = refusal(&image::read_image(&path("pool-0.txt")));
    assert!(told.contains("format version 0"), "{told}");
}
