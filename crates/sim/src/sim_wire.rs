//! Both ends of a connection as the fabric sees them.

use crate::cluster::Cluster;
use crate::network::{ConnectionId, Direction};
use pagemesh_fabric::wire::{ReceiveResult, WaitFor, Wire};
use std::io::{self, IoSlice};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// The connecting peer's end; dropping it closes the connection.
pub(crate) struct PeerEnd {
    cluster: Arc<Cluster>,
    connection: ConnectionId,
}

/// The brick's end, for one turn.
pub(crate) struct BrickEnd<'c> {
    pub(crate) cluster: &'c Cluster,
    pub(crate) connection: ConnectionId,
}

fn send(
    cluster: &Cluster,
    line: ConnectionId,
    way: Direction,
    pieces: &[IoSlice<'_>],
) -> io::Result<usize> {
    let bytes: Vec<u8> = pieces
        .iter()
        .flat_map(|piece| piece.iter().copied())
        .collect();
    cluster.net().send(line, way, &bytes)?;
    Ok(bytes.len())
}

/// The simulation has no descriptors to wait on.
fn unsupported_error() -> io::Error {
    io::ErrorKind::Unsupported.into()
}

impl PeerEnd {
    pub(crate) fn new(cluster: Arc<Cluster>, line: ConnectionId) -> PeerEnd {
        PeerEnd {
            cluster,
            connection: line,
        }
    }
}

impl Drop for PeerEnd {
    fn drop(&mut self) {
        self.close();
    }
}

impl Wire for PeerEnd {
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<ReceiveResult> {
        let mut net = self.cluster.net();
        net.deliver(self.connection, Direction::ToPeer);
        Ok(net.receive(self.connection, Direction::ToPeer, into))
    }

    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        send(&self.cluster, self.connection, Direction::ToBrick, pieces).map(Some)
    }

    /// Gives the brick a chance to answer.
    fn wait(&self, _ready: WaitFor, _until: Instant) -> io::Result<()> {
        match self.cluster.serve_blocking_call(self.connection) {
            true => Ok(()),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn close(&self) {
        self.cluster.net().close_peer_end(self.connection);
    }

    fn has_hung_up(&self) -> bool {
        self.cluster.net().connection(self.connection).is_none()
    }

    fn now(&self) -> Instant {
        self.cluster.instant()
    }

    fn readable_fd(&self) -> Option<RawFd> {
        None
    }

    fn writable_fd(&self) -> io::Result<OwnedFd> {
        Err(unsupported_error())
    }
}

impl Wire for BrickEnd<'_> {
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<ReceiveResult> {
        Ok(self
            .cluster
            .net()
            .receive(self.connection, Direction::ToBrick, into))
    }

    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        send(self.cluster, self.connection, Direction::ToPeer, pieces).map(Some)
    }

    fn wait(&self, _ready: WaitFor, _until: Instant) -> io::Result<()> {
        Err(unsupported_error())
    }

    fn close(&self) {
        self.cluster.net().close_brick_end(self.connection);
    }

    fn has_hung_up(&self) -> bool {
        self.cluster.net().connection(self.connection).is_none()
    }

    fn now(&self) -> Instant {
        self.cluster.instant()
    }

    fn readable_fd(&self) -> Option<RawFd> {
        None
    }

    fn writable_fd(&self) -> io::Result<OwnedFd> {
        Err(unsupported_error())
    }
}
