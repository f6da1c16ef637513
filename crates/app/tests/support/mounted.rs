//! File systems of a cluster, mounted through the kernel. For root with /dev/fuse.

use super::daemon::Daemon;
use super::skip::skip;
use super::{Cluster, PAGEMESH, Pools, program, switch, until};
use pagemesh_base::proc_maps::PRELOAD_OPEN_FLAG;
use rustix::mount::UnmountFlags;
use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const CLASSIC: &str = "classic";
pub const IO_URING: &str = "io-uring";

/// Opens files of a mount as the preload library does: the kernel caches nothing of them, and they
/// stay on the direct path.
pub fn as_library(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(LIBRARY_FLAGS.cast_signed())
}

/// The flags of such an open.
pub const LIBRARY_FLAGS: u32 = PRELOAD_OPEN_FLAG;

/// Each of these tests for both ways that requests come from the kernel.
#[macro_export]
macro_rules! by_both {
    ($($name:ident)*) => {
        mod classic {
            $(#[test]
            fn $name() {
                super::$name($crate::support::mounted::CLASSIC);
            })*
        }
        mod io_uring {
            $(#[test]
            fn $name() {
                if $crate::support::mounted::has_io_uring() {
                    super::$name($crate::support::mounted::IO_URING);
                }
            })*
        }
    };
}

/// Whether requests can come through io_uring; if not, that is said.
pub fn has_io_uring() -> bool {
    let is_there = switch::turn_on().is_some();
    if !is_there {
        skip("needs FUSE over io_uring, and root to switch it on");
    }
    is_there
}

/// A mounted file system; dropping it takes the mount away.
pub struct Mounted {
    pub dir: PathBuf,
    pub daemon: Option<Daemon>,
    fuse: &'static str,
    /// Dropped last: it comes back through the same.
    _switch: Option<switch::UringOnGuard>,
}

impl Mounted {
    pub fn try_new(
        cluster: &Cluster,
        name: &str,
        at: &str,
        transport: &str,
        fuse: &'static str,
    ) -> Result<Mounted, std::process::Output> {
        let switch = (fuse == IO_URING).then(|| switch::turn_on().expect("it was there"));
        let dir = cluster.dir().join(at);
        fs::create_dir_all(&dir).unwrap();
        let daemon = start(cluster, name, &dir, transport, fuse)?;
        Ok(Mounted {
            dir,
            daemon: Some(daemon),
            fuse,
            _switch: switch,
        })
    }

    pub fn new(cluster: &Cluster, name: &str, transport: &str) -> Mounted {
        Mounted::by(cluster, name, transport, CLASSIC)
    }

    /// Whose requests come so from the kernel.
    pub fn by(cluster: &Cluster, name: &str, transport: &str, fuse: &'static str) -> Mounted {
        Mounted::try_new(cluster, name, "mnt", transport, fuse)
            .unwrap_or_else(|ended| panic!("no mount: {ended:?}"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Kills its process, and takes away what is left of it.
    pub fn kill(mut self) {
        self.daemon.take().unwrap().kill();
    }

    /// Unmounts, and waits for the end of its process. A child that another test just starts has the
    /// descriptors of all tests until it executes its program.
    pub fn stop(self, cluster: &Cluster) {
        let args = ["umount", self.dir.to_str().unwrap()];
        until("no file is in use", || {
            let ended = cluster.run(&args);
            let said = String::from_utf8_lossy(&ended.stderr);
            let is_busy = said.contains("resource busy");
            assert!(ended.status.success() || is_busy, "{said}");
            ended.status.success()
        });
        self.await_end();
    }

    /// The same behind a program with io_uring that was killed: the kernel gives its files back
    /// when it comes to it.
    pub fn stop_once_free(self, cluster: &Cluster) {
        let args = ["umount", self.dir.to_str().unwrap()];
        until("no file is in use", || cluster.run(&args).status.success());
        self.await_end();
    }

    fn await_end(mut self) {
        let mut daemon = self.daemon.take().unwrap();
        assert!(daemon.await_end().success(), "{}", daemon.log());
    }

    pub fn sh(&self, script: &str) -> String {
        let script = format!("set -euo pipefail; cd {}\n{script}", self.dir.display());
        program::ok("bash", &["-c", &script])
    }
}

impl Mounted {
    /// Mounts again where it was, whatever became of its process.
    pub fn come_back(&mut self, cluster: &Cluster, name: &str, transport: &str) {
        drop(self.daemon.take());
        self.leave();
        let daemon = start(cluster, name, &self.dir, transport, self.fuse);
        self.daemon = Some(daemon.unwrap_or_else(|ended| panic!("no mount: {ended:?}")));
    }

    /// Takes the mount away, whatever became of its process.
    fn leave(&self) {
        // Nothing is there if it has ended well.
        let _ = rustix::mount::unmount(&self.dir, UnmountFlags::FORCE | UnmountFlags::DETACH);
    }
}

fn start(
    cluster: &Cluster,
    name: &str,
    dir: &Path,
    transport: &str,
    fuse: &str,
) -> Result<Daemon, std::process::Output> {
    let args = [
        "mount",
        name,
        dir.to_str().unwrap(),
        "--allow-other",
        "--transport",
        transport,
        "--fuse",
        fuse,
    ];
    let at = dir.file_name().unwrap().to_str().unwrap();
    cluster.try_daemon(&format!("mount-{at}"), &args, 1)
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // First the mount: then the process ends by itself.
        self.leave();
    }
}

/// Whether this can be tested; if not, that is said.
fn may_mount() -> bool {
    let may = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !may {
        skip("needs root and /dev/fuse");
    }
    may
}

/// A cluster with a file system; none, and said so, where nobody may mount.
pub fn cluster(pools_mib: &[u64], size: &str) -> Option<Cluster> {
    cluster_in(Pools::Memory, pools_mib, size)
}

/// The same with pools of this kind.
pub fn cluster_in(pools: Pools, pools_mib: &[u64], size: &str) -> Option<Cluster> {
    cluster_of(pools, pools_mib, pools_mib.len(), size)
}

/// The same, where only the first pools are as if on this machine.
pub fn followed_cluster(pools_mib: &[u64], near: usize, size: &str) -> Option<Cluster> {
    cluster_of(Pools::Memory, pools_mib, near, size)
}

fn cluster_of(pools: Pools, pools_mib: &[u64], near: usize, size: &str) -> Option<Cluster> {
    if !may_mount() {
        return None;
    }
    let cluster = Cluster::with_far_pools(pools, pools_mib, near);
    cluster.ok(&["fs", "create", "files", "--size", size]);
    Some(cluster)
}

/// The library of the direct path: beside this test, or in the directory above.
pub fn library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let found = own.ancestors().skip(1).take(2);
    let mut found = found.map(|dir| dir.join("libpagemesh_preload.so"));
    found
        .find(|path| path.exists())
        .expect("the library is built: cargo build -p pagemesh-preload")
}

/// A program on the direct path from its first call on, with its arguments; killed when it
/// takes too long.
pub fn directly(words: &[&str]) -> Command {
    let mut command = program::limited(PAGEMESH);
    command.args(exec()).args(words);
    command
}

/// What is said to `pagemesh` before such a program.
pub fn exec() -> [OsString; 6] {
    let library = library().into();
    let words = ["exec", "--patience", "0", "--library"].map(OsString::from);
    let [exec, patience, none, option] = words;
    [exec, patience, none, option, library, "--".into()]
}

/// Two copies on this machine, and one that follows over TCP.
pub fn followed() -> Option<(Cluster, Mounted)> {
    let cluster = followed_cluster(&[256, 256, 240], 2, "160M")?;
    let legs = cluster.json(&["volume", "show", "files"]).to_string();
    assert!(!legs.contains(&cluster.brick_id(2)), "{legs}");
    cluster.ok(&["replica", "attach", "files", "--mode", "async"]);
    let mount = Mounted::by(&cluster, "files", "auto", "auto");
    await_followed(&cluster);
    Some((cluster, mount))
}

/// Waits until it does.
pub fn await_followed(cluster: &Cluster) {
    until("the copy follows", || {
        let shown = cluster.json(&["volume", "show", "files"]).to_string();
        shown.contains("following")
    });
}

/// The machine with the mount and its copies is gone; what followed goes on.
pub fn promote(cluster: &mut Cluster, mount: Mounted) -> Mounted {
    mount.kill();
    cluster.kill_brick(0);
    cluster.kill_brick(1);
    cluster.ok(&["volume", "detach", "files"]);
    let promote = ["replica", "promote", "files", "--copy", "2"];
    until("the bricks count as dead", || {
        cluster.run(&promote).status.success()
    });
    Mounted::by(cluster, "files", "tcp", "auto")
}

/// A copy that followed has what it should.
pub fn check_followed(found: &[u8], expected: &[u8]) {
    const PAGE: usize = 4096;
    assert_eq!(found.len(), expected.len());
    let differs = found
        .chunks(PAGE)
        .zip(expected.chunks(PAGE))
        .position(|(one, other)| one != other);
    assert_eq!(differs, None, "a page of the copy that followed");
}
