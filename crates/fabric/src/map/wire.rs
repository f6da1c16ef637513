//! The bytes before messages: a hello of 16 bytes, and a grant of 64 bytes that carries two
//! descriptors, or a refusal and its reason.
//!
//! ```text
//! hello   0  magic "PMAPHELO"   8  version u16   10  0 u16   12  crc32c 0..12
//! grant   0  magic "PMAPGRNT"   8  version u16   10  status u16: 0 granted, 1 refused, 2 no session
//!        12  session u32       16  incarnation u32          20  reason bytes u32
//!        24  brick uuid        40  pool bytes u64           48  control bytes u64
//!        56  0 u32             60  crc32c 0..60
//! ```
//!
//! Little endian; the UUID in the order of its text. Invariants: bytes with a wrong checksum are
//! rejected.

use crate::message::fields::FieldReader;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::layout::BrickId;
use uuid::Uuid;

pub(super) const HELLO_BYTES: usize = 16;
pub(super) const GRANT_BYTES: usize = 64;
/// The version of this exchange, and of the use of the segments by sessions.
pub(super) const VERSION: u16 = 0;
const HELLO_MAGIC: &[u8; 8] = b"PMAPHELO";
const GRANT_MAGIC: &[u8; 8] = b"PMAPGRNT";

/// Why received bytes are rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MapProtocolError {
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
pub(super) struct GrantHeader {
    /// The refusal, if it is one.
    pub refused: Option<Refusal>,
    pub session: u32,
    pub incarnation: u32,
    pub brick: BrickId,
    pub pool_bytes: u64,
    pub control_bytes: u64,
}

/// A refusal. A reason of `reason_bytes` bytes follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// All sessions or connections are in use.
    pub no_session: bool,
    pub reason_bytes: u32,
}

/// The fields after the version, once magic, checksum and version are right.
fn check_envelope<'a>(
    bytes: &'a [u8],
    magic: &[u8; 8],
) -> Result<FieldReader<'a>, MapProtocolError> {
    let (said, crc) = bytes.split_last_chunk().ok_or(MapProtocolError::Magic)?;
    let mut fields = FieldReader::new(said);
    if fields.array().as_ref() != Some(magic) {
        return Err(MapProtocolError::Magic);
    }
    if crc32c(said) != u32::from_le_bytes(*crc) {
        return Err(MapProtocolError::Checksum);
    }
    match fields.u16().ok_or(MapProtocolError::Magic)? {
        VERSION => Ok(fields),
        other => Err(MapProtocolError::Version(other)),
    }
}

fn append_checksum(bytes: &mut [u8]) {
    let crc_at = bytes.len() - 4;
    let crc = crc32c(&bytes[..crc_at]);
    bytes[crc_at..].copy_from_slice(&crc.to_le_bytes());
}

pub(super) fn hello() -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..8].copy_from_slice(HELLO_MAGIC);
    bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
    append_checksum(&mut bytes);
    bytes
}

pub(super) fn check_hello(bytes: &[u8; HELLO_BYTES]) -> Result<(), MapProtocolError> {
    check_envelope(bytes, HELLO_MAGIC).map(drop)
}

impl GrantHeader {
    pub(super) fn encode(&self) -> [u8; GRANT_BYTES] {
        let mut bytes = [0; GRANT_BYTES];
        bytes[..8].copy_from_slice(GRANT_MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        let (status, reason_bytes): (u16, u32) = match self.refused {
            None => (0, 0),
            Some(refusal) => (1 + u16::from(refusal.no_session), refusal.reason_bytes),
        };
        bytes[10..12].copy_from_slice(&status.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[20..24].copy_from_slice(&reason_bytes.to_le_bytes());
        bytes[24..40].copy_from_slice(self.brick.0.as_bytes());
        bytes[40..48].copy_from_slice(&self.pool_bytes.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.control_bytes.to_le_bytes());
        append_checksum(&mut bytes);
        bytes
    }

    pub(super) fn decode(bytes: &[u8; GRANT_BYTES]) -> Result<GrantHeader, MapProtocolError> {
        let fields = check_envelope(bytes, GRANT_MAGIC)?;
        GrantHeader::read(fields).ok_or(MapProtocolError::Answer)
    }

    fn read(mut fields: FieldReader<'_>) -> Option<GrantHeader> {
        let status = fields.u16()?;
        let (session, incarnation) = (fields.u32()?, fields.u32()?);
        let refused = match (status, fields.u32()?) {
            (0, 0) => None,
            (1 | 2, reason_bytes) => Some(Refusal {
                no_session: status == 2,
                reason_bytes,
            }),
            _ => return None,
        };
        Some(GrantHeader {
            refused,
            session,
            incarnation,
            brick: BrickId(Uuid::from_bytes(fields.array()?)),
            pool_bytes: fields.u64()?,
            control_bytes: fields.u64()?,
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
        for header in [grant(), refused(false), refused(true)] {
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
