//! `pagemesh up`: a whole cluster in the foreground.
//!
//! Invariants: one directory is used by one `up` at a time; its data stays
//! when it ends.

use crate::args;
use crate::cluster::{Cluster, Plan};
use crate::ending::Ending;
use crate::key;
use crate::output::bytes;
use anyhow::{Context, bail};
use pagemesh_base::key::Key;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

/// Runs a cluster until it is told to end.
pub fn run(args: &args::Up) -> anyhow::Result<()> {
    let ending = Ending::listen(args.until_stdin_ends)?;
    let dir = std::path::absolute(&args.dir)?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let _lock = lock(&dir)?;
    let pools = pools_dir(&dir, args)?;
    let plan = Plan {
        dir: &dir,
        pools: &pools,
        bricks: args.bricks,
        mapped: args.bricks,
        size_bytes: args.size.0,
        listen: &args.listen,
    };
    let started = Cluster::start(&plan, &ending);
    let mut cluster = started.inspect_err(|_| forget_empty(&dir, &pools))?;
    let key_is_shared = share_key(&cluster.url, &cluster.key);
    println!("ready {}", cluster.url);
    greet(&dir, &cluster.url, key_is_shared, args);
    while !ending.or_child(cluster.tend()) {}
    println!("ending; the data stays in {}", dir.display());
    Ok(())
}

fn lock(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .with_context(|| format!("cannot write to {}", dir.display()))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => bail!(
            "another pagemesh up runs on {}; end it, or name another directory with --dir",
            dir.display()
        ),
        Err(cause) => Err(cause).with_context(|| format!("cannot lock {}", path.display())),
    }
}

/// Where the pools are: the directory itself, or for memory pools one on a
/// tmpfs that a link in the directory leads to.
fn pools_dir(dir: &Path, args: &args::Up) -> anyhow::Result<PathBuf> {
    let link = dir.join("pools");
    if let Ok(target) = link.read_link() {
        // After a restart of the machine the memory is gone, and so is it.
        std::fs::create_dir_all(&target)
            .with_context(|| format!("cannot make {}", target.display()))?;
        return Ok(target);
    }
    let has_pools = dir.join("brick-1.pool").exists();
    let Some(tmpfs) = args.memory.as_ref().filter(|_| !has_pools) else {
        return Ok(dir.to_owned());
    };
    let target = tmpfs.join(format!("pagemesh-{}", uuid::Uuid::new_v4()));
    std::fs::create_dir(&target).with_context(|| format!("cannot make {}", target.display()))?;
    std::os::unix::fs::symlink(&target, &link)
        .with_context(|| format!("cannot make {}", link.display()))?;
    Ok(target)
}

/// Removes the directory of memory pools if there are none in it, and the link to it.
fn forget_empty(dir: &Path, pools: &Path) {
    if pools != dir && std::fs::remove_dir(pools).is_ok() {
        // The next start makes both anew.
        let _ = std::fs::remove_file(dir.join("pools"));
    }
}

/// Gives the user's other commands the key of this address.
fn share_key(url: &str, key: &Key) -> bool {
    let stored = key::default_path(url).and_then(|path| key::store(&path, key));
    match stored {
        Ok(()) => true,
        Err(cause) => {
            tracing::warn!(%cause, "other commands will not find the key by themselves");
            false
        }
    }
}

fn greet(dir: &Path, url: &str, key_is_shared: bool, args: &args::Up) {
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
