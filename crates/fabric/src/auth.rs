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
//!  9  zero       7
//! 16  identity  16
//! 32  nonce     32
//! ```
//!
//! `min` and `max` are versions of the messages that follow; the highest that
//! both know is used. Role: 1 client, 2 server. Purpose, of the client: 1
//! control, 2 session. Status, of the server: 0 go on, 1 no common version,
//! 2 wrong key, 3 too many connections, 4 unknown purpose. Identity: the client's, or the
//! brick's.
//!
//! Invariants: this is a pure state machine, without I/O, clock or randomness. A proof covers every
//! byte of both hellos, versions and purpose included. Each end proves under a label of its own
//! over a nonce that the other end chose: a proof can neither be replayed nor reflected to its
//! sender. Proofs are compared in constant time. The messages that follow are not encrypted.

use hmac::{Hmac, Mac};
use pagemesh_base::key::Key;
use sha2::Sha256;
use uuid::Uuid;

/// Bytes of a hello.
pub const HELLO_BYTES: usize = 64;
/// Bytes of a proof.
pub const PROOF_BYTES: usize = 32;
/// Bytes of a server's hello and proof.
pub const CHALLENGE_BYTES: usize = HELLO_BYTES + PROOF_BYTES;
/// Bytes of a verdict.
pub const VERDICT_BYTES: usize = 8;

const HELLO_MAGIC: [u8; 4] = *b"PMHI";
const VERDICT_MAGIC: [u8; 4] = *b"PMOK";
const CLIENT_LABEL: &[u8] = b"pagemesh client";
const SERVER_LABEL: &[u8] = b"pagemesh server";
const CLIENT_ROLE: u8 = 1;
const SERVER_ROLE: u8 = 2;

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

/// The first and last version that an end speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The first.
    pub min: u8,
    /// The last.
    pub max: u8,
}

impl Versions {
    /// The versions that this build speaks.
    pub const OURS: Versions = Versions {
        min: crate::message::VERSION,
        max: crate::message::VERSION,
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
}

#[derive(Clone, Copy)]
#[repr(u8)]
enum HandshakeStatus {
    Accepted = 0,
    NoVersion = 1,
    WrongKey = 2,
    Busy = 3,
    NoPurpose = 4,
}

struct Hello {
    versions: Versions,
    role: u8,
    purpose: u8,
    status: u8,
    identity: Uuid,
    nonce: Nonce,
}

impl Hello {
    fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&HELLO_MAGIC);
        bytes[4] = self.versions.min;
        bytes[5] = self.versions.max;
        bytes[6] = self.role;
        bytes[7] = self.purpose;
        bytes[8] = self.status;
        bytes[16..32].copy_from_slice(self.identity.as_bytes());
        bytes[32..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Decodes a hello. Unused bytes are ignored: a newer peer may use them, and the proof covers
    /// them.
    fn decode(bytes: &[u8; HELLO_BYTES], role: u8) -> Result<Hello, AuthError> {
        let (start, nonce) = bytes.split_at(32);
        let (fixed, identity) = start.split_at(16);
        let nonce: Nonce = nonce.try_into().map_err(|_| AuthError::NotAHello)?;
        let hello = Hello {
            versions: Versions {
                min: fixed[4],
                max: fixed[5],
            },
            role: fixed[6],
            purpose: fixed[7],
            status: fixed[8],
            identity: Uuid::from_slice(identity).map_err(|_| AuthError::NotAHello)?,
            nonce,
        };
        match fixed[..4] == HELLO_MAGIC && hello.role == role {
            true => Ok(hello),
            false => Err(AuthError::NotAHello),
        }
    }
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

fn check_status(status: u8, theirs: Versions, ours: Versions) -> Result<(), AuthError> {
    match status {
        0 => Ok(()),
        1 => Err(AuthError::Versions { theirs, ours }),
        2 => Err(AuthError::WrongKey),
        3 => Err(AuthError::Busy),
        4 => Err(AuthError::Purpose),
        _ => Err(AuthError::NotAHello),
    }
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
        let hello = Hello {
            versions,
            role: CLIENT_ROLE,
            purpose: purpose.code(),
            status: HandshakeStatus::Accepted as u8,
            identity,
            nonce,
        };
        let hello = hello.encode();
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
        check_status(server.status, server.versions, self.versions)?;
        check(self.key, SERVER_LABEL, &self.hello, hello, proof)?;
        let common = self.versions.common(server.versions);
        let version = common.ok_or(AuthError::Versions {
            theirs: server.versions,
            ours: self.versions,
        })?;
        let agreed = HandshakeResult {
            version,
            purpose: self.purpose,
            identity: server.identity,
        };
        Ok((prove(self.key, CLIENT_LABEL, &self.hello, hello), agreed))
    }
}

/// Decodes the server's verdict.
///
/// # Errors
/// When the server refuses.
pub fn read_verdict(verdict: [u8; VERDICT_BYTES]) -> Result<(), AuthError> {
    match verdict[..4] == VERDICT_MAGIC {
        true => check_status(verdict[4], Versions::OURS, Versions::OURS),
        false => Err(AuthError::NotAHello),
    }
}

/// Encodes the server's verdict: welcome, or the reason of the refusal.
#[must_use]
pub fn verdict(outcome: Result<(), &AuthError>) -> [u8; VERDICT_BYTES] {
    let status = match outcome {
        Ok(()) => HandshakeStatus::Accepted,
        Err(AuthError::Busy) => HandshakeStatus::Busy,
        Err(AuthError::Versions { .. }) => HandshakeStatus::NoVersion,
        Err(AuthError::Purpose) => HandshakeStatus::NoPurpose,
        Err(AuthError::WrongKey | AuthError::NotAHello) => HandshakeStatus::WrongKey,
    };
    let mut bytes = [0; VERDICT_BYTES];
    bytes[..4].copy_from_slice(&VERDICT_MAGIC);
    bytes[4] = status as u8;
    bytes
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
        let common = versions.common(client.versions);
        let common = common.ok_or((
            HandshakeStatus::NoVersion,
            AuthError::Versions {
                theirs: client.versions,
                ours: versions,
            },
        ));
        let agreed = common.and_then(|version| {
            let purpose = Purpose::from_code(client.purpose);
            let purpose = purpose.ok_or((HandshakeStatus::NoPurpose, AuthError::Purpose))?;
            Ok((version, purpose))
        });
        let mut server = Hello {
            versions,
            role: SERVER_ROLE,
            purpose: client.purpose,
            status: HandshakeStatus::Accepted as u8,
            identity,
            nonce,
        };
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
            identity: client.identity,
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(byte: u8) -> Key {
        Key::from_bytes([byte; 32])
    }

    fn client(key: &Key, nonce: u8) -> (ClientHandshake<'_>, [u8; HELLO_BYTES]) {
        let identity = Uuid::from_u128(1);
        ClientHandshake::new(key, Purpose::Session, Versions::OURS, identity, [nonce; 32])
    }

    fn challenge<'a>(
        key: &'a Key,
        nonce: u8,
        hello: &[u8; HELLO_BYTES],
    ) -> (ServerHandshake<'a>, [u8; CHALLENGE_BYTES]) {
        let identity = Uuid::from_u128(2);
        match ServerHandshake::accept_hello(key, Versions::OURS, identity, [nonce; 32], hello) {
            Ok(HelloResponse::Challenge(server, challenge)) => (server, challenge),
            _ => panic!("no challenge"),
        }
    }

    #[test]
    fn both_ends_agree() {
        let key = key(1);
        let (client, hello) = client(&key, 10);
        let (server, challenge) = challenge(&key, 20, &hello);
        let (proof, at_client) = client
            .answer_challenge(&challenge)
            .expect("a server with the key");
        let at_server = server.check(&proof).expect("a client with the key");
        assert_eq!(at_client.identity, Uuid::from_u128(2));
        assert_eq!(at_server.identity, Uuid::from_u128(1));
        assert_eq!(at_server.purpose, Purpose::Session);
        assert_eq!(read_verdict(verdict(Ok(()))), Ok(()));
    }

    #[test]
    fn wrong_key_is_detected_by_both_ends() {
        let (right, wrong) = (key(1), key(2));
        let (client, hello) = client(&right, 10);
        let (server, challenge_bytes) = challenge(&wrong, 20, &hello);
        assert_eq!(
            client.answer_challenge(&challenge_bytes).err(),
            Some(AuthError::WrongKey)
        );
        let (_, honest) = challenge(&right, 20, &hello);
        let (proof, _) = client.answer_challenge(&honest).expect("the same key");
        assert_eq!(server.check(&proof).err(), Some(AuthError::WrongKey));
        assert_eq!(
            read_verdict(verdict(Err(&AuthError::WrongKey))),
            Err(AuthError::WrongKey)
        );
    }

    #[test]
    fn replayed_proof_or_challenge_is_refused() {
        let key = key(1);
        let (first, hello) = client(&key, 10);
        let (_, heard) = challenge(&key, 20, &hello);
        let (proof, _) = first.answer_challenge(&heard).expect("the same key");
        let (later, _) = challenge(&key, 21, &hello);
        assert_eq!(later.check(&proof).err(), Some(AuthError::WrongKey));
        let (second, _) = client(&key, 11);
        assert_eq!(
            second.answer_challenge(&heard).err(),
            Some(AuthError::WrongKey)
        );
    }

    /// An attacker that talks to both ends at once, or to one end twice, can only send back the
    /// proofs of those ends.
    #[test]
    fn reflected_proof_is_refused() {
        let key = key(1);
        let (client, hello) = client(&key, 10);
        let (server, challenge) = challenge(&key, 20, &hello);
        let mut own = [0; PROOF_BYTES];
        own.copy_from_slice(&challenge[HELLO_BYTES..]);
        assert_eq!(server.check(&own).err(), Some(AuthError::WrongKey));

        let mut reflected = [0; CHALLENGE_BYTES];
        reflected[..HELLO_BYTES].copy_from_slice(&hello);
        assert_eq!(
            client.answer_challenge(&reflected).err(),
            Some(AuthError::NotAHello)
        );
        reflected[6] = SERVER_ROLE;
        let (proof, _) = client.answer_challenge(&challenge).expect("the same key");
        reflected[HELLO_BYTES..].copy_from_slice(&proof);
        assert_eq!(
            client.answer_challenge(&reflected).err(),
            Some(AuthError::WrongKey)
        );
    }

    #[test]
    fn highest_common_version_is_used_or_refusal_names_both() {
        let range = |min, max| Versions { min, max };
        assert_eq!(range(0, 3).common(range(2, 9)), Some(3));
        assert_eq!(range(0, 1).common(range(2, 9)), None);
        let key = key(1);
        let identity = Uuid::nil();
        let (client, hello) =
            ClientHandshake::new(&key, Purpose::Control, range(4, 6), identity, [1; 32]);
        let Ok(HelloResponse::Refuse(said, _)) =
            ServerHandshake::accept_hello(&key, range(0, 3), identity, [2; 32], &hello)
        else {
            panic!("not refused");
        };
        let refused = client
            .answer_challenge(&said)
            .expect_err("no common version");
        assert_eq!(
            refused,
            AuthError::Versions {
                theirs: range(0, 3),
                ours: range(4, 6)
            }
        );
    }

    #[test]
    fn unknown_purpose_is_refused_as_such() {
        let key = key(1);
        let (client, mut hello) = client(&key, 10);
        hello[7] = 9;
        let welcome =
            ServerHandshake::accept_hello(&key, Versions::OURS, Uuid::nil(), [2; 32], &hello);
        let Ok(HelloResponse::Refuse(said, AuthError::Purpose)) = welcome else {
            panic!("not refused");
        };
        assert_eq!(
            client.answer_challenge(&said).err(),
            Some(AuthError::Purpose)
        );
    }

    proptest! {
        /// The proofs cover every bit of the handshake, the versions included.
        #[test]
        fn any_flipped_handshake_bit_is_detected(
            at in 0usize..HELLO_BYTES + CHALLENGE_BYTES + PROOF_BYTES, bit in 0u8..8,
        ) {
            let key = key(1);
            let (client, mut hello) = client(&key, 10);
            let flip = |bytes: &mut [u8], at: usize| if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << bit;
            };
            flip(&mut hello, at);
            let Ok(HelloResponse::Challenge(server, mut challenge)) =
                ServerHandshake::accept_hello(&key, Versions::OURS, Uuid::nil(), [20; 32], &hello)
            else {
                return Ok(());
            };
            flip(&mut challenge, at.wrapping_sub(HELLO_BYTES));
            let Ok((mut proof, _)) = client.answer_challenge(&challenge) else {
                return Ok(());
            };
            flip(&mut proof, at.wrapping_sub(HELLO_BYTES + CHALLENGE_BYTES));
            prop_assert!(server.check(&proof).is_err());
        }

        #[test]
        fn any_bytes_cause_no_panic(
            hello in prop::collection::vec(any::<u8>(), HELLO_BYTES),
            magic: bool, verdict: [u8; VERDICT_BYTES],
        ) {
            let key = key(1);
            let mut bytes = [0; HELLO_BYTES];
            bytes.copy_from_slice(&hello);
            if magic {
                bytes[..4].copy_from_slice(&HELLO_MAGIC);
                bytes[6] = CLIENT_ROLE;
            }
            let _ = ServerHandshake::accept_hello(&key, Versions::OURS, Uuid::nil(), [0; 32], &bytes);
            let _ = read_verdict(verdict);
        }
    }
}
