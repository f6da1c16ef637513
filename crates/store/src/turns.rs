//! Tests of this crate in which the owner and a session take turns at every
//! access to a session's cells, so that each interleaving of the two is run on
//! purpose, one after the other, and the same each time.
//!
//! Nobody waits for a clock: who may run is handed over, after so many accesses
//! as the test says, or when one looks at the same cells for long, as in a wait.

use crate::pool::{ObjectError, Pool, format};
use crate::session::{Member, Session, write};
use crate::view::Handle;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Mapped;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use uuid::Uuid;

const OWNER: usize = 0;
const SESSION: usize = 1;
/// Accesses in a row after which the other has its turn: more than anything
/// takes but a wait.
const PATIENCE: u64 = 500;
/// Cells of a session's row, as docs/formats.md draws it.
const ACTIVE: usize = 0;
const RECALLS: usize = 72;

thread_local! {
    /// Which of two this thread is; none outside of these tests.
    static ME: RefCell<Option<(Arc<Turns>, usize)>> = const { RefCell::new(None) };
}

/// Whose turn it is.
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    running: usize,
    ended: [bool; 2],
    /// Accesses so far: by whom, and to which cell.
    taken: Vec<(usize, usize)>,
    /// Those since the last switch.
    in_a_row: u64,
    /// Accesses after which to switch.
    switches: VecDeque<u64>,
    patience: u64,
}

impl Turns {
    fn new(switches: &[u64], patience: u64) -> Arc<Turns> {
        Arc::new(Turns {
            state: Mutex::new(State {
                running: OWNER,
                ended: [false; 2],
                taken: Vec::new(),
                in_a_row: 0,
                switches: switches.iter().copied().collect(),
                patience,
            }),
            changed: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self, me: usize, cell: usize) {
        let mut state = self.state();
        state.taken.push((me, cell));
        state.in_a_row += 1;
        let is_due = state.switches.front() == Some(&(state.taken.len() as u64));
        if is_due {
            state.switches.pop_front();
        }
        if is_due || state.in_a_row >= state.patience {
            self.hand_over(state, me);
        }
    }

    /// Lets the other run until it hands over itself.
    fn hand_over(&self, mut state: MutexGuard<'_, State>, me: usize) {
        if state.ended[1 - me] {
            return;
        }
        state.running = 1 - me;
        state.in_a_row = 0;
        self.changed.notify_all();
        drop(self.await_turn(state, me));
    }

    fn await_turn<'s>(&self, state: MutexGuard<'s, State>, me: usize) -> MutexGuard<'s, State> {
        let waits = |state: &mut State| state.running != me;
        let waited = self.changed.wait_while(state, waits);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self, who: usize) -> bool {
        self.state().ended[who]
    }

    fn taken(&self) -> u64 {
        self.state().taken.len() as u64
    }

    /// Which access, counted from 1, was the first to a cell by one of the two.
    fn first(&self, who: usize, cell: usize) -> u64 {
        let state = self.state();
        let found = state.taken.iter().position(|&taken| taken == (who, cell));
        found.expect("it is accessed") as u64 + 1
    }

    /// Whether every switch was made.
    fn is_used_up(&self) -> bool {
        self.state().switches.is_empty()
    }

    /// Runs `work` as one of the two.
    fn run(self: &Arc<Turns>, me: usize, work: impl FnOnce()) {
        /// Ends the turn also when `work` panics.
        struct End(Arc<Turns>, usize);
        impl Drop for End {
            fn drop(&mut self) {
                ME.set(None);
                let mut state = self.0.state();
                state.ended[self.1] = true;
                state.running = 1 - self.1;
                state.in_a_row = 0;
                self.0.changed.notify_all();
            }
        }
        drop(self.await_turn(self.state(), me));
        ME.set(Some((self.clone(), me)));
        let _end = End(self.clone(), me);
        work();
    }
}

fn mine() -> Option<(Arc<Turns>, usize)> {
    ME.with_borrow(Clone::clone)
}

/// Before every access to a session's cells.
pub(crate) fn step(cell: usize) {
    if let Some((turns, me)) = mine() {
        turns.step(me, cell);
    }
}

/// In place of sleeping until the other has done something; false outside of
/// these tests.
pub(crate) fn give_way() -> bool {
    let Some((turns, me)) = mine() else {
        return false;
    };
    turns.hand_over(turns.state(), me);
    true
}

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
const POOL_BYTES: usize = 2 << 20;
const PAGES: usize = 200;

/// A pool, a session that has used some of its grants, and one that asks for
/// more than is free: the owner takes back what the first one was granted.
struct World {
    pool: Pool<Mapped>,
    one: Session<Mapped>,
    two: Session<Mapped>,
    writes: Writes,
}

/// What was written where.
struct Writes {
    handle: Handle,
    bytes: [u8; PAGES],
    op: u64,
}

impl Writes {
    fn put(&mut self, session: &mut Session<Mapped>, page: usize, count: usize) {
        self.op += 1;
        let byte = self.op as u8;
        let stamp = Stamp {
            epoch: Epoch(1),
            op: self.op,
            open: 0,
        };
        let handle = self.handle;
        let data = vec![byte; count * PAGE_BYTES];
        let at = (page * PAGE_BYTES) as u64;
        write(&mut [Member { session, handle }], at, &data, stamp).expect("there is room");
        self.bytes[page..page + count].fill(byte);
    }

    fn check(&self, session: &mut Session<Mapped>) {
        let mut found = vec![0; PAGES * PAGE_BYTES];
        session
            .read(&self.handle, 0, &mut found, Epoch(1))
            .expect("no page is damaged");
        for (page, bytes) in found.chunks(PAGE_BYTES).enumerate() {
            let expected = self.bytes[page];
            assert!(bytes.iter().all(|&byte| byte == expected), "page {page}");
        }
    }
}

impl World {
    fn new() -> World {
        let file = tempfile::tempfile_in("/dev/shm").expect("a file");
        file.set_len(POOL_BYTES as u64).expect("room");
        let media = Arc::new(Mapped::new(file, POOL_BYTES).expect("a mapping"));
        format(&*media, Uuid::from_u128(9)).expect("a pool");
        let (mut pool, _) = Pool::open(media.clone(), media).expect("a sound pool");
        let size_bytes = (PAGES * PAGE_BYTES) as u64;
        pool.create(SLICE, size_bytes).expect("an object");
        let mut session = || {
            let number = pool.open_session(1, 1).expect("a session");
            Session::new(pool.view().clone(), number)
        };
        let (mut one, two) = (session(), session());
        let mut writes = Writes {
            handle: pool.handle(SLICE).expect("the object"),
            bytes: [0; PAGES],
            op: 0,
        };
        (0..4).for_each(|page| writes.put(&mut one, page, 1));
        let wanted = pool.usage().capacity_bytes / PAGE_BYTES as u64;
        let cells = pool.view().control().cells(two.number());
        cells.asked().store(77 | wanted << 32, Ordering::SeqCst);
        World {
            pool,
            one,
            two,
            writes,
        }
    }

    /// The owner tends the pool while the session writes; gives how many
    /// accesses there were until the first tending had ended.
    fn run(&mut self, turns: &Arc<Turns>) -> u64 {
        let mut tended = 0;
        let World {
            pool, one, writes, ..
        } = self;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                turns.run(SESSION, || writes.put(one, 4, 1));
            });
            turns.run(OWNER, || {
                // A session that does not leave in time would be ended.
                let mut tend = || match pool.tend() {
                    Ok(_) | Err(ObjectError::Stuck { .. }) => {}
                    Err(cause) => panic!("{cause}"),
                };
                tend();
                tended = turns.taken();
                // It may wait for an answer.
                while !turns.has_ended(SESSION) {
                    give_way();
                    tend();
                }
            });
        });
        tended
    }

    /// Nothing was lost, and every frame has one user.
    fn check(mut self) {
        let World {
            pool,
            one,
            two,
            writes,
        } = &mut self;
        writes.check(one);
        for page in (10..PAGES - 40).step_by(40) {
            pool.tend().expect("a sound pool");
            let cells = pool.view().control().cells(two.number());
            let left = |cells: crate::control::Cells<'_>| {
                cells.granted().load(Ordering::Relaxed) - cells.consumed().load(Ordering::Relaxed)
            };
            let count = left(cells).min(40) as usize;
            if count > 0 {
                writes.put(two, page, count);
            }
        }
        writes.check(one);
        for number in [one.number(), two.number()] {
            pool.close_session(number).expect("a sound pool");
        }
        pool.delete(SLICE).expect("the object");
        for _ in 0..6 {
            while pool.tend().expect("a sound pool") {}
        }
        let usage = pool.usage();
        assert_eq!(usage.free_bytes, usage.capacity_bytes, "frames are lost");
    }
}

/// Runs one interleaving; gives how many accesses the first tending took, with
/// all that came in between.
fn check(turns: &Arc<Turns>) -> u64 {
    let mut world = World::new();
    let tended = world.run(turns);
    world.check();
    tended
}

#[test]
fn no_interleaving_of_a_recall_and_a_write_uses_a_frame_twice() {
    let tended = check(&Turns::new(&[], PATIENCE));
    let mut runs = 0;
    for first in 1..=tended {
        for second in first + 1.. {
            let turns = Turns::new(&[first, second], PATIENCE);
            let outcome = std::panic::catch_unwind(|| check(&turns));
            assert!(outcome.is_ok(), "with switches at {first} and {second}");
            runs += 1;
            if !turns.is_used_up() {
                break;
            }
        }
    }
    assert!(runs > 1000, "{runs} interleavings of {tended} accesses");
}

/// The session enters when the owner has looked already whether it is inside,
/// and is then stopped there for longer than the owner waits.
#[test]
fn a_recall_that_is_given_up_never_was() {
    let turns = Turns::new(&[], PATIENCE);
    check(&turns);
    let looked = turns.first(OWNER, RECALLS);
    let turns = Turns::new(&[looked], PATIENCE);
    check(&turns);
    let entered = turns.first(SESSION, ACTIVE);
    assert!(entered > looked, "it enters in between");
    let turns = Turns::new(&[looked, entered + 1], u64::MAX);
    check(&turns);
    assert!(turns.is_used_up());
}
