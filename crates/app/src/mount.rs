//! `pagemesh mount` and `pagemesh umount`.
//!
//! Who unmounts wants to know when everything is in its place. So the mounting
//! process listens on a socket whose name, in the abstract namespace, is that of
//! the mount's device; it says a word on every connection at once, if its mount is
//! there, another when it is done, and its end closes them. The kernel gives the device's
//! number to the next mount while the process of the last one has the name yet.

use crate::args::{self, Mount, NullMount};
use crate::asked::Asked;
use crate::ending::{Ending, Teller};
use crate::volume::{GivenBack, attach, client, expect};
use anyhow::{Context, bail};
use pagemesh_base::mounts::{self, Known};
use pagemesh_base::peer::{Peer, peer, reach};
use pagemesh_base::space::{Space, SpaceError};
use pagemesh_direct::server::{IsMounted, Server};
use pagemesh_fs::{Fs, FsError};
use pagemesh_fuse::{MountOptions, Transport};
use pagemesh_manage::wire::{Content, VolumeDetail};
use pagemesh_volume::{Volume, VolumeState};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketType;
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// What the source of a mount begins with.
const SOURCE: &str = "pagemesh:";
/// How often it is looked whether this mount is fenced.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often the manager is asked what the pools still have.
const ROOM_EVERY: Duration = Duration::from_secs(5);
/// So long one that ends may take until it lets go of addresses, before this mount does
/// without: longer than it waits for bricks and a manager that are gone. Who listens there may
/// be no mount.
const ADDRESS_LIMIT: Duration = Duration::from_secs(40);
/// Between two looks at them.
const ADDRESS_PAUSE: Duration = Duration::from_millis(5);
/// Who waits for the end of a mount at the same time; others find the connection closed.
const WAITING_MAX: usize = 64;
const NOBODY_WAITS: &str = "nobody can wait for the end of this mount";
/// What whoever unmounts is told.
const DONE: &[u8] = b"done";
/// What it says at once.
const HERE: &[u8] = b"here";
/// How long that is waited for.
const HERE_MAX: Duration = Duration::from_secs(5);
/// How long somebody may have an address whom this one does not wait for: anybody can
/// take any name.
const STRANGER_MAX: Duration = Duration::from_secs(1);

/// The path without links. What is mounted there is not looked at: it may hang
/// or be dead.
fn place(dir: &Path) -> anyhow::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
        return Ok(dir);
    };
    let parent = parent.canonicalize();
    let parent = parent.with_context(|| format!("there is no directory {}", dir.display()))?;
    Ok(parent.join(name))
}

fn mount_on(dir: &Path) -> anyhow::Result<Option<Known>> {
    let mounts = mounts::all().context("cannot read the mounts")?;
    Ok(mounts.into_iter().rev().find(|known| known.dir == dir))
}

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
    let dir = check_dir(&args.dir)?;
    let ending = Ending::listen(args.until_stdin_ends)?;
    let asked = Asked::listen()?;
    let detail = expect(&args.client, &args.name, Content::Files)?;
    let volume = Arc::new(attach(&args.client, args.transport, &args.name)?);
    volume.plan_scrubs(args.scrubs.plan());
    asked.obey(vec![Arc::downgrade(&volume)])?;
    let space: Arc<dyn Space> = volume.clone();
    let given_back = GivenBack(Arc::clone(&volume));
    let fs = Arc::new(Fs::mount(space, pagemesh_fuse::wait, pagemesh_fuse::now)?);
    if let Some(damage) = fs.damage() {
        eprintln!("warning: {} is mounted read-only: {damage}", args.name);
    }
    take_over_limit(&fs, &detail);
    let fenced = Fenced {
        is: Arc::default(),
        teller: ending.teller(),
    };
    watch(Arc::downgrade(&volume), fenced.clone())?;
    let room = watch_room(&args.client, detail, &fs)?;
    let guests_of = Arc::downgrade(&fs);
    let options = MountOptions {
        source: format!("{SOURCE}{}", args.name),
        threads: args.threads,
        allow_other: args.allow_other,
        transport: transport(args.fuse),
        may_keep_awake: !args.no_keep_awake,
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
        mounted.connect_by(Box::new(guests.connector()));
    }
    let unmounter = mounted.unmounter();
    println!("ready {}", dir.display());
    let cut_off = || {
        if let Some(guests) = &guests {
            guests.give_up();
        }
        unmounter.cut_off()
    };
    let unmount = || unmounter.unmount();
    let served = serve(
        move || Ok(mounted.serve()?),
        unmount,
        cut_off,
        &dir,
        &ending,
    );
    drop(guests);
    if fenced.is.load(Ordering::Acquire) {
        let name = &args.name;
        bail!(
            "another client took over the file system {name}, or an operator took it away, and \
             this mount has ended; what it had confirmed is there, unless a copy that lacks it \
             was promoted by force. Mount it again to take it back: pagemesh mount {name} {}",
            dir.display()
        );
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

/// Looks now and then, because a mount that nobody uses is told by nothing else.
fn watch(volume: Weak<Volume>, fenced: Fenced) -> anyhow::Result<()> {
    std::thread::Builder::new()
        .name("fenced".into())
        .spawn(move || {
            while let Some(volume) = volume.upgrade() {
                let status = volume.status();
                drop(volume);
                if status.is_some_and(|status| status.state == VolumeState::Fenced) {
                    return fenced.tell();
                }
                std::thread::sleep(LOOK_EVERY);
            }
        })?;
    Ok(())
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
) -> anyhow::Result<pagemesh_fuse::Room> {
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

/// Mounts a file system that does nothing, as [`run`] does.
pub fn run_null(args: &NullMount) -> anyhow::Result<()> {
    let dir = check_dir(&args.dir)?;
    let ending = Ending::listen(args.until_stdin_ends)?;
    let options = MountOptions {
        source: "nothing".into(),
        threads: args.threads,
        allow_other: false,
        transport: transport(args.fuse),
        may_keep_awake: !args.no_keep_awake,
    };
    let mounted = pagemesh_fuse::mount_null(&dir, &options)?;
    let unmounter = mounted.unmounter();
    println!("ready {}", dir.display());
    let (unmount, cut_off) = (|| unmounter.unmount(), || unmounter.cut_off());
    serve(
        move || Ok(mounted.serve()?),
        unmount,
        cut_off,
        &dir,
        &ending,
    )
}

/// Lets processes reach the files themselves, if they can; without that the kernel serves
/// them.
fn let_guests_in(
    volume: &Arc<Volume>,
    fs: &Weak<Fs>,
    device: &str,
    patience: &Patience<'_>,
) -> Option<Server> {
    let fs = fs.upgrade()?;
    let is_mounted = patience.is_mounted;
    let start = || Server::start(Arc::clone(volume), &fs, device, Arc::clone(is_mounted));
    patience
        .once_free(start, || pagemesh_direct::server::holder(device))
        .inspect_err(|cause| tracing::warn!(%cause, "no process can reach the files directly"))
        .ok()
}

fn serve(
    serve: impl FnOnce() -> anyhow::Result<()> + Send,
    unmount: impl Fn() -> std::io::Result<()>,
    cut_off: impl Fn() -> std::io::Result<()>,
    dir: &Path,
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
        if !serving.is_finished() && unmount().is_err() {
            tracing::warn!(dir = %dir.display(), "files are open; whoever has them is cut off");
            // Ends the connection to the kernel, and so the threads that serve.
            cut_off().with_context(|| format!("cannot unmount {}", dir.display()))?;
        }
        match serving.join() {
            Ok(served) => served,
            Err(_) => bail!("the server panicked"),
        }
    })
}

/// Of the address at which the process of a mount is waited for.
fn name(device: &str) -> String {
    format!("pagemesh-mount-{device}")
}

/// How a mount waits for the addresses of its device.
struct Patience<'a> {
    until: Instant,
    ending: &'a Ending,
    is_mounted: &'a IsMounted,
}

impl Patience<'_> {
    /// Takes an address, as soon as it is free. The kernel gives a device number away again
    /// when its mount is gone, and that one's process has the addresses of this name until
    /// it ends. In vain is a wait for a mount that is to end, or is gone itself, and for who is
    /// no mount of this user or root, as `holder` tells.
    fn once_free<T>(
        &self,
        take: impl Fn() -> std::io::Result<T>,
        holder: impl Fn() -> std::io::Result<Peer>,
    ) -> std::io::Result<T> {
        let mut is_of_strangers = None;
        loop {
            let taken = take();
            let is_in_use = |cause: &std::io::Error| cause.kind() == ErrorKind::AddrInUse;
            if !taken.as_ref().is_err_and(is_in_use) || Instant::now() >= self.until {
                return taken;
            }
            is_of_strangers = match holder() {
                Ok(peer) if peer.is_trusted() => None,
                _ => is_of_strangers.or(Some(Instant::now() + STRANGER_MAX)),
            };
            if is_of_strangers.is_some_and(|until| Instant::now() >= until) {
                return taken;
            }
            if self.ending.within(ADDRESS_PAUSE) {
                // For whoever waits for it behind this.
                self.ending.teller().end();
                return taken;
            }
            if !(self.is_mounted)() {
                return taken;
            }
        }
    }
}

/// Lets others wait for the end of this mount.
fn listen(device: &str, patience: &Patience<'_>) -> Arc<Mutex<Vec<UnixStream>>> {
    let waiting: Arc<Mutex<Vec<UnixStream>>> = Arc::default();
    let name = name(device);
    let holder = || peer(reach(SocketType::STREAM, &name)?);
    let bind = |address| patience.once_free(|| UnixListener::bind_addr(&address), holder);
    let listener = SocketAddr::from_abstract_name(&name).and_then(bind);
    let listener = match listener {
        Ok(listener) => listener,
        Err(cause) => {
            tracing::warn!(%cause, "{NOBODY_WAITS}");
            return waiting;
        }
    };
    let accepted = Arc::clone(&waiting);
    let is_mounted = Arc::clone(patience.is_mounted);
    let spawned = std::thread::Builder::new()
        .name("waiting".into())
        .spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else {
                    std::thread::sleep(ADDRESS_PAUSE);
                    continue;
                };
                // Else who asks means the next mount. A new socket has room for a word.
                if !is_mounted() || stream.write_all(HERE).is_err() {
                    continue;
                }
                let mut waiting = accepted.lock().unwrap_or_else(PoisonError::into_inner);
                waiting.retain(|stream| !has_hung_up(stream));
                if waiting.len() < WAITING_MAX {
                    waiting.push(stream);
                }
            }
        });
    if let Err(cause) = spawned {
        tracing::warn!(%cause, "{NOBODY_WAITS}");
    }
    waiting
}

/// A connection to the process of a mount. It says at once that it is there, unless it is slow,
/// or of a version that did not; another mount's says nothing and hangs up.
fn process_of(known: &Known) -> std::io::Result<UnixStream> {
    let socket = reach(SocketType::STREAM, &name(&known.device))?;
    let user = peer(&socket)?.uid;
    if user != 0 && Some(user) != known.user {
        return Err(ErrorKind::PermissionDenied.into());
    }
    let mut stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HERE_MAX))?;
    let mut said = [0; HERE.len()];
    let heard = stream.read_exact(&mut said);
    stream.set_read_timeout(None)?;
    match heard {
        Ok(()) if said == HERE => Ok(stream),
        Ok(()) => Err(ErrorKind::InvalidData.into()),
        Err(cause) if cause.kind() == ErrorKind::WouldBlock => Ok(stream),
        Err(cause) => Err(cause),
    }
}

/// Whether the other side waits no more.
fn has_hung_up(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

fn tell_done(waiting: &Mutex<Vec<UnixStream>>) {
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    for stream in waiting.iter_mut() {
        // Whoever waited may have stopped.
        let _ = stream.write_all(DONE);
    }
}

/// Unmounts, and waits until the mounting process has put everything in place.
pub fn unmount(dir: &Path, lazy: bool) -> anyhow::Result<()> {
    let at = place(dir)?;
    let Some(known) = mount_on(&at)? else {
        bail!("no file system of pagemesh is mounted on {}", dir.display());
    };
    let waiting = process_of(&known);
    pagemesh_fuse::unmount_dir(&at, lazy).with_context(|| {
        let shown = dir.display();
        format!(
            "cannot unmount {shown}; if something in it is in use, end that, or take it away with \
             --lazy"
        )
    })?;
    if lazy {
        return Ok(());
    }
    let Ok(mut waiting) = waiting else {
        tracing::warn!("its process had ended before, or cannot be seen from here");
        return Ok(());
    };
    let mut said = Vec::new();
    let heard = waiting.read_to_end(&mut said);
    match heard {
        Ok(_) if said.strip_prefix(HERE).unwrap_or(&said) == DONE => Ok(()),
        _ => bail!(
            "{} is unmounted, but its process did not end well; see what it said",
            dir.display()
        ),
    }
}
