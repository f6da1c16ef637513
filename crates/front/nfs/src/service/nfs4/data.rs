//! READ, WRITE and COMMIT.
//!
//! A pin is declared before the channel of its call, so that the channel is returned first: see
//! [`PinCache`](crate::pin_cache::PinCache).

use super::{Compound, Done, Fault};
use crate::nfs3::files::Durability;
use crate::nfs4::arguments::{Commit, Read, Write};
use crate::nfs4::state::IoAccess;
use crate::nfs4::status::Status;
use crate::service::Target;
use crate::xdr::{UNIT_BYTES, Writer};
use pagemesh_fs::{FILE_BYTES_MAX, FsError, InodeKind, Wcc};
use rustix::io::Errno;

/// Bytes of the result of a READ without its data, and with its padding.
pub(super) const READ_BYTES: usize = 4 * UNIT_BYTES;

impl Target<'_> {
    /// The status of an operation on data. A file of another type has one of its own.
    fn data_fault(&self, error: &FsError, wcc: &Wcc) -> Fault {
        let kind = wcc.after.as_ref().map(|attr| attr.kind);
        match (error, kind) {
            (FsError::Posix(Errno::INVAL), Some(InodeKind::Symlink)) => Status::Symlink.into(),
            (FsError::Posix(Errno::INVAL), Some(kind)) if kind != InodeKind::File => {
                Status::WrongType.into()
            }
            _ => self.report(error).into(),
        }
    }
}

impl Compound<'_> {
    /// The data goes into the reply without a copy if no operation follows. Beyond the reply that the session allows, the
    /// read is a short one (RFC 8881, section 18.22.3).
    pub(super) fn read(&mut self, it: &Read, out: &mut Writer) -> Done {
        let room = self.reply_room(out).saturating_sub(READ_BYTES);
        let count = it.count.min(u32::try_from(room).unwrap_or(u32::MAX));
        let target = self.file_or(Status::IsDirectory)?;
        self.check_io(target, it.stateid, IoAccess::Read)?;
        let pin = target.pin()?;
        let fs = &target.fs;
        let read = fs.read_at(&pin, it.offset, count, &target.caller);
        let data = match read.result {
            Ok(data) => data,
            Err(error) => return Err(target.data_fault(&error, &read.wcc)),
        };
        out.bool(data.is_eof);
        let bytes: bytes::Bytes = data.bytes.into();
        match self.is_last {
            true => {
                out.length(bytes.len());
                self.tail = bytes;
            }
            false => out.opaque(&bytes),
        }
        Ok(())
    }

    pub(super) fn write(&self, it: &Write<'_>, out: &mut Writer) -> Done {
        // The types of files come before read-only exports: a directory is never written.
        self.file_or(Status::IsDirectory)?;
        let target = self.changed_file()?;
        self.check_io(target, it.stateid, IoAccess::Write)?;
        let end = it.offset.checked_add(it.data.len() as u64);
        if end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(Status::FileTooLarge.into());
        }
        let pin = target.pin()?;
        let fs = &target.export.fs;
        let data = self.record.slice_ref(it.data);
        let is_stable = it.durability != Durability::Unstable;
        let had_cache = fs.has_write_cache();
        // A loss after this line changes the verifier of the COMMIT.
        let verifier = target.export.write_verifier(fs.lost_writes());
        let reply = fs.write_at(&pin, it.offset, &data, is_stable, &target.caller);
        let count = match reply.result {
            Ok(count) => count,
            Err(error) => return Err(target.data_fault(&error, &reply.wcc)),
        };
        out.u32(count);
        // A copy with a cache may have come meanwhile.
        let is_cached = (had_cache || fs.has_write_cache()) && !is_stable;
        out.value(&match is_cached {
            true => Durability::Unstable,
            false => Durability::FileSync,
        });
        out.value(&verifier);
        Ok(())
    }

    pub(super) fn commit(&self, it: &Commit, out: &mut Writer) -> Done {
        let target = self.file_or(Status::IsDirectory)?;
        if it.offset.checked_add(it.count.into()).is_none() {
            return Err(Status::Invalid.into());
        }
        match target.kind()? {
            InodeKind::File => {}
            InodeKind::Directory => return Err(Status::IsDirectory.into()),
            InodeKind::Symlink => return Err(Status::Symlink.into()),
            _ => return Err(Status::WrongType.into()),
        }
        target.check_live().map_err(Status::from)?;
        let pin = target.pin()?;
        let fs = &target.export.fs;
        let mut channel = fs.borrow_channel().map_err(|error| target.report(&error))?;
        let reply = fs.commit(&mut channel, &pin);
        let losses = reply.result.map_err(|error| target.report(&error))?;
        out.value(&target.export.write_verifier(losses));
        Ok(())
    }
}
