//! Both ends prove that they know the cluster key before they exchange any other message.
//!
//! ```text
//! client → server   hello      64
//! server → client   hello      64, proof 32
//! client → server   proof      32
//! server → client   verdict     8
//!
//! hello              proof: HMAC-SHA256(key, label, client's hello,
//!  0  magic      4          server's hello), label "pagemesh server" or
//!     "PMHI"                "pagemesh client"; zeroes in a refusal
//!  4  min        1
//!  5  max        1   verdict
//!  6  role       1    0  magic   4   "PMOK"
//!  7  purpose    1    4  status  1   0 welcome, else as in a hello
//!  8  status     1    5  zero    3
//!  9  knows      1
//! 10  zero       2
//! 12  features   4
//! 16  identity  16
//! 32  nonce     32
//! ```
//!
//! `min` and `max` are versions of the messages that follow; the highest that
//! both know is used. Role: 1 client, 2 server. Purpose, of the client: 1
//! control, 2 session. Status, of the server: 0 go on, 1 no common version,
//! 2 wrong key, 3 too many connections, 4 unknown purpose, 5 unknown feature. Features: each bit is a
//! feature that the sender needs the other end to know; bit 31 says that the sender speaks a draft. Knows: each bit is
//! a feature that the sender knows, and uses if the other end knows it, too. Identity: the client's, or the
//! brick's.
//!
//! Invariants: this is a pure state machine, without I/O, clock or randomness. A proof covers every
//! byte of both hellos, versions and purpose included. Each end proves under a label of its own
//! over a nonce that the other end chose: a proof can neither be replayed nor reflected to its
//! sender. Proofs are compared in constant time. The messages that follow are not encrypted.

mod layout;
#[cfg(test)]
mod tests;

pub use layout::{HELLO_BYTES, VERDICT_BYTES, read_verdict, verdict};

use hmac::{Hmac, Mac};
use layout::{CLIENT_ROLE, HandshakeStatus, Hello, SERVER_ROLE, check_status};
use pagemesh_base::key::Key;
use sha2::Sha256;
use uuid::Uuid;

/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;
/// Bytes of a server's hello and proof.
pub const CHALLENGE_BYTES: usize = HELLO_BYTES + PROOF_BYTES;

const CLIENT_LABEL: &[u8] = b"pagemesh client";
const SERVER_LABEL: &[u8] = b"pagemesh server";

/// A random number. It must never be used twice.
pub type Nonce = [u8; 32];

/// The purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Calls of a manager.
    Control,
    /// A session that reads and writes slices.
    Session,
}

impl Purpose {
    /// The number of the purpose in a hello.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Purpose::Control => 1,
            Purpose::Session => 2,
        }
    }

    /// The purpose of a number in a hello.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Purpose> {
        match code {
            1 => Some(Purpose::Control),
            2 => Some(Purpose::Session),
            _ => None,
        }
    }
}

/// The features that this build needs and knows, as bits: none. Each later one gets a constant here, from bit 0
/// on.
pub const FEATURES: u32 = 0;
/// The feature of builds that spoke a draft of protocol version 2. No feature takes the bit again.
pub const DRAFT_FEATURE: u32 = 1 << 31;

/// The optional features of this build, as bits. Both ends use a feature if both know it.
pub const KNOWN: u8 =
    KNOWS_HINTS | KNOWS_SNAPSHOTS | KNOWS_CLONES | KNOWS_VERSION_COPIES | KNOWS_SPACE;
/// The bit of tier hints in requests.
pub const KNOWS_HINTS: u8 = 1;
/// The bit of the messages of snapshots.
pub const KNOWS_SNAPSHOTS: u8 = 2;
/// The bit of the messages of clones.
pub const KNOWS_CLONES: u8 = 4;
/// The bit of the messages that copy versions of snapshots to a leg that lacks them.
pub const KNOWS_VERSION_COPIES: u8 = 8;
/// The bit of the message that counts the space of snapshots.
pub const KNOWS_SPACE: u8 = 16;

/// The first and last version that an end speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The first.
    pub min: u8,
    /// The last.
    pub max: u8,
    /// Bits of [`KNOWN`]: what this end may use if the other one knows it, too.
    pub knows: u8,
}

impl Versions {
    /// The versions that this build speaks.
    pub const OURS: Versions = Versions {
        min: crate::message::VERSION,
        max: crate::message::VERSION,
        knows: KNOWN,
    };

    /// The highest version that both speak.
    #[must_use]
    pub fn common(self, other: Versions) -> Option<u8> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }
}

/// Why a connection was not authenticated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// The first bytes are no hello of the expected role.
    #[error("the peer does not speak this protocol; is the address that of a brick?")]
    NotAHello,
    /// The version ranges of the two ends do not overlap.
    #[error(
        "no common protocol version: the peer speaks {} to {}, this end {} to {}; \
         update the older one", theirs.min, theirs.max, ours.min, ours.max
    )]
    Versions {
        /// The peer's.
        theirs: Versions,
        /// Ours.
        ours: Versions,
    },
    /// An end needs a feature that the other does not know.
    #[error(
        "no common protocol features: the peer needs {theirs:#010x}, this end {ours:#010x}; \
         update the older one"
    )]
    Features {
        /// The bits of the peer's.
        theirs: u32,
        /// The bits of ours.
        ours: u32,
    },
    /// The peer is of a build before the protocol was final.
    #[error(
        "the peer speaks a draft of protocol version {}, from before it was final; \
         install this release on both ends",
        crate::message::VERSION
    )]
    Draft,
    /// The proof is wrong.
    #[error("the peer has another cluster key; give both ends the same key file")]
    WrongKey,
    /// The brick does not know the client's purpose.
    #[error("the brick does not know this kind of client; update the brick")]
    Purpose,
    /// The server has reached its limit of connections.
    #[error("the brick has too many connections; end some or try again later")]
    Busy,
}

/// The result of the handshake, known to both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandshakeResult {
    /// The version of the messages that follow.
    pub version: u8,
    /// The purpose that the client stated.
    pub purpose: Purpose,
    /// The identity of the other end.
    pub identity: Uuid,
    /// Whether the other end knows the tier hints of requests.
    pub knows_hints: bool,
    /// Whether the other end knows the messages of snapshots.
    pub knows_snapshots: bool,
    /// Whether the other end knows the messages of clones.
    pub knows_clones: bool,
    /// Whether the other end counts the space of snapshots.
    pub knows_space: bool,
    /// Whether the other end knows the messages that copy versions of snapshots.
    pub knows_version_copies: bool,
}

/// The unfinished keyed hash over the label and both hellos.
fn transcript(
    key: &Key,
    label: &[u8],
    client: &[u8; HELLO_BYTES],
    server: &[u8; HELLO_BYTES],
) -> Option<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).ok()?;
    mac.update(label);
    mac.update(client);
    mac.update(server);
    Some(mac)
}

fn prove(
    key: &Key,
    label: &[u8],
    client: &[u8; HELLO_BYTES],
    server: &[u8; HELLO_BYTES],
) -> [u8; PROOF_BYTES] {
    // HMAC accepts a key of any length, so this never fails.
    let mac = transcript(key, label, client, server);
    mac.map_or([0; PROOF_BYTES], |mac| mac.finalize().into_bytes().into())
}

fn check(
    key: &Key,
    label: &[u8],
    client: &[u8; HELLO_BYTES],
    server: &[u8; HELLO_BYTES],
    proof: &[u8],
) -> Result<(), AuthError> {
    let mac = transcript(key, label, client, server).ok_or(AuthError::WrongKey)?;
    mac.verify_slice(proof).map_err(|_| AuthError::WrongKey)
}

/// The client's side of the handshake, after it sent its hello.
pub struct ClientHandshake<'a> {
    key: &'a Key,
    purpose: Purpose,
    versions: Versions,
    hello: [u8; HELLO_BYTES],
}

impl<'a> ClientHandshake<'a> {
    /// Starts the handshake. The caller sends the returned hello first.
    #[must_use]
    pub fn new(
        key: &'a Key,
        purpose: Purpose,
        versions: Versions,
        identity: Uuid,
        nonce: Nonce,
    ) -> (ClientHandshake<'a>, [u8; HELLO_BYTES]) {
        let hello = Hello::new(versions, CLIENT_ROLE, purpose.code(), identity, nonce).encode();
        let client = ClientHandshake {
            key,
            purpose,
            versions,
            hello,
        };
        (client, hello)
    }

    /// Checks the server's hello and proof and returns the client's proof.
    ///
    /// # Errors
    /// When the server refuses, or does not know the key.
    pub fn answer_challenge(
        &self,
        challenge: &[u8; CHALLENGE_BYTES],
    ) -> Result<([u8; PROOF_BYTES], HandshakeResult), AuthError> {
        let (hello, proof) = challenge
            .split_first_chunk::<HELLO_BYTES>()
            .ok_or(AuthError::NotAHello)?;
        let server = Hello::decode(hello, SERVER_ROLE)?;
        server.check_features()?;
        check_status(server.status, server.versions(), self.versions)?;
        check(self.key, SERVER_LABEL, &self.hello, hello, proof)?;
        let common = self.versions.common(server.versions());
        let version = common.ok_or(AuthError::Versions {
            theirs: server.versions(),
            ours: self.versions,
        })?;
        let agreed = HandshakeResult {
            version,
            purpose: self.purpose,
            identity: server.identity(),
            knows_hints: self.versions.knows & server.versions().knows & KNOWS_HINTS != 0,
            knows_snapshots: self.versions.knows & server.versions().knows & KNOWS_SNAPSHOTS != 0,
            knows_clones: self.versions.knows & server.versions().knows & KNOWS_CLONES != 0,
            knows_space: self.versions.knows & server.versions().knows & KNOWS_SPACE != 0,
            knows_version_copies: self.versions.knows
                & server.versions().knows
                & KNOWS_VERSION_COPIES
                != 0,
        };
        Ok((prove(self.key, CLIENT_LABEL, &self.hello, hello), agreed))
    }
}

/// The server's side of the handshake, after it answered a hello.
pub struct ServerHandshake<'a> {
    key: &'a Key,
    client: [u8; HELLO_BYTES],
    server: [u8; HELLO_BYTES],
    result: HandshakeResult,
}

/// The server's response to a client's hello.
pub enum HelloResponse<'a> {
    /// The server sends these bytes and waits for a proof.
    Challenge(ServerHandshake<'a>, [u8; CHALLENGE_BYTES]),
    /// The server sends these bytes and closes the connection.
    Refuse([u8; CHALLENGE_BYTES], AuthError),
}

impl<'a> ServerHandshake<'a> {
    /// Checks a client's hello.
    ///
    /// # Errors
    /// When the bytes are no hello; the server then sends no answer.
    pub fn accept_hello(
        key: &'a Key,
        versions: Versions,
        identity: Uuid,
        nonce: Nonce,
        hello: &[u8; HELLO_BYTES],
    ) -> Result<HelloResponse<'a>, AuthError> {
        let client = Hello::decode(hello, CLIENT_ROLE)?;
        let common = versions.common(client.versions());
        let common = common.ok_or((
            HandshakeStatus::NoVersion,
            AuthError::Versions {
                theirs: client.versions(),
                ours: versions,
            },
        ));
        let agreed = common.and_then(|version| {
            let purpose = Purpose::from_code(client.purpose);
            let purpose = purpose.ok_or((HandshakeStatus::NoPurpose, AuthError::Purpose))?;
            let features = client.check_features();
            features.map_err(|cause| (HandshakeStatus::NoFeature, cause))?;
            Ok((version, purpose))
        });
        let mut server = Hello::new(versions, SERVER_ROLE, client.purpose, identity, nonce);
        let (version, purpose) = match agreed {
            Ok(agreed) => agreed,
            Err((status, cause)) => {
                server.status = status as u8;
                let mut refusal = [0; CHALLENGE_BYTES];
                refusal[..HELLO_BYTES].copy_from_slice(&server.encode());
                return Ok(HelloResponse::Refuse(refusal, cause));
            }
        };
        let server = server.encode();
        let mut challenge = [0; CHALLENGE_BYTES];
        challenge[..HELLO_BYTES].copy_from_slice(&server);
        let proof = prove(key, SERVER_LABEL, hello, &server);
        challenge[HELLO_BYTES..].copy_from_slice(&proof);
        let agreed = HandshakeResult {
            version,
            purpose,
            identity: client.identity(),
            knows_hints: versions.knows & client.versions().knows & KNOWS_HINTS != 0,
            knows_snapshots: versions.knows & client.versions().knows & KNOWS_SNAPSHOTS != 0,
            knows_clones: versions.knows & client.versions().knows & KNOWS_CLONES != 0,
            knows_space: versions.knows & client.versions().knows & KNOWS_SPACE != 0,
            knows_version_copies: versions.knows & client.versions().knows & KNOWS_VERSION_COPIES
                != 0,
        };
        let state = ServerHandshake {
            key,
            client: *hello,
            server,
            result: agreed,
        };
        Ok(HelloResponse::Challenge(state, challenge))
    }

    /// Checks the client's proof.
    ///
    /// # Errors
    /// When the client does not know the key.
    pub fn check(&self, proof: &[u8; PROOF_BYTES]) -> Result<HandshakeResult, AuthError> {
        check(self.key, CLIENT_LABEL, &self.client, &self.server, proof)?;
        Ok(self.result)
    }
}
