//! `pagemesh down`: stops the `up` of a directory, and removes its data on request.

use crate::cluster::dir as cluster_dir;
use anyhow::{Context, bail};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::path::Path;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Stop the cluster that `up` runs in a directory.
#[derive(Args)]
pub struct DownArgs {
    /// Directory of the cluster.
    #[arg(long, default_value = "pagemesh-data")]
    pub dir: PathBuf,
    /// Remove the data of the cluster, too: pools, keys, logs and the manager's database.
    #[arg(long)]
    pub remove: bool,
}

/// Limit of the exit of an `up`; its children have 10 s.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Interval of checks for its exit.
const END_PAUSE: Duration = Duration::from_millis(20);

pub fn run(args: &DownArgs) -> anyhow::Result<()> {
    let dir = std::path::absolute(&args.dir)?;
    if !dir.join("lock").exists() {
        bail!(
            "{} is no directory of pagemesh up; name it with --dir",
            dir.display()
        );
    }
    let lock = stop_cluster(&dir)?;
    if !dir.join("lock").exists() {
        println!("the cluster was ephemeral: its data is removed");
    } else if args.remove {
        remove(&dir)?;
    } else {
        println!(
            "the data stays in {}; down --remove removes it",
            dir.display()
        );
    }
    drop(lock);
    Ok(())
}

/// Removes a cluster and reports the files that stay. The caller holds the cluster's lock.
pub fn remove(dir: &Path) -> anyhow::Result<()> {
    let left = cluster_dir::remove(dir)?;
    println!("removed the cluster in {}", dir.display());
    for path in left {
        println!("left {}, which pagemesh did not make", path.display());
    }
    Ok(())
}

/// Stops the `up` of a directory, and takes its lock. An ephemeral cluster removes the directory
/// before its process ends, so the lock is opened once, before.
fn stop_cluster(dir: &Path) -> anyhow::Result<File> {
    let lock = cluster_dir::open_lock(dir)?;
    if cluster_dir::try_lock_file(&lock, dir)? {
        return Ok(lock);
    }
    let holder = cluster_dir::lock_holder(dir)?.and_then(|pid| Pid::from_raw(pid.cast_signed()));
    let Some(holder) = holder else {
        bail!(
            "a pagemesh up runs on {} and cannot be seen from here; end it there",
            dir.display()
        );
    };
    kill_process(holder, Signal::TERM).with_context(|| {
        format!(
            "cannot end process {holder}, the pagemesh up on {}",
            dir.display()
        )
    })?;
    let until = Instant::now() + END_LIMIT;
    while Instant::now() < until {
        if cluster_dir::try_lock_file(&lock, dir)? {
            println!("ended the cluster in {}", dir.display());
            return Ok(lock);
        }
        std::thread::sleep(END_PAUSE);
    }
    bail!(
        "process {holder}, the pagemesh up on {}, has not ended within {} s; see its logs, or kill it",
        dir.display(),
        END_LIMIT.as_secs()
    )
}
