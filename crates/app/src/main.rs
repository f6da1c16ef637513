//! The pagemesh command: one binary for the manager, bricks, clients and
//! measurements.
//!
//! Each module is a command, or what several of them need. Errors end here:
//! they are printed once, with their causes, and decide the exit code.

#![forbid(unsafe_code)]

mod args;
mod asked;
mod authority;
mod bench;
mod brick;
mod bricks;
mod clients;
mod cluster;
mod cluster_dir;
mod down;
mod ending;
mod exec;
mod export;
mod fenced;
mod files;
mod helper;
mod key;
mod manager;
mod mount;
mod mounts;
mod output;
mod pool;
mod pool_check;
mod replica;
mod status;
mod unmount;
mod up;
mod volume;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use std::io::IsTerminal;
use std::process::ExitCode;

/// What a command ended with, other than an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Done.
    Done,
    /// A check found differences or damage.
    Differs,
}

fn main() -> ExitCode {
    if let Some(code) = helper::run_if_named() {
        return code;
    }
    let cli = Cli::parse();
    start_log();
    match run(cli.command) {
        Ok(Verdict::Done) => ExitCode::SUCCESS,
        Ok(Verdict::Differs) => ExitCode::from(3),
        Err(error) => {
            eprintln!("error: {error:#}");
            exit_code(&error)
        }
    }
}

/// The exit code that tells programs what kind of failure it was.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    if let Some(not_run) = error.downcast_ref::<exec::NotRun>() {
        return ExitCode::from(not_run.exit_code());
    }
    match error.is::<fenced::TakenOver>() {
        true => ExitCode::from(fenced::EXIT_CODE),
        false => ExitCode::FAILURE,
    }
}

/// Logs go to standard error; `PAGEMESH_LOG` chooses what, as `debug` or
/// `pagemesh_volume=debug`.
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
            None => brick::run(&brick)?,
            Some(command) => bricks::run(command, &brick.client)?,
        },
        Command::Manager(manager) => manager::run(&manager)?,
        Command::Volume(command) => return volume::run(&command),
        Command::Replica(command) => replica::run(&command)?,
        Command::Export(command) => export::run(&command)?,
        Command::Fs(command) => files::run(&command)?,
        Command::Mount(mount) => match &mount.command {
            None => mount::run(&mount)?,
            Some(command) => clients::run(command, mount.client.output)?,
        },
        Command::Umount { dir, lazy, force } => {
            let how = match (lazy, force) {
                (_, true) => unmount::How::ByForce,
                (true, false) => unmount::How::Lazily,
                (false, false) => unmount::How::Idle,
            };
            unmount::unmount(&dir, how)?;
        }
        Command::Exec(exec) => exec::run(&exec)?,
        Command::Status { client } => status::run(&client)?,
        Command::Bench(command) => bench::run(&command)?,
        Command::Man => print_man()?,
        Command::Completions { shell } => {
            let mut command = Cli::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command, "pagemesh", &mut script);
            output::say(&String::from_utf8_lossy(&script))?;
        }
    }
    Ok(Verdict::Done)
}

/// The page of the command, followed by those of its subcommands.
fn print_man() -> anyhow::Result<()> {
    let mut pages = Vec::new();
    print_page(Cli::command(), &mut pages)?;
    output::say(&String::from_utf8_lossy(&pages))
}

fn print_page(command: clap::Command, out: &mut impl std::io::Write) -> anyhow::Result<()> {
    clap_mangen::Man::new(command.clone()).render(out)?;
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        let name = format!("{}-{}", command.get_name(), subcommand.get_name());
        print_page(subcommand.clone().name(name), out)?;
    }
    Ok(())
}
