//! Both ends of a connection as the fabric sees them.

use crate::cluster::Cluster;
use crate::network::{LineId, Way};
use pagemesh_fabric::wire::{Ready, Received, Wire};
use std::io::{self, IoSlice};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

/// The end of whoever connected; dropping it closes the connection.
pub(crate) struct PeerWire {
    cluster: Arc<Cluster>,
    line: LineId,
}

/// The brick's end, for one turn.
pub(crate) struct BrickWire<'c> {
    pub(crate) cluster: &'c Cluster,
    pub(crate) line: LineId,
}

fn send(cluster: &Cluster, line: LineId, way: Way, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
    let bytes: Vec<u8> = pieces
        .iter()
        .flat_map(|piece| piece.iter().copied())
        .collect();
    cluster.net().send(line, way, &bytes)?;
    Ok(bytes.len())
}

/// Nobody sleeps on descriptors here.
fn no_descriptor() -> io::Error {
    io::ErrorKind::Unsupported.into()
}

impl PeerWire {
    pub(crate) fn new(cluster: Arc<Cluster>, line: LineId) -> PeerWire {
        PeerWire { cluster, line }
    }
}

impl Drop for PeerWire {
    fn drop(&mut self) {
        self.close();
    }
}

impl Wire for PeerWire {
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<Received> {
        let mut net = self.cluster.net();
        net.deliver(self.line, Way::Down);
        Ok(net.receive(self.line, Way::Down, into))
    }

    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        send(&self.cluster, self.line, Way::Up, pieces).map(Some)
    }

    /// Lets the brick answer, or not.
    fn wait(&self, _ready: Ready, _until: Instant) -> io::Result<()> {
        match self.cluster.rush(self.line) {
            true => Ok(()),
            false => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    fn close(&self) {
        self.cluster.net().leave(self.line);
    }

    fn has_hung_up(&self) -> bool {
        self.cluster.net().line(self.line).is_none()
    }

    fn now(&self) -> Instant {
        self.cluster.instant()
    }

    fn descriptor(&self) -> Option<RawFd> {
        None
    }

    fn await_room(&self) -> io::Result<OwnedFd> {
        Err(no_descriptor())
    }
}

impl Wire for BrickWire<'_> {
    fn receive(&self, into: &mut Vec<u8>) -> io::Result<Received> {
        Ok(self.cluster.net().receive(self.line, Way::Up, into))
    }

    fn send(&self, pieces: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        send(self.cluster, self.line, Way::Down, pieces).map(Some)
    }

    fn wait(&self, _ready: Ready, _until: Instant) -> io::Result<()> {
        Err(no_descriptor())
    }

    fn close(&self) {
        self.cluster.net().hang_up(self.line);
    }

    fn has_hung_up(&self) -> bool {
        self.cluster.net().line(self.line).is_none()
    }

    fn now(&self) -> Instant {
        self.cluster.instant()
    }

    fn descriptor(&self) -> Option<RawFd> {
        None
    }

    fn await_room(&self) -> io::Result<OwnedFd> {
        Err(no_descriptor())
    }
}
