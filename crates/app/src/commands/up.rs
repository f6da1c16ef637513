//! `pagemesh up`: a whole cluster in the foreground.
//!
//! Invariants: one `up` at a time uses a directory. Its data stays when `up` ends, unless the
//! cluster is ephemeral.

use crate::cluster::{Cluster, ClusterPlan, dir as cluster_dir};
use crate::commands::down;
use crate::key;
use crate::memory_budget::MemoryBudget;
use crate::output::bytes;
use crate::shutdown::Shutdown;
use anyhow::Context;
use clap::Args;
use pagemesh_base::key::Key;
use pagemesh_base::units::Size;
use pagemesh_brick::file::Preallocation;
use std::path::Path;
use std::path::PathBuf;

/// Run a whole cluster on this machine, to try pagemesh.
#[derive(Args)]
pub struct UpArgs {
    /// Directory of the cluster; a later `up` on it finds the same data.
    #[arg(long, default_value = "pagemesh-data")]
    pub dir: PathBuf,
    /// Number of bricks.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub bricks: u32,
    /// Size of each new pool.
    #[arg(long, default_value = "1G")]
    pub size: Size,
    /// Address of the manager.
    #[arg(long, default_value = "127.0.0.1:7070")]
    pub listen: String,
    /// Keep the pools in memory (class `process`), in /dev/shm or the given tmpfs. This is fast,
    /// but a restart of the machine loses the data.
    #[arg(long, value_name = "TMPFS", num_args = 0..=1, require_equals = true, default_missing_value = "/dev/shm")]
    pub memory: Option<PathBuf>,
    /// Remove the cluster and its data at the end. Otherwise the data stays, also in memory.
    #[arg(long)]
    pub ephemeral: bool,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
}

/// Runs a cluster until its shutdown.
pub fn run(args: &UpArgs) -> anyhow::Result<()> {
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let dir = std::path::absolute(&args.dir)?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let lock = cluster_dir::lock(&dir)?;
    if let Some(tmpfs) = &args.memory {
        cluster_dir::warn_of_leftovers(tmpfs);
    }
    let pools = cluster_dir::make_pools_dir(&dir, args.memory.as_deref())?;
    let plan = ClusterPlan {
        dir: &dir,
        pools: &pools,
        bricks: args.bricks,
        mapped: args.bricks,
        size_bytes: args.size.0,
        sessions: None,
        preallocation: Preallocation::Falloc,
        memory_budget: MemoryBudget::of_each(args.bricks),
        listen: &args.listen,
    };
    let started = Cluster::start(&plan, &ending);
    let mut cluster =
        started.inspect_err(|_| cluster_dir::remove_if_without_pools(&dir, &pools))?;
    let key_is_shared = share_key(&cluster.url, &cluster.key);
    println!("ready {}", cluster.url);
    print_instructions(&dir, &cluster.url, key_is_shared, args);
    while !ending.wait_for_child(cluster.supervise()) {}
    match args.ephemeral {
        false => println!("ending; the data stays in {}", dir.display()),
        true => {
            drop(cluster);
            down::remove(&dir)?;
        }
    }
    drop(lock);
    Ok(())
}

/// Stores the key for this address, so that the user's other commands find it.
fn share_key(url: &str, key: &Key) -> bool {
    let stored = key::default_path(url).and_then(|path| key::store(&path, key));
    match stored {
        Ok(()) => true,
        Err(cause) => {
            tracing::warn!(%cause, "cannot store the key for other commands; name it with --key");
            false
        }
    }
}

fn print_instructions(dir: &Path, url: &str, key_is_shared: bool, args: &UpArgs) {
    let mut set = String::new();
    if url != "http://127.0.0.1:7070" {
        set += &format!("  export PAGEMESH_MANAGER={url}\n");
    }
    if !key_is_shared {
        set += &format!("  export PAGEMESH_KEY={}\n", dir.join("key").display());
    }
    println!(
        "\n{} bricks of {} run in {}; Ctrl-C ends them. In another terminal, try:\n\n{set}  \
         pagemesh status\n  \
         pagemesh volume create demo --size 256M\n  \
         pagemesh export nbd demo --socket /tmp/demo.sock\n  \
         qemu-img info 'nbd+unix:///demo?socket=/tmp/demo.sock'\n",
        args.bricks,
        bytes(args.size.0),
        dir.display()
    );
}
