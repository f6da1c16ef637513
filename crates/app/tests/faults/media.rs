//! The file system below a pool runs out of room. A page that cannot be
//! allocated would be a SIGBUS in whoever writes to it; so a pool has all of
//! its pages before it is used.

use crate::load::Plan;
use crate::rig::Rig;
use crate::support::skip::skip;
use crate::support::{Cluster, MIB, Pools, program};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Tmpfs,
    Ext4,
}

/// Shuts a file system down without writing its log: what no sync made durable
/// is gone (FS_IOC_SHUTDOWN with FS_SHUTDOWN_FLAGS_NOLOGFLUSH).
const SHUTDOWN: &str = r#"
    open(my $at, "<", $ARGV[0]) or die "$ARGV[0]: $!";
    my $how = pack("L", 2);
    ioctl($at, 0x8004587d, $how) // die "$ARGV[0]: $!";
"#;

/// A small file system of its own; dropping it unmounts it.
pub struct FileSystem {
    dir: TempDir,
    /// What holds the image.
    image: TempDir,
}

impl FileSystem {
    /// None if this user may not mount, which is said.
    pub fn new(kind: Kind, mib: u64) -> Option<FileSystem> {
        let (dir, image) = (Pools::Memory.dir(), Pools::Disk.dir());
        let at = path(dir.path());
        let mounted = match kind {
            Kind::Tmpfs => {
                let size = format!("size={mib}m");
                program::run("mount", &["-t", "tmpfs", "-o", &size, "none", at])
            }
            Kind::Ext4 => {
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
        Some(FileSystem { dir, image })
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// From now on nothing more gets to the disk below.
    pub fn fail_power(&self) {
        program::ok("perl", &["-e", SHUTDOWN, path(self.dir.path())]);
    }

    /// The machine starts again: nobody has a file of it open.
    pub fn start_again(&mut self) {
        // A new image: a namespace of another test may keep the old one mounted.
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
        // What is left is less than a page, or belongs to root alone.
        let _ = filler.sync_all();
        name
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        program::run("umount", &[path(self.dir.path())]);
    }
}

fn path(path: &Path) -> &str {
    path.to_str().expect("a path")
}

/// Bricks go on, and come back, where nothing else can be written any more.
fn pools_on_a_full_file_system(kind: Kind, seed: u64) {
    let Some(system) = FileSystem::new(kind, 224) else {
        return;
    };
    let pools = tempfile::tempdir_in(system.dir()).expect("a directory");
    let cluster = Cluster::build(pools, &[80, 80], None);
    let mut rig = Rig::on(cluster, 48, &[], seed);
    system.fill();
    rig.serve("auto");
    let load = rig.load(&Plan {
        flush_every: Some(64),
        ..Plan::default()
    });
    load.await_answers(5000);
    rig.cluster.kill_brick(0);
    rig.cluster.restart_brick(0);
    load.await_answers(10_000);
    rig.export().await_state("healthy");
    load.finish().expect_good();
    rig.verify();
    rig.end_and_check();
    rig.verify_without_each(2, "auto");
}

#[test]
fn pools_on_a_full_tmpfs() {
    pools_on_a_full_file_system(Kind::Tmpfs, 0x31);
}

#[test]
fn pools_on_a_full_disk() {
    pools_on_a_full_file_system(Kind::Ext4, 0x32);
}

/// A pool that does not fit is not made, and leaves nothing.
fn a_pool_does_not_fit(kind: Kind) {
    let Some(system) = FileSystem::new(kind, 48) else {
        return;
    };
    let cluster = Cluster::new(Pools::Memory, 0);
    let pool = system.dir.path().join("pool");
    let create = ["pool", "create", path(&pool), "--size", "64M"];
    let said: &[&str] = match kind {
        // What a tmpfs has left is looked at before.
        Kind::Tmpfs => &["no room for", "are left by the size of the tmpfs"],
        Kind::Ext4 => &["cannot allocate", "No space left", "--size"],
    };
    cluster.refused(&create, said);
    cluster.refused(&create, &[path(&pool)]);
    assert!(!pool.exists(), "half a pool is left");
}

#[test]
fn a_pool_does_not_fit_on_a_tmpfs() {
    a_pool_does_not_fit(Kind::Tmpfs);
}

#[test]
fn a_pool_does_not_fit_on_a_disk() {
    a_pool_does_not_fit(Kind::Ext4);
}

/// A copy of a pool has holes where the pool had zeroes. They are allocated
/// before the brick serves it, or it does not.
fn a_sparse_copy(kind: Kind) {
    let Some(system) = FileSystem::new(kind, 64) else {
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
fn a_sparse_copy_on_a_tmpfs() {
    a_sparse_copy(Kind::Tmpfs);
}

#[test]
fn a_sparse_copy_on_a_disk() {
    a_sparse_copy(Kind::Ext4);
}
