//! File systems of a cluster, mounted through the kernel. Needs root and /dev/fuse.

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

/// Opens files of a mount as the preload library does: the kernel does not cache them, and they
/// stay on the direct path.
pub fn open_as_library(options: &mut OpenOptions) -> &mut OpenOptions {
    options.custom_flags(LIBRARY_FLAGS.cast_signed())
}

/// The flags of such an open.
pub const LIBRARY_FLAGS: u32 = PRELOAD_OPEN_FLAG;

/// Makes each of these tests for both FUSE transports.
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

/// Whether requests can come through io_uring; prints a note if not.
pub fn has_io_uring() -> bool {
    let is_there = switch::turn_on().is_some();
    if !is_there {
        skip("needs FUSE over io_uring, and root to switch it on");
    }
    is_there
}

/// Unmounts a directory. A child that another test has just forked holds the descriptors of all tests until it executes
/// its program, and the kernel releases the files of a killed program with io_uring asynchronously.
pub fn unmount(cluster: &Cluster, dir: &Path) {
    let args = ["umount", dir.to_str().unwrap()];
    until("no file is in use", || {
        let ended = cluster.run(&args);
        let said = String::from_utf8_lossy(&ended.stderr);
        let is_busy = said.contains("resource busy");
        // Another test has just made a mount namespace, which has every mount until it ends.
        let is_shared = said.contains("other mount namespaces have it still");
        assert!(ended.status.success() || is_busy || is_shared, "{said}");
        ended.status.success() || is_shared
    });
}

/// A mounted file system; dropping it unmounts it.
pub struct TestMount {
    pub dir: PathBuf,
    pub daemon: Option<Daemon>,
    fuse: &'static str,
    /// Dropped last: the switch restores the setting.
    _switch: Option<switch::UringOnGuard>,
}

impl TestMount {
    pub fn try_new(
        cluster: &Cluster,
        name: &str,
        at: &str,
        transport: &str,
        fuse: &'static str,
    ) -> Result<TestMount, std::process::Output> {
        TestMount::try_with_options(cluster, name, at, (transport, fuse), &[])
    }

    /// Takes the file system over from the process that has mounted it.
    pub fn by_force(
        cluster: &Cluster,
        name: &str,
        at: &str,
        transport: &str,
        fuse: &'static str,
    ) -> TestMount {
        let how = (transport, fuse);
        TestMount::try_with_options(cluster, name, at, how, &["--force"])
            .unwrap_or_else(|ended| panic!("no mount: {ended:?}"))
    }

    /// Mounts with further options.
    pub fn try_with_options(
        cluster: &Cluster,
        name: &str,
        at: &str,
        (transport, fuse): (&str, &'static str),
        options: &[&str],
    ) -> Result<TestMount, std::process::Output> {
        let switch = (fuse == IO_URING).then(|| switch::turn_on().expect("it was there"));
        let dir = cluster.dir().join(at);
        fs::create_dir_all(&dir).unwrap();
        let daemon = start_mount(cluster, name, &dir, (transport, fuse), options)?;
        Ok(TestMount {
            dir,
            daemon: Some(daemon),
            fuse,
            _switch: switch,
        })
    }

    pub fn new(cluster: &Cluster, name: &str, transport: &str) -> TestMount {
        TestMount::with_fuse(cluster, name, transport, CLASSIC)
    }

    /// Mounts with this FUSE transport.
    pub fn with_fuse(
        cluster: &Cluster,
        name: &str,
        transport: &str,
        fuse: &'static str,
    ) -> TestMount {
        TestMount::try_new(cluster, name, "mnt", transport, fuse)
            .unwrap_or_else(|ended| panic!("no mount: {ended:?}"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Kills its process, and removes the rest of the mount.
    pub fn kill(mut self) {
        self.daemon.take().unwrap().kill();
    }

    /// Unmounts, and waits for the end of the process.
    pub fn stop(self, cluster: &Cluster) {
        unmount(cluster, &self.dir);
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

impl TestMount {
    /// Mounts again in the same directory, whether its process has ended or not.
    pub fn remount(&mut self, cluster: &Cluster, name: &str, transport: &str) {
        drop(self.daemon.take());
        self.detach();
        let daemon = start_mount(cluster, name, &self.dir, (transport, self.fuse), &[]);
        self.daemon = Some(daemon.unwrap_or_else(|ended| panic!("no mount: {ended:?}")));
    }

    /// Detaches the mount, whether its process has ended or not.
    fn detach(&self) {
        // There is no mount if it has ended normally.
        let _ = rustix::mount::unmount(&self.dir, UnmountFlags::FORCE | UnmountFlags::DETACH);
    }
}

fn start_mount(
    cluster: &Cluster,
    name: &str,
    dir: &Path,
    (transport, fuse): (&str, &str),
    options: &[&str],
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
    let args = [&args, options].concat();
    cluster.try_daemon(&format!("mount-{at}"), &args, 1)
}

impl Drop for TestMount {
    fn drop(&mut self) {
        // The mount goes first: then the process ends by itself.
        self.detach();
    }
}

/// Whether this user may mount; prints a note if not.
pub fn may_mount() -> bool {
    let may = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !may {
        skip("needs root and /dev/fuse");
    }
    may
}

/// A cluster with a file system; `None` and a note if this user may not mount.
pub fn cluster(pools_mib: &[u64], size: &str) -> Option<Cluster> {
    cluster_with_medium(Pools::Memory, pools_mib, size)
}

/// The same with pools of this kind.
pub fn cluster_with_medium(pools: Pools, pools_mib: &[u64], size: &str) -> Option<Cluster> {
    build_cluster(pools, pools_mib, pools_mib.len(), size)
}

/// The same, and only the first `near` pools count as on this machine.
pub fn cluster_with_far_pools(pools_mib: &[u64], near: usize, size: &str) -> Option<Cluster> {
    build_cluster(Pools::Memory, pools_mib, near, size)
}

fn build_cluster(pools: Pools, pools_mib: &[u64], near: usize, size: &str) -> Option<Cluster> {
    if !may_mount() {
        return None;
    }
    let cluster = Cluster::with_far_pools(pools, pools_mib, near);
    cluster.ok(&["fs", "create", "files", "--size", size]);
    Some(cluster)
}

/// The library of the direct path: in the directory of this test, or in its parent.
pub fn preload_library() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let found = own.ancestors().skip(1).take(2);
    let mut found = found.map(|dir| dir.join("libpagemesh_preload.so"));
    found
        .find(|path| path.exists())
        .expect("the library is built: cargo build -p pagemesh-preload")
}

/// A program with its arguments, on the direct path from its first call on. It is killed when it
/// takes too long.
pub fn direct_command(words: &[&str]) -> Command {
    let mut command = program::limited(PAGEMESH);
    command.args(exec_args()).args(words);
    command
}

/// The arguments of `pagemesh` before such a program.
pub fn exec_args() -> [OsString; 6] {
    let library = preload_library().into();
    let words = ["exec", "--patience", "0", "--library"].map(OsString::from);
    let [exec, patience, none, option] = words;
    [exec, patience, none, option, library, "--".into()]
}

/// Two copies on this machine, and an asynchronous replica over TCP.
pub fn mount_with_async_replica() -> Option<(Cluster, TestMount)> {
    let cluster = cluster_with_far_pools(&[256, 256, 240], 2, "160M")?;
    let legs = cluster.json(&["volume", "show", "files"]).to_string();
    assert!(!legs.contains(&cluster.brick_id(2)), "{legs}");
    cluster.ok(&["replica", "attach", "files", "--mode", "async"]);
    let mount = TestMount::with_fuse(&cluster, "files", "auto", "auto");
    await_async_replica(&cluster);
    Some((cluster, mount))
}

/// Waits until the replica is up to date.
pub fn await_async_replica(cluster: &Cluster) {
    until("the copy follows", || {
        let shown = cluster.json(&["volume", "show", "files"]).to_string();
        shown.contains(r#""state":"following""#)
    });
}

/// Kills the machine with the mount and its copies, and promotes the asynchronous replica.
pub fn promote_async_replica(cluster: &mut Cluster, mount: TestMount) -> TestMount {
    mount.kill();
    cluster.kill_brick(0);
    cluster.kill_brick(1);
    cluster.ok(&["volume", "detach", "files"]);
    let promote = ["replica", "promote", "files", "--copy", "2"];
    until("the bricks count as dead", || {
        cluster.run(&promote).status.success()
    });
    TestMount::with_fuse(cluster, "files", "tcp", "auto")
}

/// Asserts that an asynchronous replica has the expected contents.
pub fn check_async_replica(found: &[u8], expected: &[u8]) {
    const PAGE: usize = 4096;
    assert_eq!(found.len(), expected.len());
    let differs = found
        .chunks(PAGE)
        .zip(expected.chunks(PAGE))
        .position(|(one, other)| one != other);
    assert_eq!(differs, None, "a page of the copy that followed");
}
