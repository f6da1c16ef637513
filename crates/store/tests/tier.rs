//! Pages that move between memory and flash, compared with a model of the contents.

use pagemesh_base::ids::{Epoch, FrameNo, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Image, Recorder};
use pagemesh_store::check::{CheckOptions, check};
use pagemesh_store::object::TierPolicy;
use pagemesh_store::pool::{FormatOptions, ObjectError, Pool, format_as};
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::session::tier::PageMove;
use pagemesh_store::session::{LegSession, Session, clear, write};
use pagemesh_store::test_api::ControlInternals;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
const SLICE: SliceId = SliceId(Uuid::from_u128(7));
/// The flash device.
const DEVICE: Uuid = Uuid::from_u128(2);
const MEMORY_BYTES: usize = 2 << 20;
const FLASH_BYTES: u64 = 4 << 20;
const PAGES: u64 = 600;
/// The owner looks for a stuck operation after a second.
const STUCK_LIMIT: Duration = Duration::from_secs(60);
/// Answers without frames, before the pool counts as full.
const ANSWERS_MAX: u32 = 4;

struct TieredPool {
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    mover: Session<Recorder>,
    op: u64,
}

fn sessions(pool: &mut Pool<Recorder>) -> [Session<Recorder>; 2] {
    std::array::from_fn(|_| {
        let number = pool.open_session(1, 1).expect("a session");
        Session::new(pool.mapping().clone(), number).with_owner_wait(Duration::ZERO)
    })
}

impl TieredPool {
    fn new() -> TieredPool {
        let image = Image::filled(MEMORY_BYTES + 2 * FLASH_BYTES as usize, 0x1234_5678);
        let media = Recorder::tiered(image, MEMORY_BYTES).without_crash_points();
        let media = Arc::new(media);
        let options = FormatOptions {
            pool_bytes: MEMORY_BYTES as u64,
            ..FormatOptions::of(&*media)
        };
        format_as(&*media, Uuid::from_u128(1), options).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a pool");
        pool.create(SLICE, PAGES * PAGE).expect("room");
        let device = pool.plan_device(DEVICE, FLASH_BYTES);
        pool.add_device(device.expect("a place")).expect("a device");
        let [session, mover] = sessions(&mut pool);
        TieredPool {
            media,
            pool,
            session,
            mover,
            op: 0,
        }
    }

    fn maintain(&mut self) {
        while self.pool.maintain().expect("a sound pool") {}
    }

    fn change(
        &mut self,
        change: impl Fn(&mut [LegSession<'_, Recorder>; 1], Stamp) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let handle = self.pool.handle(SLICE).expect("the slice");
        self.op += 1;
        let stamp = Stamp {
            epoch: Epoch(1),
            op: self.op,
            open_ops: 0,
        };
        self.maintain();
        let mut leg = [LegSession {
            session: &mut self.session,
            handle,
        }];
        let done = change(&mut leg, stamp);
        self.maintain();
        done
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), StoreError> {
        self.change(|leg, stamp| write(leg, offset, data, stamp).map_err(|it| it.cause))
    }

    fn clear(&mut self, offset: u64, len: u64) {
        let cleared =
            self.change(|leg, stamp| clear(leg, offset, len, stamp).map_err(|it| it.cause));
        cleared.expect("room");
    }

    /// Copies pages for a move.
    fn start_move(&mut self, pages: std::ops::Range<u64>, to_flash: bool) -> Vec<PageMove> {
        let handle = self.pool.handle(SLICE).expect("the slice");
        let mapping = self.pool.mapping().clone();
        let is_wanted = |frame: FrameNo| mapping.geometry().is_on_flash(frame) != to_flash;
        let copied = self.mover.copy_pages(&handle, pages, is_wanted);
        let mut moves = copied.expect("the slice");
        if to_flash {
            let frames = self.pool.reserve_flash(moves.len() as u64);
            assert_eq!(frames.len(), moves.len(), "flash has room");
            for (copy, frame) in moves.iter_mut().zip(frames) {
                copy.write_to_flash(&mapping, frame);
            }
        }
        moves
    }

    /// Ends a move. Returns the pages that moved.
    fn end_move(&mut self, mut moves: Vec<PageMove>) -> Vec<u64> {
        let handle = self.pool.handle(SLICE).expect("the slice");
        self.mover.sync_moves().expect("a sound medium");
        self.maintain();
        let committed = self.mover.commit_moves(&handle, &mut moves);
        assert!(
            matches!(
                committed,
                Ok(()) | Err(StoreError::NoSpace | StoreError::TimedOut)
            ),
            "{committed:?}"
        );
        self.pool.end_moves(&moves, &[]);
        self.maintain();
        let moved = moves.iter().filter(|it| it.is_moved());
        moved.map(|it| it.page().0).collect()
    }

    /// Pages on flash.
    fn on_flash(&mut self) -> Vec<u64> {
        let handle = self.pool.handle(SLICE).expect("the slice");
        let geometry = *self.pool.mapping().geometry();
        let mut found = Vec::new();
        let visited = self
            .session
            .visit_slots(&handle, 0..PAGES, Epoch(9), |page, _, slot| {
                let frame = slot.and_then(|slot| slot.frame());
                if frame.is_some_and(|frame| geometry.is_on_flash(frame)) {
                    found.push(page.0);
                }
                true
            });
        visited.expect("the slice");
        found
    }

    fn contents(&mut self) -> Vec<u8> {
        let handle = self.pool.handle(SLICE).expect("the slice");
        let mut found = vec![0; (PAGES * PAGE) as usize];
        let read = self.session.read(&handle, 0, &mut found, Epoch(9));
        read.expect("sound pages");
        found
    }

    /// The owner dies. Each sector that was not synced may be lost.
    fn reopen(&mut self, seed: u64) {
        let image = self.media.crash_point().sample(seed);
        let media = Recorder::tiered(image, MEMORY_BYTES).without_crash_points();
        self.media = Arc::new(media);
        let opened = Pool::open(self.media.clone(), self.media.clone());
        let (pool, recovered) = opened.expect("a pool");
        assert!(!recovered.is_damaged(), "{recovered:?}");
        self.pool = pool;
        [self.session, self.mover] = sessions(&mut self.pool);
    }

    fn assert_sound(&self) {
        let scratch = Recorder::unrecorded(self.media.visible_image());
        let mut options = CheckOptions {
            is_ordered: true,
            reads_data: true,
            progress: &mut |_, _| {},
        };
        let found = check(&scratch, &mut options).expect("a pool").0;
        assert!(found.is_sound(), "{:?}", found.findings);
    }
}

fn page_bytes(tag: u64) -> Vec<u8> {
    (0..PAGE).map(|at| (tag * 31 + at * 7) as u8).collect()
}

#[test]
fn demoted_pages_read_and_promoted_pages_read() {
    let mut tiered = TieredPool::new();
    for page in 0..32 {
        tiered.write(page * PAGE, &page_bytes(page)).expect("room");
    }
    let before = tiered.contents();
    let free = tiered.pool.tier_usage();
    let moves = tiered.start_move(0..20, true);
    assert_eq!(tiered.end_move(moves), (0..20).collect::<Vec<_>>());
    let usage = tiered.pool.tier_usage();
    assert_eq!(free.flash_free - usage.flash_free, 20);
    assert!(tiered.contents() == before);
    tiered.assert_sound();
    assert_eq!(tiered.on_flash(), (0..20).collect::<Vec<_>>());
    let moves = tiered.start_move(0..10, false);
    assert_eq!(tiered.end_move(moves), (0..10).collect::<Vec<_>>());
    assert_eq!(tiered.pool.tier_usage().flash_free, usage.flash_free + 10);
    assert!(tiered.contents() == before);
    tiered.reopen(3);
    assert!(tiered.contents() == before);
    tiered.assert_sound();
}

#[test]
fn changed_page_stays_and_its_flash_frame_is_free() {
    let mut tiered = TieredPool::new();
    for page in 0..4 {
        tiered.write(page * PAGE, &page_bytes(page)).expect("room");
    }
    let free = tiered.pool.tier_usage().flash_free;
    let moves = tiered.start_move(0..4, true);
    assert_eq!(tiered.pool.tier_usage().flash_free, free - 4);
    // A whole page, and a part of one in place.
    tiered.write(0, &page_bytes(9)).expect("room");
    tiered.write(2 * PAGE + 100, &[0xee; 64]).expect("room");
    assert_eq!(tiered.end_move(moves), [1, 3]);
    assert_eq!(tiered.pool.tier_usage().flash_free, free - 2);
    let found = tiered.contents();
    assert!(found[..PAGE_BYTES] == page_bytes(9));
    let patched = (2 * PAGE + 100) as usize;
    assert!(found[patched..patched + 64] == [0xee; 64]);
    // A part of a page on flash: the page moves to memory.
    tiered.write(PAGE + 8, &[0xdd; 16]).expect("room");
    assert_eq!(tiered.on_flash(), [3]);
    tiered.assert_sound();
}

#[test]
fn device_with_reserved_frames_stays() {
    let mut tiered = TieredPool::new();
    for page in 0..4 {
        tiered.write(page * PAGE, &page_bytes(page)).expect("room");
    }
    let before = tiered.contents();
    let moves = tiered.start_move(0..4, true);
    tiered.pool.start_drain(DEVICE).expect("memory has room");
    let removed = tiered.pool.remove_device(DEVICE);
    assert!(!removed.expect("a sound pool"), "a move writes to it");
    assert_eq!(tiered.end_move(moves), [0; 0], "it is leaving");
    let removed = tiered.pool.remove_device(DEVICE);
    assert!(removed.expect("a sound pool"));
    assert!(tiered.contents() == before);
    tiered.assert_sound();
}

impl TieredPool {
    /// Writes until memory is full. Returns whether the session that lacks frames still waits for its answer. The owner is in
    /// this thread, so the session gives up before it is answered.
    fn waits_when_full(&mut self) -> bool {
        for page in 0..PAGES {
            for attempt in 0.. {
                match self.write(page * PAGE, &page_bytes(page)) {
                    Ok(()) => break,
                    Err(cause) => assert_eq!(cause, StoreError::TimedOut),
                }
                if self.pool.is_unanswered(self.session.number()) {
                    return true;
                }
                if attempt == ANSWERS_MAX {
                    return false;
                }
            }
        }
        panic!("memory holds {PAGES} pages");
    }
}

#[test]
fn session_waits_for_demotion_and_is_refused_without() {
    let mut tiered = TieredPool::new();
    assert!(!tiered.waits_when_full(), "nothing demotes");
    assert!(!tiered.pool.take_demotion_request());
    assert!(tiered.pool.tier_usage().flash_free > PAGES);
    tiered.pool.set_tier_mover(Some(tiered.mover.number()));
    assert!(tiered.waits_when_full());
    assert!(tiered.pool.take_demotion_request());
    let moves = tiered.start_move(0..200, true);
    assert_eq!(tiered.end_move(moves).len(), 200);
    assert!(!tiered.pool.is_unanswered(tiered.session.number()));
    tiered.write(0, &page_bytes(1)).expect("memory has room");
    tiered.pool.set_can_demote(false);
    assert!(!tiered.waits_when_full(), "no page can be demoted");
}

#[test]
fn stuck_operation_is_found_while_a_session_waits() {
    let mut tiered = TieredPool::new();
    tiered.pool.set_tier_mover(Some(tiered.mover.number()));
    assert!(tiered.waits_when_full());
    let stalled = tiered.mover.number();
    let mapping = tiered.pool.mapping().clone();
    let cells = mapping.control().session_cells(stalled);
    let active = cells.active();
    active.fetch_add(1, Ordering::SeqCst);
    let began = Instant::now();
    loop {
        match tiered.pool.maintain() {
            Err(ObjectError::SessionStuck { session, .. }) => {
                assert_eq!(session, stalled);
                break;
            }
            kept => drop(kept.expect("a sound pool")),
        }
        assert!(began.elapsed() < STUCK_LIMIT, "the operation is hidden");
    }
    active.fetch_add(1, Ordering::SeqCst);
    tiered.maintain();
    assert!(tiered.pool.is_unanswered(tiered.session.number()));
}

#[test]
fn tier_of_an_object_survives_a_reopening() {
    let mut tiered = TieredPool::new();
    tiered
        .pool
        .set_tier(SLICE, TierPolicy::Memory)
        .expect("the slice");
    tiered.reopen(1);
    let (_, object) = tiered.pool.find(SLICE).expect("the slice");
    assert_eq!(object.tier, TierPolicy::Memory);
}

/// A step of a history.
#[derive(Clone, Debug)]
enum Step {
    Write {
        at: u64,
        len: u64,
    },
    Clear {
        page: u64,
        pages: u64,
    },
    StartMove {
        page: u64,
        pages: u64,
        to_flash: bool,
    },
    EndMove,
    Checkpoint,
    Reopen(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let page = || prop_oneof![0u64..12, 505u64..520];
    let write = (page(), 0..PAGE, 1..3 * PAGE, 0u8..3).prop_map(|(page, within, len, kind)| {
        let (within, len) = match kind {
            0 => (0, len.next_multiple_of(PAGE)),
            1 => (within, len.min(300)),
            _ => (within, len),
        };
        let at = page * PAGE + within;
        Step::Write { at, len }
    });
    let start = (page(), 1u64..20, 0u8..3);
    let start = start.prop_map(|(page, pages, kind)| Step::StartMove {
        page,
        pages,
        to_flash: kind > 0,
    });
    prop_oneof![
        6 => write,
        1 => (page(), 1u64..4).prop_map(|(page, pages)| Step::Clear { page, pages }),
        3 => start,
        3 => Just(Step::EndMove),
        1 => Just(Step::Checkpoint),
        1 => any::<u64>().prop_map(Step::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn moves_change_no_contents(steps in prop::collection::vec(step(), 1..60)) {
        let mut tiered = TieredPool::new();
        let mut model = vec![0; (PAGES * PAGE) as usize];
        let mut moves: Vec<PageMove> = Vec::new();
        for (tag, step) in (0..).zip(steps) {
            match step {
                Step::Write { at, len } => {
                    let data: Vec<u8> = (0..len).map(|byte| (tag * 13 + byte * 3) as u8).collect();
                    tiered.write(at, &data).expect("room");
                    model[at as usize..(at + len) as usize].copy_from_slice(&data);
                }
                Step::Clear { page, pages } => {
                    tiered.clear(page * PAGE, pages * PAGE);
                    model[(page * PAGE) as usize..((page + pages) * PAGE) as usize].fill(0);
                }
                Step::StartMove { page, pages, to_flash } => {
                    tiered.end_move(std::mem::take(&mut moves));
                    moves = tiered.start_move(page..page + pages, to_flash);
                }
                Step::EndMove => drop(tiered.end_move(std::mem::take(&mut moves))),
                Step::Checkpoint => tiered.pool.checkpoint().expect("a sound pool"),
                Step::Reopen(seed) => {
                    moves.clear();
                    tiered.reopen(seed);
                }
            }
            prop_assert!(tiered.contents() == model, "after step {}", tag);
        }
        tiered.end_move(moves);
        tiered.assert_sound();
        let handle = tiered.pool.handle(SLICE).expect("the slice");
        let sums = tiered.session.checksums(&handle, PageNo(0), PAGES as u32, Epoch(9));
        prop_assert_eq!(sums.expect("sound pages").len() as u64, PAGES);
    }
}
