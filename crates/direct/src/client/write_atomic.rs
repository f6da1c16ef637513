//! Writes of several parts of a file, all of them or none: in the legs, or by the mount.
//!
//! Invariants: a write by the mount is done at most once, and never after this process has begun to
//! exit.

use super::file::DirectFile;
use super::internal_fds;
use super::io_slot::{Intent, LegResult, Operation, extents, lock_free_end};
use super::mount_link::MountLink;
use crate::protocol::wire::{self, ClientRequest, MountReply};
use bytes::Bytes;
use pagemesh_base::ids::PageNo;
use pagemesh_base::slice::{PageRun, TransactionPart, check_parts};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_volume::direct_access::RUNS_MAX;
use pagemesh_volume::{DirectLeg, overwrite_atomically};
use rustix::fd::{AsFd, RawFd};
use rustix::io::Errno;
use std::fs::File as SystemFile;
use std::io;
use std::os::unix::fs::FileExt;

impl DirectFile {
    /// Overwrites whole pages of several places, all of them or none; none: the mount must do it,
    /// see [`write_by_mount`].
    #[must_use]
    pub fn write_atomic(&self, parts: &[(u64, &[u8])]) -> Option<()> {
        let bytes: usize = parts.iter().map(|(_, data)| data.len()).sum();
        let &(first, _) = parts.first()?;
        let place = (first, bytes, Intent::Write);
        let written = self.operate(
            place,
            |()| Some(bytes),
            |operation| {
                let written = operation.write_atomic(parts);
                if let Some(Ok(())) = written {
                    self.record_write_time();
                }
                written
            },
        );
        self.or_count_kernel(written)
    }
}

impl<L: DirectLeg> Operation<'_, L> {
    /// Overwrites whole pages of several places, all of them or none.
    pub fn write_atomic(&mut self, parts: &[(u64, &[u8])]) -> LegResult<()> {
        // The ring takes records of a few pages only. This check comes after the check for direct
        // access.
        if self.segment.ring().has_replica() {
            return None;
        }
        let (page, kept) = (PAGE_BYTES as u64, lock_free_end(self.file_map));
        let (mut changes, mut pages) = (Vec::new(), Vec::new());
        for (offset, data) in parts {
            let end = offset.checked_add(data.len() as u64)?;
            let is_whole = offset.is_multiple_of(page) && end.is_multiple_of(page);
            if !is_whole || end > kept {
                return None;
            }
            let mut rest = *data;
            for extent in extents(self.file_map, *offset, data.len() as u64)? {
                let (own, after) = rest.split_at_checked(extent.len as usize)?;
                rest = after;
                changes.push(TransactionPart::Write {
                    offset: extent.offset,
                    data: Bytes::copy_from_slice(own),
                });
                pages.push(PageRun {
                    page: PageNo(extent.offset / page),
                    count: extent.len / page,
                });
            }
        }
        if pages.len() > RUNS_MAX || check_parts(&changes, u64::MAX).is_err() {
            return None;
        }
        self.row().set_runs(&pages);
        let epoch = self.io_slot.lease.as_ref()?.epoch;
        let next = || self.segment.next_stamp(epoch);
        let legs = &mut self.io_slot.legs;
        Some(overwrite_atomically(legs, &changes, epoch, next))
    }
}

/// Asks the mount with this device number to overwrite parts of the open file `descriptor`, all of
/// them or none, also if the direct path is not available; see [`pagemesh_fs::Fs::write_atomic`].
/// It waits as long as the mount needs. The caller has the file open for writing.
///
/// # Errors
/// `EOPNOTSUPP` if there is no mount, or the mount does not admit this process. `EIO` if
/// the mount ended meanwhile; then the parts are changed or not. The error of the mount. Errors of
/// the system, and `EAGAIN` for a mount that does not answer, with nothing changed.
pub fn write_by_mount(
    (device, ino, descriptor): (u64, u64, RawFd),
    parts: &[(u64, &[u8])],
) -> io::Result<()> {
    use io::ErrorKind as Kind;
    let as_unsupported = |cause: io::Error| match cause.kind() {
        // No process listens, or it is not the mount.
        Kind::NotFound | Kind::ConnectionRefused | Kind::PermissionDenied
        // The mount closes the connection of a process that it does not admit, before or after the
        // request.
        | Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe
        // It speaks another version of the protocol.
        | Kind::Other => Errno::OPNOTSUPP.into(),
        // A transient error.
        _ => cause,
    };
    let (link, _) = {
        let _making = internal_fds::FdCreation::begin_regardless();
        MountLink::connect_regardless(device, descriptor).map_err(as_unsupported)?
    };
    link.ask(ClientRequest::GetFileMap(ino))
        .map_err(as_unsupported)?;
    link.set_reply_timeout(None)?;
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let memory = SystemFile::from(rustix::fs::memfd_create("pagemesh-parts", flags)?);
    memory.write_all_at(&wire::encode_parts(parts), 0)?;
    let request = ClientRequest::WriteAtomic(ino).encode();
    wire::send(link.as_fd(), &request, Some(memory.as_fd()))?;
    let reply = link
        .receive_reply()
        .map_err(|_| io::Error::from(Errno::IO))?;
    match reply.0 {
        MountReply::Success => Ok(()),
        MountReply::Failed(error) => Err(io::Error::from_raw_os_error(error)),
        MountReply::Unavailable | MountReply::FileRefused(_) | MountReply::Joined(..) => {
            Err(Errno::IO.into())
        }
    }
}
