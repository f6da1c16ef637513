//! Small files on a mount with two copies, compared with ext4 and a tmpfs.

use crate::args::MeasureArgs;
use crate::commands::bench::files::{MountServing, MountSpec, is_root};
use crate::commands::bench::{SPARE_BYTES, ScratchCluster};
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::mirror::MountPlace;
use pagemesh_bench::report::Report;
use pagemesh_bench::small_files::{self, SmallFilesOptions};

/// Bytes of a file system: a page for each file, and room for removed files that are not freed yet.
const FILES_BYTES: u64 = 1 << 30;

pub fn run(
    measure: &MeasureArgs,
    options: &SmallFilesOptions,
    serving: MountServing,
) -> anyhow::Result<Report> {
    let wish = MountSpec {
        size_bytes: FILES_BYTES,
        serving,
    };
    let scratch = ScratchCluster::with_pools(measure, 2, 2, FILES_BYTES + SPARE_BYTES)?;
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
    let mut report = small_files::run_small_files(&[mirrored], &peers, options)?;
    report.add_note(format!(
        "the mount is served by {} threads, --fuse {}",
        serving.threads,
        serving.fuse.name()
    ));
    Ok(report)
}
