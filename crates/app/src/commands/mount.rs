//! `pagemesh mount`: attaches the volume of a file system and serves it over FUSE.
//!
//! Invariant: after a shutdown request a mount ends within a limit, even if it is in use. The
//! process unmounts it and then cuts off other mount namespaces and open files.

pub mod helper;
pub mod mount_table;
pub mod status;

use crate::args::{self, MountArgs, NullMountArgs};
use crate::commands::mount::mount_table::{find_mount_at, resolve_parent};
use crate::commands::umount::{
    AddressWait, NOBODY_WAITS, notify_complete, notify_unmounted, serve_waiters,
};
use crate::commands::volume::{DetachGuard, attach, expect_content, manager_client};
use crate::fence_watch::{self, FencedError};
use crate::shutdown::{Shutdown, ShutdownTrigger};
use crate::status_signals::StatusSignals;
use anyhow::{Context, bail};
use pagemesh_base::space::{Space, SpaceError};
use pagemesh_brick::resource_limits;
use pagemesh_direct::server::{DirectServer, IsMounted};
use pagemesh_fs::{Fs, FsError};
use pagemesh_fuse::{Caching, MountOptions, Transport, Unmounter};
use pagemesh_manage::wire::{VolumeContent, VolumeDetail};
use pagemesh_volume::Volume;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The start of the source of a mount.
const SOURCE: &str = "pagemesh:";
/// Minimum memory of a mount of a small file system, in bytes.
const MEMORY_MIN: u64 = 64 << 20;
/// Interval of requests to the manager for the free space of the pools.
const FREE_SPACE_INTERVAL: Duration = Duration::from_secs(5);
/// Limit of the wait for the addresses of an ending mount, before this mount does without them. It
/// is longer than that mount waits for unreachable bricks and an unreachable manager. The owner of
/// an address may also be no mount.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(40);
/// Limit of the wait for other mount namespaces during a shutdown.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of checks for these namespaces.
const NAMESPACE_POLL: Duration = Duration::from_millis(20);

/// Refuses an unusable mount point, before the attach fences another client.
fn check_dir(dir: &Path) -> anyhow::Result<PathBuf> {
    if find_mount_at(&resolve_parent(dir)?)?.is_some() {
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
    resource_limits::check_memory(MEMORY_MIN).with_context(|| format!("cannot mount {name}"))?;
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let asked = StatusSignals::listen()?;
    let detail = expect_content(&args.client, name, VolumeContent::Files)?;
    let volume = Arc::new(attach(&args.client, args.transport, name)?);
    volume.plan_scrubs(args.scrubs.plan());
    asked.handle(vec![Arc::downgrade(&volume)])?;
    let space: Arc<dyn Space> = volume.clone();
    let given_back = DetachGuard(Arc::clone(&volume));
    let fs = Arc::new(Fs::mount(space, pagemesh_fuse::wait, pagemesh_fuse::now)?);
    if let Some(damage) = fs.damage() {
        eprintln!("warning: {} is mounted read-only: {damage}", name);
    }
    raise_limit(&fs, &detail);
    let fenced = FenceFlag {
        is_set: Arc::default(),
        shutdown: ending.trigger(),
    };
    let on_fenced = fenced.clone();
    fence_watch::watch(Arc::downgrade(&volume), move || on_fenced.set())?;
    let room = watch_free_space(&args.client, detail, &fs)?;
    let guests_of = Arc::downgrade(&fs);
    let options = MountOptions {
        source: format!("{SOURCE}{}", name),
        threads: args.threads,
        allow_other: args.allow_other,
        transport: transport(args.fuse),
        may_keep_cpus_awake: !args.no_keep_awake,
        caching: caching(args.direct_io),
    };
    let on_trouble = fenced.clone();
    let trouble = move |error: &FsError| on_trouble.check_error(error);
    let mounted = pagemesh_fuse::mount(fs, &dir, &options, Box::new(trouble), room)?;
    tracing::info!(transport = ?mounted.transport(), "mounted");
    let until = Instant::now() + ADDRESS_TIMEOUT;
    let looks = mounted.unmounter();
    let is_mounted: IsMounted = Arc::new(move || looks.is_mounted());
    let device = find_mount_at(&dir)
        .and_then(|known| Ok(known.context("the mount is not there")?.device))
        .inspect_err(|cause| tracing::warn!(%cause, "{NOBODY_WAITS}"))
        .ok();
    let patience = AddressWait {
        until,
        shutdown: &ending,
        is_mounted: &is_mounted,
    };
    let waiting = device
        .as_deref()
        .map(|device| serve_waiters(device, &patience));
    let guests = device
        .as_deref()
        .and_then(|device| start_direct_server(&volume, &guests_of, device, &patience));
    if let Some(guests) = &guests {
        mounted.set_connect_hook(Box::new(guests.connector()));
    }
    println!("ready {}", dir.display());
    let served = {
        let end = UnmountSequence {
            unmounter: mounted.unmounter(),
            dir: &dir,
            device: device.as_deref(),
            is_urgent: || fenced.is_set.load(Ordering::Acquire),
            before_cut: || {
                if let Some(guests) = &guests {
                    guests.stop();
                }
            },
            before_exit: || save_state(&guests_of, &volume),
        };
        let gone = || {
            if let Some(waiting) = &waiting {
                notify_unmounted(waiting);
            }
        };
        serve(move || Ok(mounted.serve_with_hook(gone)?), &end, &ending)
    };
    drop(guests);
    if fenced.is_set.load(Ordering::Acquire) {
        return Err(FencedError(format!(
            "another client took over the file system {name}, or an operator took it away, and \
             this mount has ended; what it had confirmed is there, unless a copy that lacks it \
             was promoted by force. Mount it again to take it back: pagemesh mount {name} {}",
            dir.display()
        ))
        .into());
    }
    served?;
    drop(given_back);
    if let Some(waiting) = waiting {
        notify_complete(&waiting);
    }
    Ok(())
}

fn transport(wish: args::FuseTransport) -> Transport {
    match wish {
        args::FuseTransport::Auto => Transport::Auto,
        args::FuseTransport::Classic => Transport::Classic,
        args::FuseTransport::IoUring => Transport::IoUring,
    }
}

/// Whether another client has taken over the volume.
#[derive(Clone)]
struct FenceFlag {
    is_set: Arc<AtomicBool>,
    shutdown: ShutdownTrigger,
}

impl FenceFlag {
    fn set(&self) {
        if !self.is_set.swap(true, Ordering::AcqRel) {
            self.shutdown.trigger();
        }
    }

    fn check_error(&self, error: &FsError) {
        match error {
            FsError::Space(SpaceError::Fenced) | FsError::Stopped(SpaceError::Fenced) => {
                self.set();
            }
            other => tracing::debug!(%other, "a request failed"),
        }
    }
}

/// Raises the limit of the file system to the manager's value.
fn raise_limit(fs: &Fs, detail: &VolumeDetail) {
    match fs.raise_limit(detail.info.size_bytes) {
        Ok(false) | Err(FsError::ReadOnly(_)) => {}
        Ok(true) => {
            let bytes = detail.info.size_bytes;
            tracing::info!(bytes, "the limit of the files is raised");
        }
        Err(cause) => tracing::warn!(%cause, "cannot raise the limit of the files"),
    }
}

/// Polls the manager for the free space of each copy's pool and for the limit of the files. The
/// smallest free space bounds the writes.
fn watch_free_space(
    args: &args::ManagerArgs,
    mut detail: VolumeDetail,
    fs: &Arc<Fs>,
) -> anyhow::Result<pagemesh_fuse::FreeSpaceFn> {
    const UNKNOWN: u64 = u64::MAX;
    let manager = manager_client(args)?;
    let room = Arc::new(AtomicU64::new(UNKNOWN));
    let known = Arc::downgrade(&room);
    let fs = Arc::downgrade(fs);
    std::thread::Builder::new()
        .name("room".into())
        .spawn(move || {
            while let Some(room) = known.upgrade() {
                if let Ok(new) = manager.volume(&detail.info.name) {
                    // A failed raise is retried after the next change of the limit, or by the next
                    // mount.
                    if new.info.size_bytes != detail.info.size_bytes
                        && let Some(fs) = fs.upgrade()
                    {
                        raise_limit(&fs, &new);
                    }
                    // The set of copies may change, too.
                    detail = new;
                }
                if let Ok(all) = manager.bricks() {
                    let ours = all
                        .iter()
                        .filter(|info| detail.bricks.contains_key(&info.brick));
                    let free = ours.map(|info| info.capacity_bytes.saturating_sub(info.used_bytes));
                    room.store(free.min().unwrap_or(UNKNOWN), Ordering::Relaxed);
                }
                drop(room);
                std::thread::sleep(FREE_SPACE_INTERVAL);
            }
        })?;
    Ok(Box::new(move || {
        let free = room.load(Ordering::Relaxed);
        (free != UNKNOWN).then_some(free)
    }))
}

fn caching(direct_io: bool) -> Caching {
    match direct_io {
        true => Caching::Bypassed,
        false => Caching::PageCache,
    }
}

/// Mounts a null file system, in the same way as [`run`].
pub fn run_null(args: &NullMountArgs) -> anyhow::Result<()> {
    let dir = check_dir(&args.dir)?;
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let options = MountOptions {
        source: "nothing".into(),
        threads: args.threads,
        allow_other: false,
        transport: transport(args.fuse),
        may_keep_cpus_awake: !args.no_keep_awake,
        caching: caching(args.direct_io),
    };
    let mounted = pagemesh_fuse::mount_null(&dir, &options)?;
    println!("ready {}", dir.display());
    let end = UnmountSequence {
        unmounter: mounted.unmounter(),
        dir: &dir,
        device: None,
        is_urgent: || false,
        before_cut: || {},
        before_exit: || {},
    };
    serve(move || Ok(mounted.serve()?), &end, &ending)
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

/// The steps of a shutdown.
struct UnmountSequence<'e, U, C, E> {
    unmounter: Unmounter,
    dir: &'e Path,
    /// `major:minor`, if known.
    device: Option<&'e str>,
    /// Whether the mount can no longer serve requests.
    is_urgent: U,
    before_cut: C,
    before_exit: E,
}

impl<U: Fn() -> bool, C: Fn(), E: Fn()> UnmountSequence<'_, U, C, E> {
    /// Unmounts: first from the mount point, and shortly after from all processes.
    fn run(&self, ending: &Shutdown) {
        let dir = self.dir.display();
        if !(self.is_urgent)() {
            match self.unmounter.unmount() {
                Ok(()) if self.wait_for_other_namespaces(ending) => return,
                Ok(()) => {
                    let holders = self.device.map(mount_table::holders).unwrap_or_default();
                    let holders = mount_table::describe_holders(&holders);
                    let holders = holders.unwrap_or_else(|| "programs with open files".into());
                    tracing::warn!(%dir, holders, "the mount is in use in other mount namespaces, and is cut off");
                }
                Err(_) => {
                    tracing::warn!(%dir, "files are open; the mount cuts off their processes")
                }
            }
        }
        (self.before_cut)();
        if let Err(cause) = self.unmounter.abort() {
            // The exit of the process closes the connection to the kernel, and so ends the mount.
            tracing::error!(%cause, %dir, "the kernel does not abort the mount; this process exits");
            (self.before_exit)();
            std::process::exit(1);
        }
    }

    /// Waits until no mount namespace has the mount. A second signal ends the wait.
    fn wait_for_other_namespaces(&self, ending: &Shutdown) -> bool {
        let until = Instant::now() + NAMESPACE_TIMEOUT;
        while self.unmounter.is_mounted() {
            if Instant::now() >= until || ending.wait_for(NAMESPACE_POLL) {
                return !self.unmounter.is_mounted();
            }
        }
        true
    }
}

/// Serves until the mount has ended, by an unmount or by a shutdown.
fn serve<U: Fn() -> bool, C: Fn(), E: Fn()>(
    serve: impl FnOnce() -> anyhow::Result<()> + Send,
    end: &UnmountSequence<'_, U, C, E>,
    ending: &Shutdown,
) -> anyhow::Result<()> {
    let tell = ending.trigger();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let served = serve();
            // Wake the other side, which may wait for a signal.
            tell.trigger();
            served
        });
        ending.wait();
        if !serving.is_finished() {
            end.run(ending);
        }
        match serving.join() {
            Ok(served) => served,
            Err(_) => bail!("the server panicked"),
        }
    })
}

/// Saves the state that a process can save when it must exit while it serves requests.
fn save_state(fs: &Weak<Fs>, volume: &Volume) {
    if let Some(fs) = fs.upgrade() {
        let saved = fs
            .borrow_channel()
            .and_then(|mut port| fs.sync_all(&mut port));
        if let Err(cause) = saved {
            tracing::error!(%cause, "DATA LOSS: writes to mapped files and file times may be lost");
        }
    }
    volume.detach();
}
