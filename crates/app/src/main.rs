//! The pagemesh command: one binary for the manager, bricks, clients and
//! measurements.
//!
//! Each module is a command, or shared by several commands. Errors end here: `main` prints them
//! once, with their causes, and derives the exit code.

#![forbid(unsafe_code)]

mod args;
mod authority;
mod cluster;
mod commands;
mod fence_watch;
mod key;
mod output;
mod shutdown;
mod status_signals;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use commands::{
    bench, brick, down, exec, export, fs, manager, mount, pool, replica, status, umount, up, volume,
};
use std::io::IsTerminal;
use std::process::ExitCode;

/// The outcome of a command without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Success.
    Done,
    /// A check found differences or damage.
    Damaged,
}

fn main() -> ExitCode {
    if let Some(code) = mount::helper::run_if_named() {
        return code;
    }
    let cli = Cli::parse();
    start_log();
    match run(cli.command) {
        Ok(Verdict::Done) => ExitCode::SUCCESS,
        Ok(Verdict::Damaged) => ExitCode::from(3),
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
        .init();
}

fn run(command: Command) -> anyhow::Result<Verdict> {
    match command {
        Command::Up(up) => up::run(&up)?,
        Command::Down(down) => down::run(&down)?,
        Command::Pool(command) => return pool::run(&command),
        Command::Brick(brick) => match &brick.command {
            None => brick::serve::run(&brick)?,
            Some(command) => brick::list::run(command, &brick.client)?,
        },
        Command::Manager(manager) => manager::run(&manager)?,
        Command::Volume(command) => return volume::run(&command),
        Command::Replica(command) => replica::run(&command)?,
        Command::Export(command) => export::run(&command)?,
        Command::Fs(command) => fs::run(&command)?,
        Command::Mount(mount) => match &mount.command {
            None => mount::run(&mount)?,
            Some(command) => mount::status::run(command, mount.client.output)?,
        },
        Command::Umount { dir, lazy, force } => {
            let how = match (lazy, force) {
                (_, true) => umount::UnmountMode::Forced,
                (true, false) => umount::UnmountMode::Lazy,
                (false, false) => umount::UnmountMode::IfUnused,
            };
            umount::unmount(&dir, how)?;
        }
        Command::Exec(exec) => exec::run(&exec)?,
        Command::Status { client } => status::run(&client)?,
        Command::Bench(command) => bench::run(&command)?,
        Command::Man => print_man()?,
        Command::Completions { shell } => {
            let mut command = Cli::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command, "pagemesh", &mut script);
            output::print_text(&String::from_utf8_lossy(&script))?;
        }
    }
    Ok(Verdict::Done)
}

/// Prints the manual page of the command, followed by those of its subcommands.
fn print_man() -> anyhow::Result<()> {
    let mut pages = Vec::new();
    print_page(Cli::command(), &mut pages)?;
    output::print_text(&String::from_utf8_lossy(&pages))
}

fn print_page(command: clap::Command, out: &mut impl std::io::Write) -> anyhow::Result<()> {
    clap_mangen::Man::new(command.clone()).render(out)?;
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        let name = format!("{}-{}", command.get_name(), subcommand.get_name());
        print_page(subcommand.clone().name(name), out)?;
    }
    Ok(())
}
