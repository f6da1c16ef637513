//! Calls with an `Idempotency-Key`: a repetition gets the first answer again instead of a second change.
//!
//! Invariants: the answer is stored in the transaction of its change, so a restarted manager knows both
//! or neither. Only calls that changed something are kept: a refused call may be repeated. Memory
//! holds an index without the bodies of answers. At most [`KEYS_MAX`] answers and [`KEPT_BYTES_MAX`]
//! bytes of bodies are kept; the oldest go first. They expire by token time
//! ([`crate::access`]), which never goes back while the manager runs, and continues from a stored mark after a
//! restart.

pub use crate::call_key::{
    BadKey, IdempotencyKey, KEY_BYTES_MAX, KEY_HEADER, KeptAnswer, ScopedKey,
};
pub use crate::key_index::{KEPT_BYTES_MAX, KEPT_FOR_S, KEYS_MAX};

use crate::call::hash;
use crate::fault::Fault;
use crate::key_index::KeyConflict;
use crate::manager::{Manager, ManagerState};
use crate::store::StoreWrite;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The answer to a call that created something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateAnswer<T> {
    /// The body.
    pub reply: T,
    /// The entity tag of the changed thing.
    pub etag: String,
}

/// A call with a key that runs. While it exists, repetitions are refused.
pub(crate) struct RunningCall<'a> {
    manager: &'a Manager,
    key: ScopedKey,
    call: u64,
}

impl Drop for RunningCall<'_> {
    fn drop(&mut self) {
        self.manager.state().keys.end_call(&self.key);
    }
}

/// The beginning of a call that may have a key.
pub(crate) enum CallStart<'a, T> {
    /// The call has no key, or is the first with its key.
    Run(Option<RunningCall<'a>>),
    /// It is a repetition.
    Repeated(CreateAnswer<T>),
}

/// The part of a change that keeps an answer.
#[derive(Default)]
pub(crate) struct KeyChange {
    removed: Vec<u64>,
    put: Option<KeptAnswer>,
    mark_unix_s: u64,
}

impl KeyChange {
    pub(crate) fn writes(&self) -> Vec<StoreWrite<'_>> {
        let removed = self.removed.iter();
        let mut writes: Vec<_> = removed.map(|&seq| StoreWrite::RemoveAnswer(seq)).collect();
        writes.extend(self.put.iter().map(StoreWrite::PutAnswer));
        if !writes.is_empty() {
            writes.push(StoreWrite::SetTokenMark(self.mark_unix_s));
        }
        writes
    }
}

impl Manager {
    /// Begins a call that creates something. `call` is all of the request that decides what it does.
    pub(crate) fn begin_call<T: DeserializeOwned>(
        &self,
        call: &impl Serialize,
    ) -> Result<CallStart<'_, T>, Fault> {
        let Some(key) = &self.call.key else {
            return Ok(CallStart::Run(None));
        };
        let call = hash(call);
        let mut state = self.state();
        let now = self.token_time_now();
        let Some((seq, first)) = state.keys.find(key, now) else {
            let begun = state.keys.begin_call(key, call);
            begun.map_err(|conflict| match conflict {
                KeyConflict::Running => Fault::KeyRunning(key.text.clone()),
                KeyConflict::Reused => Fault::KeyReused(key.text.clone()),
            })?;
            return Ok(CallStart::Run(Some(RunningCall {
                manager: self,
                key: key.clone(),
                call,
            })));
        };
        if first != call {
            return Err(Fault::KeyReused(key.text.clone()));
        }
        let kept = self.store.read_answer(seq)?;
        let reply = serde_json::from_str(&kept.body).map_err(|error| {
            Fault::Store(
                self.store
                    .damage_error(&format!("the answer {seq} cannot be read: {error}")),
            )
        })?;
        Ok(CallStart::Repeated(CreateAnswer {
            reply,
            etag: kept.etag,
        }))
    }

    /// Plans to keep the answer of a running call.
    pub(crate) fn plan_answer(
        &self,
        state: &ManagerState,
        running: Option<&RunningCall<'_>>,
        etag: &str,
        reply: &impl Serialize,
    ) -> KeyChange {
        let Some(running) = running else {
            return KeyChange::default();
        };
        let now = self.token_time_now();
        // Replies always have JSON.
        let body = serde_json::to_string(reply).unwrap_or_default();
        KeyChange {
            removed: state.keys.displaced_by(body.len(), now),
            put: Some(KeptAnswer {
                seq: state.keys.next_seq(),
                key: running.key.clone(),
                call: running.call,
                time_unix_s: now,
                etag: etag.to_owned(),
                body,
            }),
            mark_unix_s: now,
        }
    }

    /// Applies a change of kept answers after its commit.
    pub(crate) fn apply_key_change(&self, state: &mut ManagerState, change: &KeyChange) {
        if change.removed.is_empty() && change.put.is_none() {
            return;
        }
        for seq in &change.removed {
            state.keys.remove(*seq);
        }
        if let Some(answer) = &change.put {
            state.keys.put(answer);
        }
        self.access.book().set_mark(change.mark_unix_s);
    }

    /// Forgets the expired answers, and renews the mark of token time while any is kept.
    pub(crate) fn forget_expired_answers(&self) {
        let mut state = self.state();
        if state.keys.is_empty() || self.store.has_failed() {
            return;
        }
        let now = self.token_time_now();
        let change = KeyChange {
            removed: state.keys.expired(now),
            put: None,
            mark_unix_s: now,
        };
        let mut writes = change.writes();
        if writes.is_empty() && self.access.book().is_mark_old(now) {
            writes.push(StoreWrite::SetTokenMark(now));
        }
        match self.commit(&mut state, &writes, vec![]) {
            Ok(()) if !writes.is_empty() => {
                self.apply_key_change(&mut state, &change);
                self.access.book().set_mark(now);
            }
            Ok(()) => {}
            Err(error) => tracing::error!(%error, "cannot forget expired answers"),
        }
    }
}
