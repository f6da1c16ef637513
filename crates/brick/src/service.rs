//! The brick's interface to the fabric: over `tcp` a worker runs the session, over `map` the client
//! does.
//!
//! Invariants: a map session ends when its connection does. Clients do not map a pool of class
//! `file-sync`: its slots live in an overlay that is private to the brick.

use crate::brick::Brick;
use crate::process::start_time;
use crate::worker::{ATTACHED_MAX, Worker};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{BrickControl, ServiceTime, SliceError, SliceRequest};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_fabric::map::{MapPeer, MapService, MapSession};
use pagemesh_fabric::message::MessageKind;
use pagemesh_fabric::message::reply::AttachReply;
use pagemesh_fabric::service::{FinishedTicket, Handler, Outcome, PeerInfo, Service};
use pagemesh_pmem::{MappedMedia, Media, TieredMedia};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// The service of a brick.
pub struct BrickService<M = MappedMedia>(pub Arc<Brick<M>>);

impl<M: Media + Send + Sync + 'static> Service for BrickService<M> {
    fn brick(&self) -> BrickId {
        self.0.id()
    }

    fn open(&self, _peer: PeerInfo) -> Result<Box<dyn Handler>, SliceError> {
        let pid = std::process::id();
        let worker = Worker::open(&self.0, pid, start_time(pid).unwrap_or(0))?;
        Ok(Box::new(worker))
    }

    fn control(&self) -> &dyn BrickControl {
        &*self.0
    }
}

impl<M: Media + Send + Sync + 'static> Handler for Worker<M> {
    fn attach(&mut self, slice: SliceId, epoch: Epoch) -> Result<AttachReply, SliceError> {
        let (handle, size_bytes) = Worker::attach(self, slice, epoch)?;
        Ok(AttachReply { handle, size_bytes })
    }

    fn execute(&mut self, handle: u32, request: SliceRequest) -> Outcome {
        self.start(handle, request, TierHint::None)
    }

    fn execute_hinted(&mut self, handle: u32, request: SliceRequest, hint: TierHint) -> Outcome {
        self.start(handle, request, hint)
    }

    fn end_batch(&mut self) -> Result<(), SliceError> {
        Worker::end_batch(self);
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<FinishedTicket>) {
        self.finish(done);
    }

    fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        self.device_fds(fds);
    }

    fn record_served(&mut self, kind: MessageKind, bytes: usize, service: ServiceTime) {
        self.record(kind, bytes as u64, service);
    }
}

/// A medium with a first device that clients may map.
pub trait MappedFirst: Media {
    /// The mapping of the first device.
    fn mapped(&self) -> &MappedMedia;
}

impl MappedFirst for MappedMedia {
    fn mapped(&self) -> &MappedMedia {
        self
    }
}

impl MappedFirst for TieredMedia {
    fn mapped(&self) -> &MappedMedia {
        self.memory()
    }
}

impl<M: MappedFirst + Send + Sync + 'static> MapService for BrickService<M> {
    fn brick(&self) -> BrickId {
        self.0.id()
    }

    fn grant(&self, peer: MapPeer) -> Result<MapSession, SliceError> {
        let brick = &self.0;
        if !brick.can_be_mapped() {
            return Err(SliceError::Refused(format!(
                "a pool of class {} is reached over tcp only",
                brick.durability()
            )));
        }
        let started = start_time(peer.pid)
            .ok_or_else(|| SliceError::Lost(format!("process {} is gone", peer.pid)))?;
        let number = brick.open_session(peer.pid, started)?;
        let owner = OwnerHandler {
            brick: brick.clone(),
            number,
            attached: Vec::new(),
            worker: None,
        };
        let view = brick.mapping();
        let (media, shared) = (view.media(), view.control().shared());
        let share = |fd: &std::fs::File| fd.as_fd().try_clone_to_owned();
        let refused = |cause| SliceError::NoSession(format!("no descriptor is left: {cause}"));
        Ok(MapSession {
            session: number,
            incarnation: view.incarnation().0,
            pool: share(media.mapped().file()).map_err(refused)?,
            pool_bytes: view.geometry().pool_bytes,
            control: share(shared.file()).map_err(refused)?,
            control_bytes: shared.len_bytes() as u64,
            handler: Box::new(owner),
        })
    }

    fn control(&self) -> &dyn BrickControl {
        &*self.0
    }
}

/// Answers the requests of a mapped session that only the pool's owner can.
struct OwnerHandler<M: Media + Send + Sync + 'static> {
    brick: Arc<Brick<M>>,
    number: u32,
    attached: Vec<OwnerAttachment>,
    /// Serves requests for pages that the client does not reach. Opened by the first of them.
    worker: Option<Worker<M>>,
}

/// A slice that a mapped session has attached.
struct OwnerAttachment {
    handle: u32,
    slice: SliceId,
    /// The newest epoch that this connection used.
    epoch: Epoch,
    /// The worker's number for it.
    in_worker: Option<u32>,
}

impl<M: Media + Send + Sync + 'static> OwnerHandler<M> {
    /// Executes a request for pages on disks behind the mapped memory.
    fn execute_on_disks(&mut self, place: usize, request: SliceRequest, hint: TierHint) -> Outcome {
        let attachment = &mut self.attached[place];
        let worker = match &mut self.worker {
            Some(worker) => worker,
            none => {
                let pid = std::process::id();
                match Worker::open(&self.brick, pid, start_time(pid).unwrap_or(0)) {
                    Ok(mut worker) => {
                        worker.leave_out_reads();
                        none.insert(worker)
                    }
                    Err(cause) => return Outcome::Done(Err(cause)),
                }
            }
        };
        let number = match attachment.in_worker {
            Some(number) => number,
            None => match Worker::attach(worker, attachment.slice, attachment.epoch) {
                Ok((number, _)) => *attachment.in_worker.insert(number),
                Err(cause) => return Outcome::Done(Err(cause)),
            },
        };
        worker.raise_epoch(number, attachment.epoch);
        worker.start(number, request, hint)
    }
}

impl<M: Media + Send + Sync + 'static> Handler for OwnerHandler<M> {
    fn attach(&mut self, slice: SliceId, epoch: Epoch) -> Result<AttachReply, SliceError> {
        let (object, size_bytes) = self.brick.attach(slice, epoch)?;
        if self.attached.len() == ATTACHED_MAX {
            return Err(SliceError::Refused(format!(
                "a connection attaches at most {ATTACHED_MAX} slices"
            )));
        }
        self.attached.push(OwnerAttachment {
            handle: object.0,
            slice,
            epoch,
            in_worker: None,
        });
        Ok(AttachReply {
            handle: object.0,
            size_bytes,
        })
    }

    fn execute(&mut self, handle: u32, request: SliceRequest) -> Outcome {
        self.execute_hinted(handle, request, TierHint::None)
    }

    fn execute_hinted(&mut self, handle: u32, request: SliceRequest, hint: TierHint) -> Outcome {
        // The latest one: the pool reuses the number of a deleted object.
        let found = self
            .attached
            .iter()
            .rposition(|attachment| attachment.handle == handle);
        let Some(place) = found else {
            let why = format!("nothing is attached as {handle}");
            return Outcome::Done(Err(SliceError::OutOfRange(why)));
        };
        let attachment = &mut self.attached[place];
        let said = request.epoch();
        attachment.epoch = said.map_or(attachment.epoch, |it| it.max(attachment.epoch));
        match request {
            SliceRequest::Read { .. }
            | SliceRequest::Write { .. }
            | SliceRequest::Clear { .. }
            | SliceRequest::Transact { .. }
            | SliceRequest::Durable { .. }
            | SliceRequest::Checksums { .. } => self.execute_on_disks(place, request, hint),
            _ => Outcome::Done(self.brick.execute_as_owner(
                attachment.slice,
                attachment.epoch,
                request,
            )),
        }
    }

    fn end_batch(&mut self) -> Result<(), SliceError> {
        if let Some(worker) = &mut self.worker {
            worker.end_batch();
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<FinishedTicket>) {
        if let Some(worker) = &mut self.worker {
            worker.finish(done);
        }
    }

    fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        if let Some(worker) = &self.worker {
            worker.device_fds(fds);
        }
    }
}

impl<M: Media + Send + Sync + 'static> Drop for OwnerHandler<M> {
    fn drop(&mut self) {
        self.brick.close_session(self.number);
    }
}
