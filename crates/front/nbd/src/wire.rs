//! The numbers of the NBD protocol, and the fixed-size messages of the transmission phase. All numbers on the wire are big endian. This module does not check the
//! contents of messages.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute_ref};

/// First eight bytes of the greeting.
pub(crate) const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of the greeting, and the start of each option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of each answer to an option.
pub(crate) const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of each request.
pub(crate) const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub(crate) const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a structured reply's chunk.
pub(crate) const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, the same bits in both directions.
pub(crate) mod handshake {
    pub(crate) const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub(crate) const NO_ZEROES: u16 = 1 << 1;
}

/// Options that a client can send before it chooses an export.
pub(crate) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
}

/// Kinds of answers to options.
pub(crate) mod answer {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERR_UNSUPPORTED: u32 = (1 << 31) | 1;
    pub(crate) const ERR_POLICY: u32 = (1 << 31) | 2;
    pub(crate) const ERR_INVALID: u32 = (1 << 31) | 3;
    pub(crate) const ERR_UNKNOWN: u32 = (1 << 31) | 6;
    pub(crate) const ERR_SHUTDOWN: u32 = (1 << 31) | 7;
    pub(crate) const ERR_TOO_BIG: u32 = (1 << 31) | 9;
}

/// Kinds of information about an export.
pub(crate) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Features of an export.
pub(crate) mod export_flag {
    pub(crate) const HAS_FLAGS: u16 = 1 << 0;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const SEND_DF: u16 = 1 << 7;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands of requests.
pub(crate) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISCONNECT: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const CACHE: u16 = 5;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub(crate) mod command_flag {
    pub(crate) const FUA: u16 = 1 << 0;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DONT_FRAGMENT: u16 = 1 << 2;
    pub(crate) const REQ_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
}

/// Kinds of chunks, and their one flag.
pub(crate) mod chunk {
    pub(crate) const FLAG_DONE: u16 = 1;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const ERROR: u16 = (1 << 15) | 1;
}

/// Flags of an extent in `base:allocation`.
pub(crate) mod allocation {
    pub(crate) const HOLE: u32 = 1 << 0;
    pub(crate) const ZERO: u32 = 1 << 1;
}

/// The only metadata context.
pub(crate) const BASE_ALLOCATION: &str = "base:allocation";
/// Its number on every connection.
pub(crate) const BASE_ALLOCATION_ID: u32 = 1;

/// Why a request failed; the numbers are the protocol's, on every system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Errno {
    Permission = 1,
    Io = 5,
    Memory = 12,
    Invalid = 22,
    NoSpace = 28,
    NotSupported = 95,
    Shutdown = 108,
}

/// Bytes of a request without its payload.
pub(crate) const HEADER_BYTES: usize = 28;

/// The bytes of a request without its payload.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRequest {
    magic: U32,
    flags: U16,
    command: U16,
    cookie: U64,
    offset: U64,
    len: U32,
}

/// A reply without data.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct SimpleReply {
    magic: U32,
    errno: U32,
    cookie: U64,
}

impl SimpleReply {
    pub(crate) fn new(cookie: u64, errno: u32) -> SimpleReply {
        SimpleReply {
            magic: SIMPLE_REPLY_MAGIC.into(),
            errno: errno.into(),
            cookie: cookie.into(),
        }
    }
}

/// The header of a structured reply's only chunk.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct ChunkHeader {
    magic: U32,
    flags: U16,
    kind: U16,
    cookie: U64,
    len: U32,
}

impl ChunkHeader {
    pub(crate) fn new(kind: u16, cookie: u64, len: u32) -> ChunkHeader {
        ChunkHeader {
            magic: CHUNK_MAGIC.into(),
            flags: chunk::FLAG_DONE.into(),
            kind: kind.into(),
            cookie: cookie.into(),
            len: len.into(),
        }
    }
}

/// A request without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    /// The client's id of the request, returned with the reply.
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
}

impl Header {
    /// The header in these bytes; none if they do not start with the magic.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let raw: &RawRequest = transmute_ref!(bytes);
        (raw.magic == REQUEST_MAGIC).then_some(Self {
            flags: raw.flags.get(),
            command: raw.command.get(),
            cookie: raw.cookie.get(),
            offset: raw.offset.get(),
            len: raw.len.get(),
        })
    }
}

/// A number from the front of `bytes`, and the bytes after it.
pub(crate) fn take_u16(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u16::from_be_bytes(*first), rest))
}

/// As [`take_u16`].
pub(crate) fn take_u32(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u32::from_be_bytes(*first), rest))
}

/// As [`take_u16`].
pub(crate) fn take_u64(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u64::from_be_bytes(*first), rest))
}
