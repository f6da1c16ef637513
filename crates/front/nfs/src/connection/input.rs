//! The bytes of a client that are no whole call yet, and a call that waits for room.

use crate::limits::{FRAGMENT_RESERVED_BYTES_MAX, RECEIVE_BYTES};
use crate::record::{RecordAssembler, RecordError};
use bytes::Bytes;
use std::io::{self, Read};
use std::time::Instant;

/// See the module. One thread at a time owns it.
#[derive(Default)]
pub(crate) struct Input {
    assembler: RecordAssembler,
    /// Bytes after the parked call.
    unparsed: Vec<u8>,
    parked: Option<Bytes>,
    /// The time of the first event of an incomplete record.
    record_since: Option<Instant>,
}

/// The effect of one system call.
pub(crate) enum Received {
    /// Bytes are in the buffer.
    Bytes(usize),
    /// The rest of a record has come.
    Record(Bytes),
    /// A part of a record has come.
    Part,
    /// No bytes are there.
    Nothing,
    /// The client sends no more.
    End,
}

impl Input {
    pub(crate) fn is_parked(&self) -> bool {
        self.parked.is_some()
    }

    /// Keeps a call that has no room, and the bytes after it.
    pub(crate) fn park(&mut self, record: Bytes, rest: &[u8]) {
        self.parked = Some(record);
        self.unparsed.extend_from_slice(rest);
    }

    pub(crate) fn take_parked(&mut self) -> Option<Bytes> {
        self.parked.take()
    }

    /// Keeps bytes after the parked call.
    pub(crate) fn unparse(&mut self, rest: &[u8]) {
        self.unparsed.extend_from_slice(rest);
    }

    /// Whether most of a fragment is still to come. Its client sends it now.
    pub(crate) fn is_within_long_fragment(&self) -> bool {
        self.assembler.fragment_left() >= RECEIVE_BYTES
    }

    pub(crate) fn take_unparsed(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.unparsed)
    }

    /// The time since when a record is incomplete.
    pub(crate) fn record_since(&self) -> Option<Instant> {
        self.record_since
    }

    /// The bytes of an incomplete record beyond those that each connection may hold.
    pub(crate) fn held_bytes(&self) -> usize {
        let bytes = self.assembler.record_bytes();
        match bytes > FRAGMENT_RESERVED_BYTES_MAX {
            true => bytes,
            false => 0,
        }
    }

    /// Takes bytes up to the end of a record; returns their number, and the record.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(usize, Option<Bytes>), RecordError> {
        let pushed = self.assembler.push(bytes)?;
        self.note_progress();
        Ok((pushed.consumed, pushed.record.map(Bytes::from)))
    }

    /// Receives bytes without a wait. Bytes of a long fragment go into its record.
    pub(crate) fn receive(
        &mut self,
        mut socket: impl Read,
        buffer: &mut [u8],
    ) -> io::Result<Received> {
        let received = if self.assembler.fragment_left() >= buffer.len() {
            let pushed = self.assembler.receive(&mut socket);
            pushed.map(|pushed| match (pushed.consumed, pushed.record) {
                (0, _) => Received::End,
                (_, None) => Received::Part,
                (_, Some(record)) => Received::Record(record.into()),
            })
        } else {
            socket.read(buffer).map(|count| match count {
                0 => Received::End,
                count => Received::Bytes(count),
            })
        };
        self.note_progress();
        match received {
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock => Ok(Received::Nothing),
                io::ErrorKind::Interrupted => Ok(Received::Part),
                _ => Err(error),
            },
            received => received,
        }
    }

    /// A record has its deadline from its first byte on.
    fn note_progress(&mut self) {
        if !self.assembler.is_within_record() {
            self.record_since = None;
        } else if self.record_since.is_none() {
            self.record_since = Some(Instant::now());
        }
    }
}
