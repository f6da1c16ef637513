//! A request of the front while it is in flight: what is still to be split
//! off, and what came back.

use super::piece::{Act, Piece};
use super::{After, after_change};
use crate::limits::{REGION_BYTES, REQUEST_PIECES_MAX};
use crate::view::{Place, View, atomic_len};
use bytes::Bytes;
use pagemesh_base::slice::{Part, SliceReply, check_parts};
use pagemesh_base::space::{
    EXTENTS_MAX, Extent, REQUEST_BYTES_MAX, Reply, Request, SpaceError, Token, check_range,
};
use pagemesh_base::units::PAGE_BYTES;

enum Kind {
    Read,
    Write(Bytes),
    Clear,
    /// With its place; it becomes the one piece.
    Transact(Place, Vec<Part>),
    Flush,
    Extents,
}

/// What is split off next.
#[derive(Clone, Copy)]
enum Cursor {
    /// From this byte of the volume.
    Byte(u64),
    /// From this byte of the run of this column.
    Column(usize, u64),
    End,
}

pub(super) enum Next {
    /// The flag: it is the last one.
    Piece(Place, Act, bool),
    End,
}

enum Answer {
    Nothing,
    Data(Vec<u8>),
    Extents(Vec<(u64, u64, Vec<Extent>)>),
}

pub(super) struct Job {
    /// None for work of the engine's own.
    pub token: Option<Token>,
    kind: Kind,
    pub durable: bool,
    begin: u64,
    end: u64,
    cursor: Cursor,
    /// Pieces in flight.
    pub flying: u32,
    /// Pieces are being made right now.
    pub issuing: bool,
    made: u32,
    answer: Answer,
    error: Option<SpaceError>,
}

impl Job {
    /// A result instead, if there is nothing to do or it cannot be done.
    pub(super) fn new(
        token: Token,
        request: Request,
        view: &View,
    ) -> Result<Job, Result<Reply, SpaceError>> {
        let size_bytes = view.size_bytes;
        let (kind, offset, len, durable) = match request {
            Request::Read { offset, len } => (Kind::Read, offset, u64::from(len), false),
            Request::Write {
                offset,
                data,
                durable,
            } => {
                let len = data.len() as u64;
                (Kind::Write(data), offset, len, durable)
            }
            Request::Discard { offset, len } => (Kind::Clear, offset, len, false),
            Request::WriteZeroes {
                offset,
                len,
                durable,
            } => (Kind::Clear, offset, len, durable),
            Request::Transact { parts, durable } => {
                let (place, parts) = place_parts(parts, view).map_err(Err)?;
                let (at, len) = (place.at, place.len);
                (Kind::Transact(place, parts), at, len, durable)
            }
            Request::Flush => (Kind::Flush, 0, size_bytes, false),
            Request::Extents { offset, len } => (Kind::Extents, offset, len, false),
        };
        check_range(size_bytes, offset, len).map_err(Err)?;
        if matches!(kind, Kind::Read | Kind::Write(_)) && len > u64::from(REQUEST_BYTES_MAX) {
            return Err(Err(SpaceError::Unavailable(format!(
                "a request of {len} bytes is longer than {REQUEST_BYTES_MAX}; split it"
            ))));
        }
        match kind {
            Kind::Read if len == 0 => return Err(Ok(Reply::Data(vec![]))),
            Kind::Extents if len == 0 => return Err(Ok(Reply::Extents(vec![]))),
            _ if len == 0 => return Err(Ok(Reply::Done)),
            _ => {}
        }
        let cursor = match kind {
            Kind::Clear | Kind::Flush => Cursor::Column(0, 0),
            _ => Cursor::Byte(offset),
        };
        Ok(Job {
            token: Some(token),
            kind,
            durable,
            begin: offset,
            end: offset + len,
            cursor,
            flying: 0,
            issuing: false,
            made: 0,
            answer: Answer::Nothing,
            error: None,
        })
    }

    /// A flush of the engine's own, of one column.
    pub(super) fn background_flush() -> Job {
        Job {
            token: None,
            kind: Kind::Flush,
            durable: false,
            begin: 0,
            end: 0,
            cursor: Cursor::End,
            flying: 1,
            issuing: false,
            made: 1,
            answer: Answer::Nothing,
            error: None,
        }
    }

    pub(super) fn is_issued(&self) -> bool {
        matches!(self.cursor, Cursor::End)
    }

    /// Whether a later request must wait until this one is all in flight.
    pub(super) fn conflicts(&self, later: &Job) -> bool {
        let changes =
            |job: &Job| matches!(job.kind, Kind::Write(_) | Kind::Clear | Kind::Transact(..));
        let flush = |job: &Job| matches!(job.kind, Kind::Flush);
        (changes(self) || changes(later))
            && !flush(self)
            && !flush(later)
            && self.begin < later.end
            && later.begin < self.end
    }

    /// What its acknowledgement waits for where a leg follows.
    pub(super) fn after(&self) -> After {
        match self.kind {
            Kind::Read | Kind::Extents => After::Nothing,
            Kind::Flush => After::Everything,
            Kind::Write(_) | Kind::Clear | Kind::Transact(..) => after_change(self.durable),
        }
    }

    /// Where a transaction lies, and its parts there.
    pub(super) fn transaction(&self) -> Option<(Place, &[Part])> {
        match &self.kind {
            Kind::Transact(place, parts) => Some((*place, parts)),
            _ => None,
        }
    }

    pub(super) fn next(&mut self, view: &View) -> Next {
        if let Kind::Transact(place, parts) = &mut self.kind {
            self.cursor = Cursor::End;
            return Next::Piece(*place, Act::Transact(std::mem::take(parts)), true);
        }
        let next = match self.cursor {
            Cursor::Byte(at) => self.next_bytes(view, at),
            Cursor::Column(column, offset) => self.next_of_column(view, column, offset),
            Cursor::End => Next::End,
        };
        self.made += 1;
        next
    }

    fn next_bytes(&mut self, view: &View, at: u64) -> Next {
        let lists = matches!(self.kind, Kind::Extents);
        let found = match self.kind {
            Kind::Extents => view.long_place(at, self.end),
            Kind::Write(_) => view.atomic_place(at, self.end),
            _ => view.place(at, self.end),
        };
        let Some(place) = found else {
            self.cursor = Cursor::End;
            return Next::End;
        };
        let next = at + place.len;
        // Extents may end early: one window of pieces is enough.
        let last = next >= self.end || lists && self.made + 1 >= REQUEST_PIECES_MAX;
        self.cursor = if last {
            Cursor::End
        } else {
            Cursor::Byte(next)
        };
        let act = match &self.kind {
            Kind::Write(data) if at == self.begin && next == self.end => Act::Write(data.clone()),
            Kind::Write(data) => {
                let from = (at - self.begin) as usize;
                Act::Write(data.slice(from..from + place.len as usize))
            }
            Kind::Extents => Act::Extents,
            _ => {
                if !last && at == self.begin {
                    self.answer = Answer::Data(vec![0; (self.end - self.begin) as usize]);
                }
                Act::Read
            }
        };
        Next::Piece(place, act, last)
    }

    fn next_of_column(&mut self, view: &View, mut column: usize, mut offset: u64) -> Next {
        let flush = matches!(self.kind, Kind::Flush);
        while column < view.columns.len() {
            let (from, to) = view.column_run(column, self.begin, self.end);
            let from = from.max(offset);
            if from >= to {
                (column, offset) = (column + 1, 0);
                continue;
            }
            let (len, act) = if flush {
                (0, Act::Flush)
            } else {
                let len = (to - from).min(REGION_BYTES - from % REGION_BYTES);
                (clear_len(from, len), Act::Clear)
            };
            self.cursor = if flush || from + len == to {
                Cursor::Column(column + 1, 0)
            } else {
                Cursor::Column(column, from + len)
            };
            let place = Place {
                column,
                offset: from,
                len,
                at: view.volume_offset(column, from),
            };
            let single = view.columns.len() == 1 && (flush || from + len == to);
            if single {
                self.cursor = Cursor::End;
            }
            return Next::Piece(place, act, single);
        }
        self.cursor = Cursor::End;
        Next::End
    }

    /// Takes in what a piece gave.
    pub(super) fn keep(&mut self, piece: &Piece, reply: SliceReply) {
        match (reply, &mut self.answer) {
            (SliceReply::Data(data), Answer::Data(all)) => {
                let from = (piece.at - self.begin) as usize;
                if data.len() as u64 == piece.len {
                    all[from..from + data.len()].copy_from_slice(&data);
                }
            }
            (SliceReply::Data(data), answer) => *answer = Answer::Data(data),
            (SliceReply::Extents(extents), Answer::Extents(all)) => {
                all.push((piece.at, piece.len, extents));
            }
            (SliceReply::Extents(extents), answer) => {
                *answer = Answer::Extents(vec![(piece.at, piece.len, extents)]);
            }
            _ => {}
        }
    }

    /// The first failure counts, and nothing more is split off.
    pub(super) fn fail(&mut self, error: SpaceError) {
        self.error.get_or_insert(error);
        self.cursor = Cursor::End;
    }

    pub(super) fn into_result(self) -> Result<Reply, SpaceError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        Ok(match self.answer {
            Answer::Nothing => Reply::Done,
            Answer::Data(data) => Reply::Data(data),
            Answer::Extents(parts) => Reply::Extents(join(parts)),
        })
    }
}

/// Parts of a volume as parts of the one column that they lie in, in ascending
/// order, and how far they reach there.
fn place_parts(parts: Vec<Part>, view: &View) -> Result<(Place, Vec<Part>), SpaceError> {
    check_parts(&parts, view.size_bytes)?;
    let mut column = None;
    let mut placed = Vec::with_capacity(parts.len());
    for part in parts {
        let (at, len) = (part.offset(), part.len());
        let place = view.long_place(at, at + len);
        let place = place.filter(|place| place.len == len);
        let place = place.filter(|it| column.is_none_or(|column| column == it.column));
        let Some(place) = place else {
            return Err(several_columns(view));
        };
        column = Some(place.column);
        let offset = place.offset;
        placed.push(match part {
            Part::Write { data, .. } => Part::Write { offset, data },
            Part::Clear { len, .. } => Part::Clear { offset, len },
        });
    }
    placed.sort_unstable_by_key(Part::offset);
    let (Some(column), Some(first), Some(last)) = (column, placed.first(), placed.last()) else {
        unreachable!("a transaction has parts");
    };
    let offset = first.offset();
    let place = Place {
        column,
        offset,
        len: last.offset() + last.len() - offset,
        at: view.volume_offset(column, offset),
    };
    Ok((place, placed))
}

fn several_columns(view: &View) -> SpaceError {
    let columns: Vec<String> = view
        .segments
        .iter()
        .map(|s| s.columns.to_string())
        .collect();
    SpaceError::Unsupported(format!(
        "a transaction must lie in one column; this volume has segments of {} columns, and its \
         parts lie in several; use a volume of one column, or let the parts of a transaction lie \
         in one stripe",
        columns.join(", ")
    ))
}

/// How much of a clear a leg surely makes as one, or refuses as one: parts of
/// pages may need space, whole pages never do.
fn clear_len(offset: u64, len: u64) -> u64 {
    let page = PAGE_BYTES as u64;
    if offset.is_multiple_of(page) && len >= page {
        len - len % page
    } else {
        atomic_len(offset, len)
    }
}

/// Puts the extents of pieces in order, up to the first gap.
fn join(mut parts: Vec<(u64, u64, Vec<Extent>)>) -> Vec<Extent> {
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
