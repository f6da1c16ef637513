//! The handshake with every part of it changed: an end accepts only the bytes that the other end
//! sent in this handshake.

use super::target;
use pagemesh_base::key::Key;
use pagemesh_fabric::auth::{
    AuthError, CHALLENGE_BYTES, ClientHandshake, HELLO_BYTES, HelloResponse, PROOF_BYTES, Purpose,
    ServerHandshake, VERDICT_BYTES, Versions, read_verdict, verdict,
};
use std::mem::{Discriminant, discriminant};
use uuid::Uuid;

const BRICK: Uuid = Uuid::from_u128(0xb);

/// The bytes of a genuine handshake: hello, challenge, proof, verdict.
fn genuine_handshake(key: &Key, purpose: Purpose) -> Vec<u8> {
    let (client, hello) = ClientHandshake::new(key, purpose, Versions::OURS, Uuid::nil(), [1; 32]);
    let welcome = ServerHandshake::accept_hello(key, Versions::OURS, BRICK, [2; 32], &hello);
    let Ok(HelloResponse::Challenge(_, challenge)) = welcome else {
        panic!("no challenge");
    };
    let (proof, _) = client.answer_challenge(&challenge).expect("the same key");
    [&hello[..], &challenge, &proof, &verdict(Ok(()))].concat()
}

type AuthErrorKind = Option<Discriminant<AuthError>>;

/// The outcome of the hello, the challenge, the proof and the verdict.
fn outcome(said: &[u8]) -> Option<(AuthErrorKind, AuthErrorKind, AuthErrorKind, AuthErrorKind)> {
    let (hello, said) = said.split_first_chunk::<HELLO_BYTES>()?;
    let (challenge, said) = said.split_first_chunk::<CHALLENGE_BYTES>()?;
    let (proof, said) = said.split_first_chunk::<PROOF_BYTES>()?;
    let last = said.first_chunk::<VERDICT_BYTES>()?;
    let key = Key::from_bytes([7; 32]);
    let welcome = ServerHandshake::accept_hello(&key, Versions::OURS, BRICK, [2; 32], hello);
    let (at_server, proven) = match &welcome {
        Err(cause) => (Some(cause.clone()), None),
        Ok(HelloResponse::Refuse(said, cause)) => {
            assert_eq!(said[HELLO_BYTES..], [0; PROOF_BYTES], "nothing is proven");
            (Some(cause.clone()), None)
        }
        Ok(HelloResponse::Challenge(server, _)) => {
            assert_eq!((&hello[..4], hello[6]), (&b"PMHI"[..], 1));
            assert!(Purpose::from_code(hello[7]).is_some());
            (None, Some(server.check(proof)))
        }
    };
    let purpose = Purpose::from_code(hello[7]).unwrap_or(Purpose::Session);
    let truth = genuine_handshake(&key, purpose);
    let (true_hello, rest) = truth.split_at(HELLO_BYTES);
    let (true_challenge, rest) = rest.split_at(CHALLENGE_BYTES);
    if let Some(Ok(agreed)) = &proven {
        let known = hello[..] == *true_hello && rest.starts_with(proof);
        assert!(known, "a proof from no holder of the key");
        assert_eq!(agreed.purpose.code(), hello[7]);
        assert!((hello[4]..=hello[5]).contains(&agreed.version));
    }
    let (client, _) = ClientHandshake::new(&key, purpose, Versions::OURS, Uuid::nil(), [1; 32]);
    let answered = client.answer_challenge(challenge);
    if let Ok((_, agreed)) = &answered {
        assert!(challenge[..] == *true_challenge, "a forged challenge");
        assert_eq!(agreed.identity, BRICK);
    }
    let heard = read_verdict(*last);
    assert_eq!(heard.is_ok(), last[..5] == *b"PMOK\0");
    let of = |cause: &AuthError| discriminant(cause);
    Some((
        at_server.as_ref().map(of),
        proven.and_then(|checked| checked.err()).as_ref().map(of),
        answered.err().as_ref().map(of),
        heard.err().as_ref().map(of),
    ))
}

#[test]
fn fuzz_handshake() {
    let key = Key::from_bytes([7; 32]);
    let other = Key::from_bytes([8; 32]);
    target("handshake")
        .seeds([
            genuine_handshake(&key, Purpose::Session),
            genuine_handshake(&key, Purpose::Control),
            genuine_handshake(&other, Purpose::Session),
        ])
        .cases(10_000)
        .bytes_max(HELLO_BYTES + CHALLENGE_BYTES + PROOF_BYTES + VERDICT_BYTES)
        .run(outcome);
}
