//! The pagemesh command: one binary for the manager, bricks, clients and
//! measurements.
//!
//! Each module is a command, or shared by several commands. Errors end here: `main` prints them
//! once, with their causes, and derives the exit code.

#![forbid(unsafe_code)]

mod args;
mod client;
mod client_file;
mod cluster;
mod commands;
mod config;
mod config_file;
mod fence_watch;
mod figure_reporter;
mod key;
mod memory_budget;
mod metrics_pages;
mod nfs_metrics;
mod output;
mod process_identity;
mod program;
#[cfg(test)]
mod reference;
mod service;
mod shutdown;
mod snapshot_cuts;
mod snapshot_path;
mod standby;
mod status_signals;
mod token_file;

use commands::{Verdict, exec, mount};
use std::io::IsTerminal;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = mount::helper::run_if_named() {
        return code;
    }
    let cli = config::parse_command_line();
    start_log();
    match commands::run(&cli.command) {
        Ok(Verdict::Done) => ExitCode::SUCCESS,
        Ok(Verdict::Damaged) => ExitCode::from(3),
        Ok(Verdict::Warned) => ExitCode::from(5),
        Err(error) => {
            eprintln!("error: {error:#}");
            exit_code(&error)
        }
    }
}

/// The exit code that tells programs the kind of the failure.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    if let Some(not_run) = error.downcast_ref::<exec::ExecError>() {
        return ExitCode::from(not_run.exit_code());
    }
    match error.is::<fence_watch::FencedError>() {
        true => ExitCode::from(fence_watch::EXIT_CODE),
        false => ExitCode::FAILURE,
    }
}

/// Logs go to standard error; `PAGEMESH_LOG` selects them, as `debug` or `pagemesh_volume=debug`.
fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("PAGEMESH_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        // It would report a failed write by `eprintln`, which panics: a full disk of logs ended requests.
        .log_internal_errors(false)
        .init();
}
