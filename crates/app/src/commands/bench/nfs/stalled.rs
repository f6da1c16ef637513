//! Two exports of one server, of which one loses its bricks for a while.

use super::NfsArgs;
use super::servers::{MeasuredServers, ServeOptions};
use crate::commands::bench::scratch::kill_at_shutdown;
use anyhow::{Context, ensure};
use pagemesh_bench::BenchError;
use pagemesh_bench::nfs::compare::{Candidate, LoadedServer};
use pagemesh_bench::nfs::stalled::{BrickStopper, run_stalled};
use pagemesh_bench::report::Report;
use rustix::process::{Pid, Signal, kill_process};

const MEASURED: &str = "measured";
const STALLED: &str = "stalled";

/// Bricks that are stopped and go on. The drop lets them go on, so that they can end.
struct SignalledBricks(Vec<Pid>);

impl SignalledBricks {
    fn of(pids: &[u32]) -> anyhow::Result<SignalledBricks> {
        let pid = |pid: &u32| i32::try_from(*pid).ok().and_then(Pid::from_raw);
        let pids: Option<Vec<Pid>> = pids.iter().map(pid).collect();
        Ok(SignalledBricks(pids.context("a brick has no process id")?))
    }

    fn send(&self, signal: Signal) -> Result<(), BenchError> {
        for pid in &self.0 {
            kill_process(*pid, signal).map_err(|cause| BenchError::System {
                action: "signal a brick".to_owned(),
                cause: cause.into(),
            })?;
        }
        Ok(())
    }
}

impl BrickStopper for SignalledBricks {
    fn stop(&mut self) -> Result<(), BenchError> {
        self.send(Signal::STOP)
    }

    fn go_on(&mut self) -> Result<(), BenchError> {
        self.send(Signal::CONT)
    }
}

impl Drop for SignalledBricks {
    fn drop(&mut self) {
        // It fails only for a brick that has ended.
        let _ = self.send(Signal::CONT);
    }
}

pub(super) fn run(args: &NfsArgs) -> anyhow::Result<Report> {
    let options = args.options();
    let servers = MeasuredServers::start_apart(args, 2)?;
    let of_each = (args.copies, args.size.0);
    let class = servers.create(STALLED, of_each)?;
    servers.create(MEASURED, of_each)?;
    let stopped = servers.bricks_of(STALLED)?;
    let others = servers.bricks_of(MEASURED)?;
    ensure!(
        stopped.iter().all(|pid| !others.contains(pid)),
        "the file systems share a brick, so that none of them can stall alone; run the benchmark again"
    );
    stopped.iter().for_each(|pid| kill_at_shutdown(*pid));
    // Clients over TCP need the process of the brick for every read.
    let tcp = ServeOptions {
        transport: "tcp",
        ..ServeOptions::default()
    };
    let names = [(STALLED, class.as_str()), (MEASURED, class.as_str())];
    let (targets, daemon) = servers.start_server(&names, tcp)?;
    let mut opened = targets
        .into_iter()
        .map(|target| LoadedServer::open(Candidate::new(target), &options));
    let (Some(stalled), Some(measured)) = (opened.next(), opened.next()) else {
        anyhow::bail!("the server has no exports");
    };
    let (mut stalled, mut measured) = (stalled?, measured?);
    let mut bricks = SignalledBricks::of(&stopped)?;
    let rate = args.start_rate;
    let report = run_stalled(&mut measured, &mut stalled, &mut bricks, rate, &options);
    // The server ends only if its bricks go on.
    drop(bricks);
    daemon.end();
    Ok(report?)
}
