//! Replies in a stream: RPC record marks (RFC 5531, section 11) and the status of each reply, without the rest.
//!
//! The scanner keeps the head of a record alone, so that data of READs costs no memory and no copy.

use std::ops::ControlFlow;

/// The last fragment of a record.
const LAST_FRAGMENT: u32 = 1 << 31;
/// Bytes of a record that are kept: a header with the longest verifier, and the status.
const HEAD_BYTES: usize = 28 + 400;
/// The longest record that a server may send.
const RECORD_BYTES_MAX: u64 = 4 << 20;

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScannedReply {
    /// The call.
    pub xid: u32,
    /// The status of NFS, or none if the server did not execute the call.
    pub status: Option<u32>,
    /// Bytes of the record.
    pub bytes: u64,
}

/// A stream that is no stream of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// A record is too long.
    #[error("the server sent a record above {RECORD_BYTES_MAX} bytes")]
    TooLong,
    /// A record is no reply.
    #[error("the server sent a record that is no RPC reply")]
    NoReply,
}

/// The state of one stream.
#[derive(Clone, Debug)]
pub struct RecordScanner {
    mark: [u8; 4],
    mark_len: usize,
    /// Bytes of the fragment that are missing; it is read once the mark is complete.
    missing: u32,
    is_last: bool,
    head: [u8; HEAD_BYTES],
    head_len: usize,
    record_bytes: u64,
}

impl Default for RecordScanner {
    fn default() -> RecordScanner {
        RecordScanner {
            mark: [0; 4],
            mark_len: 0,
            missing: 0,
            is_last: false,
            head: [0; HEAD_BYTES],
            head_len: 0,
            record_bytes: 0,
        }
    }
}

impl RecordScanner {
    /// Takes the next bytes of the stream, and gives each reply that they complete.
    ///
    /// # Errors
    /// If the bytes are no replies. The stream is useless then.
    pub fn scan(
        &mut self,
        mut bytes: &[u8],
        mut on_reply: impl FnMut(ScannedReply),
    ) -> Result<(), ScanError> {
        while !bytes.is_empty() {
            if self.mark_len < 4 {
                let (first, rest) = bytes.split_at((4 - self.mark_len).min(bytes.len()));
                self.mark[self.mark_len..self.mark_len + first.len()].copy_from_slice(first);
                self.mark_len += first.len();
                bytes = rest;
                if self.mark_len < 4 {
                    return Ok(());
                }
                self.begin_fragment()?;
            }
            let (part, rest) = bytes.split_at((self.missing as usize).min(bytes.len()));
            self.keep(part);
            bytes = rest;
            if self.missing == 0 {
                self.mark_len = 0;
                if let ControlFlow::Break(reply) = self.end_fragment()? {
                    on_reply(reply);
                }
            }
        }
        Ok(())
    }

    fn begin_fragment(&mut self) -> Result<(), ScanError> {
        let mark = u32::from_be_bytes(self.mark);
        self.is_last = mark & LAST_FRAGMENT != 0;
        self.missing = mark & !LAST_FRAGMENT;
        self.record_bytes += u64::from(self.missing);
        match self.record_bytes > RECORD_BYTES_MAX {
            true => Err(ScanError::TooLong),
            false => Ok(()),
        }
    }

    fn keep(&mut self, part: &[u8]) {
        let kept = part.len().min(HEAD_BYTES - self.head_len);
        self.head[self.head_len..self.head_len + kept].copy_from_slice(&part[..kept]);
        self.head_len += kept;
        self.missing -= part.len() as u32;
    }

    fn end_fragment(&mut self) -> Result<ControlFlow<ScannedReply>, ScanError> {
        if !self.is_last {
            return Ok(ControlFlow::Continue(()));
        }
        let reply = decode_head(&self.head[..self.head_len], self.record_bytes);
        self.head_len = 0;
        self.record_bytes = 0;
        reply.map(ControlFlow::Break).ok_or(ScanError::NoReply)
    }
}

/// The fields of RFC 5531, section 9: xid, REPLY, MSG_ACCEPTED, a verifier, SUCCESS, and then the status of RFC 1813.
fn decode_head(head: &[u8], bytes: u64) -> Option<ScannedReply> {
    let word = |at: usize| {
        let field = head.get(at..at + 4)?;
        Some(u32::from_be_bytes(field.try_into().ok()?))
    };
    let (xid, kind, is_denied) = (word(0)?, word(4)?, word(8)?);
    if kind != 1 {
        return None;
    }
    let status = match is_denied {
        0 => {
            let verifier = (word(16)? as usize).next_multiple_of(4);
            match word(20 + verifier)? {
                0 => Some(word(24 + verifier)?),
                _ => None,
            }
        }
        _ => None,
    };
    Some(ScannedReply { xid, status, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(is_last: bool, bytes: &[u8]) -> Vec<u8> {
        let last = if is_last { LAST_FRAGMENT } else { 0 };
        let mut all = (bytes.len() as u32 | last).to_be_bytes().to_vec();
        all.extend(bytes);
        all
    }

    fn reply(xid: u32, verifier: &[u8], accepted: u32, status: u32, data: usize) -> Vec<u8> {
        let words = [xid, 1, 0, 0, verifier.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|it| it.to_be_bytes()).collect();
        bytes.extend(verifier);
        bytes.extend([accepted, status].iter().flat_map(|it| it.to_be_bytes()));
        bytes.resize(bytes.len() + data, 9);
        bytes
    }

    /// Scans a stream in parts of this many bytes.
    fn scan(stream: &[u8], part: usize) -> Result<Vec<ScannedReply>, ScanError> {
        let mut scanner = RecordScanner::default();
        let mut found = Vec::new();
        for bytes in stream.chunks(part) {
            scanner.scan(bytes, |reply| found.push(reply))?;
        }
        Ok(found)
    }

    #[test]
    fn replies_are_found_in_parts_of_any_length() {
        let long = reply(2, &[5; 8], 0, 70, 9000);
        let stream = [
            fragment(true, &reply(1, &[], 0, 0, 0)),
            fragment(false, &long[..11]),
            fragment(false, &[]),
            fragment(true, &long[11..]),
            fragment(true, &reply(3, &[], 4, 0, 0)),
        ];
        let wanted = [(1, Some(0)), (2, Some(70)), (3, None)];
        for part in [1, 3, 7, 1000, 100_000] {
            let found = scan(&stream.concat(), part).expect("replies");
            let found: Vec<_> = found.iter().map(|it| (it.xid, it.status)).collect();
            assert_eq!(found, wanted, "{part}");
        }
        let bytes = scan(&stream.concat(), 64).expect("replies")[1].bytes;
        assert_eq!(bytes, long.len() as u64);
    }

    #[test]
    fn denied_call_has_no_status() {
        let words = [8u32, 1, 1, 1, 5];
        let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_be_bytes()).collect();
        let found = scan(&fragment(true, &bytes), 64).expect("a reply");
        assert_eq!((found[0].xid, found[0].status), (8, None));
    }

    #[test]
    fn other_streams_are_errors() {
        let call = fragment(true, &[0; 40]);
        assert_eq!(scan(&call, 64), Err(ScanError::NoReply));
        assert_eq!(scan(&fragment(true, &[1; 8]), 64), Err(ScanError::NoReply));
        assert_eq!(scan(b"GET / HTTP/1.1\r\n", 64), Err(ScanError::TooLong));
    }
}
