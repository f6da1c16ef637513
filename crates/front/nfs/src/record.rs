//! Record marking (RFC 5531, section 11): calls and replies in a byte stream.
//!
//! A record is a sequence of fragments. Each has a mark of four bytes: the highest bit tells the
//! last fragment, the lower bits are its length. A [`RecordAssembler`] compares the length with the
//! room in the record before it takes memory. It reserves little for bytes that have not arrived,
//! so that a client that sends only marks holds little.

use crate::limits::{FRAGMENT_RESERVED_BYTES_MAX, FRAGMENTS_MAX, RECORD_BYTES_MAX};
use std::io::{self, Read};

/// Bytes of a mark.
pub const MARK_BYTES: usize = 4;
/// The bit of the last fragment.
const LAST_FRAGMENT: u32 = 1 << 31;

/// The reason that a stream has no further record. The connection cannot go on: the start of the
/// next record is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// A fragment makes its record too long.
    #[error(
        "a fragment of {len} bytes follows {before} bytes of its record; at most \
         {RECORD_BYTES_MAX} in total are allowed"
    )]
    TooLong {
        /// Bytes of the fragment.
        len: u32,
        /// Bytes of earlier fragments.
        before: usize,
    },
    /// A record has too many fragments.
    #[error("a record has more than {FRAGMENTS_MAX} fragments")]
    TooManyFragments,
    /// A record has no bytes.
    #[error("a record is empty")]
    Empty,
}

/// The mark of a reply of this many bytes, in one fragment; none if the length needs more than 31
/// bits.
#[must_use]
pub fn reply_mark(len: usize) -> Option<[u8; MARK_BYTES]> {
    let len = u32::try_from(len).ok()?;
    (len < LAST_FRAGMENT).then(|| (len | LAST_FRAGMENT).to_be_bytes())
}

/// The effect of a call of [`RecordAssembler::push`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushedBytes {
    /// Bytes of the input that it took. The rest belongs to the next record.
    pub consumed: usize,
    /// The record, if its last byte was among them.
    pub record: Option<Vec<u8>>,
}

/// Assembles records from pieces of a stream. After an error it refuses all further bytes.
#[derive(Debug, Default)]
pub struct RecordAssembler {
    record: Vec<u8>,
    /// The first bytes of a mark.
    mark: [u8; MARK_BYTES],
    mark_bytes: usize,
    /// Bytes that the current fragment still needs.
    fragment_left: usize,
    /// Whether the current fragment is the last one of its record.
    is_last: bool,
    fragments: u32,
    failure: Option<RecordError>,
}

impl RecordAssembler {
    /// An assembler at the start of a record.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a part of a record has arrived. A stream that ends there is cut off.
    #[must_use]
    pub fn is_within_record(&self) -> bool {
        self.fragments > 0 || self.mark_bytes > 0
    }

    /// Bytes of the incomplete record.
    #[must_use]
    pub fn record_bytes(&self) -> usize {
        self.record.len()
    }

    /// Takes bytes from the front of `input`, up to the end of one record.
    ///
    /// # Errors
    /// If the stream breaks a limit.
    pub fn push(&mut self, input: &[u8]) -> Result<PushedBytes, RecordError> {
        if let Some(error) = self.failure {
            return Err(error);
        }
        let pushed = self.push_up_to_record(input);
        self.failure = pushed.as_ref().err().copied();
        if self.failure.is_some() {
            self.record = Vec::new();
        }
        pushed
    }

    /// Bytes that the current fragment still needs; 0 between fragments.
    #[must_use]
    pub fn fragment_left(&self) -> usize {
        self.fragment_left
    }

    /// Reads bytes of the current fragment from `stream` into the record, without the copy that
    /// [`push`](Self::push) makes. It reads nothing beyond the fragment, and takes memory only as
    /// the record grows. Call it only if [`fragment_left`](Self::fragment_left) is not 0; then no
    /// consumed bytes mean the end of the stream.
    ///
    /// # Errors
    /// If the stream fails before a byte arrives; also with `WouldBlock`.
    pub fn receive(&mut self, stream: &mut impl Read) -> io::Result<PushedBytes> {
        let before = self.record.len();
        let step = before.max(FRAGMENT_RESERVED_BYTES_MAX);
        let count_max = self.fragment_left.min(step);
        self.record.reserve(count_max);
        let mut part = stream.take(count_max as u64);
        let failure = part.read_to_end(&mut self.record).err();
        let consumed = self.record.len() - before;
        self.fragment_left -= consumed;
        match failure {
            Some(failure) if consumed == 0 => return Err(failure),
            // A later call fails again, or finds the end of the stream.
            Some(_) | None => {}
        }
        let is_whole = consumed > 0 && self.fragment_left == 0 && self.is_last;
        let record = is_whole.then(|| self.take_record());
        Ok(PushedBytes { consumed, record })
    }

    fn push_up_to_record(&mut self, input: &[u8]) -> Result<PushedBytes, RecordError> {
        let mut rest = input;
        loop {
            if self.fragment_left == 0 && !self.take_mark(&mut rest)? {
                break;
            }
            let count = self.fragment_left.min(rest.len());
            let (body, after) = rest.split_at(count);
            self.record.extend(body);
            self.fragment_left -= count;
            rest = after;
            if self.fragment_left > 0 {
                break;
            }
            if self.is_last {
                if self.record.is_empty() {
                    return Err(RecordError::Empty);
                }
                return Ok(PushedBytes {
                    consumed: input.len() - rest.len(),
                    record: Some(self.take_record()),
                });
            }
        }
        Ok(PushedBytes {
            consumed: input.len(),
            record: None,
        })
    }

    /// Takes the bytes of a mark; returns whether it is complete.
    fn take_mark(&mut self, rest: &mut &[u8]) -> Result<bool, RecordError> {
        let count = (MARK_BYTES - self.mark_bytes).min(rest.len());
        let (part, after) = rest.split_at(count);
        self.mark[self.mark_bytes..][..count].copy_from_slice(part);
        self.mark_bytes += count;
        *rest = after;
        if self.mark_bytes < MARK_BYTES {
            return Ok(false);
        }
        self.mark_bytes = 0;
        self.start_fragment(u32::from_be_bytes(self.mark))?;
        Ok(true)
    }

    fn start_fragment(&mut self, mark: u32) -> Result<(), RecordError> {
        let (len, before) = (mark & !LAST_FRAGMENT, self.record.len());
        let room = RECORD_BYTES_MAX - before;
        let fragment_bytes = usize::try_from(len).unwrap_or(usize::MAX);
        if fragment_bytes > room {
            return Err(RecordError::TooLong { len, before });
        }
        if self.fragments == FRAGMENTS_MAX {
            return Err(RecordError::TooManyFragments);
        }
        self.fragments += 1;
        self.is_last = mark & LAST_FRAGMENT != 0;
        self.fragment_left = fragment_bytes;
        let reserved = fragment_bytes.min(FRAGMENT_RESERVED_BYTES_MAX);
        self.record.reserve(reserved);
        Ok(())
    }

    fn take_record(&mut self) -> Vec<u8> {
        self.fragments = 0;
        self.is_last = false;
        std::mem::take(&mut self.record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_fuzz::measure_allocation;
    use proptest::prelude::*;

    fn fragment(body: &[u8], is_last: bool) -> Vec<u8> {
        let mark = body.len() as u32 | if is_last { LAST_FRAGMENT } else { 0 };
        [&mark.to_be_bytes(), body].concat()
    }

    /// All records of a stream that arrives in pieces.
    fn assemble(stream: &[u8], piece_bytes: usize) -> Result<Vec<Vec<u8>>, RecordError> {
        let mut assembler = RecordAssembler::new();
        let mut records = Vec::new();
        for piece in stream.chunks(piece_bytes) {
            let mut rest = piece;
            while !rest.is_empty() {
                let pushed = assembler.push(rest)?;
                rest = &rest[pushed.consumed..];
                records.extend(pushed.record);
            }
        }
        assert!(!assembler.is_within_record(), "the stream is cut off");
        Ok(records)
    }

    #[test]
    fn fragments_become_one_record() {
        let stream = [0, 0, 0, 2, b'a', b'b', 0x80, 0, 0, 1, b'c'];
        for piece_bytes in 1..=stream.len() {
            assert_eq!(assemble(&stream, piece_bytes), Ok(vec![b"abc".to_vec()]));
        }
        assert_eq!(reply_mark(1), Some([0x80, 0, 0, 1]));
        assert_eq!(reply_mark(1 << 31), None);
    }

    #[test]
    fn bytes_after_a_record_are_left() {
        let mut assembler = RecordAssembler::new();
        let stream = [fragment(b"one", true), fragment(b"two", true)].concat();
        let pushed = assembler.push(&stream).unwrap();
        assert_eq!(pushed.consumed, 7);
        assert_eq!(pushed.record, Some(b"one".to_vec()));
        assert!(!assembler.is_within_record());
        let pushed = assembler.push(&stream[7..8]).unwrap();
        assert_eq!((pushed.consumed, pushed.record), (1, None));
        assert!(assembler.is_within_record());
    }

    #[test]
    fn long_fragment_is_refused_without_memory() {
        for len in [RECORD_BYTES_MAX as u32 + 1, !LAST_FRAGMENT] {
            for last in [0, LAST_FRAGMENT] {
                let mut assembler = RecordAssembler::new();
                let mark = (len | last).to_be_bytes();
                let (pushed, took) = measure_allocation(|| assembler.push(&mark));
                assert_eq!(pushed, Err(RecordError::TooLong { len, before: 0 }));
                assert_eq!(took, 0);
                assert!(assembler.push(&[0]).is_err(), "it goes on after an error");
            }
        }
    }

    #[test]
    fn fragments_share_the_limit_of_their_record() {
        let mut assembler = RecordAssembler::new();
        let first = fragment(&vec![1; RECORD_BYTES_MAX - 1], false);
        assert_eq!(assembler.push(&first).unwrap().record, None);
        let error = RecordError::TooLong {
            len: 2,
            before: RECORD_BYTES_MAX - 1,
        };
        assert_eq!(assembler.push(&fragment(&[2; 2], true)), Err(error));

        let fitting = [first, fragment(&[2], true)].concat();
        let records = assemble(&fitting, 1 << 16).unwrap();
        assert_eq!(records[0].len(), RECORD_BYTES_MAX);
    }

    #[test]
    fn announced_bytes_take_little_memory() {
        let mut assembler = RecordAssembler::new();
        let mark = (RECORD_BYTES_MAX as u32 | LAST_FRAGMENT).to_be_bytes();
        let (pushed, took) = measure_allocation(|| assembler.push(&mark));
        assert_eq!(pushed.unwrap().record, None);
        assert!(took <= FRAGMENT_RESERVED_BYTES_MAX as u64, "{took} bytes");
    }

    #[test]
    fn endless_fragments_are_refused() {
        let empty = fragment(&[], false).repeat(FRAGMENTS_MAX as usize + 1);
        let error = Err(RecordError::TooManyFragments);
        assert_eq!(assemble(&empty, 5), error);
        let short = fragment(b"x", false).repeat(FRAGMENTS_MAX as usize + 1);
        assert_eq!(assemble(&short, 5), error);
        let most = fragment(b"x", false).repeat(FRAGMENTS_MAX as usize - 1);
        let most = [most, fragment(b"x", true)].concat();
        assert_eq!(assemble(&most.repeat(2), 7).unwrap().len(), 2);
    }

    /// A stream that gives at most this many bytes at once, and then has none for now.
    struct SlowStream<'a> {
        bytes: &'a [u8],
        at_once: usize,
        is_ready: bool,
    }

    impl Read for SlowStream<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.is_ready = !self.is_ready;
            if self.is_ready {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let at_once = self.at_once.min(out.len());
            self.bytes.read(&mut out[..at_once])
        }
    }

    #[test]
    fn fragment_is_received_into_its_record() {
        let body: Vec<u8> = (0..100_000u32).map(|at| at as u8).collect();
        let stream = [fragment(&body, false), fragment(b"end", true)].concat();
        for at_once in [1000, 70_000, 200_000] {
            let mut assembler = RecordAssembler::new();
            let pushed = assembler.push(&stream[..10]).unwrap();
            assert_eq!((pushed.consumed, pushed.record), (10, None));
            let mut slow = SlowStream {
                bytes: &stream[10..],
                at_once,
                is_ready: true,
            };
            while assembler.fragment_left() > 0 {
                match assembler.receive(&mut slow) {
                    Ok(pushed) => assert_eq!(pushed.record, None),
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            assert_eq!(slow.bytes.len(), 4 + 3, "it read beyond the fragment");
            let pushed = assembler.push(&slow.bytes[..5]).unwrap();
            assert_eq!(pushed.record, None);
            let pushed = assembler.receive(&mut &slow.bytes[5..]).unwrap();
            assert_eq!(pushed.consumed, 2);
            assert_eq!(pushed.record, Some([&body[..], b"end"].concat()));
        }
    }

    #[test]
    fn end_of_a_stream_within_a_fragment_is_no_progress() {
        let mut assembler = RecordAssembler::new();
        assembler.push(&[0x80, 0, 0, 4, 1]).unwrap();
        let pushed = assembler.receive(&mut io::empty()).unwrap();
        assert_eq!((pushed.consumed, pushed.record), (0, None));
        assert!(assembler.is_within_record());
    }

    #[test]
    fn received_bytes_bound_the_memory() {
        let mut assembler = RecordAssembler::new();
        let mark = RECORD_BYTES_MAX as u32 | LAST_FRAGMENT;
        assembler.push(&mark.to_be_bytes()).unwrap();
        let mut short = &[1; 20_000][..];
        let (received, took) = measure_allocation(|| assembler.receive(&mut short));
        assert_eq!(received.unwrap().consumed, FRAGMENT_RESERVED_BYTES_MAX);
        assert!(took <= 2 * FRAGMENT_RESERVED_BYTES_MAX as u64, "{took}");
    }

    #[test]
    fn empty_record_is_refused() {
        assert_eq!(assemble(&[0x80, 0, 0, 0], 4), Err(RecordError::Empty));
    }

    proptest! {
        #[test]
        fn records_survive_fragments_and_pieces(
            records in prop::collection::vec(
                prop::collection::vec(any::<u8>(), 1..200), 1..6),
            cut in 1usize..50,
            piece_bytes in 1usize..70,
        ) {
            let mut stream = Vec::new();
            for record in &records {
                let count = record.len().div_ceil(cut).min(FRAGMENTS_MAX as usize);
                let each = record.len().div_ceil(count);
                let fragments: Vec<_> = record.chunks(each).collect();
                for (at, body) in fragments.iter().enumerate() {
                    stream.extend(fragment(body, at + 1 == fragments.len()));
                }
            }
            prop_assert_eq!(assemble(&stream, piece_bytes), Ok(records));
        }
    }
}
