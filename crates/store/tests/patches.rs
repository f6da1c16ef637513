//! Threads change parts of pages in place while others read the pages, or read them in place. The
//! operations depend on seeds, their timing on the machine.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fuzz::Random;
use pagemesh_pmem::{MappedMedia, Media};
use pagemesh_store::patch::PATCH_MAX;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use uuid::Uuid;

const POOL_BYTES: usize = 32 << 20;
const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const PAGES: u64 = 4;
const PAGE: u64 = PAGE_BYTES as u64;
/// Writes of a thread.
const WRITES: u64 = 20_000;
/// Parts of a page that are always written as a whole, and so must hold one byte value. Their
/// lengths range from a few words to more than a record holds.
const PARTS: [(usize, usize); 4] = [(0, 24), (100, 300), (1000, PATCH_MAX), (2100, 1900)];

fn write_bytes(session: &mut Session<MappedMedia>, handle: Handle, at: u64, data: &[u8], op: u64) {
    let stamp = Stamp {
        epoch: Epoch(1),
        op,
        open_ops: 0,
    };
    write(&mut [LegSession { session, handle }], at, data, stamp).expect("room");
}

/// Checks that each part of a page holds one byte value.
fn check_parts(page: &[u8; PAGE_BYTES], by: &str) {
    for (first, len) in PARTS {
        let part = &page[first..first + len];
        let is_whole = part.iter().all(|&byte| byte == part[0]);
        assert!(is_whole, "{len} bytes at {first} are torn: {by}");
    }
}

struct PatchStress {
    media: Arc<MappedMedia>,
    ops: AtomicU64,
    handle: Handle,
    is_over: AtomicBool,
}

impl PatchStress {
    fn write_loop(&self, mut session: Session<MappedMedia>, seed: u64) {
        let mut random = Random::new(seed);
        for _ in 0..WRITES {
            let (first, len) = PARTS[random.below(8).min(3)];
            let at = (random.draw() % PAGES) * PAGE + first as u64;
            let op = self.ops.fetch_add(1, Ordering::Relaxed);
            write_bytes(
                &mut session,
                self.handle,
                at,
                &vec![random.draw() as u8; len],
                op,
            );
        }
    }

    fn read_loop(&self, mut session: Session<MappedMedia>, seed: u64) -> u64 {
        let (mut random, mut page, mut count) = (Random::new(seed), [0; PAGE_BYTES], 0);
        while !self.is_over.load(Ordering::Relaxed) {
            let at = (random.draw() % PAGES) * PAGE;
            let read = session.read(&self.handle, at, &mut page, Epoch(1));
            read.expect("nothing is damaged");
            check_parts(&page, "a read");
            count += 1;
        }
        count
    }

    /// Reads pages in place; returns how often the pages had not changed meanwhile.
    fn consistent_read_loop(&self, mut session: Session<MappedMedia>, seed: u64) -> u64 {
        let (mut random, mut page, mut count) = (Random::new(seed), [0; PAGE_BYTES], 0);
        while !self.is_over.load(Ordering::Relaxed) {
            let ranges = [((random.draw() % PAGES) * PAGE, PAGE)];
            let found = session.map_consistent(&self.handle, &ranges, Epoch(1));
            let Some(moment) = found.expect("nothing is damaged") else {
                continue;
            };
            for place in moment.page_offsets() {
                self.media.read(place, &mut page);
            }
            if moment.is_unchanged() {
                check_parts(&page, "a guard");
                count += 1;
            }
        }
        count
    }
}

#[test]
fn readers_never_see_torn_patched_page() {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    file.set_len(POOL_BYTES as u64).expect("room");
    let media = Arc::new(MappedMedia::new(file, POOL_BYTES).expect("a mapping"));
    format(&*media, Uuid::from_u128(1)).expect("a pool");
    let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
    pool.create(SLICE, PAGES * PAGE).expect("room");
    let mut sessions = (0..4).map(|_| {
        let number = pool.open_session(1, 1).expect("a session");
        Session::new(pool.mapping().clone(), number)
    });
    let [mut one, two, three, four] = std::array::from_fn(|_| sessions.next().expect("one"));
    drop(sessions);
    let handle = pool.handle(SLICE).expect("the slice");
    write_bytes(&mut one, handle, 0, &[1; PAGES as usize * PAGE_BYTES], 1);
    let world = PatchStress {
        media: media.clone(),
        ops: AtomicU64::new(2),
        handle,
        is_over: AtomicBool::new(false),
    };
    let (reads, guards) = std::thread::scope(|scope| {
        let writers = [
            scope.spawn(|| world.write_loop(one, 1)),
            scope.spawn(|| world.write_loop(two, 2)),
        ];
        let reader = scope.spawn(|| world.read_loop(three, 3));
        let guard = scope.spawn(|| world.consistent_read_loop(four, 4));
        while writers.iter().any(|writer| !writer.is_finished()) {
            let rung = pool.mapping().control().doorbell_count();
            pool.maintain().expect("sound");
            pool.mapping()
                .control()
                .wait_for_doorbell(rung, Some(Duration::from_millis(1)));
        }
        world.is_over.store(true, Ordering::Relaxed);
        writers
            .into_iter()
            .for_each(|writer| writer.join().expect("no panic"));
        let ended = [reader, guard].map(|thread| thread.join().expect("no panic"));
        (ended[0], ended[1])
    });
    println!("{reads} reads, {guards} unchanged consistent reads");
    assert!(reads > 0 && guards > 0, "{reads} reads, {guards} guards");
    // Simulates the death of all processes on a running machine.
    drop(pool);
    let (mut pool, found) = Pool::open(media.clone(), media).expect("sound");
    assert_eq!(found.damaged, 0);
    let number = pool.open_session(1, 1).expect("a session");
    let mut session = Session::new(pool.mapping().clone(), number);
    let mut page = [0; PAGE_BYTES];
    for at in (0..PAGES).map(|page| page * PAGE) {
        let read = session.read(&handle, at, &mut page, Epoch(1));
        read.expect("nothing is damaged");
        check_parts(&page, "the reopened pool");
    }
}
