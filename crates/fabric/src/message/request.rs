//! Requests.
//!
//! | kind | handle | offset | len | stamp | body |
//! |---|---|---|---|---|---|
//! | 1 read | yes | byte | bytes | | |
//! | 2 write | yes | byte | bytes | yes | the bytes |
//! | 3 clear | yes | byte | bytes | yes | |
//! | 4 flush, 8 in-flight, 9 forget in-flight, 12 keep order | yes | | | | |
//! | 5 extents | yes | byte | bytes | | |
//! | 6 checksums | yes | page | count | | |
//! | 7 dirty | yes | page | | epoch: the oldest birth | |
//! | 10 raise epoch | yes | | | epoch | |
//! | 11 transact | yes | | parts | yes | see below |
//! | 13 births | yes | page | count | | |
//! | 14 copy | yes | page | count | yes | the pages, or nothing for holes; per page 4: the epoch of its birth |
//! | 15 prepare snapshot | yes | | | epoch: the snapshot | |
//! | 16 attach | | | | epoch | slice |
//! | 17 read version, 18 version extents | yes | byte | bytes | epoch: the snapshot | |
//! | 32 create, 33 resize | | | bytes | | slice |
//! | 34 delete | | | | | slice |
//! | 35 list | | | | | slice after which to continue, or nothing |
//! | 36 status | | | | | |
//! | 37 prepare snapshot | | | | epoch: the snapshot | slice |
//! | 38 drop snapshots | | | count | | slice; per snapshot 4: its epoch |
//! | 39 snapshots | | | | epoch: the last snapshot of the previous answer, or 0 | slice |
//! | 40 create clone | | | bytes | epoch: the snapshot | slice; the slice of the snapshot |
//! | 41 promote clone | | | | | slice |
//! | 42 adopt snapshots | | | count | | slice; per snapshot 4: its epoch |
//! | 43 list versions | | page | count | epoch: only deaths below | slice; per snapshot 4: its epoch |
//! | 44 edit versions | | | edits | epoch: only deaths below | slice; the pages that are added; the edits, see below |
//! | 46 count seen pages | | page | | | slice |
//! | 45 read version | | byte | bytes | epoch: the snapshot | slice |
//!
//! A write, a clear or a transaction with the flag *durable* is answered after a flush that covers it.
//!
//! A read, a write or a transaction has a tier hint of two bits, if the hellos of both ends say that they know it.
//!
//! A slice is its 16-byte UUID in the order of its text form.
//!
//! The body of a transaction is the bytes of its writes, one after the other, and then the parts,
//! 16 bytes each. So the pages lie in the receiver's buffer as the pages of a write do.
//!
//! ```text
//!  0  offset  8   first byte
//!  8  len     4   bytes
//! 12  action  4   1 write, 2 clear
//! ```

//!
//! An edit of a version has 24 bytes: page 8, birth 4, the death that it has or 0 to add it 4, the death that it gets or 0 to remove
//! it 4, zero 4.

use super::bodies::{
    decode_clone, decode_copy, decode_edits, decode_parts, encode_copy, encode_dropped,
    encode_edits, encode_parts,
};
pub use super::control::Control;
pub use super::version_copies::{check_version_edits, check_version_range};
use super::version_copies::{decode_listed, decode_read};
use super::{Direction, FLAG_DURABLE, HINT_SHIFT, Header, ID_BYTES, MalformedMessage, MessageKind};
use crate::limits::CLEAR_BYTES_MAX;
use bytes::Bytes;
use pagemesh_base::ids::{EPOCH_MAX, Epoch, PageNo};
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{
    COPY_PAGES_MAX, DROPPED_SNAPSHOTS_MAX, LIST_ENTRIES_MAX, SLICE_IO_BYTES_MAX, SliceError,
    SliceRequest, Stamp, check_parts,
};
use pagemesh_base::tier_hint::TierHint;
use uuid::Uuid;

/// A client's request to a brick.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Get a handle for a slice, as a client of this epoch.
    Attach {
        /// The slice.
        slice: SliceId,
        /// The client's epoch.
        epoch: Epoch,
    },
    /// A request to an attached slice.
    Slice {
        /// The handle that attach returned.
        handle: u32,
        /// The request.
        request: SliceRequest,
    },
    /// A control call to the brick.
    Control(Control),
}

fn kind_of(request: &SliceRequest) -> MessageKind {
    match request {
        SliceRequest::Durable { change } => kind_of(change),
        SliceRequest::Read { .. } => MessageKind::Read,
        SliceRequest::Write { .. } => MessageKind::Write,
        SliceRequest::Clear { .. } => MessageKind::Clear,
        SliceRequest::Flush => MessageKind::Flush,
        SliceRequest::Extents { .. } => MessageKind::Extents,
        SliceRequest::Checksums { .. } => MessageKind::Checksums,
        SliceRequest::Dirty { .. } => MessageKind::Dirty,
        SliceRequest::InFlight => MessageKind::InFlight,
        SliceRequest::ForgetInFlight => MessageKind::ForgetInFlight,
        SliceRequest::KeepOrder => MessageKind::KeepOrder,
        SliceRequest::RaiseEpoch { .. } => MessageKind::RaiseEpoch,
        SliceRequest::Transact { .. } => MessageKind::Transact,
        SliceRequest::Births { .. } => MessageKind::Births,
        SliceRequest::Copy { .. } => MessageKind::Copy,
        SliceRequest::PrepareSnapshot { .. } => MessageKind::PrepareSnapshot,
        SliceRequest::ReadVersion { .. } => MessageKind::ReadVersion,
        SliceRequest::VersionExtents { .. } => MessageKind::VersionExtents,
        SliceRequest::VersionChanges { .. } => MessageKind::VersionChanges,
        SliceRequest::VersionLeaf { .. } => MessageKind::VersionLeaf,
    }
}

/// Whether requests of the kind may have a hint.
fn takes_hint(kind: MessageKind) -> bool {
    matches!(
        kind,
        MessageKind::Read | MessageKind::Write | MessageKind::Transact
    )
}

impl Header {
    /// The tier hint of a request.
    #[must_use]
    pub fn hint(&self) -> TierHint {
        match takes_hint(self.kind) {
            true => TierHint::from_bits((self.flags >> HINT_SHIFT) as u8),
            false => TierHint::None,
        }
    }
}

fn id(slice: SliceId) -> Bytes {
    Bytes::copy_from_slice(slice.0.as_bytes())
}

impl Request {
    /// The kind of the request.
    #[must_use]
    pub fn kind(&self) -> MessageKind {
        match self {
            Request::Attach { .. } => MessageKind::Attach,
            Request::Slice { request, .. } => kind_of(request),
            Request::Control(control) => control.kind(),
        }
    }

    /// As [`Request::encode`], with a hint if the request has a place for it. The peer must know hints.
    #[must_use]
    pub fn encode_hinted(&self, tag: u64, hint: TierHint) -> (Header, Bytes) {
        let (mut header, body) = self.encode(tag);
        if takes_hint(header.kind) {
            header.flags |= u16::from(hint.bits()) << HINT_SHIFT;
        }
        (header, body)
    }

    /// The complete header, and the body. The body is copied only if it has several parts.
    #[must_use]
    pub fn encode(&self, tag: u64) -> (Header, Bytes) {
        let body = self.body();
        (self.header(tag).with_body(&body), body)
    }

    fn body(&self) -> Bytes {
        match self {
            Request::Attach { slice, .. } => id(*slice),
            Request::Slice { request, .. } => match request.without_flush() {
                SliceRequest::Write { data, .. } => data.clone(),
                SliceRequest::Transact { parts, .. } => encode_parts(parts),
                SliceRequest::Copy { births, data, .. } => encode_copy(births, data),
                _ => Bytes::new(),
            },
            Request::Control(control) => match *control {
                Control::Create { slice, .. }
                | Control::Resize { slice, .. }
                | Control::Delete { slice }
                | Control::PrepareSnapshot { slice, .. }
                | Control::Snapshots { slice, .. }
                | Control::CountSeenPages { slice, .. }
                | Control::ReadVersion { slice, .. }
                | Control::PromoteClone { slice } => id(slice),
                Control::CreateClone { slice, source, .. } => {
                    [id(slice), id(source.origin)].concat().into()
                }
                Control::DropSnapshots {
                    slice,
                    ref snapshots,
                }
                | Control::AdoptSnapshots {
                    slice,
                    ref snapshots,
                } => encode_dropped(slice, snapshots),
                Control::ListVersions { slice, ref range } => {
                    encode_dropped(slice, &range.snapshots)
                }
                Control::EditVersions { slice, ref edits } => encode_edits(slice, edits),
                Control::List { after } => after.map(id).unwrap_or_default(),
                Control::Status => Bytes::new(),
            },
        }
    }

    /// The header without the body's length and checksum.
    fn header(&self, tag: u64) -> Header {
        let mut header = Header::new(self.kind(), Direction::Request, tag);
        match self {
            Request::Attach { epoch, .. } => header.epoch = epoch.0,
            Request::Slice { handle, request } => {
                header.handle = *handle;
                set_header_fields(request, &mut header);
            }
            Request::Control(
                Control::Create { size_bytes, .. } | Control::Resize { size_bytes, .. },
            ) => header.len = *size_bytes,
            Request::Control(
                Control::PrepareSnapshot {
                    snapshot: epoch, ..
                }
                | Control::Snapshots { after: epoch, .. },
            ) => header.epoch = epoch.0,
            Request::Control(Control::CreateClone {
                source, size_bytes, ..
            }) => (header.epoch, header.len) = (source.snapshot.0, *size_bytes),
            Request::Control(
                Control::DropSnapshots { snapshots, .. }
                | Control::AdoptSnapshots { snapshots, .. },
            ) => {
                header.len = snapshots.len() as u64;
            }
            Request::Control(Control::ListVersions { range, .. }) => {
                (header.offset, header.epoch) = (range.from.0, range.below.0);
                header.len = range.snapshots.len() as u64;
            }
            Request::Control(Control::EditVersions { edits, .. }) => {
                (header.epoch, header.len) = (edits.below.0, edits.edits.len() as u64);
            }
            Request::Control(Control::ReadVersion {
                snapshot, range, ..
            }) => {
                (header.offset, header.len) = (range.0, u64::from(range.1));
                header.epoch = snapshot.0;
            }
            Request::Control(Control::CountSeenPages { from, .. }) => header.offset = from.0,
            Request::Control(_) => {}
        }
        header
    }

    /// Decodes a request from a checked header and body.
    ///
    /// # Errors
    /// When a field has a value that its kind cannot have.
    pub fn decode(header: &Header, body: Bytes) -> Result<Request, MalformedMessage> {
        let slice = Uuid::from_slice(&body).map(SliceId);
        let named = || {
            slice
                .clone()
                .map_err(|_| header.malformed("no slice named"))
        };
        let request = match header.kind {
            MessageKind::Attach => Request::Attach {
                slice: named()?,
                epoch: Epoch(header.epoch),
            },
            MessageKind::Create => Request::Control(Control::Create {
                slice: named()?,
                size_bytes: header.len,
            }),
            MessageKind::Resize => Request::Control(Control::Resize {
                slice: named()?,
                size_bytes: header.len,
            }),
            MessageKind::Delete => Request::Control(Control::Delete { slice: named()? }),
            MessageKind::List => Request::Control(Control::List {
                after: (!body.is_empty()).then(named).transpose()?,
            }),
            MessageKind::Status => Request::Control(Control::Status),
            MessageKind::ControlPrepareSnapshot => Request::Control(Control::PrepareSnapshot {
                slice: named()?,
                snapshot: Epoch(header.epoch),
            }),
            MessageKind::DropSnapshots
            | MessageKind::AdoptSnapshots
            | MessageKind::ListVersions => Request::Control(decode_listed(header, &body)?),
            MessageKind::EditVersions => Request::Control(decode_edits(header, body)?),
            MessageKind::ControlReadVersion => Request::Control(decode_read(header, named()?)?),
            MessageKind::CreateClone => Request::Control(decode_clone(header, &body)?),
            MessageKind::PromoteClone => {
                Request::Control(Control::PromoteClone { slice: named()? })
            }
            MessageKind::CountSeenPages => Request::Control(Control::CountSeenPages {
                slice: named()?,
                from: PageNo(header.offset),
            }),
            MessageKind::Snapshots => Request::Control(Control::Snapshots {
                slice: named()?,
                after: Epoch(header.epoch),
            }),
            _ => Request::Slice {
                handle: header.handle,
                request: with_flush(header, slice_request(header, body)?)?,
            },
        };
        check_unused_fields(header, &request)?;
        Ok(request)
    }
}

/// Refuses a header with a value in a field that the request does not use.
fn check_unused_fields(header: &Header, request: &Request) -> Result<(), MalformedMessage> {
    let mut exact = request.header(header.tag);
    exact.flags |= u16::from(header.hint().bits()) << HINT_SHIFT;
    exact.body_len = match header.kind {
        MessageKind::List
        | MessageKind::Write
        | MessageKind::Transact
        | MessageKind::Copy
        | MessageKind::DropSnapshots
        | MessageKind::AdoptSnapshots
        | MessageKind::ListVersions
        | MessageKind::EditVersions => header.body_len,
        kind => kind.request_bytes_max(),
    };
    match exact == header.without_body_crc() {
        true => Ok(()),
        false => Err(header.malformed("an unused field is not zero")),
    }
}

const _: () = assert!(ID_BYTES == size_of::<Uuid>());

/// Checks a request against the limits of its kind. Both ends check: the client before it sends,
/// the brick before it allocates.
///
/// # Errors
/// [`SliceError::OutOfRange`] with the limit.
pub fn check_limits(request: &SliceRequest) -> Result<(), SliceError> {
    let (what, asked, max) = match request.without_flush() {
        SliceRequest::Read { len, .. } | SliceRequest::ReadVersion { len, .. } => {
            ("bytes at once", u64::from(*len), IO_MAX)
        }
        SliceRequest::Write { data, .. } => ("bytes at once", data.len() as u64, IO_MAX),
        SliceRequest::Clear { len, .. } => ("bytes cleared at once", *len, CLEAR_BYTES_MAX),
        SliceRequest::Transact { parts, .. } => {
            // Only the brick knows whether they lie in the slice.
            let checked = check_parts(parts, u64::MAX);
            return checked.map_err(|cause| SliceError::OutOfRange(cause.to_string()));
        }
        SliceRequest::Checksums { count, .. } => (
            "checksums at once",
            u64::from(*count),
            LIST_ENTRIES_MAX as u64,
        ),
        SliceRequest::Births { count, .. } => {
            ("births at once", u64::from(*count), LIST_ENTRIES_MAX as u64)
        }
        SliceRequest::Copy { births, .. } => (
            "pages copied at once",
            births.len() as u64,
            COPY_PAGES_MAX as u64,
        ),
        SliceRequest::RaiseEpoch { epoch, .. }
        | SliceRequest::PrepareSnapshot { snapshot: epoch } => {
            ("as an epoch", u64::from(epoch.0), u64::from(EPOCH_MAX))
        }
        _ => return Ok(()),
    };
    match asked <= max {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!(
            "{asked} {what}; the most is {max}"
        ))),
    }
}

/// Checks the number of snapshots that one call drops. Both ends check.
///
/// # Errors
/// [`SliceError::OutOfRange`] with the limit.
pub fn check_dropped(dropped: &[Epoch]) -> Result<(), SliceError> {
    match dropped.len() <= DROPPED_SNAPSHOTS_MAX {
        true => Ok(()),
        false => Err(SliceError::OutOfRange(format!(
            "{} snapshots dropped at once; the most is {DROPPED_SNAPSHOTS_MAX}",
            dropped.len()
        ))),
    }
}

const IO_MAX: u64 = SLICE_IO_BYTES_MAX as u64;

fn set_header_fields(request: &SliceRequest, header: &mut Header) {
    match request {
        SliceRequest::Durable { change } => {
            header.flags |= FLAG_DURABLE;
            set_header_fields(change, header);
        }
        SliceRequest::Read { offset, len } => {
            (header.offset, header.len) = (*offset, u64::from(*len));
        }
        SliceRequest::Write {
            offset,
            data,
            stamp,
        } => {
            (header.offset, header.len) = (*offset, data.len() as u64);
            put_stamp(*stamp, header);
        }
        SliceRequest::Clear { offset, len, stamp } => {
            (header.offset, header.len) = (*offset, *len);
            put_stamp(*stamp, header);
        }
        SliceRequest::Transact { parts, stamp } => {
            header.len = parts.len() as u64;
            put_stamp(*stamp, header);
        }
        SliceRequest::Extents { offset, len } => (header.offset, header.len) = (*offset, *len),
        SliceRequest::Checksums { page, count } => {
            (header.offset, header.len) = (page.0, u64::from(*count));
        }
        SliceRequest::Dirty { since, from } => {
            (header.offset, header.epoch) = (from.0, since.0);
        }
        SliceRequest::Births { page, count } => {
            (header.offset, header.len) = (page.0, u64::from(*count));
        }
        SliceRequest::Copy {
            page,
            births,
            stamp,
            ..
        } => {
            (header.offset, header.len) = (page.0, births.len() as u64);
            put_stamp(*stamp, header);
        }
        SliceRequest::RaiseEpoch { epoch, lost_since } => {
            (header.epoch, header.offset) = (epoch.0, u64::from(lost_since.0));
        }
        SliceRequest::PrepareSnapshot { .. }
        | SliceRequest::ReadVersion { .. }
        | SliceRequest::VersionExtents { .. }
        | SliceRequest::VersionChanges { .. }
        | SliceRequest::VersionLeaf { .. } => set_snapshot_fields(request, header),
        SliceRequest::Flush
        | SliceRequest::InFlight
        | SliceRequest::ForgetInFlight
        | SliceRequest::KeepOrder => {}
    }
}

fn set_snapshot_fields(request: &SliceRequest, header: &mut Header) {
    match request {
        SliceRequest::PrepareSnapshot { snapshot } => header.epoch = snapshot.0,
        SliceRequest::ReadVersion {
            snapshot,
            offset,
            len,
        } => {
            (header.offset, header.len, header.epoch) = (*offset, u64::from(*len), snapshot.0);
        }
        SliceRequest::VersionExtents {
            snapshot,
            offset,
            len,
        } => {
            (header.offset, header.len, header.epoch) = (*offset, *len, snapshot.0);
        }
        SliceRequest::VersionLeaf { snapshot, leaf } => {
            (header.offset, header.epoch) = (*leaf, snapshot.0);
        }
        SliceRequest::VersionChanges {
            from,
            to,
            offset,
            len,
        } => {
            (header.offset, header.len) = (*offset, *len);
            (header.epoch, header.op) = (to.0, u64::from(from.0));
        }
        _ => {}
    }
}

/// The request, durable if the header says so.
fn with_flush(header: &Header, request: SliceRequest) -> Result<SliceRequest, MalformedMessage> {
    match (header.flags & FLAG_DURABLE != 0, header.kind) {
        (false, _) => Ok(request),
        (true, MessageKind::Write | MessageKind::Clear | MessageKind::Transact) => {
            let change = Box::new(request);
            Ok(SliceRequest::Durable { change })
        }
        (true, _) => Err(header.malformed("a kind that cannot be durable")),
    }
}

fn put_stamp(stamp: Stamp, header: &mut Header) {
    (header.epoch, header.op, header.open) = (stamp.epoch.0, stamp.op, stamp.open_ops);
}

fn slice_request(header: &Header, body: Bytes) -> Result<SliceRequest, MalformedMessage> {
    let offset = header.offset;
    let small = || small_len(header);
    let stamp = Stamp {
        epoch: Epoch(header.epoch),
        op: header.op,
        open_ops: header.open,
    };
    Ok(match header.kind {
        MessageKind::Read => SliceRequest::Read {
            offset,
            len: small()?,
        },
        MessageKind::Write => SliceRequest::Write {
            offset,
            data: body,
            stamp,
        },
        MessageKind::Clear => SliceRequest::Clear {
            offset,
            len: header.len,
            stamp,
        },
        MessageKind::Transact => SliceRequest::Transact {
            parts: decode_parts(header, body)?,
            stamp,
        },
        MessageKind::Flush => SliceRequest::Flush,
        MessageKind::Extents => SliceRequest::Extents {
            offset,
            len: header.len,
        },
        MessageKind::Checksums => SliceRequest::Checksums {
            page: PageNo(offset),
            count: small()?,
        },
        MessageKind::Dirty => SliceRequest::Dirty {
            since: Epoch(header.epoch),
            from: PageNo(offset),
        },
        MessageKind::InFlight => SliceRequest::InFlight,
        MessageKind::ForgetInFlight => SliceRequest::ForgetInFlight,
        MessageKind::KeepOrder => SliceRequest::KeepOrder,
        MessageKind::RaiseEpoch => SliceRequest::RaiseEpoch {
            epoch: Epoch(header.epoch),
            lost_since: Epoch(
                u32::try_from(offset)
                    .map_err(|_| header.malformed("an epoch of a loss beyond limits"))?,
            ),
        },
        MessageKind::Births => SliceRequest::Births {
            page: PageNo(offset),
            count: small()?,
        },
        MessageKind::Copy => decode_copy(header, body, stamp)?,
        _ => return snapshot_request(header),
    })
}

/// A request of a snapshot.
fn snapshot_request(header: &Header) -> Result<SliceRequest, MalformedMessage> {
    Ok(match header.kind {
        MessageKind::PrepareSnapshot => SliceRequest::PrepareSnapshot {
            snapshot: Epoch(header.epoch),
        },
        MessageKind::ReadVersion => SliceRequest::ReadVersion {
            snapshot: Epoch(header.epoch),
            offset: header.offset,
            len: small_len(header)?,
        },
        MessageKind::VersionExtents => SliceRequest::VersionExtents {
            snapshot: Epoch(header.epoch),
            offset: header.offset,
            len: header.len,
        },
        MessageKind::VersionLeaf => SliceRequest::VersionLeaf {
            snapshot: Epoch(header.epoch),
            leaf: header.offset,
        },
        MessageKind::VersionChanges => SliceRequest::VersionChanges {
            from: Epoch(
                u32::try_from(header.op)
                    .map_err(|_| header.malformed("an epoch of a snapshot beyond limits"))?,
            ),
            to: Epoch(header.epoch),
            offset: header.offset,
            len: header.len,
        },
        _ => return Err(header.malformed("not a request of a slice")),
    })
}

fn small_len(header: &Header) -> Result<u32, MalformedMessage> {
    u32::try_from(header.len).map_err(|_| header.malformed("a length beyond limits"))
}
