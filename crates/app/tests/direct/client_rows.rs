//! Rows of the segment: the owner of a row may be in an operation at any time.

use super::support::mounted::{self, CLASSIC, TestMount};
use super::support::until;
use pagemesh_direct::wire::{self, ClientRequest, MountReply};
use pagemesh_volume::direct_access::DirectSegment;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// The device number, after which the mount's sockets are named.
pub fn mount_device(mount: &TestMount) -> String {
    let number = std::fs::metadata(&mount.dir).unwrap().dev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    format!("{major}:{minor}")
}

/// Another connection of this process, with its row and the segment that all direct clients map.
/// The mount may close a connection while its layout changes; a client then tries again.
pub fn join_mount(mount: &TestMount) -> (OwnedFd, u32, DirectSegment) {
    let mut joined = None;
    until("the mount lets this process in", || {
        joined = try_join(mount);
        joined.is_some()
    });
    joined.unwrap()
}

/// None: the mount closed the connection.
fn try_join(mount: &TestMount) -> Option<(OwnedFd, u32, DirectSegment)> {
    let socket = wire::new_socket().unwrap();
    let address = wire::socket_address(&mount_device(mount)).unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    wire::send(socket.as_fd(), &ClientRequest::Join.encode(), None).ok()?;
    let (bytes, memory) = wire::receive(socket.as_fd()).ok()??;
    let segment = DirectSegment::join(memory.unwrap().into()).unwrap();
    match MountReply::decode(&bytes) {
        Ok(MountReply::Joined(row, _)) => Some((socket, row, segment)),
        other => panic!("{other:?}"),
    }
}

/// The process still runs: its connection may have been closed by accident.
#[test]
fn client_row_is_released_only_by_its_owner() {
    let Some(cluster) = mounted::cluster(&[128, 128], "24M") else {
        return;
    };
    let mount = TestMount::with_fuse(&cluster, "files", "map", CLASSIC);
    let (lost, first, segment) = join_mount(&mount);
    drop(lost);
    for _ in 0..20 {
        let (given_back, second, _) = join_mount(&mount);
        assert_ne!(second, first, "an operation may be in progress on that row");
        wire::send(
            given_back.as_fd(),
            &ClientRequest::ReleaseRow.encode(),
            None,
        )
        .unwrap();
        let (again, third, _) = join_mount(&mount);
        assert_ne!(third, first, "an operation may be in progress on that row");
        wire::send(again.as_fd(), &ClientRequest::ReleaseRow.encode(), None).unwrap();
    }
    // After this no mapping is left through which an operation could run.
    drop(segment);
    until("the row is given to others", || {
        let (socket, row, other) = join_mount(&mount);
        drop(other);
        wire::send(socket.as_fd(), &ClientRequest::ReleaseRow.encode(), None).unwrap();
        row == first
    });
    mount.stop(&cluster);
}
