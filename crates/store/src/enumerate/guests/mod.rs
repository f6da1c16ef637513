//! Guests: sessions of two pools whose writes overlap and which no lock but the pools'
//! lock words orders (`write_numbered`, docs/rfd/015). One writes, another goes on at
//! any of its accesses, each may die at any of its own; the owners of the pools clean up
//! one after the other, while a third goes on; what the dead left is made alike. At every
//! fence of that both pools crash, and are settled:
//!
//! - the legs are equal then;
//! - what they hold is what one order of the writes makes of it, with all that were
//!   acknowledged;
//! - a pool of its own is sound (`recover`).
//!
//! And while nothing crashes: what is in the last pool of a dead guest is in all before.

mod judge;
mod media;

use super::budget::number;
use super::dice::Dice;
use super::model::{Wrong, wrong};
use super::recover::{self, Kind};
use super::{POOL_BYTES, guard};
use crate::control;
use crate::defect::{self, Defect};
use crate::pool::{Pool, format};
use crate::session::{Member, Session, write, write_numbered};
use judge::{Leg, Oracle, judge};
use media::{Both, Death, Half};
use pagemesh_base::checksum::crc32c;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::Stamp;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{CrashPoint, Image, Recorder};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock};
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(1));
/// Two lock words of 16 pages each.
const PAGES: usize = 20;
const EPOCH: Epoch = Epoch(1);
/// As many as the smallest pool has sessions; the keeper, who makes alike what the dead
/// left, has one of theirs.
const GUESTS: usize = 3;
/// The base's own operations have lower numbers.
const FIRST_OP: u64 = 1000;
/// Images of one medium at one moment; where there are more, they are sampled.
const IMAGES_MAX: u64 = 6;
/// Stories of a run of the tests beside those of every access.
const STORIES: u64 = 150;

/// Bytes of the slice: offset and length.
type Bytes = (usize, usize);

/// Who writes what, who goes on when, and who dies.
#[derive(Clone, Copy, Debug, Default)]
struct Story {
    writes: [Bytes; GUESTS],
    /// Accesses of the first guest before the second one goes on.
    other_after: Option<u64>,
    /// Accesses of each before it dies.
    deaths: [Option<u64>; GUESTS],
    /// Whose owner cleans up first.
    first: usize,
    seed: u64,
}

/// A guest: a session of each pool.
struct Guest {
    sessions: Option<[Session<Half>; 2]>,
    numbers: [u32; 2],
    /// The write that it died inside of.
    died_in: Option<(usize, Bytes)>,
}

struct World {
    both: Arc<Both>,
    pools: [RefCell<Pool<Half>>; 2],
    guests: RefCell<Vec<Guest>>,
    /// Places of the dead that are cleaned up behind, to be made alike.
    rows: RefCell<Vec<Bytes>>,
    op: Cell<u64>,
    tag: Cell<u8>,
}

thread_local! {
    /// The world whose owners clean up when somebody waits for a lock word.
    static WORLD: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
}

/// The owners clean up behind the dead of this thread's world; false if there are none.
pub(crate) fn clean_up() -> bool {
    let world = WORLD.with_borrow(Clone::clone);
    world.is_some_and(|world| media::spared(|| world.bury_all([0, 1])))
}

/// What the pools hold at first: some pages, checkpointed in part.
fn base() -> &'static ([Image; 2], Arc<[u8]>) {
    static BASE: OnceLock<([Image; 2], Arc<[u8]>)> = OnceLock::new();
    BASE.get_or_init(|| {
        let present = defect::present();
        defect::set(None);
        let bytes: Vec<u8> = (0..PAGES * PAGE_BYTES)
            .map(|at| (at / 64 % 251) as u8 | 1)
            .collect();
        let images = [9, 10].map(|id| {
            let media = Recorder::unrecorded(Image::filled(POOL_BYTES, 0x5555_aaaa_1234_8765));
            format(&media, Uuid::from_u128(id)).expect("a pool");
            let media = Arc::new(media);
            let (mut pool, _) = Pool::open(media.clone(), media.clone()).expect("a pool");
            pool.create(SLICE, bytes.len() as u64).expect("an object");
            pool.raise_epoch(SLICE, EPOCH, 0).expect("an epoch");
            let number = pool.open_session(1, 1).expect("a session");
            let mut session = Session::new(pool.view().clone(), number);
            let handle = pool.handle(SLICE).expect("the slice");
            for (page, data) in bytes.as_chunks::<PAGE_BYTES>().0.iter().enumerate() {
                let stamp = Stamp {
                    epoch: EPOCH,
                    op: page as u64 + 1,
                    open: 0,
                };
                let session = &mut session;
                let at = (page * PAGE_BYTES) as u64;
                write(&mut [Member { session, handle }], at, data, stamp).expect("room");
            }
            pool.close_session(number).expect("a sound pool");
            pool.settle(SLICE).expect("a sound pool");
            media.now()
        });
        defect::set(present);
        (images, bytes.into())
    })
}

impl World {
    fn open() -> Rc<World> {
        let (images, bytes) = base();
        let both = Arc::new(Both {
            media: images.clone().map(Recorder::from_image),
            oracle: Mutex::new(Oracle::new(bytes.clone())),
            moments: Mutex::default(),
        });
        let pools = [0, 1].map(|at| {
            let both = both.clone();
            let half = Arc::new(Half { both, at });
            RefCell::new(Pool::open(half.clone(), half).expect("a sound pool").0)
        });
        let guest = |_| {
            let numbers = pools
                .each_ref()
                .map(|pool| pool.borrow_mut().open_session(1, 1).expect("a session"));
            let session = |at: usize| {
                let view = pools[at].borrow().view().clone();
                Session::new(view, numbers[at])
            };
            Guest {
                sessions: Some([session(0), session(1)]),
                numbers,
                died_in: None,
            }
        };
        let guests = (0..GUESTS).map(guest).collect();
        both.moments.lock().expect("no panic inside").clear();
        Rc::new(World {
            both,
            pools,
            guests: RefCell::new(guests),
            rows: RefCell::default(),
            op: Cell::new(FIRST_OP),
            tag: Cell::new(0),
        })
    }

    fn with_oracle<T>(&self, change: impl FnOnce(&mut Oracle) -> T) -> T {
        change(&mut self.both.oracle.lock().expect("no panic inside"))
    }

    fn next_stamp(&self) -> Stamp {
        self.op.set(self.op.get() + 1);
        Stamp {
            epoch: EPOCH,
            op: self.op.get(),
            open: 0,
        }
    }

    fn handles(&self) -> [crate::view::Handle; 2] {
        let handle = |at: usize| self.pools[at].borrow().handle(SLICE).expect("the slice");
        [handle(0), handle(1)]
    }

    /// Whether nobody holds a lock word of these pages. A guest that goes on in between
    /// others may not wait for them.
    fn is_free(&self, (offset, len): Bytes) -> bool {
        let (first, last) = (offset / PAGE_BYTES, (offset + len - 1) / PAGE_BYTES);
        let (page, count) = (PageNo(first as u64), (last - first + 1) as u64);
        let handles = self.handles();
        (0..2).all(|at| {
            let range = control::Range::of(handles[at].object, page, count);
            let pool = self.pools[at].borrow();
            pool.view().control().is_free(&range)
        })
    }

    /// A guest writes as all guests do; its accesses.
    fn write(
        &self,
        guest: usize,
        bytes: Bytes,
        death: Option<u64>,
        other: Option<(u64, Box<dyn FnOnce()>)>,
    ) -> Result<u64, Wrong> {
        let sessions = self.guests.borrow_mut()[guest].sessions.take();
        let Some([mut one, mut two]) = sessions else {
            return Ok(0);
        };
        self.tag.set(self.tag.get() + 1);
        let data: Arc<[u8]> = vec![0x80 | self.tag.get(); bytes.1].into();
        let id = self.with_oracle(|oracle| oracle.begin(bytes.0, data.clone()));
        let handles = self.handles();
        let (outcome, accesses) = media::fated(death, other, || {
            let mut members = [(&mut one, handles[0]), (&mut two, handles[1])]
                .map(|(session, handle)| Member { session, handle });
            let stamp = || {
                let stamp = self.next_stamp();
                self.with_oracle(|oracle| oracle.number(Some(id), stamp.op));
                media::step();
                stamp
            };
            write_numbered(&mut members, bytes.0 as u64, &data, EPOCH, stamp)
        });
        match outcome {
            Ok(Ok(())) => {
                self.with_oracle(|oracle| oracle.end(id));
                self.guests.borrow_mut()[guest].sessions = Some([one, two]);
            }
            Ok(Err(failure)) => return wrong("operations", failure.to_string()),
            Err(cause) if cause.is::<Death>() => {
                self.guests.borrow_mut()[guest].died_in = Some((id, bytes));
            }
            Err(cause) => std::panic::resume_unwind(cause),
        }
        self.both.note();
        Ok(accesses)
    }

    /// The owner of a pool cleans up behind a guest that is dead.
    fn bury(&self, guest: usize, at: usize) {
        let number = self.guests.borrow()[guest].numbers[at];
        let mut pool = self.pools[at].borrow_mut();
        if pool.is_open(number) {
            pool.close_session(number).expect("a sound pool");
        }
    }

    /// Both do, in this order; false if nobody is dead.
    fn bury_all(&self, order: [usize; 2]) -> bool {
        let dead = |guest: &usize| self.guests.borrow()[*guest].died_in.is_some();
        let dead: Vec<usize> = (0..GUESTS).filter(dead).collect();
        for &guest in &dead {
            order.iter().for_each(|&at| self.bury(guest, at));
            let died_in = self.guests.borrow_mut()[guest].died_in.take();
            let (id, bytes) = died_in.expect("it is dead");
            self.with_oracle(|oracle| oracle.bury(id));
            self.rows.borrow_mut().push(bytes);
        }
        !dead.is_empty()
    }

    /// Does something with a session of somebody who lives, or a new one.
    fn with_session<T>(&self, at: usize, run: impl FnOnce(&mut Session<Half>) -> T) -> T {
        let mut guests = self.guests.borrow_mut();
        let mut alive = guests.iter_mut().filter_map(|it| it.sessions.as_mut());
        match alive.next() {
            Some(sessions) => run(&mut sessions[at]),
            None => {
                let (number, mut session) = self.open_session(at);
                let result = run(&mut session);
                let closed = self.pools[at].borrow_mut().close_session(number);
                closed.expect("a sound pool");
                result
            }
        }
    }

    fn open_session(&self, at: usize) -> (u32, Session<Half>) {
        let mut pool = self.pools[at].borrow_mut();
        let number = pool.open_session(1, 1).expect("a session");
        (number, Session::new(pool.view().clone(), number))
    }

    fn read(&self, at: usize) -> Vec<u8> {
        let (handle, mut bytes) = (self.handles()[at], vec![0; PAGES * PAGE_BYTES]);
        let read = self.with_session(at, |session| session.read(&handle, 0, &mut bytes, EPOCH));
        read.expect("nothing is damaged");
        bytes
    }

    /// Where the dead were at work the first pool gets what the last has.
    fn heal(&self) {
        let rows = self.rows.take();
        if rows.is_empty() {
            return;
        }
        let (_, mut session) = self.open_session(0);
        for (offset, len) in rows {
            for page in offset / PAGE_BYTES..(offset + len).div_ceil(PAGE_BYTES) {
                let place = page * PAGE_BYTES;
                let [from, to] = [1, 0].map(|at| self.read(at)[place..][..PAGE_BYTES].to_vec());
                if from != to {
                    let (stamp, handle) = (self.next_stamp(), self.handles()[0]);
                    self.with_oracle(|oracle| oracle.number(None, stamp.op));
                    let session = &mut session;
                    let mut members = [Member { session, handle }];
                    write(&mut members, place as u64, &from, stamp).expect("room");
                }
            }
        }
        self.both.note();
    }

    /// Both pools as they are shown.
    fn check_shown(&self) -> Result<(), Wrong> {
        let [one, two] = [0, 1].map(|at| self.read(at));
        let allowed = self.with_oracle(|oracle| oracle.all_allowed());
        for (page, allowed) in allowed.iter().enumerate() {
            let [one, two] = [&one, &two].map(|bytes| &bytes[page * PAGE_BYTES..][..PAGE_BYTES]);
            if one != two {
                return wrong("legs are equal", format!("page {page} is not, and healed"));
            }
            let sum = crc32c(one);
            if !allowed.iter().any(|(allowed, _)| *allowed == sum) {
                return wrong("one order of writes", format!("page {page} is shown"));
            }
        }
        Ok(())
    }

    /// What guests read, the last pool, is in the other one, too: each page that a dead
    /// guest wrote.
    fn check_last_is_in_all(&self) -> Result<(), Wrong> {
        let [one, two] = [0, 1].map(|at| self.read(at));
        let base = &base().1;
        for at in (0..one.len()).step_by(PAGE_BYTES) {
            let page = |bytes: &[u8]| bytes[at..][..PAGE_BYTES].to_vec();
            if page(&two) != page(base) && page(&one) == page(base) {
                let detail = format!("page {} is new in the last pool alone", at / PAGE_BYTES);
                return wrong("what guests read is on all legs", detail);
            }
        }
        Ok(())
    }

    /// Crashes at every moment so far.
    fn check_crashes(&self, seed: u64, tally: &mut Tally) -> Result<(), Wrong> {
        let moments = std::mem::take(&mut *self.both.moments.lock().expect("no panic inside"));
        for moment in moments {
            let allowed = moment.oracle.all_allowed();
            let mut legs: [Vec<Leg>; 2] = [vec![], vec![]];
            for (legs, point) in legs.iter_mut().zip(&moment.points) {
                for image in images(point, seed) {
                    let found = recover::recover(Kind::Memory, image, &BTreeMap::new())?;
                    let leg = Leg::new(found, SLICE, PAGES);
                    leg.check_numbers(&moment.oracle, &allowed)?;
                    legs.push(leg);
                    tally.images += 1;
                }
            }
            for one in &legs[0] {
                for other in &legs[1] {
                    tally.differing += u64::from(judge([one, other], &allowed)? > 0);
                    tally.pairs += 1;
                }
            }
        }
        Ok(())
    }
}

/// Images of one medium: nothing uncertain, everything, and between.
fn images(point: &CrashPoint, seed: u64) -> Vec<Image> {
    if point.count() <= IMAGES_MAX {
        return (0..point.count()).map(|index| point.image(index)).collect();
    }
    let sampled = (0..IMAGES_MAX - 2).map(|number| point.sample(seed << 8 | number));
    [point.image(0), point.everything()]
        .into_iter()
        .chain(sampled)
        .collect()
}

/// How often something was checked.
#[derive(Default, Debug)]
struct Tally {
    stories: u64,
    images: u64,
    pairs: u64,
    differing: u64,
}

/// Tells a story; the accesses of its guests.
fn tell(story: Story, tally: &mut Tally) -> Result<[u64; GUESTS], Wrong> {
    tally.stories += 1;
    let world = World::open();
    WORLD.set(Some(world.clone()));
    let told = tell_in(&world, story, tally);
    WORLD.set(None);
    told
}

fn tell_in(world: &Rc<World>, story: Story, tally: &mut Tally) -> Result<[u64; GUESTS], Wrong> {
    let [a, b, c] = story.writes;
    let nested: Rc<Cell<Option<Result<u64, Wrong>>>> = Rc::default();
    let other = story.other_after.map(|after| {
        let (world, nested) = (world.clone(), nested.clone());
        let go_on = move || {
            if world.is_free(b) {
                nested.set(Some(world.write(1, b, story.deaths[1], None)));
            }
        };
        (after, Box::new(go_on) as Box<dyn FnOnce()>)
    });
    let mut accesses = [0; GUESTS];
    accesses[0] = world.write(0, a, story.deaths[0], other)?;
    let mut has_b = false;
    if let Some(nested) = nested.take() {
        accesses[1] = nested?;
        has_b = true;
    }
    // One of the owners is quick.
    let order = [story.first, 1 - story.first];
    for guest in 0..GUESTS {
        if world.guests.borrow()[guest].died_in.is_some() {
            world.bury(guest, order[0]);
        }
    }
    let mut has_c = false;
    if world.is_free(c) {
        accesses[2] = world.write(2, c, story.deaths[2], None)?;
        has_c = true;
    }
    world.bury_all(order);
    if story.deaths[2].is_none() {
        world.check_last_is_in_all()?;
    }
    if !has_b {
        accesses[1] = world.write(1, b, story.deaths[1], None)?;
        world.bury_all(order);
    }
    if !has_c {
        accesses[2] = world.write(2, c, story.deaths[2], None)?;
        world.bury_all(order);
    }
    world.heal();
    world.check_shown()?;
    world.check_crashes(story.seed, tally)?;
    Ok(accesses)
}

fn check(story: Story, tally: &mut Tally) -> Result<[u64; GUESTS], Wrong> {
    let mut accesses = [0; GUESTS];
    guard(|| {
        accesses = tell(story, tally)?;
        Ok(())
    })
    .or_else(|Wrong { check, detail }| wrong(check, format!("{story:?}: {detail}")))?;
    Ok(accesses)
}

const P: usize = PAGE_BYTES;
/// Overlapping places; two of the last three are under another lock word as well, or alone.
const PLACES: [Bytes; 9] = [
    (P, P),
    (P + 100, 300),
    (P + 300, 1000),
    (P, 2 * P),
    (2 * P, 2 * P),
    (P + 8, 2 * P),
    (15 * P, 2 * P),
    (17 * P + 5, 600),
    (P + 350, 200),
];

/// Every access of these writes at which the first guest dies, or the second goes on.
fn every_access(tally: &mut Tally) -> Result<(), Wrong> {
    let pairs = [
        (0, 0, 1),
        (1, 2, 1),
        (0, 1, 2),
        (3, 4, 1),
        (1, 7, 0),
        // In place, both, and some of the bytes the same.
        (1, 8, 1),
    ];
    for (a, b, c) in pairs {
        let writes = [PLACES[a], PLACES[b], PLACES[c]];
        let story = Story {
            writes,
            ..Story::default()
        };
        let [accesses, ..] = check(story, tally)?;
        for at in 0..accesses {
            let dies = Story {
                deaths: [Some(at), None, None],
                first: at as usize % 2,
                ..story
            };
            check(dies, tally)?;
            let lets_go = Story {
                other_after: Some(at),
                ..story
            };
            check(lets_go, tally)?;
        }
    }
    Ok(())
}

fn random(seed: u64) -> Story {
    let mut dice = Dice::new(seed);
    let mut place = || PLACES[dice.roll(PLACES.len() as u64) as usize];
    let writes = [place(), place(), place()];
    // About as many as a write of a page has.
    let death = |dice: &mut Dice| (dice.roll(2) == 0).then(|| dice.roll(24));
    Story {
        writes,
        other_after: (dice.roll(3) > 0).then(|| dice.roll(20)),
        deaths: [(); GUESTS].map(|()| death(&mut dice)),
        first: dice.roll(2) as usize,
        seed,
    }
}

#[test]
fn guests_leave_what_some_order_of_their_writes_makes() {
    let mut tally = Tally::default();
    let told = match number("PAGEMESH_SEED") {
        Some(seed) => check(random(seed), &mut tally).map(drop),
        None => every_access(&mut tally).and_then(|()| {
            let from = number("PAGEMESH_FROM").unwrap_or(1);
            let count = number("PAGEMESH_STORIES").unwrap_or(STORIES);
            (from..from + count).try_for_each(|seed| check(random(seed), &mut tally).map(drop))
        }),
    };
    told.unwrap_or_else(|wrong| panic!("{wrong:?}"));
    println!("guests: {tally:?}");
    assert!(tally.differing > 100 || tally.stories == 1, "{tally:?}");
}

/// Each, and the check that it fails first.
const DEFECTS: [(Defect, &str); 4] = [
    (Defect::NumberedFirst, "numbers are in the order of slots"),
    (Defect::UnlockBeforeShown, "the store's own assertions"),
    (Defect::LastLegFirst, "what guests read is on all legs"),
    (Defect::NoCommitFence, "damage"),
];

#[test]
fn defects_of_what_guests_do_are_caught() {
    for (defect, by) in DEFECTS {
        defect::set(Some(defect));
        let mut tally = Tally::default();
        let random =
            |tally: &mut Tally| (1..2000).try_for_each(|seed| check(random(seed), tally).map(drop));
        let told = every_access(&mut tally).and_then(|()| random(&mut tally));
        defect::set(None);
        let Err(Wrong { check, detail }) = told else {
            panic!("{defect:?} is not caught: {tally:?}");
        };
        println!("{defect:?}: {check}: {detail}, {tally:?}");
        assert_eq!(check, by, "{defect:?}");
    }
}
