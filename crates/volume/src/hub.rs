//! What the channels of a volume and its keeper share.
//!
//! Invariants: a view is replaced as a whole, and its generation rises after
//! it is in place; nothing here blocks but for a look at a short list.

use crate::channel::Core;
use crate::guests::Guests;
use crate::limits::CHANNELS_MAX;
use crate::locks::{Holder, RangeLocks};
use crate::losses::Losses;
use crate::ship::Ship;
use crate::status::Tally;
use crate::steps;
use crate::undecided::Undecided;
use crate::view::View;
use crate::wake::Wake;
use pagemesh_base::ids::Epoch;
use pagemesh_base::slice::Leg;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

/// Numbers that channels may have taken, but not told of, while guests are admitted.
const FIRST_OP_GAP: u64 = 1 << 16;

/// The keeper's place among the members.
pub(crate) const KEEPER: u32 = 0;

pub(crate) fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection of a channel to a leg.
pub(crate) struct Link {
    pub column: usize,
    pub leg: usize,
    pub serial: u64,
    pub connection: Box<dyn Leg>,
}

/// What members are told.
pub(crate) enum Note {
    /// A range lock's turn has come, or what a reader awaits has ended.
    Granted(u32),
    /// A connection for the next view.
    Link(Link),
    /// A connection that is to be replaced ends now: its session may be the
    /// one that the next needs.
    End {
        column: usize,
        leg: usize,
        serial: u64,
    },
    /// A brick has no session for this channel, which has not served yet: why. It is no
    /// member any more.
    TurnedAway(String),
}

pub(crate) struct Member {
    pub wake: Wake,
    notes: Mutex<Vec<Note>>,
    /// Serials of the connections it was given, by column and leg.
    pub links: Mutex<BTreeMap<(usize, usize), u64>>,
    /// Its channel, while that is open. Held by its thread during each call, and by the
    /// keeper while that ends connections of a channel that nobody looks at.
    pub core: Mutex<Option<Box<Core>>>,
    /// It had all connections of a view that had some.
    served: AtomicBool,
}

impl Member {
    pub(crate) fn new() -> std::io::Result<Member> {
        Ok(Member {
            wake: Wake::new()?,
            notes: Mutex::default(),
            links: Mutex::default(),
            core: Mutex::default(),
            served: AtomicBool::new(false),
        })
    }

    pub(crate) fn tell(&self, note: Note) {
        steps::step("notes");
        guard(&self.notes).push(note);
        self.wake.raise();
    }

    /// Ends the connections to such places, with such serials; whether there were any.
    pub(crate) fn end_links(&self, is_meant: impl Fn(&(usize, usize), u64) -> bool) -> bool {
        let mut links = guard(&self.links);
        let before = links.len();
        links.retain(|place, serial| {
            let is_meant = is_meant(place, *serial);
            if is_meant {
                let &(column, leg) = place;
                let serial = *serial;
                self.tell(Note::End {
                    column,
                    leg,
                    serial,
                });
            }
            !is_meant
        });
        links.len() < before
    }

    pub(crate) fn has_served(&self) -> bool {
        self.served.load(Ordering::Relaxed)
    }

    /// Has the channel do what it was told, on this thread. False: its own is inside of a
    /// call just now, which may have looked before.
    pub(crate) fn heed(&self) -> bool {
        steps::step("core");
        let mut core = match self.core.try_lock() {
            Ok(core) => core,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if let Some(core) = core.as_deref_mut() {
            core.heed();
            // Its thread sees to what came of that.
            self.wake.raise();
        }
        true
    }

    pub(crate) fn take_notes(&self) -> Vec<Note> {
        steps::step("notes");
        std::mem::take(&mut *guard(&self.notes))
    }
}

pub(crate) struct Hub {
    view: Mutex<Arc<View>>,
    generation: AtomicU64,
    held_epoch: AtomicU32,
    ops: AtomicU64,
    /// The number of the last member.
    joined: AtomicU32,
    pub locks: RangeLocks,
    pub losses: Losses,
    pub undecided: Undecided,
    pub ship: Ship,
    /// What is shared with guests, once there may be some; numbers are from there then.
    pub guests: OnceLock<Guests>,
    pub members: Mutex<BTreeMap<u32, Arc<Member>>>,
    pub tally: Tally,
}

impl Hub {
    pub(crate) fn new(view: View, keeper: Arc<Member>) -> Hub {
        Hub {
            held_epoch: AtomicU32::new(view.epoch.0),
            view: Mutex::new(Arc::new(view)),
            generation: AtomicU64::new(0),
            ops: AtomicU64::new(0),
            joined: AtomicU32::new(KEEPER),
            locks: RangeLocks::new(),
            losses: Losses::default(),
            undecided: Undecided::default(),
            ship: Ship::default(),
            guests: OnceLock::new(),
            members: Mutex::new(BTreeMap::from([(KEEPER, keeper)])),
            tally: Tally::default(),
        }
    }

    pub(crate) fn generation(&self) -> u64 {
        steps::step("view");
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn view(&self) -> (u64, Arc<View>) {
        steps::lock("view", &self.view);
        let view = guard(&self.view);
        (self.generation(), Arc::clone(&view))
    }

    pub(crate) fn publish(&self, view: View) {
        self.publish_if(view, |_| true);
    }

    /// Publishes if all members are ready for it; none can join meanwhile.
    pub(crate) fn publish_if(
        &self,
        view: View,
        is_ready: impl Fn(&BTreeMap<u32, Arc<Member>>) -> bool,
    ) -> bool {
        let members = guard(&self.members);
        if !is_ready(&members) {
            return false;
        }
        steps::lock("view", &self.view);
        let mut present = guard(&self.view);
        let generation = self.generation.fetch_add(1, Ordering::AcqRel) + 1;
        // Whoever sees the generation waits for the view until this is known.
        self.losses
            .view_changes(&present.columns, &view.columns, generation);
        self.undecided
            .view_changes(&present.columns, &view.columns, generation);
        let (before, after) = (present.ship(), view.ship());
        *present = Arc::new(view);
        if let Some(guests) = self.guests.get() {
            guests.withdraw();
        }
        // Nobody has the new view yet, and nobody who has the old one is acknowledged.
        match after {
            _ if before == after => {}
            0 => self.ship.close(),
            serial => self.ship.open(serial),
        }
        drop(present);
        for member in members.values() {
            if !guard(&member.links).is_empty() {
                member.served.store(true, Ordering::Relaxed);
            }
            member.wake.raise();
        }
        true
    }

    pub(crate) fn held_epoch(&self) -> Epoch {
        Epoch(self.held_epoch.load(Ordering::Acquire))
    }

    /// Before any leg hears of it: its refusals of the older one are then
    /// known to be our own doing.
    pub(crate) fn hold_epoch(&self, epoch: Epoch) {
        self.held_epoch.fetch_max(epoch.0, Ordering::AcqRel);
    }

    /// What is shared with guests, from now on.
    pub(crate) fn admit_guests(&self) -> Result<&Guests, pagemesh_pmem::MapError> {
        if let Some(guests) = self.guests.get() {
            return Ok(guests);
        }
        // Who takes a number beside this takes a smaller one.
        let guests = Guests::new(self.ops() + FIRST_OP_GAP)?;
        let guests = self.guests.get_or_init(|| guests);
        self.ship.admit(&guests.segment);
        Ok(guests)
    }

    /// Taken while a range lock is held.
    pub(crate) fn next_op(&self) -> u64 {
        match self.guests.get() {
            None => self.ops.fetch_add(1, Ordering::Relaxed) + 1,
            Some(guests) => guests.segment.next_op(),
        }
    }

    /// How many operations there were.
    pub(crate) fn ops(&self) -> u64 {
        let shared = self.guests.get().map(|guests| guests.segment.ops());
        shared.unwrap_or(&self.ops).load(Ordering::Relaxed)
    }

    /// Tells those whose turn has come, `own` apart.
    pub(crate) fn pass_turns(&self, turns: &mut Vec<Holder>, own: u32, mine: &mut Vec<u32>) {
        if turns.is_empty() {
            return;
        }
        let members = guard(&self.members);
        for turn in turns.drain(..) {
            if turn.member == own {
                mine.push(turn.key);
            } else if let Some(member) = members.get(&turn.member) {
                member.tell(Note::Granted(turn.key));
            }
        }
    }

    pub(crate) fn wake_keeper(&self) {
        if let Some(keeper) = guard(&self.members).get(&KEEPER) {
            keeper.wake.raise();
        }
    }

    /// A number for a new member, if there is room. Nobody had it before: a
    /// turn that comes late for who is gone is nobody's.
    pub(crate) fn join(&self, member: &Arc<Member>) -> Option<u32> {
        let mut members = guard(&self.members);
        if members.len() > CHANNELS_MAX {
            return None;
        }
        let number = self.joined.fetch_add(1, Ordering::Relaxed).checked_add(1)?;
        members.insert(number, Arc::clone(member));
        Some(number)
    }

    pub(crate) fn leave(&self, number: u32) {
        guard(&self.members).remove(&number);
        self.ship.forget(number);
    }
}
