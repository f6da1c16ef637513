//! The channel of one thread into a volume: its calls, and the way of a change that all legs make
//! inside the call.
//!
//! The thread of a channel may not poll it for a long time. So the controller can also make the
//! channel process its messages, between two calls of the thread.
//!
//! Invariants: a channel never blocks, except in a mapped leg that waits for its owner to grant
//! frames, within the store's limits.
//!
//! # One write
//!
//! The volume is mirrored over bricks on this machine, their pools are of class `process`,
//! `pmem` or `eadr`, every leg is in-sync. The calling thread does all of the following:
//!
//! 1. `VolumeChannel::submit` → `ChannelCore::submit` → `ChannelCore::write_sync`. `Engine::sync_write`
//!    checks that the write is one piece (`LayoutSnapshot::atomic_extent`: one column, one
//!    `REGION_BYTES`), that nothing is ahead of it, and that no leg buffers.
//!    `EngineIo::prefetch_if_mapped` checks that every leg is a `MappedLeg`. Any other write becomes
//!    pieces of the engine, as over `tcp`.
//! 2. `RangeLocks::try_acquire`: the range lock, among the channels of this process. If another
//!    operation holds it, the write becomes a piece that waits for it.
//! 3. The operation gets its epoch (`VolumeShared::stamp_epoch`) and its number (`VolumeShared::next_op`)
//!    under the lock. The stamp also says how far back the oldest incomplete operation of this channel is.
//! 4. `MappedLeg::write_all`: one call for the pools of all legs. The store continues in
//!    `session::write::write`.
//! 5. All legs have the write. One load checks that no new layout snapshot excludes one of them, so
//!    no excluded leg can serve an old page. `RangeLocks::release` releases the lock, and the
//!    completion goes to this channel's list. If a leg failed or the snapshot changed, the engine
//!    goes on with a piece that was sent, under the same lock and number.
//! 6. `VolumeChannel::reap` → `ChannelCore::reap` returns the completion.

mod core;
mod engine_io;

use self::core::ClosePhase;
use self::engine_io::EngineIo;
use crate::controller::{ControllerEvent, Mailbox};
use crate::engine::locks::LockRange;
use crate::engine::timing::{OpRecord, OpTimes, PieceTimes, STORE_ONLY};
use crate::engine::{
    Engine, EngineBackend, Job, LegAnswers, SyncChange, acknowledge, lock_ranges, written_bytes,
};
use crate::legs::mapped::{DirectLeg, MappedLeg};
use crate::limits::CHANNELS_MAX;
use crate::shared::{LegLink, Member, VolumeShared};
use crate::snapshot::LegSet;
use crate::steps;
use crate::wake::Wake;
use arrayvec::ArrayVec;
use pagemesh_base::layout::LEGS_MAX;
use pagemesh_base::poison;
use pagemesh_base::slice::{SliceCompletion, SliceError, SliceRequest};
use pagemesh_base::space::{Channel, Completion, Request, SpaceError, Token};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_telemetry::OpKind;
use std::os::fd::RawFd;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// A channel as its user has it.
pub struct VolumeChannel {
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

/// A channel without its drop handler. The controller takes it over when the thread drops the
/// channel with changes in flight.
pub struct ChannelCore {
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

impl Channel for VolumeChannel {
    fn ready(&mut self) -> Result<bool, SpaceError> {
        match &mut *self.core() {
            Some(core) => core.ready(),
            None => Ok(true),
        }
    }

    fn submit(&mut self, token: Token, request: Request) {
        self.submit_hinted(token, request, TierHint::None);
    }

    fn submit_hinted(&mut self, token: Token, request: Request, hint: TierHint) {
        if let Some(core) = &mut *self.core() {
            core.submit(token, request, hint);
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

impl ChannelCore {
    pub fn submit(&mut self, token: Token, request: Request, hint: TierHint) {
        self.io.hint = hint;
        let times = self.io.start_times();
        let Some(request) = self.write_sync(token, request, times) else {
            return;
        };
        let Some(mut job) = self.engine.new_job(token, request, times, &mut self.io) else {
            return;
        };
        job.hint = hint;
        if let Some(job) = self.transact_sync(token, job) {
            self.engine.start_job(job, &mut self.io);
        }
    }

    /// Makes a write on all legs inside this call. Returns it if it must go through the engine.
    fn write_sync(
        &mut self,
        token: Token,
        request: Request,
        times: Option<OpTimes>,
    ) -> Option<Request> {
        let Request::Write {
            offset,
            data,
            durable,
        } = &request
        else {
            return Some(request);
        };
        let Some(change) = self.engine.sync_write(*offset, data.len() as u64) else {
            return Some(request);
        };
        let SyncChange { place, legs, slot } = change;
        if !self.io.prefetch_if_mapped(place.column, legs, place.offset) {
            return Some(request);
        }
        let range = LockRange::new(place.column, place.offset, place.len);
        let holder = self.io.holder(slot);
        if !self.io.shared.locks.try_acquire(range, holder) {
            return Some(request);
        }
        let mut timer = SyncTimer::new(times);
        timer.record_sent(&mut self.io);
        let Some(stamp) = self.engine.stamp(place.column, &mut self.io) else {
            self.io.release(range, slot);
            return Some(request);
        };
        let answers = MappedLeg::write_all(
            &mut self.io.checked_mapped_legs(place.column, legs),
            place.offset,
            data,
            stamp,
        );
        timer.record_answers(&mut self.io);
        if answers.iter().all(Result::is_ok) && self.io.is_snapshot_current() {
            let sent = || SliceRequest::Write {
                offset: place.offset,
                data: data.clone(),
                stamp,
            };
            self.engine.replicate(place.column, &mut self.io, sent);
            self.io.release(range, slot);
            let record = timer.record(&mut self.io, data.len() as u64);
            acknowledge(&mut self.io, token, *durable, record);
            return None;
        }
        let again = needs_brick(&answers).then(|| SliceRequest::Write {
            offset: place.offset,
            data: data.clone(),
            stamp,
        });
        let hint = self.io.hint;
        let tag = self
            .engine
            .insert_sent_write(token, (request, hint), stamp, slot);
        self.io
            .queue_answers(place.column, legs, tag, answers, again.as_ref());
        None
    }

    /// Makes a transaction as [`ChannelCore::write_sync`] makes a write. Returns the job if it must
    /// go through the engine.
    fn transact_sync(&mut self, token: Token, job: Job) -> Option<Job> {
        let Some((place, parts)) = job.transaction_parts() else {
            return Some(job);
        };
        let Some(SyncChange { legs, slot, .. }) = self.engine.sync_change(place) else {
            return Some(job);
        };
        if !self.io.prefetch_if_mapped(place.column, legs, place.offset) {
            return Some(job);
        }
        let ranges = lock_ranges(place.column, parts);
        let holder = self.io.holder(slot);
        if !self.io.shared.locks.try_acquire_all(&ranges, holder) {
            return Some(job);
        }
        let mut timer = SyncTimer::new(job.times);
        timer.record_sent(&mut self.io);
        let Some(stamp) = self.engine.stamp(place.column, &mut self.io) else {
            for range in ranges {
                self.io.release(range, slot);
            }
            return Some(job);
        };
        let answers = MappedLeg::transact_all(
            &mut self.io.checked_mapped_legs(place.column, legs),
            parts,
            stamp,
        );
        timer.record_answers(&mut self.io);
        if answers.iter().all(Result::is_ok) && self.io.is_snapshot_current() {
            let sent = || SliceRequest::Transact {
                parts: parts.to_vec(),
                stamp,
            };
            self.engine.replicate(place.column, &mut self.io, sent);
            for range in ranges {
                self.io.release(range, slot);
            }
            let record = timer.record(&mut self.io, written_bytes(parts));
            acknowledge(&mut self.io, token, job.durable, record);
            return None;
        }
        let again = needs_brick(&answers).then(|| SliceRequest::Transact {
            parts: parts.to_vec(),
            stamp,
        });
        let tag = self.engine.insert_sent(job, stamp, slot);
        self.io
            .queue_answers(place.column, legs, tag, answers, again.as_ref());
        None
    }

    pub fn reap(&mut self, into: &mut Vec<Completion>) {
        loop {
            self.io.step_time = None;
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
            } else if self.engine.resume_held(&mut self.io) {
                // Mapped legs have answered already.
            } else if !self.release_delayed() {
                break;
            }
        }
        self.hedge_late_reads();
        into.append(&mut self.io.completions);
    }
}

/// The times of a change that all legs make inside the call, if it is timed.
struct SyncTimer(Option<(OpTimes, PieceTimes)>);

impl SyncTimer {
    fn new(times: Option<OpTimes>) -> SyncTimer {
        SyncTimer(times.map(|times| (times, PieceTimes::new(times.submitted))))
    }

    #[inline]
    fn record_sent(&mut self, io: &mut EngineIo) {
        if let Some((_, piece)) = &mut self.0 {
            piece.record_sent(io.fresh_now());
        }
    }

    #[inline]
    fn record_answers(&mut self, io: &mut EngineIo) {
        if let Some((_, piece)) = &mut self.0 {
            piece.record_answer(io.fresh_now(), STORE_ONLY);
        }
    }

    /// The record of a write that completes now.
    #[inline]
    fn record(self, io: &mut EngineIo, bytes: u64) -> OpRecord {
        let times = self.0.map(|(times, piece)| {
            io.step_time = None;
            OpTimes {
                last_piece: Some(piece),
                ..times
            }
        });
        OpRecord {
            kind: OpKind::Write,
            bytes,
            times,
        }
    }
}

/// Legs in this process.
type MappedLegs<'a> = ArrayVec<&'a mut MappedLeg, LEGS_MAX>;

impl EngineIo {
    /// Whether each of these legs makes a write inside the call. A write of this place follows.
    fn prefetch_if_mapped(&mut self, column: usize, legs: LegSet, offset: u64) -> bool {
        let Some(mapped) = self.mapped_legs(column * LEGS_MAX, legs) else {
            return false;
        };
        mapped.iter().for_each(|leg| leg.prefetch_write(offset));
        true
    }

    /// These legs, after [`EngineIo::prefetch_if_mapped`] returned true.
    fn checked_mapped_legs(&mut self, column: usize, legs: LegSet) -> MappedLegs<'_> {
        match self.mapped_legs(column * LEGS_MAX, legs) {
            Some(mapped) => mapped,
            None => unreachable!("each of them is mapped"),
        }
    }

    /// Returns these legs if all of them are mapped in this process.
    fn mapped_legs(&mut self, base: usize, legs: LegSet) -> Option<MappedLegs<'_>> {
        let places = self.connections[base..].iter_mut().take(LEGS_MAX);
        let wanted = places.enumerate().filter(|(leg, _)| legs.contains(*leg));
        let mut found = ArrayVec::new();
        for (_, connection) in wanted {
            let any = connection.as_mut()?.leg.as_any()?;
            let mapped: &mut MappedLeg = any.downcast_mut()?;
            mapped.set_hint(self.hint);
            found.push(mapped);
        }
        Some(found)
    }
}

/// Whether a leg found a page on a disk behind its mapped memory.
fn needs_brick(answers: &LegAnswers) -> bool {
    answers.contains(&Err(SliceError::OnFlash))
}

/// Opens a channel. The controller connects it, and requests wait until then. They fail with
/// [`SpaceError::Busy`] if a brick has no session for the channel.
pub fn open(
    shared: &Arc<VolumeShared>,
    mailbox: &Arc<Mailbox>,
) -> Result<VolumeChannel, SpaceError> {
    if shared.snapshot().1.fenced {
        return Err(SpaceError::Fenced);
    }
    let member = Member::new()
        .map_err(|error| SpaceError::Unavailable(format!("no channel could be opened: {error}")))?;
    let member = Arc::new(member);
    let number = shared.join(&member).ok_or_else(|| {
        SpaceError::Busy(format!(
            "the volume has {CHANNELS_MAX} channels already; close some"
        ))
    })?;
    let core = ChannelCore::new(
        Arc::clone(shared),
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
