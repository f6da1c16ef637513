//! Mounts of scratch clusters, each served by a child process.

use crate::args::{FuseTransport, Transport};
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::{
    ChildDaemon, SPARE_BYTES, ScratchCluster, end_mount_at_shutdown,
};
use crate::commands::fs;
use anyhow::Context;
use pagemesh_base::layout::{Leg, LegState, VolumeName};
use pagemesh_bench::mirror::MountPlace;
use pagemesh_manage::wire::{AttachReplica, ChooseReplica, VolumeDetail};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of a file system.
pub const FILES_BYTES: u64 = 512 << 20;
/// Server threads of a mount with directly accessed files.
pub const DIRECT_THREADS: usize = 4;
/// Limit of the time until an asynchronous copy of an empty file system is in step: its client
/// asks for the layout when it attaches.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(30);
const REPLICA_POLL: Duration = Duration::from_millis(100);

/// The server settings of a mount.
#[derive(Clone, Copy)]
pub struct MountServing {
    /// Number of server threads.
    pub threads: usize,
    /// Transport of FUSE requests from the kernel.
    pub fuse: FuseTransport,
    /// Whether the kernel caches no file pages.
    pub direct_io: bool,
    /// Seconds for which changes may wait for the disk.
    pub commit_interval: Option<u64>,
}

impl MountServing {
    pub fn auto(threads: usize) -> MountServing {
        let fuse = FuseTransport::Auto;
        MountServing {
            threads,
            fuse,
            direct_io: false,
            commit_interval: None,
        }
    }

    fn args(self) -> Vec<String> {
        let (threads, fuse) = (self.threads.to_string(), self.fuse.name().to_owned());
        let mut args = vec!["--threads".into(), threads, "--fuse".into(), fuse];
        args.extend(self.direct_io.then(|| "--direct-io".into()));
        if let Some(seconds) = self.commit_interval {
            args.extend(["--commit-interval".into(), seconds.to_string()]);
        }
        args
    }
}

/// A mount and its mount process.
pub type ServedMount = (ChildDaemon, MountPlace);

impl ScratchCluster {
    /// Creates a file system with this number of copies, and returns its durability class.
    pub fn create_file_system(
        &self,
        name: &str,
        copies: usize,
        size_bytes: u64,
    ) -> anyhow::Result<String> {
        let wish = fs::create_request(&name.parse()?, size_bytes, copies);
        let made = fs::create_with_file_system(&self.manager_args(), Transport::Auto, &wish)?;
        self.make_mount_dir(name)?;
        Ok(made.volume.info.durability.to_string())
    }

    /// Mounts it on the directory, in a child process.
    pub fn start_mount(
        &self,
        name: &str,
        dir: &Path,
        transport: &str,
        serving: MountServing,
    ) -> anyhow::Result<(ChildDaemon, PathBuf)> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["mount", name])
            .arg(dir)
            .args(["--transport", transport])
            .args(serving.args())
            .args(["--manager", &self.cluster.url])
            .arg("--key")
            .arg(self.dir.path().join("key"));
        if is_root() {
            command.arg("--allow-other");
        }
        let (daemon, dir) = ChildDaemon::start(command)?;
        end_mount_at_shutdown(&daemon)?;
        Ok((daemon, dir.into()))
    }

    /// Creates a file system and mounts it.
    pub fn mount(
        &self,
        name: &str,
        copies: usize,
        transport: &str,
        wish: &MountSpec,
    ) -> anyhow::Result<ServedMount> {
        let class = self.create_file_system(name, copies, wish.size_bytes)?;
        self.serve_mount(name, transport, class, wish)
    }

    pub fn serve_mount(
        &self,
        name: &str,
        transport: &str,
        class: String,
        wish: &MountSpec,
    ) -> anyhow::Result<ServedMount> {
        let (daemon, dir) =
            self.start_mount(name, &self.mount_dir(name), transport, wish.serving)?;
        let mut pids = self.cluster.brick_pids();
        pids.push(daemon.0.id());
        let place = MountPlace {
            name: name.into(),
            class,
            dir,
            pids,
            prefix: vec![],
        };
        Ok((daemon, place))
    }

    /// Mounts a file system with one synchronous and one asynchronous copy; a brick that is not
    /// mapped is reached over TCP. Waits until the asynchronous copy is in step.
    pub fn mount_with_async_replica(
        &self,
        name: &str,
        wish: &MountSpec,
    ) -> anyhow::Result<ServedMount> {
        let class = self.create_file_system(name, 2, wish.size_bytes)?;
        let (client, volume) = (self.manager_client()?, name.parse::<VolumeName>()?);
        let made = client.volume(&volume)?;
        let legs = |detail: &VolumeDetail| detail.layout.segments[0].columns[0].legs.clone();
        let is_near = |leg: &Leg| {
            made.bricks
                .get(&leg.brick)
                .is_some_and(|at| at.map_socket.is_some())
        };
        let copy = legs(&made)
            .iter()
            .position(|leg| !is_near(leg))
            .unwrap_or(1);
        let far = ChooseReplica {
            copy,
            force: false,
            expected: None,
        };
        client.detach_replica(&volume, far)?;
        let follows = AttachReplica {
            asynchronous: true,
            ..AttachReplica::default()
        };
        client.attach_replica(&volume, follows)?;
        let served = self.serve_mount(name, "auto", class, wish)?;
        let until = Instant::now() + REPLICA_TIMEOUT;
        while legs(&client.volume(&volume)?)[1].state != LegState::AsyncReplica {
            anyhow::ensure!(
                Instant::now() < until,
                "the asynchronous copy of {name} is not in step"
            );
            std::thread::sleep(REPLICA_POLL);
        }
        Ok(served)
    }

    /// Mounts a null file system.
    pub fn mount_null(&self, serving: MountServing) -> anyhow::Result<ServedMount> {
        let dir = self.make_mount_dir("null")?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["bench", "null"])
            .args(serving.args())
            .arg(dir);
        let (daemon, dir) = ChildDaemon::start(command)?;
        end_mount_at_shutdown(&daemon)?;
        let place = MountPlace {
            name: "null".into(),
            class: "none".into(),
            dir: dir.into(),
            pids: vec![daemon.0.id()],
            prefix: vec![],
        };
        Ok((daemon, place))
    }

    pub fn make_mount_dir(&self, name: &str) -> anyhow::Result<PathBuf> {
        let dir = self.mount_dir(name);
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(dir)
    }

    pub fn mount_dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("mnt-{name}"))
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The common settings of the mounts of a comparison.
pub struct MountSpec {
    /// Bytes of a file system.
    pub size_bytes: u64,
    /// Their server settings.
    pub serving: MountServing,
}

/// Clusters with room for the mounts of a comparison.
pub struct BenchClusters {
    pub mapped: ScratchCluster,
    /// A cluster with one mapped brick; the other acts like one on another machine.
    pub mixed: ScratchCluster,
}

impl BenchClusters {
    pub fn start(measure: &MeasureArgs, size_bytes: u64) -> anyhow::Result<BenchClusters> {
        let near = ScratchCluster::with_pools(measure, 2, 2, 4 * size_bytes + SPARE_BYTES)?;
        let apart = ScratchCluster::with_pools(measure, 2, 1, 2 * size_bytes + SPARE_BYTES)?;
        Ok(BenchClusters {
            mapped: near,
            mixed: apart,
        })
    }

    /// Mounts with one copy; with two mapped copies; with one mapped copy and one over TCP; with
    /// two over TCP; and with an asynchronous copy, mapped and over TCP.
    pub fn mount(&self, wish: &MountSpec) -> anyhow::Result<[ServedMount; 6]> {
        Ok([
            self.mapped.mount("unmirrored", 1, "map", wish)?,
            self.mapped.mount("map", 2, "map", wish)?,
            self.mixed.mount("map-tcp", 2, "auto", wish)?,
            self.mapped.mount("tcp", 2, "tcp", wish)?,
            self.mapped.mount_with_async_replica("map-async", wish)?,
            self.mixed.mount_with_async_replica("tcp-async", wish)?,
        ])
    }
}

/// The command prefix that runs a program with direct access.
pub fn exec_prefix() -> anyhow::Result<Vec<String>> {
    let own = std::env::current_exe()?;
    let own = own.to_str().context("this program's path is no text")?;
    Ok([own, "exec", "--"].map(String::from).to_vec())
}

/// A cluster on this machine with directly accessed file systems, of one copy and of two, and a
/// comparable tmpfs directory.
pub struct DirectBench {
    pub places: Vec<MountPlace>,
    pub tmpfs: MountPlace,
    // In drop order.
    _daemons: Vec<ChildDaemon>,
    _memory: tempfile::TempDir,
    pub scratch: ScratchCluster,
}

impl DirectBench {
    /// Starts it with room for this number of file systems on each brick.
    pub fn start(
        measure: &MeasureArgs,
        size_bytes: u64,
        count: u64,
    ) -> anyhow::Result<DirectBench> {
        let wish = MountSpec {
            size_bytes,
            serving: MountServing::auto(DIRECT_THREADS),
        };
        let scratch = ScratchCluster::with_pools(measure, 2, 2, count * size_bytes + SPARE_BYTES)?;
        let (one, mut unmirrored) = scratch.mount("unmirrored", 1, "map", &wish)?;
        let (other, mut mirrored) = scratch.mount("map", 2, "map", &wish)?;
        unmirrored.prefix = exec_prefix()?;
        mirrored.prefix = exec_prefix()?;
        let memory = tempfile::tempdir_in(scratch.pools.path())?;
        let tmpfs = MountPlace::unserved("tmpfs", memory.path());
        Ok(DirectBench {
            places: vec![unmirrored, mirrored],
            tmpfs,
            _daemons: vec![one, other],
            _memory: memory,
            scratch,
        })
    }

    /// Mounts a further file system with two copies, for the kernel path.
    pub fn mount_for_kernel(&mut self, size_bytes: u64) -> anyhow::Result<()> {
        let wish = MountSpec {
            size_bytes,
            serving: MountServing::auto(DIRECT_THREADS),
        };
        let (daemon, mut place) = self.scratch.mount("kernel", 2, "map", &wish)?;
        place.name = "map, by the kernel".into();
        self._daemons.push(daemon);
        self.places.push(place);
        Ok(())
    }
}
