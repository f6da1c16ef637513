//! The file system below a pool runs out of room. A page that cannot be allocated would cause a
//! SIGBUS in the writing process. So a pool allocates all of its pages before use.

use crate::faults::load::LoadPlan;
use crate::faults::rig::VolumeRig;
use crate::support::skip::skip;
use crate::support::{Cluster, MIB, Pools, program};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

#[derive(Clone, Copy, Debug)]
pub enum FileSystemKind {
    Tmpfs,
    Ext4,
}

/// Shuts a file system down without a write of its log: unsynced data is lost (FS_IOC_SHUTDOWN with
/// FS_SHUTDOWN_FLAGS_NOLOGFLUSH).
const SHUTDOWN: &str = r#"
    open(my $at, "<", $ARGV[0]) or die "$ARGV[0]: $!";
    my $how = pack("L", 2);
    ioctl($at, 0x8004587d, $how) // die "$ARGV[0]: $!";
"#;

/// A small file system of its own; dropping it unmounts it.
pub struct TestFileSystem {
    dir: TempDir,
    /// The directory of the image.
    image: TempDir,
}

impl TestFileSystem {
    /// Returns `None` and prints a note if this user may not mount.
    pub fn new(kind: FileSystemKind, mib: u64) -> Option<TestFileSystem> {
        let (dir, image) = (Pools::Memory.dir(), Pools::Disk.dir());
        let at = path(dir.path());
        let mounted = match kind {
            FileSystemKind::Tmpfs => {
                let size = format!("size={mib}m");
                program::run("mount", &["-t", "tmpfs", "-o", &size, "none", at])
            }
            FileSystemKind::Ext4 => {
                let file = image.path().join("image");
                let size = format!("{mib}M");
                program::ok("mke2fs", &["-q", "-t", "ext4", path(&file), &size]);
                program::run("mount", &["-o", "loop", path(&file), at])
            }
        };
        if !mounted.status.success() {
            let cause = String::from_utf8_lossy(&mounted.stderr);
            skip(&format!("needs root to mount: {cause}"));
            return None;
        }
        Some(TestFileSystem { dir, image })
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// From now on no write reaches the disk below.
    pub fn fail_power(&self) {
        program::ok("perl", &["-e", SHUTDOWN, path(self.dir.path())]);
    }

    /// The machine starts again: no process has a file of it open.
    pub fn remount(&mut self) {
        // A new image, since a namespace of another test may keep the old one mounted.
        let next = Pools::Disk.dir();
        let [old, image] = [&self.image, &next].map(|dir| dir.path().join("image"));
        program::ok("cp", &["--sparse=always", path(&old), path(&image)]);
        let at = path(self.dir.path());
        program::ok("umount", &[at]);
        program::ok("mount", &["-o", "loop", path(&image), at]);
        self.image = next;
    }

    /// A file that takes all the room that is left.
    fn fill(&self) -> PathBuf {
        let name = self.dir.path().join("filler");
        let mut filler = std::fs::File::create(&name).expect("a file");
        let mut chunk = vec![0x5a; MIB as usize];
        while !chunk.is_empty() {
            if filler.write_all(&chunk).is_err() {
                chunk.truncate(chunk.len() / 2);
            }
        }
        // The rest is less than a page, or is reserved for root.
        let _ = filler.sync_all();
        name
    }
}

impl Drop for TestFileSystem {
    fn drop(&mut self) {
        program::run("umount", &[path(self.dir.path())]);
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path")
}

/// Bricks keep running, and restart, where no other file can be written any more.
fn check_full_file_system(kind: FileSystemKind, seed: u64) {
    let Some(system) = TestFileSystem::new(kind, 224) else {
        return;
    };
    let pools = tempfile::tempdir_in(system.dir()).expect("a directory");
    let cluster = Cluster::build(pools, &[80, 80], None);
    let mut rig = VolumeRig::on(cluster, 48, &[], seed);
    system.fill();
    rig.serve("auto");
    let load = rig.load(&LoadPlan {
        flush_every: Some(64),
        ..LoadPlan::default()
    });
    load.await_answers(5000);
    rig.cluster.kill_brick(0);
    rig.cluster.restart_brick(0);
    load.await_answers(10_000);
    rig.export().await_state("healthy");
    load.finish().assert_success();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "auto");
}

#[test]
fn pools_work_on_full_tmpfs() {
    check_full_file_system(FileSystemKind::Tmpfs, 0x31);
}

#[test]
fn pools_work_on_full_disk() {
    check_full_file_system(FileSystemKind::Ext4, 0x32);
}

/// A pool that does not fit is not made, and no part of it remains.
fn check_pool_too_large(kind: FileSystemKind) {
    let Some(system) = TestFileSystem::new(kind, 48) else {
        return;
    };
    let cluster = Cluster::new(Pools::Memory, 0);
    let pool = system.dir.path().join("pool");
    let create = ["pool", "create", path(&pool), "--size", "64M"];
    let said: &[&str] = match kind {
        // For a tmpfs the program checks the free room first.
        FileSystemKind::Tmpfs => &["no room for", "are left by the size of the tmpfs"],
        FileSystemKind::Ext4 => &["cannot allocate", "No space left", "--size"],
    };
    cluster.refused(&create, said);
    cluster.refused(&create, &[path(&pool)]);
    assert!(!pool.exists(), "half a pool is left");
}

#[test]
fn pool_too_large_for_tmpfs_is_not_created() {
    check_pool_too_large(FileSystemKind::Tmpfs);
}

#[test]
fn pool_too_large_for_disk_is_not_created() {
    check_pool_too_large(FileSystemKind::Ext4);
}

/// A copy of a pool has holes where the pool had zeroes. The brick allocates them before it serves
/// the pool, or it refuses to start.
fn check_sparse_copy(kind: FileSystemKind) {
    let Some(system) = TestFileSystem::new(kind, 64) else {
        return;
    };
    let cluster = Cluster::new(Pools::Memory, 1);
    let whole = cluster.dir().join("whole");
    cluster.ok(&["pool", "create", path(&whole), "--size", "32M"]);
    let copy = system.dir.path().join("copy");
    program::ok("cp", &["--sparse=always", path(&whole), path(&copy)]);
    let allocated = || copy.metadata().expect("a file").blocks() * 512;
    assert!(allocated() < 8 * MIB, "it has no holes");
    let filler = system.fill();
    let start = || cluster.try_daemon("copy", &["brick", "--pool", path(&copy)], 1);
    let refused = start().err().expect("a brick on a sparse pool");
    program::refused("brick", &refused, &["has holes", path(&copy), "make room"]);
    assert!(allocated() < 8 * MIB, "a part was taken");
    std::fs::remove_file(filler).expect("removed");
    let brick = start().expect("there is room");
    assert!(allocated() >= 32 * MIB, "it has holes");
    brick.stop();
}

#[test]
fn sparse_pool_on_tmpfs_is_allocated_or_refused() {
    check_sparse_copy(FileSystemKind::Tmpfs);
}

#[test]
fn sparse_pool_on_disk_is_allocated_or_refused() {
    check_sparse_copy(FileSystemKind::Ext4);
}
