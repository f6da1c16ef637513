//! `pagemesh mount`: attaches the volume of a file system and serves it through the kernel.
//!
//! Invariant: a mount that is told to end does so within a limit, whoever uses it: it is
//! taken from its place, and what other mount namespaces and open files keep is cut off.

use crate::args::{self, Mount, NullMount};
use crate::asked::Asked;
use crate::ending::{Ending, Teller};
use crate::fenced::{self, TakenOver};
use crate::mounts::{self, mount_on, place};
use crate::unmount::{NOBODY_WAITS, Patience, listen, tell_done, tell_gone};
use crate::volume::{GivenBack, attach, client, expect};
use anyhow::{Context, bail};
use pagemesh_base::space::{Space, SpaceError};
use pagemesh_brick::resource_limits;
use pagemesh_direct::server::{DirectServer, IsMounted};
use pagemesh_fs::{Fs, FsError};
use pagemesh_fuse::{Caching, MountOptions, Transport, Unmounter};
use pagemesh_manage::wire::{Content, VolumeDetail};
use pagemesh_volume::Volume;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// What the source of a mount begins with.
const SOURCE: &str = "pagemesh:";
/// Bytes of memory that a mount of a small file system takes at least.
const MEMORY_MIN: u64 = 64 << 20;
/// How often the manager is asked what the pools still have.
const ROOM_EVERY: Duration = Duration::from_secs(5);
/// So long one that ends may take until it lets go of addresses, before this mount does
/// without: longer than it waits for bricks and a manager that are gone. Who listens there may
/// be no mount.
const ADDRESS_LIMIT: Duration = Duration::from_secs(40);
/// How long other mount namespaces may keep a mount that was told to end.
const OTHERS_MAX: Duration = Duration::from_secs(10);
/// Between two looks whether they have let go.
const OTHERS_LOOK: Duration = Duration::from_millis(20);

/// Refuses what cannot be mounted on, before anybody is fenced for it.
fn check_dir(dir: &Path) -> anyhow::Result<PathBuf> {
    if mount_on(&place(dir)?)?.is_some() {
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

/// Mounts a file system, and serves it until it is unmounted or told to end.
pub fn run(args: &Mount) -> anyhow::Result<()> {
    let (Some(name), Some(dir)) = (&args.name, &args.dir) else {
        bail!("say what to mount, and where: pagemesh mount NAME DIR");
    };
    if args.detach {
        // Fails only for the leader of a group of processes, which has a session already.
        let _ = rustix::process::setsid();
    }
    let dir = check_dir(dir)?;
    resource_limits::check_memory(MEMORY_MIN).with_context(|| format!("cannot mount {name}"))?;
    let ending = Ending::listen(args.until_stdin_ends)?;
    let asked = Asked::listen()?;
    let detail = expect(&args.client, name, Content::Files)?;
    let volume = Arc::new(attach(&args.client, args.transport, name)?);
    volume.plan_scrubs(args.scrubs.plan());
    asked.obey(vec![Arc::downgrade(&volume)])?;
    let space: Arc<dyn Space> = volume.clone();
    let given_back = GivenBack(Arc::clone(&volume));
    let fs = Arc::new(Fs::mount(space, pagemesh_fuse::wait, pagemesh_fuse::now)?);
    if let Some(damage) = fs.damage() {
        eprintln!("warning: {} is mounted read-only: {damage}", name);
    }
    take_over_limit(&fs, &detail);
    let fenced = Fenced {
        is: Arc::default(),
        teller: ending.teller(),
    };
    let on_fenced = fenced.clone();
    fenced::watch(Arc::downgrade(&volume), move || on_fenced.tell())?;
    let room = watch_room(&args.client, detail, &fs)?;
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
    let trouble = move |error: &FsError| on_trouble.take_in(error);
    let mounted = pagemesh_fuse::mount(fs, &dir, &options, Box::new(trouble), room)?;
    tracing::info!(transport = ?mounted.transport(), "mounted");
    let until = Instant::now() + ADDRESS_LIMIT;
    let looks = mounted.unmounter();
    let is_mounted: IsMounted = Arc::new(move || looks.is_mounted());
    let device = mount_on(&dir)
        .and_then(|known| Ok(known.context("the mount is not there")?.device))
        .inspect_err(|cause| tracing::warn!(%cause, "{NOBODY_WAITS}"))
        .ok();
    let patience = Patience {
        until,
        ending: &ending,
        is_mounted: &is_mounted,
    };
    let waiting = device.as_deref().map(|device| listen(device, &patience));
    let guests = device
        .as_deref()
        .and_then(|device| let_guests_in(&volume, &guests_of, device, &patience));
    if let Some(guests) = &guests {
        mounted.set_connect_hook(Box::new(guests.connector()));
    }
    println!("ready {}", dir.display());
    let served = {
        let end = End {
            unmounter: mounted.unmounter(),
            dir: &dir,
            device: device.as_deref(),
            is_urgent: || fenced.is.load(Ordering::Acquire),
            before_cut: || {
                if let Some(guests) = &guests {
                    guests.stop();
                }
            },
            before_exit: || save(&guests_of, &volume),
        };
        let gone = || {
            if let Some(waiting) = &waiting {
                tell_gone(waiting);
            }
        };
        serve(move || Ok(mounted.serve_with_hook(gone)?), &end, &ending)
    };
    drop(guests);
    if fenced.is.load(Ordering::Acquire) {
        return Err(TakenOver(format!(
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
        tell_done(&waiting);
    }
    Ok(())
}

fn transport(wish: args::Fuse) -> Transport {
    match wish {
        args::Fuse::Auto => Transport::Auto,
        args::Fuse::Classic => Transport::Classic,
        args::Fuse::IoUring => Transport::IoUring,
    }
}

/// Whether another client took over.
#[derive(Clone)]
struct Fenced {
    is: Arc<AtomicBool>,
    teller: Teller,
}

impl Fenced {
    fn tell(&self) {
        if !self.is.swap(true, Ordering::AcqRel) {
            self.teller.end();
        }
    }

    fn take_in(&self, error: &FsError) {
        match error {
            FsError::Space(SpaceError::Fenced) | FsError::Stopped(SpaceError::Fenced) => {
                self.tell();
            }
            other => tracing::debug!(%other, "a request failed"),
        }
    }
}

/// Lets the file system take what the manager has written down for it.
fn take_over_limit(fs: &Fs, detail: &VolumeDetail) {
    match fs.raise_limit(detail.info.size_bytes) {
        Ok(false) | Err(FsError::ReadOnly(_)) => {}
        Ok(true) => {
            let bytes = detail.info.size_bytes;
            tracing::info!(bytes, "the files may take more now");
        }
        Err(cause) => tracing::warn!(%cause, "the files may take no more than before"),
    }
}

/// Asks the manager now and then what the pools of the copies still have, of which the
/// least is what can be written, and what the files may take.
fn watch_room(
    args: &args::Client,
    mut detail: VolumeDetail,
    fs: &Arc<Fs>,
) -> anyhow::Result<pagemesh_fuse::FreeSpaceFn> {
    const UNKNOWN: u64 = u64::MAX;
    let manager = client(args)?;
    let room = Arc::new(AtomicU64::new(UNKNOWN));
    let known = Arc::downgrade(&room);
    let fs = Arc::downgrade(fs);
    std::thread::Builder::new()
        .name("room".into())
        .spawn(move || {
            while let Some(room) = known.upgrade() {
                if let Ok(new) = manager.volume(&detail.info.name) {
                    // What fails is tried again when it has changed once more, or by the
                    // next mount.
                    if new.info.size_bytes != detail.info.size_bytes
                        && let Some(fs) = fs.upgrade()
                    {
                        take_over_limit(&fs, &new);
                    }
                    // Copies come and go, too.
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
                std::thread::sleep(ROOM_EVERY);
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

/// Mounts a file system that does nothing, as [`run`] does.
pub fn run_null(args: &NullMount) -> anyhow::Result<()> {
    let dir = check_dir(&args.dir)?;
    let ending = Ending::listen(args.until_stdin_ends)?;
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
    let end = End {
        unmounter: mounted.unmounter(),
        dir: &dir,
        device: None,
        is_urgent: || false,
        before_cut: || {},
        before_exit: || {},
    };
    serve(move || Ok(mounted.serve()?), &end, &ending)
}

/// Lets processes reach the files themselves, if they can; without that the kernel serves
/// them.
fn let_guests_in(
    volume: &Arc<Volume>,
    fs: &Weak<Fs>,
    device: &str,
    patience: &Patience<'_>,
) -> Option<DirectServer> {
    let fs = fs.upgrade()?;
    let is_mounted = patience.is_mounted;
    let start = || DirectServer::start(Arc::clone(volume), &fs, device, Arc::clone(is_mounted));
    patience
        .once_free(start, || pagemesh_direct::server::serving_process(device))
        .inspect_err(|cause| tracing::warn!(%cause, "no process can reach the files directly"))
        .ok()
}

/// How a mount that was told to end does so.
struct End<'e, U, C, E> {
    unmounter: Unmounter,
    dir: &'e Path,
    /// `major:minor`, as far as it is known.
    device: Option<&'e str>,
    /// Whether the mount serves nothing any more.
    is_urgent: U,
    before_cut: C,
    before_exit: E,
}

impl<U: Fn() -> bool, C: Fn(), E: Fn()> End<'_, U, C, E> {
    /// Takes the mount away: at first from its place, and soon from everybody.
    fn end(&self, ending: &Ending) {
        let dir = self.dir.display();
        if !(self.is_urgent)() {
            match self.unmounter.unmount() {
                Ok(()) if self.others_let_go(ending) => return,
                Ok(()) => {
                    let holders = self.device.map(mounts::holders).unwrap_or_default();
                    let holders = mounts::named(&holders);
                    let holders = holders.unwrap_or_else(|| "programs with open files".into());
                    tracing::warn!(%dir, holders, "the mount is in use elsewhere, and is cut off");
                }
                Err(_) => {
                    tracing::warn!(%dir, "files are open; the processes that have them are cut off")
                }
            }
        }
        (self.before_cut)();
        if let Err(cause) = self.unmounter.abort() {
            // The end of the process closes the connection to the kernel, and with it the mount.
            tracing::error!(%cause, %dir, "the kernel does not cut the mount off; this process ends");
            (self.before_exit)();
            std::process::exit(1);
        }
    }

    /// Waits until no mount namespace has the mount. A further signal ends the wait.
    fn others_let_go(&self, ending: &Ending) -> bool {
        let until = Instant::now() + OTHERS_MAX;
        while self.unmounter.is_mounted() {
            if Instant::now() >= until || ending.within(OTHERS_LOOK) {
                return !self.unmounter.is_mounted();
            }
        }
        true
    }
}

/// Serves until the mount has ended, by an unmount or because the process was told to end.
fn serve<U: Fn() -> bool, C: Fn(), E: Fn()>(
    serve: impl FnOnce() -> anyhow::Result<()> + Send,
    end: &End<'_, U, C, E>,
    ending: &Ending,
) -> anyhow::Result<()> {
    let tell = ending.teller();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let served = serve();
            // The other side may be waiting for a signal.
            tell.end();
            served
        });
        ending.wait();
        if !serving.is_finished() {
            end.end(ending);
        }
        match serving.join() {
            Ok(served) => served,
            Err(_) => bail!("the server panicked"),
        }
    })
}

/// The state that a process can save when it must end amid serving.
fn save(fs: &Weak<Fs>, volume: &Volume) {
    if let Some(fs) = fs.upgrade() {
        let saved = fs
            .borrow_channel()
            .and_then(|mut port| fs.sync_all(&mut port));
        if let Err(cause) = saved {
            tracing::error!(%cause, "what was stored into mappings and times may be lost");
        }
    }
    volume.detach();
}
