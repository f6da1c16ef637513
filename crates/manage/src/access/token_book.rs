//! All tokens, in memory: a pure state machine. The caller stores each change before it applies it.
//!
//! Invariants: names and hashes are unique. A token is found by its hash only while it is neither
//! removed nor expired.

use super::secret::TokenHash;
use super::token_record::{TokenName, TokenRecord};
use super::token_time::{MARK_INTERVAL_S, TokenTime};
use std::collections::BTreeMap;
use std::time::Duration;
use uuid::Uuid;

/// Maximum number of tokens, the expired ones included: memory holds all of them, and one answer
/// lists them.
pub const TOKENS_MAX: usize = 1024;
/// Seconds of the longest life of a token that expires: ten years.
pub const EXPIRES_S_MAX: u64 = 3650 * 24 * 3600;

/// Why a token cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BookError {
    /// A token that has not expired has the name.
    NameTaken,
    /// There are [`TOKENS_MAX`] tokens, and none has expired.
    Full,
}

/// All tokens.
#[derive(Clone, Debug)]
pub struct TokenBook {
    records: BTreeMap<Uuid, TokenRecord>,
    by_hash: BTreeMap<TokenHash, Uuid>,
    time: TokenTime,
    /// The last stored mark of token time.
    mark_unix_s: u64,
}

impl TokenBook {
    /// The tokens of the store, and its mark of token time.
    #[must_use]
    pub fn new(records: Vec<TokenRecord>, mark_unix_s: u64, elapsed: Duration) -> TokenBook {
        let mut book = TokenBook {
            records: BTreeMap::new(),
            by_hash: BTreeMap::new(),
            time: TokenTime::from_mark(mark_unix_s, elapsed),
            mark_unix_s,
        };
        for record in records {
            book.put(record);
        }
        book
    }

    /// Token time now.
    pub fn now(&mut self, elapsed: Duration, wall_unix_s: u64) -> u64 {
        self.time.now(elapsed, wall_unix_s)
    }

    /// The token with this hash, if it is valid at this time.
    #[must_use]
    pub fn find(&self, hash: &TokenHash, now_unix_s: u64) -> Option<&TokenRecord> {
        let record = self.records.get(self.by_hash.get(hash)?)?;
        (!record.is_expired(now_unix_s)).then_some(record)
    }

    /// Whether a token exists and is valid at this time.
    #[must_use]
    pub fn is_valid(&self, id: Uuid, now_unix_s: u64) -> bool {
        let record = self.records.get(&id);
        record.is_some_and(|record| !record.is_expired(now_unix_s))
    }

    /// A token, expired or not.
    #[must_use]
    pub fn get(&self, id: Uuid) -> Option<&TokenRecord> {
        self.records.get(&id)
    }

    /// All tokens, in the order of their names.
    #[must_use]
    pub fn list(&self) -> Vec<&TokenRecord> {
        let mut all: Vec<_> = self.records.values().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// The expired tokens that must go so that a token of this name can be added: the earlier one of
    /// the name, and all if there are too many.
    ///
    /// # Errors
    /// When a valid token has the name, or there are too many.
    pub fn make_room(&self, name: &TokenName, now_unix_s: u64) -> Result<Vec<Uuid>, BookError> {
        let of_name = self.records.values().find(|it| it.name == *name);
        if of_name.is_some_and(|it| !it.is_expired(now_unix_s)) {
            return Err(BookError::NameTaken);
        }
        if self.records.len() < TOKENS_MAX {
            return Ok(of_name.map(|it| it.id).into_iter().collect());
        }
        let all = self.records.values();
        let expired = all.filter(|it| it.is_expired(now_unix_s)).map(|it| it.id);
        let expired: Vec<Uuid> = expired.collect();
        if expired.is_empty() {
            return Err(BookError::Full);
        }
        Ok(expired)
    }

    /// Adds or replaces a token.
    pub fn put(&mut self, record: TokenRecord) {
        self.remove(record.id);
        self.by_hash.insert(record.hash, record.id);
        self.records.insert(record.id, record);
    }

    /// Removes a token.
    pub fn remove(&mut self, id: Uuid) -> Option<TokenRecord> {
        let record = self.records.remove(&id)?;
        self.by_hash.remove(&record.hash);
        Some(record)
    }

    /// The records of tokens that have expired and do not say so yet, with that said.
    #[must_use]
    pub fn newly_expired(&self, now_unix_s: u64) -> Vec<TokenRecord> {
        let all = self.records.values();
        let newly = all.filter(|it| !it.expired && it.is_expired(now_unix_s));
        newly
            .map(|record| TokenRecord {
                expired: true,
                ..record.clone()
            })
            .collect()
    }

    /// Whether the store should get a new mark of token time.
    #[must_use]
    pub fn needs_mark(&self, now_unix_s: u64) -> bool {
        let can_expire = |it: &TokenRecord| it.expires_unix_s.is_some() && !it.expired;
        self.is_mark_old(now_unix_s) && self.records.values().any(can_expire)
    }

    /// Whether the last stored mark is older than [`MARK_INTERVAL_S`].
    #[must_use]
    pub fn is_mark_old(&self, now_unix_s: u64) -> bool {
        now_unix_s >= self.mark_unix_s.saturating_add(MARK_INTERVAL_S)
    }

    /// Notes the mark that the store has now.
    pub fn set_mark(&mut self, mark_unix_s: u64) {
        self.mark_unix_s = mark_unix_s;
    }
}
