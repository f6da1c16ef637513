//! A connection's access to the pool: a session and the slices that it attached.
//!
//! Dropping a worker ends its session. The operations that may be missing on other legs are then in
//! the in-flight table.

use crate::brick::Brick;
use crate::brick::tier::ReadCounts;
use crate::device_requests::{
    DeviceRequests, LOADS_MAX, SliceResult, Step, WaitingRequest, pages_of, pages_to_read,
};
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{ServiceTime, SliceError, SliceReply, SliceRequest};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_fabric::message::MessageKind;
use pagemesh_fabric::service::{FinishedTicket, Outcome, Ticket};
use pagemesh_pmem::{MapError, MappedMedia, Media};
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::requests::{ExecuteOutcome, execute, read_in_memory};
use pagemesh_store::session::Session;
use pagemesh_telemetry::{OpKind, OpenMeter, StageTimes};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Slices that one connection can attach.
pub const ATTACHED_MAX: usize = 64;

/// A session and the slices it works on.
pub struct Worker<M: Media = MappedMedia> {
    brick: Arc<Brick<M>>,
    session: Session<M>,
    attached: Vec<WorkerAttachment>,
    meter: OpenMeter,
    /// Pages that reads found in memory, and on disks behind it. None if they do not count.
    reads: Option<Arc<ReadCounts>>,
    /// For a medium with a device below.
    device: Option<DeviceRequests>,
}

#[derive(Clone, Copy)]
struct WorkerAttachment {
    slice: SliceId,
    handle: Handle,
    /// The newest epoch that this connection used.
    epoch: Epoch,
    order: ChangeOrder,
}

/// The effect of a failed change on later changes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ChangeOrder {
    /// No effect.
    Free,
    /// Later changes fail as well.
    Ordered,
    /// A change has failed.
    Broken,
}

impl<M: Media + Send + Sync + 'static> Worker<M> {
    /// Opens a session.
    ///
    /// # Errors
    /// When all sessions are in use.
    pub fn open(brick: &Arc<Brick<M>>, pid: u32, start_time: u64) -> Result<Self, SliceError> {
        let media = brick.mapping().media();
        let device = DeviceRequests::open(&**media)?;
        let number = brick.open_session(pid, start_time)?;
        Ok(Worker {
            device,
            brick: brick.clone(),
            session: brick.session(number),
            meter: brick.meters().open(),
            reads: Some(brick.open_read_counts()),
            attached: Vec::new(),
        })
    }

    /// Attaches a slice. Returns its handle for requests, and its size.
    ///
    /// # Errors
    /// When there is no such slice, it has a newer epoch, or too many are attached.
    pub fn attach(&mut self, slice: SliceId, epoch: Epoch) -> Result<(u32, u64), SliceError> {
        let (object, size_bytes) = self.brick.attach(slice, epoch)?;
        let handle = self.session.mapping().handle(object, slice)?;
        if self.attached.len() == ATTACHED_MAX {
            return Err(SliceError::Refused(format!(
                "a connection attaches at most {ATTACHED_MAX} slices"
            )));
        }
        self.session.clear_leaf_cache();
        self.brick.record_attached(slice, self.session.number());
        self.attached.push(WorkerAttachment {
            slice,
            handle,
            epoch,
            order: ChangeOrder::Free,
        });
        Ok((self.attached.len() as u32 - 1, size_bytes))
    }

    /// The slice and handle of an attached number.
    ///
    /// # Errors
    /// When no slice is attached under it.
    fn attached(&mut self, number: u32) -> Result<&mut WorkerAttachment, SliceError> {
        let unknown = || SliceError::OutOfRange(format!("nothing is attached as {number}"));
        self.attached.get_mut(number as usize).ok_or_else(unknown)
    }

    /// Counts a request that was answered.
    pub(crate) fn record(&mut self, kind: MessageKind, bytes: u64, service: ServiceTime) {
        let kind = match kind {
            MessageKind::Read => OpKind::Read,
            MessageKind::Write | MessageKind::Clear | MessageKind::Transact => OpKind::Write,
            MessageKind::Flush => OpKind::Flush,
            // The others are no I/O of a client.
            _ => return,
        };
        let in_brick = service.brick_ns.saturating_sub(service.store_ns);
        let times = StageTimes([0, 0, 0, in_brick, service.store_ns, 0]);
        self.meter.count(kind, bytes);
        self.meter.record(kind, &times);
    }

    /// Executes a request. May block for fdatasync on `file-sync` pools, and for room while the
    /// pool checkpoints.
    ///
    /// # Errors
    /// When it is out of range, fenced, or the pool refuses.
    pub fn execute(
        &mut self,
        number: u32,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let named = self.attached(number)?;
        named.epoch = request
            .epoch()
            .map_or(named.epoch, |it| it.max(named.epoch));
        let is_change = request.is_change();
        match named.order {
            ChangeOrder::Broken if is_change => return Err(out_of_order_error()),
            ChangeOrder::Free if matches!(request, SliceRequest::KeepOrder) => {
                named.order = ChangeOrder::Ordered
            }
            _ => {}
        }
        let WorkerAttachment {
            slice,
            handle,
            epoch,
            order,
        } = *named;
        let done = self.run(slice, handle, epoch, request);
        let breaks = is_change && done.is_err() && !defect::is(Defect::OrderNotKept);
        if order == ChangeOrder::Ordered && breaks {
            self.attached(number)?.order = ChangeOrder::Broken;
        }
        done.map_err(|cause| match cause {
            SliceError::NoSuchSlice(_) => SliceError::NoSuchSlice(slice),
            cause => cause,
        })
    }

    /// Executes a request that waits for no device, or starts what it waits for.
    pub fn start(&mut self, number: u32, request: SliceRequest, hint: TierHint) -> Outcome {
        // Another brick of this process may serve the pool by now.
        if self.brick.has_failed() {
            return Outcome::Done(Err(SliceError::Lost("its pool has failed".into())));
        }
        self.session.set_hint(hint);
        let Some(mut device) = self.device.take() else {
            return Outcome::Done(self.execute(number, request));
        };
        let outcome = self.start_on(&mut device, number, request, 0);
        self.device = Some(device);
        outcome.map_or_else(Outcome::Deferred, Outcome::Done)
    }

    /// Executes the requests after the ends of their loads and syncs.
    pub fn finish(&mut self, done: &mut Vec<FinishedTicket>) {
        let Some(mut device) = self.device.take() else {
            return;
        };
        loop {
            for (ticket, result, waiting) in device.take_ended() {
                match self.advance(&mut device, waiting, result) {
                    Ok(result) => done.push((ticket, result)),
                    Err(again) => device.rename(again, ticket),
                }
            }
            device.submit();
            // Requests that end meanwhile are left to the next call, so that the answers of these are sent first.
            if !device.has_ended_at_once() {
                break;
            }
        }
        self.device = Some(device);
    }

    /// The next step of a request after its wait.
    fn advance(
        &mut self,
        device: &mut DeviceRequests,
        waiting: WaitingRequest,
        ended: Result<(), MapError>,
    ) -> Result<SliceResult, Ticket> {
        if let Err(cause) = ended {
            // What the device holds is unknown, so the pool must be recovered.
            self.brick.fail(&cause);
            return Ok(Err(SliceError::Lost(cause.to_string())));
        }
        match waiting.step {
            Step::Answer(result) => Ok(result),
            Step::Execute {
                request,
                loads,
                hint,
            } => {
                self.session.set_hint(hint);
                self.start_on(device, waiting.number, request, loads)
            }
        }
    }

    /// Starts the writes and syncs of the batch of requests.
    pub fn end_batch(&mut self) {
        if let Some(device) = &mut self.device {
            device.submit();
        }
    }

    /// Executes a request, or starts what it waits for. A request that an order binds is executed at once, and
    /// may block: another one would overtake it.
    fn start_on(
        &mut self,
        device: &mut DeviceRequests,
        number: u32,
        request: SliceRequest,
        loads: u8,
    ) -> Result<SliceResult, Ticket> {
        // Memory in front of disks: a fence made the changes durable, and no record names a page that is not.
        let is_buffered = self.session.mapping().media().buffers_from().is_none();
        if matches!(request, SliceRequest::Flush) && self.attached(number).is_ok() {
            return match is_buffered {
                true => Err(device.answer_synced(number)),
                false => Ok(Ok(SliceReply::Done)),
            };
        }
        if let (SliceRequest::Read { offset, len }, false, 0) = (&request, is_buffered, loads) {
            if let Some(reply) = self.read_in_memory(number, *offset, *len) {
                return Ok(Ok(reply));
            }
            self.touch(number, pages_of(*offset, u64::from(*len)));
        }
        let is_change = request.is_change();
        if !is_change || !self.keeps_order(number) {
            let hint = self.session.hint();
            let step = |request, loads| WaitingRequest {
                number,
                step: Step::Execute {
                    request,
                    loads,
                    hint,
                },
            };
            if is_change && !self.session.mapping().media().has_room() {
                return Err(device.wait_for_room(step(request, loads)));
            }
            // Checksums tell of the device, not of the memory in front of it.
            if matches!(request, SliceRequest::Checksums { .. }) && loads == 0 {
                let places = self.places_of_pages(number, &request, M::is_on_disk);
                if !places.is_empty() {
                    return Err(device.reload(step(request, 1), &places));
                }
            }
            let missing = self.places_of_pages(number, &request, |media, at| !media.is_cached(at));
            if !missing.is_empty() && loads < LOADS_MAX {
                return Err(device.load(step(request, loads + 1), &missing));
            }
        }
        let (request, is_durable) = match request {
            SliceRequest::Durable { change } => (*change, true),
            request => (request, false),
        };
        let result = self.execute(number, request);
        // Also after an error: a part of the change may be visible.
        match is_change && is_buffered && !defect::is(Defect::ChangeNotWritten) {
            true if is_durable => Err(device.answer_durable(number, result)),
            true => Err(device.answer_written(number, result)),
            false => Ok(result),
        }
    }

    /// Raises the newest epoch that an attachment has used.
    pub(crate) fn raise_epoch(&mut self, number: u32, epoch: Epoch) {
        if let Ok(attached) = self.attached(number) {
            attached.epoch = epoch.max(attached.epoch);
        }
    }

    /// Reads pages of a pool with disks behind its memory. None if one is on a disk, or if the read fails.
    fn read_in_memory(&mut self, number: u32, offset: u64, len: u32) -> Option<SliceReply> {
        let attached = self.attached.get(number as usize)?;
        let WorkerAttachment { handle, epoch, .. } = *attached;
        let read = read_in_memory(&mut self.session, handle, epoch, (offset, len))?.ok()?;
        if let Some(reads) = &self.reads {
            let pages = pages_of(offset, u64::from(len));
            reads.add(pages.end - pages.start, 0);
        }
        Some(read)
    }

    /// Counts a read of pages, of which some are on flash.
    fn touch(&mut self, number: u32, pages: Range<u64>) {
        let Some(&WorkerAttachment { handle, epoch, .. }) = self.attached.get(number as usize)
        else {
            return;
        };
        let session = &mut self.session;
        let touched = self.brick.touch_pages(session, &handle, pages, epoch);
        if let Some(reads) = &self.reads {
            reads.add(touched.0, touched.1);
        }
    }

    /// Leaves reads out of the hits and misses of the tier: the client reads pages in memory itself.
    pub(crate) fn leave_out_reads(&mut self) {
        self.reads = None;
    }

    /// Pages that reads of this session found in memory, and on disks behind it.
    #[must_use]
    pub fn tier_reads(&self) -> (u64, u64) {
        self.reads.as_ref().map_or((0, 0), |reads| reads.get())
    }

    fn keeps_order(&mut self, number: u32) -> bool {
        let attached = self.attached(number);
        attached.is_ok_and(|attached| attached.order != ChangeOrder::Free)
    }

    /// The places of the pages that a request reads, of those that `is_wanted`. None for a request that will be refused.
    fn places_of_pages(
        &mut self,
        number: u32,
        request: &SliceRequest,
        is_wanted: impl Fn(&M, usize) -> bool,
    ) -> Vec<usize> {
        let mut places = Vec::new();
        let read = pages_to_read(request);
        if read.is_empty() {
            return places;
        }
        let Ok(attached) = self.attached(number) else {
            return places;
        };
        let WorkerAttachment { handle, epoch, .. } = *attached;
        let epoch = request.epoch().map_or(epoch, |it| it.max(epoch));
        let media = self.session.mapping().media().clone();
        for pages in read {
            let found = self.session.places_of(&handle, pages, epoch, |at| {
                if is_wanted(&media, at) {
                    places.push(at);
                }
            });
            if found.is_err() {
                return Vec::new();
            }
        }
        places
    }

    /// Descriptors that become readable when [`Worker::finish`] may have results.
    pub fn device_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        if let Some(device) = &self.device {
            device.poll_fds(fds);
        }
    }

    fn run(
        &mut self,
        slice: SliceId,
        handle: Handle,
        epoch: Epoch,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let request = match request {
            SliceRequest::Durable { change } => {
                self.run(slice, handle, epoch, *change)?;
                SliceRequest::Flush
            }
            request => request,
        };
        let is_flush = matches!(request, SliceRequest::Flush);
        match execute(&mut self.session, handle, epoch, request) {
            ExecuteOutcome::Done(Err(cause)) if is_flush => {
                // A flush fails only on an error of the medium, and then permanently.
                self.brick.fail(&cause);
                Err(cause)
            }
            ExecuteOutcome::Done(result) => result,
            ExecuteOutcome::NeedsOwner(request) => {
                let number = Some(self.session.number());
                self.brick
                    .execute_as_owner_for(number, slice, epoch, request)
            }
        }
    }
}

fn out_of_order_error() -> SliceError {
    let why = "an earlier change failed, and this connection keeps the order of changes";
    SliceError::Refused(why.into())
}

impl<M: Media> Drop for Worker<M> {
    fn drop(&mut self) {
        self.brick.close_session(self.session.number());
    }
}
