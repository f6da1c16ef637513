//! Replies: the kind and tag of the request, and one of:
//!
//! | to | fields | body |
//! |---|---|---|
//! | read | | the bytes |
//! | extents | | per extent 8: bytes, bit 63 set if mapped |
//! | checksums | | per page 4: CRC32C |
//! | births | | per page 4: epoch; 0 if unknown or never written |
//! | dirty | more: offset is the next page to ask from | per run 16: page, count |
//! | in-flight | more: too many to list | per operation 24: page, op, count 4, epoch 4 |
//! | read version, version extents | | as to read, extents |
//! | attach | handle; len is the slice's size in bytes | |
//! | list | more: ask again after the last | per slice 32: slice 16, bytes, epoch 4, zero 4 |
//! | status | | brick 16, capacity, used, sessions 4, incarnation 4, durability as text |
//! | snapshots | more: ask again after the last | per snapshot 4: its epoch |
//! | create clone, promote clone | | leaves that are done, all leaves |
//! | count seen pages | more: offset is the next page to ask from | per run 16: pages, first snapshot 4, last snapshot 4; all ones: the slice |
//! | others | | |
//!
//! An error has its flag and a code in place of the handle:
//!
//! | code | | fields | body |
//! |---|---|---|---|
//! | 1 | stale epoch | epoch: the slice's | |
//! | 2 | no space | | |
//! | 3 | damaged | offset: the page's first byte | |
//! | 4, 5 | no such slice, slice exists | | slice |
//! | 6, 7, 8 | out of range, lost, refused | | reason as text |
//!
//! In the reply to a request of a slice, op has the nanoseconds from the request's arrival until the
//! reply, and len those of them that the store took.
//!
//! Numbers without a size have 8 bytes; text is UTF-8 of at most
//! [`TEXT_BYTES_MAX`] bytes.

use super::fields::FieldReader;
use super::{
    Direction, FLAG_ERROR, FLAG_MORE, Header, IN_FLIGHT_BYTES, INFO_BYTES, MalformedMessage,
    MessageKind, RUN_BYTES,
};
use crate::limits::TEXT_BYTES_MAX;
use bytes::Bytes;
use pagemesh_base::ids::{Epoch, PageNo};
use pagemesh_base::layout::{BrickId, SliceId};
use pagemesh_base::slice::{
    BrickStatus, CloneProgress, InFlightOp, PageRun, PageVersion, SeenPages, SeenPagesList,
    SliceError, SliceInfo, SliceReply, SliceRequest, VERSION_LEAF_BYTES, VersionList,
};
use pagemesh_base::space::Extent;
use uuid::Uuid;

/// The bit of an extent's length that marks it as mapped.
const MAPPED: u64 = 1 << 63;

/// The answer to an attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachReply {
    /// The slice's handle in requests; over `map` the object's number in the pool.
    pub handle: u32,
    /// The slice's size.
    pub size_bytes: u64,
}

/// A brick's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// To attach.
    Attach(AttachReply),
    /// To a request of a slice. Control calls answer `Done`.
    Slice(SliceReply),
    /// To list.
    List {
        /// Ordered by slice identity.
        slices: Vec<SliceInfo>,
        /// Whether there are more after the last.
        more: bool,
    },
    /// To status.
    Status(BrickStatus),
    /// To snapshots.
    Snapshots {
        /// Ascending.
        snapshots: Vec<Epoch>,
        /// Whether there are more after the last.
        more: bool,
    },
    /// To list versions.
    Versions(VersionList),
    /// To create clone and promote clone.
    Progress(CloneProgress),
    /// To count seen pages.
    SeenPages(SeenPagesList),
}

/// Bytes or entries that the reply must have, if the request fixes the number.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpectedLen(usize);

impl ExpectedLen {
    pub(crate) fn of(request: &SliceRequest) -> ExpectedLen {
        ExpectedLen(match request {
            SliceRequest::Read { len, .. } | SliceRequest::ReadVersion { len, .. } => *len as usize,
            SliceRequest::VersionLeaf { .. } => VERSION_LEAF_BYTES,
            SliceRequest::Checksums { count, .. } | SliceRequest::Births { count, .. } => {
                *count as usize
            }
            _ => 0,
        })
    }

    /// Whether a reply, of the request's kind, has the requested number.
    pub(crate) fn fits(self, reply: &SliceReply) -> bool {
        match reply {
            SliceReply::Data(data) => data.len() == self.0,
            SliceReply::Checksums(sums) => sums.len() == self.0,
            SliceReply::Births(births) => births.len() == self.0,
            _ => true,
        }
    }
}

/// A reply, or the error in its place.
pub type Answer = Result<Reply, SliceError>;

/// Encodes an answer to a request of this kind: the complete header, and the body. An answer that
/// the kind cannot have, or beyond its limits, is the brick's defect and is sent as an error.
#[must_use]
pub fn encode(kind: MessageKind, tag: u64, answer: Answer) -> (Header, Bytes) {
    let mut header = Header::new(kind, Direction::Reply, tag);
    let encoded = match answer {
        Ok(reply) => encode_reply(kind, &mut header, reply),
        Err(error) => Ok(encode_error(&mut header, &error)),
    };
    let fits = encoded.and_then(
        |body| match body.len() <= header.body_bytes_max() as usize {
            true => Ok(body),
            false => Err("the brick's answer is longer than its kind allows"),
        },
    );
    let body = fits.unwrap_or_else(|cause| {
        header = Header::new(kind, Direction::Reply, tag);
        encode_error(&mut header, &SliceError::Refused(cause.into()))
    });
    (header.with_body(&body), body)
}

fn encode_reply(
    kind: MessageKind,
    header: &mut Header,
    reply: Reply,
) -> Result<Bytes, &'static str> {
    Ok(match (kind, reply) {
        (MessageKind::Attach, Reply::Attach(attached)) => {
            (header.handle, header.len) = (attached.handle, attached.size_bytes);
            Bytes::new()
        }
        (kind, Reply::Slice(SliceReply::Data(data))) if kind.has_data_answer() => data.into(),
        (MessageKind::ListVersions, Reply::Versions(list)) => encode_versions(header, &list),
        (
            MessageKind::Extents | MessageKind::VersionExtents | MessageKind::VersionChanges,
            Reply::Slice(SliceReply::Extents(extents)),
        ) => encode_extents(&extents),
        (MessageKind::Checksums, Reply::Slice(SliceReply::Checksums(sums))) => {
            list(&sums, |sum, body| {
                body.extend_from_slice(&sum.to_le_bytes());
            })
        }
        (MessageKind::Births, Reply::Slice(SliceReply::Births(births))) => list(&births, put_epoch),
        (MessageKind::Dirty, Reply::Slice(SliceReply::Dirty { runs, next })) => {
            if let Some(page) = next {
                (header.flags, header.offset) = (FLAG_MORE, page.0);
            }
            list(&runs, |run, body| {
                put(body, run.page.0);
                put(body, run.count);
            })
        }
        (MessageKind::InFlight, Reply::Slice(SliceReply::InFlight(None))) => {
            header.flags = FLAG_MORE;
            Bytes::new()
        }
        (MessageKind::InFlight, Reply::Slice(SliceReply::InFlight(Some(found)))) => {
            list(&found, put_in_flight)
        }
        (MessageKind::List, Reply::List { slices, more }) => {
            header.flags = if more { FLAG_MORE } else { 0 };
            list(&slices, put_info)
        }
        (MessageKind::Status, Reply::Status(status)) => encode_status(&status),
        (MessageKind::Snapshots, Reply::Snapshots { snapshots, more }) => {
            header.flags = if more { FLAG_MORE } else { 0 };
            list(&snapshots, put_epoch)
        }
        (
            MessageKind::CreateClone | MessageKind::PromoteClone,
            Reply::Progress(CloneProgress { done, all }),
        ) => list(&[done, all], |&leaves, body| put(body, leaves)),
        (MessageKind::CountSeenPages, Reply::SeenPages(seen)) => encode_seen_pages(header, &seen),
        (kind, Reply::Slice(SliceReply::Done)) if is_answered_by_done(kind) => Bytes::new(),
        _ => return Err("the brick's answer does not fit the request"),
    })
}

fn encode_versions(header: &mut Header, found: &VersionList) -> Bytes {
    if let Some(page) = found.next {
        (header.flags, header.offset) = (FLAG_MORE, page.0);
    }
    list(&found.versions, |version, body| {
        put(body, version.page.0);
        put_epoch(&version.birth, body);
        put_epoch(&version.death, body);
        body.extend_from_slice(&version.sum.to_le_bytes());
    })
}

fn encode_extents(extents: &[Extent]) -> Bytes {
    let word = |extent: &Extent| match extent.mapped {
        true => extent.len | MAPPED,
        false => extent.len & !MAPPED,
    };
    list(extents, |extent, body| put(body, word(extent)))
}

fn encode_seen_pages(header: &mut Header, SeenPagesList { runs, next }: &SeenPagesList) -> Bytes {
    if let Some(page) = next {
        (header.flags, header.offset) = (FLAG_MORE, page.0);
    }
    list(runs, |run, body| {
        put(body, run.pages);
        put_epoch(&run.first, body);
        put_epoch(&run.last, body);
    })
}

/// Whether requests of this kind are answered by a bare `Done`.
fn is_answered_by_done(kind: MessageKind) -> bool {
    matches!(
        kind,
        MessageKind::Write
            | MessageKind::Clear
            | MessageKind::Transact
            | MessageKind::Copy
            | MessageKind::Flush
            | MessageKind::ForgetInFlight
            | MessageKind::KeepOrder
            | MessageKind::RaiseEpoch
            | MessageKind::Create
            | MessageKind::Resize
            | MessageKind::Delete
            | MessageKind::PrepareSnapshot
            | MessageKind::ControlPrepareSnapshot
            | MessageKind::DropSnapshots
            | MessageKind::AdoptSnapshots
            | MessageKind::EditVersions
    )
}

fn put(body: &mut Vec<u8>, number: u64) {
    body.extend_from_slice(&number.to_le_bytes());
}

fn list<T>(entries: &[T], one: impl Fn(&T, &mut Vec<u8>)) -> Bytes {
    let mut body = Vec::new();
    for entry in entries {
        one(entry, &mut body);
    }
    body.into()
}

fn put_epoch(epoch: &Epoch, body: &mut Vec<u8>) {
    body.extend_from_slice(&epoch.0.to_le_bytes());
}

fn put_in_flight(operation: &InFlightOp, body: &mut Vec<u8>) {
    put(body, operation.page.0);
    put(body, operation.op);
    body.extend_from_slice(&operation.count.to_le_bytes());
    body.extend_from_slice(&operation.epoch.0.to_le_bytes());
}

fn put_info(info: &SliceInfo, body: &mut Vec<u8>) {
    body.extend_from_slice(info.slice.0.as_bytes());
    put(body, info.size_bytes);
    body.extend_from_slice(&info.epoch.to_le_bytes());
    body.extend_from_slice(&[0; 4]);
}

fn encode_status(status: &BrickStatus) -> Bytes {
    let mut body = Vec::with_capacity(super::STATUS_BYTES + status.durability.len());
    body.extend_from_slice(status.brick.0.as_bytes());
    put(&mut body, status.capacity_bytes);
    put(&mut body, status.used_bytes);
    body.extend_from_slice(&status.sessions.to_le_bytes());
    body.extend_from_slice(&status.incarnation.to_le_bytes());
    body.extend_from_slice(truncate_text(&status.durability).as_bytes());
    body.into()
}

/// The text, cut to the length that a message carries.
pub(crate) fn truncate_text(text: &str) -> &str {
    &text[..text.floor_char_boundary(TEXT_BYTES_MAX)]
}

fn encode_error(header: &mut Header, error: &SliceError) -> Bytes {
    header.flags = FLAG_ERROR;
    let text = |text: &str| Bytes::copy_from_slice(truncate_text(text).as_bytes());
    let id = |slice: &SliceId| Bytes::copy_from_slice(slice.0.as_bytes());
    let (code, body) = match error {
        SliceError::StaleEpoch { current } => {
            header.epoch = current.0;
            (1, Bytes::new())
        }
        SliceError::NoSpace => (2, Bytes::new()),
        SliceError::Damaged { offset } => {
            header.offset = *offset;
            (3, Bytes::new())
        }
        SliceError::NoSuchSlice(slice) => (4, id(slice)),
        SliceError::SliceExists(slice) => (5, id(slice)),
        SliceError::OutOfRange(reason) => (6, text(reason)),
        SliceError::Lost(reason) => (7, text(reason)),
        SliceError::Refused(reason) => (8, text(reason)),
        SliceError::OnFlash => (8, text(&error.to_string())),
        SliceError::NoSession(reason) => (9, text(reason)),
    };
    header.handle = code;
    body
}

/// Decodes an answer from a checked header and body. The bytes of a read are not copied.
///
/// # Errors
/// When a field has a value that its kind cannot have.
pub fn decode(header: &Header, body: Vec<u8>) -> Result<Answer, MalformedMessage> {
    let answer = match header.is_error() {
        true => Err(decode_error(header, &body)?),
        false => Ok(decode_reply(header, body)?),
    };
    let mut exact = Header::new(header.kind, Direction::Reply, header.tag);
    exact.body_len = header.body_len;
    exact = exact.with_service(header.service());
    set_used_fields(&mut exact, &answer);
    match exact == header.without_body_crc() {
        true => Ok(answer),
        false => Err(header.malformed("an unused field is not zero")),
    }
}

/// Sets the fields that an answer uses; decoding compares the header with them.
fn set_used_fields(header: &mut Header, answer: &Answer) {
    match answer {
        Err(error) => {
            encode_error(header, error);
        }
        Ok(Reply::Attach(attached)) => {
            (header.handle, header.len) = (attached.handle, attached.size_bytes);
        }
        Ok(
            Reply::Slice(SliceReply::Dirty {
                next: Some(page), ..
            })
            | Reply::Versions(VersionList {
                next: Some(page), ..
            })
            | Reply::SeenPages(SeenPagesList {
                next: Some(page), ..
            }),
        ) => (header.flags, header.offset) = (FLAG_MORE, page.0),
        Ok(
            Reply::Slice(SliceReply::InFlight(None))
            | Reply::List { more: true, .. }
            | Reply::Snapshots { more: true, .. },
        ) => {
            header.flags = FLAG_MORE;
        }
        Ok(_) => {}
    }
}

fn decode_error(header: &Header, body: &[u8]) -> Result<SliceError, MalformedMessage> {
    let slice = || match Uuid::from_slice(body) {
        Ok(slice) => Ok(SliceId(slice)),
        Err(_) => Err(header.malformed("no slice named")),
    };
    let reason = || match std::str::from_utf8(body) {
        Ok(reason) => Ok(reason.to_owned()),
        Err(_) => Err(header.malformed("a reason that is not text")),
    };
    let error = match header.handle {
        1 => SliceError::StaleEpoch {
            current: Epoch(header.epoch),
        },
        2 => SliceError::NoSpace,
        3 => SliceError::Damaged {
            offset: header.offset,
        },
        4 => SliceError::NoSuchSlice(slice()?),
        5 => SliceError::SliceExists(slice()?),
        6 => SliceError::OutOfRange(reason()?),
        7 => SliceError::Lost(reason()?),
        8 => SliceError::Refused(reason()?),
        9 => SliceError::NoSession(reason()?),
        _ => return Err(header.malformed("an unknown error")),
    };
    match header.handle > 3 || body.is_empty() {
        true => Ok(error),
        false => Err(header.malformed("a body where none belongs")),
    }
}

fn decode_reply(header: &Header, body: Vec<u8>) -> Result<Reply, MalformedMessage> {
    let more = header.flags & FLAG_MORE != 0;
    let cut = || header.malformed("the last entry of a list is cut");
    let fields = FieldReader::new(&body);
    Ok(Reply::Slice(match header.kind {
        kind if kind.has_data_answer() => SliceReply::Data(body),
        MessageKind::Extents | MessageKind::VersionExtents | MessageKind::VersionChanges => {
            SliceReply::Extents(fields.list(extent).ok_or_else(cut)?)
        }
        MessageKind::Checksums => {
            SliceReply::Checksums(fields.list(FieldReader::u32).ok_or_else(cut)?)
        }
        MessageKind::Births => {
            let births = fields.list(|fields| fields.u32().map(Epoch));
            SliceReply::Births(births.ok_or_else(cut)?)
        }
        MessageKind::Dirty => SliceReply::Dirty {
            runs: fields.list(run).ok_or_else(cut)?,
            next: more.then_some(PageNo(header.offset)),
        },
        MessageKind::InFlight if more && body.is_empty() => SliceReply::InFlight(None),
        MessageKind::InFlight => {
            SliceReply::InFlight(Some(fields.list(in_flight).ok_or_else(cut)?))
        }
        MessageKind::Attach => {
            return Ok(Reply::Attach(AttachReply {
                handle: header.handle,
                size_bytes: header.len,
            }));
        }
        MessageKind::List => {
            let slices = fields.list(info).ok_or_else(cut)?;
            return Ok(Reply::List { slices, more });
        }
        MessageKind::Status => {
            let status = status(fields).ok_or_else(|| header.malformed("a status that is cut"))?;
            return Ok(Reply::Status(status));
        }
        MessageKind::ListVersions => {
            let versions = fields.list(version).ok_or_else(cut)?;
            let next = more.then_some(PageNo(header.offset));
            return Ok(Reply::Versions(VersionList { versions, next }));
        }
        MessageKind::Snapshots => {
            let snapshots = fields.list(|it| it.u32().map(Epoch)).ok_or_else(cut)?;
            return Ok(Reply::Snapshots { snapshots, more });
        }
        MessageKind::CreateClone | MessageKind::PromoteClone => {
            let leaves = fields.list(FieldReader::u64).ok_or_else(cut)?;
            let [done, all] = leaves[..] else {
                return Err(header.malformed("a progress that has not two numbers"));
            };
            return Ok(Reply::Progress(CloneProgress { done, all }));
        }
        MessageKind::CountSeenPages => return decode_seen_pages(header, fields).ok_or_else(cut),
        _ => SliceReply::Done,
    }))
}

fn extent(fields: &mut FieldReader<'_>) -> Option<Extent> {
    let word = fields.u64()?;
    Some(Extent {
        len: word & !MAPPED,
        mapped: word & MAPPED != 0,
    })
}

fn decode_seen_pages(header: &Header, fields: FieldReader<'_>) -> Option<Reply> {
    let runs = fields.list(seen_pages)?;
    let next = (header.flags & FLAG_MORE != 0).then_some(PageNo(header.offset));
    Some(Reply::SeenPages(SeenPagesList { runs, next }))
}

fn seen_pages(fields: &mut FieldReader<'_>) -> Option<SeenPages> {
    let pages = fields.u64()?;
    Some(SeenPages {
        pages,
        first: Epoch(fields.u32()?),
        last: Epoch(fields.u32()?),
    })
}

fn run(fields: &mut FieldReader<'_>) -> Option<PageRun> {
    Some(PageRun {
        page: PageNo(fields.u64()?),
        count: fields.u64()?,
    })
}

fn version(fields: &mut FieldReader<'_>) -> Option<PageVersion> {
    Some(PageVersion {
        page: PageNo(fields.u64()?),
        birth: Epoch(fields.u32()?),
        death: Epoch(fields.u32()?),
        sum: fields.u32()?,
    })
}

fn in_flight(fields: &mut FieldReader<'_>) -> Option<InFlightOp> {
    let (page, op) = (PageNo(fields.u64()?), fields.u64()?);
    Some(InFlightOp {
        page,
        count: fields.u32()?,
        epoch: Epoch(fields.u32()?),
        op,
    })
}

fn info(fields: &mut FieldReader<'_>) -> Option<SliceInfo> {
    let info = SliceInfo {
        slice: SliceId(Uuid::from_bytes(fields.array()?)),
        size_bytes: fields.u64()?,
        epoch: fields.u32()?,
    };
    (fields.array()? == [0; 4]).then_some(info)
}

fn status(mut fields: FieldReader<'_>) -> Option<BrickStatus> {
    Some(BrickStatus {
        brick: BrickId(Uuid::from_bytes(fields.array()?)),
        capacity_bytes: fields.u64()?,
        used_bytes: fields.u64()?,
        sessions: fields.u32()?,
        incarnation: fields.u32()?,
        durability: std::str::from_utf8(fields.rest()).ok()?.to_owned(),
    })
}

const _: () = assert!(RUN_BYTES == 2 * 8 && IN_FLIGHT_BYTES == 3 * 8 && INFO_BYTES == 4 * 8);
