//! Both ends of the handshake against each other, and against forgeries.

use super::layout::{CLIENT_ROLE, HELLO_MAGIC, SERVER_ROLE};
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

/// The bytes of version 2, which are frozen. The proofs were computed by another implementation of HMAC-SHA256.
#[test]
fn handshake_has_its_frozen_bytes() {
    let hex = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|it| format!("{it:02x}"))
            .collect::<String>()
    };
    let key = key(1);
    // Both ends know nothing that is optional, as the build that froze the bytes.
    let plain = Versions {
        knows: 0,
        ..Versions::OURS
    };
    let (session, identity) = (Purpose::Session, Uuid::from_u128(1));
    let (client, hello) = ClientHandshake::new(&key, session, plain, identity, [10; 32]);
    let identity = Uuid::from_u128(2);
    let answered = ServerHandshake::accept_hello(&key, plain, identity, [20; 32], &hello);
    let Ok(HelloResponse::Challenge(_, challenge)) = answered else {
        panic!("no challenge");
    };
    let (proof, _) = client.answer_challenge(&challenge).expect("the same key");
    let start = "504d48490202";
    let nonces = ["0a", "14"].map(|byte| byte.repeat(32));
    let expected = format!("{start}010200000000{}01{}", "00".repeat(19), nonces[0]);
    assert_eq!(hex(&hello), expected);
    let server_proof = "c83e067461f54538b3949ded786364541df9c53de40e2de5b73bdc003c119ec7";
    let expected = format!("{start}020200000000{}02{}", "00".repeat(19), nonces[1]);
    assert_eq!(hex(&challenge), expected + server_proof);
    let client_proof = "d44059dd2cc61e3ba3501288b59eb51c383696daa17d163f49c9b65dc85164f6";
    assert_eq!(hex(&proof), client_proof);
    assert_eq!(hex(&verdict(Ok(()))), "504d4f4b00000000");
}

#[test]
fn hints_are_agreed_if_both_ends_know_them() {
    let key = key(1);
    let check = |ours: u8, theirs: u8, expected: bool| {
        let versions = |knows| Versions {
            knows,
            ..Versions::OURS
        };
        let (session, id) = (Purpose::Session, Uuid::from_u128(1));
        let made = ClientHandshake::new(&key, session, versions(ours), id, [10; 32]);
        let (client, hello) = made;
        let answered = ServerHandshake::accept_hello(&key, versions(theirs), id, [20; 32], &hello);
        let Ok(HelloResponse::Challenge(server, challenge)) = answered else {
            panic!("no challenge");
        };
        let (proof, at_client) = client.answer_challenge(&challenge).expect("the same key");
        let at_server = server.check(&proof).expect("the same key");
        let known = (at_client.knows_hints, at_server.knows_hints);
        assert_eq!(known, (expected, expected), "{ours} and {theirs}");
    };
    check(KNOWS_HINTS, KNOWS_HINTS, true);
    check(KNOWS_HINTS, 0, false);
    check(0, KNOWS_HINTS, false);
    // A later build knows more.
    check(KNOWS_HINTS, 0xff, true);
    check(KNOWS_HINTS, 0xfe, false);
}

#[test]
fn snapshots_are_used_if_both_ends_know_them() {
    let key = key(1);
    let check = |ours: u8, theirs: u8, expected: bool| {
        let versions = |knows| Versions {
            knows,
            ..Versions::OURS
        };
        let (session, id) = (Purpose::Session, Uuid::from_u128(1));
        let (client, hello) = ClientHandshake::new(&key, session, versions(ours), id, [10; 32]);
        let answered = ServerHandshake::accept_hello(&key, versions(theirs), id, [20; 32], &hello);
        let Ok(HelloResponse::Challenge(server, challenge)) = answered else {
            panic!("no challenge");
        };
        let (proof, at_client) = client.answer_challenge(&challenge).expect("the same key");
        let at_server = server.check(&proof).expect("the same key");
        let known = (at_client.knows_snapshots, at_server.knows_snapshots);
        assert_eq!(known, (expected, expected), "{ours} and {theirs}");
    };
    check(KNOWN, KNOWN, true);
    check(KNOWN, KNOWS_HINTS, false);
    check(KNOWS_HINTS, KNOWN, false);
    check(KNOWS_SNAPSHOTS, 0xff, true);
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
    let range = |min, max| Versions { min, max, knows: 0 };
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
fn unknown_feature_is_refused_by_either_end() {
    let key = key(1);
    let (client, mut hello) = client(&key, 10);
    let (_, mut heard) = challenge(&key, 20, &hello);
    hello[12] |= 1;
    let theirs = FEATURES | 1;
    let unknown = |theirs| AuthError::Features {
        theirs,
        ours: FEATURES,
    };
    let welcome = ServerHandshake::accept_hello(&key, Versions::OURS, Uuid::nil(), [2; 32], &hello);
    let Ok(HelloResponse::Refuse(said, cause)) = welcome else {
        panic!("not refused");
    };
    assert_eq!(cause, unknown(theirs));
    let told = cause.to_string();
    assert!(
        told.contains("0x00000001") && told.contains("0x00000000"),
        "{told}"
    );
    let refused = client.answer_challenge(&said).err();
    assert_eq!(refused, Some(unknown(FEATURES)));
    heard[12] |= 1;
    let refused = client.answer_challenge(&heard).err();
    assert_eq!(refused, Some(unknown(theirs)));
    let verdict = read_verdict(verdict(Err(&unknown(theirs))));
    assert_eq!(verdict, Err(unknown(0)));
}

/// A build that speaks a draft hears that this end does not know its feature.
#[test]
fn draft_of_protocol_is_refused_by_either_end() {
    let key = key(1);
    let (client, mut hello) = client(&key, 10);
    let (_, mut heard) = challenge(&key, 20, &hello);
    hello[15] |= 1 << 7;
    let welcome = ServerHandshake::accept_hello(&key, Versions::OURS, Uuid::nil(), [2; 32], &hello);
    let Ok(HelloResponse::Refuse(said, cause)) = welcome else {
        panic!("not refused");
    };
    assert_eq!(cause, AuthError::Draft);
    let told = cause.to_string();
    assert!(told.contains("draft of protocol version 2"), "{told}");
    let unknown = AuthError::Features { theirs: 0, ours: 0 };
    assert_eq!(client.answer_challenge(&said).err(), Some(unknown));
    heard[15] |= 1 << 7;
    assert_eq!(
        client.answer_challenge(&heard).err(),
        Some(AuthError::Draft)
    );
}

#[test]
fn unknown_purpose_is_refused_as_such() {
    let key = key(1);
    let (client, mut hello) = client(&key, 10);
    hello[7] = 9;
    let welcome = ServerHandshake::accept_hello(&key, Versions::OURS, Uuid::nil(), [2; 32], &hello);
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
