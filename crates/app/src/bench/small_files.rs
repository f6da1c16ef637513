//! Small files on a mount of two copies, beside ext4 and a tmpfs.

use crate::args::Measure;
use crate::bench::files::{Serving, Wish, is_root};
use crate::bench::{ROOM_BYTES, Scratch};
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::mirror::MountPlace;
use pagemesh_bench::report::Report;
use pagemesh_bench::small_files::{self, SmallFilesOptions};

/// Bytes of a file system: of a page for each file, and of what was removed and is not yet
/// freed.
const FILES_BYTES: u64 = 1 << 30;

pub fn run(
    measure: &Measure,
    options: &SmallFilesOptions,
    serving: Serving,
) -> anyhow::Result<Report> {
    let wish = Wish {
        size_bytes: FILES_BYTES,
        serving,
    };
    let scratch = Scratch::sized(measure, 2, 2, FILES_BYTES + ROOM_BYTES)?;
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
