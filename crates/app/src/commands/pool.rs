//! `pagemesh pool`.

mod check;
mod create;
mod device;

pub use device::state_text;

use crate::args::Output;
use crate::commands::Verdict;
use crate::output;
use clap::Subcommand;
use pagemesh_brick::file;
use serde::Serialize;
use std::path::Path;
use std::path::PathBuf;

/// Create, show and check pools, and change their devices.
#[derive(Subcommand)]
pub enum PoolCommand {
    /// Create a pool. Its class is `file-sync` on a plain file, `process` on tmpfs and `pmem` on
    /// DAX, unless `--class` names another.
    Create(create::CreateArgs),
    /// Check a pool while no brick runs on it. Without `--repair` the check writes nothing; it
    /// replays the journal of a crashed brick in memory only.
    ///
    /// The check compares both superblocks, the journal, the object table, the page tables, the
    /// bitmap, the frame counts and the in-flight table. It also reads every page and verifies its
    /// checksum. Each finding names the slice, page, frame and byte, where known. Exit code 3: the
    /// pool has damage that is not repaired.
    Check {
        /// Pool to check.
        path: PathBuf,
        /// Repair the parts that the pool can restore by itself: superblocks, bitmap, lost frames,
        /// counts, and single flipped bits of journal and tables. A damaged page needs another copy
        /// of its volume.
        #[arg(long)]
        repair: bool,
        /// Check only structures, and skip the pages.
        #[arg(long)]
        skip_data: bool,
        /// Output format.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
    /// List, add and drain the devices of the pool of a running brick.
    #[command(subcommand)]
    Device(device::DeviceCommand),
    /// Show the superblock of a pool.
    Show {
        /// Pool to show.
        path: PathBuf,
        /// Output format.
        #[arg(long, value_enum, default_value = "table")]
        output: Output,
    },
}

/// The contents of a superblock.
#[derive(Serialize)]
struct PoolInfo {
    pool: String,
    pool_bytes: u64,
    frame_bytes: u64,
    /// Share of the pool that is not in frames: journals, bitmap and tables. Page tables are in
    /// frames.
    reserved_percent: f64,
    sessions_max: u32,
    slices_max: u32,
    incarnation: u32,
    checkpoint: u64,
    /// The stated class; `None` if the medium decides.
    class: Option<String>,
    class_trusted: bool,
}

/// Creates, shows or checks a pool.
pub fn run(command: &PoolCommand) -> anyhow::Result<Verdict> {
    match command {
        PoolCommand::Create(args) => create::run(args)?,
        PoolCommand::Device(command) => device::run(command)?,
        PoolCommand::Show { path, output } => show(path, *output)?,
        PoolCommand::Check {
            path,
            repair,
            skip_data,
            output,
        } => return check::run(path, *repair, !*skip_data, *output),
    }
    Ok(Verdict::Done)
}

fn show(path: &Path, output: Output) -> anyhow::Result<()> {
    let block = file::read_superblock(path)?;
    let geometry = &block.geometry;
    let fixed = geometry.pool_bytes - geometry.frames.len;
    let shown = PoolInfo {
        pool: block.pool.to_string(),
        pool_bytes: geometry.pool_bytes,
        frame_bytes: geometry.frames.len,
        reserved_percent: fixed as f64 * 100.0 / geometry.pool_bytes as f64,
        sessions_max: geometry.journals - 1,
        slices_max: geometry.object_count(),
        incarnation: block.incarnation.0,
        checkpoint: block.checkpoint.0,
        class: block.stated.map(|stated| stated.class.to_string()),
        class_trusted: block.stated.is_some_and(|stated| stated.is_trusted),
    };
    output::print(output, &shown, || {
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        output::table(
            &["pool", &shown.pool],
            [
                row("class", class_text(&shown)),
                row("size", output::bytes(shown.pool_bytes)),
                row("for data", output::bytes(shown.frame_bytes)),
                row("reserved", format!("{:.2} %", shown.reserved_percent)),
                row("sessions", format!("up to {}", shown.sessions_max)),
                row("slices", format!("up to {}", shown.slices_max)),
                row("opened", format!("{} times", shown.incarnation)),
            ],
        )
    })
}

fn class_text(shown: &PoolInfo) -> String {
    match (&shown.class, shown.class_trusted) {
        (None, _) => "class of the medium".into(),
        (Some(class), false) => class.clone(),
        (Some(class), true) => format!("{class}, by --trust-medium"),
    }
}
