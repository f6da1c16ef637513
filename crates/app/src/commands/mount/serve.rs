//! A mount process: attaches the volume of a file system and serves it over FUSE.
//!
//! Invariant: the volume is detached after the file system is closed, on every way out.

use crate::args::{FuseTransport, ManagerArgs, ScrubArgs, Transport as TransportArg};
use crate::client::{DetachGuard, attach_replacing, cluster_client, expect_content};
use crate::commands::mount::dead;
use crate::commands::mount::free_space::{self, raise_limit};
use crate::commands::mount::life_signs::LifeSigns;
use crate::commands::mount::mount_table::{find_mount_at, resolve_parent};
use crate::commands::mount::served::{ClientCounter, MountedParts, ServedMount};
use crate::commands::mount::snapshot;
use crate::commands::mount::snapshot_views::MountSnapshots;
use crate::commands::mount::takeover::{self, ServingHolder};
use crate::commands::mount::{MountArgs, options};
use crate::fence_watch::{self, FencedError};
use crate::figure_reporter::FigureReporter;
use crate::metrics_pages;
use crate::service;
use crate::shutdown::Shutdown;
use crate::snapshot_cuts;
use crate::snapshot_path::VolumeOrSnapshot;
use crate::standby::StandbyState;
use crate::status_signals::StatusSignals;
use anyhow::{Context, bail, ensure};
use pagemesh_base::authority::AuthorityError;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::{Space, SpaceError};
use pagemesh_brick::resource_limits;
use pagemesh_fs::{Fs, FsError};
use pagemesh_fuse::{Caching, MountFlags, MountOptions, Transport};
use pagemesh_manage::ManagerError;
use pagemesh_manage::wire::{Attachment, VolumeContent, VolumeDetail};
use pagemesh_metrics::{BoundResponder, Responder};
use pagemesh_volume::{AttachError, Volume};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// The start of the source of a mount.
pub const SOURCE: &str = "pagemesh:";
/// Minimum memory of a mount of a small file system, in bytes.
pub const MEMORY_MIN: u64 = 64 << 20;
/// The pause of a standby between two queries of a manager that does not answer.
const MANAGER_RETRY_PAUSE: Duration = Duration::from_secs(1);
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
    let flags = mount_flags(args)?;
    resource_limits::check_memory(MEMORY_MIN).with_context(|| format!("cannot mount {name}"))?;
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let signals = StatusSignals::listen()?;
    service::notify_status("attaching the volume and reading the file system");
    let wanted = FileSystemArgs {
        client: &args.client,
        transport: args.transport,
        scrubs: &args.scrubs,
        takeover: match args.force {
            true => Takeover::Force,
            false => Takeover::Refuse,
        },
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
    let end = ending.trigger();
    let fenced = FenceFlag::watch(&volume, move || end.trigger())?;
    let free_space = free_space::watch(&args.client, detail, &fs)?;
    let files = Arc::downgrade(&fs);
    let parts = MountedParts {
        fs,
        volume: Arc::clone(&volume),
        fenced: fenced.clone(),
        free_space,
        snapshots: MountSnapshots::of(name, args.transport, &args.client)?,
    };
    let options = mount_options(args, name, flags);
    let mut mount = ServedMount::start(parts, &dir, &options, &ending)?;
    if let Some(seconds) = args.commit_interval {
        mount.defer_commits(Duration::from_secs(seconds))?;
    }
    let unmounter = mount.unmounter();
    signs.set_end(move || !unmounter.is_mounted());
    let metrics = serve_metrics(metrics, name, &volume, &files, mount.client_counter());
    println!("ready {}", dir.display());
    service::notify_ready(&format!("{name} on {}", dir.display()));
    let (served, end) = mount.serve(&ending);
    drop(metrics);
    if fenced.is_set() {
        return Err(fenced_error(name, &dir).into());
    }
    served?;
    // The manager takes reports of the attached client only.
    drop(reporter);
    drop(detach);
    end.complete();
    Ok(())
}

/// Serves the metrics of the mount. If it fails, the mount goes on without.
fn serve_metrics(
    bound: Option<BoundResponder>,
    name: &VolumeName,
    volume: &Arc<Volume>,
    files: &Weak<Fs>,
    count_clients: Option<ClientCounter>,
) -> Option<Responder> {
    let volumes = [(name.clone(), Arc::downgrade(volume))];
    let files = Weak::clone(files);
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
    pub takeover: Takeover<'a>,
}

/// The decision about a process that serves the file system.
#[derive(Clone, Copy, Debug)]
pub enum Takeover<'a> {
    /// This process ends with an error.
    Refuse,
    /// It is fenced.
    Force,
    /// This process waits for its end, and for a manager that does not answer.
    Standby(&'a StandbyState),
}

impl<'a> Takeover<'a> {
    fn standby(self) -> Option<&'a StandbyState> {
        match self {
            Takeover::Standby(state) => Some(state),
            Takeover::Refuse | Takeover::Force => None,
        }
    }

    /// Asks the manager. A standby asks again until the manager answers. `pause` returns whether this process shall end; then
    /// there is no answer.
    pub fn ask_manager<T>(
        self,
        pause: impl Fn(Duration) -> bool,
        ask: impl Fn() -> anyhow::Result<T>,
    ) -> anyhow::Result<Option<T>> {
        loop {
            let cause = match ask() {
                Ok(answer) => {
                    self.standby().inspect(|it| it.record_answer());
                    return Ok(Some(answer));
                }
                Err(cause) => cause,
            };
            let unreachable = cause.downcast_ref::<ManagerError>();
            let unreachable =
                unreachable.filter(|it| matches!(it, ManagerError::Unreachable { .. }));
            let (Some(standby), Some(unreachable)) = (self.standby(), unreachable) else {
                return Err(cause);
            };
            standby.record_no_answer(unreachable);
            if pause(MANAGER_RETRY_PAUSE) {
                return Ok(None);
            }
        }
    }
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
    let standby = args.takeover.standby();
    let find = || expect_content(&manager, name, VolumeContent::Files);
    let pause = |time| ending.wait_for(time);
    let Some(detail) = args.takeover.ask_manager(pause, find)? else {
        return Ok(None);
    };
    let mut was_fenced = false;
    let (volume, bound) = loop {
        let decide = |holder: &Attachment| match args.takeover {
            Takeover::Force => ServingHolder::Fence,
            Takeover::Standby(state) if state.has_replaced(holder.process.as_deref()) => {
                ServingHolder::Fence
            }
            Takeover::Standby(_) => ServingHolder::Await,
            Takeover::Refuse => ServingHolder::Refuse(takeover::mount_refusal(name, holder)),
        };
        let words = (&takeover::MOUNT_WORDS, standby);
        let Some(replaced) = takeover::await_holder(&manager, name, words, decide, pause)? else {
            return Ok(None);
        };
        let bound = bind()?;
        match attach_replacing(args.client, args.transport, name, Some(replaced))? {
            Ok(volume) => break (Arc::new(volume), bound),
            // This process waits for that client, but only once: two mounts with `--force` would alternate.
            Err(AttachError::Fenced(_)) if !was_fenced => was_fenced = true,
            // The wait for the manager begins again.
            Err(AttachError::Authority {
                cause: AuthorityError::Unreachable(_),
                ..
            }) if standby.is_some() => {}
            Err(cause) => {
                // Another client may have attached the volume since.
                let holder = match manager.holder(name) {
                    Err(ManagerError::Unreachable { .. }) if standby.is_some() => continue,
                    status => status?.attached,
                };
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
    standby.inspect(|it| it.end_takeover());
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

/// The options of `-o`.
fn mount_flags(args: &MountArgs) -> anyhow::Result<MountFlags> {
    let flags = options::apply(MountFlags::default(), &args.options);
    ensure!(
        args.commit_interval.is_none() || !(flags.is_sync || flags.is_dirsync),
        "--commit-interval delays what -o sync and -o dirsync store at once; leave one of them out"
    );
    Ok(flags)
}

fn mount_options(args: &MountArgs, name: &VolumeName, flags: MountFlags) -> MountOptions {
    MountOptions {
        source: format!("{SOURCE}{name}"),
        threads: args.threads,
        allow_other: args.allow_other,
        flags,
        transport: fuse_transport(args.fuse),
        may_keep_cpus_awake: !args.no_keep_awake,
        caching: fuse_caching(args.direct_io),
        shows_snapshots: args.show_snapshots,
        is_shared: false,
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
    on_set: Arc<dyn Fn() + Send + Sync>,
}

impl FenceFlag {
    /// Sets the flag, and calls `on_set` once, soon after another client has attached the volume.
    pub fn watch(
        volume: &Arc<Volume>,
        on_set: impl Fn() + Send + Sync + 'static,
    ) -> anyhow::Result<FenceFlag> {
        let fenced = FenceFlag {
            is_set: Arc::default(),
            on_set: Arc::new(on_set),
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
            (self.on_set)();
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// The manager answers the third question. The questions, and the answer.
    fn ask(takeover: Takeover<'_>, pauses_max: u32) -> (u32, anyhow::Result<Option<u32>>) {
        let (questions, pauses) = (Cell::new(0), Cell::new(0));
        let pause = |_| {
            pauses.set(pauses.get() + 1);
            pauses.get() == pauses_max
        };
        let answer = takeover.ask_manager(pause, || {
            questions.set(questions.get() + 1);
            match questions.get() {
                3 => Ok(7),
                _ => Err(ManagerError::Unreachable {
                    url: "http://manager".into(),
                    cause: "it restarts".into(),
                }
                .into()),
            }
        });
        (questions.get(), answer)
    }

    #[test]
    fn standby_asks_again_until_the_manager_answers() {
        let state = StandbyState::default();
        state.set_waiting(true);
        let (questions, answer) = ask(Takeover::Standby(&state), 10);
        assert_eq!((questions, answer.expect("no error")), (3, Some(7)));
        let silence = state.figures(std::time::Instant::now()).manager_silence;
        assert_eq!(silence, Duration::ZERO, "the silence is over");
        // The end of the process ends the questions.
        let (questions, answer) = ask(Takeover::Standby(&state), 2);
        assert_eq!((questions, answer.expect("no error")), (2, None));
        for other in [Takeover::Refuse, Takeover::Force] {
            let (questions, answer) = ask(other, 10);
            assert!(questions == 1 && answer.is_err());
        }
    }

    #[test]
    fn refusal_of_the_manager_ends_a_standby() {
        let state = StandbyState::default();
        let refuse = || -> anyhow::Result<()> { bail!("there is no such volume") };
        let takeover = Takeover::Standby(&state);
        assert!(takeover.ask_manager(|_| false, refuse).is_err());
    }
}
