//! The numbers of the NBD protocol, and the fixed-size messages of the transmission phase. All numbers on the wire are big endian. This module does not check the
//! contents of messages.

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute_ref};

/// First eight bytes of the greeting.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second eight bytes of the greeting, and the start of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Start of each answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a structured reply's chunk.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, the same bits in both directions.
pub mod handshake {
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options that a client can send before it chooses an export.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Kinds of answers to options.
pub mod answer {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const ERR_UNSUPPORTED: u32 = (1 << 31) | 1;
    pub const ERR_POLICY: u32 = (1 << 31) | 2;
    pub const ERR_INVALID: u32 = (1 << 31) | 3;
    pub const ERR_UNKNOWN: u32 = (1 << 31) | 6;
    pub const ERR_SHUTDOWN: u32 = (1 << 31) | 7;
    pub const ERR_TOO_BIG: u32 = (1 << 31) | 9;
}

/// Kinds of information about an export.
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// Features of an export.
pub mod export_flag {
    pub const HAS_FLAGS: u16 = 1 << 0;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands of requests.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const CACHE: u16 = 5;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod command_flag {
    pub const FUA: u16 = 1 << 0;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DONT_FRAGMENT: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Kinds of chunks, and their one flag.
pub mod chunk {
    pub const FLAG_DONE: u16 = 1;
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) | 1;
}

/// Flags of an extent in `base:allocation`.
pub mod allocation {
    pub const HOLE: u32 = 1 << 0;
    pub const ZERO: u32 = 1 << 1;
}

/// The only metadata context.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// Its number on every connection.
pub const BASE_ALLOCATION_ID: u32 = 1;

/// Why a request failed; the numbers are the protocol's, on every system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    Permission = 1,
    Io = 5,
    Memory = 12,
    Invalid = 22,
    NoSpace = 28,
    NotSupported = 95,
    Shutdown = 108,
}

/// Bytes of a request without its payload.
pub const HEADER_BYTES: usize = 28;

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
pub struct SimpleReply {
    magic: U32,
    errno: U32,
    cookie: U64,
}

impl SimpleReply {
    pub fn new(cookie: u64, errno: u32) -> SimpleReply {
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
pub struct ChunkHeader {
    magic: U32,
    flags: U16,
    kind: U16,
    cookie: U64,
    len: U32,
}

impl ChunkHeader {
    pub fn new(kind: u16, cookie: u64, len: u32) -> ChunkHeader {
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
pub struct Header {
    pub flags: u16,
    pub command: u16,
    /// The client's id of the request, returned with the reply.
    pub cookie: u64,
    pub offset: u64,
    pub len: u32,
}

impl Header {
    /// The header in these bytes; none if they do not start with the magic.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
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
pub fn take_u16(bytes: &[u8]) -> Option<(u16, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u16::from_be_bytes(*first), rest))
}

/// As [`take_u16`].
pub fn take_u32(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u32::from_be_bytes(*first), rest))
}

/// As [`take_u16`].
pub fn take_u64(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u64::from_be_bytes(*first), rest))
}
