//! One thread's channel into a volume: the engine, its connections, and the
//! notes of the others.
//!
//! A channel's thread may be elsewhere for long, with the channel in its hands. So the
//! keeper, too, can have the channel heed its notes, between two calls of the thread.
//!
//! Invariants: never blocks, but for a mapped leg that waits for its owner to
//! grant frames, within the store's limits; what a leg answered is used only after a look at
//! the generation that came later than the answer, so that a leg which was
//! left out meanwhile cannot serve an old page.

use crate::engine::{After, Answers, Engine, Outbox};
use crate::hedge::Hedge;
use crate::hub::{Hub, Link, Member, Note, guard};
use crate::keeper::{Event, Mailbox};
use crate::limits::CHANNELS_MAX;
use crate::locks::{Holder, LockRange};
use crate::mapped::{GuestLeg, MappedLeg};
use crate::ship::Awaited;
use crate::status::Count;
use crate::steps;
use crate::view::{Gate, Mask, View};
use arrayvec::ArrayVec;
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::COPIES_MAX;
use pagemesh_base::slice::{Leg, Part, SliceCompletion, SliceRequest, Stamp};
use pagemesh_base::space::{Channel, Completion, Request, SpaceError, Token};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// Names messages whose answers nobody needs: no piece has it.
const IDLE_TAG: u64 = u64::MAX;

struct Connection {
    serial: u64,
    leg: Box<dyn Leg>,
    outstanding: u32,
    /// The epoch that its slice knows this connection by.
    epoch: Epoch,
}

impl Connection {
    /// Tells the slice an epoch, and that whatever came before this number is
    /// complete.
    fn change_nothing(&mut self, epoch: Epoch, op: u64) {
        self.outstanding += 1;
        let stamp = Stamp { epoch, op, open: 0 };
        let (offset, len) = (0, 0);
        let nothing = SliceRequest::Clear { offset, len, stamp };
        self.leg.submit(IDLE_TAG, nothing);
    }
}

/// The world of an engine.
struct Ports {
    hub: Arc<Hub>,
    mailbox: Arc<Mailbox>,
    number: u32,
    /// By column and leg.
    connections: Vec<Option<Connection>>,
    /// By column.
    hedges: Vec<Hedge>,
    completions: Vec<Completion>,
    turns: Vec<Holder>,
    granted: Vec<u32>,
    /// Requests on all connections without an answer.
    outstanding: usize,
    /// Of the view that the engine has.
    generation: u64,
    /// By column: the losses that flushes have told.
    losses_told: Vec<u64>,
    /// Whether it has made any change.
    has_changed: bool,
    /// The last number in the queue of the leg that follows that acknowledgements must
    /// not run ahead of.
    must_wait: u64,
    /// Acknowledgements that wait for that leg, with the numbers that they wait for.
    held: VecDeque<(u64, Completion)>,
}

impl Outbox for Ports {
    fn do_at_once(&mut self, column: usize, legs: Mask, offset: u64) -> bool {
        let Some(found) = self.mapped(column * COPIES_MAX, legs) else {
            return false;
        };
        found.iter().for_each(|leg| leg.expect_write(offset));
        true
    }

    fn write_at_once(
        &mut self,
        column: usize,
        legs: Mask,
        offset: u64,
        data: &Bytes,
        stamp: Stamp,
    ) -> Answers {
        match self.mapped(column * COPIES_MAX, legs) {
            Some(mut found) => MappedLeg::write_all(&mut found, offset, data, stamp),
            None => unreachable!("the legs said that they would"),
        }
    }

    fn transact_at_once(
        &mut self,
        column: usize,
        legs: Mask,
        parts: &[Part],
        stamp: Stamp,
    ) -> Answers {
        match self.mapped(column * COPIES_MAX, legs) {
            Some(mut found) => MappedLeg::transact_all(&mut found, parts, stamp),
            None => unreachable!("the legs said that they would"),
        }
    }

    fn answer(&mut self, column: usize, legs: Mask, tag: u64, answers: Answers) {
        let base = column * COPIES_MAX;
        if let Some(found) = self.mapped(base, legs) {
            for (leg, answer) in found.into_iter().zip(answers) {
                leg.finish(tag, answer);
            }
        }
        for leg in legs.legs() {
            if let Some(connection) = self.connections[base + leg].as_mut() {
                connection.outstanding += 1;
                self.outstanding += 1;
            }
        }
    }

    fn is_current(&self) -> bool {
        self.hub.generation() == self.generation
    }

    fn try_acquire(&mut self, range: LockRange, key: u32) -> bool {
        self.hub.locks.try_acquire(range, self.holder(key))
    }

    fn try_acquire_all(&mut self, ranges: &[LockRange], key: u32) -> bool {
        self.hub.locks.try_acquire_all(ranges, self.holder(key))
    }

    fn send(&mut self, column: usize, legs: Mask, tag: u64, request: SliceRequest) {
        let base = column * COPIES_MAX;
        if legs.len() > 1
            && let Some(answers) = self.change_at_once(base, legs, &request)
        {
            return self.answer(column, legs, tag, answers);
        }
        let mut left = legs.len();
        let mut request = Some(request);
        for leg in legs.legs() {
            left -= 1;
            let own = if left == 0 {
                request.take()
            } else {
                request.clone()
            };
            let (Some(own), Some(connection)) = (own, self.connections[base + leg].as_mut()) else {
                debug_assert!(false, "sent to a leg that is not connected");
                continue;
            };
            connection.outstanding += 1;
            self.outstanding += 1;
            if let SliceRequest::Read { .. } = own
                && let Some(now) = connection.leg.now()
            {
                self.hedges[column].sent(tag, leg, now);
            }
            connection.leg.submit(tag, own);
        }
    }

    fn acquire(&mut self, range: LockRange, key: u32) -> bool {
        self.hub.locks.acquire(range, self.holder(key))
    }

    fn acquire_all(&mut self, ranges: &[LockRange], key: u32) -> u32 {
        self.hub.locks.acquire_all(ranges, self.holder(key))
    }

    fn release(&mut self, range: LockRange, key: u32) {
        let holder = self.holder(key);
        self.hub.locks.release(range, holder, &mut self.turns);
        self.hub
            .pass_turns(&mut self.turns, self.number, &mut self.granted);
    }

    fn is_still(&mut self, range: LockRange, key: u32) -> bool {
        self.hub.locks.is_still(range, self.holder(key))
    }

    fn note_undecided(&mut self, range: LockRange) {
        self.hub.undecided.note(range, self.generation);
    }

    fn keep_guests_out(&mut self) -> bool {
        let Some(guests) = self.hub.guests.get() else {
            return true;
        };
        guests.segment.close();
        let is_quiet = guests.segment.is_quiet();
        if !is_quiet {
            guests.segment.reopen();
        }
        is_quiet
    }

    fn let_guests_in(&mut self) {
        if let Some(guests) = self.hub.guests.get() {
            guests.segment.reopen();
        }
    }

    fn is_undecided(&self, range: LockRange) -> bool {
        self.hub.undecided.has(&range)
    }

    fn next_op(&mut self) -> u64 {
        self.has_changed = true;
        self.hub.next_op()
    }

    fn complete(&mut self, completion: Completion, after: After) {
        let number = match after {
            After::Nothing => 0,
            After::Lag => self.must_wait,
            After::Everything => self.hub.ship.last(),
        };
        match self.hub.ship.is_done(number) {
            true => self.completions.push(completion),
            false => self.held.push_back((number, completion)),
        }
    }

    fn ship(&mut self, serial: u64, change: SliceRequest) {
        let Some(appended) = self.hub.ship.append(serial, change) else {
            return;
        };
        if appended.must_wait {
            self.must_wait = appended.number;
        }
        if appended.wakes {
            self.hub.wake_keeper();
        }
    }

    fn lose(&mut self, column: usize, leg: usize, why: String) {
        let place = column * COPIES_MAX + leg;
        let Some(connection) = self.connections[place].take() else {
            return;
        };
        self.outstanding -= connection.outstanding as usize;
        self.hedges[column].forget(leg);
        self.mailbox.post(Event::Lost {
            column,
            leg,
            serial: connection.serial,
            why,
        });
    }

    fn held_epoch(&self) -> Epoch {
        self.hub.held_epoch()
    }

    fn end(&mut self, why: &SpaceError) {
        self.connections.iter_mut().for_each(|c| *c = None);
        self.hedges.clear();
        self.outstanding = 0;
        // Whoever goes on with the leg that follows may not have it.
        self.fail_held(why);
        if *why == SpaceError::Fenced {
            self.mailbox.post(Event::Fenced);
        }
    }

    fn count(&mut self, what: Count, by: u64) {
        self.hub.tally.add(what, by);
    }

    fn acknowledged(&mut self, column: usize) {
        self.hub.losses.acknowledged(column, self.generation);
    }

    fn flush_starts(&mut self, column: usize) -> u64 {
        self.hub.losses.flush_starts(column)
    }

    fn flushed(&mut self, column: usize, covers: u64) {
        self.hub.losses.flushed(column, covers);
    }

    fn must_tell_loss(&mut self, column: usize) -> bool {
        let told = &mut self.losses_told[column];
        self.hub.losses.must_tell(column, told)
    }
}

impl Ports {
    /// The legs that would have said that the one that follows does so no more are out
    /// of reach for too long.
    fn give_up_held(&mut self) {
        let why = "no copy is in reach, and whether the one that follows has it is not known; \
                   start a brick with an in-sync copy";
        self.fail_held(&SpaceError::Unavailable(why.into()));
    }

    fn fail_held(&mut self, error: &SpaceError) {
        let held = self.held.drain(..).map(|(_, completion)| Completion {
            result: Err(error.clone()),
            ..completion
        });
        self.completions.extend(held);
    }

    /// Does a change that several legs do in one call, if all of these do.
    fn change_at_once(
        &mut self,
        base: usize,
        legs: Mask,
        request: &SliceRequest,
    ) -> Option<Answers> {
        match request {
            SliceRequest::Write {
                offset,
                data,
                stamp,
            } => Some(MappedLeg::write_all(
                &mut self.mapped(base, legs)?,
                *offset,
                data,
                *stamp,
            )),
            SliceRequest::Transact { parts, stamp } => Some(MappedLeg::transact_all(
                &mut self.mapped(base, legs)?,
                parts,
                *stamp,
            )),
            _ => None,
        }
    }

    /// These legs, if all of them are mapped in this process.
    fn mapped(&mut self, base: usize, legs: Mask) -> Option<ArrayVec<&mut MappedLeg, COPIES_MAX>> {
        let places = self.connections[base..].iter_mut().take(COPIES_MAX);
        let wanted = places.enumerate().filter(|(leg, _)| legs.has(*leg));
        let mut found = ArrayVec::new();
        for (_, connection) in wanted {
            let any = connection.as_mut()?.leg.as_any()?;
            found.push(any.downcast_mut()?);
        }
        Some(found)
    }

    /// Reads do not say their epoch: they are of that of the connection, which
    /// rises with its changes alone. So each is told by a change of nothing;
    /// else a slice would take its own client for an older one.
    fn tell_epoch(&mut self, epoch: Epoch) {
        let behind = self.connections.iter_mut().flatten();
        for connection in behind.filter(|connection| connection.epoch < epoch) {
            connection.epoch = epoch;
            self.outstanding += 1;
            connection.change_nothing(epoch, 0);
        }
    }

    /// Every change of this channel is on all legs: they need not keep any of
    /// them in their in-flight tables when its sessions end.
    fn tell_complete(&mut self) {
        let op = self.hub.next_op();
        for connection in self.connections.iter_mut().flatten() {
            self.outstanding += 1;
            connection.change_nothing(connection.epoch, op);
        }
    }

    /// The time, by the clock of a column's legs that do not answer at once.
    fn now(&self, column: usize) -> Option<Instant> {
        let legs = self.connections[column * COPIES_MAX..].iter();
        let mut legs = legs.take(COPIES_MAX).flatten();
        legs.find_map(|connection| connection.leg.now())
    }

    fn holder(&self, key: u32) -> Holder {
        Holder {
            member: self.number,
            key,
        }
    }

    fn is_live(&self, view: &View, column: usize, leg: usize) -> bool {
        let wanted = view.columns[column].legs[leg].serial;
        self.connections
            .get(column * COPIES_MAX + leg)
            .and_then(Option::as_ref)
            .is_some_and(|connection| connection.serial == wanted)
    }
}

/// A channel without the duty to end well: the keeper takes it over when its
/// thread drops it with changes in flight.
pub(crate) struct Core {
    engine: Engine,
    ports: Ports,
    member: Arc<Member>,
    /// Connections that wait for the view they belong to.
    arrived: Vec<Link>,
    /// By place, with the serial of the connection that gave them.
    answers: Vec<(usize, u64, SliceCompletion)>,
    reaped: Vec<SliceCompletion>,
    ending: Ending,
}

/// What a channel that was dropped waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Changes,
    Flush,
    Answers,
}

impl Core {
    pub(crate) fn new(
        hub: Arc<Hub>,
        mailbox: Arc<Mailbox>,
        member: Arc<Member>,
        number: u32,
    ) -> Core {
        let newest = hub.view();
        let ports = Ports {
            hub,
            mailbox,
            number,
            connections: vec![],
            hedges: vec![],
            completions: vec![],
            turns: vec![],
            granted: vec![],
            outstanding: 0,
            generation: newest.0,
            losses_told: vec![],
            has_changed: false,
            must_wait: 0,
            held: VecDeque::new(),
        };
        let mut core = Core {
            engine: Engine::new(),
            ports,
            member,
            arrived: vec![],
            answers: vec![],
            reaped: vec![],
            ending: Ending::Changes,
        };
        core.adopt(newest);
        core
    }

    pub(crate) fn submit(&mut self, token: Token, request: Request) {
        self.engine.submit(token, request, &mut self.ports);
    }

    /// Whether the channel has its connections; see [`Channel::ready`].
    fn ready(&mut self) -> Result<bool, SpaceError> {
        // Adopts what the keeper told meanwhile; nothing was submitted yet.
        let mut completions = Vec::new();
        self.reap(&mut completions);
        debug_assert!(completions.is_empty(), "asked before the first request");
        match self.engine.why_ended() {
            Some(why) => Err(why.clone()),
            None => Ok(self.member.has_served()),
        }
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        loop {
            self.take_notes();
            self.collect_answers();
            if !self.ports.is_current() {
                let newest = self.ports.hub.view();
                self.adopt(newest);
                // What waited for the view was sent, and mapped legs have
                // done it already.
                continue;
            }
            if !self.answers.is_empty() || !self.ports.granted.is_empty() {
                self.deliver();
            } else if !self.release_held() {
                break;
            }
        }
        self.hedge();
        into.append(&mut self.ports.completions);
    }

    /// Brings what a dropped channel left to a good end, bit by bit; whether
    /// there is more to do. Changes reach all legs, what they buffer is
    /// flushed, and they are told that nothing is in flight any more.
    pub(crate) fn wind_up(&mut self) -> bool {
        if self.engine.is_changing() {
            return true;
        }
        if self.ending == Ending::Changes {
            self.ending = Ending::Flush;
            self.engine.flush_rest(&mut self.ports);
            if self.engine.is_changing() {
                return true;
            }
        }
        if self.ending == Ending::Flush {
            self.ending = Ending::Answers;
            if self.ports.has_changed && self.engine.is_complete() {
                self.ports.tell_complete();
            }
        }
        self.ports.outstanding > 0
    }

    pub(crate) fn number(&self) -> u32 {
        self.ports.number
    }

    pub(crate) fn wait_on(&self, into: &mut Vec<RawFd>) {
        into.push(self.member.wake.fd());
        for connection in self.busy() {
            connection.leg.wait_on(into);
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        if !self.ports.granted.is_empty() || !self.ports.completions.is_empty() {
            return Some(Instant::now());
        }
        let silent = self.busy().filter_map(|c| c.leg.deadline());
        let late = self.ports.hedges.iter().filter_map(Hedge::due);
        silent.chain(late).min()
    }

    /// Only those with something to come: an idle connection that ended would
    /// be readable for ever, and is found out by the next request.
    fn busy(&self) -> impl Iterator<Item = &Connection> {
        let connections = self.ports.connections.iter().flatten();
        connections.filter(|connection| connection.outstanding > 0)
    }

    fn take_notes(&mut self) {
        if self.member.wake.take() {
            self.heed();
        }
    }

    /// Does what the notes say.
    pub(crate) fn heed(&mut self) {
        for note in self.member.take_notes() {
            match note {
                Note::Granted(key) => self.ports.granted.push(key),
                Note::Link(link) => self.arrived.push(link),
                Note::End {
                    column,
                    leg,
                    serial,
                } => self.end(column, leg, serial),
                Note::TurnedAway(why) => {
                    self.arrived.clear();
                    self.engine.end(SpaceError::Busy(why), &mut self.ports);
                }
            }
        }
    }

    /// Ends a connection that the next view replaces. What was sent over it is
    /// sent again with that view.
    fn end(&mut self, column: usize, leg: usize, serial: u64) {
        let place = self.ports.connections.get(column * COPIES_MAX + leg);
        let present = place.and_then(Option::as_ref);
        if present.is_some_and(|connection| connection.serial == serial) {
            let why = "its connections are replaced".to_owned();
            let ports = &mut self.ports;
            self.engine.lose_leg(column, leg, why, ports);
        }
        self.arrived.retain(|link| link.serial != serial);
    }

    fn collect_answers(&mut self) {
        if self.ports.outstanding == 0 {
            return;
        }
        for (place, connection) in self.ports.connections.iter_mut().enumerate() {
            let Some(connection) = connection else {
                continue;
            };
            if connection.outstanding > 0 {
                connection.leg.reap(&mut self.reaped);
                connection.outstanding -= self.reaped.len() as u32;
                self.ports.outstanding -= self.reaped.len();
                let serial = connection.serial;
                let answers = self.reaped.drain(..).map(|answer| (place, serial, answer));
                self.answers.extend(answers);
            }
        }
    }

    fn deliver(&mut self) {
        let mut answers = std::mem::take(&mut self.answers);
        for (place, serial, answer) in answers.drain(..) {
            // What a connection said that has been replaced since is void.
            let current = self.ports.connections[place].as_ref();
            if current.is_none_or(|connection| connection.serial != serial) {
                continue;
            }
            let (column, leg) = (place / COPIES_MAX, place % COPIES_MAX);
            let hedge = &mut self.ports.hedges[column];
            if hedge.is_expecting()
                && let Some(now) = current.and_then(|connection| connection.leg.now())
            {
                hedge.answered(answer.tag, leg, now);
            }
            let ports = &mut self.ports;
            self.engine
                .answered(column, leg, answer.tag, answer.result, ports);
        }
        self.answers = answers;
        while let Some(key) = self.ports.granted.pop() {
            self.engine.granted(key, &mut self.ports);
        }
    }

    /// Takes the acknowledgements that need not wait for the leg that follows any
    /// more; false if there is nothing more to do about them now.
    fn release_held(&mut self) -> bool {
        let ports = &mut self.ports;
        let Some(&(least, _)) = ports.held.iter().min_by_key(|(number, _)| *number) else {
            return false;
        };
        if !ports.hub.ship.is_done(least) {
            let awaited = ports.hub.ship.await_done(least, ports.number, &self.member);
            if awaited == (Awaited::Later { wakes: true }) {
                ports.hub.wake_keeper();
            }
            return awaited == Awaited::Done;
        }
        let (done, rest) = std::mem::take(&mut ports.held)
            .into_iter()
            .partition(|(number, _)| ports.hub.ship.is_done(*number));
        // That the queue was closed shows with the next view, which may fence.
        if !ports.is_current() {
            ports.held = [done, rest].into_iter().flatten().collect();
            return true;
        }
        let done: VecDeque<(u64, Completion)> = done;
        ports.held = rest;
        let done = done.into_iter().map(|(_, completion)| completion);
        ports.completions.extend(done);
        !ports.held.is_empty()
    }

    /// Asks a second leg for what is late.
    fn hedge(&mut self) {
        for column in 0..self.ports.hedges.len() {
            if self.ports.hedges[column].due().is_none() {
                continue;
            }
            let Some(now) = self.ports.now(column) else {
                continue;
            };
            while let Some(tag) = self.ports.hedges[column].take_late(now) {
                self.engine.hedge(tag, &mut self.ports);
            }
        }
    }

    /// Goes by a view from now on, of this generation.
    fn adopt(&mut self, (generation, view): (u64, Arc<View>)) {
        // Its connections were told of before it was shown, but maybe after notes were
        // taken last: nobody would look at them again.
        if !defect::is(Defect::LinksComeLate) {
            self.take_notes();
        }
        self.ports.generation = generation;
        if view.fenced || self.engine.is_ended() {
            // Connections that arrive late are not for it any more.
            self.arrived.clear();
            return self.engine.fence(&mut self.ports);
        }
        let places = view.columns.len() * COPIES_MAX;
        if self.ports.connections.len() < places {
            self.ports.connections.resize_with(places, || None);
            let columns = view.columns.len();
            self.ports.hedges.resize_with(columns, Hedge::new);
            let told = &mut self.ports.losses_told;
            for column in told.len()..columns {
                told.push(self.ports.hub.losses.known(column));
            }
        }
        for (column, picture) in view.columns.iter().enumerate() {
            for (leg, wanted) in picture.legs.iter().enumerate() {
                self.connect(column, leg, wanted.serial);
            }
        }
        self.ports.tell_epoch(view.epoch);
        if view
            .columns
            .iter()
            .any(|column| column.gate == Gate::Failed)
        {
            self.ports.give_up_held();
        }
        let generation_links = |link: &Link| {
            let legs = &view.columns.get(link.column).map(|column| &column.legs);
            legs.and_then(|legs| legs.get(link.leg))
                .is_none_or(|leg| leg.serial < link.serial)
        };
        self.arrived.retain(generation_links);
        let Core { engine, ports, .. } = self;
        let live: Vec<bool> = (0..places)
            .map(|place| {
                let (column, leg) = (place / COPIES_MAX, place % COPIES_MAX);
                leg < view.columns[column].legs.len() && ports.is_live(&view, column, leg)
            })
            .collect();
        engine.adopt(&view, |column, leg| live[column * COPIES_MAX + leg], ports);
    }

    /// Ends a connection that the view does not have, and takes the one that
    /// it has, if that arrived.
    fn connect(&mut self, column: usize, leg: usize, serial: u64) {
        let place = &mut self.ports.connections[column * COPIES_MAX + leg];
        if place.as_ref().is_some_and(|have| have.serial == serial) {
            return;
        }
        if let Some(old) = place.take() {
            self.ports.outstanding -= old.outstanding as usize;
            self.ports.hedges[column].forget(leg);
        }
        let fits = |link: &Link| (link.column, link.leg, link.serial) == (column, leg, serial);
        if let Some(at) = self.arrived.iter().position(fits) {
            *place = Some(Connection {
                serial,
                leg: self.arrived.swap_remove(at).connection,
                outstanding: 0,
                epoch: Epoch(0),
            });
        }
    }
}

/// A channel as a front has it.
pub(crate) struct VolumeChannel {
    /// With its core, until this is dropped.
    member: Arc<Member>,
    mailbox: Arc<Mailbox>,
}

impl VolumeChannel {
    /// The lock is free but for moments: only the keeper takes it beside this channel's
    /// thread, to end connections.
    fn core(&self) -> MutexGuard<'_, Option<Box<Core>>> {
        steps::lock("core", &self.member.core);
        guard(&self.member.core)
    }
}

impl Channel for VolumeChannel {
    fn ready(&mut self) -> Result<bool, SpaceError> {
        match &mut *self.core() {
            Some(core) => core.ready(),
            None => Ok(true),
        }
    }

    fn submit(&mut self, token: Token, request: Request) {
        if let Some(core) = &mut *self.core() {
            core.submit(token, request);
        }
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        if let Some(core) = &mut *self.core() {
            core.reap(into);
        }
    }

    fn wait_on(&self, into: &mut Vec<RawFd>) {
        if let Some(core) = &*self.core() {
            core.wait_on(into);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.core().as_ref().and_then(|core| core.deadline())
    }
}

/// Opens a channel. The keeper connects it; requests wait until it has, or fail as
/// [`SpaceError::Busy`] if a brick has no session for it.
pub(crate) fn open(hub: &Arc<Hub>, mailbox: &Arc<Mailbox>) -> Result<VolumeChannel, SpaceError> {
    if hub.view().1.fenced {
        return Err(SpaceError::Fenced);
    }
    let member = Member::new()
        .map_err(|error| SpaceError::Unavailable(format!("no channel could be opened: {error}")))?;
    let member = Arc::new(member);
    let number = hub.join(&member).ok_or_else(|| {
        SpaceError::Busy(format!(
            "the volume has {CHANNELS_MAX} channels already; close some"
        ))
    })?;
    let core = Core::new(
        Arc::clone(hub),
        Arc::clone(mailbox),
        Arc::clone(&member),
        number,
    );
    *guard(&member.core) = Some(Box::new(core));
    mailbox.post(Event::Joined);
    Ok(VolumeChannel {
        member,
        mailbox: Arc::clone(mailbox),
    })
}

impl Drop for VolumeChannel {
    /// Changes under way must reach all legs: the keeper drives them to their
    /// end, and gives the range locks back.
    fn drop(&mut self) {
        let core = self.core().take();
        if let Some(core) = core {
            self.mailbox.post(Event::Abandoned(core));
        }
    }
}
