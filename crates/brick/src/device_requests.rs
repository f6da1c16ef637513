//! Requests of a connection that wait for the device below its pool.
//!
//! A request that would read pages that are not in memory is not executed: the pages are loaded first. Its
//! slots may change meanwhile, and then it waits for other pages. After [`LOADS_MAX`] loads it is executed all the
//! same, and blocks. A flush waits for a sync.

use pagemesh_base::slice::{
    LIST_ENTRIES_MAX, SLICE_IO_BYTES_MAX, SliceError, SliceReply, SliceRequest, TransactionPart,
};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fabric::service::Ticket;
use pagemesh_pmem::{AsyncIo, MapError, Media};
use std::collections::HashMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;

/// Loads of one request, before it blocks.
pub(crate) const LOADS_MAX: u8 = 4;

pub(crate) type SliceResult = Result<SliceReply, SliceError>;

/// A request that waits.
pub(crate) struct WaitingRequest {
    /// The attachment.
    pub number: u32,
    pub step: Step,
}

/// What comes next for a request.
pub(crate) enum Step {
    /// To execute it, after so many loads.
    Execute {
        request: SliceRequest,
        loads: u8,
        hint: TierHint,
    },
    /// To answer.
    Answer(SliceResult),
}

/// The waiting requests of a connection.
pub(crate) struct DeviceRequests {
    io: Box<dyn AsyncIo>,
    waiting: HashMap<u64, (Ticket, WaitingRequest)>,
    last_tag: u64,
    ended: Vec<(u64, Result<(), MapError>)>,
}

impl DeviceRequests {
    /// None for a medium without a device below.
    pub(crate) fn open(media: &impl Media) -> Result<Option<DeviceRequests>, SliceError> {
        let refused = |cause| SliceError::NoSession(format!("no requests to the disk: {cause}"));
        let io = media.async_io().map_err(refused)?;
        Ok(io.map(|io| DeviceRequests {
            io,
            waiting: HashMap::new(),
            last_tag: 0,
            ended: Vec::new(),
        }))
    }

    fn add(&mut self, waiting: WaitingRequest) -> u64 {
        self.last_tag += 1;
        let tag = self.last_tag;
        self.waiting.insert(tag, (Ticket(tag), waiting));
        tag
    }

    /// Starts loads of pages for a request.
    pub(crate) fn load(&mut self, waiting: WaitingRequest, offsets: &[usize]) -> Ticket {
        let tag = self.add(waiting);
        self.io.load(tag, offsets);
        Ticket(tag)
    }

    /// Starts loads of pages for a request, also of those in memory.
    pub(crate) fn reload(&mut self, waiting: WaitingRequest, offsets: &[usize]) -> Ticket {
        let tag = self.add(waiting);
        self.io.reload(tag, offsets);
        Ticket(tag)
    }

    /// Starts a wait for room.
    pub(crate) fn wait_for_room(&mut self, waiting: WaitingRequest) -> Ticket {
        let tag = self.add(waiting);
        self.io.wait_for_room(tag);
        Ticket(tag)
    }

    /// Answers a change once its pages and records are on the device, and so survive this process.
    pub(crate) fn answer_written(&mut self, number: u32, result: SliceResult) -> Ticket {
        let step = Step::Answer(result);
        let tag = self.add(WaitingRequest { number, step });
        self.io.write(tag);
        Ticket(tag)
    }

    /// Answers a change once its pages and records, and all before them, survive power loss.
    pub(crate) fn answer_durable(&mut self, number: u32, result: SliceResult) -> Ticket {
        let step = Step::Answer(result);
        let tag = self.add(WaitingRequest { number, step });
        self.io.write_and_sync(tag);
        Ticket(tag)
    }

    /// Answers a flush once all stores survive power loss.
    pub(crate) fn answer_synced(&mut self, number: u32) -> Ticket {
        let step = Step::Answer(Ok(SliceReply::Done));
        let tag = self.add(WaitingRequest { number, step });
        self.io.sync(tag);
        Ticket(tag)
    }

    /// Keeps the first ticket of a request that waits again.
    pub(crate) fn rename(&mut self, again: Ticket, first: Ticket) {
        if let Some((ticket, _)) = self.waiting.get_mut(&again.0) {
            *ticket = first;
        }
    }

    /// The requests that need not wait any longer.
    pub(crate) fn take_ended(&mut self) -> Vec<(Ticket, Result<(), MapError>, WaitingRequest)> {
        self.io.poll(&mut self.ended);
        let waiting = &mut self.waiting;
        let ended = self.ended.drain(..).filter_map(|(tag, result)| {
            let (ticket, request) = waiting.remove(&tag)?;
            Some((ticket, result, request))
        });
        ended.collect()
    }

    /// Whether requests have ended that no descriptor reports.
    pub(crate) fn has_ended_at_once(&self) -> bool {
        self.io.has_ended_at_once()
    }

    /// Starts the writes and syncs of a batch.
    pub(crate) fn submit(&mut self) {
        self.io.submit();
    }

    pub(crate) fn poll_fds<'a>(&'a self, fds: &mut Vec<BorrowedFd<'a>>) {
        self.io.poll_fds(fds);
    }
}

/// The pages that a request reads. A change reads those that it changes in part.
pub(crate) fn pages_to_read(request: &SliceRequest) -> Vec<Range<u64>> {
    let mut pages = Vec::new();
    match request.without_flush() {
        // Longer ones are refused.
        SliceRequest::Read { offset, len } if *len <= SLICE_IO_BYTES_MAX => {
            pages.push(pages_of(*offset, u64::from(*len)));
        }
        SliceRequest::Checksums { page, count } if *count as usize <= LIST_ENTRIES_MAX => {
            pages.push(page.0..page.0.saturating_add(u64::from(*count)));
        }
        SliceRequest::Write { offset, data, .. } => {
            pages.extend(partial_pages(*offset, data.len() as u64));
        }
        SliceRequest::Transact { parts, .. } => {
            for part in parts {
                if let TransactionPart::Write { offset, data } = part {
                    pages.extend(partial_pages(*offset, data.len() as u64));
                }
            }
        }
        _ => {}
    }
    pages
}

/// The pages of a range of bytes.
pub(crate) fn pages_of(offset: u64, len: u64) -> Range<u64> {
    const PAGE: u64 = PAGE_BYTES as u64;
    offset / PAGE..offset.saturating_add(len).div_ceil(PAGE)
}

/// The first and the last page of a range, if it covers a part of them.
fn partial_pages(offset: u64, len: u64) -> Vec<Range<u64>> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let end = offset.saturating_add(len);
    let mut partial = Vec::new();
    if !offset.is_multiple_of(PAGE) {
        partial.push(offset / PAGE..offset / PAGE + 1);
    }
    let last = end / PAGE;
    if !end.is_multiple_of(PAGE) && partial.first().is_none_or(|first| first.start != last) {
        partial.push(last..last + 1);
    }
    partial
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page_range(page: u64) -> Range<u64> {
        page..page + 1
    }

    #[test]
    fn change_reads_the_pages_that_it_covers_in_part() {
        assert_eq!(partial_pages(4096, 8192), []);
        assert_eq!(partial_pages(4097, 10), vec![page_range(1)]);
        assert_eq!(partial_pages(4096, 10), vec![page_range(1)]);
        assert_eq!(partial_pages(5000, 8192), [1..2, 3..4]);
        assert_eq!(pages_of(4095, 2), 0..2);
    }
}
