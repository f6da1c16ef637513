//! A node of a scratch cluster dies, and the other one goes on.

use crate::args::Measure;
use crate::bench::files::{Serving, Wish};
use crate::bench::{Daemon, ROOM_BYTES, Scratch};
use anyhow::Context;
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
const NAME: &str = "files";
/// The copy that the first node has.
const FIRST: usize = 0;
const SECOND: usize = 1;

/// Two synchronous copies over both transports, and one that follows.
pub fn run(measure: &Measure, options: &FailoverOptions, threads: usize) -> anyhow::Result<Report> {
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
    let mut nodes = Pair {
        measure,
        wish: Wish {
            size_bytes: FILES_BYTES,
            serving: Serving::auto(threads),
        },
        round: None,
    };
    Ok(failover::run_failover(
        &mut nodes, &cases, "process", options,
    )?)
}

/// One cluster after the other, since a brick does not come back.
struct Pair<'a> {
    measure: &'a Measure,
    wish: Wish,
    round: Option<Round>,
}

struct Round {
    // Dropped in this order: what is mounted goes before what it lies on.
    mount: Option<Daemon>,
    dead: Option<Dead>,
    scratch: Scratch,
    transport: &'static str,
    follows: bool,
}

/// A place where a process had mounted that was killed.
struct Dead(PathBuf);

impl Drop for Dead {
    fn drop(&mut self) {
        if unmount(&self.0, UnmountFlags::DETACH).is_err() {
            // Others than root are let by what mounts for them.
            let mut command = Command::new("fusermount3");
            let told = command.args(["-u", "-z"]).arg(&self.0).status();
            if !told.is_ok_and(|status| status.success()) {
                eprintln!("cannot unmount {}", self.0.display());
            }
        }
    }
}

impl Pair<'_> {
    fn round(&mut self) -> anyhow::Result<&mut Round> {
        self.round.as_mut().context("nothing is mounted")
    }

    fn mount(&mut self, case: &FailoverCase) -> anyhow::Result<PathBuf> {
        self.round = None;
        let scratch = Scratch::sized(self.measure, 2, 2, FILES_BYTES + ROOM_BYTES)?;
        let transport = if case.name == "tcp" { "tcp" } else { "map" };
        let follows = case.name.contains("async");
        let (daemon, place) = match follows {
            true => scratch.mount_followed(NAME, &self.wish)?,
            false => scratch.mount(NAME, 2, transport, &self.wish)?,
        };
        self.round = Some(Round {
            mount: Some(daemon),
            dead: None,
            scratch,
            transport,
            follows,
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
        round.dead = Some(Dead(round.scratch.mount_dir(NAME)));
        Ok(())
    }

    fn go_on(&mut self) -> anyhow::Result<PathBuf> {
        let serving = self.wish.serving;
        let round = self.round()?;
        if round.follows {
            // Who gives the command knows that the node is dead.
            let forced = ChooseReplica {
                copy: SECOND,
                force: true,
                expected: None,
            };
            let client = round.scratch.manager()?;
            client.promote_replica(&NAME.parse()?, forced)?;
        }
        let (transport, at) = (round.transport, "elsewhere");
        let dir = round.scratch.make_mount_dir(at)?;
        let daemon = round.scratch.serve_files(NAME, &dir, transport, serving)?;
        round.mount = Some(daemon.0);
        Ok(daemon.1)
    }
}

impl Round {
    /// The process of the brick that has the first copy.
    fn first_brick(&self) -> anyhow::Result<Pid> {
        let client = self.scratch.manager()?;
        let name: VolumeName = NAME.parse()?;
        let layout = client.volume(&name)?.layout;
        let id = layout.segments[0].columns[0].legs[FIRST].brick;
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

impl NodePair for Pair<'_> {
    fn mount(&mut self, case: &FailoverCase) -> Result<PathBuf, Box<dyn Error + Send + Sync>> {
        Pair::mount(self, case).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn kill(&mut self) -> Result<(), Box<dyn Error + Send + Sync>> {
        Pair::kill(self).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn fail_over(&mut self) -> Result<PathBuf, Box<dyn Error + Send + Sync>> {
        Pair::go_on(self).map_err(anyhow::Error::into_boxed_dyn_error)
    }
}
