//! Requests arriving: many with one system call into a shared buffer, and the
//! payload of a long write straight into a buffer of its own.
//!
//! It yields requests in the order of their arrival, each with its whole
//! payload, and holds at most one unfinished request besides the shared
//! buffer. It never looks at what a request means, only at how long it is.

use crate::limits::{
    COPIED_BYTES_MAX, NARROW_BYTES, NARROW_REQUESTS, PAYLOAD_BYTES_MAX, RECEIVE_BYTES,
    SKIPPED_BYTES_MAX,
};
use crate::negotiation::Violation;
use crate::plan::Failure;
use crate::wire::{Errno, HEADER_BYTES, Header, command};
use bytes::Bytes;
use rustix::buffer::spare_capacity;
use rustix::fd::BorrowedFd;
use rustix::net::{RecvFlags, recv};

/// A whole request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Whole(Header, Bytes),
    /// Its payload was thrown away.
    Refused(Header, Failure),
}

/// What an attempt to receive gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    /// Bytes; `more` if there were as many as were asked for.
    Some { more: bool },
    /// None for now.
    Empty,
    /// None ever again.
    End,
}

struct Long {
    header: Header,
    data: Vec<u8>,
}

impl Long {
    fn is_whole(&self) -> bool {
        self.data.len() >= self.header.len as usize
    }
}

/// See the module.
pub(crate) struct Receiver {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    long: Option<Long>,
    /// A refused write, and the bytes of it still to be thrown away.
    skipping: Option<(Header, usize, Failure)>,
    /// Requests until long writes are taken to be over.
    narrow: u32,
}

impl Receiver {
    /// Starts with what came behind the handshake: at most `RECEIVE_BYTES`.
    pub(crate) fn new(first: &[u8]) -> Self {
        let mut buffer = vec![0; RECEIVE_BYTES].into_boxed_slice();
        buffer[..first.len()].copy_from_slice(first);
        Self {
            buffer,
            start: 0,
            end: first.len(),
            long: None,
            skipping: None,
            narrow: 0,
        }
    }

    /// Whether a request has begun and not ended.
    pub(crate) fn is_amid(&self) -> bool {
        self.long.is_some() || self.skipping.is_some() || self.start < self.end
    }

    /// Receives once, without blocking.
    pub(crate) fn fill(&mut self, socket: BorrowedFd<'_>) -> Result<Filled, rustix::io::Errno> {
        let received = match &mut self.long {
            // A finished one is taken before more is received.
            Some(long) if long.is_whole() => return Ok(Filled::Some { more: true }),
            Some(long) => {
                let asked = long.data.capacity() - long.data.len();
                receive(|| recv(socket, spare_capacity(&mut long.data), RecvFlags::DONTWAIT))?
                    .map(|count| (count, asked))
            }
            None => {
                self.compact();
                let room = &mut self.buffer[self.end..];
                let asked = if self.narrow > 0 {
                    room.len().min(NARROW_BYTES)
                } else {
                    room.len()
                };
                let received = receive(|| recv(socket, &mut room[..asked], RecvFlags::DONTWAIT))?;
                self.end += received.unwrap_or(0);
                received.map(|count| (count, asked))
            }
        };
        Ok(match received {
            None => Filled::Empty,
            Some((0, _)) => Filled::End,
            Some((count, asked)) => Filled::Some {
                more: count >= asked,
            },
        })
    }

    /// Makes room for a whole short request.
    fn compact(&mut self) {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.buffer.len() - self.end < HEADER_BYTES + COPIED_BYTES_MAX {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
    }

    /// The next whole request, if there is one.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, Violation> {
        if let Some(frame) = self.finish() {
            return Ok(Some(frame));
        }
        if self.long.is_some() || self.skipping.is_some() {
            return Ok(None);
        }
        let available = &self.buffer[self.start..self.end];
        let Some((head, rest)) = available.split_first_chunk() else {
            return Ok(None);
        };
        let header = Header::decode(head).ok_or(Violation::RequestMagic)?;
        if header.command != command::WRITE {
            self.start += HEADER_BYTES;
            self.narrow = self.narrow.saturating_sub(1);
            return Ok(Some(Frame::Whole(header, Bytes::new())));
        }
        let len = header.len as usize;
        if header.len > SKIPPED_BYTES_MAX {
            return Err(Violation::WriteLength(header.len));
        }
        if header.len > PAYLOAD_BYTES_MAX {
            let why = format!("a write of {len} bytes; at most {PAYLOAD_BYTES_MAX} are taken");
            return Ok(self.skip(header, Failure::new(Errno::Invalid, why)));
        }
        if let Some(payload) = rest.get(..len) {
            let payload = Bytes::copy_from_slice(payload);
            self.start += HEADER_BYTES + len;
            self.narrow = self.narrow.saturating_sub(1);
            return Ok(Some(Frame::Whole(header, payload)));
        }
        if len > COPIED_BYTES_MAX {
            return Ok(self.begin_long(header));
        }
        Ok(None)
    }

    fn begin_long(&mut self, header: Header) -> Option<Frame> {
        let mut data = Vec::new();
        let len = header.len as usize;
        let reserved = data.try_reserve_exact(len);
        if reserved.is_err() || data.capacity() - len > self.buffer.len() {
            let why = "no memory for the payload; send it again in smaller pieces";
            return self.skip(header, Failure::new(Errno::Memory, why));
        }
        data.extend_from_slice(&self.buffer[self.start + HEADER_BYTES..self.end]);
        (self.start, self.end) = (0, 0);
        self.long = Some(Long { header, data });
        self.narrow = NARROW_REQUESTS;
        None
    }

    fn skip(&mut self, header: Header, failure: Failure) -> Option<Frame> {
        self.start += HEADER_BYTES;
        self.skipping = Some((header, header.len as usize, failure));
        self.finish()
    }

    /// Ends the unfinished request, if all of it is there.
    fn finish(&mut self) -> Option<Frame> {
        if let Some((_, left, _)) = &mut self.skipping {
            let skipped = (self.end - self.start).min(*left);
            self.start += skipped;
            *left -= skipped;
        }
        if let Some((header, _, failure)) = self.skipping.take_if(|(_, left, _)| *left == 0) {
            return Some(Frame::Refused(header, failure));
        }
        let Long { header, mut data } = self.long.take_if(|long| long.is_whole())?;
        // The vector may have had a little more room than was asked for.
        let surplus = data.split_off(header.len as usize);
        self.buffer[..surplus.len()].copy_from_slice(&surplus);
        (self.start, self.end) = (0, surplus.len());
        Some(Frame::Whole(header, Bytes::from(data)))
    }
}

/// Receives, again if interrupted; none if nothing is there.
fn receive(
    mut attempt: impl FnMut() -> Result<(usize, usize), rustix::io::Errno>,
) -> Result<Option<usize>, rustix::io::Errno> {
    loop {
        return match attempt() {
            Ok((count, _)) => Ok(Some(count)),
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::AGAIN) => Ok(None),
            Err(errno) => Err(errno),
        };
    }
}
