//! The key of a call: its syntax and scope, and the answer that is kept for it.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use uuid::Uuid;

/// Bytes of the longest key.
pub const KEY_BYTES_MAX: usize = 64;

/// A key: 1 to [`KEY_BYTES_MAX`] visible characters of ASCII.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IdempotencyKey(String);

/// A key and the identity that sent it. The same key of another token is another key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ScopedKey {
    /// The token; `None` for the cluster key.
    pub token: Option<Uuid>,
    /// The key.
    pub text: IdempotencyKey,
}

/// The text is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an Idempotency-Key has 1 to {KEY_BYTES_MAX} visible characters of ASCII")]
pub struct BadKey;

impl FromStr for IdempotencyKey {
    type Err = BadKey;

    fn from_str(text: &str) -> Result<IdempotencyKey, BadKey> {
        let has_length = (1..=KEY_BYTES_MAX).contains(&text.len());
        let is_visible = text.bytes().all(|byte| byte.is_ascii_graphic());
        (has_length && is_visible)
            .then(|| IdempotencyKey(text.to_owned()))
            .ok_or(BadKey)
    }
}

impl TryFrom<String> for IdempotencyKey {
    type Error = BadKey;

    fn try_from(text: String) -> Result<IdempotencyKey, BadKey> {
        text.parse()
    }
}

impl From<IdempotencyKey> for String {
    fn from(key: IdempotencyKey) -> String {
        key.0
    }
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The header of the key.
pub const KEY_HEADER: &str = "Idempotency-Key";

/// A stored answer to a call with a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptAnswer {
    /// The number of the answer; later answers have higher ones.
    pub seq: u64,
    /// The key, and the token that sent it.
    pub key: ScopedKey,
    /// The hash of the call.
    pub call: u64,
    /// Token time of the answer, in seconds since 1970.
    pub time_unix_s: u64,
    /// The `ETag` of the answer.
    pub etag: String,
    /// The body of the answer, as JSON.
    pub body: String,
}
