//! The kept answers in memory, without their bodies: a pure state machine. The caller stores each change
//! before it applies it.
//!
//! Invariants: a key has one answer at most, and a key of a running call has none. The numbers of
//! answers rise with their times.

use crate::call_key::{KeptAnswer, ScopedKey};
use std::collections::BTreeMap;

/// Maximum number of kept answers.
pub const KEYS_MAX: usize = 4096;
/// Maximum of the bytes of their bodies together: an answer with the layout of a large volume has
/// hundreds of KiB, a common one 2 KiB.
pub const KEPT_BYTES_MAX: usize = 32 << 20;
/// Seconds that an answer is kept.
pub const KEPT_FOR_S: u64 = 24 * 3600;

/// Why a call may not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyConflict {
    /// The same call runs.
    Running,
    /// Another call with the key runs.
    Reused,
}

/// An answer without its body.
#[derive(Clone, Debug)]
struct IndexEntry {
    key: ScopedKey,
    call: u64,
    time_unix_s: u64,
    bytes: usize,
}

/// The kept answers, and the calls with keys that run.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeyIndex {
    answers: BTreeMap<u64, IndexEntry>,
    by_key: BTreeMap<ScopedKey, u64>,
    /// The hashes of the running calls.
    running: BTreeMap<ScopedKey, u64>,
    bytes: usize,
    last_seq: u64,
}

impl KeyIndex {
    /// The answers of the store.
    pub(crate) fn new(answers: &[KeptAnswer]) -> KeyIndex {
        let mut index = KeyIndex::default();
        for answer in answers {
            index.put(answer);
        }
        index
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.answers.is_empty()
    }

    pub(crate) fn next_seq(&self) -> u64 {
        self.last_seq + 1
    }

    /// The number of the kept answer of a key, and the hash of its call.
    pub(crate) fn find(&self, key: &ScopedKey, now_unix_s: u64) -> Option<(u64, u64)> {
        let seq = *self.by_key.get(key)?;
        let entry = self.answers.get(&seq)?;
        (!is_expired(entry, now_unix_s)).then_some((seq, entry.call))
    }

    /// Notes a running call.
    pub(crate) fn begin_call(&mut self, key: &ScopedKey, call: u64) -> Result<(), KeyConflict> {
        match self.running.get(key) {
            None => {
                self.running.insert(key.clone(), call);
                Ok(())
            }
            Some(first) if *first == call => Err(KeyConflict::Running),
            Some(_) => Err(KeyConflict::Reused),
        }
    }

    pub(crate) fn end_call(&mut self, key: &ScopedKey) {
        self.running.remove(key);
    }

    /// The answers that have expired.
    pub(crate) fn expired(&self, now_unix_s: u64) -> Vec<u64> {
        let all = self.answers.iter();
        let expired = all.filter(|(_, entry)| is_expired(entry, now_unix_s));
        expired.map(|(seq, _)| *seq).collect()
    }

    /// The answers that must go so that one more of this length can be kept: the expired ones, then the
    /// oldest.
    pub(crate) fn displaced_by(&self, bytes: usize, now_unix_s: u64) -> Vec<u64> {
        let (mut count, mut sum) = (self.answers.len(), self.bytes);
        let mut removed = vec![];
        for (seq, entry) in &self.answers {
            let fits = count < KEYS_MAX && sum + bytes <= KEPT_BYTES_MAX;
            if fits && !is_expired(entry, now_unix_s) {
                break;
            }
            (count, sum) = (count - 1, sum - entry.bytes);
            removed.push(*seq);
        }
        removed
    }

    /// Adds an answer; an expired one of the same key goes.
    pub(crate) fn put(&mut self, answer: &KeptAnswer) {
        if let Some(earlier) = self.by_key.insert(answer.key.clone(), answer.seq) {
            self.remove(earlier);
            self.by_key.insert(answer.key.clone(), answer.seq);
        }
        let entry = IndexEntry {
            key: answer.key.clone(),
            call: answer.call,
            time_unix_s: answer.time_unix_s,
            bytes: answer.body.len(),
        };
        self.bytes += entry.bytes;
        self.answers.insert(answer.seq, entry);
        self.last_seq = self.last_seq.max(answer.seq);
    }

    pub(crate) fn remove(&mut self, seq: u64) {
        if let Some(entry) = self.answers.remove(&seq) {
            self.bytes -= entry.bytes;
            self.by_key.remove(&entry.key);
        }
    }
}

fn is_expired(entry: &IndexEntry, now_unix_s: u64) -> bool {
    now_unix_s.saturating_sub(entry.time_unix_s) >= KEPT_FOR_S
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(seq: u64, time_unix_s: u64, bytes: usize) -> KeptAnswer {
        KeptAnswer {
            seq,
            key: ScopedKey {
                token: None,
                text: seq.to_string().parse().expect("a key"),
            },
            call: seq,
            time_unix_s,
            etag: String::new(),
            body: " ".repeat(bytes),
        }
    }

    /// Keeps an answer as the manager does.
    fn keep(index: &mut KeyIndex, time_unix_s: u64, bytes: usize) -> Vec<u64> {
        let removed = index.displaced_by(bytes, time_unix_s);
        for seq in &removed {
            index.remove(*seq);
        }
        index.put(&answer(index.next_seq(), time_unix_s, bytes));
        removed
    }

    #[test]
    fn oldest_answers_go_first() {
        let mut index = KeyIndex::default();
        for _ in 0..KEYS_MAX {
            assert!(keep(&mut index, 5, 1).is_empty());
        }
        assert_eq!(keep(&mut index, 5, 1), [1]);
        assert_eq!(keep(&mut index, 5, 1), [2]);
        assert_eq!(index.find(&answer(2, 0, 0).key, 5), None);
        assert_eq!(index.find(&answer(3, 0, 0).key, 5), Some((3, 3)));
        // Long bodies displace more.
        let removed = keep(&mut index, 5, KEPT_BYTES_MAX - 10);
        assert_eq!(removed.len(), KEYS_MAX - 10);
        assert_eq!(index.bytes, KEPT_BYTES_MAX);
        assert_eq!(keep(&mut index, 5, KEPT_BYTES_MAX).len(), 11);
        assert_eq!((index.answers.len(), index.by_key.len()), (1, 1));
    }

    #[test]
    fn expired_answers_go_before_oldest_of_others() {
        let mut index = KeyIndex::default();
        for time in [0, 1, 2] {
            keep(&mut index, time, 1);
        }
        assert!(index.expired(KEPT_FOR_S - 1).is_empty());
        assert_eq!(index.expired(KEPT_FOR_S + 1), [1, 2]);
        assert_eq!(index.find(&answer(2, 0, 0).key, KEPT_FOR_S), Some((2, 2)));
        assert_eq!(keep(&mut index, KEPT_FOR_S + 1, 1), [1, 2]);
        assert_eq!(index.answers.len(), 2);
    }
}
