//! Transactions through a session: all parts or nothing.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{Part, Stamp};
use pagemesh_base::space::TRANSACTION_PAGES_MAX;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Recorder;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::session::{Member, Session};
use pagemesh_store::transaction::transact;
use pagemesh_store::view::StoreError;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const PAGE: u64 = PAGE_BYTES as u64;
/// Three leaves.
const PAGES: u64 = 1200;

struct World {
    media: Arc<Recorder>,
    pool: Pool<Recorder>,
    session: Session<Recorder>,
    op: u64,
}

impl World {
    fn new(bytes: usize) -> World {
        let media = Arc::new(Recorder::new(bytes));
        format(&*media, Uuid::from_u128(9)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        pool.create(SLICE, PAGES * PAGE).expect("room");
        World::of(media, pool)
    }

    fn of(media: Arc<Recorder>, mut pool: Pool<Recorder>) -> World {
        let number = pool.open_session(1, 1).expect("a session");
        let session = Session::new(pool.view().clone(), number);
        World {
            media,
            pool,
            session,
            op: 0,
        }
    }

    fn transact(&mut self, parts: &[Part]) -> Result<(), StoreError> {
        self.op += 1;
        let stamp = Stamp {
            epoch: Epoch(1),
            op: self.op,
            open: 0,
        };
        let handle = self.pool.handle(SLICE).expect("the slice");
        let session = &mut self.session;
        let done = transact(&mut [Member { session, handle }], parts, stamp);
        done.map_err(|failure| failure.cause)
    }

    /// The byte that a page is full of.
    fn page(&mut self, page: u64) -> u8 {
        let handle = self.pool.handle(SLICE).expect("the slice");
        let mut bytes = [0; PAGE_BYTES];
        let read = self
            .session
            .read(&handle, page * PAGE, &mut bytes, Epoch(1));
        read.expect("sound");
        assert!(bytes.iter().all(|&byte| byte == bytes[0]), "page {page}");
        bytes[0]
    }

    /// After a crash that keeps what was fenced and nothing else.
    fn crash(self) -> World {
        let points = self.media.crash_points();
        let image = points.last().expect("now").image(0);
        let media = Arc::new(Recorder::from_image(image));
        let (pool, _) = Pool::open(media.clone(), media.clone()).expect("sound");
        World::of(media, pool)
    }
}

fn write(page: u64, count: u64, byte: u8) -> Part {
    Part::Write {
        offset: page * PAGE,
        data: vec![byte; (count * PAGE) as usize].into(),
    }
}

fn clear(page: u64, count: u64) -> Part {
    Part::Clear {
        offset: page * PAGE,
        len: count * PAGE,
    }
}

#[test]
fn parts_of_several_leaves_change_together() {
    let mut world = World::new(4 << 20);
    world
        .transact(&[write(3, 2, 1), write(510, 4, 2), write(1100, 1, 3)])
        .expect("room");
    world
        .transact(&[clear(510, 3), write(4, 1, 4), clear(700, 20), clear(1, 2)])
        .expect("room");
    let expected = [(3, 1), (4, 4), (510, 0), (512, 0), (513, 2), (1100, 3)];
    let check = |world: &mut World| {
        for (page, byte) in expected {
            assert_eq!(world.page(page), byte, "page {page}");
        }
    };
    check(&mut world);
    let mut world = world.crash();
    check(&mut world);
    let listed = world.pool.in_flight(SLICE).expect("the slice");
    let listed = listed.expect("few");
    let last = listed.iter().filter(|entry| entry.op == 2);
    // A run is an entry, but for what was not mapped.
    assert_eq!(last.map(|entry| entry.count).sum::<u32>(), 4);
}

/// As many records as it takes, none of which lie beside each other.
fn scattered(pages: u64, byte: u8) -> Vec<Part> {
    (0..pages).map(|page| write(page * 3, 1, byte)).collect()
}

#[test]
fn a_small_pool_refuses_what_its_lanes_never_take_and_takes_the_rest_for_ever() {
    const LINES_MAX: u64 = 48;
    let mut world = World::new(2 << 20);
    let refused = world.transact(&scattered(LINES_MAX + 1, 1));
    let expected = StoreError::TooLong {
        lines: LINES_MAX as usize + 1,
        lines_max: LINES_MAX as usize,
    };
    assert_eq!(refused, Err(expected));
    assert_eq!(world.page(0), 0);
    // Whatever is left of the lane's lap, and with nothing but the owner's
    // answers: the operation before it may be open elsewhere.
    let World { pool, session, .. } = world;
    let pool = Arc::new(Mutex::new(pool));
    let owner = pool.clone();
    let tend = Box::new(move || {
        let tended = owner.lock().expect("no panic").tend();
        tended.map(drop).expect("sound");
    });
    let mut session = session.beside_owner(tend);
    let handle = pool.lock().expect("no panic").handle(SLICE);
    let handle = handle.expect("the slice");
    for op in 1..200 {
        let stamp = Stamp {
            epoch: Epoch(1),
            op,
            open: 1,
        };
        let parts = scattered([LINES_MAX, 1, 17, 2, 31][op as usize % 5], op as u8);
        let session = &mut session;
        let done = transact(&mut [Member { session, handle }], &parts, stamp);
        done.expect("room");
    }
}

#[test]
fn a_full_pool_refuses_a_transaction_and_changes_nothing() {
    let mut world = World::new(2 << 20);
    let mut written = 0;
    let refused = loop {
        world.pool.tend().expect("sound");
        let parts = [write(written, 8, 7), write(1100, 1, written as u8)];
        match world.transact(&parts) {
            Ok(()) => written += 8,
            Err(cause) => break cause,
        }
    };
    assert!(
        matches!(refused, StoreError::NoSpace | StoreError::Stalled),
        "{refused}"
    );
    assert_eq!(world.page(written), 0);
    assert_eq!(world.page(1100), (written - 8) as u8);
    // What frees needs no frame.
    world
        .transact(&[clear(0, 8), clear(16, 8)])
        .expect("a clear");
    assert_eq!([world.page(0), world.page(8), world.page(16)], [0, 7, 0]);
}

/// A record of the last group is damaged beyond mending.
#[test]
fn a_part_of_a_committed_transaction_is_not_lost_in_silence() {
    let mut world = World::new(4 << 20);
    world.transact(&scattered(3, 1)).expect("room");
    world.pool.tend().expect("sound");
    world.transact(&scattered(3, 2)).expect("room");
    let geometry = *world.pool.view().geometry();
    let lane_at = geometry.lane_at(world.session.number());
    let point = world.media.crash_point();
    for (image, is_shown) in [(point.image(0), false), (point.everything(), true)] {
        // Links, and two groups of three lines.
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
                    let mut world = World::of(media, pool);
                    assert_eq!([0, 3, 6].map(|page| world.page(page)), [1; 3]);
                }
            }
        }
    }
}

#[test]
fn what_is_no_transaction_changes_nothing() {
    let mut world = World::new(4 << 20);
    world.transact(&[write(0, 3, 1)]).expect("room");
    let half = Part::Write {
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
            StoreError::NoTransaction(_) | StoreError::OutOfRange { .. }
        );
        assert!(refused);
        assert_eq!([world.page(0), world.page(1)], [1, 1]);
    }
    world.transact(&[]).expect("nothing to do");
    world
        .transact(&[clear(600, 64)])
        .expect("nothing is mapped");
    assert_eq!(world.page(2), 1);
}
