//! The checks of fuzz targets for JSON, and records of the store as seeds.

#![allow(dead_code)]

use pagemesh_base::layout::NAME_BYTES_MAX;
use pagemesh_fuzz::{FuzzTarget, measure_allocation};
use pagemesh_manage::access::{TokenRecord, TokenRole, TokenSecret};
use pagemesh_manage::idempotency::{KeptAnswer, ScopedKey};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use uuid::Uuid;

/// Bytes that decoding may allocate for each byte of a body. The smallest element of a list, `{}`,
/// can become a structure of a few words, in a vector that doubles.
pub const ALLOCATED_MAX: u64 = 128;
/// Bytes that decoding may allocate in addition, for an error message.
pub const SPARE_BYTES: u64 = 16 << 10;

pub fn target(name: &'static str) -> FuzzTarget {
    FuzzTarget::new(name, env!("CARGO_MANIFEST_DIR"))
}

/// Asserts that the type decodes from at least one seed.
pub fn decodes<T: DeserializeOwned + Serialize + PartialEq + Debug>(seeds: &[Vec<u8>]) {
    let any = seeds.iter().any(|seed| check_decoded::<T>(seed).is_some());
    assert!(any, "no seed is a {}", std::any::type_name::<T>());
}

/// Decodes a body as one type. A decoded value must encode to an equal value, and must not decode
/// with a word appended.
pub fn check_decoded<T: DeserializeOwned + Serialize + PartialEq + Debug>(
    bytes: &[u8],
) -> Option<T> {
    let (decoded, took) = measure_allocation(|| serde_json::from_slice::<T>(bytes));
    let most = ALLOCATED_MAX * bytes.len() as u64 + SPARE_BYTES;
    assert!(took <= most, "{took} bytes for {}", bytes.len());
    let value = decoded.ok()?;
    let again = serde_json::to_vec(&value).expect("it has only what JSON has");
    let decoded = serde_json::from_slice::<T>(&again);
    assert_eq!(decoded.expect("its own words"), value);
    let longer = [bytes, b"0"].concat();
    assert!(
        serde_json::from_slice::<T>(&longer).is_err(),
        "a word too many"
    );
    Some(value)
}

pub fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("JSON")
}

/// Checks that a decoded name is safe in paths and logs.
pub fn check_plain(name: &str) {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    assert!((1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(plain));
}

pub fn kept_answer() -> KeptAnswer {
    KeptAnswer {
        seq: 7,
        key: ScopedKey {
            token: Some(Uuid::from_u128(7)),
            text: "k-1".parse().expect("a key"),
        },
        call: 9,
        time_unix_s: 65,
        etag: "\"0.0\"".into(),
        body: "{}".into(),
    }
}

pub fn token_record() -> TokenRecord {
    let token = format!("pm_{}", "A".repeat(43));
    TokenRecord {
        id: Uuid::from_u128(7),
        name: "backup".parse().expect("a name"),
        role: TokenRole::Admin,
        hash: TokenSecret::parse(&token).expect("a token").hash(),
        created_unix_s: 5,
        expires_unix_s: Some(65),
        expired: true,
    }
}
