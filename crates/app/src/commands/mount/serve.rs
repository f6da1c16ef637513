//! A mount process: attaches the volume of a file system and serves it over FUSE.
//!
//! Invariant: the volume is detached after the file system is closed, on every way out.

use crate::args::{FuseTransport, ManagerArgs, ScrubArgs, Transport as TransportArg};
use crate::client::{DetachGuard, attach_replacing, cluster_client, expect_content};
use crate::commands::mount::MountArgs;
use crate::commands::mount::dead;
use crate::commands::mount::end::{UnmountSequence, serve_until_end};
use crate::commands::mount::free_space::{self, raise_limit};
use crate::commands::mount::life_signs::LifeSigns;
use crate::commands::mount::mount_table::{find_mount_at, resolve_parent};
use crate::commands::mount::snapshot;
use crate::commands::mount::snapshot_views::MountSnapshots;
use crate::commands::mount::takeover;
use crate::commands::mount::waiters::{
    AddressWait, NOBODY_WAITS, UnmountWaiters, notify_complete, notify_unmounted, serve_waiters,
};
use crate::fence_watch::{self, FencedError};
use crate::figure_reporter::FigureReporter;
use crate::metrics_pages;
use crate::service;
use crate::shutdown::{Shutdown, ShutdownTrigger};
use crate::snapshot_cuts;
use crate::snapshot_path::VolumeOrSnapshot;
use crate::status_signals::StatusSignals;
use anyhow::{Context, bail};
use pagemesh_base::authority::AuthorityError;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::{Space, SpaceError};
use pagemesh_brick::resource_limits;
use pagemesh_direct::server::{DirectServer, IsMounted};
use pagemesh_fs::{Fs, FsError};
use pagemesh_fuse::{Caching, FuseMount, MountOptions, SnapshotSource, Transport};
use pagemesh_manage::wire::{Attachment, VolumeContent, VolumeDetail};
use pagemesh_metrics::{BoundResponder, Responder};
use pagemesh_volume::{AttachError, Volume};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The start of the source of a mount.
pub(super) const SOURCE: &str = "pagemesh:";
/// Minimum memory of a mount of a small file system, in bytes.
pub const MEMORY_MIN: u64 = 64 << 20;
/// Limit of the wait for the addresses of an ending mount, before this mount does without them. It
/// is longer than that mount waits for unreachable bricks and an unreachable manager. The owner of
/// an address may also be no mount.
pub(super) const ADDRESS_TIMEOUT: Duration = Duration::from_secs(40);

/// Refuses an unusable mount point, before the attach fences another client. Clears the mount that a killed
/// process of the same user has left, so that a service can restart.
pub fn check_dir(dir: &Path) -> anyhow::Result<PathBuf> {
    let at = resolve_parent(dir)?;
    while let Some(known) = find_mount_at(&at)? {
        if dead::clear(&at, &known)? {
            continue;
        }
        let dir = dir.display();
        bail!("{dir} is busy: a file system is mounted there; unmount it: pagemesh umount {dir}");
    }
    let found = std::fs::metadata(dir);
    let shown = dir.display();
    let found = found.with_context(|| format!("cannot mount on {shown}; make the directory"))?;
    if !found.is_dir() {
        bail!("cannot mount on {shown}: it is not a directory");
    }
    Ok(dir.canonicalize()?)
}

/// Mounts a file system, and serves it until an unmount or a shutdown.
pub fn run(args: &MountArgs) -> anyhow::Result<()> {
    let (Some(name), Some(dir)) = (&args.name, &args.dir) else {
        bail!("name the file system and the mount point: pagemesh mount NAME DIR");
    };
    if args.detach {
        // This fails only for a process group leader, which has a session already.
        let _ = rustix::process::setsid();
    }
    let dir = check_dir(dir)?;
    match name {
        VolumeOrSnapshot::Volume(name) => serve_volume(args, name, dir),
        VolumeOrSnapshot::Snapshot(path) => snapshot::run(args, path, &dir),
    }
}

fn serve_volume(args: &MountArgs, name: &VolumeName, dir: PathBuf) -> anyhow::Result<()> {
    resource_limits::check_memory(MEMORY_MIN).with_context(|| format!("cannot mount {name}"))?;
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let signals = StatusSignals::listen()?;
    service::notify_status("attaching the volume and reading the file system");
    let wanted = FileSystemArgs {
        client: &args.client,
        transport: args.transport,
        scrubs: &args.scrubs,
        force: args.force,
    };
    let bind = || args.metrics.bind();
    let Some((volume, detail, metrics)) = attach_volume(&wanted, name, &ending, bind)? else {
        return Ok(());
    };
    signals.handle(vec![Arc::downgrade(&volume)])?;
    let detach = DetachGuard(Arc::clone(&volume));
    let signs = LifeSigns::start(cluster_client(&args.client)?, name, &volume)?;
    let fs = open_files(&volume, &detail)?;
    let served = vec![(name.clone(), Arc::downgrade(&volume))];
    snapshot_cuts::serve(&cluster_client(&args.client)?, &served)?;
    let reporter = FigureReporter::of_volumes(cluster_client(&args.client)?, served)?;
    let fenced = FenceFlag::watch(&volume, ending.trigger())?;
    let free_space = free_space::watch(&args.client, detail, &fs)?;
    let files = Arc::downgrade(&fs);
    let options = mount_options(args, name);
    let on_error = fenced.clone();
    let on_error = move |error: &FsError| on_error.check_error(error);
    let snapshots = MountSnapshots {
        manager: cluster_client(&args.client)?,
        volume: name.clone(),
        transport: args.transport,
        client: args.client.clone(),
    };
    let on_error = Box::new(on_error);
    let snapshots = Some(Box::new(snapshots) as Box<dyn SnapshotSource>);
    let mut mounted =
        pagemesh_fuse::mount_with_snapshots(fs, &dir, &options, on_error, free_space, snapshots)?;
    if let Some(seconds) = args.commit_interval {
        mounted.defer_commits(Duration::from_secs(seconds))?;
    }
    signs.set_mount(mounted.unmounter());
    tracing::info!(transport = ?mounted.transport(), "mounted");
    let process = MountProcess {
        endpoints: Endpoints::open(&mounted, &dir, &volume, &files, &ending),
        dir: &dir,
        volume: &volume,
        files,
        fenced: &fenced,
    };
    let metrics = serve_metrics(metrics, name, &process);
    println!("ready {}", dir.display());
    service::notify_ready(&format!("{name} on {}", dir.display()));
    let served = process.serve(mounted, &ending);
    let Endpoints {
        waiters, direct, ..
    } = process.endpoints;
    drop((direct, metrics));
    if fenced.is_set() {
        return Err(fenced_error(name, &dir).into());
    }
    served?;
    // The manager takes reports of the attached client only.
    drop(reporter);
    drop(detach);
    waiters.iter().for_each(notify_complete);
    Ok(())
}

/// Serves the metrics of the mount. If it fails, the mount goes on without.
fn serve_metrics(
    bound: Option<BoundResponder>,
    name: &VolumeName,
    process: &MountProcess<'_>,
) -> Option<Responder> {
    let volumes = [(name.clone(), Arc::downgrade(process.volume))];
    let direct = process.endpoints.direct.as_ref();
    let count_clients = direct.map(DirectServer::client_counter);
    let files = Weak::clone(&process.files);
    metrics_pages::serve(bound, move || {
        let mut page = metrics_pages::client_page(&volumes);
        if let Some(count) = &count_clients {
            metrics_pages::add_direct_clients(&mut page, &volumes[0].0, count());
        }
        if let Some(fs) = files.upgrade() {
            metrics_pages::add_uncommitted(&mut page, &volumes[0].0, fs.uncommitted_changes());
        }
        page
    })
    .inspect_err(|cause| tracing::warn!(%cause, "the mount serves no metrics"))
    .ok()
    .flatten()
}

/// Arguments of a process that serves a file system.
pub struct FileSystemArgs<'a> {
    pub client: &'a ManagerArgs,
    pub transport: TransportArg,
    pub scrubs: &'a ScrubArgs,
    /// Take the file system over from a process that serves it.
    pub force: bool,
}

/// An attached volume, its details, and an address that was bound before the attach.
type AttachedVolume<B> = (Arc<Volume>, VolumeDetail, B);

/// Attaches the volume of a file system, with its scrubs, once no other process serves it. None: this
/// process shall end.
///
/// An ending holder may use the same address until it has stored its data. So `bind` runs after the wait, and before the attach.
pub fn attach_volume<B>(
    args: &FileSystemArgs<'_>,
    name: &VolumeName,
    ending: &Shutdown,
    bind: impl Fn() -> anyhow::Result<B>,
) -> anyhow::Result<Option<AttachedVolume<B>>> {
    let manager = cluster_client(args.client)?;
    let detail = expect_content(&manager, name, VolumeContent::Files)?;
    let mut was_fenced = false;
    let (volume, bound) = loop {
        let refuse = |holder: &Attachment| {
            let is_refused = !args.force;
            is_refused.then(|| takeover::mount_refusal(name, holder))
        };
        let pause = |time| ending.wait_for(time);
        let words = &takeover::MOUNT_WORDS;
        let Some(replaced) = takeover::await_holder(&manager, name, words, refuse, pause)? else {
            return Ok(None);
        };
        let bound = bind()?;
        match attach_replacing(args.client, args.transport, name, Some(replaced))? {
            Ok(volume) => break (Arc::new(volume), bound),
            // This process waits for that client, but only once: two mounts with `--force` would alternate.
            Err(AttachError::Fenced(_)) if !was_fenced => was_fenced = true,
            Err(cause) => {
                // Another client may have attached the volume since.
                let holder = manager.holder(name)?.attached;
                let is_refused = matches!(
                    &cause,
                    AttachError::Authority {
                        cause: AuthorityError::Refused(_),
                        ..
                    }
                );
                if !is_refused || holder.is_none_or(|holder| holder.epoch == replaced) {
                    return Err(cause.into());
                }
            }
        }
    };
    volume.plan_scrubs(args.scrubs.plan());
    Ok(Some((volume, detail, bound)))
}

/// Opens the file system of the volume.
pub fn open_files(volume: &Arc<Volume>, detail: &VolumeDetail) -> anyhow::Result<Arc<Fs>> {
    let space: Arc<dyn Space> = volume.clone();
    let fs = Arc::new(Fs::mount(space, pagemesh_fuse::wait, pagemesh_fuse::now)?);
    if let Some(damage) = fs.damage() {
        let name = &detail.info.name;
        eprintln!("warning: {name} is mounted read-only: {damage}");
    }
    raise_limit(&fs, detail);
    Ok(fs)
}

fn mount_options(args: &MountArgs, name: &VolumeName) -> MountOptions {
    MountOptions {
        source: format!("{SOURCE}{name}"),
        threads: args.threads,
        allow_other: args.allow_other,
        read_only: false,
        transport: fuse_transport(args.fuse),
        may_keep_cpus_awake: !args.no_keep_awake,
        caching: fuse_caching(args.direct_io),
        shows_snapshots: args.show_snapshots,
    }
}

/// The transport of FUSE requests that an argument names.
pub fn fuse_transport(arg: FuseTransport) -> Transport {
    match arg {
        FuseTransport::Auto => Transport::Auto,
        FuseTransport::Classic => Transport::Classic,
        FuseTransport::IoUring => Transport::IoUring,
    }
}

/// Whether the kernel may cache pages of files.
pub fn fuse_caching(direct_io: bool) -> Caching {
    if direct_io {
        Caching::Bypassed
    } else {
        Caching::PageCache
    }
}

/// Whether another client has taken over the volume.
#[derive(Clone)]
pub struct FenceFlag {
    is_set: Arc<AtomicBool>,
    shutdown: ShutdownTrigger,
}

impl FenceFlag {
    /// Sets the flag soon after another client has attached the volume.
    pub fn watch(volume: &Arc<Volume>, shutdown: ShutdownTrigger) -> anyhow::Result<FenceFlag> {
        let fenced = FenceFlag {
            is_set: Arc::default(),
            shutdown,
        };
        let on_fenced = fenced.clone();
        fence_watch::watch(Arc::downgrade(volume), move || on_fenced.set())?;
        Ok(fenced)
    }

    pub fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }

    fn set(&self) {
        if !self.is_set.swap(true, Ordering::AcqRel) {
            self.shutdown.trigger();
        }
    }

    /// Sets the flag if an error is that of a volume that another client has attached.
    pub fn check_error(&self, error: &FsError) {
        match error {
            FsError::Space(SpaceError::Fenced) | FsError::Stopped(SpaceError::Fenced) => {
                self.set();
            }
            other => tracing::debug!(%other, "a request failed"),
        }
    }
}

fn fenced_error(name: &VolumeName, dir: &Path) -> FencedError {
    FencedError(format!(
        "another client took over the file system {name}, or an operator took it away, and \
         this mount has ended; what it had confirmed is there, unless a copy that lacks it \
         was promoted by force. Mount it again to take it back: pagemesh mount {name} {}",
        dir.display()
    ))
}

/// The sockets of a mount, named by its device. A mount works without them.
struct Endpoints {
    /// `major:minor`, if known.
    device: Option<String>,
    /// Processes that wait for the end of the mount.
    waiters: Option<UnmountWaiters>,
    /// The server for direct clients.
    direct: Option<DirectServer>,
}

impl Endpoints {
    fn open(
        mounted: &FuseMount,
        dir: &Path,
        volume: &Arc<Volume>,
        files: &Weak<Fs>,
        ending: &Shutdown,
    ) -> Endpoints {
        let until = Instant::now() + ADDRESS_TIMEOUT;
        let unmounter = mounted.unmounter();
        let is_mounted: IsMounted = Arc::new(move || unmounter.is_mounted());
        let device = mount_device(dir);
        let patience = AddressWait {
            until,
            shutdown: ending,
            is_mounted: &is_mounted,
        };
        let waiters = device
            .as_deref()
            .map(|device| serve_waiters(device, &patience));
        let direct = device
            .as_deref()
            .and_then(|device| start_direct_server(volume, files, device, &patience));
        if let Some(direct) = &direct {
            mounted.set_connect_hook(Box::new(direct.connector()));
        }
        Endpoints {
            device,
            waiters,
            direct,
        }
    }
}

/// The device of the new mount.
pub(super) fn mount_device(dir: &Path) -> Option<String> {
    find_mount_at(dir)
        .and_then(|known| Ok(known.context("the mount is not there")?.device))
        .inspect_err(|cause| tracing::warn!(%cause, "{NOBODY_WAITS}"))
        .ok()
}

/// Starts the server for direct clients. If it fails, the kernel path serves all processes.
fn start_direct_server(
    volume: &Arc<Volume>,
    fs: &Weak<Fs>,
    device: &str,
    patience: &AddressWait<'_>,
) -> Option<DirectServer> {
    let fs = fs.upgrade()?;
    let is_mounted = patience.is_mounted;
    let start = || DirectServer::start(Arc::clone(volume), &fs, device, Arc::clone(is_mounted));
    patience
        .take_when_free(start, || pagemesh_direct::server::serving_process(device))
        .inspect_err(|cause| tracing::warn!(%cause, "cannot start the server for direct clients; the kernel serves all processes"))
        .ok()
}

/// The parts of a mount process that its end needs.
struct MountProcess<'a> {
    endpoints: Endpoints,
    dir: &'a Path,
    volume: &'a Arc<Volume>,
    files: Weak<Fs>,
    fenced: &'a FenceFlag,
}

impl MountProcess<'_> {
    /// Serves until the mount has ended.
    fn serve(&self, mounted: FuseMount, ending: &Shutdown) -> anyhow::Result<()> {
        let end = UnmountSequence {
            unmounter: mounted.unmounter(),
            dir: self.dir,
            device: self.endpoints.device.as_deref(),
            is_urgent: || self.fenced.is_set(),
            before_cut: || {
                if let Some(direct) = &self.endpoints.direct {
                    direct.stop();
                }
            },
            before_exit: || save_state(&self.files, self.volume),
        };
        let waiters = self.endpoints.waiters.clone();
        let gone = move || {
            if let Some(waiters) = &waiters {
                notify_unmounted(waiters);
            }
        };
        serve_until_end(move || Ok(mounted.serve_with_hook(gone)?), &end, ending)
    }
}

/// Saves the state that a process can save when it must exit while it serves requests.
fn save_state(fs: &Weak<Fs>, volume: &Volume) {
    if let Some(fs) = fs.upgrade() {
        let saved = fs
            .borrow_channel()
            .and_then(|mut channel| fs.sync_all(&mut channel));
        if let Err(cause) = saved {
            tracing::error!(%cause, "DATA LOSS: writes to mapped files, file times and uncommitted changes may be lost");
        }
    }
    volume.detach();
}
