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
//! The cache is in memory. A server that has restarted or taken over knows no earlier call.
//!
//! Invariant: `done` has exactly the calls with a reply, and `bytes` is their size.

use crate::counters::count;
use crate::limits::{
    REPLIES_MAX, REPLY_CACHE_BYTES_MAX, REPLY_CHECKSUM_BYTES_MAX, REPLY_ENTRY_BYTES,
};
use crate::nfs3::Procedure;
use crate::rpc::{Call, Credential, Reply};
use pagemesh_base::poison;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;
use std::sync::atomic::AtomicU64;
use std::sync::{Condvar, Mutex};
use std::time::Instant;

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

enum CallState {
    Running,
    Done { number: u64, reply: Reply },
}

#[derive(Default)]
struct CallTable {
    calls: HashMap<CallKey, CallState>,
    /// The calls with a reply, the earliest first.
    done: BTreeMap<u64, CallKey>,
    next_number: u64,
    bytes: usize,
}

impl CallTable {
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

/// See the module.
#[derive(Default)]
pub(crate) struct ReplyCache {
    hasher: RandomState,
    table: Mutex<CallTable>,
    call_ended: Condvar,
}

/// The decision about a call.
pub(crate) enum Admission<'a> {
    /// Run it, and finish the execution with its reply.
    Run(Execution<'a>),
    /// Send this reply.
    Repeat(Reply),
    /// The first one still runs. The client must ask again.
    Running,
}

/// A call that runs. Its drop ends it, also without a reply.
pub(crate) struct Execution<'a> {
    /// None: a repetition of the call is harmless.
    known: Option<(&'a ReplyCache, CallKey)>,
    keeps_reply: bool,
}

impl Execution<'_> {
    /// Ends the call with its reply.
    pub(crate) fn finish(mut self, reply: &Reply) {
        if !self.keeps_reply {
            return;
        }
        if let Some((cache, key)) = self.known.take() {
            poison::lock(&cache.table).insert(key, reply.clone());
            cache.call_ended.notify_all();
        }
    }
}

impl Drop for Execution<'_> {
    fn drop(&mut self) {
        if let Some((cache, key)) = self.known.take() {
            poison::lock(&cache.table).calls.remove(&key);
            cache.call_ended.notify_all();
        }
    }
}

impl ReplyCache {
    /// Admits a call with these arguments. If the same call runs, waits for its end, until `until` at
    /// the latest. Adds a call that is known to `repeated`, before it waits.
    pub(crate) fn admit(
        &self,
        client: IpAddr,
        call: &Call<'_>,
        arguments: &[u8],
        (repeated, until): (&AtomicU64, Instant),
    ) -> Admission<'_> {
        let procedure = Procedure::from_number(call.procedure);
        let repetition = procedure.map_or(Repetition::Harmless, repetition);
        let keeps_reply = repetition == Repetition::Answered;
        if repetition == Repetition::Harmless {
            return Admission::Run(Execution {
                known: None,
                keeps_reply,
            });
        }
        let key = CallKey {
            client: client.to_canonical(),
            xid: call.xid,
            procedure: call.procedure,
            checksum: self.checksum(&call.credential, arguments),
        };
        let mut table = poison::lock(&self.table);
        if table.calls.contains_key(&key) {
            count(repeated);
        }
        loop {
            match table.calls.get(&key) {
                None => {
                    table.calls.insert(key, CallState::Running);
                    let known = Some((self, key));
                    return Admission::Run(Execution { known, keeps_reply });
                }
                Some(CallState::Running) => {}
                Some(CallState::Done { .. }) => {
                    return table
                        .repeat(&key)
                        .map_or(Admission::Running, Admission::Repeat);
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Admission::Running;
            }
            table = poison::recover(self.call_ended.wait_timeout(table, left)).0;
        }
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
    use std::sync::atomic::Ordering;
    use std::time::Duration;

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
    fn run(cache: &ReplyCache, call: &Call<'_>, arguments: &[u8]) -> Option<Reply> {
        let repeated = AtomicU64::new(0);
        let admitted = cache.admit(CLIENT, call, arguments, (&repeated, Instant::now()));
        match admitted {
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
            let repeated = AtomicU64::new(0);
            let admit = || cache.admit(CLIENT, &call, b"a", (&repeated, Instant::now()));
            let first = admit();
            assert!(matches!(admit(), Admission::Running));
            assert_eq!(repeated.load(Ordering::Relaxed), 1);
            // The end without a reply admits the next one.
            drop(first);
            assert!(matches!(admit(), Admission::Run(_)));
        }
    }

    #[test]
    fn waiting_call_gets_the_reply() {
        let cache = ReplyCache::default();
        let call = call(1, Procedure::Create);
        let repeated = AtomicU64::new(0);
        let until = Instant::now() + Duration::from_secs(60);
        let admit = || cache.admit(CLIENT, &call, b"a", (&repeated, until));
        let Admission::Run(first) = admit() else {
            panic!("no other call runs");
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(admit);
            while repeated.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            first.finish(&reply(1));
            let second = second.join().expect("no panic");
            assert!(matches!(second, Admission::Repeat(found) if found == reply(1)));
        });
    }

    #[test]
    fn replies_are_bounded_and_the_oldest_ones_are_dropped() {
        let cache = ReplyCache::default();
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
            CallState::Running => panic!("no call runs"),
        });
        assert_eq!(table.bytes, replies.sum::<usize>());
        assert!(table.bytes <= REPLY_CACHE_BYTES_MAX);
        drop(table);
        assert_eq!(run(&cache, &call(1, Procedure::Create), b"a"), None);
        let last = call(count - 1, Procedure::Create);
        assert_eq!(run(&cache, &last, b"a"), Some(reply(count - 1)));
    }
}
