//! The bytes of hellos and verdicts, as the table of the parent module shows them.

use super::{AuthError, DRAFT_FEATURE, FEATURES, Nonce, Versions};
use uuid::Uuid;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, transmute, transmute_ref};

/// Bytes of a hello.
pub const HELLO_BYTES: usize = 64;
/// Bytes of a verdict.
pub const VERDICT_BYTES: usize = 8;

pub(super) const HELLO_MAGIC: [u8; 4] = *b"PMHI";
const VERDICT_MAGIC: [u8; 4] = *b"PMOK";
pub(super) const CLIENT_ROLE: u8 = 1;
pub(super) const SERVER_ROLE: u8 = 2;

#[derive(Clone, Copy)]
#[repr(u8)]
pub(super) enum HandshakeStatus {
    Accepted = 0,
    NoVersion = 1,
    WrongKey = 2,
    Busy = 3,
    NoPurpose = 4,
    NoFeature = 5,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Hello {
    magic: [u8; 4],
    version_min: u8,
    version_max: u8,
    role: u8,
    pub(super) purpose: u8,
    pub(super) status: u8,
    knows: u8,
    zero: [u8; 2],
    features: U32,
    identity: [u8; 16],
    nonce: Nonce,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Verdict {
    magic: [u8; 4],
    status: u8,
    zero: [u8; 3],
}

impl Hello {
    pub(super) fn new(
        versions: Versions,
        role: u8,
        purpose: u8,
        identity: Uuid,
        nonce: Nonce,
    ) -> Hello {
        Hello {
            magic: HELLO_MAGIC,
            version_min: versions.min,
            version_max: versions.max,
            role,
            purpose,
            status: HandshakeStatus::Accepted as u8,
            knows: versions.knows,
            zero: [0; 2],
            features: FEATURES.into(),
            identity: identity.into_bytes(),
            nonce,
        }
    }

    pub(super) fn encode(self) -> [u8; HELLO_BYTES] {
        transmute!(self)
    }

    /// Decodes a hello. Unused bytes are ignored: a newer peer may use them, and the proof covers
    /// them.
    pub(super) fn decode(bytes: &[u8; HELLO_BYTES], role: u8) -> Result<&Hello, AuthError> {
        let hello: &Hello = transmute_ref!(bytes);
        if hello.magic != HELLO_MAGIC || hello.role != role {
            return Err(AuthError::NotAHello);
        }
        Ok(hello)
    }

    pub(super) fn versions(&self) -> Versions {
        Versions {
            min: self.version_min,
            max: self.version_max,
            knows: self.knows,
        }
    }

    /// Checks that this end knows every feature that the peer needs.
    pub(super) fn check_features(&self) -> Result<(), AuthError> {
        let theirs = self.features.get();
        let is_refusal = self.status == HandshakeStatus::NoFeature as u8;
        if theirs & DRAFT_FEATURE != 0 {
            return Err(AuthError::Draft);
        }
        match theirs & !FEATURES == 0 && !is_refusal {
            true => Ok(()),
            false => Err(AuthError::Features {
                theirs,
                ours: FEATURES,
            }),
        }
    }

    pub(super) fn identity(&self) -> Uuid {
        Uuid::from_bytes(self.identity)
    }
}

pub(super) fn check_status(status: u8, theirs: Versions, ours: Versions) -> Result<(), AuthError> {
    match status {
        0 => Ok(()),
        1 => Err(AuthError::Versions { theirs, ours }),
        2 => Err(AuthError::WrongKey),
        3 => Err(AuthError::Busy),
        4 => Err(AuthError::Purpose),
        5 => Err(AuthError::Features {
            theirs: 0,
            ours: FEATURES,
        }),
        _ => Err(AuthError::NotAHello),
    }
}

/// Decodes the server's verdict.
///
/// # Errors
/// When the server refuses.
pub fn read_verdict(verdict: [u8; VERDICT_BYTES]) -> Result<(), AuthError> {
    let verdict: Verdict = transmute!(verdict);
    if verdict.magic != VERDICT_MAGIC {
        return Err(AuthError::NotAHello);
    }
    check_status(verdict.status, Versions::OURS, Versions::OURS)
}

/// Encodes the server's verdict: welcome, or the reason of the refusal.
#[must_use]
pub fn verdict(outcome: Result<(), &AuthError>) -> [u8; VERDICT_BYTES] {
    let status = match outcome {
        Ok(()) => HandshakeStatus::Accepted,
        Err(AuthError::Busy) => HandshakeStatus::Busy,
        Err(AuthError::Versions { .. }) => HandshakeStatus::NoVersion,
        Err(AuthError::Purpose) => HandshakeStatus::NoPurpose,
        Err(AuthError::Features { .. } | AuthError::Draft) => HandshakeStatus::NoFeature,
        Err(AuthError::WrongKey | AuthError::NotAHello) => HandshakeStatus::WrongKey,
    };
    transmute!(Verdict {
        magic: VERDICT_MAGIC,
        status: status as u8,
        zero: [0; 3],
    })
}
