//! `pagemesh pool create`.

use crate::args::{CLASSES, Output};
use crate::output;
use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use pagemesh_base::units::Size;
use pagemesh_brick::brick::OpenedPool;
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file::{self, NewPool, Preallocation};
use pagemesh_pmem::{Durability, StatedClass};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `pool create`.
#[derive(Args)]
pub struct CreateArgs {
    /// New file, or a device.
    path: PathBuf,
    /// Size of the pool, without `--flash`.
    #[arg(long)]
    size: Size,
    /// Sessions that the pool can serve, 3 to 4095; by default by its size. A leg of an attached volume takes one, and
    /// so does each direct client.
    #[arg(long)]
    sessions: Option<u32>,
    /// Durability class; by default the class of the medium. `eadr` needs CPU caches that
    /// survive power loss. `process` on a plain file loses the data when the machine restarts.
    #[arg(long, value_parser = CLASSES)]
    class: Option<String>,
    /// Accept the class although nothing shows that the medium fulfils it.
    ///
    /// Data loss: if the medium does not fulfil the class, a power failure loses or damages
    /// acknowledged writes.
    #[arg(long, requires = "class")]
    trust_medium: bool,
    /// Disks behind a pool in memory: block devices, or new files of the size `--flash-size`. Cold pages move there.
    ///
    /// Data loss: everything on the block devices is lost.
    #[arg(long, value_name = "PATH", value_delimiter = ',')]
    flash: Vec<PathBuf>,
    /// Size of each disk of `--flash`; by default all of a block device.
    #[arg(long, value_name = "SIZE", requires = "flash")]
    flash_size: Option<Size>,
    /// Allocation of a new file on a disk.
    #[arg(long, value_enum, default_value = "falloc", conflicts_with = "flash")]
    preallocation: PreallocationArg,
    /// Output format.
    #[arg(long, value_enum, default_value = "table")]
    output: Output,
}

/// Values of `--preallocation`.
#[derive(Clone, Copy, ValueEnum)]
enum PreallocationArg {
    /// Reserve the blocks: at once, but the first write to each block is slower
    Falloc,
    /// Write the file once with zeros: as slow as the disk writes, and then all writes have one speed
    Full,
}

impl From<PreallocationArg> for Preallocation {
    fn from(arg: PreallocationArg) -> Preallocation {
        match arg {
            PreallocationArg::Falloc => Preallocation::Falloc,
            PreallocationArg::Full => Preallocation::Full,
        }
    }
}

/// A new pool.
#[derive(Serialize)]
struct CreatedPool {
    pool: String,
    path: String,
    pool_bytes: u64,
    class: String,
    /// The disks behind it.
    flash: Vec<PathBuf>,
}

/// Creates a pool.
pub fn run(args: &CreateArgs) -> anyhow::Result<()> {
    let path = &args.path;
    let class = args.class.as_deref().map(str::parse).transpose()?;
    let stated = class.map(|class| StatedClass {
        class,
        is_trusted: args.trust_medium,
    });
    let new = NewPool {
        size_bytes: args.size.0,
        sessions: args.sessions,
        stated,
        preallocation: args.preallocation.into(),
    };
    let flash: Result<Vec<PathBuf>, _> = args.flash.iter().map(std::path::absolute).collect();
    let flash = flash.context("cannot find the current directory; name absolute paths")?;
    let bar = output::progress(&format!("making {}", path.display()));
    let made = file::create_with(path, new, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let (pool, class) = made?;
    if !flash.is_empty() {
        add_flash(path, class, &flash, args.flash_size)?;
    }
    let made = CreatedPool {
        pool: pool.to_string(),
        path: path.display().to_string(),
        pool_bytes: args.size.0,
        class: class.to_string(),
        flash,
    };
    output::print(args.output, &made, || {
        let size = output::bytes(args.size.0);
        let behind = match made.flash.len() {
            0 => String::new(),
            1 => ", with a disk behind it".to_owned(),
            disks => format!(", with {disks} disks behind it"),
        };
        format!(
            "made pool {pool} of {size}, class {class}, in {}{behind}",
            made.path
        )
    })
}

/// Adds disks behind a new pool in memory.
fn add_flash(
    path: &Path,
    class: Durability,
    flash: &[PathBuf],
    size: Option<Size>,
) -> anyhow::Result<()> {
    let options = OpenOptions {
        takes_disks: true,
        ..OpenOptions::default()
    };
    let OpenedPool::Tiered((brick, maintenance, _)) = OpenedPool::open(path, options)? else {
        bail!(
            "the new pool {} is of class {class}, on a disk itself; use it as it is and add devices with \
             `pagemesh pool device add`, or remove it and create a pool in memory",
            path.display()
        );
    };
    for (added, disk) in flash.iter().enumerate() {
        let joined = brick.add_device(disk, size.map(|size| size.0));
        joined.with_context(|| {
            format!(
                "the new pool {} has {added} of {} disks; remove it and its disks, and create it again",
                path.display(),
                flash.len()
            )
        })?;
    }
    maintenance.stop();
    Ok(())
}
