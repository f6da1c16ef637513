//! All guests of a history, and what bricks know of them.
//!
//! Invariants: before a brick does anything its dead are buried, since it might wait for
//! them; those of other bricks are when somebody waits in vain for what they hold.

use super::guest::{Baton, Deed, End, Leg, Shown, Thread, Word};
use crate::cluster::{Cluster, guard, tell};
use crate::dice::Dice;
use crate::house::{Running, survives};
use pagemesh_base::slice::SliceError;
use pagemesh_store::session::Session;
use pagemesh_volume::guests::{Picture, Segment};
use std::sync::{Arc, Weak};

/// Accesses of a guest at a time, at most: some of an operation, or most of it.
const ACCESSES: [u64; 2] = [4, 60];
/// Times that one may be let go on while somebody waits, before that counts as for ever.
const PASSES_MAX: u32 = 200_000;
/// So many of them before the dead of other bricks are buried.
const BURY_AFTER: u32 = 40;
/// Sessions of guests are told to be of a process that is not there: no brick ends it.
const NOBODY: u32 = 0x7fff_fff0;

/// A session of a brick.
struct Held {
    house: usize,
    running: Weak<Running>,
    session: u32,
}

/// How those who check know an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tracked {
    /// Of sectors, by its number.
    Sectors(usize),
    /// An append, by its value.
    Append(u64),
    /// A read of what was appended, by when it began.
    LogRead(u64),
}

/// An operation that a guest is inside of.
#[derive(Clone)]
pub(crate) struct Work {
    /// As the checker has it, or who checks appends.
    pub(crate) operation: Tracked,
    pub(crate) file: usize,
    /// Sectors of the file.
    pub(crate) own: std::ops::Range<u64>,
    pub(crate) deed: Deed,
    pub(crate) ino: u64,
}

pub(crate) struct Guest {
    pub(crate) number: u32,
    pub(crate) row: usize,
    /// The client that let it in.
    pub(crate) client: u32,
    pub(crate) segment: Arc<Segment>,
    thread: Thread,
    held: Vec<Held>,
    pub(crate) picture: Option<Picture>,
    pub(crate) work: Option<Work>,
    ended: Option<(End, bool)>,
    /// Its client is gone, or another has attached: it ends what it has begun.
    pub(crate) is_orphan: bool,
}

impl Guest {
    fn is_inside(&self) -> bool {
        self.work.is_some() && self.ended.is_none()
    }
}

/// One that died inside of an operation.
pub(crate) struct Fallen {
    pub(crate) number: u32,
    pub(crate) row: usize,
    pub(crate) client: u32,
    pub(crate) segment: Arc<Segment>,
    pub(crate) work: Work,
}

pub(crate) struct Crew {
    pub(crate) guests: Vec<Guest>,
    /// Of the dead, until their bricks have noticed.
    unburied: Vec<Held>,
    pub(crate) fallen: Vec<Fallen>,
    pub(crate) dice: Dice,
    /// The brick that does something at the moment.
    at_work: Option<usize>,
    passes: u32,
}

impl Crew {
    pub(crate) fn new(seed: u64) -> Crew {
        Crew {
            guests: Vec::new(),
            unburied: Vec::new(),
            fallen: Vec::new(),
            dice: Dice::new(seed),
            at_work: None,
            passes: 0,
        }
    }

    pub(crate) fn admit(&mut self, number: u32, client: u32, row: usize, segment: Arc<Segment>) {
        self.guests.push(Guest {
            number,
            row,
            client,
            thread: Thread::start(Arc::clone(&segment), row),
            segment,
            held: Vec::new(),
            picture: None,
            work: None,
            ended: None,
            is_orphan: false,
        });
    }

    fn hear(&mut self, at: usize, word: Word) {
        let guest = &mut self.guests[at];
        match word {
            Word::Equipped | Word::Inside => {}
            Word::Ended(end, must_call) => guest.ended = Some((end, must_call)),
            Word::Panicked(text) => panic!("guest {}: {text}", guest.number),
        }
    }

    pub(crate) fn begin(&mut self, at: usize, shown: Shown, work: Work) {
        let deed = work.deed.clone();
        self.guests[at].work = Some(work);
        let word = self.guests[at].thread.tell(Baton::Begin(shown, deed));
        self.hear(at, word);
    }

    /// Lets a guest go on that is inside.
    pub(crate) fn go_on(&mut self, at: usize) {
        let most = ACCESSES[self.dice.roll(2) as usize];
        let accesses = self.dice.roll(most) as u32;
        let word = self.guests[at].thread.tell(Baton::GoOn(accesses));
        self.hear(at, word);
    }

    /// Those that are inside.
    pub(crate) fn inside(&self) -> Vec<usize> {
        let all = self.guests.iter().enumerate();
        let inside = all.filter(|(_, guest)| guest.is_inside());
        inside.map(|(at, _)| at).collect()
    }

    /// What came of an operation, once it has ended.
    pub(crate) fn take_ended(&mut self, at: usize) -> Option<(Work, End, bool)> {
        let guest = &mut self.guests[at];
        let (end, must_call) = guest.ended.take()?;
        let work = guest.work.take().expect("it did something");
        Some((work, end, must_call))
    }

    /// It dies where it is. Bricks notice later. Gives those of its legs, if it was inside.
    pub(crate) fn die(&mut self, at: usize) -> Vec<usize> {
        let mut guest = self.guests.remove(at);
        let mut bricks: Vec<usize> = guest.held.iter().map(|held| held.house).collect();
        self.unburied.append(&mut guest.held);
        let was_inside = guest.is_inside();
        let Guest {
            number,
            row,
            client,
            segment,
            thread,
            work,
            ..
        } = guest;
        drop(thread);
        if let Some(work) = work {
            self.fallen.push(Fallen {
                number,
                row,
                client,
                segment,
                work,
            });
        }
        bricks.retain(|_| was_inside);
        bricks
    }

    fn of_house(&mut self, is_its: impl Fn(usize) -> bool) -> Vec<Held> {
        let (its, others) = std::mem::take(&mut self.unburied)
            .into_iter()
            .partition(|held| is_its(held.house));
        self.unburied = others;
        its
    }
}

impl Cluster {
    /// Guests die that have the pool of a brick mapped which starts anew, and are inside.
    pub(crate) fn evict(&self, house: usize) {
        let mut crew = guard(&self.crew);
        let has_it = |guest: &Guest| {
            let mut held = guest.held.iter();
            held.any(|held| held.house == house)
        };
        for at in (0..crew.guests.len()).rev() {
            if !has_it(&crew.guests[at]) {
                continue;
            }
            crew.guests[at].picture = None;
            if crew.guests[at].is_inside() {
                let number = crew.guests[at].number;
                crew.die(at);
                drop(crew);
                tell!(self, "guest {number} is ended by brick {house}");
                crew = guard(&self.crew);
            }
        }
    }

    /// A brick does something; its dead are buried first.
    pub(crate) fn rouse(&self, house: usize) {
        let dead = {
            let mut crew = guard(&self.crew);
            crew.at_work = Some(house);
            crew.passes = 0;
            crew.of_house(|its| its == house)
        };
        self.bury(dead);
    }

    /// It has done it.
    pub(crate) fn rested(&self) {
        guard(&self.crew).at_work = None;
    }

    fn bury(&self, dead: Vec<Held>) {
        for held in dead {
            self.close(&held);
        }
    }

    fn close(&self, held: &Held) {
        let Some(running) = held.running.upgrade() else {
            return;
        };
        let is_its = |now: &Arc<Running>| Arc::ptr_eq(now, &running);
        if !self.running(held.house).as_ref().is_some_and(is_its) {
            return;
        }
        let closed = survives(|| running.brick.close_session(held.session));
        drop(running);
        if closed.is_err() {
            self.kill_doomed(held.house);
        }
    }

    /// Somebody waits: lets a guest go on. False if nobody can.
    pub(crate) fn let_guests_go_on(&self) -> bool {
        let mut crew = guard(&self.crew);
        crew.passes += 1;
        assert!(crew.passes < PASSES_MAX, "a guest does not come out");
        let inside = crew.inside();
        let picked = crew.dice.pick(&inside);
        if let Some(at) = picked {
            crew.go_on(at);
        }
        let (at_work, is_late) = (crew.at_work, crew.passes.is_multiple_of(BURY_AFTER));
        let dead = match picked.is_none() || is_late {
            true => crew.of_house(|house| Some(house) != at_work),
            false => Vec::new(),
        };
        drop(crew);
        let is_any = picked.is_some() || !dead.is_empty();
        self.bury(dead);
        is_any
    }

    /// Gives a guest's sessions back, and ends it unless it goes on.
    pub(crate) fn strip(&self, at: usize, ends: bool) {
        let (held, guest) = {
            let mut crew = guard(&self.crew);
            crew.guests[at].picture = None;
            let held = std::mem::take(&mut crew.guests[at].held);
            (held, ends.then(|| crew.guests.remove(at)))
        };
        drop(guest);
        for held in held {
            self.rouse(held.house);
            self.close(&held);
            self.rested();
        }
    }

    /// Gets a guest sessions of all legs of a picture.
    pub(crate) fn equip(&self, at: usize, picture: Picture) -> Result<(), SliceError> {
        self.strip(at, false);
        let lost = |why: &str| SliceError::Lost(why.into());
        let (mut legs, mut all) = (Vec::new(), Ok(()));
        for seat in &picture.seats {
            let house = self.house_of(seat.brick).ok_or_else(|| lost("no brick"))?;
            let Some(running) = self.running(house) else {
                all = Err(lost("it is down"));
                break;
            };
            self.rouse(house);
            let opened = survives(|| {
                let number = running.brick.open_session(NOBODY, 1)?;
                guard(&self.crew).guests[at].held.push(Held {
                    house,
                    running: Arc::downgrade(&running),
                    session: number,
                });
                let (object, _) = running.brick.attach(seat.slice, picture.epoch)?;
                let view = Arc::clone(running.brick.view());
                let handle = view.handle(object, seat.slice)?;
                let session = Session::new(view, number);
                Ok::<_, SliceError>(Leg { session, handle })
            });
            self.rested();
            match opened {
                Ok(Ok(leg)) => legs.push(leg),
                Ok(Err(cause)) => all = Err(cause),
                Err(_) => {
                    self.kill_doomed(house);
                    all = Err(lost("it died"));
                }
            }
            if all.is_err() {
                break;
            }
        }
        if let Err(cause) = all {
            self.strip(at, false);
            return Err(cause);
        }
        let mut crew = guard(&self.crew);
        crew.guests[at].picture = Some(picture.clone());
        let word = crew.guests[at].thread.tell(Baton::Equip(picture, legs));
        crew.hear(at, word);
        Ok(())
    }
}
