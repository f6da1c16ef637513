//! Failure of one node of a scratch cluster, and takeover by the other.

use crate::args::thread_count_parser;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{MountServing, MountSpec};
use crate::commands::bench::scratch::{ChildDaemon, SPARE_BYTES, ScratchCluster};
use anyhow::Context;
use clap::Args;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::failover::{self, FailoverCase, FailoverOptions, NodePair};
use pagemesh_bench::report::Report;
use pagemesh_manage::wire::ChooseReplica;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, Signal, kill_process};
use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

const FILES_BYTES: u64 = 1 << 30;
const FILE_SYSTEM: &str = "files";
/// The copy on the first node.
const FIRST_COPY: usize = 0;
const SECOND_COPY: usize = 1;

/// Failure of a node under load, with its brick and its mount process: the time until the other
/// node has mounted and writes the files, and a check that no required write is lost.
#[derive(Args)]
pub struct FailoverArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Number of writers.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub writers: u32,
    /// Number of server threads of each mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
}

/// Runs the benchmark: two synchronous copies over both transports, and an asynchronous copy.
pub fn run(args: &FailoverArgs) -> anyhow::Result<Report> {
    let options = FailoverOptions {
        rounds: args.measure.rounds,
        runtime: args.measure.runtime(),
        writers: args.writers as usize,
    };
    let case = |name: &str, sync| FailoverCase {
        name: name.into(),
        sync,
    };
    let cases = [
        case("map", true),
        case("tcp", true),
        case("map-async", true),
        case("map-async, plain writes", false),
    ];
    let mut nodes = FailoverNodes {
        measure: &args.measure,
        wish: MountSpec {
            size_bytes: FILES_BYTES,
            serving: MountServing::auto(args.threads),
        },
        round: None,
    };
    Ok(failover::run_failover(
        &mut nodes, &cases, "process", &options,
    )?)
}

/// Each round has its own cluster, because a killed brick does not come back.
struct FailoverNodes<'a> {
    measure: &'a MeasureArgs,
    wish: MountSpec,
    round: Option<FailoverRound>,
}

struct FailoverRound {
    // Drop order: the mount before the cluster that serves it.
    mount: Option<ChildDaemon>,
    stale_mount: Option<StaleMount>,
    scratch: ScratchCluster,
    transport: &'static str,
    is_async: bool,
}

/// The mount point of a killed mount process.
struct StaleMount(PathBuf);

impl Drop for StaleMount {
    fn drop(&mut self) {
        if unmount(&self.0, UnmountFlags::DETACH).is_err() {
            // Users other than root may unmount only by this helper.
            let mut command = Command::new("fusermount3");
            let told = command.args(["-u", "-z"]).arg(&self.0).status();
            if !told.is_ok_and(|status| status.success()) {
                eprintln!("cannot unmount {}", self.0.display());
            }
        }
    }
}

impl FailoverNodes<'_> {
    fn round(&mut self) -> anyhow::Result<&mut FailoverRound> {
        self.round.as_mut().context("nothing is mounted")
    }

    fn mount(&mut self, case: &FailoverCase) -> anyhow::Result<PathBuf> {
        self.round = None;
        let scratch = ScratchCluster::with_pools(self.measure, 2, 2, FILES_BYTES + SPARE_BYTES)?;
        let transport = if case.name == "tcp" { "tcp" } else { "map" };
        let follows = case.name.contains("async");
        let (daemon, place) = match follows {
            true => scratch.mount_with_async_replica(FILE_SYSTEM, &self.wish)?,
            false => scratch.mount(FILE_SYSTEM, 2, transport, &self.wish)?,
        };
        self.round = Some(FailoverRound {
            mount: Some(daemon),
            stale_mount: None,
            scratch,
            transport,
            is_async: follows,
        });
        Ok(place.dir)
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        let round = self.round()?;
        let brick = round.first_brick()?;
        let mut mount = round.mount.take().context("nothing is mounted")?;
        kill_process(brick, Signal::KILL)?;
        mount.0.kill()?;
        mount.0.wait()?;
        round.stale_mount = Some(StaleMount(round.scratch.mount_dir(FILE_SYSTEM)));
        Ok(())
    }

    fn go_on(&mut self) -> anyhow::Result<PathBuf> {
        let serving = self.wish.serving;
        let round = self.round()?;
        if round.is_async {
            // The command asserts that the node is dead, so the promotion may use force.
            let forced = ChooseReplica {
                copy: SECOND_COPY,
                force: true,
                expected: None,
            };
            let client = round.scratch.manager_client()?;
            client.promote_replica(&FILE_SYSTEM.parse()?, forced)?;
        }
        let (transport, at) = (round.transport, "elsewhere");
        let dir = round.scratch.make_mount_dir(at)?;
        let daemon = round
            .scratch
            .start_mount(FILE_SYSTEM, &dir, transport, serving)?;
        round.mount = Some(daemon.0);
        Ok(daemon.1)
    }
}

impl FailoverRound {
    /// The process of the brick with the first copy.
    fn first_brick(&self) -> anyhow::Result<Pid> {
        let client = self.scratch.manager_client()?;
        let name: VolumeName = FILE_SYSTEM.parse()?;
        let layout = client.volume(&name)?.layout;
        let id = layout.segments[0].columns[0].legs[FIRST_COPY].brick;
        let bricks = client.bricks()?;
        let domain = bricks.iter().find(|brick| brick.brick == id);
        let domain = domain.map(|brick| brick.domain.trim_start_matches("brick-"));
        let number = domain.and_then(|number| number.parse::<usize>().ok());
        let pids = self.scratch.cluster.brick_pids();
        let pid = number.and_then(|number| pids.get(number.checked_sub(1)?).copied());
        let pid = pid.and_then(|pid| Pid::from_raw(pid.cast_signed()));
        pid.context("the brick with the first copy is not one of this cluster")
    }
}

impl NodePair for FailoverNodes<'_> {
    fn mount(&mut self, case: &FailoverCase) -> Result<PathBuf, Box<dyn Error + Send + Sync>> {
        FailoverNodes::mount(self, case).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn kill(&mut self) -> Result<(), Box<dyn Error + Send + Sync>> {
        FailoverNodes::kill(self).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn fail_over(&mut self) -> Result<PathBuf, Box<dyn Error + Send + Sync>> {
        FailoverNodes::go_on(self).map_err(anyhow::Error::into_boxed_dyn_error)
    }
}
