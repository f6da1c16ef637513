//! `pagemesh umount`, and how the mounting process tells of its end.
//!
//! An operator who unmounts wants to know when everything is in its place. So the mounting
//! process listens on a socket whose name, in the abstract namespace, is that of the
//! mount's device. It sends a word on every connection at once, if its mount is there,
//! another when the kernel has the mount no more, and a third when everything is written;
//! its end closes them. The kernel gives the device's number to the next mount while the
//! process of the last one has the name yet.
//!
//! Invariant: every wait here has a limit. A mount that other mount namespaces keep, and
//! open files of one that was taken from its place, have no end that could be waited for.

use crate::ending::Ending;
use crate::mounts::{self, mount_on, place};
use anyhow::{Context, bail};
use pagemesh_base::mounts::MountEntry;
use pagemesh_base::peer::{PeerCredentials, connect_abstract, peer_credentials};
use pagemesh_direct::server::IsMounted;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketType;
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Between two looks at an address that another process has.
const ADDRESS_PAUSE: Duration = Duration::from_millis(5);
/// Who waits for the end of a mount at the same time; others find the connection closed.
const WAITING_MAX: usize = 64;
pub const NOBODY_WAITS: &str = "nobody can wait for the end of this mount";
/// The mounting process is there.
const HERE: &[u8] = b"here";
/// The kernel has the mount no more.
const GONE: &[u8] = b"gone";
/// Everything is written.
const DONE: &[u8] = b"done";
/// How long the first word is waited for.
const HERE_MAX: Duration = Duration::from_secs(5);
/// How long the second one is waited for. The kernel ends an unmounted file system within
/// milliseconds, unless another mount namespace has it.
const GONE_MAX: Duration = Duration::from_secs(5);
/// How long the last one is waited for: longer than requests to bricks and a manager that
/// are away.
const DONE_MAX: Duration = Duration::from_secs(120);
/// How long somebody may have an address whom this one does not wait for: anybody can
/// take any name.
const STRANGER_MAX: Duration = Duration::from_secs(1);

/// Of the address at which the process of a mount is waited for.
fn name(device: &str) -> String {
    format!("pagemesh-mount-{device}")
}

/// Connections of those who wait for the end of a mount.
pub type Waiting = Arc<Mutex<Vec<UnixStream>>>;

/// How a mount waits for the addresses of its device.
pub struct Patience<'a> {
    pub until: Instant,
    pub ending: &'a Ending,
    pub is_mounted: &'a IsMounted,
}

impl Patience<'_> {
    /// Takes an address, as soon as it is free. The kernel gives a device number away again
    /// when its mount is gone, and that one's process has the addresses of this name until
    /// it ends. In vain is a wait for a mount that is to end, or is gone itself, and for who is
    /// no mount of this user or root, as `holder` tells.
    pub fn once_free<T>(
        &self,
        take: impl Fn() -> std::io::Result<T>,
        holder: impl Fn() -> std::io::Result<PeerCredentials>,
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
pub fn listen(device: &str, patience: &Patience<'_>) -> Waiting {
    let waiting = Waiting::default();
    let name = name(device);
    let holder = || peer_credentials(connect_abstract(SocketType::STREAM, &name)?);
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
fn process_of(known: &MountEntry) -> std::io::Result<Process> {
    let socket = connect_abstract(SocketType::STREAM, &name(&known.device))?;
    let PeerCredentials { pid, uid } = peer_credentials(&socket)?;
    if uid != 0 && Some(uid) != known.user {
        return Err(ErrorKind::PermissionDenied.into());
    }
    let mut stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(HERE_MAX))?;
    let mut said = [0; HERE.len()];
    let heard = stream.read_exact(&mut said);
    match heard {
        Ok(()) if said == HERE => {}
        Ok(()) => return Err(ErrorKind::InvalidData.into()),
        Err(cause) if cause.kind() == ErrorKind::WouldBlock => {}
        Err(cause) => return Err(cause),
    }
    Ok(Process {
        stream,
        pid: pid.map(|pid| pid.as_raw_nonzero().get()),
        said: Vec::new(),
    })
}

/// Whether the other side waits no more.
fn has_hung_up(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

/// The kernel has the mount no more.
pub fn tell_gone(waiting: &Waiting) {
    tell(waiting, GONE);
}

/// Everything is written.
pub fn tell_done(waiting: &Waiting) {
    tell(waiting, DONE);
}

fn tell(waiting: &Waiting, word: &[u8]) {
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    for stream in waiting.iter_mut() {
        // The other side may have stopped waiting. A socket has room for a few words.
        let _ = stream.write_all(word);
    }
}

/// The process of a mount, as `pagemesh umount` hears it.
struct Process {
    stream: UnixStream,
    /// None where it is not seen from here.
    pid: Option<i32>,
    said: Vec<u8>,
}

impl Process {
    /// Listens until it has said a word, its end at the latest. False: the time is over.
    fn hears(&mut self, word: &[u8], limit: Duration) -> std::io::Result<bool> {
        let until = Instant::now() + limit;
        loop {
            if self.has_said(word) {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut more = [0; 16];
            match self.stream.read(&mut more) {
                Ok(0) => return Ok(true),
                Ok(len) => self.said.extend_from_slice(&more[..len]),
                Err(cause) if is_late(cause.kind()) => {}
                Err(cause) => return Err(cause),
            }
        }
    }

    fn has_said(&self, word: &[u8]) -> bool {
        self.said.windows(word.len()).any(|said| said == word)
    }

    /// Its name for people.
    fn name(&self) -> String {
        match self.pid {
            Some(pid) => format!("the mounting process {pid}"),
            None => "the mounting process".into(),
        }
    }

    fn kill(&self) -> String {
        match self.pid {
            Some(pid) => format!("kill {pid}"),
            None => "end the mounting process".into(),
        }
    }
}

fn is_late(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// How a mount is taken away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// If nothing in it is in use.
    Idle,
    /// From its place at once. It ends with the last open file, which nobody waits for.
    Lazily,
    /// From everybody who uses it.
    ByForce,
}

/// Unmounts, and waits until the mounting process has put everything in place.
pub fn unmount(dir: &Path, how: How) -> anyhow::Result<()> {
    let at = place(dir)?;
    let Some(known) = mount_on(&at)? else {
        bail!("no file system of pagemesh is mounted on {}", dir.display());
    };
    let process = process_of(&known);
    let taken = match how {
        How::ByForce => pagemesh_fuse::abort_dir(&at),
        how => pagemesh_fuse::unmount_dir(&at, how == How::Lazily),
    };
    taken.with_context(|| {
        let shown = dir.display();
        format!(
            "cannot unmount {shown}; if something in it is in use, end that, take the mount from \
             its place with --lazy, or from everybody with --force"
        )
    })?;
    if how == How::Lazily {
        return Ok(());
    }
    let Ok(mut process) = process else {
        tracing::warn!("its process had ended before, or cannot be seen from here");
        return Ok(());
    };
    await_end(&mut process, &known, dir)
}

fn await_end(process: &mut Process, known: &MountEntry, dir: &Path) -> anyhow::Result<()> {
    let shown = dir.display();
    if !process.hears(GONE, GONE_MAX)?
        && let Some(holders) = mounts::named(&mounts::holders(&known.device))
    {
        bail!(
            "{shown} is unmounted here, but other mount namespaces have it still: {holders}. The \
             file system stays mounted until they end or unmount it. To take it from them: {}",
            process.kill()
        );
    }
    if !process.hears(DONE, DONE_MAX)? {
        bail!(
            "{shown} is unmounted, but {} has not ended within {} s: it waits for bricks or the \
             manager, or programs have files open that are not seen from here; see its log, or \
             end it: {}",
            process.name(),
            DONE_MAX.as_secs(),
            process.kill()
        );
    }
    match process.has_said(DONE) {
        true => Ok(()),
        false => bail!("{shown} is unmounted, but its process did not end well; see what it said"),
    }
}
