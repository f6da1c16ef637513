//! `nfs-conformance`: runs the cases of RFC 1813 against a server.

use anyhow::{Context, bail};
use clap::{Parser, ValueEnum};
use pagemesh_nfs_conformance::{ExpectedFailures, Problem, ServerUnderTest, all, run};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Runs cases of RFC 1813 against an NFSv3 server.
///
/// The exit code is 0 if all cases pass, are skipped, or fail as expected; 1 if a case fails; 2 if
/// the server cannot be reached.
#[derive(Parser)]
#[command(name = "nfs-conformance")]
struct Arguments {
    /// The host of the server
    #[arg(long, default_value = "127.0.0.1")]
    server: String,
    /// The TCP port of NFS
    #[arg(long, default_value_t = 2049)]
    port: u16,
    /// The TCP port of MOUNT; the port of NFS if absent
    #[arg(long)]
    mount_port: Option<u16>,
    /// The path of an export that the owner may change
    #[arg(long)]
    export: String,
    /// Only cases with this text in their names
    #[arg(long, default_value = "")]
    only: String,
    /// The user that owns all files of the cases
    #[arg(long, default_value_t = 1000)]
    uid: u32,
    /// The group of all files of the cases
    #[arg(long, default_value_t = 100)]
    gid: u32,
    /// The export does not squash user 0
    #[arg(long)]
    trusts_root: bool,
    /// The number of connections that send half a call at once
    #[arg(long, default_value_t = 200)]
    half_open: usize,
    /// Seconds to wait for each reply
    #[arg(long, default_value_t = 20)]
    limit_seconds: u64,
    /// A file of expected failures: a name and a reason in each line
    #[arg(long)]
    expected: Option<PathBuf>,
    /// The format of the result
    #[arg(long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Print the names of all cases instead
    #[arg(long)]
    list: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
}

impl Arguments {
    fn address(&self, port: u16) -> anyhow::Result<SocketAddr> {
        let addresses = (self.server.as_str(), port).to_socket_addrs();
        let mut addresses = addresses.with_context(|| format!("cannot find {}", self.server))?;
        addresses
            .next()
            .with_context(|| format!("{} has no address", self.server))
    }

    fn server(&self) -> anyhow::Result<ServerUnderTest> {
        Ok(ServerUnderTest {
            nfs: self.address(self.port)?,
            mount: self.address(self.mount_port.unwrap_or(self.port))?,
            path: self.export.clone(),
            uid: self.uid,
            gid: self.gid,
            trusts_root: self.trusts_root,
            half_open: self.half_open,
            limit: Duration::from_secs(self.limit_seconds),
        })
    }

    fn expected(&self) -> anyhow::Result<ExpectedFailures> {
        let Some(path) = &self.expected else {
            return Ok(ExpectedFailures::default());
        };
        let text = std::fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        match ExpectedFailures::parse(&text) {
            Ok(list) => Ok(list),
            Err(line) => bail!("{}:{line}: add a reason after the name", path.display()),
        }
    }
}

fn report(arguments: &Arguments) -> anyhow::Result<bool> {
    let result = run(
        &arguments.server()?,
        &arguments.only,
        &arguments.expected()?,
    );
    let report = match result {
        Ok(report) => report,
        Err(Problem::Wrong(reason) | Problem::Skipped(reason)) => {
            bail!("cannot prepare a case: {reason}; check the address, the path and its owner")
        }
    };
    match arguments.output {
        Output::Table => print!("{}", report.table()),
        Output::Json => println!("{}", serde_json::to_string_pretty(&report)?),
    }
    Ok(report.failures().next().is_none())
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for case in all() {
            println!("{}", case.name);
        }
        return ExitCode::SUCCESS;
    }
    match report(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("nfs-conformance: {error:#}");
            ExitCode::from(2)
        }
    }
}
