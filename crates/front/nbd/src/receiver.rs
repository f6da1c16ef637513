//! Receives requests: many with one system call into a shared buffer, and the payload of a long
//! write straight into a buffer of its own.
//!
//! It yields requests in the order of their arrival, each with its whole payload, and holds at most
//! one unfinished request besides the shared buffer. It looks only at the length of a request, not
//! at its meaning.

use crate::limits::{
    COPIED_BYTES_MAX, PAYLOAD_BYTES_MAX, RECEIVE_BYTES, SHORT_RECEIVE_BYTES,
    SHORT_RECEIVE_REQUESTS, SKIPPED_BYTES_MAX,
};
use crate::negotiation::ProtocolViolation;
use crate::requests::Failure;
use crate::wire::{Errno, HEADER_BYTES, Header, command};
use bytes::Bytes;
use rustix::buffer::spare_capacity;
use rustix::fd::BorrowedFd;
use rustix::net::{RecvFlags, recv};

/// A whole request.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestFrame {
    Whole(Header, Bytes),
    /// A request with a discarded payload.
    Refused(Header, Failure),
}

/// The result of an attempt to receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveOutcome {
    /// Bytes; `more` if as many came as the call requested.
    Some { more: bool },
    /// None for now.
    Empty,
    /// The end of the stream.
    End,
}

struct LongWrite {
    header: Header,
    data: Vec<u8>,
}

impl LongWrite {
    fn is_whole(&self) -> bool {
        self.data.len() >= self.header.len as usize
    }
}

/// See the module.
pub struct Receiver {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    long_write: Option<LongWrite>,
    /// A refused write, and the number of its bytes still to discard.
    refused_write: Option<(Header, usize, Failure)>,
    /// Requests until long writes count as over.
    short_receives_left: u32,
}

impl Receiver {
    /// Starts with the bytes after the handshake: at most `RECEIVE_BYTES`.
    pub fn new(first: &[u8]) -> Self {
        let mut buffer = vec![0; RECEIVE_BYTES].into_boxed_slice();
        buffer[..first.len()].copy_from_slice(first);
        Self {
            buffer,
            start: 0,
            end: first.len(),
            long_write: None,
            refused_write: None,
            short_receives_left: 0,
        }
    }

    /// Whether a request has begun and not ended.
    pub fn is_in_progress(&self) -> bool {
        self.long_write.is_some() || self.refused_write.is_some() || self.start < self.end
    }

    /// Receives once, without blocking.
    pub fn receive_once(
        &mut self,
        socket: BorrowedFd<'_>,
    ) -> Result<ReceiveOutcome, rustix::io::Errno> {
        let received = match &mut self.long_write {
            // A finished write is taken before more is received.
            Some(long) if long.is_whole() => return Ok(ReceiveOutcome::Some { more: true }),
            Some(long) => {
                let asked = long.data.capacity() - long.data.len();
                receive(|| recv(socket, spare_capacity(&mut long.data), RecvFlags::DONTWAIT))?
                    .map(|count| (count, asked))
            }
            None => {
                self.compact();
                let room = &mut self.buffer[self.end..];
                let asked = if self.short_receives_left > 0 {
                    room.len().min(SHORT_RECEIVE_BYTES)
                } else {
                    room.len()
                };
                let received = receive(|| recv(socket, &mut room[..asked], RecvFlags::DONTWAIT))?;
                self.end += received.unwrap_or(0);
                received.map(|count| (count, asked))
            }
        };
        Ok(match received {
            None => ReceiveOutcome::Empty,
            Some((0, _)) => ReceiveOutcome::End,
            Some((count, asked)) => ReceiveOutcome::Some {
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
    pub fn next_frame(&mut self) -> Result<Option<RequestFrame>, ProtocolViolation> {
        if let Some(frame) = self.finish_write() {
            return Ok(Some(frame));
        }
        if self.long_write.is_some() || self.refused_write.is_some() {
            return Ok(None);
        }
        let available = &self.buffer[self.start..self.end];
        let Some((head, rest)) = available.split_first_chunk() else {
            return Ok(None);
        };
        let header = Header::decode(head).ok_or(ProtocolViolation::RequestMagic)?;
        if header.command != command::WRITE {
            self.start += HEADER_BYTES;
            self.short_receives_left = self.short_receives_left.saturating_sub(1);
            return Ok(Some(RequestFrame::Whole(header, Bytes::new())));
        }
        let len = header.len as usize;
        if header.len > SKIPPED_BYTES_MAX {
            return Err(ProtocolViolation::WriteLength(header.len));
        }
        if header.len > PAYLOAD_BYTES_MAX {
            let why = format!("a write of {len} bytes; at most {PAYLOAD_BYTES_MAX} are allowed");
            return Ok(self.skip(header, Failure::new(Errno::Invalid, why)));
        }
        if let Some(payload) = rest.get(..len) {
            let payload = Bytes::copy_from_slice(payload);
            self.start += HEADER_BYTES + len;
            self.short_receives_left = self.short_receives_left.saturating_sub(1);
            return Ok(Some(RequestFrame::Whole(header, payload)));
        }
        if len > COPIED_BYTES_MAX {
            return Ok(self.begin_long(header));
        }
        Ok(None)
    }

    fn begin_long(&mut self, header: Header) -> Option<RequestFrame> {
        let mut data = Vec::new();
        let len = header.len as usize;
        let reserved = data.try_reserve_exact(len);
        if reserved.is_err() || data.capacity() - len > self.buffer.len() {
            let why = "no memory for the payload; send it again in smaller pieces";
            return self.skip(header, Failure::new(Errno::Memory, why));
        }
        data.extend_from_slice(&self.buffer[self.start + HEADER_BYTES..self.end]);
        (self.start, self.end) = (0, 0);
        self.long_write = Some(LongWrite { header, data });
        self.short_receives_left = SHORT_RECEIVE_REQUESTS;
        None
    }

    fn skip(&mut self, header: Header, failure: Failure) -> Option<RequestFrame> {
        self.start += HEADER_BYTES;
        self.refused_write = Some((header, header.len as usize, failure));
        self.finish_write()
    }

    /// Ends the unfinished request, if all of it has arrived.
    fn finish_write(&mut self) -> Option<RequestFrame> {
        if let Some((_, left, _)) = &mut self.refused_write {
            let skipped = (self.end - self.start).min(*left);
            self.start += skipped;
            *left -= skipped;
        }
        if let Some((header, _, failure)) = self.refused_write.take_if(|(_, left, _)| *left == 0) {
            return Some(RequestFrame::Refused(header, failure));
        }
        let LongWrite { header, mut data } = self.long_write.take_if(|long| long.is_whole())?;
        // The vector may have had a little more room than requested.
        let surplus = data.split_off(header.len as usize);
        self.buffer[..surplus.len()].copy_from_slice(&surplus);
        (self.start, self.end) = (0, surplus.len());
        Some(RequestFrame::Whole(header, Bytes::from(data)))
    }
}

/// Receives, again if interrupted; none if no bytes are there.
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
