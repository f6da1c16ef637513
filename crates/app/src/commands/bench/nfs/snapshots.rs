//! Latencies at fixed rates: file systems without snapshots, with one and with 100, and the peer.
//!
//! After the warm-up of each point a snapshot is taken, and the oldest one is deleted. So the measured time has the first write to
//! each page after a snapshot, which keeps a version, and has it in every round.

use super::NfsArgs;
use super::servers::MeasuredServers;
use anyhow::Context;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::BenchError;
use pagemesh_bench::nfs::compare::{Candidate, CompareOptions, LoadedServer, run_ladder};
use pagemesh_bench::nfs::mix::OperationMix;
use pagemesh_bench::report::Report;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::CreateSnapshot;
use std::collections::VecDeque;
use std::time::Duration;

/// Snapshots of the file systems.
const KEPT: [(&str, usize); 3] = [
    ("no-snapshot", 0),
    ("one-snapshot", 1),
    ("many-snapshots", 100),
];
/// The load between two snapshots before the measurements.
const BETWEEN: Duration = Duration::from_millis(100);
const RATE_BETWEEN: f64 = 200.0;

/// Keeps the newest snapshots of one file system.
struct SnapshotRotation {
    client: ManagerClient,
    name: VolumeName,
    keep: usize,
    taken: VecDeque<String>,
    next: u64,
}

impl SnapshotRotation {
    /// Takes a snapshot, and deletes the oldest one beyond the number to keep.
    fn take(&mut self) -> anyhow::Result<()> {
        if self.keep == 0 {
            return Ok(());
        }
        let name = format!("s{}", self.next);
        self.next += 1;
        let request = CreateSnapshot {
            name: name.parse()?,
            labels: vec![],
        };
        let taken = self.client.create_snapshot(&self.name, &request);
        taken.context("cannot take a snapshot")?;
        self.taken.push_back(name);
        while self.taken.len() > self.keep {
            if let Some(oldest) = self.taken.pop_front() {
                let deleted = self.client.delete_snapshot(&self.name, &oldest.parse()?);
                deleted.context("cannot delete a snapshot")?;
            }
        }
        Ok(())
    }
}

pub(super) fn run(args: &NfsArgs) -> anyhow::Result<Report> {
    let options = args.options();
    let servers = MeasuredServers::start(args, KEPT.len() as u64)?;
    let mut served = Vec::new();
    let mut loaded = Vec::new();
    for (name, keep) in KEPT {
        let fs = servers.serve(name, args)?;
        let mut rotation = SnapshotRotation {
            client: servers.scratch.manager_client()?,
            name: name.parse()?,
            keep,
            taken: VecDeque::new(),
            next: 0,
        };
        let candidate = Candidate {
            target: fs.target.clone(),
            prepare: Box::new(move || {
                let taken = rotation.take();
                taken.map_err(|cause| BenchError::Mount(cause.into_boxed_dyn_error()))
            }),
        };
        loaded.push(LoadedServer::open(candidate, &options)?);
        served.push(fs);
    }
    let peer = servers.start_peer(args)?;
    if let Some(peer) = &peer {
        let candidate = Candidate::new(peer.target.clone());
        loaded.push(LoadedServer::open(candidate, &options)?);
    }
    let highest = args.rates.iter().copied().fold(0.0, f64::max);
    for server in &mut loaded {
        server.grow(options.scale.files_at(highest))?;
        write_between_snapshots(server, &options)?;
    }
    let texts = (
        "nfs-snapshots",
        "NFS latency over throughput, with snapshots and beside nfs-ganesha",
    );
    Ok(run_ladder(texts, &mut loaded, &args.rates, &options)?)
}

/// Each measurement takes a snapshot first, so as many short loads take all. File systems without snapshots have the same
/// load.
fn write_between_snapshots(
    server: &mut LoadedServer<'_>,
    options: &CompareOptions,
) -> anyhow::Result<()> {
    let most = KEPT.iter().map(|(_, keep)| *keep).max().unwrap_or(0);
    let load = CompareOptions {
        runtime: BETWEEN,
        warmup: Duration::ZERO,
        mix: OperationMix::WRITES,
        ..options.clone()
    };
    for number in 0..most {
        server.measure_prepared(RATE_BETWEEN, number, &load)?;
    }
    Ok(())
}
