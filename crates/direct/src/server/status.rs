//! The connected processes, and from them the status of a mount's direct clients.
//!
//! Invariants: the mount counts nothing per operation. The clients write those counts into their
//! counters ([`op_counters`](crate::shared::op_counters)).

use crate::protocol::status::{ClientStatus, DirectStatus, FileUsage, KilledClient};
use crate::shared::op_counters::{FileCounts, OpCounters, Why};
use pagemesh_base::poison::lock;
use pagemesh_telemetry::{MeterSet, OpenMeter};
use pagemesh_volume::direct_access::DirectDisabledReason;
use rustix::process::Pid;
use rustix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

/// Killed clients that the mount remembers: operators look for recent ones.
const KILLED_MAX: usize = 32;

/// Why the mount refused a process or file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalReason {
    OtherUser,
    UnseenProcess,
    TooManyConnections,
    NoFreeRow,
    FileMapped,
    FileCached,
    FileUnsupported,
    TooManyFiles,
}

impl RefusalReason {
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

/// A connected process.
pub(crate) struct ClientRecord {
    pid: Pid,
    connected_at: u64,
    counters: OnceLock<Option<OpenMeter<OpCounters>>>,
    meters: Arc<MeterSet>,
    killed: Arc<Mutex<VecDeque<KilledClient>>>,
}

/// All connected processes.
pub(crate) struct ClientRegistry {
    /// The meters of the volume.
    meters: Arc<MeterSet>,
    all: Mutex<Vec<Weak<ClientRecord>>>,
    refused: [AtomicU64; RefusalReason::CODES.len()],
    killed: Arc<Mutex<VecDeque<KilledClient>>>,
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Realtime);
    u64::try_from(now.tv_sec).unwrap_or(0)
}

fn counts_by_code(file_counts: &FileCounts) -> BTreeMap<String, u64> {
    let all = file_counts.kernel.iter();
    all.map(|(why, count)| (why.code().to_owned(), *count))
        .collect()
}

impl ClientRecord {
    /// The memory of its counters; none: the system has no memory.
    pub(crate) fn counters(&self) -> Option<&OpCounters> {
        let make = || {
            let made = OpCounters::create();
            made.inspect_err(
                |cause| tracing::warn!(%cause, "no memory for counters; operations of a direct client are not counted"),
            )
            .ok()
            .map(|counters| self.meters.open_with(counters))
        };
        self.counters.get_or_init(make).as_deref()
    }

    /// The name that the kernel reports; a program may set it.
    pub(crate) fn name(&self) -> String {
        let path = format!("/proc/{}/comm", self.pid.as_raw_pid());
        let name = std::fs::read_to_string(path).unwrap_or_default();
        name.trim_end().to_owned()
    }

    /// Records that the client is being killed.
    pub(crate) fn record_kill(&self, reason: &str) {
        let mut killed = lock(&self.killed);
        let pid = self.pid.as_raw_pid();
        // Several of its threads may be in operations.
        if killed.back().is_some_and(|last| last.pid == pid) {
            return;
        }
        while killed.len() >= KILLED_MAX {
            killed.pop_front();
        }
        killed.push_back(KilledClient {
            pid,
            name: self.name(),
            at: now(),
            reason: reason.to_owned(),
        });
    }

    fn status(&self) -> ClientStatus {
        let counters = self.counters.get().and_then(Option::as_deref);
        let files: Vec<FileUsage> = counters
            .map(OpCounters::file_counts)
            .unwrap_or_default()
            .iter()
            .map(|file_counts| FileUsage {
                ino: file_counts.ino,
                direct: file_counts.direct,
                kernel: file_counts
                    .kernel
                    .iter()
                    .fold(0, |sum, (_, count)| count.wrapping_add(sum)),
                reasons: counts_by_code(file_counts),
            })
            .collect();
        let sum = |count: fn(&FileUsage) -> u64| files.iter().map(count).fold(0, u64::wrapping_add);
        let mut reasons = BTreeMap::<String, u64>::new();
        for (why, count) in files.iter().flat_map(|file| &file.reasons) {
            let all = reasons.entry(why.clone()).or_default();
            *all = all.wrapping_add(*count);
        }
        ClientStatus {
            pid: self.pid.as_raw_pid(),
            name: self.name(),
            connected_at: self.connected_at,
            direct: sum(|file| file.direct),
            kernel: sum(|file| file.kernel),
            reasons,
            files,
        }
    }
}

impl ClientRegistry {
    /// No process, for a volume with these meters.
    pub(crate) fn new(meters: Arc<MeterSet>) -> ClientRegistry {
        ClientRegistry {
            meters,
            all: Mutex::default(),
            refused: Default::default(),
            killed: Arc::default(),
        }
    }

    /// The record of a process. It exists as long as one of its connections does.
    pub(crate) fn find_or_add(&self, pid: Pid) -> Arc<ClientRecord> {
        let mut all = lock(&self.all);
        all.retain(|client| client.strong_count() > 0);
        let mut known = all.iter().filter_map(Weak::upgrade);
        if let Some(client) = known.find(|client| client.pid == pid) {
            return client;
        }
        drop(known);
        let client = Arc::new(ClientRecord {
            pid,
            connected_at: now(),
            counters: OnceLock::new(),
            meters: Arc::clone(&self.meters),
            killed: Arc::clone(&self.killed),
        });
        all.push(Arc::downgrade(&client));
        client
    }

    /// The number of direct clients. A process without counters only asks, and is none.
    pub(crate) fn client_count(&self) -> usize {
        let all = lock(&self.all);
        let clients = all.iter().filter_map(Weak::upgrade);
        clients
            .filter(|client| client.counters.get().is_some())
            .count()
    }

    pub(crate) fn count_refusal(&self, refusals: RefusalReason) {
        self.refused[refusals as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn status(
        &self,
        hindrance: Option<DirectDisabledReason>,
        rows_taken: usize,
        mut files: Vec<u64>,
    ) -> DirectStatus {
        files.sort_unstable();
        let codes = RefusalReason::CODES.iter().zip(&self.refused);
        let refusals =
            codes.map(|(code, count)| ((*code).to_owned(), count.load(Ordering::Relaxed)));
        let clients: Vec<_> = lock(&self.all).iter().filter_map(Weak::upgrade).collect();
        // A process without counters only asks, and is no direct client.
        let clients = clients
            .iter()
            .filter(|client| client.counters.get().is_some());
        let mut processes: Vec<ClientStatus> = clients.map(|client| client.status()).collect();
        processes.sort_unstable_by_key(|process| process.pid);
        DirectStatus {
            closed: hindrance.map(|hindrance| Why::of_disabled(Some(hindrance)).code().to_owned()),
            rows_taken,
            files,
            refused: refusals.filter(|(_, count)| *count > 0).collect(),
            processes,
            killed: lock(&self.killed).iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_killed_client_is_forgotten_first() {
        let registry = ClientRegistry::new(Arc::default());
        let last = KILLED_MAX as i32 + 5;
        for number in 1..=last {
            let pid = Pid::from_raw(number).expect("a number");
            registry.find_or_add(pid).record_kill("stopped");
        }
        let killed = registry.status(None, 0, vec![]).killed;
        let pids: Vec<i32> = killed.iter().map(|client| client.pid).collect();
        assert_eq!(pids, Vec::from_iter(6..=last));
    }
}
