//! The request for which a handle of the manager acts: its actor, the state that it expects, and its key.

use crate::access::{Identity, Role};
use crate::call_key::ScopedKey;
use serde::Serialize;
use sha2::{Digest, Sha256};
use std::fmt;
use std::sync::Arc;

/// The request for which a handle of the manager acts.
#[derive(Clone, Debug)]
pub struct CallContext {
    /// The cause of the changes that it makes, as events name it.
    pub actor: Arc<str>,
    /// The rights of the actor.
    pub role: Role,
    /// The states of which the changed thing must have one; any if missing.
    pub expected: Option<Arc<[RecordTag]>>,
    /// The `Idempotency-Key` of the request, if it has one.
    pub key: Option<ScopedKey>,
}

impl Default for CallContext {
    fn default() -> CallContext {
        let Identity { name, role, .. } = Identity::cluster_key();
        CallContext {
            actor: name,
            role,
            expected: None,
            key: None,
        }
    }
}

/// Names the stored state of a volume or a brick: the same for equal states, and with a chance of
/// 2^-64 for two others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordTag(u64);

impl RecordTag {
    /// The tag of a record.
    pub(crate) fn new(record: &impl Serialize) -> RecordTag {
        RecordTag(hash(record))
    }

    /// Reads the first part of an entity tag.
    pub(crate) fn parse(text: &str) -> Option<RecordTag> {
        let inner = text.trim().strip_prefix('"')?.strip_suffix('"')?;
        let digits = inner.split_once('.')?.0;
        let is_hex = digits.len() == 16 && digits.bytes().all(|it| it.is_ascii_hexdigit());
        let tag = u64::from_str_radix(digits, 16).ok()?;
        is_hex.then_some(RecordTag(tag))
    }
}

impl fmt::Display for RecordTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The entity tag of one thing: of its record, and of the answer about it without its ages.
pub(crate) fn etag_text(record: RecordTag, view: &impl Serialize) -> String {
    format!("\"{record}.{:016x}\"", hash(view))
}

/// The first bytes of the SHA-256 of a value's JSON.
pub(crate) fn hash(value: &impl Serialize) -> u64 {
    // Bodies and records always have JSON.
    let bytes = serde_json::to_vec(value).unwrap_or_default();
    let digest: [u8; 32] = Sha256::digest(bytes).into();
    u64::from_be_bytes(std::array::from_fn(|at| digest[at]))
}
