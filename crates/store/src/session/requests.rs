//! A session executes the requests of a client. The same code serves a brick's connections and
//! clients that have the pool mapped.
//!
//! Requests that only the owner of the pool can execute (epochs, in-flight operations) go back to
//! the caller.

use crate::session::copy_pages::copy_pages;
use crate::session::transaction::transact;
use crate::session::{LegFailure, LegSession, Session, clear, write};
use crate::shared::pool_mapping::Handle;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::slice::{
    COPY_PAGES_MAX, LIST_ENTRIES_MAX, SLICE_IO_BYTES_MAX, SliceError, SliceReply, SliceRequest,
};
use pagemesh_base::space::{EXTENTS_MAX, Extent};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::Media;

const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of one clear.
pub const CLEAR_BYTES_MAX: u64 = 1 << 30;

type RequestResult = Result<SliceReply, SliceError>;

/// The outcome of a request.
#[derive(Debug)]
pub enum ExecuteOutcome {
    /// Done, or refused.
    Done(RequestResult),
    /// Only the owner of the pool can execute it.
    NeedsOwner(SliceRequest),
}

/// Executes a request of a client with `epoch` as its newest epoch. A flush blocks for fdatasync on
/// `file-sync` pools.
pub fn execute<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    epoch: Epoch,
    request: SliceRequest,
) -> ExecuteOutcome {
    let result = match request {
        SliceRequest::Durable { change } => {
            return match execute(session, handle, epoch, *change) {
                ExecuteOutcome::Done(Ok(_)) => execute(session, handle, epoch, SliceRequest::Flush),
                // Refused, or in memory in front of disks, which keeps the change without a flush.
                outcome => outcome,
            };
        }
        SliceRequest::Read { offset, len } => read(session, handle, epoch, offset, len),
        SliceRequest::Write {
            offset,
            ref data,
            stamp,
        } => check_len(data.len() as u64, u64::from(SLICE_IO_BYTES_MAX)).and_then(|()| {
            let written = write(&mut [LegSession { session, handle }], offset, data, stamp);
            done_reply(written)
        }),
        SliceRequest::Clear { offset, len, stamp } => {
            check_len(len, CLEAR_BYTES_MAX).and_then(|()| {
                let cleared = clear(&mut [LegSession { session, handle }], offset, len, stamp);
                done_reply(cleared)
            })
        }
        SliceRequest::Transact { ref parts, stamp } => {
            let changed = transact(&mut [LegSession { session, handle }], parts, stamp);
            done_reply(changed)
        }
        SliceRequest::Flush => flush(session),
        SliceRequest::Extents { offset, len } => extents(session, handle, epoch, offset, len),
        SliceRequest::Checksums { page, count } => {
            check_len(u64::from(count), LIST_ENTRIES_MAX as u64).and_then(|()| {
                let sums = session.checksums(&handle, page, count, epoch)?;
                Ok(SliceReply::Checksums(sums))
            })
        }
        SliceRequest::Dirty { since, from } => dirty(session, handle, epoch, since, from),
        SliceRequest::Births { page, count } => births(session, handle, epoch, page, count),
        SliceRequest::Copy {
            page,
            ref births,
            ref data,
            stamp,
        } => check_copy(births.len(), data.len()).and_then(|()| {
            let leg = LegSession { session, handle };
            done_reply(copy_pages(leg, page, births, data, stamp))
        }),
        // The executor of the connection's requests keeps their order.
        SliceRequest::KeepOrder => Ok(SliceReply::Done),
        // Epochs, operations in flight and snapshots.
        _ => return ExecuteOutcome::NeedsOwner(request),
    };
    match result {
        // Nothing happened, or whole pages before that one have changed: the owner makes all of it under the same number.
        Err(SliceError::OnFlash) => ExecuteOutcome::NeedsOwner(request),
        result => ExecuteOutcome::Done(result),
    }
}

fn flush<M: Media>(session: &Session<M>) -> RequestResult {
    match session.mapping().media().sync() {
        Ok(()) => Ok(SliceReply::Done),
        Err(cause) => Err(SliceError::Lost(cause.to_string())),
    }
}

fn done_reply(result: Result<(), LegFailure>) -> RequestResult {
    result?;
    Ok(SliceReply::Done)
}

fn check_len(len: u64, max: u64) -> Result<(), SliceError> {
    match len <= max {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!("{len} is more than {max}"))),
    }
}

fn dirty<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    epoch: Epoch,
    since: Epoch,
    from: PageNo,
) -> RequestResult {
    let (runs, next) = session.dirty(&handle, since, from, epoch)?;
    Ok(SliceReply::Dirty { runs, next })
}

fn births<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    epoch: Epoch,
    page: PageNo,
    count: u32,
) -> RequestResult {
    check_len(u64::from(count), LIST_ENTRIES_MAX as u64)?;
    let births = session.births(&handle, page, count, epoch)?;
    Ok(SliceReply::Births(births))
}

fn check_copy(births: usize, bytes: usize) -> Result<(), SliceError> {
    check_len(births as u64, COPY_PAGES_MAX as u64)?;
    match bytes == 0 || bytes == births * PAGE_BYTES {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!(
            "{bytes} bytes are not those of {births} pages"
        ))),
    }
}

/// Executes a read if all of its pages are in memory. None if one is not.
pub fn read_in_memory<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    epoch: Epoch,
    (offset, len): (u64, u32),
) -> Option<RequestResult> {
    let read = |session: &mut Session<M>| {
        check_len(u64::from(len), u64::from(SLICE_IO_BYTES_MAX))?;
        let mut data = vec![0; len as usize];
        session.read_in_memory(&handle, offset, &mut data, epoch)?;
        Ok(SliceReply::Data(data))
    };
    match read(session) {
        Err(SliceError::OnFlash) => None,
        result => Some(result),
    }
}

fn read<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    epoch: Epoch,
    offset: u64,
    len: u32,
) -> RequestResult {
    check_len(u64::from(len), u64::from(SLICE_IO_BYTES_MAX))?;
    let mut data = vec![0; len as usize];
    session.read(&handle, offset, &mut data, epoch)?;
    Ok(SliceReply::Data(data))
}

fn extents<M: Media>(
    session: &mut Session<M>,
    handle: Handle,
    epoch: Epoch,
    offset: u64,
    len: u64,
) -> RequestResult {
    let size_bytes = session.mapping().size_bytes(&handle);
    let end = offset.checked_add(len).filter(|&end| end <= size_bytes);
    let beyond = || SliceError::OutOfRange(format!("{len} bytes at {offset} of {size_bytes}"));
    let end = end.ok_or_else(beyond)?;
    let mut extents: Vec<Extent> = Vec::new();
    let pages = offset / PAGE..end.div_ceil(PAGE);
    let stop = session.visit_slots(&handle, pages, epoch, |_, count, slot| {
        // The state of a damaged slot is unknown: it counts as mapped, so that a read reports the
        // damage.
        let mapped = slot.is_none_or(|slot| slot.frame().is_some());
        let len = count * PAGE;
        let is_full = extents.len() == EXTENTS_MAX;
        match extents.last_mut() {
            Some(last) if last.mapped == mapped => last.len += len,
            _ if is_full => return false,
            _ => extents.push(Extent { len, mapped }),
        }
        true
    })? * PAGE;
    // The extents count whole pages: cut them to the requested bytes.
    if let Some(first) = extents.first_mut() {
        first.len -= offset % PAGE;
    }
    if let (true, Some(last)) = (stop > end, extents.last_mut()) {
        last.len -= stop - end;
    }
    Ok(SliceReply::Extents(extents))
}
