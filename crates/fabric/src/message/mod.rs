//! Messages, version 2: a 64-byte header and a body. Little endian.
//!
//! ```text
//!  0  magic       4   "PMSH"
//!  4  version     1   2, as agreed in the handshake
//!  5  kind        1   kind of the request; a reply has bit 7 set as well
//!  6  flags       2   replies: bit 0 error, bit 1 more; write, clear, transact: bit 2 durable;
//!                    read, write, transact: bits 3, 4 hint; else zero
//!  8  tag         8   chosen by the client, rising; repeated in the reply
//! 16  handle      4   the attached slice; in an error its code
//! 20  body_len    4   bytes that follow the header
//! 24  offset      8   first byte or page
//! 32  len         8   bytes or count
//! 40  op          8   of the stamp
//! 48  epoch       4   of the stamp, or of a birth
//! 52  open        4   of the stamp
//! 56  body_crc    4   CRC32C of the body; zero if there is none
//! 60  header_crc  4   CRC32C of bytes 0..60
//! ```
//!
//! [`request`] and [`reply`] define the fields of each kind and the content of its body. All other
//! fields are zero. A message in which another field is not zero is refused, so that a later
//! version can give it a meaning.
//!
//! Invariants: decoding is total: any bytes give a message or a [`MalformedMessage`], never a
//! panic. A header, and its length against the limit of its kind, is checked before a buffer for
//! the body is allocated. Nothing here does I/O.

pub mod reply;
pub mod request;
mod version_copies;

mod bodies;
mod control;
pub(crate) mod fields;

use pagemesh_base::checksum::crc32c;
use pagemesh_base::slice::{
    DROPPED_SNAPSHOTS_MAX, LIST_ENTRIES_MAX, LISTED_SNAPSHOTS_MAX, SEEN_RUNS_MAX, ServiceTime,
    VERSION_EDITS_MAX, VERSION_LEAF_BYTES,
};
use pagemesh_base::space::EXTENTS_MAX;
use pagemesh_base::units::PAGE_BYTES;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

use crate::limits::{BODY_BYTES_MAX, COPY_BYTES_MAX, TEXT_BYTES_MAX, TRANSACTION_BYTES_MAX};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
/// The version that this module speaks.
pub const VERSION: u8 = 2;
/// "PMSH".
const MAGIC: [u8; 4] = *b"PMSH";
/// Bytes of a header that its checksum covers.
const CHECKED_BYTES: usize = HEADER_BYTES - 4;
/// Marks the kind of a reply.
const REPLY_BIT: u8 = 0x80;
/// The flag of a reply that is an error.
const FLAG_ERROR: u16 = 1;
/// The flag of a reply that is not the whole answer.
const FLAG_MORE: u16 = 2;
/// The flag of a change that is answered after a flush.
const FLAG_DURABLE: u16 = 4;
/// The lowest of the two flags with the tier hint of a read, a write or a transaction.
const HINT_SHIFT: u32 = 3;
/// Bytes of a slice's identity.
const ID_BYTES: usize = 16;
/// Bytes of a status before its durability text.
const STATUS_BYTES: usize = 40;
/// Bytes of the entry of one part of a transaction.
pub(crate) const PART_BYTES: usize = 16;
/// Bytes of one entry of each list.
const EXTENT_BYTES: usize = 8;
const CHECKSUM_BYTES: usize = 4;
pub(crate) const BIRTH_BYTES: usize = 4;
const RUN_BYTES: usize = 16;
const VERSION_BYTES: usize = 20;
pub(crate) const EDIT_BYTES: usize = 24;
const IN_FLIGHT_BYTES: usize = 24;
const INFO_BYTES: usize = 32;
/// Bytes of the progress of a clone.
const PROGRESS_BYTES: usize = 16;
/// Bytes of the pages of one run of snapshots.
const SEEN_BYTES: usize = 16;

/// Why bytes are no message. The connection that carried them ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MalformedMessage {
    /// The bytes do not start as a message does.
    #[error("the peer does not speak this protocol (no message starts here)")]
    Magic,
    /// A header that was damaged in transit.
    #[error("a header does not match its checksum")]
    HeaderChecksum,
    /// A body that was damaged in transit.
    #[error("the body of message {tag} does not match its checksum")]
    BodyChecksum {
        /// The tag of the message.
        tag: u64,
    },
    /// Another version than agreed.
    #[error("a message has version {0}, agreed was version {VERSION}")]
    Version(u8),
    /// An unknown kind, or a reply where requests are expected.
    #[error("a message has the unknown or misplaced kind {0:#04x}")]
    Kind(u8),
    /// A body beyond the limit of its kind.
    #[error("a body of {len} bytes is announced, its kind has at most {max}")]
    TooLong {
        /// Bytes announced.
        len: u32,
        /// Bytes allowed.
        max: u32,
    },
    /// A field or body that this kind cannot have.
    #[error("message {tag} is not well formed: {what}")]
    Content {
        /// The tag of the message.
        tag: u64,
        /// The error.
        what: &'static str,
    },
    /// A request with a tag that is not above the tag of the request before it.
    #[error("message {0} comes a second time, or behind a later one")]
    RepeatedTag(u64),
    /// A reply to no request in flight, or to one of another kind.
    #[error("message {0} answers nothing that was asked")]
    UnexpectedReply(u64),
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MessageKind {
    /// Read bytes of a slice.
    Read = 1,
    /// Replace bytes.
    Write = 2,
    /// Free pages.
    Clear = 3,
    /// Make changes durable.
    Flush = 4,
    /// List the mapped extents.
    Extents = 5,
    /// Checksums of pages.
    Checksums = 6,
    /// List the pages that were born since an epoch.
    Dirty = 7,
    /// List the operations that may be missing on another leg.
    InFlight = 8,
    /// Clear that list.
    ForgetInFlight = 9,
    /// Fence clients of older epochs.
    RaiseEpoch = 10,
    /// Change several places atomically.
    Transact = 11,
    /// After a failed change, fail all later ones.
    KeepOrder = 12,
    /// List the births of pages.
    Births = 13,
    /// Replace pages and keep their births.
    Copy = 14,
    /// Keep the versions that a snapshot sees.
    PrepareSnapshot = 15,
    /// Get a handle for a slice.
    Attach = 16,
    /// Read bytes as a snapshot sees them.
    ReadVersion = 17,
    /// List the mapped extents as a snapshot sees them.
    VersionExtents = 18,
    /// List the parts that differ between two snapshots.
    VersionChanges = 19,
    /// List the frames that a snapshot sees in a leaf.
    VersionLeaf = 20,
    /// Create a slice.
    Create = 32,
    /// Grow a slice.
    Resize = 33,
    /// Delete a slice.
    Delete = 34,
    /// List the brick's slices.
    List = 35,
    /// Get the brick's status.
    Status = 36,
    /// Raise the epoch of a slice to that of a snapshot, and keep the versions that it sees.
    ControlPrepareSnapshot = 37,
    /// Drop snapshots of a slice.
    DropSnapshots = 38,
    /// List the snapshots of a slice.
    Snapshots = 39,
    /// Make a slice from a snapshot of another one.
    CreateClone = 40,
    /// Copy the pages that a clone shares.
    PromoteClone = 41,
    /// List further snapshots of a slice.
    AdoptSnapshots = 42,
    /// List versions of pages.
    ListVersions = 43,
    /// Edit versions of pages.
    EditVersions = 44,
    /// Read bytes of a slice as a snapshot sees them.
    ControlReadVersion = 45,
    /// Count pages by the snapshots that see them.
    CountSeenPages = 46,
}

impl MessageKind {
    /// Every kind.
    pub const ALL: [MessageKind; 35] = [
        MessageKind::Read,
        MessageKind::Write,
        MessageKind::Clear,
        MessageKind::Flush,
        MessageKind::Extents,
        MessageKind::Checksums,
        MessageKind::Dirty,
        MessageKind::InFlight,
        MessageKind::ForgetInFlight,
        MessageKind::RaiseEpoch,
        MessageKind::Transact,
        MessageKind::KeepOrder,
        MessageKind::Births,
        MessageKind::Copy,
        MessageKind::PrepareSnapshot,
        MessageKind::Attach,
        MessageKind::ReadVersion,
        MessageKind::VersionExtents,
        MessageKind::VersionChanges,
        MessageKind::VersionLeaf,
        MessageKind::Create,
        MessageKind::Resize,
        MessageKind::Delete,
        MessageKind::List,
        MessageKind::Status,
        MessageKind::ControlPrepareSnapshot,
        MessageKind::DropSnapshots,
        MessageKind::Snapshots,
        MessageKind::CreateClone,
        MessageKind::PromoteClone,
        MessageKind::AdoptSnapshots,
        MessageKind::ListVersions,
        MessageKind::EditVersions,
        MessageKind::ControlReadVersion,
        MessageKind::CountSeenPages,
    ];

    /// Whether it is a request of an attached slice.
    pub(crate) fn is_of_slice(self) -> bool {
        self != MessageKind::Attach && (self as u8) < MessageKind::Create as u8
    }

    const fn from_code(code: u8) -> Option<MessageKind> {
        Some(match code {
            1 => MessageKind::Read,
            2 => MessageKind::Write,
            3 => MessageKind::Clear,
            4 => MessageKind::Flush,
            5 => MessageKind::Extents,
            6 => MessageKind::Checksums,
            7 => MessageKind::Dirty,
            8 => MessageKind::InFlight,
            9 => MessageKind::ForgetInFlight,
            10 => MessageKind::RaiseEpoch,
            11 => MessageKind::Transact,
            12 => MessageKind::KeepOrder,
            13 => MessageKind::Births,
            14 => MessageKind::Copy,
            15 => MessageKind::PrepareSnapshot,
            16 => MessageKind::Attach,
            17 => MessageKind::ReadVersion,
            18 => MessageKind::VersionExtents,
            19 => MessageKind::VersionChanges,
            20 => MessageKind::VersionLeaf,
            32 => MessageKind::Create,
            33 => MessageKind::Resize,
            34 => MessageKind::Delete,
            35 => MessageKind::List,
            36 => MessageKind::Status,
            37 => MessageKind::ControlPrepareSnapshot,
            38 => MessageKind::DropSnapshots,
            39 => MessageKind::Snapshots,
            40 => MessageKind::CreateClone,
            41 => MessageKind::PromoteClone,
            42 => MessageKind::AdoptSnapshots,
            43 => MessageKind::ListVersions,
            44 => MessageKind::EditVersions,
            45 => MessageKind::ControlReadVersion,
            46 => MessageKind::CountSeenPages,
            _ => return None,
        })
    }

    /// Whether the answer is bytes as they are.
    fn has_data_answer(self) -> bool {
        matches!(
            self,
            MessageKind::Read
                | MessageKind::ReadVersion
                | MessageKind::ControlReadVersion
                | MessageKind::VersionLeaf
        )
    }

    const fn request_bytes_max(self) -> u32 {
        match self {
            MessageKind::Write => BODY_BYTES_MAX,
            MessageKind::Transact => TRANSACTION_BYTES_MAX,
            MessageKind::Copy => COPY_BYTES_MAX,
            MessageKind::Attach
            | MessageKind::Create
            | MessageKind::Resize
            | MessageKind::Delete
            | MessageKind::List
            | MessageKind::ControlPrepareSnapshot
            | MessageKind::Snapshots
            | MessageKind::ControlReadVersion
            | MessageKind::CountSeenPages
            | MessageKind::PromoteClone => ID_BYTES as u32,
            MessageKind::CreateClone => 2 * ID_BYTES as u32,
            MessageKind::DropSnapshots | MessageKind::AdoptSnapshots => {
                (ID_BYTES + DROPPED_SNAPSHOTS_MAX * BIRTH_BYTES) as u32
            }
            MessageKind::ListVersions => (ID_BYTES + LISTED_SNAPSHOTS_MAX * BIRTH_BYTES) as u32,
            MessageKind::EditVersions => {
                (ID_BYTES + VERSION_EDITS_MAX * (EDIT_BYTES + PAGE_BYTES)) as u32
            }
            _ => 0,
        }
    }

    const fn reply_bytes_max(self) -> u32 {
        let listed = match self {
            MessageKind::Read | MessageKind::ReadVersion | MessageKind::ControlReadVersion => {
                return BODY_BYTES_MAX;
            }
            MessageKind::Extents | MessageKind::VersionExtents | MessageKind::VersionChanges => {
                EXTENTS_MAX * EXTENT_BYTES
            }
            MessageKind::VersionLeaf => VERSION_LEAF_BYTES,
            MessageKind::Checksums => LIST_ENTRIES_MAX * CHECKSUM_BYTES,
            MessageKind::Births | MessageKind::Snapshots => LIST_ENTRIES_MAX * BIRTH_BYTES,
            MessageKind::Dirty => LIST_ENTRIES_MAX * RUN_BYTES,
            MessageKind::ListVersions => LIST_ENTRIES_MAX * VERSION_BYTES,
            MessageKind::InFlight => LIST_ENTRIES_MAX * IN_FLIGHT_BYTES,
            MessageKind::List => LIST_ENTRIES_MAX * INFO_BYTES,
            MessageKind::CreateClone | MessageKind::PromoteClone => PROGRESS_BYTES,
            MessageKind::CountSeenPages => SEEN_RUNS_MAX * SEEN_BYTES,
            MessageKind::Status => STATUS_BYTES + TEXT_BYTES_MAX,
            _ => 0,
        };
        listed as u32
    }
}

/// The direction of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the brick.
    Request,
    /// From the brick.
    Reply,
}

/// The fixed part of a message, as in the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the request, in its reply too.
    pub kind: MessageKind,
    /// Request or reply.
    pub direction: Direction,
    flags: u16,
    /// The client's number of the request.
    pub tag: u64,
    handle: u32,
    /// Bytes of the body that follows.
    pub body_len: u32,
    offset: u64,
    len: u64,
    op: u64,
    epoch: u32,
    open: u32,
    /// CRC32C of the body.
    pub body_crc: u32,
}

/// The bytes of a header.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    flags: U16,
    tag: U64,
    handle: U32,
    body_len: U32,
    offset: U64,
    len: U64,
    op: U64,
    epoch: U32,
    open: U32,
    body_crc: U32,
    header_crc: U32,
}

impl RawHeader {
    #[inline]
    fn checksum(&self) -> u32 {
        crc32c(&self.as_bytes()[..CHECKED_BYTES])
    }
}

impl TryFrom<&RawHeader> for Header {
    type Error = MalformedMessage;

    #[inline]
    fn try_from(raw: &RawHeader) -> Result<Header, MalformedMessage> {
        if raw.version != VERSION {
            return Err(MalformedMessage::Version(raw.version));
        }
        let kind = MessageKind::from_code(raw.kind & !REPLY_BIT);
        let direction = match raw.kind & REPLY_BIT {
            0 => Direction::Request,
            _ => Direction::Reply,
        };
        Ok(Header {
            kind: kind.ok_or(MalformedMessage::Kind(raw.kind))?,
            direction,
            flags: raw.flags.get(),
            tag: raw.tag.get(),
            handle: raw.handle.get(),
            body_len: raw.body_len.get(),
            offset: raw.offset.get(),
            len: raw.len.get(),
            op: raw.op.get(),
            epoch: raw.epoch.get(),
            open: raw.open.get(),
            body_crc: raw.body_crc.get(),
        })
    }
}

impl Header {
    fn new(kind: MessageKind, direction: Direction, tag: u64) -> Header {
        Header {
            kind,
            direction,
            flags: 0,
            tag,
            handle: 0,
            body_len: 0,
            offset: 0,
            len: 0,
            op: 0,
            epoch: 0,
            open: 0,
            body_crc: 0,
        }
    }

    /// Sets the length and checksum of the body that follows.
    fn with_body(mut self, body: &[u8]) -> Header {
        self.body_len = u32::try_from(body.len()).unwrap_or(u32::MAX);
        self.body_crc = crc32c(body);
        self
    }

    /// The header without the checksum of the body.
    fn without_body_crc(mut self) -> Header {
        self.body_crc = 0;
        self
    }

    /// Sets the time that the brick spent, in the header of the reply to a request of a slice. Other
    /// replies have no place for it.
    #[must_use]
    pub fn with_service(mut self, service: ServiceTime) -> Header {
        if self.kind.is_of_slice() {
            (self.op, self.len) = (service.brick_ns, service.store_ns);
        }
        self
    }

    /// The time that the brick spent, from the header of a reply.
    #[must_use]
    pub fn service(&self) -> ServiceTime {
        if !self.kind.is_of_slice() {
            return ServiceTime::default();
        }
        ServiceTime {
            brick_ns: self.op,
            store_ns: self.len,
        }
    }

    fn is_error(&self) -> bool {
        self.flags & FLAG_ERROR != 0
    }

    /// The bytes on the wire.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let reply = match self.direction {
            Direction::Request => 0,
            Direction::Reply => REPLY_BIT,
        };
        let mut raw = RawHeader {
            magic: MAGIC,
            version: VERSION,
            kind: self.kind as u8 | reply,
            flags: self.flags.into(),
            tag: self.tag.into(),
            handle: self.handle.into(),
            body_len: self.body_len.into(),
            offset: self.offset.into(),
            len: self.len.into(),
            op: self.op.into(),
            epoch: self.epoch.into(),
            open: self.open.into(),
            body_crc: self.body_crc.into(),
            header_crc: U32::ZERO,
        };
        raw.header_crc = raw.checksum().into();
        transmute!(raw)
    }

    /// Decodes and checks a header that goes in the given direction.
    ///
    /// # Errors
    /// When it is damaged, of another version or kind, or announces a body
    /// beyond the limit of its kind.
    pub fn decode(bytes: &[u8; HEADER_BYTES], way: Direction) -> Result<Header, MalformedMessage> {
        let raw: &RawHeader = transmute_ref!(bytes);
        if raw.magic != MAGIC {
            return Err(MalformedMessage::Magic);
        }
        if raw.header_crc.get() != raw.checksum() {
            return Err(MalformedMessage::HeaderChecksum);
        }
        let header = Header::try_from(raw)?;
        if header.direction != way {
            return Err(MalformedMessage::Kind(raw.kind));
        }
        let (len, max) = (header.body_len, header.body_bytes_max());
        if len > max {
            return Err(MalformedMessage::TooLong { len, max });
        }
        Ok(header)
    }

    fn body_bytes_max(&self) -> u32 {
        match self.direction {
            Direction::Request => self.kind.request_bytes_max(),
            Direction::Reply if self.is_error() => TEXT_BYTES_MAX as u32,
            Direction::Reply => self.kind.reply_bytes_max(),
        }
    }

    /// Checks a body against its checksum.
    ///
    /// # Errors
    /// When it was damaged.
    pub fn check_body(&self, body: &[u8]) -> Result<(), MalformedMessage> {
        if crc32c(body) != self.body_crc {
            return Err(MalformedMessage::BodyChecksum { tag: self.tag });
        }
        Ok(())
    }

    fn malformed(&self, what: &'static str) -> MalformedMessage {
        MalformedMessage::Content {
            tag: self.tag,
            what,
        }
    }
}

#[cfg(test)]
mod frozen_tests;
#[cfg(test)]
mod tests;
