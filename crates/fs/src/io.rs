//! A channel of a space: for those who wait for one request, or several at once, and
//! for writes that go on while others begin.

use crate::board::DataGuard;
use crate::error::{FsError, Result};
use crate::format::Page;
use crate::ports::Borrowed;
use pagemesh_base::space::{Channel, Completion, Reply, Request, Space, SpaceError, Token};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Sleeps until a descriptor is readable or the time has come. Fronts bring it,
/// since naming a descriptor by number is not safe.
pub type Wait = fn(&[RawFd], Option<Instant>);

/// One thread's way into the space. Waits for what it asks.
pub struct Port {
    channel: Box<dyn Channel>,
    wait: Wait,
    next: u64,
    done: Vec<Completion>,
    descriptors: Vec<RawFd>,
    /// Losses of the volume when a flush failed last.
    losses: u64,
}

impl Port {
    pub(crate) fn open(space: &dyn Space, wait: Wait) -> Result<Port> {
        Ok(Port {
            channel: space.open()?,
            wait,
            next: 0,
            done: Vec::new(),
            descriptors: Vec::new(),
            losses: 0,
        })
    }

    /// The same, once it is known that the space has a channel.
    pub(crate) fn open_ready(space: &dyn Space, wait: Wait) -> Result<Port> {
        let mut port = Port::open(space, wait)?;
        let (offset, len) = (0, PAGE_BYTES as u64);
        port.call(Request::Extents { offset, len })?;
        Ok(port)
    }

    /// Does all requests, at the same time; the first error counts, once all
    /// have ended.
    pub(crate) fn call_all(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
    ) -> std::result::Result<Vec<Reply>, SpaceError> {
        let first = self.next;
        requests
            .into_iter()
            .for_each(|request| self.submit(request));
        self.done.clear();
        let asked = (self.next - first) as usize;
        loop {
            self.channel.reap(&mut self.done);
            if self.done.len() == asked {
                break;
            }
            self.sleep(None);
        }
        self.done.sort_unstable_by_key(|done| done.token.0);
        self.done.drain(..).map(|done| done.result).collect()
    }

    fn submit(&mut self, request: Request) {
        self.channel.submit(Token(self.next), request);
        self.next += 1;
    }

    /// Sleeps until there may be something to reap, or another descriptor is readable.
    fn sleep(&mut self, other: Option<RawFd>) {
        self.descriptors.clear();
        self.descriptors.extend(other);
        self.channel.wait_on(&mut self.descriptors);
        (self.wait)(&self.descriptors, self.channel.deadline());
    }

    /// Lets so much time pass, or less if something happens meanwhile.
    pub(crate) fn pause(&mut self, by: Duration) {
        let end = Instant::now() + by;
        let mut descriptors = std::mem::take(&mut self.descriptors);
        descriptors.clear();
        let next = self.tend(&mut descriptors);
        (self.wait)(&descriptors, Some(next.map_or(end, |next| next.min(end))));
        self.descriptors = descriptors;
    }

    /// Lets the channel do what it must while nobody asks for anything, and says
    /// what it waits for.
    pub(crate) fn tend(&mut self, into: &mut Vec<RawFd>) -> Option<Instant> {
        self.channel.reap(&mut self.done);
        self.channel.wait_on(into);
        self.channel.deadline()
    }

    pub(crate) fn call(&mut self, request: Request) -> std::result::Result<Reply, SpaceError> {
        let mut replies = self.call_all([request])?;
        Ok(replies.pop().unwrap_or(Reply::Done))
    }

    /// Makes every completed change durable. A channel tells of a loss once, by a flush;
    /// who asks here looks at those of the space.
    pub(crate) fn flush(&mut self, space: &dyn Space) -> std::result::Result<(), SpaceError> {
        let flushed = self.call(Request::Flush);
        let losses = space.losses();
        match flushed {
            Err(_) if self.losses != losses => {
                self.losses = losses;
                self.call(Request::Flush).map(drop)
            }
            flushed => flushed.map(drop),
        }
    }

    pub(crate) fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>> {
        match self.call(Request::Read { offset, len })? {
            Reply::Data(bytes) if bytes.len() == len as usize => Ok(bytes),
            other => Err(strange(&other)),
        }
    }

    pub(crate) fn read_page(&mut self, page: u64) -> Result<Box<Page>> {
        let bytes = self.read(page * PAGE_BYTES as u64, PAGE_BYTES as u32)?;
        let page = bytes.into_boxed_slice().try_into();
        Ok(page.expect("as long as a page"))
    }

    /// Runs of a range of pages that hold data.
    pub(crate) fn mapped(
        &mut self,
        pages: std::ops::Range<u64>,
        mut visit: impl FnMut(std::ops::Range<u64>),
    ) -> Result<()> {
        const PAGE: u64 = PAGE_BYTES as u64;
        let mut at = pages.start * PAGE;
        let end = pages.end * PAGE;
        while at < end {
            let request = Request::Extents {
                offset: at,
                len: end - at,
            };
            let reply = self.call(request)?;
            let Reply::Extents(extents) = reply else {
                return Err(strange(&reply));
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

    /// How many of a range of pages hold data.
    pub(crate) fn count_mapped(&mut self, pages: std::ops::Range<u64>) -> Result<u64> {
        let mut count = 0;
        self.mapped(pages, |run| count += run.end - run.start)?;
        Ok(count)
    }
}

/// A write within a file without holes, whose size and pages stay as they are meanwhile.
pub(crate) struct Overwrite {
    pub(crate) held: DataGuard,
    pub(crate) requests: Vec<Request>,
    pub(crate) bytes: usize,
}

/// Writes under way at the same time. Dropped, it waits for their ends.
pub struct Pipe<'f> {
    port: Borrowed<'f>,
    /// By the first token of each.
    begun: BTreeMap<u64, Begun>,
}

struct Begun {
    name: u64,
    /// Requests that have not ended.
    missing: usize,
    /// Bytes that are written, if nothing fails.
    result: std::result::Result<usize, SpaceError>,
    _held: DataGuard,
}

impl<'f> Pipe<'f> {
    pub(crate) fn new(port: Borrowed<'f>) -> Pipe<'f> {
        Pipe {
            port,
            begun: BTreeMap::new(),
        }
    }

    pub(crate) fn begin(&mut self, name: u64, write: Overwrite) {
        let begun = Begun {
            name,
            missing: write.requests.len(),
            result: Ok(write.bytes),
            _held: write.held,
        };
        self.begun.insert(self.port.next, begun);
        for request in write.requests {
            self.port.submit(request);
        }
    }

    /// Makes progress without blocking, and tells what has ended, by name, and how many
    /// bytes are written.
    pub fn reap(&mut self, mut tell: impl FnMut(u64, Result<usize>)) {
        let port = &mut *self.port;
        port.channel.reap(&mut port.done);
        for done in port.done.drain(..) {
            let begun = self.begun.range_mut(..=done.token.0).next_back();
            let (&first, begun) = begun.expect("what has begun is asked for alone");
            begun.missing -= 1;
            if let (Ok(_), Err(cause)) = (&begun.result, done.result) {
                begun.result = Err(cause);
            }
            if begun.missing == 0
                && let Some(ended) = self.begun.remove(&first)
            {
                tell(ended.name, ended.result.map_err(FsError::Space));
            }
        }
    }

    /// Writes under way.
    #[must_use]
    pub fn len(&self) -> usize {
        self.begun.len()
    }

    /// Whether no write is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.begun.is_empty()
    }

    /// Sleeps until there may be something to reap, or another descriptor is readable.
    pub fn wait(&mut self, other: Option<RawFd>) {
        self.port.sleep(other);
    }
}

impl Drop for Pipe<'_> {
    fn drop(&mut self) {
        while !self.is_empty() {
            self.reap(|_, _| {});
            if !self.is_empty() {
                self.wait(None);
            }
        }
    }
}

pub(crate) fn strange(reply: &Reply) -> FsError {
    let what = match reply {
        Reply::Done => "nothing",
        Reply::Data(_) => "bytes of another length",
        Reply::Extents(_) => "extents",
    };
    FsError::Space(SpaceError::Unavailable(format!(
        "the volume answered a read with {what}"
    )))
}
