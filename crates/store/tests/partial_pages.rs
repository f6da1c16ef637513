//! Two sessions write pages part by part. Each caches the partial page that it wrote last while the
//! other changes the same pages.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fuzz::Random;
use pagemesh_pmem::Recorder;
use pagemesh_store::pool::{Pool, format};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, write, write_numbered};
use std::sync::Arc;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(7));
const PAGES: usize = 3;
const PAGE: usize = PAGE_BYTES;
/// After this many changes in place a slot has its old value again.
const GENERATION_LAP: usize = 4095;

struct TwoSessionPool {
    pool: Pool<Recorder>,
    sessions: [Session<Recorder>; 2],
    handle: Handle,
    op: u64,
    expected: Vec<u8>,
}

impl TwoSessionPool {
    fn new() -> TwoSessionPool {
        let media = Arc::new(Recorder::new(4 << 20));
        format(&*media, Uuid::from_u128(1)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media).expect("sound");
        pool.create(SLICE, (PAGES * PAGE) as u64).expect("room");
        let sessions = [1, 2].map(|client| {
            let number = pool.open_session(client, 1).expect("a session");
            Session::new(pool.mapping().clone(), number)
        });
        let mut world = TwoSessionPool {
            handle: pool.handle(SLICE).expect("the object"),
            pool,
            sessions,
            op: 0,
            expected: vec![0; PAGES * PAGE],
        };
        world.write_and_check(0, 0, &[1; PAGES * PAGE]);
        world
    }

    /// Writes through one session, alternately as a volume and as a direct client, and reads
    /// through the other.
    fn write_and_check(&mut self, by: usize, at: usize, data: &[u8]) {
        self.op += 1;
        let stamp = Stamp {
            epoch: Epoch(1),
            op: self.op,
            open_ops: 0,
        };
        let (session, handle) = (&mut self.sessions[by], self.handle);
        let members = &mut [LegSession { session, handle }];
        let written = match self.op % 2 {
            0 => write(members, at as u64, data, stamp),
            _ => write_numbered(members, at as u64, data, stamp.epoch, || stamp),
        };
        written.expect("room");
        self.expected[at..at + data.len()].copy_from_slice(data);
        let first = at / PAGE * PAGE;
        let mut found = vec![0; (at + data.len()).next_multiple_of(PAGE) - first];
        let read = self.sessions[1 - by].read(&handle, first as u64, &mut found, Epoch(1));
        read.expect("sound");
        assert!(
            found == self.expected[first..first + found.len()],
            "write {} by {by}, {} bytes at {at}",
            self.op,
            data.len()
        );
    }
}

#[test]
fn sessions_alternate_partial_page_writes() {
    for seed in 0..30 {
        let (mut world, mut random) = (TwoSessionPool::new(), Random::new(seed));
        // One session writes a log sequentially, the other anywhere.
        let mut end = 0;
        for turn in 0..400 {
            let len = 1 + match random.below(3) {
                0 => random.below(100),
                1 => random.below(700),
                _ => random.below(6000),
            };
            let data: Vec<u8> = (0..len).map(|_| random.draw() as u8).collect();
            if random.below(3) > 0 {
                end = if end + len > PAGES * PAGE { 0 } else { end };
                world.write_and_check(0, end, &data);
                end += len;
            } else {
                let at = random.below(PAGES * PAGE - len + 1);
                world.write_and_check(1, at, &data);
            }
            if turn % 50 == 0 {
                world.pool.maintain().expect("sound");
            }
        }
    }
}

/// The slot has its old value again, but the page has changed.
#[test]
fn cached_page_is_reread_after_generation_lap() {
    for changes in [GENERATION_LAP - 1, GENERATION_LAP, GENERATION_LAP + 1] {
        let mut world = TwoSessionPool::new();
        world.write_and_check(0, 100, &[2; 1000]);
        for change in 0..changes {
            world.write_and_check(1, 2000 + change % 64, &[change as u8; 40]);
            if change % 20 == 0 {
                world.pool.maintain().expect("sound");
            }
        }
        world.write_and_check(0, 1100, &[3; 600]);
    }
}
