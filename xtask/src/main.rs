//! Tasks of the repository: `cargo xtask --help` lists them.

mod campaigns;
mod reference;
mod source_lines;
mod test_runs;
mod walk;

use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

#[derive(Parser)]
#[command(about = "Tasks of the repository")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every test, and list each failure with the command that reruns it.
    Test {
        /// Options of `cargo nextest run`, such as `-E 'package(pagemesh-store)'`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Check the format, the lints, the rules of the tree, and the unit tests of changed crates.
    Quick {
        /// Changes since this commit count, and those that are not committed.
        #[arg(long, default_value = "main")]
        since: String,
    },
    /// List the files on the way of a 4 KiB write: over NBD, through FUSE, on the direct path.
    Walk,
    /// Run histories of the cluster simulation; `cargo xtask sim --help` lists the options.
    #[command(disable_help_flag = true)]
    Sim {
        /// Options of the runner.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<OsString>,
    },
    /// Enumerate crash images, see docs/rfd/005-defects.md.
    Enumerate(campaigns::EnumerateOptions),
    /// Fuzz the decoders, see docs/rfd/004-fuzzing.md.
    Fuzz(campaigns::FuzzOptions),
    /// Run random interleavings, see docs/rfd/008-concurrency-models.md.
    Models(campaigns::ModelOptions),
    /// Write the generated pages of the book, docs/reference.
    Reference,
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("error: {cause:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<()> {
    match task {
        Task::Test { options } => test_runs::run_all(&options),
        Task::Quick { since } => test_runs::run_quick(&since),
        Task::Walk => walk::print(),
        Task::Sim { options } => campaigns::simulate(&options),
        Task::Enumerate(options) => campaigns::enumerate(&options),
        Task::Fuzz(options) => campaigns::fuzz(&options),
        Task::Models(options) => campaigns::models(&options),
        Task::Reference => reference::write(),
    }
}

/// The cargo that runs this program, in the root of the repository.
fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("the repository").to_owned()
}

#[cfg(test)]
mod tests {
    use super::{Arguments, Task};
    use clap::Parser;

    #[test]
    fn help_of_sim_reaches_its_runner() {
        let parsed = Arguments::try_parse_from(["xtask", "sim", "--help"]);
        let Ok(Task::Sim { options }) = parsed.map(|it| it.task) else {
            panic!("xtask answers --help itself");
        };
        assert_eq!(options, ["--help"]);
    }

    #[test]
    fn seed_of_enumeration_needs_its_bound() {
        let parse = |more: &[&str]| {
            let all = ["xtask", "enumerate", "--seed", "7"].iter().chain(more);
            Arguments::try_parse_from(all)
        };
        let error = parse(&[]).err().expect("a refusal").to_string();
        assert!(error.contains("--all-max"), "{error}");
        assert!(parse(&["--all-max", "16"]).is_ok());
    }
}
