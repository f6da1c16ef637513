//! The work of a channel besides its calls: answers of legs, messages from other members, and the
//! connections of each snapshot.
//!
//! Invariants:
//! - The channel reads the snapshot generation after an answer of a leg came, and only then
//!   uses the answer. So a leg that was left out meanwhile cannot serve an old page.
//! - The answers of a connection that was replaced are never used.

use super::ChannelCore;
use super::engine_io::{Connection, DelayedAck, EngineIo};
use crate::controller::Mailbox;
use crate::engine::hedge::HedgeTracker;
use crate::engine::{Engine, EngineBackend};
use crate::replication::queue::DoneWait;
use crate::shared::{LegLink, Member, MemberMessage, VolumeShared};
use crate::snapshot::{ColumnGate, LayoutSnapshot};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::space::SpaceError;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

/// The step that a dropped channel waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClosePhase {
    FinishChanges,
    Flush,
    AwaitAnswers,
}

impl ChannelCore {
    pub fn new(
        shared: Arc<VolumeShared>,
        mailbox: Arc<Mailbox>,
        member: Arc<Member>,
        number: u32,
    ) -> ChannelCore {
        let newest = shared.snapshot();
        let io = EngineIo::new(shared, mailbox, number, newest.0);
        let mut core = ChannelCore {
            engine: Engine::new(),
            io,
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

    /// Whether the channel has its connections; see [`Channel::ready`](pagemesh_base::space::Channel::ready).
    pub(super) fn ready(&mut self) -> Result<bool, SpaceError> {
        // Adopts the messages of the controller; nothing was submitted yet.
        let mut completions = Vec::new();
        self.reap(&mut completions);
        debug_assert!(completions.is_empty(), "asked before the first request");
        match self.engine.end_cause() {
            Some(why) => Err(why.clone()),
            None => Ok(self.member.has_served()),
        }
    }

    /// Completes the work of a dropped channel step by step; false once nothing is left to do.
    /// First all changes reach all legs, then the legs flush. Last, the legs hear that nothing
    /// is in flight any more.
    pub fn drain(&mut self) -> bool {
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

    /// See [`Engine::has_changes_before`].
    pub fn has_changes_before(&self, epoch: Epoch) -> bool {
        self.engine.has_changes_before(epoch)
    }

    /// See [`Engine::has_changes_of_other_layout`].
    pub fn has_changes_of_other_layout(&self, layout: Epoch) -> bool {
        self.engine.has_changes_of_other_layout(layout)
    }

    pub fn number(&self) -> u32 {
        self.io.member_number
    }

    pub fn wait_on(&self, into: &mut Vec<RawFd>) {
        into.push(self.wake.fd());
        for connection in self.busy_connections() {
            connection.leg.poll_fds(into);
        }
    }

    pub fn deadline(&self) -> Option<Instant> {
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

    pub(super) fn take_messages(&mut self) {
        if self.wake.take() {
            self.process_messages();
        }
    }

    /// Processes the messages of the controller and of other channels.
    pub fn process_messages(&mut self) {
        for message in self.member.take_messages() {
            match message {
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
            self.engine.lose_leg(column, leg, why, &mut self.io);
        }
        self.unused_links.retain(|link| link.serial != serial);
    }

    pub(super) fn collect_answers(&mut self) {
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

    pub(super) fn deliver_answers(&mut self) {
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
            let service = self.io.service_time(place, answer.service);
            self.engine.handle_answer(
                column,
                leg,
                answer.tag,
                answer.result,
                service,
                &mut self.io,
            );
        }
        self.answers_by_leg = answers;
        while let Some(key) = self.io.granted.pop() {
            self.engine.handle_grant(key, &mut self.io);
        }
    }

    /// Completes the delayed acknowledgements that the replica has confirmed; false if there is
    /// nothing more to do now.
    pub(super) fn release_delayed(&mut self) -> bool {
        let io = &mut self.io;
        let Some(least) = io.delayed.iter().map(|delayed| delayed.after).min() else {
            return false;
        };
        if !io.shared.replication.is_done(least) {
            let awaited = io
                .shared
                .replication
                .wait_for_done(least, io.member_number, &self.wake);
            if awaited == (DoneWait::Registered { must_wake: true }) {
                io.shared.wake_controller();
            }
            return awaited == DoneWait::Done;
        }
        let (done, rest) = std::mem::take(&mut io.delayed)
            .into_iter()
            .partition(|delayed| io.shared.replication.is_done(delayed.after));
        // A closed queue becomes visible with the next snapshot, and that snapshot may fence.
        if !io.is_snapshot_current() {
            io.delayed = [done, rest].into_iter().flatten().collect();
            return true;
        }
        let done: VecDeque<DelayedAck> = done;
        io.delayed = rest;
        for ack in done {
            io.finish(ack.completion, ack.record);
        }
        !io.delayed.is_empty()
    }

    /// Sends late reads to a second leg.
    pub(super) fn hedge_late_reads(&mut self) {
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
    pub(super) fn adopt(&mut self, (generation, snapshot): (u64, Arc<LayoutSnapshot>)) {
        // The controller sends the snapshot's connections before it publishes the snapshot, but
        // maybe after the last look at the messages. Without this, the connections would stay
        // unused.
        if !defect::is(Defect::NewConnectionsMissed) {
            self.take_messages();
        }
        self.io.snapshot_generation = generation;
        if snapshot.fenced || self.engine.is_ended() {
            // This channel no longer uses connections that arrive late.
            self.unused_links.clear();
            return self.engine.fence(&mut self.io);
        }
        let places = snapshot.columns.len() * LEGS_MAX;
        if self.io.connections.len() < places {
            self.io.connections.resize_with(places, || None);
            let columns = snapshot.columns.len();
            self.io.hedges.resize_with(columns, HedgeTracker::new);
            let reported = &mut self.io.losses_reported;
            for column in reported.len()..columns {
                reported.push(self.io.shared.lost_writes.count_of(column));
            }
        }
        for (column, wanted) in snapshot.columns.iter().enumerate() {
            for (leg, wanted) in wanted.legs.iter().enumerate() {
                self.replace_connection(column, leg, wanted.serial);
            }
        }
        self.io.detect_clock();
        self.io.send_epoch(snapshot.epoch);
        if snapshot
            .columns
            .iter()
            .any(|column| column.gate == ColumnGate::Failed)
        {
            self.io.fail_delayed_unreachable();
        }
        let generation_links = |link: &LegLink| {
            let legs = &snapshot.columns.get(link.column).map(|column| &column.legs);
            legs.and_then(|legs| legs.get(link.leg))
                .is_none_or(|leg| leg.serial < link.serial)
        };
        self.unused_links.retain(generation_links);
        let ChannelCore { engine, io, .. } = self;
        let live: Vec<bool> = (0..places)
            .map(|place| {
                let (column, leg) = (place / LEGS_MAX, place % LEGS_MAX);
                leg < snapshot.columns[column].legs.len() && io.is_live(&snapshot, column, leg)
            })
            .collect();
        engine.adopt(&snapshot, |column, leg| live[column * LEGS_MAX + leg], io);
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
