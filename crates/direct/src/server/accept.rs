//! Admits processes, and serves each connection on a thread of its own.
//!
//! Invariants: the number of connections is bounded, and the kernel serves a process that is
//! refused. The row of a connection is free again only when nothing can use it any more.

use super::ServerShared;
use super::connection::ClientConnection;
use super::operation_watch::WATCH_INTERVAL;
use super::requests::answer_requests;
use super::status::RefusalReason;
use crate::protocol::wire;
use pagemesh_base::peer::{PeerCredentials, connect_abstract, peer_credentials};
use pagemesh_volume::direct_access::ROWS;
use rustix::fd::OwnedFd;
use rustix::net::{SocketFlags, SocketType, accept_with};
use rustix::process::{PidfdFlags, pidfd_open};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Concurrent connections: each process has one for requests, and one for each row. More processes
/// connect than there are rows, since each program that maps a file must report it.
const CONNECTIONS_MAX: usize = 16 * ROWS;
/// Delay between attempts to accept where the system lacks resources.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

pub(super) fn accept_loop(shared: &Arc<ServerShared>, listener: &OwnedFd) {
    while !shared.is_stopping.load(Ordering::Acquire) {
        let socket = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
            Err(_) if shared.is_stopping.load(Ordering::Acquire) => return,
            Err(cause) => {
                // Without a retry a client would wait for ever to be admitted.
                tracing::warn!(%cause, "cannot accept direct clients of the mount; trying again");
                std::thread::sleep(ACCEPT_RETRY);
                continue;
            }
        };
        accept_connection(shared, socket);
    }
}

/// Serves a connection on a thread of its own. The kernel serves a process that is refused.
pub(super) fn accept_connection(shared: &Arc<ServerShared>, socket: OwnedFd) {
    if shared.connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        shared
            .clients
            .count_refusal(RefusalReason::TooManyConnections);
        return;
    }
    let served = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("guest".into());
    let spawned = thread.spawn(move || {
        serve_connection(&served, socket);
        served.connections.fetch_sub(1, Ordering::AcqRel);
    });
    if let Err(cause) = spawned {
        shared.connections.fetch_sub(1, Ordering::AcqRel);
        tracing::warn!(%cause, "cannot serve a direct client; the kernel serves it");
    }
}

/// The process that admits direct clients for a device.
///
/// # Errors
/// If no process does.
pub fn serving_process(device: &str) -> io::Result<PeerCredentials> {
    peer_credentials(connect_abstract(
        SocketType::SEQPACKET,
        &wire::socket_name(device),
    )?)
}

/// The process at the other end, if it may be admitted.
fn admit(shared: &ServerShared, socket: OwnedFd) -> io::Result<ClientConnection> {
    let refused = || io::Error::from(io::ErrorKind::PermissionDenied);
    let peer = peer_credentials(&socket)?;
    if !peer.is_trusted() {
        shared.clients.count_refusal(RefusalReason::OtherUser);
        return Err(refused());
    }
    // A process that the mount cannot watch is not admitted.
    let pid = peer.pid.ok_or_else(|| {
        shared.clients.count_refusal(RefusalReason::UnseenProcess);
        refused()
    })?;
    Ok(ClientConnection {
        process: pidfd_open(pid, PidfdFlags::empty())?,
        pid,
        socket,
        record: shared.clients.find_or_add(pid),
    })
}

fn serve_connection(shared: &Arc<ServerShared>, socket: OwnedFd) {
    let connection = match admit(shared, socket) {
        Ok(connection) => Arc::new(connection),
        Err(cause) => return tracing::debug!(%cause, "a direct client was refused"),
    };
    let mut row = None;
    if let Err(cause) = answer_requests(shared, &connection, &mut row) {
        tracing::debug!(%cause, pid = connection.pid.as_raw_pid(), "a direct client's connection ended");
    }
    if let Some(number) = row {
        // The process may go on and use the row, if its connection was closed by accident.
        loop {
            let is_ending = shared.is_stopping.load(Ordering::Acquire);
            if is_ending
                || shared.is_detached(&connection)
                || connection.exits_within(WATCH_INTERVAL)
            {
                break;
            }
        }
        shared.clean_up(number, &connection);
    }
}
