//! `pagemesh umount`, and the messages by which a mount process announces its end.
//!
//! The operator of an unmount must learn when all data is written. So the mount process listens on
//! an abstract socket with the name of the mount's device. It sends a first message on every new
//! connection while its mount exists, a second one when the kernel has removed the mount, and a
//! third one when all data is written; its exit closes the connections. The kernel may reuse the
//! device number for the next mount while the old mount process still has the socket name.
//! Invariant: every wait here has a limit. A mount in other mount namespaces, and open files of a
//! detached mount, may last for ever.

use crate::commands::mount::mount_table::{self, find_mount_at, resolve_parent};
use crate::shutdown::Shutdown;
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

/// Pause between two attempts to take an address that another process has.
const ADDRESS_PAUSE: Duration = Duration::from_millis(5);
/// Maximum of connections that wait for the end of a mount; the server closes further ones.
const WAITERS_MAX: usize = 64;
pub const NOBODY_WAITS: &str = "umount cannot wait for the end of this mount";
/// The mount process serves the mount.
const MESSAGE_MOUNTED: &[u8] = b"here";
/// The kernel has removed the mount.
const MESSAGE_UNMOUNTED: &[u8] = b"gone";
/// All data is written.
const MESSAGE_COMPLETE: &[u8] = b"done";
/// Limit of the wait for the first message.
const MOUNTED_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of the wait for the second message. The kernel ends an unmounted file system within
/// milliseconds, unless another mount namespace has it.
const UNMOUNTED_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of the wait for the last message: longer than the time-outs of requests to unreachable
/// bricks and an unreachable manager.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(120);
/// Limit of the wait for an address that an untrusted process has: any process can take any name.
const UNTRUSTED_OWNER_TIMEOUT: Duration = Duration::from_secs(1);

/// The socket name of the mount process of a device.
fn address_name(device: &str) -> String {
    format!("pagemesh-mount-{device}")
}

/// Connections that wait for the end of a mount.
pub type UnmountWaiters = Arc<Mutex<Vec<UnixStream>>>;

/// The wait of a new mount for the addresses of its device.
pub struct AddressWait<'a> {
    pub until: Instant,
    pub shutdown: &'a Shutdown,
    pub is_mounted: &'a IsMounted,
}

impl AddressWait<'_> {
    /// Takes an address as soon as it is free. The kernel reuses a device number once its mount is
    /// gone, while the old mount process has the addresses until it exits. The wait ends early if
    /// this mount shall end or is gone, or if the owner that `holder` reports is neither this user
    /// nor root.
    pub fn take_when_free<T>(
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
                _ => is_of_strangers.or(Some(Instant::now() + UNTRUSTED_OWNER_TIMEOUT)),
            };
            if is_of_strangers.is_some_and(|until| Instant::now() >= until) {
                return taken;
            }
            if self.shutdown.wait_for(ADDRESS_PAUSE) {
                // Trigger the shutdown again for the code that waits for it later.
                self.shutdown.trigger().trigger();
                return taken;
            }
            if !(self.is_mounted)() {
                return taken;
            }
        }
    }
}

/// Lets other processes wait for the end of this mount.
pub fn serve_waiters(device: &str, patience: &AddressWait<'_>) -> UnmountWaiters {
    let waiting = UnmountWaiters::default();
    let name = address_name(device);
    let holder = || peer_credentials(connect_abstract(SocketType::STREAM, &name)?);
    let bind = |address| patience.take_when_free(|| UnixListener::bind_addr(&address), holder);
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
                // Otherwise the connection is meant for the next mount. A new socket has room for a
                // message.
                if !is_mounted() || stream.write_all(MESSAGE_MOUNTED).is_err() {
                    continue;
                }
                let mut waiting = accepted.lock().unwrap_or_else(PoisonError::into_inner);
                waiting.retain(|stream| !has_hung_up(stream));
                if waiting.len() < WAITERS_MAX {
                    waiting.push(stream);
                }
            }
        });
    if let Err(cause) = spawned {
        tracing::warn!(%cause, "{NOBODY_WAITS}");
    }
    waiting
}

/// Connects to the process of a mount. The process sends its first message at once, unless it is
/// slow or an older version. The process of another mount closes the connection without a message.
fn connect_process(known: &MountEntry) -> std::io::Result<MountProcess> {
    let socket = connect_abstract(SocketType::STREAM, &address_name(&known.device))?;
    let PeerCredentials { pid, uid } = peer_credentials(&socket)?;
    if uid != 0 && Some(uid) != known.user {
        return Err(ErrorKind::PermissionDenied.into());
    }
    let mut stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(MOUNTED_TIMEOUT))?;
    let mut said = [0; MESSAGE_MOUNTED.len()];
    let heard = stream.read_exact(&mut said);
    match heard {
        Ok(()) if said == MESSAGE_MOUNTED => {}
        Ok(()) => return Err(ErrorKind::InvalidData.into()),
        Err(cause) if cause.kind() == ErrorKind::WouldBlock => {}
        Err(cause) => return Err(cause),
    }
    Ok(MountProcess {
        stream,
        pid: pid.map(|pid| pid.as_raw_nonzero().get()),
        received: Vec::new(),
    })
}

/// Whether the other side has closed its end.
fn has_hung_up(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    !matches!(poll(&mut polled, Some(&Timespec::default())), Ok(0))
}

/// Reports that the kernel has removed the mount.
pub fn notify_unmounted(waiting: &UnmountWaiters) {
    notify(waiting, MESSAGE_UNMOUNTED);
}

/// Reports that all data is written.
pub fn notify_complete(waiting: &UnmountWaiters) {
    notify(waiting, MESSAGE_COMPLETE);
}

fn notify(waiting: &UnmountWaiters, word: &[u8]) {
    let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
    for stream in waiting.iter_mut() {
        // The other side may have closed. A socket has room for a few messages.
        let _ = stream.write_all(word);
    }
}

/// The process of a mount, as seen by `pagemesh umount`.
struct MountProcess {
    stream: UnixStream,
    /// `None` if the process is not visible in this PID namespace.
    pid: Option<i32>,
    received: Vec<u8>,
}

impl MountProcess {
    /// Waits until the process has sent a message or exited. Returns false at the limit.
    fn wait_for_message(&mut self, word: &[u8], limit: Duration) -> std::io::Result<bool> {
        let until = Instant::now() + limit;
        loop {
            if self.has_received(word) {
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
                Ok(len) => self.received.extend_from_slice(&more[..len]),
                Err(cause) if is_timeout(cause.kind()) => {}
                Err(cause) => return Err(cause),
            }
        }
    }

    fn has_received(&self, word: &[u8]) -> bool {
        self.received.windows(word.len()).any(|said| said == word)
    }

    /// The name of the process for people.
    fn display_name(&self) -> String {
        match self.pid {
            Some(pid) => format!("the mounting process {pid}"),
            None => "the mounting process".into(),
        }
    }

    fn kill_command(&self) -> String {
        match self.pid {
            Some(pid) => format!("kill {pid}"),
            None => "end the mounting process".into(),
        }
    }
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// How to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmountMode {
    /// Only if no process uses the mount.
    IfUnused,
    /// Detach at once. The mount ends with its last open file; the command does not wait for that.
    Lazy,
    /// From all processes that use it.
    Forced,
}

/// Unmounts, and waits until the mount process has written all data.
pub fn unmount(dir: &Path, how: UnmountMode) -> anyhow::Result<()> {
    let at = resolve_parent(dir)?;
    let Some(known) = find_mount_at(&at)? else {
        bail!("no file system of pagemesh is mounted on {}", dir.display());
    };
    let process = connect_process(&known);
    let taken = match how {
        UnmountMode::Forced => pagemesh_fuse::abort_dir(&at),
        how => pagemesh_fuse::unmount_dir(&at, how == UnmountMode::Lazy),
    };
    taken.with_context(|| {
        let shown = dir.display();
        format!(
            "cannot unmount {shown}; if something in it is in use, end that, take the mount from \
             its place with --lazy, or from everybody with --force"
        )
    })?;
    if how == UnmountMode::Lazy {
        return Ok(());
    }
    let Ok(mut process) = process else {
        tracing::warn!("its mount process has exited before, or is not visible here");
        return Ok(());
    };
    await_end(&mut process, &known, dir)
}

fn await_end(process: &mut MountProcess, known: &MountEntry, dir: &Path) -> anyhow::Result<()> {
    let shown = dir.display();
    if !process.wait_for_message(MESSAGE_UNMOUNTED, UNMOUNTED_TIMEOUT)?
        && let Some(holders) = mount_table::describe_holders(&mount_table::holders(&known.device))
    {
        bail!(
            "{shown} is unmounted here, but other mount namespaces have it still: {holders}. The \
             file system stays mounted until they end or unmount it. To take it from them: {}",
            process.kill_command()
        );
    }
    if !process.wait_for_message(MESSAGE_COMPLETE, COMPLETE_TIMEOUT)? {
        bail!(
            "{shown} is unmounted, but {} has not ended within {} s: it waits for bricks or the \
             manager, or programs have files open that are not seen from here; see its log, or \
             end it: {}",
            process.display_name(),
            COMPLETE_TIMEOUT.as_secs(),
            process.kill_command()
        );
    }
    match process.has_received(MESSAGE_COMPLETE) {
        true => Ok(()),
        false => bail!("{shown} is unmounted, but its mount process failed; see its log"),
    }
}
