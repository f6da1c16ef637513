//! The channel of one thread into a volume: the engine, its connections, and the messages from
//! other members.
//!
//! The thread of a channel may not poll it for a long time. So the controller can also make the
//! channel process its messages, between two calls of the thread.
//!
//! Invariants:
//! - A channel never blocks, except in a mapped leg that waits for its owner to grant frames,
//!   within the store's limits.
//! - The channel reads the snapshot generation after an answer of a leg came, and only then
//!   uses the answer. So a leg that was left out meanwhile cannot serve an old page.

use crate::controller::{ControllerEvent, Mailbox};
use crate::engine::hedge::HedgeTracker;
use crate::engine::locks::{LockHolder, LockRange};
use crate::engine::{AckDependency, Engine, EngineBackend, LegAnswers};
use crate::legs::mapped::{DirectLeg, MappedLeg};
use crate::limits::CHANNELS_MAX;
use crate::replication::queue::DoneWait;
use crate::shared::{LegLink, Member, MemberMessage, VolumeShared};
use crate::snapshot::{Gate, LayoutSnapshot, LegSet};
use crate::status::Count;
use crate::steps;
use crate::wake::Wake;
use arrayvec::ArrayVec;
use bytes::Bytes;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::poison;
use pagemesh_base::slice::{Leg, SliceCompletion, SliceRequest, Stamp, TransactionPart};
use pagemesh_base::space::{Channel, Completion, Request, SpaceError, Token};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// The tag of messages without a piece: their answers are ignored.
const IDLE_TAG: u64 = u64::MAX;

struct Connection {
    serial: u64,
    leg: Box<dyn Leg>,
    outstanding: u32,
    /// The epoch that the slice knows for this connection.
    epoch: Epoch,
}

impl Connection {
    /// Sends the slice an epoch, and that every operation before this number is complete.
    fn send_empty_change(&mut self, epoch: Epoch, op: u64) {
        self.outstanding += 1;
        let stamp = Stamp {
            epoch,
            op,
            open_ops: 0,
        };
        let (offset, len) = (0, 0);
        let nothing = SliceRequest::Clear { offset, len, stamp };
        self.leg.submit(IDLE_TAG, nothing);
    }
}

/// The state that an engine acts on through [`EngineBackend`].
struct EngineIo {
    shared: Arc<VolumeShared>,
    mailbox: Arc<Mailbox>,
    member_number: u32,
    /// By column and leg.
    connections: Vec<Option<Connection>>,
    /// By column.
    hedges: Vec<HedgeTracker>,
    completions: Vec<Completion>,
    grants: Vec<LockHolder>,
    granted: Vec<u32>,
    /// Requests on all connections that have no answer yet.
    outstanding: usize,
    /// The generation of the engine's snapshot.
    snapshot_generation: u64,
    /// By column: the losses that flushes have reported.
    losses_reported: Vec<u64>,
    /// Whether the channel has made any change.
    has_changed: bool,
    /// The last number in the replication queue that acknowledgements must wait for.
    wait_for_number: u64,
    /// Acknowledgements that wait for the replica, with the numbers that they wait for.
    delayed: VecDeque<(u64, Completion)>,
}

impl EngineBackend for EngineIo {
    fn can_change_sync(&mut self, column: usize, legs: LegSet, offset: u64) -> bool {
        let Some(found) = self.mapped_legs(column * LEGS_MAX, legs) else {
            return false;
        };
        found.iter().for_each(|leg| leg.prefetch_write(offset));
        true
    }

    fn write_sync(
        &mut self,
        column: usize,
        legs: LegSet,
        offset: u64,
        data: &Bytes,
        stamp: Stamp,
    ) -> LegAnswers {
        match self.mapped_legs(column * LEGS_MAX, legs) {
            Some(mut found) => MappedLeg::write_all(&mut found, offset, data, stamp),
            None => unreachable!("can_change_sync returned true"),
        }
    }

    fn transact_sync(
        &mut self,
        column: usize,
        legs: LegSet,
        parts: &[TransactionPart],
        stamp: Stamp,
    ) -> LegAnswers {
        match self.mapped_legs(column * LEGS_MAX, legs) {
            Some(mut found) => MappedLeg::transact_all(&mut found, parts, stamp),
            None => unreachable!("can_change_sync returned true"),
        }
    }

    fn queue_answers(&mut self, column: usize, legs: LegSet, tag: u64, answers: LegAnswers) {
        let base = column * LEGS_MAX;
        if let Some(found) = self.mapped_legs(base, legs) {
            for (leg, answer) in found.into_iter().zip(answers) {
                leg.push_completion(tag, answer);
            }
        }
        for leg in legs.legs() {
            if let Some(connection) = self.connections[base + leg].as_mut() {
                connection.outstanding += 1;
                self.outstanding += 1;
            }
        }
    }

    fn is_snapshot_current(&self) -> bool {
        self.shared.generation() == self.snapshot_generation
    }

    fn try_acquire(&mut self, range: LockRange, key: u32) -> bool {
        self.shared.locks.try_acquire(range, self.holder(key))
    }

    fn try_acquire_all(&mut self, ranges: &[LockRange], key: u32) -> bool {
        self.shared.locks.try_acquire_all(ranges, self.holder(key))
    }

    fn send(&mut self, column: usize, legs: LegSet, tag: u64, request: SliceRequest) {
        let base = column * LEGS_MAX;
        if legs.len() > 1
            && let Some(answers) = self.change_sync(base, legs, &request)
        {
            return self.queue_answers(column, legs, tag, answers);
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
                self.hedges[column].record_sent(tag, leg, now);
            }
            connection.leg.submit(tag, own);
        }
    }

    fn acquire(&mut self, range: LockRange, key: u32) -> bool {
        self.shared.locks.acquire(range, self.holder(key))
    }

    fn acquire_all(&mut self, ranges: &[LockRange], key: u32) -> u32 {
        self.shared.locks.acquire_all(ranges, self.holder(key))
    }

    fn release(&mut self, range: LockRange, key: u32) {
        let holder = self.holder(key);
        self.shared.locks.release(range, holder, &mut self.grants);
        self.shared
            .deliver_grants(&mut self.grants, self.member_number, &mut self.granted);
    }

    fn is_range_idle(&mut self, range: LockRange, key: u32) -> bool {
        self.shared.locks.is_range_idle(range, self.holder(key))
    }

    fn record_indeterminate(&mut self, range: LockRange) {
        self.shared
            .indeterminate
            .record(range, self.snapshot_generation);
    }

    fn try_block_direct_clients(&mut self) -> bool {
        let Some(guests) = self.shared.direct_access.get() else {
            return true;
        };
        guests.segment.close();
        let is_quiet = guests.segment.is_idle();
        if !is_quiet {
            guests.segment.reopen();
        }
        is_quiet
    }

    fn unblock_direct_clients(&mut self) {
        if let Some(guests) = self.shared.direct_access.get() {
            guests.segment.reopen();
        }
    }

    fn is_indeterminate(&self, range: LockRange) -> bool {
        self.shared.indeterminate.contains(&range)
    }

    fn next_op(&mut self) -> u64 {
        self.has_changed = true;
        self.shared.next_op()
    }

    fn complete(&mut self, completion: Completion, after: AckDependency) {
        let number = match after {
            AckDependency::NoReplication => 0,
            AckDependency::BoundedLag => self.wait_for_number,
            AckDependency::FullReplication => self.shared.replication.last_number(),
        };
        match self.shared.replication.is_done(number) {
            true => self.completions.push(completion),
            false => self.delayed.push_back((number, completion)),
        }
    }

    fn replicate(&mut self, serial: u64, change: SliceRequest) {
        let Some(appended) = self.shared.replication.append(serial, change) else {
            return;
        };
        if appended.must_wait {
            self.wait_for_number = appended.number;
        }
        if appended.must_wake {
            self.shared.wake_controller();
        }
    }

    fn lose_connection(&mut self, column: usize, leg: usize, why: String) {
        let place = column * LEGS_MAX + leg;
        let Some(connection) = self.connections[place].take() else {
            return;
        };
        self.outstanding -= connection.outstanding as usize;
        self.hedges[column].reset_leg(leg);
        self.mailbox.post(ControllerEvent::LegLost {
            column,
            leg,
            serial: connection.serial,
            why,
        });
    }

    fn held_epoch(&self) -> Epoch {
        self.shared.held_epoch()
    }

    fn end_all(&mut self, why: &SpaceError) {
        self.connections.iter_mut().for_each(|c| *c = None);
        self.hedges.clear();
        self.outstanding = 0;
        // The next owner may promote the replica, and the replica may lack these changes.
        self.fail_delayed(why);
        if *why == SpaceError::Fenced {
            self.mailbox.post(ControllerEvent::Fenced);
        }
    }

    fn count(&mut self, what: Count, by: u64) {
        self.shared.counters.add(what, by);
    }

    fn record_acknowledged(&mut self, column: usize) {
        self.shared
            .lost_writes
            .record_acknowledged(column, self.snapshot_generation);
    }

    fn begin_flush(&mut self, column: usize) -> u64 {
        self.shared.lost_writes.begin_flush(column)
    }

    fn record_flushed(&mut self, column: usize, covers: u64) {
        self.shared.lost_writes.record_flushed(column, covers);
    }

    fn must_report_loss(&mut self, column: usize) -> bool {
        let told = &mut self.losses_reported[column];
        self.shared.lost_writes.must_report(column, told)
    }
}

impl EngineIo {
    /// Fails the delayed acknowledgements. The column has failed: no leg is in reach that could
    /// tell the manager that the replica is stale.
    fn fail_delayed_unreachable(&mut self) {
        let why = "no copy is in reach, and whether the asynchronous replica has it is not known; \
                   start a brick with an in-sync copy";
        self.fail_delayed(&SpaceError::Unavailable(why.into()));
    }

    fn fail_delayed(&mut self, error: &SpaceError) {
        let held = self.delayed.drain(..).map(|(_, completion)| Completion {
            result: Err(error.clone()),
            ..completion
        });
        self.completions.extend(held);
    }

    /// Makes a change on several legs in one call, if all of them are mapped.
    fn change_sync(
        &mut self,
        base: usize,
        legs: LegSet,
        request: &SliceRequest,
    ) -> Option<LegAnswers> {
        match request {
            SliceRequest::Write {
                offset,
                data,
                stamp,
            } => Some(MappedLeg::write_all(
                &mut self.mapped_legs(base, legs)?,
                *offset,
                data,
                *stamp,
            )),
            SliceRequest::Transact { parts, stamp } => Some(MappedLeg::transact_all(
                &mut self.mapped_legs(base, legs)?,
                parts,
                *stamp,
            )),
            _ => None,
        }
    }

    /// Returns these legs if all of them are mapped in this process.
    fn mapped_legs(
        &mut self,
        base: usize,
        legs: LegSet,
    ) -> Option<ArrayVec<&mut MappedLeg, LEGS_MAX>> {
        let places = self.connections[base..].iter_mut().take(LEGS_MAX);
        let wanted = places.enumerate().filter(|(leg, _)| legs.contains(*leg));
        let mut found = ArrayVec::new();
        for (_, connection) in wanted {
            let any = connection.as_mut()?.leg.as_any()?;
            found.push(any.downcast_mut()?);
        }
        Some(found)
    }

    /// Announces an epoch on every connection that has an older one. A read carries no epoch: a
    /// slice counts it as of the connection's epoch, which rises with changes only. Without
    /// this empty change, a slice would refuse its own client as an older one.
    fn send_epoch(&mut self, epoch: Epoch) {
        let behind = self.connections.iter_mut().flatten();
        for connection in behind.filter(|connection| connection.epoch < epoch) {
            connection.epoch = epoch;
            self.outstanding += 1;
            connection.send_empty_change(epoch, 0);
        }
    }

    /// Tells every leg that each change of this channel is complete. The legs then need not
    /// keep any of them in their in-flight tables when the sessions end.
    fn send_complete(&mut self) {
        let op = self.shared.next_op();
        for connection in self.connections.iter_mut().flatten() {
            self.outstanding += 1;
            connection.send_empty_change(connection.epoch, op);
        }
    }

    /// The time by the clock of a column's legs; none if all of them answer at once.
    fn now(&self, column: usize) -> Option<Instant> {
        let legs = self.connections[column * LEGS_MAX..].iter();
        let mut legs = legs.take(LEGS_MAX).flatten();
        legs.find_map(|connection| connection.leg.now())
    }

    fn holder(&self, key: u32) -> LockHolder {
        LockHolder {
            member: self.member_number,
            key,
        }
    }

    fn is_live(&self, view: &LayoutSnapshot, column: usize, leg: usize) -> bool {
        let wanted = view.columns[column].legs[leg].serial;
        self.connections
            .get(column * LEGS_MAX + leg)
            .and_then(Option::as_ref)
            .is_some_and(|connection| connection.serial == wanted)
    }
}

/// A channel without its drop handler. The controller takes it over when the thread drops the
/// channel with changes in flight.
pub(crate) struct ChannelCore {
    engine: Engine,
    io: EngineIo,
    member: Arc<Member>,
    /// The member's wake-up, which each call looks at.
    wake: Arc<Wake>,
    /// Connections that wait for their snapshot.
    unused_links: Vec<LegLink>,
    /// By connection index, with the serial of the connection that gave the answer.
    answers_by_leg: Vec<(usize, u64, SliceCompletion)>,
    reaped: Vec<SliceCompletion>,
    close_phase: ClosePhase,
}

/// The step that a dropped channel waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClosePhase {
    FinishChanges,
    Flush,
    AwaitAnswers,
}

impl ChannelCore {
    pub(crate) fn new(
        hub: Arc<VolumeShared>,
        mailbox: Arc<Mailbox>,
        member: Arc<Member>,
        number: u32,
    ) -> ChannelCore {
        let newest = hub.snapshot();
        let ports = EngineIo {
            shared: hub,
            mailbox,
            member_number: number,
            connections: vec![],
            hedges: vec![],
            completions: vec![],
            grants: vec![],
            granted: vec![],
            outstanding: 0,
            snapshot_generation: newest.0,
            losses_reported: vec![],
            has_changed: false,
            wait_for_number: 0,
            delayed: VecDeque::new(),
        };
        let mut core = ChannelCore {
            engine: Engine::new(),
            io: ports,
            wake: Arc::clone(&member.wake),
            member,
            unused_links: vec![],
            answers_by_leg: vec![],
            reaped: vec![],
            close_phase: ClosePhase::FinishChanges,
        };
        core.adopt(newest);
        core
    }

    pub(crate) fn submit(&mut self, token: Token, request: Request) {
        self.engine.submit(token, request, &mut self.io);
    }

    /// Whether the channel has its connections; see [`Channel::ready`].
    fn ready(&mut self) -> Result<bool, SpaceError> {
        // Adopts the messages of the controller; nothing was submitted yet.
        let mut completions = Vec::new();
        self.reap(&mut completions);
        debug_assert!(completions.is_empty(), "asked before the first request");
        match self.engine.end_cause() {
            Some(why) => Err(why.clone()),
            None => Ok(self.member.has_served()),
        }
    }

    pub(crate) fn reap(&mut self, into: &mut Vec<Completion>) {
        loop {
            self.take_messages();
            self.collect_answers();
            if !self.io.is_snapshot_current() {
                let newest = self.io.shared.snapshot();
                self.adopt(newest);
                // The adoption sent the pieces that waited for the snapshot, and mapped legs
                // have answered already.
                continue;
            }
            if !self.answers_by_leg.is_empty() || !self.io.granted.is_empty() {
                self.deliver_answers();
            } else if !self.release_delayed() {
                break;
            }
        }
        self.hedge_late_reads();
        into.append(&mut self.io.completions);
    }

    /// Completes the work of a dropped channel step by step; false once nothing is left to do.
    /// First all changes reach all legs, then the legs flush. Last, the legs hear that nothing
    /// is in flight any more.
    pub(crate) fn drain(&mut self) -> bool {
        if self.engine.has_changes() {
            return true;
        }
        if self.close_phase == ClosePhase::FinishChanges {
            self.close_phase = ClosePhase::Flush;
            self.engine.flush_unflushed(&mut self.io);
            if self.engine.has_changes() {
                return true;
            }
        }
        if self.close_phase == ClosePhase::Flush {
            self.close_phase = ClosePhase::AwaitAnswers;
            if self.io.has_changed && self.engine.has_no_incomplete_ops() {
                self.io.send_complete();
            }
        }
        self.io.outstanding > 0
    }

    pub(crate) fn number(&self) -> u32 {
        self.io.member_number
    }

    pub(crate) fn wait_on(&self, into: &mut Vec<RawFd>) {
        into.push(self.wake.fd());
        for connection in self.busy_connections() {
            connection.leg.poll_fds(into);
        }
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        if !self.io.granted.is_empty() || !self.io.completions.is_empty() {
            return Some(Instant::now());
        }
        let silent = self.busy_connections().filter_map(|c| c.leg.deadline());
        let late = self
            .io
            .hedges
            .iter()
            .filter_map(HedgeTracker::next_hedge_at);
        silent.chain(late).min()
    }

    /// The connections that owe an answer. An idle connection that ended would be readable for
    /// ever; the next request notices its end.
    fn busy_connections(&self) -> impl Iterator<Item = &Connection> {
        let connections = self.io.connections.iter().flatten();
        connections.filter(|connection| connection.outstanding > 0)
    }

    fn take_messages(&mut self) {
        if self.wake.take() {
            self.process_messages();
        }
    }

    /// Processes the messages of the controller and of other channels.
    pub(crate) fn process_messages(&mut self) {
        for note in self.member.take_messages() {
            match note {
                MemberMessage::LockGranted(key) => self.io.granted.push(key),
                MemberMessage::NewLink(link) => self.unused_links.push(link),
                MemberMessage::EndLink {
                    column,
                    leg,
                    serial,
                } => self.end_link(column, leg, serial),
                MemberMessage::Rejected(why) => {
                    self.unused_links.clear();
                    self.engine.end(SpaceError::Busy(why), &mut self.io);
                }
            }
        }
    }

    /// Ends a connection that the next snapshot replaces. The engine sends its requests again
    /// with that snapshot.
    fn end_link(&mut self, column: usize, leg: usize, serial: u64) {
        let place = self.io.connections.get(column * LEGS_MAX + leg);
        let present = place.and_then(Option::as_ref);
        if present.is_some_and(|connection| connection.serial == serial) {
            let why = "its connections are replaced".to_owned();
            let ports = &mut self.io;
            self.engine.lose_leg(column, leg, why, ports);
        }
        self.unused_links.retain(|link| link.serial != serial);
    }

    fn collect_answers(&mut self) {
        if self.io.outstanding == 0 {
            return;
        }
        for (place, connection) in self.io.connections.iter_mut().enumerate() {
            let Some(connection) = connection else {
                continue;
            };
            if connection.outstanding > 0 {
                connection.leg.reap(&mut self.reaped);
                connection.outstanding -= self.reaped.len() as u32;
                self.io.outstanding -= self.reaped.len();
                let serial = connection.serial;
                let answers = self.reaped.drain(..).map(|answer| (place, serial, answer));
                self.answers_by_leg.extend(answers);
            }
        }
    }

    fn deliver_answers(&mut self) {
        let mut answers = std::mem::take(&mut self.answers_by_leg);
        for (place, serial, answer) in answers.drain(..) {
            // An answer of a replaced connection is void.
            let current = self.io.connections[place].as_ref();
            if current.is_none_or(|connection| connection.serial != serial) {
                continue;
            }
            let (column, leg) = (place / LEGS_MAX, place % LEGS_MAX);
            let hedge = &mut self.io.hedges[column];
            if hedge.has_pending()
                && let Some(now) = current.and_then(|connection| connection.leg.now())
            {
                hedge.record_answer(answer.tag, leg, now);
            }
            let ports = &mut self.io;
            self.engine
                .handle_answer(column, leg, answer.tag, answer.result, ports);
        }
        self.answers_by_leg = answers;
        while let Some(key) = self.io.granted.pop() {
            self.engine.handle_grant(key, &mut self.io);
        }
    }

    /// Completes the delayed acknowledgements that the replica has confirmed; false if there is
    /// nothing more to do now.
    fn release_delayed(&mut self) -> bool {
        let ports = &mut self.io;
        let Some(&(least, _)) = ports.delayed.iter().min_by_key(|(number, _)| *number) else {
            return false;
        };
        if !ports.shared.replication.is_done(least) {
            let awaited =
                ports
                    .shared
                    .replication
                    .wait_for_done(least, ports.member_number, &self.wake);
            if awaited == (DoneWait::Registered { must_wake: true }) {
                ports.shared.wake_controller();
            }
            return awaited == DoneWait::Done;
        }
        let (done, rest) = std::mem::take(&mut ports.delayed)
            .into_iter()
            .partition(|(number, _)| ports.shared.replication.is_done(*number));
        // A closed queue becomes visible with the next snapshot, and that snapshot may fence.
        if !ports.is_snapshot_current() {
            ports.delayed = [done, rest].into_iter().flatten().collect();
            return true;
        }
        let done: VecDeque<(u64, Completion)> = done;
        ports.delayed = rest;
        let done = done.into_iter().map(|(_, completion)| completion);
        ports.completions.extend(done);
        !ports.delayed.is_empty()
    }

    /// Sends late reads to a second leg.
    fn hedge_late_reads(&mut self) {
        for column in 0..self.io.hedges.len() {
            if self.io.hedges[column].next_hedge_at().is_none() {
                continue;
            }
            let Some(now) = self.io.now(column) else {
                continue;
            };
            while let Some(tag) = self.io.hedges[column].take_late(now) {
                self.engine.hedge(tag, &mut self.io);
            }
        }
    }

    /// Adopts a snapshot of this generation.
    fn adopt(&mut self, (generation, view): (u64, Arc<LayoutSnapshot>)) {
        // The controller sends the snapshot's connections before it publishes the snapshot, but
        // maybe after the last look at the messages. Without this, the connections would stay
        // unused.
        if !defect::is(Defect::NewConnectionsMissed) {
            self.take_messages();
        }
        self.io.snapshot_generation = generation;
        if view.fenced || self.engine.is_ended() {
            // This channel no longer uses connections that arrive late.
            self.unused_links.clear();
            return self.engine.fence(&mut self.io);
        }
        let places = view.columns.len() * LEGS_MAX;
        if self.io.connections.len() < places {
            self.io.connections.resize_with(places, || None);
            let columns = view.columns.len();
            self.io.hedges.resize_with(columns, HedgeTracker::new);
            let told = &mut self.io.losses_reported;
            for column in told.len()..columns {
                told.push(self.io.shared.lost_writes.count_of(column));
            }
        }
        for (column, picture) in view.columns.iter().enumerate() {
            for (leg, wanted) in picture.legs.iter().enumerate() {
                self.replace_connection(column, leg, wanted.serial);
            }
        }
        self.io.send_epoch(view.epoch);
        if view
            .columns
            .iter()
            .any(|column| column.gate == Gate::Failed)
        {
            self.io.fail_delayed_unreachable();
        }
        let generation_links = |link: &LegLink| {
            let legs = &view.columns.get(link.column).map(|column| &column.legs);
            legs.and_then(|legs| legs.get(link.leg))
                .is_none_or(|leg| leg.serial < link.serial)
        };
        self.unused_links.retain(generation_links);
        let ChannelCore {
            engine, io: ports, ..
        } = self;
        let live: Vec<bool> = (0..places)
            .map(|place| {
                let (column, leg) = (place / LEGS_MAX, place % LEGS_MAX);
                leg < view.columns[column].legs.len() && ports.is_live(&view, column, leg)
            })
            .collect();
        engine.adopt(&view, |column, leg| live[column * LEGS_MAX + leg], ports);
    }

    /// Ends a connection that the snapshot does not have, and installs the one that it has, if
    /// that has arrived.
    fn replace_connection(&mut self, column: usize, leg: usize, serial: u64) {
        let place = &mut self.io.connections[column * LEGS_MAX + leg];
        if place.as_ref().is_some_and(|have| have.serial == serial) {
            return;
        }
        if let Some(old) = place.take() {
            self.io.outstanding -= old.outstanding as usize;
            self.io.hedges[column].reset_leg(leg);
        }
        let fits = |link: &LegLink| (link.column, link.leg, link.serial) == (column, leg, serial);
        if let Some(at) = self.unused_links.iter().position(fits) {
            *place = Some(Connection {
                serial,
                leg: self.unused_links.swap_remove(at).connection,
                outstanding: 0,
                epoch: Epoch(0),
            });
        }
    }
}

/// A channel as its user has it.
pub(crate) struct VolumeChannel {
    /// Holds the channel core until this is dropped.
    member: Arc<Member>,
    mailbox: Arc<Mailbox>,
}

impl VolumeChannel {
    /// The lock is almost always free. Besides this channel's thread only the controller takes
    /// it, to end connections.
    fn core(&self) -> MutexGuard<'_, Option<Box<ChannelCore>>> {
        steps::lock("core", &self.member.core);
        poison::lock(&self.member.core)
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

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        if let Some(core) = &*self.core() {
            core.wait_on(into);
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.core().as_ref().and_then(|core| core.deadline())
    }
}

/// Opens a channel. The controller connects it, and requests wait until then. They fail with
/// [`SpaceError::Busy`] if a brick has no session for the channel.
pub(crate) fn open(
    hub: &Arc<VolumeShared>,
    mailbox: &Arc<Mailbox>,
) -> Result<VolumeChannel, SpaceError> {
    if hub.snapshot().1.fenced {
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
    let core = ChannelCore::new(
        Arc::clone(hub),
        Arc::clone(mailbox),
        Arc::clone(&member),
        number,
    );
    *poison::lock(&member.core) = Some(Box::new(core));
    mailbox.post(ControllerEvent::ChannelOpened);
    Ok(VolumeChannel {
        member,
        mailbox: Arc::clone(mailbox),
    })
}

impl Drop for VolumeChannel {
    /// Changes in flight must reach all legs. The controller completes them, and releases the
    /// range locks.
    fn drop(&mut self) {
        let core = self.core().take();
        if let Some(core) = core {
            self.mailbox.post(ControllerEvent::ChannelDropped(core));
        }
    }
}
