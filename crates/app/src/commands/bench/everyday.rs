//! Everyday work on a mount with two copies, compared with ext4.

use crate::args::{FuseTransport, thread_count_parser};
use crate::commands::bench::MeasureArgs;
use crate::commands::bench::mounts::{MountServing, MountSpec, exec_prefix, is_root};
use crate::commands::bench::scratch::{SPARE_BYTES, ScratchCluster};
use crate::output;
use anyhow::Context;
use clap::Args;
use clap::builder::PossibleValuesParser;
use pagemesh_bench::everyday::steps::{FileStep, run_step};
use pagemesh_bench::everyday::{EverydayCase, EverydayOptions, EverydayPlaces, run_everyday};
use pagemesh_bench::file_peers::FilePeer;
use pagemesh_bench::mirror::MountPlace;
use pagemesh_bench::report::Report;
use std::path::Path;

/// Bytes of a file system without the files of the tree and of the steps: for dbench and small reads.
const FILE_SYSTEM_BYTES_MIN: u64 = 256 << 20;
/// Bytes of a file of the tree, in two copies and with room for removed files that are not freed yet.
const TREE_FILE_BYTES: u64 = 64 << 10;
/// Bytes of a file of a step, with that room.
const STEP_FILE_BYTES: u64 = 16 << 10;
/// The name of [`EverydayStepArgs`] on the command line.
const STEP_COMMAND: &str = "everyday-step";

/// Everyday work of programs on a mount with two copies, without a sync, compared with ext4 on a loop device in memory:
/// tar, cp, grep, rm, many small files, dbench. Needs root.
#[derive(Args)]
pub struct EverydayArgs {
    #[command(flatten)]
    pub measure: MeasureArgs,
    /// Cases to measure; by default all, without dbench if it is not installed.
    #[arg(long = "case", value_delimiter = ',', value_parser = PossibleValuesParser::new(EverydayCase::ids()))]
    pub cases: Vec<String>,
    /// Number of files that one program creates, reads, looks up and renames.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=50_000))]
    pub files: u32,
    /// Number of files of the tree of tar, cp, grep and rm.
    #[arg(long, default_value_t = 4650, value_parser = clap::value_parser!(u32).range(1..=20_000))]
    pub tree_files: u32,
    /// Number of server threads of the mount.
    #[arg(long, default_value_t = 4, value_parser = thread_count_parser())]
    pub threads: usize,
    /// Transport of FUSE requests from the kernel.
    #[arg(long, value_enum, default_value = "auto")]
    pub fuse: FuseTransport,
}

impl EverydayArgs {
    fn file_system_bytes(&self) -> u64 {
        let of_files =
            u64::from(self.tree_files) * TREE_FILE_BYTES + u64::from(self.files) * STEP_FILE_BYTES;
        FILE_SYSTEM_BYTES_MIN + of_files
    }
}

/// Runs the benchmark.
pub fn run(args: &EverydayArgs) -> anyhow::Result<Report> {
    anyhow::ensure!(is_root(), "ext4 needs root; run it as root");
    let serving = MountServing {
        fuse: args.fuse,
        ..MountServing::auto(args.threads)
    };
    let size_bytes = args.file_system_bytes();
    let spec = MountSpec {
        size_bytes,
        serving,
    };
    let scratch = ScratchCluster::with_pools(&args.measure, 2, 2, size_bytes + SPARE_BYTES)?;
    // It starts before the mount: otherwise its mount namespace holds the mount, which then ends late.
    let ext4 = FilePeer::ext4(size_bytes)?;
    let (_daemon, mount) = scratch.mount("map", 2, "map", &spec)?;
    let exec = MountPlace {
        name: "map, under exec".into(),
        prefix: exec_prefix()?,
        ..mount.clone()
    };
    let places = EverydayPlaces {
        mount,
        exec,
        ext4: ext4.mount_place(),
    };
    let own = std::env::current_exe()?;
    let own = own.to_str().context("this program's path is no text")?;
    let options = EverydayOptions {
        rounds: args.measure.rounds,
        cases: args
            .cases
            .iter()
            .filter_map(|id| EverydayCase::from_id(id))
            .collect(),
        files: args.files,
        tree_files: args.tree_files,
        runtime: args.measure.runtime(),
        step_command: [own, "bench", STEP_COMMAND].map(String::from).to_vec(),
        memory_dir: scratch.pools.path().into(),
    };
    let mut report = run_everyday(&places, &options)?;
    report.add_note(format!(
        "the mount is served by {} threads, --fuse {}; ext4 is on a loop device on a tmpfs",
        serving.threads,
        serving.fuse.name()
    ));
    Ok(report)
}

/// Run one step of `bench everyday` in the current directory, and print its seconds.
#[derive(Args)]
pub struct EverydayStepArgs {
    /// The step.
    #[arg(value_parser = PossibleValuesParser::new(FileStep::ids()))]
    pub step: String,
    /// Number of files.
    pub files: u32,
}

/// Runs a step.
pub fn run_file_step(args: &EverydayStepArgs) -> anyhow::Result<()> {
    let step = FileStep::from_id(&args.step).context("there is no such step")?;
    let took = run_step(step, Path::new("."), args.files)?;
    output::print_text(&took.as_secs_f64().to_string())?;
    Ok(())
}
