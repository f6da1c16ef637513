//! `pagemesh up`: a whole cluster in the foreground.
//!
//! Invariants: one directory is used by one `up` at a time. Its data stays when `up` ends, unless the
//! cluster is ephemeral.

use crate::args;
use crate::cluster::{Cluster, Plan};
use crate::cluster_dir;
use crate::down;
use crate::ending::Ending;
use crate::key;
use crate::output::bytes;
use anyhow::Context;
use pagemesh_base::key::Key;
use std::path::Path;

/// Runs a cluster until it is told to end.
pub fn run(args: &args::Up) -> anyhow::Result<()> {
    let ending = Ending::listen(args.until_stdin_ends)?;
    let dir = std::path::absolute(&args.dir)?;
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let lock = cluster_dir::lock(&dir)?;
    if let Some(tmpfs) = &args.memory {
        cluster_dir::warn_of_leftovers(tmpfs);
    }
    let pools = cluster_dir::make_pools_dir(&dir, args.memory.as_deref())?;
    let plan = Plan {
        dir: &dir,
        pools: &pools,
        bricks: args.bricks,
        mapped: args.bricks,
        size_bytes: args.size.0,
        listen: &args.listen,
    };
    let started = Cluster::start(&plan, &ending);
    let mut cluster =
        started.inspect_err(|_| cluster_dir::remove_if_without_pools(&dir, &pools))?;
    let key_is_shared = share_key(&cluster.url, &cluster.key);
    println!("ready {}", cluster.url);
    greet(&dir, &cluster.url, key_is_shared, args);
    while !ending.or_child(cluster.tend()) {}
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
