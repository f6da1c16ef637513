//! Messages by which a mount process announces its end.
//!
//! The operator of an unmount must learn when all data is written. So the mount process listens on
//! an abstract socket with the name of the mount's device. It sends a first message on every new
//! connection while its mount exists, a second one when the kernel has removed the mount, and a
//! third one when all data is written; its exit closes the connections. The kernel may reuse the
//! device number for the next mount while the old mount process still has the socket name.
//! Invariant: the number of connections and each wait for an address have limits.

use crate::shutdown::Shutdown;
use pagemesh_base::peer::{PeerCredentials, connect_abstract, peer_credentials};
use pagemesh_base::poison;
use pagemesh_direct::server::IsMounted;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SocketType;
use std::io::{ErrorKind, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Pause between two attempts to take an address that another process has.
const ADDRESS_PAUSE: Duration = Duration::from_millis(5);
/// Maximum of connections that wait for the end of a mount; the server closes further ones.
const WAITERS_MAX: usize = 64;
pub const NOBODY_WAITS: &str = "umount cannot wait for the end of this mount";
/// The mount process serves the mount.
pub const MESSAGE_MOUNTED: &[u8] = b"here";
/// The kernel has removed the mount.
pub const MESSAGE_UNMOUNTED: &[u8] = b"gone";
/// All data is written.
pub const MESSAGE_COMPLETE: &[u8] = b"done";
/// Limit of the wait for an address that an untrusted process has: any process can take any name.
const UNTRUSTED_OWNER_TIMEOUT: Duration = Duration::from_secs(1);

/// The socket name of the mount process of a device.
pub fn address_name(device: &str) -> String {
    format!("pagemesh-mount-{device}")
}

/// Connections that wait for the end of a mount.
#[derive(Default)]
pub struct WaiterList {
    streams: Mutex<Vec<UnixStream>>,
    is_closed: AtomicBool,
}

/// The shared list of them.
pub type UnmountWaiters = Arc<WaiterList>;

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
                if accepted.is_closed.load(Ordering::Acquire) {
                    return;
                }
                let Ok(mut stream) = stream else {
                    std::thread::sleep(ADDRESS_PAUSE);
                    continue;
                };
                // Otherwise the connection is meant for the next mount. A new socket has room for a
                // message.
                if !is_mounted() || stream.write_all(MESSAGE_MOUNTED).is_err() {
                    continue;
                }
                let mut waiting = poison::lock(&accepted.streams);
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

/// Gives the address of an ended mount free, for a process that goes on: the kernel reuses device numbers. Closes the connections.
pub fn close_address(waiting: &UnmountWaiters, device: &str) {
    waiting.is_closed.store(true, Ordering::Release);
    // It wakes the thread that accepts.
    let woken = connect_abstract(SocketType::STREAM, &address_name(device));
    drop(woken);
    poison::lock(&waiting.streams).clear();
}

fn notify(waiting: &UnmountWaiters, word: &[u8]) {
    let mut waiting = poison::lock(&waiting.streams);
    for stream in waiting.iter_mut() {
        // The other side may have closed. A socket has room for a few messages.
        let _ = stream.write_all(word);
    }
}
