//! A client request in flight: the part that is still to be split off, and the answers so far.
//!
//! # Transactions
//!
//! A transaction changes pages at several offsets of one column as a whole (RFD 010). [`map_parts`]
//! makes one piece of it, [`PieceOp::Transact`], and refuses parts of several columns. The piece
//! takes the path of a write, with these differences:
//!
//! - `RangeLocks::acquire_all` enters the queues of all parts at once. The piece counts the locks
//!   that are not granted yet. Other operations conflict with the parts, not with the ranges
//!   between them.
//! - On mapped legs it is one transaction of the store over all pools, with one fence. Over `tcp`
//!   it is one message.
//! - A recovery of in-flight writes copies all changes of one operation as a whole.

use super::piece::{Piece, PieceOp};
use super::timing::{OpRecord, OpTimes};
use super::{AckDependency, change_dependency};
use crate::limits::{REGION_BYTES, REQUEST_PIECES_MAX};
use crate::snapshot::{ColumnExtent, LayoutSnapshot, atomic_len};
use bytes::Bytes;
use pagemesh_base::slice::{SliceReply, TransactionPart, check_parts};
use pagemesh_base::space::{
    EXTENTS_MAX, Extent, REQUEST_BYTES_MAX, Reply, Request, SpaceError, Token, check_range,
};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_telemetry::OpKind;

enum JobKind {
    Read,
    Write(Bytes),
    Clear,
    /// A transaction with its place; it becomes the only piece.
    Transact(ColumnExtent, Vec<TransactionPart>),
    Flush,
    Extents,
}

impl JobKind {
    /// The kind and the bytes for the meter; none for extents, which are no I/O.
    fn counted(&self, len: u64) -> Option<(OpKind, u64)> {
        Some(match self {
            JobKind::Read => (OpKind::Read, len),
            JobKind::Write(_) => (OpKind::Write, len),
            JobKind::Transact(_, parts) => (OpKind::Write, written_bytes(parts)),
            // A deallocation writes no data.
            JobKind::Clear => (OpKind::Write, 0),
            JobKind::Flush => (OpKind::Flush, 0),
            JobKind::Extents => return None,
        })
    }
}

/// The position of the next piece.
#[derive(Clone, Copy)]
enum SplitCursor {
    /// At this byte of the volume.
    Byte(u64),
    /// At this byte of this column's run.
    Column(usize, u64),
    End,
}

pub(super) enum NextPiece {
    /// A piece; the flag marks the last one.
    Piece(ColumnExtent, PieceOp, bool),
    End,
}

enum JobAnswer {
    Nothing,
    Data(Vec<u8>),
    Extents(Vec<(u64, u64, Vec<Extent>)>),
}

/// See the module.
pub(crate) struct Job {
    /// The client's token; none for the engine's own work.
    pub token: Option<Token>,
    kind: JobKind,
    pub durable: bool,
    pub hint: TierHint,
    begin: u64,
    end: u64,
    cursor: SplitCursor,
    /// Pieces in flight.
    pub in_flight: u32,
    /// See [`JobKind::counted`].
    counted: Option<(OpKind, u64)>,
    /// None if the request is only counted.
    pub times: Option<OpTimes>,
    /// Whether pieces are being made right now.
    pub is_issuing: bool,
    pieces_made: u32,
    answer: JobAnswer,
    error: Option<SpaceError>,
}

impl Job {
    /// Creates a job. The error variant is an immediate result: the request has nothing to do,
    /// or cannot be done.
    pub(super) fn new(
        token: Token,
        request: Request,
        times: Option<OpTimes>,
        snapshot: &LayoutSnapshot,
    ) -> Result<Job, Result<Reply, SpaceError>> {
        let size_bytes = snapshot.size_bytes;
        let (kind, offset, len, durable) = match request {
            Request::Read { offset, len } => (JobKind::Read, offset, u64::from(len), false),
            Request::Write {
                offset,
                data,
                durable,
            } => {
                let len = data.len() as u64;
                (JobKind::Write(data), offset, len, durable)
            }
            Request::Discard { offset, len } => (JobKind::Clear, offset, len, false),
            Request::WriteZeroes {
                offset,
                len,
                durable,
            } => (JobKind::Clear, offset, len, durable),
            Request::Transact { parts, durable } => {
                let (place, parts) = map_parts(parts, snapshot).map_err(Err)?;
                let (at, len) = (place.volume_offset, place.len);
                (JobKind::Transact(place, parts), at, len, durable)
            }
            Request::Flush => (JobKind::Flush, 0, size_bytes, false),
            Request::Extents { offset, len } => (JobKind::Extents, offset, len, false),
        };
        check_range(size_bytes, offset, len).map_err(Err)?;
        if matches!(kind, JobKind::Read | JobKind::Write(_)) && len > u64::from(REQUEST_BYTES_MAX) {
            return Err(Err(SpaceError::Unavailable(format!(
                "a request of {len} bytes is longer than {REQUEST_BYTES_MAX}; split it"
            ))));
        }
        match kind {
            JobKind::Read if len == 0 => return Err(Ok(Reply::Data(vec![]))),
            JobKind::Extents if len == 0 => return Err(Ok(Reply::Extents(vec![]))),
            _ if len == 0 => return Err(Ok(Reply::Done)),
            _ => {}
        }
        let cursor = match kind {
            JobKind::Clear | JobKind::Flush => SplitCursor::Column(0, 0),
            _ => SplitCursor::Byte(offset),
        };
        let counted = kind.counted(len);
        Ok(Job {
            token: Some(token),
            kind,
            durable,
            hint: TierHint::None,
            begin: offset,
            end: offset + len,
            cursor,
            in_flight: 0,
            counted,
            times,
            is_issuing: false,
            pieces_made: 0,
            answer: JobAnswer::Nothing,
            error: None,
        })
    }

    /// A flush of one column that the engine itself requests.
    pub(super) fn background_flush() -> Job {
        Job {
            token: None,
            kind: JobKind::Flush,
            durable: false,
            hint: TierHint::None,
            begin: 0,
            end: 0,
            cursor: SplitCursor::End,
            in_flight: 1,
            counted: None,
            times: None,
            is_issuing: false,
            pieces_made: 1,
            answer: JobAnswer::Nothing,
            error: None,
        }
    }

    pub(super) fn is_issued(&self) -> bool {
        matches!(self.cursor, SplitCursor::End)
    }

    /// Whether a later request must wait until all pieces of this one are in flight.
    pub(super) fn conflicts(&self, later: &Job) -> bool {
        let changes = |job: &Job| {
            matches!(
                job.kind,
                JobKind::Write(_) | JobKind::Clear | JobKind::Transact(..)
            )
        };
        let flush = |job: &Job| matches!(job.kind, JobKind::Flush);
        (changes(self) || changes(later))
            && !flush(self)
            && !flush(later)
            && self.begin < later.end
            && later.begin < self.end
    }

    /// The condition for its acknowledgement if there is an asynchronous replica.
    pub(super) fn ack_dependency(&self) -> AckDependency {
        match self.kind {
            JobKind::Read | JobKind::Extents => AckDependency::NoReplication,
            JobKind::Flush => AckDependency::FullReplication,
            JobKind::Write(_) | JobKind::Clear | JobKind::Transact(..) => {
                change_dependency(self.durable)
            }
        }
    }

    /// The request as the meter counts it.
    pub(super) fn record(&self) -> Option<OpRecord> {
        let (kind, bytes) = self.counted?;
        let times = self.times;
        Some(OpRecord { kind, bytes, times })
    }

    /// The place of a transaction, and its parts there.
    pub(crate) fn transaction_parts(&self) -> Option<(ColumnExtent, &[TransactionPart])> {
        match &self.kind {
            JobKind::Transact(place, parts) => Some((*place, parts)),
            _ => None,
        }
    }

    pub(super) fn next_piece(&mut self, snapshot: &LayoutSnapshot) -> NextPiece {
        if let JobKind::Transact(place, parts) = &mut self.kind {
            self.cursor = SplitCursor::End;
            return NextPiece::Piece(*place, PieceOp::Transact(std::mem::take(parts)), true);
        }
        let next = match self.cursor {
            SplitCursor::Byte(at) => self.next_bytes(snapshot, at),
            SplitCursor::Column(column, offset) => self.next_in_column(snapshot, column, offset),
            SplitCursor::End => NextPiece::End,
        };
        self.pieces_made += 1;
        next
    }

    fn next_bytes(&mut self, snapshot: &LayoutSnapshot, at: u64) -> NextPiece {
        let lists = matches!(self.kind, JobKind::Extents);
        let found = match self.kind {
            JobKind::Extents => snapshot.contiguous_extent(at, self.end),
            JobKind::Write(_) => snapshot.atomic_extent(at, self.end),
            _ => snapshot.io_extent(at, self.end),
        };
        let Some(place) = found else {
            self.cursor = SplitCursor::End;
            return NextPiece::End;
        };
        let next = at + place.len;
        // The answer to extents may end early, so one batch of pieces is enough.
        let last = next >= self.end || lists && self.pieces_made + 1 >= REQUEST_PIECES_MAX;
        self.cursor = if last {
            SplitCursor::End
        } else {
            SplitCursor::Byte(next)
        };
        let act = match &self.kind {
            JobKind::Write(data) if at == self.begin && next == self.end => {
                PieceOp::Write(data.clone())
            }
            JobKind::Write(data) => {
                let from = (at - self.begin) as usize;
                PieceOp::Write(data.slice(from..from + place.len as usize))
            }
            JobKind::Extents => PieceOp::Extents,
            _ => {
                if !last && at == self.begin {
                    self.answer = JobAnswer::Data(vec![0; (self.end - self.begin) as usize]);
                }
                PieceOp::Read
            }
        };
        NextPiece::Piece(place, act, last)
    }

    fn next_in_column(
        &mut self,
        snapshot: &LayoutSnapshot,
        mut column: usize,
        mut offset: u64,
    ) -> NextPiece {
        let flush = matches!(self.kind, JobKind::Flush);
        while column < snapshot.columns.len() {
            let (from, to) = snapshot.column_range(column, self.begin, self.end);
            let from = from.max(offset);
            if from >= to {
                (column, offset) = (column + 1, 0);
                continue;
            }
            let (len, act) = if flush {
                (0, PieceOp::Flush)
            } else {
                let len = (to - from).min(REGION_BYTES - from % REGION_BYTES);
                (clear_len(from, len), PieceOp::Clear)
            };
            self.cursor = if flush || from + len == to {
                SplitCursor::Column(column + 1, 0)
            } else {
                SplitCursor::Column(column, from + len)
            };
            let place = ColumnExtent {
                column,
                offset: from,
                len,
                volume_offset: snapshot.volume_offset(column, from),
            };
            let single = snapshot.columns.len() == 1 && (flush || from + len == to);
            if single {
                self.cursor = SplitCursor::End;
            }
            return NextPiece::Piece(place, act, single);
        }
        self.cursor = SplitCursor::End;
        NextPiece::End
    }

    /// Adds the answer to a piece.
    pub(super) fn add_reply(&mut self, piece: &Piece, reply: SliceReply) {
        match (reply, &mut self.answer) {
            (SliceReply::Data(data), JobAnswer::Data(all)) => {
                let from = (piece.volume_offset - self.begin) as usize;
                if data.len() as u64 == piece.len {
                    all[from..from + data.len()].copy_from_slice(&data);
                }
            }
            (SliceReply::Data(data), answer) => *answer = JobAnswer::Data(data),
            (SliceReply::Extents(extents), JobAnswer::Extents(all)) => {
                all.push((piece.volume_offset, piece.len, extents));
            }
            (SliceReply::Extents(extents), answer) => {
                *answer = JobAnswer::Extents(vec![(piece.volume_offset, piece.len, extents)]);
            }
            _ => {}
        }
    }

    /// Fails the request. The first failure counts, and no more pieces are split off.
    pub(super) fn fail(&mut self, error: SpaceError) {
        self.error.get_or_insert(error);
        self.cursor = SplitCursor::End;
    }

    pub(super) fn into_result(self) -> Result<Reply, SpaceError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        Ok(match self.answer {
            JobAnswer::Nothing => Reply::Done,
            JobAnswer::Data(data) => Reply::Data(data),
            JobAnswer::Extents(parts) => Reply::Extents(join_extents(parts)),
        })
    }
}

/// The bytes of data in the parts of a transaction.
pub(crate) fn written_bytes(parts: &[TransactionPart]) -> u64 {
    let bytes = parts.iter().map(|part| match part {
        TransactionPart::Write { data, .. } => data.len() as u64,
        TransactionPart::Clear { .. } => 0,
    });
    bytes.sum()
}

/// Maps parts of a volume to parts of the one column that holds them all. Returns their span
/// and the parts in ascending order.
fn map_parts(
    parts: Vec<TransactionPart>,
    snapshot: &LayoutSnapshot,
) -> Result<(ColumnExtent, Vec<TransactionPart>), SpaceError> {
    check_parts(&parts, snapshot.size_bytes)?;
    let mut column = None;
    let mut placed = Vec::with_capacity(parts.len());
    for part in parts {
        let (at, len) = (part.offset(), part.len());
        let place = snapshot.contiguous_extent(at, at + len);
        let place = place.filter(|place| place.len == len);
        let place = place.filter(|it| column.is_none_or(|column| column == it.column));
        let Some(place) = place else {
            return Err(multi_column_error(snapshot));
        };
        column = Some(place.column);
        let offset = place.offset;
        placed.push(match part {
            TransactionPart::Write { data, .. } => TransactionPart::Write { offset, data },
            TransactionPart::Clear { len, .. } => TransactionPart::Clear { offset, len },
        });
    }
    placed.sort_unstable_by_key(TransactionPart::offset);
    let (Some(column), Some(first), Some(last)) = (column, placed.first(), placed.last()) else {
        unreachable!("a transaction has parts");
    };
    let offset = first.offset();
    let place = ColumnExtent {
        column,
        offset,
        len: last.offset() + last.len() - offset,
        volume_offset: snapshot.volume_offset(column, offset),
    };
    Ok((place, placed))
}

fn multi_column_error(snapshot: &LayoutSnapshot) -> SpaceError {
    let columns: Vec<String> = snapshot
        .segments
        .iter()
        .map(|s| s.column_count.to_string())
        .collect();
    SpaceError::Unsupported(format!(
        "a transaction must lie in one column; this volume has segments of {} columns, and its \
         parts lie in several; use a volume of one column, or let the parts of a transaction lie \
         in one stripe",
        columns.join(", ")
    ))
}

/// The length of the first part of a clear that a leg makes or refuses as one. A clear of a
/// part of a page may need space; a clear of whole pages never does.
fn clear_len(offset: u64, len: u64) -> u64 {
    let page = PAGE_BYTES as u64;
    if offset.is_multiple_of(page) && len >= page {
        len - len % page
    } else {
        atomic_len(offset, len)
    }
}

/// Joins the extents of pieces in order, up to the first gap.
pub(crate) fn join_extents(mut parts: Vec<(u64, u64, Vec<Extent>)>) -> Vec<Extent> {
    parts.sort_by_key(|(at, ..)| *at);
    let mut all: Vec<Extent> = Vec::new();
    for (_, len, extents) in parts {
        let mut left = len;
        for extent in extents {
            let extent = Extent {
                len: extent.len.min(left),
                ..extent
            };
            left -= extent.len;
            let full = all.len() == EXTENTS_MAX;
            match all.last_mut() {
                Some(last) if last.mapped == extent.mapped => last.len += extent.len,
                _ if extent.len == 0 => {}
                _ if full => return all,
                _ => all.push(extent),
            }
        }
        if left > 0 {
            break;
        }
    }
    all
}
