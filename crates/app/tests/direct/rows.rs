//! Rows of the segment: who has one may be inside of an operation at any time.

use super::support::mounted::{self, CLASSIC, Mounted};
use super::support::until;
use pagemesh_direct::wire::{self, ClientRequest, MountReply};
use pagemesh_volume::direct_access::DirectSegment;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// What the mount's sockets are named after.
pub fn device(mount: &Mounted) -> String {
    let number = std::fs::metadata(&mount.dir).unwrap().dev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    format!("{major}:{minor}")
}

/// Another connection of this process, with a row, and the segment that all guests have
/// mapped.
pub fn joined(mount: &Mounted) -> (OwnedFd, u32, DirectSegment) {
    let socket = wire::new_socket().unwrap();
    rustix::net::connect(&socket, &wire::socket_address(&device(mount)).unwrap()).unwrap();
    wire::send(socket.as_fd(), &ClientRequest::Join.encode(), None).unwrap();
    let (bytes, memory) = wire::receive(socket.as_fd()).unwrap().unwrap();
    let segment = DirectSegment::join(memory.unwrap().into()).unwrap();
    match MountReply::decode(&bytes) {
        Ok(MountReply::Joined(row, _)) => (socket, row, segment),
        other => panic!("{other:?}"),
    }
}

/// Its process goes on: the connection may have been closed by accident.
#[test]
fn a_row_is_given_away_only_by_who_has_it() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    let mount = Mounted::by(&cluster, "files", "map", CLASSIC);
    let (lost, first, segment) = joined(&mount);
    drop(lost);
    for _ in 0..20 {
        let (given_back, second, _) = joined(&mount);
        assert_ne!(
            second, first,
            "somebody may be inside of an operation there"
        );
        wire::send(
            given_back.as_fd(),
            &ClientRequest::ReleaseRow.encode(),
            None,
        )
        .unwrap();
        let (again, third, _) = joined(&mount);
        assert_ne!(third, first, "somebody may be inside of an operation there");
        wire::send(again.as_fd(), &ClientRequest::ReleaseRow.encode(), None).unwrap();
    }
    // Nothing is left that could use it.
    drop(segment);
    until("the row is given to others", || {
        let (socket, row, other) = joined(&mount);
        drop(other);
        wire::send(socket.as_fd(), &ClientRequest::ReleaseRow.encode(), None).unwrap();
        row == first
    });
    mount.stop(&cluster);
}
