//! Small files on a mount with two copies, compared with ext4 and a tmpfs.

use crate::args::{FuseTransport, thread_count_parser};
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{MountServing, MountSpec, is_root};
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster};
use clap::Args;
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::mirror::MountPlace;
use pagemesh_bench::report::Report;
use pagemesh_bench::small_files::{self, SmallFilesOptions};

/// Bytes of a file system: a page for each file, and room for removed files that are not freed yet.
const FILES_BYTES: u64 = 1 << 30;

/// Creation, reading and removal of small files by one program on a mount with two copies, and
/// `rm -rf`, compared with a tmpfs and, as root, ext4.
#[derive(Args)]
pub struct SmallFilesArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Number of files.
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub files: u64,
    /// Number of entries that `rm -rf` removes; 0 skips that part.
    #[arg(long, default_value_t = 70_000, value_parser = clap::value_parser!(u64).range(0..=100_000))]
    pub entries: u64,
    /// Number of server threads of the mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
    /// Transport of FUSE requests from the kernel.
    #[arg(long, value_enum, default_value = "auto")]
    pub fuse: FuseTransport,
}

/// Runs the benchmark.
pub fn run(args: &SmallFilesArgs) -> anyhow::Result<Report> {
    let options = SmallFilesOptions {
        rounds: args.measure.rounds,
        files: args.files,
        entries: args.entries,
    };
    let serving = MountServing {
        threads: args.threads,
        fuse: args.fuse,
        direct_io: false,
        commit_interval: None,
    };
    let wish = MountSpec {
        size_bytes: FILES_BYTES,
        serving,
    };
    let scratch = ScratchCluster::with_pools(&args.measure, 2, 2, FILES_BYTES + SPARE_BYTES)?;
    let (_daemon, mirrored) = scratch.mount("map", 2, "map", &wish)?;
    let memory = tempfile::tempdir_in(scratch.pools.path())?;
    let tmpfs = MountPlace::unserved("tmpfs", memory.path());
    let ext4 = match is_root() {
        true => Some(FilePeer::ext4(FILES_BYTES)?),
        false => {
            eprintln!("ext4 is left out: it needs root");
            None
        }
    };
    let mut peers: Vec<MountPlace> = ext4.iter().map(FilePeer::mount_place).collect();
    peers.push(tmpfs);
    let mut report = small_files::run_small_files(&[mirrored], &peers, &options)?;
    report.add_note(format!(
        "the mount is served by {} threads, --fuse {}",
        serving.threads,
        serving.fuse.name()
    ));
    Ok(report)
}
