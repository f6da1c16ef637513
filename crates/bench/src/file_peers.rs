//! File systems to compare with: GlusterFS with two copies, and ext4, plain and with synchronous
//! writes.
//!
//! Each runs in namespaces of its own, for mounts, processes and the network. Its mounts, addresses
//! and state are invisible outside, and memory covers the machine's own directories there. Its
//! first process ends with the [`FilePeer`], or with the thread that created it. The kernel then
//! ends all other processes, and removes the mounts and their memory. Files are reached through the
//! root directory of that first process, proc(5). Needs root.

use crate::error::BenchError;
use crate::mirror::MountPlace;
use crate::process::{self, ChildProcess, command_killed_with_thread};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

/// Time for daemons to start, find each other and mount.
const START_MAX: Duration = Duration::from_secs(60);
/// Time for the kernel to end a few processes and mounts.
const SHUTDOWN_MAX: Duration = Duration::from_secs(10);
/// Memory for logs and state if the files are on a disk.
const SMALL_FILES_BYTES: u64 = 64 << 20;
/// Directory of the files, inside the namespaces.
const FILES_DIR: &str = "mnt/files";

/// Common start of the scripts: reports the first process as seen from outside, then mounts a
/// `/proc` of the namespace. Output goes to standard error; `$1` is the size in bytes.
const SETUP_SCRIPT: &str = "
exec 3>&1 1>&2 4<&0 </dev/null
PATH=$PATH:/usr/sbin:/sbin
need() {
  command -v $1 >/dev/null || { echo \"$1 is not installed; apt-get install $2 provides it\"; exit 1; }
}
read -r pid rest </proc/self/stat
mount -t proc proc /proc
mount -t tmpfs -o mode=755,size=\"$1\" none /mnt
mkdir /mnt/files
";

/// Serves until its input ends.
const SERVE_SCRIPT: &str = "
echo \"ready $pid\" >&3
exec 3>&-
read -r line <&4 || true
";

/// Directories of two bricks in memory.
const MEMORY_BRICKS: &str = "
bricks=/mnt
";

/// Directories of two bricks on a disk: in the current directory, which a mount may have covered.
const DISK_BRICKS: &str = "
bricks=/mnt/disk
mkdir $bricks
mount --no-canonicalize --bind . $bricks
cd /
mkdir $bricks/one $bricks/two
";

/// Two bricks and a mount, set up by GlusterFS' own commands. GlusterFS refuses loopback
/// addresses, so the device gets another one.
const GLUSTERFS_SCRIPT: &str = "
need glusterd glusterfs-server
need glusterfs glusterfs-client
need ip iproute2
for dir in /run /var/lib/glusterd /var/log/glusterfs; do
  mkdir -p $dir
  mount -t tmpfs -o mode=755 none $dir
done
ip link set lo up
ip address add 192.0.2.1/32 dev lo
glusterd --log-level=WARNING
tries=0
until gluster --mode=script pool list >/dev/null 2>&1; do
  tries=$((tries + 1))
  [ $tries -lt 100 ] || { echo 'glusterd does not answer'; exit 1; }
  sleep 0.1
done
gluster --mode=script volume create files replica 2 192.0.2.1:$bricks/one 192.0.2.1:$bricks/two force
gluster --mode=script volume start files
glusterfs --log-level=WARNING --volfile-server=192.0.2.1 --volfile-id=files /mnt/files
tries=0
until [ \"$(stat -f -c %T /mnt/files)\" = fuseblk ] && : >/mnt/files/.there; do
  tries=$((tries + 1))
  [ $tries -lt 100 ] || { echo 'it does not mount'; exit 1; }
  sleep 0.1
done 2>/dev/null
rm /mnt/files/.there
";

/// ext4 on a loop device on a file in memory. The default would be one inode per 16 KiB only.
const EXT4_SCRIPT: &str = "
need mke2fs e2fsprogs
truncate -s \"$2\" /mnt/image
mke2fs -q -F -t ext4 -i 8192 -E lazy_itable_init=0,lazy_journal_init=0 /mnt/image
mount -o loop$EXT4_OPTIONS /mnt/image /mnt/files
";
/// With `sync` every change is on the device before a call returns, as on a mount of pagemesh,
/// without additional calls by the program.
const EXT4_SYNC_OPTIONS: &str = ",sync,max_batch_time=0";

/// A running file system; dropping it ends it.
pub struct FilePeer {
    name: &'static str,
    child: ChildProcess,
    /// Its first process.
    first_pid: u32,
}

impl FilePeer {
    /// GlusterFS with two copies in memory, for at most `size_bytes` bytes.
    ///
    /// # Errors
    /// If it is not installed or does not start.
    pub fn glusterfs(size_bytes: u64) -> Result<FilePeer, BenchError> {
        let script = format!("{MEMORY_BRICKS}{GLUSTERFS_SCRIPT}");
        FilePeer::start("GlusterFS", &script, 2 * size_bytes)
    }

    /// GlusterFS with two copies in an empty directory on a disk.
    ///
    /// # Errors
    /// If it is not installed or does not start.
    pub fn glusterfs_on_disk(dir: &Path) -> Result<FilePeer, BenchError> {
        let script = format!("{DISK_BRICKS}{GLUSTERFS_SCRIPT}");
        FilePeer::start_in(dir, "GlusterFS", &script, SMALL_FILES_BYTES)
    }

    /// Whether GlusterFS is installed.
    #[must_use]
    pub fn has_glusterfs() -> bool {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
        let mut dirs = std::env::split_paths(&paths).chain(usual);
        dirs.any(|dir| dir.join("glusterd").exists())
    }

    /// The process that started its first one. When it is killed, the others end.
    #[must_use]
    pub fn starter_pid(&self) -> u32 {
        self.child.pid()
    }

    /// ext4 on a loop device.
    ///
    /// # Errors
    /// If a tool is not installed, or the mount fails.
    pub fn ext4(size_bytes: u64) -> Result<FilePeer, BenchError> {
        let script = format!("EXT4_OPTIONS=\n{EXT4_SCRIPT}");
        FilePeer::start("ext4", &script, size_bytes)
    }

    /// As [`FilePeer::ext4`], mounted with `sync`.
    ///
    /// # Errors
    /// As [`FilePeer::ext4`].
    pub fn ext4_sync(size_bytes: u64) -> Result<FilePeer, BenchError> {
        let script = format!("EXT4_OPTIONS={EXT4_SYNC_OPTIONS}\n{EXT4_SCRIPT}");
        FilePeer::start("ext4, sync", &script, size_bytes)
    }

    fn start(name: &'static str, script: &str, size_bytes: u64) -> Result<FilePeer, BenchError> {
        FilePeer::start_in(Path::new("/"), name, script, size_bytes)
    }

    /// `dir` is the script's current directory.
    fn start_in(
        dir: &Path,
        name: &'static str,
        script: &str,
        size_bytes: u64,
    ) -> Result<FilePeer, BenchError> {
        process::require_program("unshare", "util-linux")?;
        let script = format!("set -eu\n{SETUP_SCRIPT}{script}{SERVE_SCRIPT}");
        let mut command = command_killed_with_thread("unshare");
        command
            .current_dir(dir)
            .args(["--mount", "--net", "--pid", "--fork", "--kill-child=KILL"])
            .args(["sh", "-c", &script, "sh"])
            // A little more than the requested size.
            .arg((size_bytes + size_bytes / 8).to_string())
            .arg(size_bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = ChildProcess::start(name, command)?;
        let line = child.read_line(START_MAX)?;
        let first = line.strip_prefix("ready ").and_then(|pid| pid.parse().ok());
        match first {
            Some(first) => Ok(FilePeer {
                name,
                child,
                first_pid: first,
            }),
            None => Err(child.program_error(&format!("it says {line}"))),
        }
    }

    /// The directory of its files.
    #[must_use]
    pub fn mount_place(&self) -> MountPlace {
        MountPlace {
            name: self.name.into(),
            class: "none".into(),
            dir: Path::new("/proc")
                .join(self.first_pid.to_string())
                .join("root")
                .join(FILES_DIR),
            pids: self.pids(),
            prefix: vec![],
        }
    }

    /// All processes of its namespace.
    fn pids(&self) -> Vec<u32> {
        let space = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
        let of_first: Option<PathBuf> = space(self.first_pid);
        let all = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|&pid| of_first.is_some() && space(pid) == of_first)
            .collect()
    }
}

impl Drop for FilePeer {
    /// Ends its first process, and with it all others; kills it if it does not end.
    fn drop(&mut self) {
        self.child.close_stdin();
        let _ = self.child.wait_for_end(SHUTDOWN_MAX);
    }
}

#[cfg(test)]
#[path = "../../brick/tests/support/skip.rs"]
mod skip;

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests that need root run only as root.
    #[test]
    fn dropped_peer_ends_all_its_processes() {
        if !rustix::process::geteuid().is_root() {
            return skip::skip("needs root");
        }
        let peer = FilePeer::start("tmpfs", "sleep 1000 & setsid sleep 1000 &\n", 1 << 20);
        let peer = peer.expect("started");
        let place = peer.mount_place();
        fs::write(place.dir.join("file"), b"there").expect("written");
        assert!(!Path::new("/mnt/files/file").exists());
        assert_eq!(place.pids.len(), 3, "{:?}", place.pids);
        drop(peer);
        for pid in place.pids {
            assert_eq!(process::process_cpu(pid), None);
        }
        assert!(!place.dir.exists());
    }

    #[test]
    fn failed_start_quotes_program_output() {
        if !rustix::process::geteuid().is_root() {
            return skip::skip("needs root");
        }
        let started = FilePeer::start("it", "echo broken; exit 3\n", 1 << 20);
        let text = started.err().expect("not started").to_string();
        assert!(text.contains("broken"), "{text}");
    }
}
