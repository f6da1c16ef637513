//! `pagemesh serve`: file systems behind network file servers.

mod exports;
mod fences;
mod idmap;
mod mounts;
mod nfs;
mod nfs_clients;
mod nfs_expiries;
mod nfs_reports;

use clap::Subcommand;

/// Serve file systems to other machines.
#[derive(Subcommand)]
pub enum ServeCommand {
    Nfs(nfs::NfsArgs),
}

/// Serves file systems until its shutdown.
pub fn run(command: &ServeCommand) -> anyhow::Result<()> {
    let ServeCommand::Nfs(args) = command;
    nfs::run(args)
}
