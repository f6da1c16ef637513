//! One connection's way into the pool: a session and the slices it attached.
//!
//! Dropping a worker ends its session: what may be missing on other legs is
//! then in the in-flight table.

use crate::brick::Brick;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    LISTED_MAX, Run, SLICE_IO_BYTES_MAX, SliceError, SliceReply, SliceRequest,
};
use pagemesh_base::space::{EXTENTS_MAX, Extent};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::{Mapped, Media};
use pagemesh_store::session::{Member, Session, clear, write};
use pagemesh_store::view::{Handle, StoreError};
use std::sync::Arc;

/// Slices that one connection can attach.
pub const ATTACHED_MAX: usize = 64;
/// Bytes of one clear.
const CLEAR_BYTES_MAX: u64 = 1 << 30;
/// Pages that one question about dirty pages looks at: 16 GiB.
const DIRTY_SCAN_MAX: u64 = 1 << 22;

/// A session and the slices it works on.
pub struct Worker {
    brick: Arc<Brick>,
    session: Session<Mapped>,
    attached: Vec<Attached>,
}

#[derive(Clone, Copy)]
struct Attached {
    slice: SliceId,
    handle: Handle,
    /// The newest epoch that this connection used.
    epoch: Epoch,
}

/// The error of a session as a client sees it.
pub(crate) fn refused(cause: StoreError) -> SliceError {
    match cause {
        StoreError::StaleEpoch { current } => SliceError::StaleEpoch { current },
        StoreError::NoSpace => SliceError::NoSpace,
        StoreError::Damaged { offset } => SliceError::Damaged { offset },
        StoreError::NoSuchObject => SliceError::NoSuchSlice(SliceId::default()),
        StoreError::OutOfRange { .. } => SliceError::OutOfRange(cause.to_string()),
        StoreError::Revoked | StoreError::Gone | StoreError::Stalled => {
            SliceError::Lost(cause.to_string())
        }
    }
}

impl Worker {
    /// Opens a session.
    ///
    /// # Errors
    /// When all are in use.
    pub fn open(brick: &Arc<Brick>, pid: u32, start_time: u64) -> Result<Worker, SliceError> {
        let number = brick.open_session(pid, start_time)?;
        Ok(Worker {
            brick: brick.clone(),
            session: brick.session(number),
            attached: Vec::new(),
        })
    }

    /// Attaches a slice; the handle names it in requests.
    ///
    /// # Errors
    /// When there is none, it has a newer epoch, or too many are attached.
    pub fn attach(&mut self, slice: SliceId, epoch: Epoch) -> Result<u32, SliceError> {
        let (handle, object) = {
            let pool = self.brick.pool();
            let (_, object) = pool.find(slice).map_err(crate::brick::refused)?;
            (pool.handle(slice).map_err(crate::brick::refused)?, object)
        };
        if object.epoch > epoch {
            return Err(SliceError::StaleEpoch {
                current: object.epoch,
            });
        }
        if self.attached.len() == ATTACHED_MAX {
            return Err(SliceError::Refused(format!(
                "a connection attaches at most {ATTACHED_MAX} slices"
            )));
        }
        self.session.forget_leaves();
        self.attached.push(Attached {
            slice,
            handle,
            epoch,
        });
        Ok(self.attached.len() as u32 - 1)
    }

    /// The slice and handle behind an attached number.
    ///
    /// # Errors
    /// When nothing is attached under it.
    fn attached(&mut self, number: u32) -> Result<&mut Attached, SliceError> {
        let unknown = || SliceError::OutOfRange(format!("nothing is attached as {number}"));
        self.attached.get_mut(number as usize).ok_or_else(unknown)
    }

    /// Does a request. May block for fdatasync on `file-sync` pools, and for
    /// room while the pool checkpoints.
    ///
    /// # Errors
    /// When it is out of range, fenced, or the pool refuses.
    pub fn execute(
        &mut self,
        number: u32,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let named = self.attached(number)?;
        if let SliceRequest::Write { stamp, .. } | SliceRequest::Clear { stamp, .. } = &request {
            named.epoch = named.epoch.max(stamp.epoch);
        }
        if let SliceRequest::RaiseEpoch { epoch, .. } = request {
            named.epoch = named.epoch.max(epoch);
        }
        let Attached {
            slice,
            handle,
            epoch,
        } = *named;
        let done = self.run(slice, handle, epoch, request);
        done.map_err(|cause| match cause {
            SliceError::NoSuchSlice(_) => SliceError::NoSuchSlice(slice),
            cause => cause,
        })
    }

    fn run(
        &mut self,
        slice: SliceId,
        handle: Handle,
        epoch: Epoch,
        request: SliceRequest,
    ) -> Result<SliceReply, SliceError> {
        let session = &mut self.session;
        match request {
            SliceRequest::Read { offset, len } => {
                check_len(u64::from(len), u64::from(SLICE_IO_BYTES_MAX))?;
                let mut data = vec![0; len as usize];
                session
                    .read(&handle, offset, &mut data, epoch)
                    .map_err(refused)?;
                Ok(SliceReply::Data(data))
            }
            SliceRequest::Write {
                offset,
                data,
                stamp,
            } => {
                check_len(data.len() as u64, u64::from(SLICE_IO_BYTES_MAX))?;
                let mut members = [Member { session, handle }];
                write(&mut members, offset, &data, stamp)
                    .map_err(|failure| refused(failure.cause))?;
                Ok(SliceReply::Done)
            }
            SliceRequest::Clear { offset, len, stamp } => {
                check_len(len, CLEAR_BYTES_MAX)?;
                let mut members = [Member { session, handle }];
                clear(&mut members, offset, len, stamp)
                    .map_err(|failure| refused(failure.cause))?;
                Ok(SliceReply::Done)
            }
            SliceRequest::Flush => {
                let synced = session.view().media().sync();
                synced.map_err(|cause| SliceError::Lost(cause.to_string()))?;
                Ok(SliceReply::Done)
            }
            SliceRequest::Extents { offset, len } => self.extents(handle, epoch, offset, len),
            SliceRequest::Checksums { page, count } => {
                check_len(u64::from(count), LISTED_MAX as u64)?;
                let sums = session
                    .checksums(&handle, page, count, epoch)
                    .map_err(refused)?;
                Ok(SliceReply::Checksums(sums))
            }
            SliceRequest::Dirty { round, from } => self.dirty(handle, epoch, round, from),
            SliceRequest::InFlight => {
                let found = self
                    .brick
                    .pool()
                    .in_flight(slice)
                    .map_err(crate::brick::refused)?;
                Ok(SliceReply::InFlight(
                    found.filter(|list| list.len() <= LISTED_MAX),
                ))
            }
            SliceRequest::Settled => {
                self.brick
                    .pool()
                    .settle(slice)
                    .map_err(crate::brick::refused)?;
                Ok(SliceReply::Done)
            }
            SliceRequest::RaiseEpoch { epoch, round } => {
                if round > 15 {
                    return Err(SliceError::OutOfRange(format!(
                        "round {round} is beyond 15"
                    )));
                }
                let raised = self.brick.pool().raise_epoch(slice, epoch, round);
                raised.map_err(crate::brick::refused)?;
                Ok(SliceReply::Done)
            }
        }
    }

    fn extents(
        &mut self,
        handle: Handle,
        epoch: Epoch,
        offset: u64,
        len: u64,
    ) -> Result<SliceReply, SliceError> {
        const PAGE: u64 = PAGE_BYTES as u64;
        let size_bytes = self.session.view().size_bytes(&handle);
        let end = offset.checked_add(len).filter(|&end| end <= size_bytes);
        let end = end.ok_or_else(|| {
            SliceError::OutOfRange(format!("{len} bytes at {offset} of {size_bytes}"))
        })?;
        let mut extents: Vec<Extent> = Vec::new();
        let pages = offset / PAGE..end.div_ceil(PAGE);
        let visited = self
            .session
            .visit_slots(&handle, pages, epoch, |_, count, slot| {
                let mapped = slot.frame().is_some();
                let is_full = extents.len() == EXTENTS_MAX;
                match extents.last_mut() {
                    Some(last) if last.mapped == mapped => last.len += count * PAGE,
                    _ if is_full => return false,
                    _ => extents.push(Extent {
                        len: count * PAGE,
                        mapped,
                    }),
                }
                true
            });
        let stop = visited.map_err(refused)? * PAGE;
        // Pages were counted: cut to the bytes asked for.
        if let Some(first) = extents.first_mut() {
            first.len -= offset % PAGE;
        }
        if let (true, Some(last)) = (stop > end, extents.last_mut()) {
            last.len -= stop - end;
        }
        Ok(SliceReply::Extents(extents))
    }

    fn dirty(
        &mut self,
        handle: Handle,
        epoch: Epoch,
        round: u8,
        from: PageNo,
    ) -> Result<SliceReply, SliceError> {
        let pages = self.session.view().size_bytes(&handle) / PAGE_BYTES as u64;
        let end = pages.min(from.0.saturating_add(DIRTY_SCAN_MAX));
        let mut runs: Vec<Run> = Vec::new();
        let start = from.0.min(end);
        let visited = self
            .session
            .visit_slots(&handle, start..end, epoch, |page, count, slot| {
                if slot.track() != round || round == 0 {
                    return true;
                }
                let is_full = runs.len() == LISTED_MAX;
                match runs.last_mut() {
                    Some(last) if last.page.0 + last.count == page.0 => last.count += count,
                    _ if is_full => return false,
                    _ => runs.push(Run { page, count }),
                }
                true
            });
        let stop = visited.map_err(refused)?;
        Ok(SliceReply::Dirty {
            runs,
            next: (stop < pages).then_some(PageNo(stop)),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.brick.close_session(self.session.number());
    }
}

fn check_len(len: u64, max: u64) -> Result<(), SliceError> {
    match len <= max {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!("{len} is more than {max}"))),
    }
}
