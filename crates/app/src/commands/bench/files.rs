//! Benchmarks on mounts of a scratch cluster.

use crate::args::{self, MeasureArgs};
use crate::commands::bench::{ChildDaemon, SPARE_BYTES, ScratchCluster};
use crate::commands::fs;
use anyhow::Context;
use pagemesh_base::layout::{Leg, LegState, VolumeName};
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::many_files::{self, MountInfo, Mounter};
use pagemesh_bench::mirror::{self, MountPlace};
use pagemesh_bench::report::Report;
use pagemesh_bench::{database, metadata, sqlite};
use pagemesh_manage::wire::{AttachReplica, ChooseReplica, VolumeDetail};
use std::error::Error;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Bytes of a file system.
const FILES_BYTES: u64 = 512 << 20;
/// Bytes of a file system for a database.
const DATABASE_BYTES: u64 = 1 << 30;
/// Bytes of a file system apart from the counted files, and bytes of each of those: an inode, a
/// name, and partly filled directories.
const MANY_FILES_BYTES: u64 = 64 << 20;
const BYTES_PER_FILE: u64 = 600;
const MIB: u64 = 1 << 20;
/// Bytes of directly accessed files, for each number of jobs.
const DIRECT_BYTES: u64 = 512 << 20;
/// Server threads of a mount with directly accessed files.
const DIRECT_THREADS: usize = 4;
/// Limit of the time until an asynchronous copy of an empty file system is following: its client
/// asks for the layout when it attaches.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(30);
const REPLICA_POLL: Duration = Duration::from_millis(100);

/// The server settings of a mount.
#[derive(Clone, Copy)]
pub struct MountServing {
    /// Number of server threads.
    pub threads: usize,
    /// Transport of FUSE requests from the kernel.
    pub fuse: args::FuseTransport,
    /// Whether the kernel caches no file pages.
    pub direct_io: bool,
}

impl MountServing {
    pub fn auto(threads: usize) -> MountServing {
        let fuse = args::FuseTransport::Auto;
        MountServing {
            threads,
            fuse,
            direct_io: false,
        }
    }

    fn args(self) -> Vec<String> {
        let (threads, fuse) = (self.threads.to_string(), self.fuse.name().to_owned());
        let mut args = vec!["--threads".into(), threads, "--fuse".into(), fuse];
        args.extend(self.direct_io.then(|| "--direct-io".into()));
        args
    }
}

/// A mount and its mount process.
pub type ServedMount = (ChildDaemon, MountPlace);

impl ScratchCluster {
    /// Creates a file system with this number of copies, and returns its durability class.
    fn create_file_system(
        &self,
        name: &str,
        copies: usize,
        size_bytes: u64,
    ) -> anyhow::Result<String> {
        let wish = fs::create_request(&name.parse()?, size_bytes, copies);
        let made = fs::create_with_file_system(&self.manager_args(), args::Transport::Auto, &wish)?;
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

    fn serve_mount(
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
    /// mapped is reached over TCP. Waits until the asynchronous copy is following.
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
        while legs(&client.volume(&volume)?)[1].state != LegState::Following {
            anyhow::ensure!(
                Instant::now() < until,
                "the copy of {name} is not following"
            );
            std::thread::sleep(REPLICA_POLL);
        }
        Ok(served)
    }

    /// Mounts a null file system.
    fn mount_null(&self, serving: MountServing) -> anyhow::Result<ServedMount> {
        let dir = self.make_mount_dir("null")?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["bench", "null"])
            .args(serving.args())
            .arg(dir);
        let (daemon, dir) = ChildDaemon::start(command)?;
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
struct BenchClusters {
    mapped: ScratchCluster,
    /// A cluster with one mapped brick; the other acts like one on another machine.
    mixed: ScratchCluster,
}

impl BenchClusters {
    fn start(measure: &MeasureArgs, size_bytes: u64) -> anyhow::Result<BenchClusters> {
        let near = ScratchCluster::with_pools(measure, 2, 2, 4 * size_bytes + SPARE_BYTES)?;
        let apart = ScratchCluster::with_pools(measure, 2, 1, 2 * size_bytes + SPARE_BYTES)?;
        Ok(BenchClusters {
            mapped: near,
            mixed: apart,
        })
    }

    /// Mounts with one copy; with two mapped copies; with one mapped copy and one over TCP; with
    /// two over TCP; and with an asynchronous copy, mapped and over TCP.
    fn mount(&self, wish: &MountSpec) -> anyhow::Result<[ServedMount; 6]> {
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

/// Latency of synchronous writes against throughput.
pub fn mirror(
    measure: &MeasureArgs,
    options: &mirror::MirrorOptions,
    serving: MountServing,
) -> anyhow::Result<Report> {
    let wish = MountSpec {
        size_bytes: FILES_BYTES,
        serving,
    };
    let clusters = BenchClusters::start(measure, wish.size_bytes)?;
    let null = clusters.mapped.mount_null(serving)?;
    let served = [null].into_iter().chain(clusters.mount(&wish)?);
    let (_daemons, mut places): (Vec<ChildDaemon>, Vec<MountPlace>) = served.unzip();
    let mapped = places.iter().find(|place| place.name == "map");
    let direct = mapped.context("there is a mount over map")?.clone();
    places.push(MountPlace {
        name: "map, directly".into(),
        prefix: exec_prefix()?,
        ..direct
    });
    // Each number of jobs has its own files, and frames that are not freed yet need room.
    let options = mirror::MirrorOptions {
        size_bytes: FILES_BYTES * 3 / 4 / options.jobs.len() as u64,
        ..options.clone()
    };
    let glusterfs = match is_root() {
        true => Some(FilePeer::glusterfs(FILES_BYTES)?),
        false => {
            eprintln!("GlusterFS is left out: it needs root");
            None
        }
    };
    let peer = glusterfs.as_ref().map(FilePeer::mount_place);
    let mut report = mirror::run_mirror(&places, peer.as_ref(), &options)?;
    report.add_note(format!(
        "mounts are served by {} threads each, --fuse {}{}",
        serving.threads,
        serving.fuse.name(),
        if serving.direct_io {
            " --direct-io"
        } else {
            ""
        }
    ));
    Ok(report)
}

/// The command prefix that runs a program with direct access.
fn exec_prefix() -> anyhow::Result<Vec<String>> {
    let own = std::env::current_exe()?;
    let own = own.to_str().context("this program's path is no text")?;
    Ok([own, "exec", "--"].map(String::from).to_vec())
}

/// Cost of direct access for a program, compared with a tmpfs.
pub fn direct(measure: &MeasureArgs, options: &mirror::MirrorOptions) -> anyhow::Result<Report> {
    // Files that fit into CPU caches would not measure memory.
    let files_bytes = DIRECT_BYTES * options.jobs.len() as u64;
    let size_bytes = files_bytes + DIRECT_BYTES / 2;
    let near = DirectBench::start(measure, size_bytes, 2)?;
    // Over TCP, writes use the kernel path.
    let apart = ScratchCluster::with_pools(measure, 2, 1, size_bytes + SPARE_BYTES)?;
    let wish = MountSpec {
        size_bytes,
        serving: MountServing::auto(DIRECT_THREADS),
    };
    let (_daemon, mut far) = apart.mount("map-tcp", 2, "auto", &wish)?;
    far.prefix = exec_prefix()?;
    let by_kernel = MountPlace {
        name: "map, by the kernel".into(),
        prefix: vec![],
        ..near.places[1].clone()
    };
    let places = [&near.places[..], &[far, by_kernel]].concat();
    let options = mirror::MirrorOptions {
        size_bytes: DIRECT_BYTES,
        ..options.clone()
    };
    Ok(mirror::run_mirror(&places, Some(&near.tmpfs), &options)?)
}

/// A cluster on this machine with directly accessed file systems, of one copy and of two, and a
/// comparable tmpfs directory.
struct DirectBench {
    places: Vec<MountPlace>,
    tmpfs: MountPlace,
    // In drop order.
    _daemons: Vec<ChildDaemon>,
    _memory: tempfile::TempDir,
    scratch: ScratchCluster,
}

impl DirectBench {
    /// Starts it with room for this number of file systems on each brick.
    fn start(measure: &MeasureArgs, size_bytes: u64, count: u64) -> anyhow::Result<DirectBench> {
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
    fn mount_for_kernel(&mut self, size_bytes: u64) -> anyhow::Result<()> {
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

/// SQLite inserts.
pub fn sqlite(measure: &MeasureArgs, options: &sqlite::SqliteOptions) -> anyhow::Result<Report> {
    let mut near = DirectBench::start(measure, FILES_BYTES, 3)?;
    near.mount_for_kernel(FILES_BYTES)?;
    let places = [&near.places[..], &[near.tmpfs.clone()]].concat();
    Ok(sqlite::run_sqlite(&places, options)?)
}

/// A database server with direct access to its files.
pub fn direct_database(
    measure: &MeasureArgs,
    options: &database::DatabaseOptions,
) -> anyhow::Result<Report> {
    anyhow::ensure!(
        is_root(),
        "PostgreSQL is given another user; run it as root"
    );
    let mut near = DirectBench::start(measure, DATABASE_BYTES, 3)?;
    near.mount_for_kernel(DATABASE_BYTES)?;
    let scratch = &near.scratch;
    // PostgreSQL runs as another user.
    for dir in [scratch.dir.path(), scratch.pools.path(), &near.tmpfs.dir] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o711))?;
    }
    let places = near.places.iter().chain([&near.tmpfs]);
    let places = places.map(|place| database::DatabasePlace {
        name: place.name.clone(),
        class: place.class.clone(),
        dir: place.dir.clone(),
        standby: None,
        prefix: place.prefix.clone(),
    });
    Ok(database::run_database(
        &places.collect::<Vec<_>>(),
        options,
    )?)
}

/// Cost of an asynchronous copy over TCP with direct access: one program writes at a quarter of its
/// maximum rate, compared with one copy.
pub fn async_replica(
    measure: &MeasureArgs,
    options: &mirror::MirrorOptions,
) -> anyhow::Result<Report> {
    let wish = MountSpec {
        size_bytes: DIRECT_BYTES * 3 / 2,
        serving: MountServing::auto(DIRECT_THREADS),
    };
    let near = ScratchCluster::with_pools(measure, 1, 1, wish.size_bytes + SPARE_BYTES)?;
    let apart = ScratchCluster::with_pools(measure, 2, 1, wish.size_bytes + SPARE_BYTES)?;
    let (_unmirrored, mut alone) = near.mount("unmirrored", 1, "map", &wish)?;
    let (_followed, mut followed) = apart.mount_with_async_replica("tcp-async", &wish)?;
    let by_kernel = MountPlace {
        name: "tcp-async, by the kernel".into(),
        ..followed.clone()
    };
    let own = std::env::current_exe()?;
    let own = own.to_str().context("this program's path is no text")?;
    let prefix: Vec<String> = [own, "exec", "--"].map(String::from).to_vec();
    alone.prefix.clone_from(&prefix);
    followed.prefix = prefix;
    let options = mirror::MirrorOptions {
        size_bytes: DIRECT_BYTES,
        ..options.clone()
    };
    let most = mirror::saturating_iops(&followed, &options)?;
    anyhow::ensure!(most > 0.0, "nothing was written to {}", followed.name);
    let options = mirror::MirrorOptions {
        rate_iops: Some((most / 4.0) as u32),
        ..options
    };
    let mut report = mirror::run_mirror(&[alone, followed, by_kernel], None, &options)?;
    let name = "tcp-async".parse::<VolumeName>()?;
    let leg = &apart.manager_client()?.volume(&name)?.layout.segments[0].columns[0].legs[1];
    anyhow::ensure!(
        leg.state == LegState::Following,
        "the asynchronous copy is no longer following"
    );
    report.add_note(format!(
        "without O_SYNC; one program that writes to tcp-async without a pause does {most:.0} \
         writes/s; here it may do a quarter of them"
    ));
    Ok(report)
}

/// Creation and removal of small files.
pub fn metadata(
    measure: &MeasureArgs,
    options: &metadata::MetadataOptions,
    threads: usize,
) -> anyhow::Result<Report> {
    anyhow::ensure!(is_root(), "GlusterFS and ext4 need root; run it as root");
    let wish = MountSpec {
        size_bytes: FILES_BYTES,
        serving: MountServing::auto(threads),
    };
    let clusters = BenchClusters::start(measure, wish.size_bytes)?;
    let served = clusters.mount(&wish)?.into_iter();
    let (_daemons, places): (Vec<ChildDaemon>, Vec<MountPlace>) = served.unzip();
    let peers = [
        FilePeer::glusterfs(FILES_BYTES)?,
        FilePeer::ext4_sync(FILES_BYTES)?,
    ];
    let peers = peers.each_ref().map(FilePeer::mount_place);
    Ok(metadata::run_metadata(&places, &peers, options)?)
}

/// Databases on mounts.
pub fn database(
    measure: &MeasureArgs,
    options: &database::DatabaseOptions,
    threads: usize,
) -> anyhow::Result<Report> {
    let wish = MountSpec {
        size_bytes: DATABASE_BYTES,
        serving: MountServing::auto(threads),
    };
    let clusters = BenchClusters::start(measure, wish.size_bytes)?;
    // PostgreSQL runs as another user.
    for dir in [
        &clusters.mapped.dir,
        &clusters.mapped.pools,
        &clusters.mixed.dir,
    ] {
        std::fs::set_permissions(dir.path(), Permissions::from_mode(0o711))?;
    }
    let (mut _daemons, mut places) = (vec![], vec![]);
    for (daemon, place) in clusters.mount(&wish)? {
        _daemons.push(daemon);
        places.push(database::DatabasePlace {
            name: place.name,
            class: place.class,
            dir: place.dir,
            standby: None,
            prefix: vec![],
        });
    }
    let pools = clusters.mapped.pools.path();
    let [first, second] = ["first", "second"].map(|name| pools.join(name));
    std::fs::create_dir(&first)?;
    std::fs::create_dir(&second)?;
    places.push(database::DatabasePlace {
        name: "its own replication".into(),
        class: "none".into(),
        dir: first,
        standby: Some(second),
        prefix: vec![],
    });
    Ok(database::run_database(&places, options)?)
}

/// File systems with many files.
pub fn many(
    measure: &MeasureArgs,
    options: &many_files::ManyFilesOptions,
    threads: usize,
) -> anyhow::Result<Report> {
    let size_bytes = (MANY_FILES_BYTES + options.files * BYTES_PER_FILE).next_multiple_of(MIB);
    let trees = options.per_directory.len() as u64;
    let scratch = ScratchCluster::with_pools(measure, 2, 2, size_bytes * trees + SPARE_BYTES)?;
    let mut mounts = SequentialMounts {
        scratch: &scratch,
        size_bytes,
        threads,
        class: String::new(),
        current: None,
    };
    let mut report = many_files::run_many_files(&mut mounts, options)?;
    report.class = mounts.class;
    Ok(report)
}

/// Mirrored mounts, one at a time.
struct SequentialMounts<'a> {
    scratch: &'a ScratchCluster,
    size_bytes: u64,
    threads: usize,
    class: String,
    current: Option<ChildDaemon>,
}

impl SequentialMounts<'_> {
    fn mount(&mut self, name: &str) -> anyhow::Result<MountInfo> {
        // Drop the current mount first, so that it unmounts in order.
        drop(self.current.take());
        if !self.scratch.mount_dir(name).exists() {
            self.class = self.scratch.create_file_system(name, 2, self.size_bytes)?;
        }
        let start = Instant::now();
        let serving = MountServing::auto(self.threads);
        let dir = self.scratch.mount_dir(name);
        let (daemon, dir) = self.scratch.start_mount(name, &dir, "map", serving)?;
        let (took, pid) = (start.elapsed(), daemon.0.id());
        self.current = Some(daemon);
        Ok(MountInfo {
            dir,
            mount_time: took,
            pid,
        })
    }
}

impl Mounter for SequentialMounts<'_> {
    fn mount(&mut self, name: &str) -> Result<MountInfo, Box<dyn Error + Send + Sync>> {
        SequentialMounts::mount(self, name).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn resident_bytes(&mut self, pid: u32) -> Result<u64, Box<dyn Error + Send + Sync>> {
        let mappings = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
        Ok(resident_bytes(&mappings, self.scratch.pools.path()))
    }
}

/// Resident bytes of a process without mappings below `pools`, from proc(5) smaps: each mapping has
/// a line with range, flags and file, and lines of values.
fn resident_bytes(mappings: &str, pools: &Path) -> u64 {
    let mut counts = true;
    let mut kib = 0;
    for line in mappings.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Rss:") if counts => {
                kib += words.next().and_then(|it| it.parse().ok()).unwrap_or(0);
            }
            Some(word) if !word.ends_with(':') => {
                counts = !words.any(|word| Path::new(word).starts_with(pools));
            }
            _ => {}
        }
    }
    kib * 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_pools_are_not_process_memory() {
        let text = "5500-5600 r-xp 00000000 fe:00 1234 /usr/bin/pagemesh\nSize: 9 kB\nRss: 8 kB\n\
            7f00-7f10 rw-s 00000000 00:2a 12 /mnt/huge/x/pools/1.pool\nSize: 4096 kB\nRss: 4096 kB\n\
            7f20-7f30 rw-p 00000000 00:00 0\nRss: 20 kB\nVmFlags: rd wr\n";
        assert_eq!(resident_bytes(text, Path::new("/mnt/huge/x")), 28 * 1024);
    }
}
