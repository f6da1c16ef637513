//! I/O channels of a space: synchronous calls of one or several requests.

use crate::error::{FsError, Result};
use crate::format::{PAGE, Page};
use pagemesh_base::space::{Channel, Completion, Reply, Request, Space, SpaceError, Token};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Sleeps until a descriptor is readable or the time has come. Fronts supply it, because polling
/// descriptors by number needs unsafe code.
pub type Wait = fn(&[RawFd], Option<Instant>);

/// One thread's access to the space. Its calls wait for their replies.
pub struct IoChannel {
    pub(super) channel: Box<dyn Channel>,
    wait_fn: Wait,
    pub(super) next_token: u64,
    pub(super) completions: Vec<Completion>,
    descriptors: Vec<RawFd>,
    /// Losses of the volume at the last failed flush.
    known_losses: u64,
}

impl IoChannel {
    pub(crate) fn open(space: &dyn Space, wait: Wait) -> Result<IoChannel> {
        Ok(IoChannel {
            channel: space.open()?,
            wait_fn: wait,
            next_token: 0,
            completions: Vec::new(),
            descriptors: Vec::new(),
            known_losses: 0,
        })
    }

    /// As [`IoChannel::open`], and checks that the space gave it a working channel.
    pub(crate) fn open_ready(space: &dyn Space, wait: Wait) -> Result<IoChannel> {
        let mut channel = IoChannel::open(space, wait)?;
        let (offset, len) = (0, PAGE_BYTES as u64);
        channel.call(Request::Extents { offset, len })?;
        Ok(channel)
    }

    /// Runs all requests concurrently. Waits for all of them, and returns the first error.
    pub(crate) fn call_all(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
    ) -> std::result::Result<Vec<Reply>, SpaceError> {
        self.call_all_hinted(requests, TierHint::None)
    }

    /// As [`IoChannel::call_all`], with a hint about the tier of the pages.
    pub(crate) fn call_all_hinted(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
        hint: TierHint,
    ) -> std::result::Result<Vec<Reply>, SpaceError> {
        let first = self.next_token;
        requests
            .into_iter()
            .for_each(|request| self.submit_hinted(request, hint));
        self.completions.clear();
        let asked = (self.next_token - first) as usize;
        loop {
            self.channel.reap(&mut self.completions);
            if self.completions.len() == asked {
                break;
            }
            self.sleep(None);
        }
        self.completions.sort_unstable_by_key(|done| done.token.0);
        self.completions.drain(..).map(|done| done.result).collect()
    }

    pub(crate) fn submit_hinted(&mut self, request: Request, hint: TierHint) {
        let token = Token(self.next_token);
        self.channel.submit_hinted(token, request, hint);
        self.next_token += 1;
    }

    /// Sleeps until there may be something to reap, or another descriptor is readable.
    pub(crate) fn sleep(&mut self, other: Option<RawFd>) {
        self.descriptors.clear();
        self.descriptors.extend(other);
        self.channel.poll_fds(&mut self.descriptors);
        (self.wait_fn)(&self.descriptors, self.channel.deadline());
    }

    /// Sleeps for a duration, or until the channel has something to do.
    pub(crate) fn wait_for(&mut self, by: Duration) {
        let end = Instant::now() + by;
        let mut descriptors = std::mem::take(&mut self.descriptors);
        descriptors.clear();
        let next = self.poll(&mut descriptors);
        (self.wait_fn)(&descriptors, Some(next.map_or(end, |next| next.min(end))));
        self.descriptors = descriptors;
    }

    /// Lets the channel make progress without a request. Returns the descriptors and the deadline
    /// that it waits for.
    pub(crate) fn poll(&mut self, into: &mut Vec<RawFd>) -> Option<Instant> {
        self.channel.reap(&mut self.completions);
        self.channel.poll_fds(into);
        self.channel.deadline()
    }

    pub(crate) fn call(&mut self, request: Request) -> std::result::Result<Reply, SpaceError> {
        self.call_hinted(request, TierHint::None)
    }

    /// As [`IoChannel::call`], with a hint about the tier of the pages.
    pub(crate) fn call_hinted(
        &mut self,
        request: Request,
        hint: TierHint,
    ) -> std::result::Result<Reply, SpaceError> {
        let mut replies = self.call_all_hinted([request], hint)?;
        Ok(replies.pop().unwrap_or(Reply::Done))
    }

    /// Makes every completed change durable. A channel reports a loss once, by an error of a flush.
    /// This function retries after such an error, because callers check the losses of the space
    /// themselves.
    pub(crate) fn flush(&mut self, space: &dyn Space) -> std::result::Result<(), SpaceError> {
        let flushed = self.call(Request::Flush);
        let losses = space.lost_writes();
        match flushed {
            Err(_) if self.known_losses != losses => {
                self.known_losses = losses;
                self.call(Request::Flush).map(drop)
            }
            flushed => flushed.map(drop),
        }
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>> {
        self.read_hinted(offset, len, TierHint::None)
    }

    pub(crate) fn read_hinted(&mut self, offset: u64, len: u32, hint: TierHint) -> Result<Vec<u8>> {
        data_of(self.call_hinted(Request::Read { offset, len }, hint)?, len)
    }

    /// Reads several ranges concurrently: first byte and length of each.
    pub(crate) fn read_all_hinted(
        &mut self,
        ranges: impl IntoIterator<Item = (u64, u32)> + Clone,
        hint: TierHint,
    ) -> Result<Vec<Vec<u8>>> {
        let read = |(offset, len)| Request::Read { offset, len };
        let replies = self.call_all_hinted(ranges.clone().into_iter().map(read), hint)?;
        let pairs = replies.into_iter().zip(ranges);
        pairs.map(|(reply, (_, len))| data_of(reply, len)).collect()
    }

    pub(crate) fn read_page(&mut self, page: u64) -> Result<Box<Page>> {
        let bytes = self.read(page * PAGE_BYTES as u64, PAGE_BYTES as u32)?;
        let page = bytes.into_boxed_slice().try_into();
        Ok(page.expect("as long as a page"))
    }

    /// Visits the runs of a range of pages that hold data.
    pub(crate) fn for_each_mapped_run(
        &mut self,
        pages: std::ops::Range<u64>,
        mut visit: impl FnMut(std::ops::Range<u64>),
    ) -> Result<()> {
        let mut at = pages.start * PAGE;
        let end = pages.end * PAGE;
        while at < end {
            let request = Request::Extents {
                offset: at,
                len: end - at,
            };
            let reply = self.call(request)?;
            let Reply::Extents(extents) = reply else {
                return Err(unexpected_reply(&reply));
            };
            for extent in extents {
                let next = at + extent.len;
                if extent.mapped {
                    visit(at / PAGE..next.div_ceil(PAGE));
                }
                at = next;
            }
        }
        Ok(())
    }

    /// Number of pages of a range that hold data.
    pub(crate) fn count_mapped_pages(&mut self, pages: std::ops::Range<u64>) -> Result<u64> {
        let mut count = 0;
        self.for_each_mapped_run(pages, |run| count += run.end - run.start)?;
        Ok(count)
    }
}

/// The bytes of the reply to a read.
fn data_of(reply: Reply, len: u32) -> Result<Vec<u8>> {
    match reply {
        Reply::Data(bytes) if bytes.len() == len as usize => Ok(bytes),
        other => Err(unexpected_reply(&other)),
    }
}

pub(crate) fn unexpected_reply(reply: &Reply) -> FsError {
    let what = match reply {
        Reply::Done => "nothing",
        Reply::Data(_) => "bytes of another length",
        Reply::Extents(_) => "extents",
    };
    FsError::Space(SpaceError::Unavailable(format!(
        "the volume answered a read with {what}"
    )))
}
