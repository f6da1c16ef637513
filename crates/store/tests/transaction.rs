//! Transactions through a session: all parts or none.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Stamp, TransactionPart};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Recorder;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::StoreError;
use pagemesh_store::session::{LegSession, Session};
use pagemesh_store::transaction::transact;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const PAGE: u64 = PAGE_BYTES as u64;
/// Three leaves.
const PAGES: u64 = 1200;

struct TransactionPool {
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    op: u64,
}

impl TransactionPool {
    fn new(bytes: usize) -> TransactionPool {
        let media = Arc::new(Recorder::new(bytes));
        format(&*media, Uuid::from_u128(9)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        pool.create(SLICE, PAGES * PAGE).expect("room");
        TransactionPool::of(media, pool)
    }

    fn of(media: Arc<Recorder>, mut pool: Pool<Recorder>) -> TransactionPool {
        let number = pool.open_session(1, 1).expect("a session");
        let session = Session::new(pool.mapping().clone(), number);
        TransactionPool {
            media,
            pool,
            session,
            op: 0,
        }
    }

    fn transact(&mut self, parts: &[TransactionPart]) -> Result<(), StoreError> {
        self.op += 1;
        let stamp = Stamp {
            epoch: Epoch(1),
            op: self.op,
            open_ops: 0,
        };
        let handle = self.pool.handle(SLICE).expect("the slice");
        let session = &mut self.session;
        let done = transact(&mut [LegSession { session, handle }], parts, stamp);
        done.map_err(|failure| failure.cause)
    }

    /// The byte that fills a page.
    fn read_page(&mut self, page: u64) -> u8 {
        let handle = self.pool.handle(SLICE).expect("the slice");
        let mut bytes = [0; PAGE_BYTES];
        let read = self
            .session
            .read(&handle, page * PAGE, &mut bytes, Epoch(1));
        read.expect("sound");
        assert!(bytes.iter().all(|&byte| byte == bytes[0]), "page {page}");
        bytes[0]
    }

    /// Opens the pool after a crash that keeps the fenced writes only.
    fn after_crash(self) -> TransactionPool {
        let points = self.media.crash_points();
        let image = points.last().expect("now").image(0);
        let media = Arc::new(Recorder::from_image(image));
        let (pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        TransactionPool::of(media, pool)
    }
}

fn write(page: u64, count: u64, byte: u8) -> TransactionPart {
    TransactionPart::Write {
        offset: page * PAGE,
        data: vec![byte; (count * PAGE) as usize].into(),
    }
}

fn clear(page: u64, count: u64) -> TransactionPart {
    TransactionPart::Clear {
        offset: page * PAGE,
        len: count * PAGE,
    }
}

#[test]
fn parts_in_several_leaves_change_atomically() {
    let mut world = TransactionPool::new(4 << 20);
    world
        .transact(&[write(3, 2, 1), write(510, 4, 2), write(1100, 1, 3)])
        .expect("room");
    world
        .transact(&[clear(510, 3), write(4, 1, 4), clear(700, 20), clear(1, 2)])
        .expect("room");
    let expected = [(3, 1), (4, 4), (510, 0), (512, 0), (513, 2), (1100, 3)];
    let check = |world: &mut TransactionPool| {
        for (page, byte) in expected {
            assert_eq!(world.read_page(page), byte, "page {page}");
        }
    };
    check(&mut world);
    let mut world = world.after_crash();
    check(&mut world);
    let listed = world.pool.in_flight(SLICE).expect("the slice");
    let listed = listed.expect("few");
    let last = listed.iter().filter(|entry| entry.op == 2);
    // Each run of pages is one entry, without the unmapped pages.
    assert_eq!(last.map(|entry| entry.count).sum::<u32>(), 4);
}

/// As many records as pages: no two pages are adjacent.
fn scattered(pages: u64, byte: u8) -> Vec<TransactionPart> {
    (0..pages).map(|page| write(page * 3, 1, byte)).collect()
}

#[test]
fn small_pool_refuses_only_transactions_beyond_its_journal() {
    const LINES_MAX: u64 = 48;
    let mut world = TransactionPool::new(2 << 20);
    let refused = world.transact(&scattered(LINES_MAX + 1, 1));
    let expected = StoreError::TooLong {
        lines: LINES_MAX as usize + 1,
        lines_max: LINES_MAX as usize,
    };
    assert_eq!(refused, Err(expected));
    assert_eq!(world.read_page(0), 0);
    // Each transaction fits at any position of the journal's lap, with no help but the owner's
    // answers: the operation before it may be missing on another leg.
    let TransactionPool { pool, session, .. } = world;
    let pool = Arc::new(Mutex::new(pool));
    let owner = pool.clone();
    let tend = Box::new(move || {
        let tended = owner.lock().expect("no panic").maintain();
        tended.map(drop).expect("sound");
    });
    let mut session = session.in_owner_process(tend);
    let handle = pool.lock().expect("no panic").handle(SLICE);
    let handle = handle.expect("the slice");
    for op in 1..200 {
        let stamp = Stamp {
            epoch: Epoch(1),
            op,
            open_ops: 1,
        };
        let parts = scattered([LINES_MAX, 1, 17, 2, 31][op as usize % 5], op as u8);
        let session = &mut session;
        let done = transact(&mut [LegSession { session, handle }], &parts, stamp);
        done.expect("room");
    }
}

#[test]
fn full_pool_refuses_transaction_unchanged() {
    let mut world = TransactionPool::new(2 << 20);
    let mut written = 0;
    let refused = loop {
        world.pool.maintain().expect("sound");
        let parts = [write(written, 8, 7), write(1100, 1, written as u8)];
        match world.transact(&parts) {
            Ok(()) => written += 8,
            Err(cause) => break cause,
        }
    };
    assert!(
        matches!(refused, StoreError::NoSpace | StoreError::TimedOut),
        "{refused}"
    );
    assert_eq!(world.read_page(written), 0);
    assert_eq!(world.read_page(1100), (written - 8) as u8);
    // A clear needs no frame.
    world
        .transact(&[clear(0, 8), clear(16, 8)])
        .expect("a clear");
    assert_eq!(
        [world.read_page(0), world.read_page(8), world.read_page(16)],
        [0, 7, 0]
    );
}

/// A record of the last group is damaged beyond correction.
#[test]
fn published_transaction_never_loses_a_part_silently() {
    let mut world = TransactionPool::new(4 << 20);
    world.transact(&scattered(3, 1)).expect("room");
    world.pool.maintain().expect("sound");
    world.transact(&scattered(3, 2)).expect("room");
    let geometry = *world.pool.mapping().geometry();
    let lane_at = geometry.journal_at(world.session.number());
    let point = world.media.crash_point();
    for (image, is_shown) in [(point.image(0), false), (point.all_persisted(), true)] {
        // The journal holds links, and two groups of three lines.
        let lines = (0..64).map(|line| lane_at + line * 64);
        let last = lines.rev().find(|&at| image.word(at) != 0);
        let last = last.expect("a record");
        for at in [last - 128, last - 64, last] {
            let mut image = image.clone();
            image.set_word(at + 24, image.word(at + 24) ^ 0x0f0f);
            let media = Arc::new(Recorder::from_image(image));
            match Pool::open(media.clone(), media.clone()) {
                Err(cause) => assert!(is_shown, "{cause}"),
                Ok((pool, found)) => {
                    assert!(!is_shown, "a part is lost: {found:?}");
                    assert_eq!(found.dropped, 2);
                    let mut world = TransactionPool::of(media, pool);
                    assert_eq!([0, 3, 6].map(|page| world.read_page(page)), [1; 3]);
                }
            }
        }
    }
}

#[test]
fn invalid_transaction_changes_nothing() {
    let mut world = TransactionPool::new(4 << 20);
    world.transact(&[write(0, 3, 1)]).expect("room");
    let half = TransactionPart::Write {
        offset: PAGE / 2,
        data: vec![2; PAGE_BYTES].into(),
    };
    let bad = [
        vec![write(0, 1, 2), half],
        vec![write(0, 2, 2), clear(1, 1)],
        vec![write(0, 1, 2), write(70, TRANSACTION_PAGES_MAX, 2)],
        vec![write(0, 1, 2), clear(PAGES - 1, 2)],
        vec![write(0, 1, 2), clear(u64::MAX / PAGE, 1)],
    ];
    for parts in bad {
        let refused = world.transact(&parts).expect_err("it is none");
        let refused = matches!(
            refused,
            StoreError::InvalidTransaction(_) | StoreError::OutOfRange { .. }
        );
        assert!(refused);
        assert_eq!([world.read_page(0), world.read_page(1)], [1, 1]);
    }
    world.transact(&[]).expect("nothing to do");
    world
        .transact(&[clear(600, 64)])
        .expect("nothing is mapped");
    assert_eq!(world.read_page(2), 1);
}
