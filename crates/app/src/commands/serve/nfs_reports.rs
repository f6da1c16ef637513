//! Reports the state of an NFS server to the manager: clients, paths, operations and workers of each file system.
//!
//! Invariant: a report has the calls since the last report that the manager took. A manager without an answer costs nothing but that step.

use super::nfs_clients::{self, shortened};
use super::nfs_expiries::Expiries;
use anyhow::Context;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::{
    NFS_LIST_MAX, NfsClient, NfsExportState, NfsGrace, NfsOperation, NfsPath, NfsWorkers, ReportNfs,
};
use pagemesh_nfs::{
    CallFigures, ClientFigures, ExportFigures, ExportedPath, LATENCY_BUCKETS, Nfs4Status,
    PROCEDURE_NAMES, PROCEDURES, Server, latency_bound,
};
use pagemesh_volume::Volume;
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time between two reports.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The figures of the procedures at a time.
type ProcedureSums = [CallFigures; PROCEDURES];

/// A thread that reports until this is dropped. Then it reports the end.
pub struct NfsReporter {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The reports of one server.
struct ServerReports {
    manager: ManagerClient,
    volumes: Vec<(VolumeName, Weak<Volume>)>,
    server: Arc<Server>,
    /// The sums of each file system in its last report, and the time of it.
    reported: HashMap<String, (ProcedureSums, Instant)>,
    started: Instant,
    expiries: Expiries,
}

impl NfsReporter {
    /// Reports the file systems of a server.
    pub fn start(
        manager: ManagerClient,
        volumes: Vec<(VolumeName, Weak<Volume>)>,
        server: &Arc<Server>,
    ) -> anyhow::Result<NfsReporter> {
        let mut reports = ServerReports {
            manager,
            volumes,
            server: Arc::clone(server),
            reported: HashMap::new(),
            started: Instant::now(),
            expiries: Expiries::default(),
        };
        let (stop, stopped) = mpsc::channel();
        let run = move || {
            loop {
                reports.send();
                if reports.wait(&stopped).is_break() {
                    return reports.send_end();
                }
            }
        };
        let thread = std::thread::Builder::new().name("nfs-reports".into());
        let thread = thread
            .spawn(run)
            .context("cannot start the thread that reports the NFS server")?;
        Ok(NfsReporter {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for NfsReporter {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that reports the NFS server panicked");
        }
    }
}

impl ServerReports {
    /// Waits for the time of the next report. The end of an expiry is reported at once. Break: the server ends.
    fn wait(&mut self, stopped: &Receiver<()>) -> ControlFlow<()> {
        let until = Instant::now() + REPORT_INTERVAL;
        loop {
            let now = Instant::now();
            let left = until.saturating_duration_since(now);
            if self.expiries.look(&*self.server, now) || left.is_zero() {
                return ControlFlow::Continue(());
            }
            let pause = self.expiries.pause().map_or(left, |it| it.min(left));
            if stopped.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                return ControlFlow::Break(());
            }
        }
    }

    fn send(&mut self) {
        let (clients, paths) = (self.server.clients(), self.server.paths());
        let nfs4_clients = self.server.nfs4_clients();
        let nfs4 = self.server.nfs4_status();
        for figures in self.server.figures().exports {
            let Some(name) = figures.export.clone() else {
                continue;
            };
            let now = Instant::now();
            let (before, since) = self
                .reported
                .get(&name)
                .copied()
                .unwrap_or_else(|| ([CallFigures::default(); PROCEDURES], self.started));
            let addresses = self.server.local_addrs().iter();
            let mut state = export_state(&figures, &before, now.duration_since(since));
            state.addresses = addresses
                .map(ToString::to_string)
                .take(NFS_LIST_MAX)
                .collect();
            state.paths = shown_paths(&paths, &name);
            state.clients_total = clients.len() as u64;
            state.clients = clients
                .iter()
                .take(NFS_LIST_MAX)
                .map(shown_client)
                .collect();
            add_nfs4(&mut state, &nfs4, &name);
            nfs_clients::add(&mut state, &nfs4_clients, &name);
            if self.report(&name, Some(state)) {
                self.reported.insert(name, (figures.procedures, now));
            }
        }
    }

    fn send_end(&mut self) {
        let names: Vec<_> = self.volumes.iter().map(|(name, _)| name.clone()).collect();
        for name in names {
            self.report(name.as_str(), None);
        }
    }

    /// Sends a report, and takes the orders of the manager. Whether the manager took the report.
    fn report(&mut self, name: &str, export: Option<NfsExportState>) -> bool {
        let named = self
            .volumes
            .iter()
            .find(|(volume, _)| volume.as_str() == name);
        let attached = named.and_then(|(name, volume)| Some((name, volume.upgrade()?)));
        let Some((name, volume)) = attached else {
            return false;
        };
        let report = ReportNfs {
            attachment: EpochNumber(volume.attachment().0),
            export,
            expiries: self.expiries.answers(name),
        };
        match self.manager.report_nfs(name, &report) {
            Ok(orders) => {
                self.expiries.answers_taken(name, report.expiries.len());
                self.expiries.begin(&*self.server, name, &orders.expire);
                true
            }
            Err(cause) => {
                tracing::debug!(%cause, "the state of an NFS export was not reported");
                false
            }
        }
    }
}

/// The workers, and the calls of the time since an earlier report.
fn export_state(figures: &ExportFigures, before: &ProcedureSums, step: Duration) -> NfsExportState {
    let sums = figures.procedures.iter().zip(before);
    let steps: Vec<CallFigures> = sums.map(|(now, before)| since(now, before)).collect();
    let calls: u64 = steps.iter().map(|it| it.calls).sum();
    let queued: Duration = steps.iter().map(|it| it.queue_time).sum();
    let named = PROCEDURE_NAMES.iter().zip(&steps);
    let operations = named
        .filter(|(_, it)| it.calls > 0)
        .map(|(name, it)| NfsOperation {
            name: name.to_uppercase(),
            calls: it.calls,
            errors: it.errors,
            mean_ns: nanos(it.time) / it.calls,
            p50_ns: quantile_ns(it, 0.5),
            p99_ns: quantile_ns(it, 0.99),
        });
    let change = figures.last_change.map_or("", |reason| reason.name());
    NfsExportState {
        operations: operations.collect(),
        step_ms: u64::try_from(step.as_millis()).unwrap_or(u64::MAX),
        workers: NfsWorkers {
            threads: figures.workers as u64,
            threads_max: figures.workers_max as u64,
            blocked: figures.blocked as u64,
            queued: figures.queued as u64,
            mean_wait_ns: nanos(queued).checked_div(calls).unwrap_or(0),
            stalled: figures.is_stalled,
            last_change: change.to_owned(),
        },
        ..NfsExportState::default()
    }
}

/// Adds the grace period, and the stable list of the file system.
fn add_nfs4(state: &mut NfsExportState, nfs4: &Nfs4Status, name: &str) {
    state.grace = nfs4.grace.map(|grace| NfsGrace {
        left_s: grace.left.as_secs(),
        clients: grace.clients as u64,
    });
    if let Some(list) = nfs4.lists.iter().find(|list| list.file_system == name) {
        state.listed_clients = list.clients as u64;
        state.unwritten_records = list.unwritten;
    }
}

/// The calls after an earlier state of the same sums.
fn since(now: &CallFigures, before: &CallFigures) -> CallFigures {
    CallFigures {
        calls: now.calls.saturating_sub(before.calls),
        errors: now.errors.saturating_sub(before.errors),
        bytes_received: now.bytes_received.saturating_sub(before.bytes_received),
        bytes_sent: now.bytes_sent.saturating_sub(before.bytes_sent),
        time: now.time.saturating_sub(before.time),
        queue_time: now.queue_time.saturating_sub(before.queue_time),
        latency: std::array::from_fn(|at| now.latency[at].saturating_sub(before.latency[at])),
    }
}

/// The upper bound of the bucket with a quantile of the calls, in nanoseconds. The last bucket has the bound of the one before.
fn quantile_ns(calls: &CallFigures, quantile: f64) -> u64 {
    let total: u64 = calls.latency.iter().sum();
    let wanted = (total as f64 * quantile).ceil() as u64;
    let mut seen = 0;
    let found = calls.latency.iter().position(|count| {
        seen += count;
        seen >= wanted
    });
    let bucket = found.unwrap_or(0).min(LATENCY_BUCKETS - 2);
    latency_bound(bucket).map_or(0, nanos)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn shown_paths(paths: &[ExportedPath], name: &str) -> Vec<NfsPath> {
    let own = paths.iter().filter(|path| path.file_system == name);
    let shown = own.take(NFS_LIST_MAX).map(|path| NfsPath {
        path: shortened(&path.path),
        rules: path.rules.iter().take(NFS_LIST_MAX).cloned().collect(),
    });
    shown.collect()
}

fn shown_client(client: &ClientFigures) -> NfsClient {
    NfsClient {
        address: client.address.to_string(),
        connections: client.connections as u64,
        calls: client.calls,
        idle_s: client.idle.as_secs(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(buckets: &[(usize, u64)]) -> CallFigures {
        let mut of = CallFigures::default();
        for (bucket, count) in buckets {
            of.latency[*bucket] = *count;
            of.calls += count;
        }
        of
    }

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let of = calls(&[(3, 98), (10, 2)]);
        assert_eq!(quantile_ns(&of, 0.5), 8_000);
        assert_eq!(quantile_ns(&of, 0.99), 1_024_000);
        let slowest = calls(&[(LATENCY_BUCKETS - 1, 1)]);
        let last = latency_bound(LATENCY_BUCKETS - 2).map(nanos);
        assert_eq!(Some(quantile_ns(&slowest, 0.5)), last);
    }

    #[test]
    fn step_has_calls_since_last_report() {
        let (before, now) = (calls(&[(3, 5)]), calls(&[(3, 5), (4, 7)]));
        let step = since(&now, &before);
        assert_eq!((step.calls, step.latency[3], step.latency[4]), (7, 0, 7));
    }
}
