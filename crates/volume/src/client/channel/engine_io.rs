//! The environment of a channel's engine: connections, range locks, and the state that all
//! channels share.
//!
//! Invariants: `outstanding` is the sum over all connections; a connection that is dropped takes
//! its part with it.

use crate::controller::{ControllerEvent, Mailbox};
use crate::engine::hedge::HedgeTracker;
use crate::engine::locks::{LockHolder, LockRange};
use crate::engine::timing::{OpRecord, OpTimes, STORE_ONLY};
use crate::engine::{AckDependency, EngineBackend, LegAnswers};
use crate::legs::mapped::MappedLeg;
use crate::shared::VolumeShared;
use crate::snapshot::{LayoutSnapshot, LegSet};
use crate::status::Count;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::slice::{IS_MEASURED, Leg, ServiceTime, SliceError, SliceRequest, Stamp};
use pagemesh_base::space::{Completion, SpaceError};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_telemetry::{OpenMeter, Sampler};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// The tag of messages without a piece: their answers are ignored.
const IDLE_TAG: u64 = u64::MAX;

pub(super) struct Connection {
    pub serial: u64,
    pub leg: Box<dyn Leg>,
    pub outstanding: u32,
    /// The epoch that the slice knows for this connection.
    pub epoch: Epoch,
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
pub(super) struct EngineIo {
    pub shared: Arc<VolumeShared>,
    pub mailbox: Arc<Mailbox>,
    pub member_number: u32,
    /// By column and leg.
    pub connections: Vec<Option<Connection>>,
    /// By column.
    pub hedges: Vec<HedgeTracker>,
    pub completions: Vec<Completion>,
    pub grants: Vec<LockHolder>,
    pub granted: Vec<u32>,
    /// Requests on all connections that have no answer yet.
    pub outstanding: usize,
    /// The generation of the engine's snapshot.
    pub snapshot_generation: u64,
    /// By column: the losses that flushes have reported.
    pub losses_reported: Vec<u64>,
    /// Whether the channel has made any change.
    pub has_changed: bool,
    /// The last number in the replication queue that acknowledgements must wait for.
    pub wait_for_number: u64,
    /// Acknowledgements that wait for the replica.
    pub delayed: VecDeque<DelayedAck>,
    pub meter: OpenMeter,
    pub sampler: Sampler,
    /// Whether a leg answers after its call, so that each request is timed. A clock costs too much
    /// beside a request that all legs answer inside the call: of these the sampler chooses some.
    pub has_clock: bool,
    /// The time of this step of a call, once it was read.
    pub step_time: Option<Instant>,
    /// The hint of the present messages.
    pub hint: TierHint,
}

/// An acknowledgement that waits for the replica.
pub(super) struct DelayedAck {
    /// The number in the replication queue that it waits for.
    pub after: u64,
    pub completion: Completion,
    pub record: Option<OpRecord>,
}

impl EngineBackend for EngineIo {
    fn set_hint(&mut self, hint: TierHint) {
        self.hint = hint;
    }

    fn is_snapshot_current(&self) -> bool {
        self.shared.generation() == self.snapshot_generation
    }

    fn send(&mut self, column: usize, legs: LegSet, tag: u64, request: SliceRequest) {
        let base = column * LEGS_MAX;
        if legs.len() > 1
            && let Some(answers) = self.change_sync(base, legs, &request)
        {
            return self.queue_answers(column, legs, tag, answers, Some(&request));
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
            connection.leg.submit_hinted(tag, own, self.hint);
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
        let Some(access) = self.shared.direct_access.get() else {
            return true;
        };
        access.segment.close();
        let is_idle = access.segment.is_idle();
        if !is_idle {
            access.segment.reopen();
        }
        is_idle
    }

    fn unblock_direct_clients(&mut self) {
        if let Some(access) = self.shared.direct_access.get() {
            access.segment.reopen();
        }
    }

    fn is_indeterminate(&self, range: LockRange) -> bool {
        self.shared.indeterminate.contains(&range)
    }

    fn next_op(&mut self) -> u64 {
        self.has_changed = true;
        self.shared.next_op()
    }

    fn stamp_epoch(&self, layout: Epoch) -> Option<Epoch> {
        self.shared.stamp_epoch(layout)
    }

    fn complete(&mut self, completion: Completion, after: AckDependency, record: Option<OpRecord>) {
        let number = match after {
            AckDependency::NoReplication => 0,
            AckDependency::BoundedLag => self.wait_for_number,
            AckDependency::FullReplication => self.shared.replication.last_number(),
        };
        if self.shared.replication.is_done(number) {
            self.finish(completion, record);
        } else {
            self.delayed.push_back(DelayedAck {
                after: number,
                completion,
                record,
            });
        }
    }

    fn now(&mut self) -> Instant {
        if let Some(now) = self.step_time {
            return now;
        }
        let clocks = self.connections.iter().flatten();
        let clock = clocks.filter_map(|connection| connection.leg.now()).next();
        *self.step_time.insert(clock.unwrap_or_else(Instant::now))
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
        let reported = &mut self.losses_reported[column];
        self.shared.lost_writes.must_report(column, reported)
    }
}

impl EngineIo {
    /// The environment of the member of this number, without connections.
    pub(super) fn new(
        shared: Arc<VolumeShared>,
        mailbox: Arc<Mailbox>,
        member_number: u32,
        snapshot_generation: u64,
    ) -> EngineIo {
        EngineIo {
            meter: shared.meters.open(),
            shared,
            mailbox,
            member_number,
            connections: vec![],
            hedges: vec![],
            completions: vec![],
            grants: vec![],
            granted: vec![],
            outstanding: 0,
            snapshot_generation,
            losses_reported: vec![],
            has_changed: false,
            wait_for_number: 0,
            delayed: VecDeque::new(),
            sampler: Sampler::default(),
            has_clock: false,
            step_time: None,
            hint: TierHint::None,
        }
    }

    /// Whether any leg has a clock: one that answers after its call.
    pub(super) fn detect_clock(&mut self) {
        let mut connections = self.connections.iter().flatten();
        self.has_clock = connections.any(|connection| connection.leg.now().is_some());
    }

    /// The times of a request that is submitted now, if it is to be timed.
    pub(super) fn start_times(&mut self) -> Option<OpTimes> {
        let is_timed = self.has_clock && IS_MEASURED || self.sampler.is_due();
        is_timed.then(|| OpTimes::new(self.fresh_now()))
    }

    /// The time that a leg spent on an answer. A leg in this process spends all of it in the store.
    pub(super) fn service_time(&self, place: usize, reported: ServiceTime) -> ServiceTime {
        let leg = self.connections[place].as_ref();
        if leg.is_some_and(|connection| connection.leg.now().is_some()) {
            return reported;
        }
        STORE_ONLY
    }

    /// The time now, not that of the step's beginning.
    pub(super) fn fresh_now(&mut self) -> Instant {
        self.step_time = None;
        self.now()
    }

    /// Hands out a completion, and counts its request. A request that failed counts as such only.
    pub(super) fn finish(&mut self, completion: Completion, record: Option<OpRecord>) {
        let has_failed = completion.result.is_err();
        self.completions.push(completion);
        if has_failed {
            return self.shared.counters.add(Count::RequestsFailed, 1);
        }
        let Some(OpRecord { kind, bytes, times }) = record else {
            return;
        };
        self.meter.count(kind, bytes);
        if let Some(times) = times
            && let Some(stages) = times.stages(self.now())
        {
            self.meter.record(kind, &stages);
        }
    }

    /// Fails the delayed acknowledgements. The column has failed: no leg is in reach that could
    /// tell the manager that the replica is stale.
    pub(super) fn fail_delayed_unreachable(&mut self) {
        let why = "no copy is in reach, and whether the asynchronous replica has it is not known; \
                   start a brick with an in-sync copy";
        self.fail_delayed(&SpaceError::Unavailable(why.into()));
    }

    fn fail_delayed(&mut self, error: &SpaceError) {
        let failed = self.delayed.len() as u64;
        self.shared.counters.add(Count::RequestsFailed, failed);
        let held = self.delayed.drain(..).map(|delayed| Completion {
            result: Err(error.clone()),
            ..delayed.completion
        });
        self.completions.extend(held);
    }

    /// Queues these answers of mapped legs as answers to a message with this tag.
    ///
    /// A leg that found a page on a disk sends the request to its brick.
    pub(super) fn queue_answers(
        &mut self,
        column: usize,
        legs: LegSet,
        tag: u64,
        answers: LegAnswers,
        request: Option<&SliceRequest>,
    ) {
        let base = column * LEGS_MAX;
        if let Some(found) = self.mapped_legs(base, legs) {
            for (leg, answer) in found.into_iter().zip(answers) {
                match (answer, request) {
                    (Err(SliceError::OnFlash), Some(request)) => {
                        leg.ask_owner(tag, request.clone());
                    }
                    (answer, _) => leg.push_completion(tag, answer),
                }
            }
        }
        for leg in legs.legs() {
            if let Some(connection) = self.connections[base + leg].as_mut() {
                connection.outstanding += 1;
                self.outstanding += 1;
            }
        }
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

    /// Announces an epoch on every connection that has an older one. A read carries no epoch: a
    /// slice counts it as of the connection's epoch, which rises with changes only. Without
    /// this empty change, a slice would refuse its own client as an older one.
    pub(super) fn send_epoch(&mut self, epoch: Epoch) {
        let behind = self.connections.iter_mut().flatten();
        for connection in behind.filter(|connection| connection.epoch < epoch) {
            connection.epoch = epoch;
            self.outstanding += 1;
            connection.send_empty_change(epoch, 0);
        }
    }

    /// Tells every leg that each change of this channel is complete. The legs then need not
    /// keep any of them in their in-flight tables when the sessions end.
    pub(super) fn send_complete(&mut self) {
        let op = self.shared.next_op();
        for connection in self.connections.iter_mut().flatten() {
            self.outstanding += 1;
            connection.send_empty_change(connection.epoch, op);
        }
    }

    /// The time by the clock of a column's legs; none if all of them answer at once.
    pub(super) fn now(&self, column: usize) -> Option<Instant> {
        let legs = self.connections[column * LEGS_MAX..].iter();
        let mut legs = legs.take(LEGS_MAX).flatten();
        legs.find_map(|connection| connection.leg.now())
    }

    pub(super) fn holder(&self, key: u32) -> LockHolder {
        LockHolder {
            member: self.member_number,
            key,
        }
    }

    pub(super) fn is_live(&self, snapshot: &LayoutSnapshot, column: usize, leg: usize) -> bool {
        let wanted = snapshot.columns[column].legs[leg].serial;
        self.connections
            .get(column * LEGS_MAX + leg)
            .and_then(Option::as_ref)
            .is_some_and(|connection| connection.serial == wanted)
    }
}
