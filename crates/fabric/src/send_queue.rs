//! Gathers messages into the bytes of a connection.
//!
//! Invariants: large bodies are sent without a copy. Headers and small bodies are gathered, so that
//! a batch is one send of few pieces. They are freed once they were sent, even if the queue never
//! becomes empty.

use crate::limits::{INLINE_BODY_BYTES, SEND_PIECES_MAX};
use crate::message::Header;
use crate::wire::Wire;
use bytes::Bytes;
use std::collections::VecDeque;
use std::io::{self, IoSlice};

/// Sent bytes are dropped from the gathered ones when they are at least this many and at least half
/// of all.
const DROPPED_BYTES_MIN: usize = 4096;

/// Messages that wait to be sent.
#[derive(Default)]
pub(crate) struct SendQueue {
    /// Headers and small bodies, in order.
    gathered: Vec<u8>,
    /// The bytes of `gathered` that were sent already.
    sent_len: usize,
    pieces: VecDeque<SendPiece>,
    /// Bytes in all pieces.
    len: usize,
}

enum SendPiece {
    /// This many gathered bytes, from the end of the previous gathered piece.
    Gathered(usize),
    /// A body, from its first unsent byte.
    Body(Bytes),
}

impl SendPiece {
    fn len(&self) -> usize {
        match self {
            SendPiece::Gathered(len) => *len,
            SendPiece::Body(bytes) => bytes.len(),
        }
    }
}

impl SendQueue {
    /// Queues a message.
    pub(crate) fn push(&mut self, header: &Header, body: Bytes) {
        self.gather(&header.encode());
        if body.len() <= INLINE_BODY_BYTES {
            self.gather(&body);
        } else {
            self.len += body.len();
            self.pieces.push_back(SendPiece::Body(body));
        }
    }

    fn gather(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.gathered.extend_from_slice(bytes);
        self.len += bytes.len();
        match self.pieces.back_mut() {
            Some(SendPiece::Gathered(len)) => *len += bytes.len(),
            _ => self.pieces.push_back(SendPiece::Gathered(bytes.len())),
        }
    }

    /// Bytes that wait to be sent.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sends as much as the socket accepts.
    pub(crate) fn flush(&mut self, stream: &impl Wire) -> io::Result<()> {
        while !self.is_empty() {
            let (sent, asked) = self.send(stream)?;
            self.advance(sent);
            if sent < asked {
                break;
            }
        }
        Ok(())
    }

    /// Sends once. Returns the bytes sent and the bytes offered.
    fn send(&self, stream: &impl Wire) -> io::Result<(usize, usize)> {
        let mut slices = [IoSlice::new(&[]); SEND_PIECES_MAX];
        let (mut at, mut asked) = (self.sent_len, 0);
        let pieces = self.pieces.iter().take(SEND_PIECES_MAX);
        let count = pieces.len();
        for (slice, piece) in slices.iter_mut().zip(pieces) {
            let bytes = match piece {
                SendPiece::Gathered(len) => {
                    at += len;
                    &self.gathered[at - len..at]
                }
                SendPiece::Body(bytes) => bytes,
            };
            asked += bytes.len();
            *slice = IoSlice::new(bytes);
        }
        let sent = stream.send(&slices[..count])?;
        Ok((sent.unwrap_or(0), asked))
    }

    fn advance(&mut self, mut sent: usize) {
        self.len -= sent;
        while let Some(piece) = self.pieces.front_mut() {
            let part = piece.len().min(sent);
            sent -= part;
            let whole = part == piece.len();
            match piece {
                SendPiece::Gathered(len) => {
                    *len -= part;
                    self.sent_len += part;
                }
                SendPiece::Body(bytes) => {
                    let _sent = bytes.split_to(part);
                }
            }
            if !whole {
                break;
            }
            self.pieces.pop_front();
        }
        if self.sent_len == self.gathered.len() {
            self.gathered.clear();
            self.sent_len = 0;
        } else if self.sent_len >= DROPPED_BYTES_MIN && self.sent_len * 2 >= self.gathered.len() {
            self.gathered.drain(..self.sent_len);
            self.sent_len = 0;
        }
    }
}
