//! Scratch clusters, and child processes of benchmarks.
//!
//! Invariant: scratch directories are removed and child processes have exited when the command ends, by a
//! signal too.

use crate::args::{ManagerArgs, Output, Transport};
use crate::client;
use crate::cluster::{Cluster, ClusterPlan};
use crate::commands::bench::MeasureArgs;
use crate::memory_budget::MemoryBudget;
use crate::shutdown::Shutdown;
use anyhow::Context;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::poison;
use pagemesh_base::wait::until_ready;
use pagemesh_bench::process_cpu;
use pagemesh_brick::file::Preallocation;
use pagemesh_manage::wire::{CreateVolume, VolumeContent};
use pagemesh_manage::{LayoutKind, ManagerClient, TierPolicy};
use pagemesh_volume::Volume;
use rustix::event::{PollFd, PollFlags};
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Bytes of a scratch volume.
pub const VOLUME_BYTES: u64 = 1 << 30;
/// Bytes of a scratch pool beyond its volumes, for frames that are not freed yet.
pub const SPARE_BYTES: u64 = 512 << 20;

/// Attempts to remove a directory on a shutdown.
const REMOVALS_MAX: u32 = 100;
/// Pause between two of them.
const REMOVAL_PAUSE: Duration = Duration::from_millis(20);

/// Longest wait for the ends of mount processes on a shutdown. A mount that is told to end does so within seconds.
const MOUNT_END_MAX: Duration = Duration::from_secs(10);

/// A cluster that is removed when dropped.
pub struct ScratchCluster {
    pub cluster: Cluster,
    pub dir: TempDir,
    pub pools: TempDir,
}

impl ScratchCluster {
    pub fn start(
        measure: &MeasureArgs,
        bricks: u32,
        volumes: u64,
    ) -> anyhow::Result<ScratchCluster> {
        ScratchCluster::with_pools(
            measure,
            bricks,
            bricks,
            VOLUME_BYTES * volumes + SPARE_BYTES,
        )
    }

    /// Starts bricks with pools of `size_bytes`. Clients may map only the first `mapped` bricks;
    /// the others act like bricks on other machines.
    pub fn with_pools(
        measure: &MeasureArgs,
        bricks: u32,
        mapped: u32,
        size_bytes: u64,
    ) -> anyhow::Result<ScratchCluster> {
        ScratchCluster::with_sessions(measure, (bricks, mapped), size_bytes, None)
    }

    /// The same with a number of sessions for each pool; none: by its size.
    pub fn with_sessions(
        measure: &MeasureArgs,
        (bricks, mapped): (u32, u32),
        size_bytes: u64,
        sessions: Option<u32>,
    ) -> anyhow::Result<ScratchCluster> {
        let budget = MemoryBudget::of_each(bricks);
        ScratchCluster::with_budget(measure, (bricks, mapped), size_bytes, (sessions, budget))
    }

    /// The same with the memory of each brick for pages of a pool on a disk.
    pub fn with_budget(
        measure: &MeasureArgs,
        (bricks, mapped): (u32, u32),
        size_bytes: u64,
        (sessions, memory_budget): (Option<u32>, MemoryBudget),
    ) -> anyhow::Result<ScratchCluster> {
        let ending = Shutdown::listen(false)?;
        let dir = tempfile::tempdir()?;
        let pools = TempDir::new_in(&measure.pools)
            .with_context(|| format!("cannot make pools in {}", measure.pools.display()))?;
        let plan = ClusterPlan {
            dir: dir.path(),
            pools: pools.path(),
            bricks,
            mapped,
            size_bytes,
            sessions,
            // As of a disk that was in use before: the first write to each block would be slower.
            preallocation: Preallocation::Full,
            memory_budget,
            listen: "127.0.0.1:0",
        };
        let cluster = Cluster::start(&plan, &ending)?;
        remove_on_shutdown(ending, [dir.path(), pools.path()])?;
        Ok(ScratchCluster {
            cluster,
            dir,
            pools,
        })
    }

    /// Creates a mirrored volume, and returns its durability class.
    pub fn create_volume(&self, name: &VolumeName) -> anyhow::Result<String> {
        self.create_sized_volume(name, VOLUME_BYTES, 2)
    }

    /// Creates a volume with this size and number of copies, and returns its durability class.
    pub fn create_sized_volume(
        &self,
        name: &VolumeName,
        size_bytes: u64,
        copies: u32,
    ) -> anyhow::Result<String> {
        let client = self.manager_client()?;
        let sized = client.create(&CreateVolume {
            name: name.clone(),
            size_bytes,
            layout: match copies {
                1 => LayoutKind::Concat,
                _ => LayoutKind::Mirror,
            },
            columns: None,
            copies: Some(copies as usize),
            durability: None,
            content: VolumeContent::Blocks,
            tier: TierPolicy::Auto,
            received: false,
        })?;
        Ok(sized.volume.info.durability.to_string())
    }

    pub fn manager_client(&self) -> anyhow::Result<ManagerClient> {
        Ok(ManagerClient::new(&self.cluster.url, &self.cluster.key)?)
    }

    pub fn manager_args(&self) -> ManagerArgs {
        ManagerArgs {
            manager: self.cluster.url.clone(),
            key: Some(self.dir.path().join("key")),
            token_file: None,
            output: Output::Table,
        }
    }

    pub fn attach(&self, name: &VolumeName, transport: Transport) -> anyhow::Result<Volume> {
        client::attach(&self.manager_args(), transport, name)
    }

    pub fn brick_cpu(&self) -> impl FnMut() -> Duration + use<> {
        let pids = self.cluster.brick_pids();
        move || pids.iter().filter_map(|pid| process_cpu(*pid)).sum()
    }

    /// Exports a volume in a child process, and returns the export's URI.
    pub fn export(
        &self,
        name: &VolumeName,
        transport: &str,
    ) -> anyhow::Result<(ChildDaemon, String)> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["export", "nbd", &name.to_string()])
            .args(["--transport", transport, "--manager", &self.cluster.url])
            .arg("--socket")
            .arg(self.dir.path().join(format!("{name}.nbd")))
            .arg("--key")
            .arg(self.dir.path().join("key"));
        ChildDaemon::start(command)
    }
}

/// On a shutdown, removes all scratch directories and exits this process; its children exit with
/// it.
pub fn remove_on_shutdown<const N: usize>(
    ending: Shutdown,
    directories: [&Path; N],
) -> anyhow::Result<()> {
    static ALL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let all = || poison::lock(&ALL);
    let is_first = all().is_empty();
    all().extend(directories.map(Path::to_owned));
    if !is_first {
        return Ok(());
    }
    let thread = std::thread::Builder::new().name("ending".into());
    thread.spawn(move || {
        ending.wait();
        kill_registered();
        for directory in all().iter() {
            // Unmount first: files on a mount need not be removed one by one.
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                // Most entries are not mount points.
                let _ = unmount(entry.path(), UnmountFlags::DETACH);
            }
        }
        end_mounts();
        for directory in all().iter() {
            remove_scratch(directory);
        }
        std::process::exit(130);
    })?;
    Ok(())
}

/// Removes a directory. Ending processes may still make files in it. This process exits, so a
/// directory that cannot be removed stays.
fn remove_scratch(directory: &Path) {
    for _ in 0..REMOVALS_MAX {
        let removed = std::fs::remove_dir_all(directory);
        if removed.is_ok() || !directory.exists() {
            return;
        }
        std::thread::sleep(REMOVAL_PAUSE);
    }
}

/// The processes of mounts.
static MOUNTS: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());

/// On a shutdown, ends this mount process while its bricks still serve it: it stores its last times there.
pub fn end_mount_at_shutdown(mount: &ChildDaemon) -> anyhow::Result<()> {
    let pid = i32::try_from(mount.0.id()).ok().and_then(Pid::from_raw);
    let pid = pid.context("a child process has no process id")?;
    let process = pidfd_open(pid, PidfdFlags::empty()).context("cannot watch a mount process")?;
    poison::lock(&MOUNTS).push(process);
    Ok(())
}

/// Ends all mount processes, and waits for their ends.
fn end_mounts() {
    let mounts = poison::lock(&MOUNTS);
    for mount in mounts.iter() {
        // It fails only if the process has ended.
        let _ = pidfd_send_signal(mount, Signal::TERM);
    }
    let until = Instant::now() + MOUNT_END_MAX;
    for mount in mounts.iter() {
        let mut ended = [PollFd::new(mount, PollFlags::IN)];
        while ended[0].revents().is_empty() && Instant::now() < until {
            // A signal may end the wait early.
            let _ = until_ready(&mut ended, Some(until));
        }
    }
}

static KILLED_FIRST: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// On a shutdown, kills this child process before directories are removed. The child must live as
/// long as this process.
pub fn kill_at_shutdown(pid: u32) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    poison::lock(&KILLED_FIRST).extend(pid);
}

fn kill_registered() {
    for &pid in poison::lock(&KILLED_FIRST).iter() {
        // It fails only if the child has ended.
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// A child process of this program; dropping it ends the child.
pub struct ChildDaemon(pub Child);

impl ChildDaemon {
    /// Starts the child, and returns the rest of its `ready` line.
    pub fn start(mut command: Command) -> anyhow::Result<(ChildDaemon, String)> {
        let mut child = command
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // See `SupervisedChild`: signals of the terminal are for this process.
            .process_group(0)
            .spawn()
            .context("cannot start a child process")?;
        let said = child
            .stdout
            .take()
            .context("a child process has no output")?;
        let daemon = ChildDaemon(child);
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        let ready = line.trim().strip_prefix("ready ");
        let ready = ready.context("a child process did not start")?.to_owned();
        Ok((daemon, ready))
    }
}

impl Drop for ChildDaemon {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // The child was started here, and exits when its input ends.
        let _ = self.0.wait();
    }
}
