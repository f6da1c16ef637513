//! Scratch file systems, each behind an NFS server of its own.

use super::NfsArgs;
use crate::commands::bench::scratch::{
    ChildDaemon, SPARE_BYTES, ScratchCluster, end_mount_at_shutdown,
};
use anyhow::Context;
use pagemesh_bench::nfs::setup::NfsTarget;
use std::net::SocketAddr;
use std::process::Command;

/// The part of a file system that a pool has for its versions.
const KEPT_DIVISOR: u64 = 2;

/// A cluster with room for some file systems.
pub(super) struct MeasuredServers {
    pub(super) scratch: ScratchCluster,
}

/// A file system and its server.
pub(super) struct ServedFs {
    pub(super) target: NfsTarget,
    _daemon: ChildDaemon,
}

impl MeasuredServers {
    pub(super) fn start(args: &NfsArgs, file_systems: u64) -> anyhow::Result<MeasuredServers> {
        let each = args.size.0 + args.size.0 / KEPT_DIVISOR;
        let bytes = file_systems * each + SPARE_BYTES;
        let copies = args.copies;
        let scratch = ScratchCluster::with_pools(&args.measure, copies, copies, bytes)?;
        Ok(MeasuredServers { scratch })
    }

    /// Makes a file system, and serves it.
    pub(super) fn serve(&self, name: &str, args: &NfsArgs) -> anyhow::Result<ServedFs> {
        let scratch = &self.scratch;
        let class = scratch.create_file_system(name, args.copies as usize, args.size.0)?;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["serve", "nfs", name, "--listen", "127.0.0.1:0"])
            .args(["--squash", "none", "--manager", &scratch.cluster.url])
            .arg("--key")
            .arg(scratch.dir.path().join("key"));
        let (daemon, url) = ChildDaemon::start(command)?;
        end_mount_at_shutdown(&daemon)?;
        let server = server_of(&url)
            .with_context(|| format!("the server is ready at {url}, which is no address"))?;
        let mut pids = scratch.cluster.brick_pids();
        pids.push(daemon.0.id());
        Ok(ServedFs {
            target: NfsTarget {
                name: name.to_owned(),
                class,
                server,
                mount_server: server,
                export: format!("/{name}"),
                pids,
            },
            _daemon: daemon,
        })
    }
}

/// The address in `nfs://ADDRESS/NAME`.
fn server_of(url: &str) -> Option<SocketAddr> {
    let rest = url.strip_prefix("nfs://")?;
    rest.split('/').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_taken_from_the_url() {
        let wanted = SocketAddr::from(([127, 0, 0, 1], 81));
        assert_eq!(server_of("nfs://127.0.0.1:81/a"), Some(wanted));
        assert_eq!(server_of("http://127.0.0.1:81/a"), None);
        assert_eq!(server_of("nfs://host/a"), None);
    }
}
