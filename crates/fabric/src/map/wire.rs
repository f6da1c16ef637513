//! The bytes before messages: a hello of 16 bytes, and a grant of 64 bytes that carries two
//! descriptors, or a refusal and its reason.
//!
//! ```text
//! hello   0  magic "PMAPHELO"   8  version u16   10  0 u16   12  crc32c 0..12
//! grant   0  magic "PMAPGRNT"   8  version u16   10  status u16: 0 granted, 1 refused, 2 no session
//!        12  session u32       16  incarnation u32          20  reason bytes u32
//!        24  brick uuid        40  pool bytes u64           48  control bytes u64
//!        56  knows u32: bit 0 tier hints, 1 snapshots  60  crc32c 0..60
//! ```
//!
//! Little endian; the UUID in the order of its text. Invariants: bytes with a wrong checksum are
//! rejected.

use pagemesh_base::checksum::crc32c;
use pagemesh_base::layout::BrickId;
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

pub const HELLO_BYTES: usize = 16;
pub const GRANT_BYTES: usize = 64;
/// The version of this exchange, and of the use of the segments by sessions.
pub const VERSION: u16 = 1;
/// The bit of a brick that knows tier hints.
const KNOWS_HINTS: u32 = 1;
/// The bit of a brick that knows the messages of snapshots.
const KNOWS_SNAPSHOTS: u32 = 2;
const HELLO_MAGIC: &[u8; 8] = b"PMAPHELO";
const GRANT_MAGIC: &[u8; 8] = b"PMAPGRNT";

/// Why received bytes are rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MapProtocolError {
    #[error("this is not the map transport of a pagemesh brick")]
    Magic,
    #[error(
        "the other end speaks version {0} of the map transport, this one {VERSION}; use the same release on both ends"
    )]
    Version(u16),
    #[error("a checksum does not match")]
    Checksum,
    #[error(
        "it answers neither with a grant nor with a refusal; use the same release on both ends"
    )]
    Answer,
}

/// The decoded fixed part of a grant or refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantHeader {
    /// The refusal, if it is one.
    pub refused: Option<Refusal>,
    pub session: u32,
    pub incarnation: u32,
    pub brick: BrickId,
    pub pool_bytes: u64,
    pub control_bytes: u64,
    /// Whether the brick knows tier hints.
    pub knows_hints: bool,
    /// Whether the brick knows the messages of snapshots.
    pub knows_snapshots: bool,
}

/// A refusal. A reason of `reason_bytes` bytes follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// All sessions or connections are in use.
    pub no_session: bool,
    pub reason_bytes: u32,
}

/// The start of both layouts.
#[derive(FromBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Envelope {
    magic: [u8; 8],
    version: U16,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHello {
    magic: [u8; 8],
    version: U16,
    zero: U16,
    crc: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawGrant {
    magic: [u8; 8],
    version: U16,
    status: U16,
    session: U32,
    incarnation: U32,
    reason_bytes: U32,
    brick: [u8; 16],
    pool_bytes: U64,
    control_bytes: U64,
    knows: U32,
    crc: U32,
}

/// Checks magic, checksum and version.
fn check_envelope(bytes: &[u8], magic: &[u8; 8]) -> Result<(), MapProtocolError> {
    let (said, crc) = bytes.split_last_chunk().ok_or(MapProtocolError::Magic)?;
    let start = Envelope::ref_from_prefix(said);
    let (start, _) = start.map_err(|_| MapProtocolError::Magic)?;
    if start.magic != *magic {
        return Err(MapProtocolError::Magic);
    }
    if crc32c(said) != u32::from_le_bytes(*crc) {
        return Err(MapProtocolError::Checksum);
    }
    match start.version.get() {
        VERSION => Ok(()),
        other => Err(MapProtocolError::Version(other)),
    }
}

fn append_checksum(bytes: &mut [u8]) {
    let crc_at = bytes.len() - 4;
    let crc = crc32c(&bytes[..crc_at]);
    bytes[crc_at..].copy_from_slice(&crc.to_le_bytes());
}

pub fn hello() -> [u8; HELLO_BYTES] {
    let mut bytes: [u8; HELLO_BYTES] = transmute!(RawHello {
        magic: *HELLO_MAGIC,
        version: VERSION.into(),
        zero: U16::ZERO,
        crc: U32::ZERO,
    });
    append_checksum(&mut bytes);
    bytes
}

pub fn check_hello(bytes: &[u8; HELLO_BYTES]) -> Result<(), MapProtocolError> {
    check_envelope(bytes, HELLO_MAGIC)
}

impl GrantHeader {
    fn knows(&self) -> u32 {
        let bit = |knows, bit| if knows { bit } else { 0 };
        bit(self.knows_hints, KNOWS_HINTS) | bit(self.knows_snapshots, KNOWS_SNAPSHOTS)
    }

    pub fn encode(&self) -> [u8; GRANT_BYTES] {
        let (status, reason_bytes): (u16, u32) = match self.refused {
            None => (0, 0),
            Some(refusal) => (1 + u16::from(refusal.no_session), refusal.reason_bytes),
        };
        let mut bytes: [u8; GRANT_BYTES] = transmute!(RawGrant {
            magic: *GRANT_MAGIC,
            version: VERSION.into(),
            status: status.into(),
            session: self.session.into(),
            incarnation: self.incarnation.into(),
            reason_bytes: reason_bytes.into(),
            brick: self.brick.0.into_bytes(),
            pool_bytes: self.pool_bytes.into(),
            control_bytes: self.control_bytes.into(),
            knows: self.knows().into(),
            crc: U32::ZERO,
        });
        append_checksum(&mut bytes);
        bytes
    }

    pub fn decode(bytes: &[u8; GRANT_BYTES]) -> Result<GrantHeader, MapProtocolError> {
        check_envelope(bytes, GRANT_MAGIC)?;
        let raw: &RawGrant = transmute_ref!(bytes);
        let refused = match (raw.status.get(), raw.reason_bytes.get()) {
            (0, 0) => None,
            (status @ (1 | 2), reason_bytes) => Some(Refusal {
                no_session: status == 2,
                reason_bytes,
            }),
            _ => return Err(MapProtocolError::Answer),
        };
        Ok(GrantHeader {
            refused,
            session: raw.session.get(),
            incarnation: raw.incarnation.get(),
            brick: BrickId(Uuid::from_bytes(raw.brick)),
            pool_bytes: raw.pool_bytes.get(),
            control_bytes: raw.control_bytes.get(),
            knows_hints: raw.knows.get() & KNOWS_HINTS != 0,
            knows_snapshots: raw.knows.get() & KNOWS_SNAPSHOTS != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grant() -> GrantHeader {
        GrantHeader {
            refused: None,
            session: 7,
            incarnation: 0x0102_0304,
            brick: BrickId(Uuid::from_u128(0x1234_5678_9abc)),
            pool_bytes: 1 << 40,
            control_bytes: 16 << 20,
            knows_hints: true,
            knows_snapshots: false,
        }
    }

    #[test]
    fn hello_and_grant_round_trip() {
        assert_eq!(check_hello(&hello()), Ok(()));
        let refused = |no_session| GrantHeader {
            refused: Some(Refusal {
                no_session,
                reason_bytes: 99,
            }),
            ..grant()
        };
        let newer = GrantHeader {
            knows_snapshots: true,
            ..grant()
        };
        for header in [grant(), newer, refused(false), refused(true)] {
            assert_eq!(GrantHeader::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn every_flipped_grant_bit_is_detected() {
        let said = grant().encode();
        for bit in 0..GRANT_BYTES * 8 {
            let mut bytes = said;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(GrantHeader::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = hello();
        bytes[8] = 9;
        append_checksum(&mut bytes);
        assert_eq!(check_hello(&bytes), Err(MapProtocolError::Version(9)));
    }
}
