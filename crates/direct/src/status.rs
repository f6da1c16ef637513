//! What a mount knows of its direct clients: for `pagemesh mount status`.
//!
//! Invariants: nothing is counted here per operation. Those counts lie in ledgers, which the clients
//! write ([`account`](crate::account)).

use crate::account::{Ledger, Told};
use crate::guest;
use pagemesh_volume::guests::Hindrance;
use rustix::fd::RawFd;
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// Ended clients that are remembered: what an operator looks for happened lately.
const ENDED_MAX: usize = 32;

/// Of a mount, as its process tells it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Why no process may use the direct path at the moment; none: they may.
    pub closed: Option<String>,
    /// Rows that are taken: threads of clients.
    pub rows: usize,
    /// Files on the direct path at the moment, by inode.
    pub files: Vec<u64>,
    /// How often processes or files were refused, by reason, since the mount began.
    pub refused: BTreeMap<String, u64>,
    /// Direct clients, by process number.
    pub processes: Vec<Process>,
    /// Clients that the mount killed last.
    pub killed: Vec<Killed>,
}

/// A direct client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its number.
    pub pid: i32,
    /// Its name, proc(5).
    pub name: String,
    /// When it connected first, in seconds since 1970.
    pub since: u64,
    /// Operations that went directly.
    pub direct: u64,
    /// Operations on files that the library knows, by the kernel.
    pub kernel: u64,
    /// The latter by reason.
    pub reasons: BTreeMap<String, u64>,
    /// File by file.
    pub files: Vec<FileUse>,
}

/// What a direct client did with a file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileUse {
    /// Its inode; 0: all files beyond the number that is told apart.
    pub ino: u64,
    /// Operations that went directly.
    pub direct: u64,
    /// Operations by the kernel.
    pub kernel: u64,
    /// The latter by reason.
    pub reasons: BTreeMap<String, u64>,
}

/// A client that was killed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Killed {
    /// Its number.
    pub pid: i32,
    /// Its name.
    pub name: String,
    /// When, in seconds since 1970.
    pub at: u64,
    /// Why.
    pub why: String,
}

/// What was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    OtherUser,
    Unseen,
    Full,
    Rows,
    Mapped,
    Cached,
    Shape,
    Files,
}

impl Refused {
    const CODES: [&str; 8] = [
        "other-user",
        "unseen-process",
        "connections",
        "rows",
        "mapped",
        "page-cache",
        "shape",
        "files",
    ];
}

/// A process that is connected.
pub(crate) struct Client {
    pid: Pid,
    since: u64,
    ledger: OnceLock<Option<Ledger>>,
    killed: Arc<Mutex<VecDeque<Killed>>>,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Clients {
    all: Mutex<Vec<Weak<Client>>>,
    refused: [AtomicU64; Refused::CODES.len()],
    killed: Arc<Mutex<VecDeque<Killed>>>,
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    u64::try_from(now.tv_sec).unwrap_or(0)
}

fn by_code(told: &Told) -> BTreeMap<String, u64> {
    let all = told.kernel.iter();
    all.map(|(why, count)| (why.code().to_owned(), *count))
        .collect()
}

impl Client {
    /// The memory that it counts in; none: the system has none.
    pub(crate) fn ledger(&self) -> Option<&Ledger> {
        let make = || {
            let made = Ledger::create();
            made.inspect_err(
                |cause| tracing::warn!(%cause, "operations of a client are not counted"),
            )
            .ok()
        };
        self.ledger.get_or_init(make).as_ref()
    }

    /// As the kernel tells it; a program may name itself.
    pub(crate) fn name(&self) -> String {
        let path = format!("/proc/{}/comm", self.pid.as_raw_pid());
        let name = std::fs::read_to_string(path).unwrap_or_default();
        name.trim_end().to_owned()
    }

    /// It is just being killed.
    pub(crate) fn note_end(&self, why: &str) {
        let mut killed = guard(&self.killed);
        let pid = self.pid.as_raw_pid();
        // Several of its threads may be inside.
        if killed.back().is_some_and(|last| last.pid == pid) {
            return;
        }
        killed.truncate(ENDED_MAX - 1);
        killed.push_back(Killed {
            pid,
            name: self.name(),
            at: now(),
            why: why.to_owned(),
        });
    }

    fn told(&self) -> Process {
        let ledger = self.ledger.get().and_then(Option::as_ref);
        let files: Vec<FileUse> = ledger
            .map(Ledger::told)
            .unwrap_or_default()
            .iter()
            .map(|told| FileUse {
                ino: told.ino,
                direct: told.direct,
                kernel: told
                    .kernel
                    .iter()
                    .fold(0, |sum, (_, count)| count.wrapping_add(sum)),
                reasons: by_code(told),
            })
            .collect();
        let sum = |count: fn(&FileUse) -> u64| files.iter().map(count).fold(0, u64::wrapping_add);
        let mut reasons = BTreeMap::<String, u64>::new();
        for (why, count) in files.iter().flat_map(|file| &file.reasons) {
            let all = reasons.entry(why.clone()).or_default();
            *all = all.wrapping_add(*count);
        }
        Process {
            pid: self.pid.as_raw_pid(),
            name: self.name(),
            since: self.since,
            direct: sum(|file| file.direct),
            kernel: sum(|file| file.kernel),
            reasons,
            files,
        }
    }
}

impl Clients {
    /// The process of a connection. It is known as long as one of its connections is there.
    pub(crate) fn client(&self, pid: Pid) -> Arc<Client> {
        let mut all = guard(&self.all);
        all.retain(|client| client.strong_count() > 0);
        let mut known = all.iter().filter_map(Weak::upgrade);
        if let Some(client) = known.find(|client| client.pid == pid) {
            return client;
        }
        drop(known);
        let client = Arc::new(Client {
            pid,
            since: now(),
            ledger: OnceLock::new(),
            killed: Arc::clone(&self.killed),
        });
        all.push(Arc::downgrade(&client));
        client
    }

    pub(crate) fn refuse(&self, refused: Refused) {
        self.refused[refused as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn status(
        &self,
        hindrance: Option<Hindrance>,
        rows: usize,
        mut files: Vec<u64>,
    ) -> Status {
        files.sort_unstable();
        let codes = Refused::CODES.iter().zip(&self.refused);
        let refused =
            codes.map(|(code, count)| ((*code).to_owned(), count.load(Ordering::Relaxed)));
        let clients: Vec<_> = guard(&self.all).iter().filter_map(Weak::upgrade).collect();
        // Who only asks is no client.
        let clients = clients
            .iter()
            .filter(|client| client.ledger.get().is_some());
        let mut processes: Vec<Process> = clients.map(|client| client.told()).collect();
        processes.sort_unstable_by_key(|process| process.pid);
        Status {
            closed: hindrance
                .map(|hindrance| guest::withheld_by(Some(hindrance)).code().to_owned()),
            rows,
            files,
            refused: refused.filter(|(_, count)| *count > 0).collect(),
            processes,
            killed: guard(&self.killed).iter().cloned().collect(),
        }
    }
}

/// What the mount with this device number tells. The descriptor is of a file or directory of it.
///
/// # Errors
/// When no process can reach the mount's files directly, the mount is of another user, or it is of
/// another version.
pub fn of_mount(device: u64, file: RawFd) -> io::Result<Status> {
    let bytes = guest::ask_status(device, file)?;
    serde_json::from_slice(&bytes).map_err(io::Error::other)
}
