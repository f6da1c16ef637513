//! File systems of a cluster, mounted through the kernel. For root with /dev/fuse.

use super::daemon::Daemon;
use super::skip::skip;
use super::{Cluster, Pools, program};
use rustix::mount::UnmountFlags;
use std::fs;
use std::path::{Path, PathBuf};

/// A mounted file system; dropping it takes the mount away.
pub struct Mounted {
    pub dir: PathBuf,
    pub daemon: Option<Daemon>,
}

impl Mounted {
    pub fn try_new(
        cluster: &Cluster,
        name: &str,
        at: &str,
        transport: &str,
    ) -> Result<Mounted, std::process::Output> {
        let dir = cluster.dir().join(at);
        fs::create_dir_all(&dir).unwrap();
        let daemon = start(cluster, name, &dir, transport)?;
        Ok(Mounted {
            dir,
            daemon: Some(daemon),
        })
    }

    pub fn new(cluster: &Cluster, name: &str, transport: &str) -> Mounted {
        Mounted::try_new(cluster, name, "mnt", transport)
            .unwrap_or_else(|ended| panic!("no mount: {ended:?}"))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Kills its process, and takes away what is left of it.
    pub fn kill(mut self) {
        self.daemon.take().unwrap().kill();
    }

    /// Unmounts, and waits for the end of its process.
    pub fn stop(mut self, cluster: &Cluster) {
        cluster.ok(&["umount", self.dir.to_str().unwrap()]);
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
        let daemon = start(cluster, name, &self.dir, transport);
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
) -> Result<Daemon, std::process::Output> {
    let args = [
        "mount",
        name,
        dir.to_str().unwrap(),
        "--allow-other",
        "--transport",
        transport,
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

/// A cluster with a file system; none, and said so, where nobody may mount.
pub fn cluster(pools_mib: &[u64], size: &str) -> Option<Cluster> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        skip("needs root and /dev/fuse");
        return None;
    }
    let cluster = Cluster::with_pools(Pools::Memory, pools_mib);
    cluster.ok(&["fs", "create", "files", "--size", size]);
    Some(cluster)
}
