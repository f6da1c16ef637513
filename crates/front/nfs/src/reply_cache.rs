//! Replies to calls that must not run twice (the duplicate-request cache). A client sends a call
//! again, perhaps over another connection, if it has seen no reply. A second REMOVE would fail with
//! NFS3ERR_NOENT although the first one succeeded.
//!
//! A call is known by its client's address without the port, its xid and procedure, and a checksum
//! of its caller and arguments: a client that has restarted may use an xid again.
//!
//! A WRITE is known while it runs, and forgotten at its end: it may run again, but not beside
//! itself. Else the first one could overwrite data that the client writes after the second one.
//!
//! A repetition of a running call waits in the entry of that call, without a thread. It is released at
//! the end of the call, and then admitted again: it gets the reply, or runs.
//!
//! The cache is in memory. A server that has restarted or taken over knows no earlier call.
//!
//! Invariant: `done` has exactly the calls with a reply, and `bytes` is their size.

use crate::limits::{
    REPETITIONS_MAX, REPLIES_MAX, REPLY_CACHE_BYTES_MAX, REPLY_CHECKSUM_BYTES_MAX,
    REPLY_ENTRY_BYTES,
};
use crate::nfs3::Procedure;
use crate::rpc::{Call, Credential, Reply};
use pagemesh_base::poison;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// The treatment of a repeated call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Repetition {
    /// It runs again, at any time.
    Harmless,
    /// It runs again, after the first one.
    Later,
    /// It gets the reply of the first one.
    Answered,
}

fn repetition(procedure: Procedure) -> Repetition {
    match procedure {
        Procedure::Null
        | Procedure::GetAttributes
        | Procedure::Lookup
        | Procedure::Access
        | Procedure::ReadSymlink
        | Procedure::Read
        | Procedure::List
        | Procedure::ListPlus
        | Procedure::SpaceUsage
        | Procedure::ServerLimits
        | Procedure::NameRules
        | Procedure::Commit => Repetition::Harmless,
        Procedure::Write => Repetition::Later,
        Procedure::SetAttributes
        | Procedure::Create
        | Procedure::MakeDirectory
        | Procedure::MakeSymlink
        | Procedure::MakeNode
        | Procedure::Remove
        | Procedure::RemoveDirectory
        | Procedure::Rename
        | Procedure::Link => Repetition::Answered,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct CallKey {
    client: IpAddr,
    xid: u32,
    procedure: u32,
    checksum: u64,
}

enum CallState<W> {
    /// With the repetitions that wait for the end.
    Running(Vec<W>),
    Done {
        number: u64,
        reply: Reply,
    },
}

struct CallTable<W> {
    calls: HashMap<CallKey, CallState<W>>,
    /// Repetitions of calls that have ended.
    released: Vec<W>,
    /// The calls with a reply, the earliest first.
    done: BTreeMap<u64, CallKey>,
    next_number: u64,
    bytes: usize,
}

impl<W> Default for CallTable<W> {
    fn default() -> Self {
        Self {
            calls: HashMap::new(),
            released: Vec::new(),
            done: BTreeMap::new(),
            next_number: 0,
            bytes: 0,
        }
    }
}

impl<W> CallTable<W> {
    /// Ends a running call. Returns whether repetitions are released.
    fn end(&mut self, key: &CallKey) -> bool {
        match self.calls.remove(key) {
            Some(CallState::Running(waiting)) => {
                self.released.extend(waiting);
                !self.released.is_empty()
            }
            Some(CallState::Done { .. }) | None => false,
        }
    }

    fn insert(&mut self, key: CallKey, reply: Reply) {
        let number = self.next_number;
        self.next_number += 1;
        self.bytes += entry_bytes(&reply);
        self.done.insert(number, key);
        self.calls.insert(key, CallState::Done { number, reply });
        while self.done.len() > REPLIES_MAX || self.bytes > REPLY_CACHE_BYTES_MAX {
            let Some((_, oldest)) = self.done.pop_first() else {
                break;
            };
            if let Some(CallState::Done { reply, .. }) = self.calls.remove(&oldest) {
                self.bytes -= entry_bytes(&reply);
            }
        }
    }

    /// The reply of an earlier call. It becomes the latest one: its client may ask again.
    fn repeat(&mut self, key: &CallKey) -> Option<Reply> {
        let next = self.next_number;
        let Some(CallState::Done { number, reply }) = self.calls.get_mut(key) else {
            return None;
        };
        self.done.remove(number);
        *number = next;
        self.done.insert(next, *key);
        self.next_number += 1;
        Some(reply.clone())
    }
}

fn entry_bytes(reply: &Reply) -> usize {
    let parts = reply.parts().iter().map(|part| part.len()).sum::<usize>();
    parts + REPLY_ENTRY_BYTES
}

/// See the module. `W` is a repetition that waits.
pub(crate) struct ReplyCache<W> {
    hasher: RandomState,
    table: Mutex<CallTable<W>>,
    has_released: AtomicBool,
}

impl<W> Default for ReplyCache<W> {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            table: Mutex::default(),
            has_released: AtomicBool::new(false),
        }
    }
}

/// The decision about a call.
pub(crate) enum Admission<'a, W> {
    /// Run it, and finish the execution with its reply.
    Run(Execution<'a, W>),
    /// Send this reply.
    Repeat(Reply),
    /// The first one still runs. The cache has the repetition now, or too many wait already: then
    /// the client must ask again.
    Running,
}

/// A call that runs. Its drop ends it, also without a reply.
pub(crate) struct Execution<'a, W> {
    /// None: a repetition of the call is harmless.
    known: Option<(&'a ReplyCache<W>, CallKey)>,
    keeps_reply: bool,
}

impl<W> Execution<'_, W> {
    /// Ends the call with its reply.
    pub(crate) fn finish(mut self, reply: &Reply) {
        if !self.keeps_reply {
            return;
        }
        if let Some((cache, key)) = self.known.take() {
            cache.end(&key, Some(reply.clone()));
        }
    }
}

impl<W> Drop for Execution<'_, W> {
    fn drop(&mut self) {
        if let Some((cache, key)) = self.known.take() {
            cache.end(&key, None);
        }
    }
}

impl<W> ReplyCache<W> {
    /// Admits a call with these arguments. If the same call runs, takes `waiting`, unless too many
    /// wait. The flag says whether the call is a repetition.
    pub(crate) fn admit(
        &self,
        client: IpAddr,
        call: &Call<'_>,
        arguments: &[u8],
        waiting: &mut Option<W>,
    ) -> (Admission<'_, W>, bool) {
        let procedure = Procedure::from_number(call.procedure);
        let repetition = procedure.map_or(Repetition::Harmless, repetition);
        let keeps_reply = repetition == Repetition::Answered;
        let run = |known| Admission::Run(Execution { known, keeps_reply });
        if repetition == Repetition::Harmless {
            return (run(None), false);
        }
        let key = CallKey {
            client: client.to_canonical(),
            xid: call.xid,
            procedure: call.procedure,
            checksum: self.checksum(&call.credential, arguments),
        };
        let mut table = poison::lock(&self.table);
        if let Some(reply) = table.repeat(&key) {
            return (Admission::Repeat(reply), true);
        }
        if let Some(CallState::Running(others)) = table.calls.get_mut(&key) {
            if others.len() < REPETITIONS_MAX {
                others.extend(waiting.take());
            }
            return (Admission::Running, true);
        }
        table.calls.insert(key, CallState::Running(Vec::new()));
        (run(Some((self, key))), false)
    }

    fn end(&self, key: &CallKey, reply: Option<Reply>) {
        let mut table = poison::lock(&self.table);
        if table.end(key) {
            self.has_released.store(true, Ordering::Release);
        }
        if let Some(reply) = reply {
            table.insert(*key, reply);
        }
    }

    /// The repetitions of calls that have ended since the last time. Admit them again.
    pub(crate) fn take_released(&self) -> Vec<W> {
        if !self.has_released.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut table = poison::lock(&self.table);
        self.has_released.store(false, Ordering::Release);
        std::mem::take(&mut table.released)
    }

    /// Drops all repetitions that wait: the server stops.
    pub(crate) fn drop_waiting(&self) {
        let mut dropped = self.take_released();
        let mut table = poison::lock(&self.table);
        for state in table.calls.values_mut() {
            if let CallState::Running(waiting) = state {
                dropped.append(waiting);
            }
        }
        drop(table);
        drop(dropped);
    }

    /// The data of a WRITE and the target of a SYMLINK may be left out: they follow a handle and an
    /// offset or name.
    fn checksum(&self, credential: &Credential<'_>, arguments: &[u8]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        if let Credential::System(system) = credential {
            hasher.write_u32(system.uid);
            hasher.write_u32(system.gid);
        }
        hasher.write_usize(arguments.len());
        let covered = arguments.len().min(REPLY_CHECKSUM_BYTES_MAX);
        hasher.write(arguments.get(..covered).unwrap_or_default());
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::Refusal;
    use std::net::Ipv4Addr;

    const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

    fn call(xid: u32, procedure: Procedure) -> Call<'static> {
        Call {
            xid,
            program: 100_003,
            version: 3,
            procedure: procedure.number(),
            credential: Credential::None,
        }
    }

    fn reply(xid: u32) -> Reply {
        Reply::refused(xid, Refusal::SystemError)
    }

    /// The reply of an earlier call; none if the call runs now, with a reply of its own.
    fn run(cache: &ReplyCache<u32>, call: &Call<'_>, arguments: &[u8]) -> Option<Reply> {
        match cache.admit(CLIENT, call, arguments, &mut Some(0)).0 {
            Admission::Run(execution) => {
                execution.finish(&reply(call.xid));
                None
            }
            Admission::Repeat(reply) => Some(reply),
            Admission::Running => panic!("no call runs"),
        }
    }

    #[test]
    fn only_the_same_call_is_repeated() {
        let cache = ReplyCache::default();
        let remove = call(1, Procedure::Remove);
        assert_eq!(run(&cache, &remove, b"a"), None);
        assert_eq!(run(&cache, &remove, b"a"), Some(reply(1)));
        assert_eq!(run(&cache, &remove, b"b"), None);
        assert_eq!(run(&cache, &call(2, Procedure::Remove), b"a"), None);
        let directory = call(1, Procedure::RemoveDirectory);
        assert_eq!(run(&cache, &directory, b"a"), None);
        for harmless in [Procedure::Write, Procedure::GetAttributes] {
            assert_eq!(run(&cache, &call(3, harmless), b"a"), None);
            assert_eq!(run(&cache, &call(3, harmless), b"a"), None);
        }
    }

    #[test]
    fn call_does_not_run_beside_itself() {
        let cache = ReplyCache::default();
        for procedure in [Procedure::Create, Procedure::Write] {
            let call = call(1, procedure);
            let admit = |number| cache.admit(CLIENT, &call, b"a", &mut Some(number));
            let (first, is_repeated) = admit(1);
            assert!(!is_repeated);
            assert!(matches!(admit(2), (Admission::Running, true)));
            assert_eq!(cache.take_released(), []);
            // The end without a reply admits the next one.
            drop(first);
            assert_eq!(cache.take_released(), [2]);
            assert_eq!(cache.take_released(), []);
            assert!(matches!(admit(2), (Admission::Run(_), false)));
        }
    }

    #[test]
    fn waiting_call_gets_the_reply_at_the_end() {
        let cache = ReplyCache::default();
        let call = call(1, Procedure::Create);
        let admit = |number| {
            let mut waiting = Some(number);
            let (admission, _) = cache.admit(CLIENT, &call, b"a", &mut waiting);
            (admission, waiting)
        };
        let (Admission::Run(first), Some(0)) = admit(0) else {
            panic!("no other call runs");
        };
        for number in 1..=REPETITIONS_MAX {
            assert!(matches!(admit(number), (Admission::Running, None)));
        }
        let (_, beyond) = admit(99);
        assert_eq!(beyond, Some(99), "the number of waiting calls is bounded");
        first.finish(&reply(1));
        let released: Vec<usize> = (1..=REPETITIONS_MAX).collect();
        assert_eq!(cache.take_released(), released);
        let (again, _) = admit(1);
        assert!(matches!(again, Admission::Repeat(found) if found == reply(1)));
    }

    #[test]
    fn replies_are_bounded_and_the_oldest_ones_are_dropped() {
        let cache = ReplyCache::<u32>::default();
        let count = 2 * REPLIES_MAX as u32;
        for xid in 0..count {
            assert_eq!(run(&cache, &call(xid, Procedure::Create), b"a"), None);
            let kept = run(&cache, &call(0, Procedure::Create), b"a");
            assert_eq!(kept, Some(reply(0)), "a reply in use was dropped");
        }
        let table = poison::lock(&cache.table);
        assert!(table.calls.len() <= REPLIES_MAX);
        assert_eq!(table.calls.len(), table.done.len());
        let replies = table.calls.values().map(|state| match state {
            CallState::Done { reply, .. } => entry_bytes(reply),
            CallState::Running(_) => panic!("no call runs"),
        });
        assert_eq!(table.bytes, replies.sum::<usize>());
        assert!(table.bytes <= REPLY_CACHE_BYTES_MAX);
        drop(table);
        assert_eq!(run(&cache, &call(1, Procedure::Create), b"a"), None);
        let last = call(count - 1, Procedure::Create);
        assert_eq!(run(&cache, &last, b"a"), Some(reply(count - 1)));
    }
}
