//! Replies to send to the client, with as few calls as possible.
//!
//! Headers lie one after the other in one buffer. The data of a read stays in the space's buffer
//! and is sent from there. Replies are sent in the order of `push`.

use crate::limits::SEND_PARTS_MAX;
use crate::requests::{Failure, RequestOutcome};
use crate::wire::{self, ChunkHeader, SimpleReply, allocation, chunk};
use pagemesh_base::space::Extent;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, send, sendmsg};
use std::collections::VecDeque;
use std::io::IoSlice;
use zerocopy::IntoBytes;

/// Bytes of the longest explanation sent with an error; the protocol allows 4096.
const ERROR_TEXT_BYTES_MAX: usize = 1024;

enum ReplyPart {
    /// So many bytes of the buffer of headers.
    Header(usize),
    Data(Vec<u8>),
}

impl ReplyPart {
    fn len(&self) -> usize {
        match self {
            Self::Header(len) => *len,
            Self::Data(data) => data.len(),
        }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct ReplyQueue {
    headers: Vec<u8>,
    /// Bytes of `headers` that are sent.
    header_bytes_sent: usize,
    parts: VecDeque<ReplyPart>,
    /// Bytes of the first part that are sent.
    first_part_bytes_sent: usize,
    replies: usize,
    held_bytes: u64,
}

impl ReplyQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Replies pushed since it was last empty.
    pub(crate) fn replies(&self) -> usize {
        self.replies
    }

    /// Bytes of data that the replies hold.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Drops all replies: the client is gone.
    pub(crate) fn clear(&mut self) {
        self.headers.clear();
        self.header_bytes_sent = 0;
        self.parts.clear();
        self.first_part_bytes_sent = 0;
        self.replies = 0;
        self.held_bytes = 0;
    }

    /// Appends a reply.
    pub(crate) fn push(&mut self, structured: bool, cookie: u64, outcome: RequestOutcome) {
        self.replies += 1;
        let before = self.headers.len();
        let mut data = None;
        match outcome {
            RequestOutcome::Done => self.push_simple(cookie, 0),
            RequestOutcome::Failed(failure) if structured => self.push_error(cookie, &failure),
            RequestOutcome::Failed(failure) => self.push_simple(cookie, failure.errno as u32),
            RequestOutcome::Data { offset, data: read } => {
                if structured {
                    self.push_chunk(chunk::OFFSET_DATA, cookie, 8 + read.len());
                    self.headers.extend(offset.to_be_bytes());
                } else {
                    self.push_simple(cookie, 0);
                }
                data = Some(read);
            }
            RequestOutcome::Extents(extents) => self.push_extents(cookie, &extents),
        }
        let added = self.headers.len() - before;
        match self.parts.back_mut() {
            Some(ReplyPart::Header(len)) => *len += added,
            _ => self.parts.push_back(ReplyPart::Header(added)),
        }
        if let Some(data) = data {
            self.held_bytes += data.len() as u64;
            self.parts.push_back(ReplyPart::Data(data));
        }
    }

    fn push_simple(&mut self, cookie: u64, errno: u32) {
        let reply = SimpleReply::new(cookie, errno);
        self.headers.extend_from_slice(reply.as_bytes());
    }

    /// The header of a chunk that is a whole reply; the limit of a request bounds its length.
    fn push_chunk(&mut self, kind: u16, cookie: u64, len: usize) {
        let header = ChunkHeader::new(kind, cookie, len as u32);
        self.headers.extend_from_slice(header.as_bytes());
    }

    fn push_error(&mut self, cookie: u64, failure: &Failure) {
        let end = failure.reason.floor_char_boundary(ERROR_TEXT_BYTES_MAX);
        let why = &failure.reason.as_bytes()[..end];
        self.push_chunk(chunk::ERROR, cookie, 6 + why.len());
        self.headers.extend((failure.errno as u32).to_be_bytes());
        self.headers.extend((why.len() as u16).to_be_bytes());
        self.headers.extend(why);
    }

    fn push_extents(&mut self, cookie: u64, extents: &[Extent]) {
        self.push_chunk(chunk::BLOCK_STATUS, cookie, 4 + 8 * extents.len());
        self.headers.extend(wire::BASE_ALLOCATION_ID.to_be_bytes());
        for extent in extents {
            let flags = if extent.mapped {
                0
            } else {
                allocation::HOLE | allocation::ZERO
            };
            // Extents were cut at the end of a range of 32 bits.
            self.headers.extend((extent.len as u32).to_be_bytes());
            self.headers.extend(flags.to_be_bytes());
        }
    }

    /// Sends until all is sent or the socket is full.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        while !self.parts.is_empty() {
            match self.send_once(socket) {
                Ok(sent) => self.advance(sent),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn send_once(&self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let mut head = &self.headers[self.header_bytes_sent..];
        if let [ReplyPart::Header(len)] = self.parts.as_slices().0
            && self.parts.len() == 1
        {
            return send(socket, &head[..*len - self.first_part_bytes_sent], flags);
        }
        let mut slices = [IoSlice::new(&[]); SEND_PARTS_MAX];
        let mut skip = self.first_part_bytes_sent;
        let mut count = 0;
        for (slice, part) in slices.iter_mut().zip(&self.parts) {
            let bytes = match part {
                ReplyPart::Header(len) => {
                    let (bytes, rest) = head.split_at(*len - skip);
                    head = rest;
                    bytes
                }
                ReplyPart::Data(data) => &data[skip..],
            };
            *slice = IoSlice::new(bytes);
            skip = 0;
            count += 1;
        }
        sendmsg(
            socket,
            &slices[..count],
            &mut SendAncillaryBuffer::default(),
            flags,
        )
    }

    fn advance(&mut self, mut sent: usize) {
        while let Some(part) = self.parts.front() {
            let left = part.len() - self.first_part_bytes_sent;
            let taken = sent.min(left);
            if matches!(part, ReplyPart::Header(_)) {
                self.header_bytes_sent += taken;
            }
            if taken < left {
                self.first_part_bytes_sent += taken;
                return;
            }
            sent -= taken;
            self.first_part_bytes_sent = 0;
            self.parts.pop_front();
        }
        self.clear();
    }
}
