//! Splits the bytes of a connection into messages.
//!
//! Invariants: buffers grow only for a length that a checked header announces, within the limit of
//! its kind. A body returned by [`ReceiveBuffer::share`] is not copied and never changes while it
//! is held; if it is held beyond its batch, the next batch gets another buffer.
//!
//! Consecutive bodies of a batch start at a cache line. With `aligned`, the first one and every
//! large one start at a page.

use crate::limits::{LARGE_BODY_BYTES, RECEIVE_BYTES};
use crate::message::{Direction, HEADER_BYTES, Header, MalformedMessage};
use crate::wire::{ReceiveResult, Wire};
use bytes::Bytes;
use pagemesh_base::units::PAGE_BYTES;
use std::io;
use std::ops::Range;

/// Bytes that were received and not taken yet.
pub struct ReceiveBuffer {
    direction: Direction,
    aligned: bool,
    buffer: Buffer,
    /// Where the buffer's content starts, so that bodies are aligned.
    start: usize,
    /// Bytes before this offset were taken.
    taken_len: usize,
    large: Option<LargeBody>,
}

enum Buffer {
    Filling(Vec<u8>),
    Shared(Bytes),
}

/// A body that arrives in a buffer of its own.
struct LargeBody {
    header: Header,
    bytes: Vec<u8>,
    start: usize,
}

impl LargeBody {
    fn end(&self) -> usize {
        self.start + self.header.body_len as usize
    }
}

/// The location of a body; valid until the next [`ReceiveBuffer::receive`].
pub enum Body {
    InBuffer(Range<usize>),
    Owned { bytes: Vec<u8>, start: usize },
}

/// A buffer for `len` bytes, and the offset at which they start so that the byte `lead` later is
/// page-aligned.
fn aligned_buffer(len: usize, lead: usize, aligned: bool) -> (Vec<u8>, usize) {
    if !aligned {
        return (Vec::with_capacity(len), 0);
    }
    let mut bytes: Vec<u8> = Vec::with_capacity(len + PAGE_BYTES);
    let first = bytes.as_ptr().addr() + lead;
    let start = first.next_multiple_of(PAGE_BYTES) - first;
    bytes.resize(start, 0);
    (bytes, start)
}

impl ReceiveBuffer {
    /// Receives messages of this direction. With `aligned`, bodies start at pages.
    pub fn new(way: Direction, aligned: bool) -> ReceiveBuffer {
        ReceiveBuffer {
            direction: way,
            aligned,
            buffer: Buffer::Filling(Vec::new()),
            start: 0,
            taken_len: 0,
            large: None,
        }
    }

    /// Receives once.
    pub fn receive(&mut self, stream: &impl Wire) -> io::Result<ReceiveResult> {
        let Some(large) = &mut self.large else {
            return stream.receive(self.refill());
        };
        let end = large.end();
        if large.bytes.len() >= end {
            return Ok(ReceiveResult::Bytes { drained: false });
        }
        let received = stream.receive(&mut large.bytes)?;
        // The allocator may have given a larger buffer than requested.
        if large.bytes.len() > end {
            let behind = large.bytes.split_off(end);
            self.refill().extend_from_slice(&behind);
        }
        Ok(received)
    }

    /// Whether a large body is incomplete: the rest of it has probably arrived already.
    pub(crate) fn is_within_large(&self) -> bool {
        self.large.is_some()
    }

    /// The buffer, with the bytes not taken moved to its start, and room after them.
    fn refill(&mut self) -> &mut Vec<u8> {
        let buffer = std::mem::replace(&mut self.buffer, Buffer::Filling(Vec::new()));
        let old = match buffer {
            Buffer::Filling(bytes) => Ok(bytes),
            Buffer::Shared(bytes) => bytes.try_into_mut().map(Vec::from),
        };
        let bytes = match old {
            Ok(mut bytes) if bytes.capacity() > 0 => {
                let left = bytes.len() - self.taken_len;
                bytes.copy_within(self.taken_len.., self.start);
                bytes.truncate(self.start + left);
                bytes
            }
            old => {
                let left = old
                    .as_ref()
                    .err()
                    .map_or(&[][..], |held| &held[self.taken_len..]);
                let (mut bytes, start) = aligned_buffer(RECEIVE_BYTES, HEADER_BYTES, self.aligned);
                bytes.extend_from_slice(left);
                self.start = start;
                bytes
            }
        };
        self.taken_len = self.start;
        self.buffer = Buffer::Filling(bytes);
        match &mut self.buffer {
            Buffer::Filling(bytes) => bytes,
            Buffer::Shared(_) => unreachable!("it was just set"),
        }
    }

    fn bytes(&self) -> &[u8] {
        match &self.buffer {
            Buffer::Filling(bytes) => bytes,
            Buffer::Shared(bytes) => bytes,
        }
    }

    /// The next message, if it has arrived in full and undamaged.
    pub fn next_message(&mut self) -> Result<Option<(Header, Body)>, MalformedMessage> {
        if let Some(large) = self.large.take_if(|large| large.bytes.len() >= large.end()) {
            let LargeBody {
                header,
                bytes,
                start,
            } = large;
            header.check_body(&bytes[start..])?;
            return Ok(Some((header, Body::Owned { bytes, start })));
        }
        let rest = &self.bytes()[self.taken_len..];
        let Some((first, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        if self.large.is_some() {
            return Ok(None);
        }
        let header = Header::decode(first, self.direction)?;
        let len = header.body_len as usize;
        if let Some(body) = rest.get(..len) {
            header.check_body(body)?;
            let start = self.taken_len + HEADER_BYTES;
            self.taken_len = start + len;
            return Ok(Some((header, Body::InBuffer(start..start + len))));
        }
        if len >= LARGE_BODY_BYTES {
            let (mut bytes, start) = aligned_buffer(len, 0, self.aligned);
            bytes.extend_from_slice(rest);
            self.taken_len = self.bytes().len();
            self.large = Some(LargeBody {
                header,
                bytes,
                start,
            });
        }
        Ok(None)
    }

    /// A body, without copying it.
    pub fn share(&mut self, body: Body) -> Bytes {
        match body {
            Body::InBuffer(range) if range.is_empty() => Bytes::new(),
            Body::Owned { bytes, start } => Bytes::from(bytes).slice(start..),
            Body::InBuffer(range) => {
                let empty = Buffer::Filling(Vec::new());
                let bytes = match std::mem::replace(&mut self.buffer, empty) {
                    Buffer::Filling(bytes) => Bytes::from(bytes),
                    Buffer::Shared(bytes) => bytes,
                };
                let body = bytes.slice(range);
                self.buffer = Buffer::Shared(bytes);
                body
            }
        }
    }

    /// A body as a vector. A large one that starts at its buffer's start is not copied.
    pub fn take(&self, body: Body) -> Vec<u8> {
        match body {
            Body::InBuffer(range) => self.bytes()[range].to_vec(),
            Body::Owned { bytes, start: 0 } => bytes,
            Body::Owned { bytes, start } => bytes[start..].to_vec(),
        }
    }
}

#[cfg(test)]
mod tests;
