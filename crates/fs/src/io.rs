//! A channel of a space for those who wait: one request, or several at once.

use crate::error::{FsError, Result};
use crate::format::Page;
use pagemesh_base::space::{Channel, Completion, Reply, Request, Space, SpaceError, Token};
use pagemesh_base::units::PAGE_BYTES;
use std::os::fd::RawFd;
use std::time::Instant;

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
}

impl Port {
    pub(crate) fn open(space: &dyn Space, wait: Wait) -> Result<Port> {
        Ok(Port {
            channel: space.open()?,
            wait,
            next: 0,
            done: Vec::new(),
            descriptors: Vec::new(),
        })
    }

    /// Does all requests, at the same time; the first error counts, once all
    /// have ended.
    pub(crate) fn call_all(
        &mut self,
        requests: impl IntoIterator<Item = Request>,
    ) -> std::result::Result<Vec<Reply>, SpaceError> {
        let first = self.next;
        for request in requests {
            self.channel.submit(Token(self.next), request);
            self.next += 1;
        }
        self.done.clear();
        let asked = (self.next - first) as usize;
        loop {
            self.channel.reap(&mut self.done);
            if self.done.len() == asked {
                break;
            }
            self.descriptors.clear();
            self.channel.wait_on(&mut self.descriptors);
            (self.wait)(&self.descriptors, self.channel.deadline());
        }
        self.done.sort_unstable_by_key(|done| done.token.0);
        self.done.drain(..).map(|done| done.result).collect()
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
}

fn strange(reply: &Reply) -> FsError {
    let what = match reply {
        Reply::Done => "nothing",
        Reply::Data(_) => "bytes of another length",
        Reply::Extents(_) => "extents",
    };
    FsError::Space(SpaceError::Unavailable(format!(
        "the volume answered a read with {what}"
    )))
}
