//! The counts of [`Pool::media_bytes`] against a medium that counts its lines.

use pagemesh_base::checksum::PageChecksums;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::media_bytes::MediaBytes;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::{LINE_BYTES, PAGE_BYTES};
use pagemesh_pmem::{FenceProof, Image, Media, Recorder, UnfencedStores};
use pagemesh_store::geometry::Geometry;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, clear, write};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const POOL_BYTES: usize = 4 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(9));
const PAGES: u64 = 256;
/// The byte of a journal's line with its kind, and the kind of a pad.
const KIND_AT: usize = 4;
const KIND_PAD: u8 = 3;

/// A medium that counts the lines that it writes: streamed ones, and changed ones at their flush.
struct CountingMedia {
    inner: Recorder,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    geometry: Option<Geometry>,
    written: MediaBytes,
    changed: BTreeSet<usize>,
    /// Pages that were zeroed: nodes of page tables.
    nodes: BTreeSet<usize>,
    /// Lines that pads skipped, without the pads themselves.
    skipped_lines: u64,
}

impl Counts {
    fn add(&mut self, at: usize, bytes: usize, is_page: bool) {
        let Some(geometry) = &self.geometry else {
            return;
        };
        let frames = geometry.frames.start as usize..geometry.frames.end() as usize;
        let region = &geometry.journal_region;
        let journals = region.start as usize..region.end() as usize;
        let is_node = !is_page && self.nodes.contains(&(at / PAGE_BYTES));
        let bytes = bytes as u64;
        if frames.contains(&at) && !is_node {
            self.written.data += bytes;
        } else if journals.contains(&at) {
            self.written.journal += bytes;
        } else {
            self.written.tables += bytes;
        }
    }

    fn add_pad(&mut self, at: usize) {
        let Some(geometry) = &self.geometry else {
            return;
        };
        let within = (at - geometry.journal_at(0)) % geometry.journal_bytes as usize;
        let rest = geometry.journal_bytes as usize - within;
        self.skipped_lines += (rest / LINE_BYTES) as u64 - 1;
    }
}

impl CountingMedia {
    fn counts(&self) -> std::sync::MutexGuard<'_, Counts> {
        self.counts.lock().expect("no test panicked")
    }
}

impl Media for CountingMedia {
    fn len_bytes(&self) -> usize {
        self.inner.len_bytes()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        self.inner.read(offset, into);
    }

    fn load(&self, offset: usize) -> u64 {
        self.inner.load(offset)
    }

    fn store(&self, offset: usize, word: u64) {
        self.counts().changed.insert(offset / LINE_BYTES);
        self.inner.store(offset, word);
    }

    fn compare_exchange(&self, offset: usize, old: u64, new: u64) -> Result<(), u64> {
        self.inner.compare_exchange(offset, old, new)?;
        self.counts().changed.insert(offset / LINE_BYTES);
        Ok(())
    }

    fn stream_line(&self, offset: usize, line: &[u8; LINE_BYTES]) -> UnfencedStores {
        let mut counts = self.counts();
        let before = counts.written.journal;
        counts.add(offset, LINE_BYTES, false);
        if counts.written.journal > before && line[KIND_AT] == KIND_PAD {
            counts.add_pad(offset);
        }
        self.inner.stream_line(offset, line)
    }

    fn stream_page(
        targets: &[(&Self, usize)],
        page: &[u8; PAGE_BYTES],
    ) -> (PageChecksums, UnfencedStores) {
        for (media, at) in targets {
            let mut counts = media.counts();
            counts.add(*at, PAGE_BYTES, true);
            match page.iter().any(|&byte| byte != 0) {
                true => counts.nodes.remove(&(at / PAGE_BYTES)),
                false => counts.nodes.insert(at / PAGE_BYTES),
            };
        }
        let targets: Vec<_> = targets
            .iter()
            .map(|(media, at)| (&media.inner, *at))
            .collect();
        Recorder::stream_page(&targets, page)
    }

    fn flush(&self, offset: usize, len: usize) -> UnfencedStores {
        let mut counts = self.counts();
        for line in offset / LINE_BYTES..(offset + len).div_ceil(LINE_BYTES) {
            if counts.changed.remove(&line) {
                counts.add(line * LINE_BYTES, LINE_BYTES, false);
            }
        }
        self.inner.flush(offset, len)
    }

    fn fence(&self, stores: UnfencedStores) -> FenceProof {
        self.inner.fence(stores)
    }
}

/// An open pool with an object. The counts begin at its opening.
fn pool() -> (Arc<CountingMedia>, Pool<CountingMedia>, Handle) {
    let media = Arc::new(CountingMedia {
        inner: Recorder::unrecorded(Image::filled(POOL_BYTES, 0)),
        counts: Mutex::default(),
    });
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let mut pool = Pool::open(media.clone(), media.clone()).expect("sound").0;
    media.counts().geometry = Some(*pool.mapping().geometry());
    assert_eq!(pool.media_bytes(), MediaBytes::default());
    pool.create(SLICE, PAGES * PAGE_BYTES as u64).expect("room");
    let handle = pool.handle(SLICE).expect("the object");
    (media, pool, handle)
}

fn session(pool: &mut Pool<CountingMedia>) -> Session<CountingMedia> {
    let number = pool.open_session(1, 1).expect("a session");
    Session::new(pool.mapping().clone(), number)
}

fn stamp(op: u64) -> Stamp {
    Stamp {
        epoch: Epoch(1),
        op,
        open_ops: 0,
    }
}

fn put(session: &mut Session<CountingMedia>, handle: Handle, at: u64, data: &[u8], op: u64) {
    write(&mut [LegSession { session, handle }], at, data, stamp(op)).expect("room");
}

#[derive(Clone, Debug)]
enum Step {
    Write { page: u64, count: u64 },
    Clear { page: u64, count: u64 },
    Maintain,
    Reconnect,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let run = (0..PAGES, 1u64..20).prop_map(|(page, count)| (page, count.min(PAGES - page)));
    let near = (0..16u64).prop_map(|page| (page, 1));
    let step = prop_oneof![
        6 => run.clone().prop_map(|(page, count)| Step::Write { page, count }),
        6 => near.prop_map(|(page, count)| Step::Write { page, count }),
        2 => run.prop_map(|(page, count)| Step::Clear { page, count }),
        2 => Just(Step::Maintain),
        1 => Just(Step::Reconnect),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn whole_pages_count_as_the_medium_counts_them(steps in steps()) {
        let (media, mut pool, handle) = pool();
        let mut writer = session(&mut pool);
        for (op, step) in (1..).zip(steps) {
            match step {
                Step::Write { page, count } => {
                    let data = vec![7; count as usize * PAGE_BYTES];
                    pool.maintain().expect("sound");
                    put(&mut writer, handle, page * PAGE_BYTES as u64, &data, op);
                }
                Step::Clear { page, count } => {
                    let (at, len) = (page * PAGE_BYTES as u64, count * PAGE_BYTES as u64);
                    let session = &mut writer;
                    clear(&mut [LegSession { session, handle }], at, len, stamp(op)).expect("room");
                }
                Step::Maintain => drop(pool.maintain().expect("sound")),
                Step::Reconnect => {
                    pool.close_session(writer.number()).expect("sound");
                    writer = session(&mut pool);
                }
            }
        }
        pool.checkpoint().expect("sound");
        let counts = media.counts();
        let mut expected = counts.written;
        expected.journal += counts.skipped_lines * LINE_BYTES as u64;
        prop_assert_eq!(pool.media_bytes(), expected);
    }
}

#[test]
fn closed_sessions_and_patches_stay_counted() {
    let (_, mut pool, handle) = pool();
    pool.checkpoint().expect("sound");
    let (mut first, mut second) = (session(&mut pool), session(&mut pool));
    put(&mut first, handle, 0, &[1; 2 * PAGE_BYTES], 1);
    pool.checkpoint().expect("sound");
    let before = pool.media_bytes();

    put(&mut first, handle, 0, &[2; 2 * PAGE_BYTES], 2);
    // 100 bytes from byte 60 on are in three lines of the page, and in two after the record's head.
    put(&mut second, handle, PAGE_BYTES as u64 + 60, &[3; 100], 3);
    let committed = pool.media_bytes().since(before);
    assert_eq!(
        (committed.data, committed.journal, committed.tables),
        (8192, 64 + 64 + 3 * 64, 0)
    );
    for session in [first, second] {
        pool.close_session(session.number()).expect("sound");
    }
    let closed = pool.media_bytes().since(before);
    assert_eq!(
        (closed.data, closed.journal),
        (8192 + 3 * 64, 64 + 64 + 3 * 64)
    );
}

#[test]
fn reopened_pool_counts_from_zero() {
    let (media, mut pool, handle) = pool();
    let mut writer = session(&mut pool);
    put(&mut writer, handle, 0, &[1; PAGE_BYTES], 1);
    let written = pool.media_bytes();
    assert!(
        written.data > 0 && written.journal > 0 && written.tables > 0,
        "{written:?}"
    );
    assert_eq!(written.total(), written.data + written.metadata());
    drop((writer, pool));
    let pool = Pool::open(media.clone(), media).expect("sound").0;
    assert_eq!(pool.media_bytes(), MediaBytes::default());
}
