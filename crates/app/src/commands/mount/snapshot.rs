//! A mount of a snapshot of a file system: read-only, and without an attachment.
//!
//! Invariant: the client of the volume goes on. Nothing is written to bricks.

use crate::client::{cluster_client, open_snapshot};
use crate::commands::mount::end::{UnmountSequence, serve_until_end};
use crate::commands::mount::serve::{MEMORY_MIN, SOURCE, fuse_caching, fuse_transport};
use crate::commands::mount::served::{ADDRESS_TIMEOUT, mount_device};
use crate::commands::mount::waiters::{
    AddressWait, notify_complete, notify_unmounted, serve_waiters,
};
use crate::commands::mount::{MountArgs, options};
use crate::metrics_pages;
use crate::service;
use crate::shutdown::Shutdown;
use crate::snapshot_path::SnapshotPath;
use crate::status_signals::StatusSignals;
use anyhow::{Context, ensure};
use pagemesh_brick::resource_limits;
use pagemesh_direct::server::IsMounted;
use pagemesh_fs::{Fs, FsError};
use pagemesh_fuse::{MountFlags, MountOptions};
use pagemesh_manage::wire::VolumeContent;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Mounts a snapshot on a checked directory, and serves it until an unmount or a shutdown.
pub fn run(args: &MountArgs, path: &SnapshotPath, dir: &Path) -> anyhow::Result<()> {
    ensure!(
        !args.force && args.commit_interval.is_none() && !args.show_snapshots,
        "cannot mount {path}: a snapshot takes no changes, fences no client, and has no snapshots; leave out --force, --commit-interval and --show-snapshots"
    );
    resource_limits::check_memory(MEMORY_MIN).with_context(|| format!("cannot mount {path}"))?;
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    service::notify_status("reading the file system of the snapshot");
    let content = cluster_client(&args.client)?.volume(&path.volume)?.info;
    ensure!(
        content.content == VolumeContent::Files,
        "the snapshot {path} holds blocks, and no file system of pagemesh; use it with: pagemesh export nbd {path}"
    );
    // No volume is attached, so a signal for its status has nothing to report.
    StatusSignals::listen()?.handle(vec![])?;
    let metrics = args.metrics.bind()?;
    let fs = open_files(args, path)?;
    let options = mount_options(args, path);
    let on_error = |error: &FsError| tracing::error!(%error, "a request failed");
    let mounted = pagemesh_fuse::mount(fs, dir, &options, Box::new(on_error), Box::new(|| None))?;
    tracing::info!(transport = ?mounted.transport(), "mounted");
    let _metrics = metrics_pages::serve(metrics, || metrics_pages::client_page(&[]))?;
    let unmounter = mounted.unmounter();
    let is_mounted: IsMounted = Arc::new(move || unmounter.is_mounted());
    let device = mount_device(dir);
    let patience = AddressWait {
        until: Instant::now() + ADDRESS_TIMEOUT,
        shutdown: &ending,
        is_mounted: &is_mounted,
    };
    let waiters = device
        .as_deref()
        .map(|device| serve_waiters(device, &patience));
    println!("ready {}", dir.display());
    service::notify_ready(&format!("{path} on {}", dir.display()));
    let end = UnmountSequence {
        unmounter: mounted.unmounter(),
        dir,
        device: device.as_deref(),
        is_urgent: || false,
        before_cut: || {},
        before_exit: || {},
    };
    let gone = {
        let waiters = waiters.clone();
        move || waiters.iter().for_each(notify_unmounted)
    };
    serve_until_end(move || Ok(mounted.serve_with_hook(gone)?), &end, &ending)?;
    waiters.iter().for_each(notify_complete);
    Ok(())
}

/// Opens the file system. Its recovery changes memory only.
fn open_files(args: &MountArgs, path: &SnapshotPath) -> anyhow::Result<Arc<Fs>> {
    let space = open_snapshot(&args.client, args.transport, path)?;
    let fs = Fs::mount_snapshot(Arc::new(space), pagemesh_fuse::wait, pagemesh_fuse::now);
    let fs = fs.with_context(|| format!("cannot read the file system in the snapshot {path}"))?;
    if let Some(damage) = fs.damage() {
        eprintln!("warning: the snapshot {path}: {damage}");
    }
    Ok(Arc::new(fs))
}

fn mount_options(args: &MountArgs, path: &SnapshotPath) -> MountOptions {
    MountOptions {
        source: format!("{SOURCE}{path}"),
        threads: args.threads,
        allow_other: args.allow_other,
        flags: MountFlags {
            is_read_only: true,
            ..options::apply(MountFlags::default(), &args.options)
        },
        transport: fuse_transport(args.fuse),
        may_keep_cpus_awake: !args.no_keep_awake,
        caching: fuse_caching(args.direct_io),
        shows_snapshots: false,
        is_shared: false,
    }
}
