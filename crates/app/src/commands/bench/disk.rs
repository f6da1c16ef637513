//! A disk, raw and below pagemesh and other block servers.
//!
//! Invariant: all pools, files and sockets lie in two scratch directories, one on the disk and one
//! for sockets, which exist before anything is made in them and are removed at the end.

use crate::args::Output;
use crate::cluster::{Cluster, ClusterPlan};
use crate::commands::bench::mounts::is_root;
use crate::commands::bench::scratch::{
    ChildDaemon, ScratchCluster, kill_at_shutdown, remove_on_shutdown,
};
use crate::commands::bench::{SECONDS_MAX, round_count_parser_from};
use crate::memory_budget::MemoryBudget;
use crate::output;
use crate::shutdown::Shutdown;
use anyhow::{Context, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::units::Size;
use pagemesh_bench::BenchError;
use pagemesh_bench::disk::rows::{ROWS, row_of};
use pagemesh_bench::disk::{DiskOptions, DiskTarget, TargetKind, run_disk};
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::report::Report;
use pagemesh_brick::file::Preallocation;
use pagemesh_brick::resource_limits;
use pagemesh_manage::wire::{CreateVolume, VolumeContent};
use pagemesh_manage::{LayoutKind, TierPolicy};
use rustix::fs::{OFlags, statvfs};
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// The smallest size of a target.
const SIZE_MIN: u64 = 128 << 20;
/// The largest.
const SIZE_MAX: u64 = 64 << 40;
/// Bytes of a pool beyond its volume, for its own structures and frames that are not freed yet.
const POOL_SPARE_BYTES: u64 = 128 << 20;
/// The part of the volume that is added to the same end.
const POOL_SPARE_DIVISOR: u64 = 8;
/// The cache of a pool is this part of its data, unless stated.
const CACHE_DIVISOR: u64 = 32;
/// The largest part: random reads must reach the disk.
const CACHE_DIVISOR_MIN: u64 = 8;
/// Bytes that stay free on the disk.
const FREE_BYTES_MIN: u64 = 1 << 30;
/// Most bytes of a volume that are verified.
const VERIFY_BYTES_MAX: u64 = 256 << 20;

/// A disk, raw and below pagemesh and other block servers on the same disk: fio on each, in turn.
///
/// The report has the bars that pools on a disk must reach, and whether they did.
#[derive(Args)]
pub struct DiskArgs {
    /// Directory on the disk. All data is kept in a new directory there, which is removed.
    #[arg(long)]
    pub dir: PathBuf,
    /// Bytes of each target, 128M to 64T. All targets need about twelve times as much room.
    #[arg(long, default_value = "2G")]
    pub size: Size,
    /// Cache of each pool, at least 16M and at most an eighth of --size, so that random reads reach the disk; by
    /// default a thirty-second, or 16M.
    #[arg(long)]
    pub cache: Option<MemoryBudget>,
    /// Number of rounds, 1 to 1000; results are medians over them. Fewer than 5 are for trials.
    #[arg(long, default_value_t = 5, value_parser = round_count_parser_from(1))]
    pub rounds: usize,
    /// Seconds of each measurement, up to an hour.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    pub seconds: u64,
    /// Targets beside the raw disk; by default all that are installed.
    #[arg(long, value_delimiter = ',', default_values_t = target_ids(), value_parser = PossibleValuesParser::new(target_ids()))]
    pub targets: Vec<String>,
    /// Rows of the report; by default all.
    #[arg(long, value_delimiter = ',', default_values_t = row_ids(), value_parser = PossibleValuesParser::new(row_ids()))]
    pub rows: Vec<String>,
    /// Block device to use as the raw disk in place of a file, such as a partition of the same disk.
    ///
    /// Data loss: the benchmark overwrites the first --size bytes of the device.
    #[arg(long, requires = "overwrite")]
    pub device: Option<PathBuf>,
    /// Image of a running Ceph cluster, with its data on the same disk. fio connects as
    /// client.admin.
    ///
    /// Data loss: the benchmark overwrites the first --size bytes of the image.
    #[arg(long, requires = "overwrite", value_name = "POOL/IMAGE")]
    pub rbd: Option<String>,
    /// Agree that the data of --device and --rbd is overwritten.
    #[arg(long)]
    pub overwrite: bool,
    /// Directory for raw results and plots.
    #[arg(long)]
    pub save: Option<PathBuf>,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

fn target_ids() -> Vec<String> {
    let beside = TargetKind::ALL.into_iter();
    let beside = beside.filter(|kind| *kind != TargetKind::Raw);
    beside.map(|kind| kind.id().to_owned()).collect()
}

fn row_ids() -> Vec<String> {
    ROWS.iter().map(|row| row.id.to_owned()).collect()
}

impl DiskArgs {
    fn has(&self, kind: TargetKind) -> bool {
        self.targets.iter().any(|id| id == kind.id())
    }

    fn budget(&self) -> MemoryBudget {
        let default = || MemoryBudget::at_least(self.size.0 / CACHE_DIVISOR);
        self.cache.unwrap_or_else(default)
    }

    fn cache_bytes(&self) -> u64 {
        self.budget().bytes() as u64
    }

    fn pool_bytes(&self) -> u64 {
        self.size.0 + self.size.0 / POOL_SPARE_DIVISOR + POOL_SPARE_BYTES
    }

    /// Bytes that all targets write to the disk.
    fn needed_bytes(&self) -> u64 {
        let pools = [(TargetKind::OneLeg, 1), (TargetKind::TwoLegs, 2)];
        let pools = pools.iter().filter(|(kind, _)| self.has(*kind));
        let pools: u64 = pools.map(|(_, count)| count).sum();
        let peers = [TargetKind::QemuQuorum, TargetKind::Glusterfs];
        let peers = peers.iter().filter(|kind| self.has(**kind)).count() as u64;
        self.pool_bytes() * pools + self.size.0 * (1 + 2 * peers) + FREE_BYTES_MIN
    }

    /// Refuses a directory or size that cannot be measured.
    fn check(&self) -> anyhow::Result<()> {
        let dir = self.dir.display();
        if !(SIZE_MIN..=SIZE_MAX).contains(&self.size.0) || !self.size.0.is_multiple_of(1 << 20) {
            bail!("--size {} is not 128M to 64T in whole MiB", self.size);
        }
        if self.cache_bytes() > self.size.0 / CACHE_DIVISOR_MIN {
            let most = Size(self.size.0 / CACHE_DIVISOR_MIN);
            bail!(
                "a cache of {} holds too much of {}: random reads would not reach the disk; use a \
                 --cache of at most {most}, or a larger --size",
                Size(self.cache_bytes()),
                self.size
            );
        }
        if resource_limits::is_memory(&self.dir) {
            bail!("{dir} is in memory; name a directory on a disk with --dir");
        }
        let space = statvfs(&self.dir)
            .map_err(io::Error::from)
            .with_context(|| format!("cannot use {dir}; name a directory on a disk with --dir"))?;
        let (free, needed) = (space.f_bavail * space.f_frsize, self.needed_bytes());
        if free < needed {
            bail!(
                "{dir} has room for {}, and the targets need {}; use a smaller --size, fewer \
                 --targets, or another --dir",
                output::bytes(free),
                output::bytes(needed)
            );
        }
        Ok(())
    }

    fn options(&self) -> DiskOptions {
        let rows = self.rows.iter().filter_map(|id| row_of(id));
        DiskOptions {
            rounds: self.rounds,
            runtime: Duration::from_secs(self.seconds),
            size_bytes: self.size.0,
            verify_bytes: VERIFY_BYTES_MAX.min(self.size.0),
            rows: rows.collect(),
            dir: self.dir.clone(),
        }
    }
}

/// Runs the benchmark.
pub fn run(args: &DiskArgs) -> anyhow::Result<Report> {
    args.check()?;
    let scratch = DiskScratch::new(&args.dir)?;
    let mut notes = Vec::new();
    let (raw, _device) = raw_target(args, &scratch)?;
    let mut targets = vec![raw];
    let mut volumes = Vec::new();
    for kind in [TargetKind::OneLeg, TargetKind::TwoLegs] {
        if args.has(kind) {
            let volume = ServedVolume::start(args, &scratch, kind)?;
            targets.push(volume.target()?);
            volumes.push(volume);
        }
    }
    for start in [start_quorum, start_glusterfs, start_rbd] {
        match start(args, &scratch)? {
            PeerStart::Started(target) => targets.push(*target),
            PeerStart::Unasked => {}
            PeerStart::Absent(reason) => notes.push(reason),
        }
    }
    let mut report = run_disk(&targets, &args.options())?;
    report.add_note(format!(
        "pools: O_DIRECT with a cache of {} for {} of data; NBD on a Unix socket",
        output::bytes(args.cache_bytes()),
        output::bytes(args.size.0)
    ));
    report.add_note("GlusterFS: the servers use the kernel's cache; its random reads need no disk");
    notes.into_iter().for_each(|note| report.add_note(note));
    Ok(report)
}

/// The directories of the benchmark.
struct DiskScratch {
    /// On the disk.
    data: TempDir,
    /// For sockets, whose paths must be short.
    sockets: TempDir,
}

impl DiskScratch {
    fn new(dir: &Path) -> anyhow::Result<DiskScratch> {
        let ending = Shutdown::listen(false)?;
        let named = || tempfile::Builder::new().prefix("pagemesh-disk-").to_owned();
        let data = named().tempdir_in(dir);
        let scratch = DiskScratch {
            data: data.with_context(|| format!("cannot make files in {}", dir.display()))?,
            sockets: named().tempdir()?,
        };
        remove_on_shutdown(ending, [scratch.data.path(), scratch.sockets.path()])?;
        Ok(scratch)
    }
}

/// The raw disk: a new file, or a device that nothing else uses. The caller keeps the returned device open until the
/// end of the run: meanwhile nothing can mount it.
fn raw_target(
    args: &DiskArgs,
    scratch: &DiskScratch,
) -> anyhow::Result<(DiskTarget, Option<File>)> {
    let (path, device) = match &args.device {
        Some(device) => (device.clone(), Some(open_device(device, args.size.0)?)),
        None => {
            let path = scratch.data.path().join("raw");
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .custom_flags(OFlags::DIRECT.bits() as i32)
                .open(&path)
                .with_context(|| {
                    format!(
                        "{} takes no requests past the cache (O_DIRECT); name a directory on a \
                         disk with --dir",
                        args.dir.display()
                    )
                })?;
            file.set_len(args.size.0)?;
            (path, None)
        }
    };
    Ok((DiskTarget::raw(&path), device))
}

/// Opens a device exclusively.
fn open_device(device: &Path, size_bytes: u64) -> anyhow::Result<File> {
    let named = device.display();
    let mut file = OpenOptions::new()
        .write(true)
        // Refused if the device is mounted: open(2).
        .custom_flags(OFlags::EXCL.bits() as i32)
        .open(device)
        .with_context(|| format!("cannot use {named}; is it mounted?"))?;
    if !file.metadata()?.file_type().is_block_device() {
        bail!("{named} is no block device; leave --device out to use a file");
    }
    let found = file.seek(SeekFrom::End(0))?;
    if found < size_bytes {
        bail!(
            "{named} has {}; use a --size of at most that",
            output::bytes(found)
        );
    }
    Ok(file)
}

/// A volume with its cluster and its export.
struct ServedVolume {
    kind: TargetKind,
    class: String,
    uri: String,
    // Dropped in this order.
    exporter: ChildDaemon,
    scratch: ScratchCluster,
}

impl ServedVolume {
    fn start(
        args: &DiskArgs,
        scratch: &DiskScratch,
        kind: TargetKind,
    ) -> anyhow::Result<ServedVolume> {
        let (bricks, layout) = match kind {
            TargetKind::TwoLegs => (2, LayoutKind::Mirror),
            _ => (1, LayoutKind::Concat),
        };
        let dir = TempDir::new_in(scratch.sockets.path())?;
        let pools = TempDir::new_in(scratch.data.path())?;
        let plan = ClusterPlan {
            dir: dir.path(),
            pools: pools.path(),
            bricks,
            mapped: bricks,
            size_bytes: args.pool_bytes(),
            sessions: None,
            // As the other targets, which are written once before.
            preallocation: Preallocation::Full,
            memory_budget: args.budget(),
            listen: "127.0.0.1:0",
        };
        let cluster = Cluster::start(&plan, &Shutdown::listen(false)?)?;
        let scratch = ScratchCluster {
            cluster,
            dir,
            pools,
        };
        let name: VolumeName = kind.id().parse()?;
        let sized = scratch.manager_client()?.create(&CreateVolume {
            name: name.clone(),
            size_bytes: args.size.0,
            layout,
            columns: None,
            copies: None,
            durability: None,
            content: VolumeContent::Blocks,
            tier: TierPolicy::Auto,
            received: false,
        })?;
        let (exporter, uri) = scratch.export(&name, "tcp")?;
        Ok(ServedVolume {
            kind,
            class: sized.volume.info.durability.to_string(),
            uri,
            exporter,
            scratch,
        })
    }

    fn target(&self) -> anyhow::Result<DiskTarget> {
        let mut pids = self.scratch.cluster.brick_pids();
        pids.push(self.exporter.0.id());
        Ok(DiskTarget::pagemesh(
            self.kind,
            &self.class,
            &self.uri,
            &pids,
        ))
    }
}

/// The start of another block server.
enum PeerStart {
    Started(Box<DiskTarget>),
    /// Not among the targets.
    Unasked,
    /// Not installed, or not usable here: a note for the report.
    Absent(String),
}

fn start_quorum(args: &DiskArgs, scratch: &DiskScratch) -> anyhow::Result<PeerStart> {
    if !args.has(TargetKind::QemuQuorum) {
        return Ok(PeerStart::Unasked);
    }
    let (data, sockets) = (scratch.data.path(), scratch.sockets.path());
    match DiskTarget::qemu_quorum(data, sockets, args.size.0) {
        Ok(target) => Ok(PeerStart::Started(Box::new(target))),
        Err(BenchError::Missing { program, package }) => Ok(PeerStart::Absent(format!(
            "QEMU quorum: not measured, {program} is not installed (apt-get install {package})"
        ))),
        Err(error) => Err(error.into()),
    }
}

fn start_glusterfs(args: &DiskArgs, scratch: &DiskScratch) -> anyhow::Result<PeerStart> {
    if !args.has(TargetKind::Glusterfs) {
        return Ok(PeerStart::Unasked);
    }
    let absent = |reason: &str| {
        Ok(PeerStart::Absent(format!(
            "GlusterFS: not measured, {reason}"
        )))
    };
    if !FilePeer::has_glusterfs() {
        return absent("it is not installed (scripts/setup glusterfs)");
    }
    if !is_root() {
        return absent("it needs root");
    }
    let dir = scratch.data.path().join("glusterfs");
    std::fs::create_dir(&dir)?;
    let peer = FilePeer::glusterfs_on_disk(&dir)?;
    // Its servers would write to directories that are being removed.
    kill_at_shutdown(peer.starter_pid());
    Ok(PeerStart::Started(Box::new(DiskTarget::glusterfs(peer))))
}

/// An image of a cluster that runs already: this benchmark sets up no Ceph.
fn start_rbd(args: &DiskArgs, _: &DiskScratch) -> anyhow::Result<PeerStart> {
    if !args.has(TargetKind::Rbd) {
        return Ok(PeerStart::Unasked);
    }
    let Some(named) = &args.rbd else {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let reason = match std::env::split_paths(&paths).any(|dir| dir.join("ceph").exists()) {
            true => "name an image of a running cluster with --rbd",
            false => "it is not installed",
        };
        return Ok(PeerStart::Absent(format!(
            "Ceph RBD: not measured, {reason}"
        )));
    };
    let Some((pool, image)) = named.split_once('/') else {
        bail!("--rbd {named} is not POOL/IMAGE, such as rbd/test");
    };
    Ok(PeerStart::Started(Box::new(DiskTarget::rbd(pool, image))))
}
