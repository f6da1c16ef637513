//! Asks a mount for the status of its direct clients.

use super::mount_link::MountLink;
use crate::protocol::status::DirectStatus;
use crate::protocol::wire::ClientRequest;
use rustix::fd::RawFd;
use std::io::{self, Read, Seek};

/// The status of the mount with this device number. The descriptor is of a file or directory of the
/// mount.
///
/// # Errors
/// If no process can reach the mount's files directly, the mount belongs to another user,
/// or it has another version.
pub fn query_mount(device: u64, file: RawFd) -> io::Result<DirectStatus> {
    let (link, _) = MountLink::connect(device, file)?;
    let (_, memory) = link.ask(ClientRequest::GetStatus)?;
    let mut memory = memory.ok_or(io::ErrorKind::InvalidData)?;
    let mut bytes = Vec::new();
    memory.seek(io::SeekFrom::Start(0))?;
    memory.read_to_end(&mut bytes)?;
    serde_json::from_slice(&bytes).map_err(io::Error::other)
}
