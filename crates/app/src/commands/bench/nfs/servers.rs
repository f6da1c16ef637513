//! Scratch file systems, each behind an NFS server of its own.

use super::NfsArgs;
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::scratch::{
    ChildDaemon, SPARE_BYTES, ScratchCluster, end_mount_at_shutdown,
};
use crate::memory_budget::MemoryBudget;
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

/// The processes of one server.
pub(super) struct ServerDaemon(ChildDaemon);

/// A file system and its server.
pub(super) struct ServedFs {
    pub(super) target: NfsTarget,
    daemon: ServerDaemon,
}

/// Options of a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServeOptions {
    /// A fixed number of workers; none: by the load.
    pub(super) workers: Option<usize>,
    /// The transport to the bricks.
    pub(super) transport: &'static str,
}

impl Default for ServeOptions {
    fn default() -> ServeOptions {
        ServeOptions {
            workers: None,
            transport: "auto",
        }
    }
}

impl MeasuredServers {
    pub(super) fn start(args: &NfsArgs, file_systems: u64) -> anyhow::Result<MeasuredServers> {
        let bytes = file_systems * with_versions(args.size.0) + SPARE_BYTES;
        let copies = args.copies;
        let scratch = ScratchCluster::with_pools(&args.measure, copies, copies, bytes)?;
        Ok(MeasuredServers { scratch })
    }

    /// A cluster with bricks for this many file systems that share none.
    pub(super) fn start_apart(
        args: &NfsArgs,
        file_systems: u32,
    ) -> anyhow::Result<MeasuredServers> {
        let bytes = with_versions(args.size.0) + SPARE_BYTES;
        let bricks = args.copies * file_systems;
        let scratch = ScratchCluster::with_pools(&args.measure, bricks, bricks, bytes)?;
        Ok(MeasuredServers { scratch })
    }

    /// A cluster with pools on a disk and little memory for them.
    pub(super) fn start_on_disk(
        args: &NfsArgs,
        (size_bytes, file_systems): (u64, u64),
    ) -> anyhow::Result<MeasuredServers> {
        let measure = MeasureArgs {
            pools: args.disk_pools.clone(),
            ..args.measure.clone()
        };
        let bytes = file_systems * with_versions(size_bytes) + SPARE_BYTES;
        let budget = MemoryBudget::at_least(0);
        let bricks = (args.copies, 0);
        let scratch = ScratchCluster::with_budget(&measure, bricks, bytes, (None, budget))?;
        Ok(MeasuredServers { scratch })
    }

    /// Makes a file system, and serves it.
    pub(super) fn serve(&self, name: &str, args: &NfsArgs) -> anyhow::Result<ServedFs> {
        let class = self.create(name, (args.copies, args.size.0))?;
        self.serve_existing(name, &class)
    }

    fn serve_existing(&self, name: &str, class: &str) -> anyhow::Result<ServedFs> {
        let (mut targets, daemon) = self.start_server(&[(name, class)], ServeOptions::default())?;
        let target = targets.pop().context("the server has no export")?;
        Ok(ServedFs { target, daemon })
    }

    /// Ends the server of a file system, and starts another one.
    pub(super) fn restart(&self, served: ServedFs) -> anyhow::Result<ServedFs> {
        let NfsTarget { name, class, .. } = served.target;
        served.daemon.end();
        self.serve_existing(&name, &class)
    }

    /// Makes a file system, and returns its durability class.
    pub(super) fn create(
        &self,
        name: &str,
        (copies, size_bytes): (u32, u64),
    ) -> anyhow::Result<String> {
        let scratch = &self.scratch;
        scratch.create_file_system(name, copies as usize, size_bytes)
    }

    /// Serves file systems by one server. `names` are names and durability classes.
    pub(super) fn start_server(
        &self,
        names: &[(&str, &str)],
        options: ServeOptions,
    ) -> anyhow::Result<(Vec<NfsTarget>, ServerDaemon)> {
        let scratch = &self.scratch;
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["serve", "nfs"])
            .args(names.iter().map(|(name, _)| name))
            .args(["--listen", "127.0.0.1:0", "--no-rpcbind"])
            .args(["--transport", options.transport])
            .args(["--squash", "none", "--manager", &scratch.cluster.url])
            .arg("--key")
            .arg(scratch.dir.path().join("key"));
        if let Some(workers) = options.workers {
            command.args(["--workers", &workers.to_string()]);
        }
        let (daemon, url) = ChildDaemon::start(command)?;
        end_mount_at_shutdown(&daemon)?;
        let server = server_of(&url)
            .with_context(|| format!("the server is ready at {url}, which is no address"))?;
        let mut pids = scratch.cluster.brick_pids();
        pids.push(daemon.0.id());
        let target = |(name, class): &(&str, &str)| NfsTarget {
            name: (*name).to_owned(),
            class: (*class).to_owned(),
            server,
            mount_server: server,
            export: format!("/{name}"),
            pids: pids.clone(),
        };
        Ok((names.iter().map(target).collect(), ServerDaemon(daemon)))
    }

    /// The processes of the bricks of a file system.
    pub(super) fn bricks_of(&self, name: &str) -> anyhow::Result<Vec<u32>> {
        let client = self.scratch.manager_client()?;
        let volume = client.volume(&name.parse()?)?;
        let pids = self.scratch.cluster.brick_pids();
        let mut found = Vec::new();
        for brick in client.bricks()? {
            if !volume.bricks.contains_key(&brick.brick) {
                continue;
            }
            let number = brick.name.as_ref().map(ToString::to_string);
            let number = number.and_then(|name| name.strip_prefix("brick-")?.parse().ok());
            let pid = number.and_then(|number: usize| pids.get(number.checked_sub(1)?));
            found.push(*pid.context("a brick of the scratch cluster has another name")?);
        }
        Ok(found)
    }
}

impl ServerDaemon {
    /// Waits until the server has ended.
    pub(super) fn end(self) {
        drop(self.0);
    }
}

/// Bytes of a pool for a file system and its versions.
fn with_versions(size_bytes: u64) -> u64 {
    size_bytes + size_bytes / KEPT_DIVISOR
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
