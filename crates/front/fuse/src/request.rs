//! Requests of the kernel, from any transport. The decoder trusts no length.

use crate::abi::{self, DATA_BYTES_MAX, Dialect, OP_BYTES_MAX, op, set};
use bytes::Bytes;
use pagemesh_fs::Time;
use rustix::io::Errno;
use zerocopy::FromBytes;

/// A shorter write is copied out of its receive buffer: the volume may keep it, as for an
/// asynchronous replica, and would keep the whole buffer. So kept data takes at most twice its
/// length.
const COPIED_BYTES_MAX: usize = DATA_BYTES_MAX as usize / 2;
/// Most nanoseconds besides the seconds.
const NSEC_MAX: u32 = 999_999_999;

/// A raw request: header, header of the operation, and the rest.
pub struct RawRequest {
    pub header: abi::InHeader,
    op: [u8; OP_BYTES_MAX],
    op_len: usize,
    payload: Bytes,
    dialect: Dialect,
}

/// An access or modification time that a program sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeUpdate {
    Now,
    At(Time),
}

/// Attributes to set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<TimeUpdate>,
    pub mtime: Option<TimeUpdate>,
    /// The change of size clears set-id bits.
    pub clears_setid: bool,
}

/// A range of bytes or entries to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRange {
    pub offset: u64,
    pub size: u32,
}

/// A request. The header names its node.
#[derive(Debug, PartialEq, Eq)]
pub enum Request<'r> {
    Lookup(&'r [u8]),
    /// Has no answer, as `ForgetAll`.
    Forget(u64),
    ForgetAll(Vec<abi::ForgetOne>),
    GetAttr,
    /// Attributes with the creation time.
    Statx,
    SetAttr(SetAttr),
    ReadLink,
    Symlink {
        name: &'r [u8],
        target: &'r [u8],
    },
    Mknod {
        name: &'r [u8],
        mode: u32,
        umask: u32,
        device: u32,
    },
    Mkdir {
        name: &'r [u8],
        mode: u32,
        umask: u32,
    },
    Unlink(&'r [u8]),
    Rmdir(&'r [u8]),
    Rename {
        name: &'r [u8],
        to: u64,
        new: &'r [u8],
        flags: u32,
    },
    Link {
        node: u64,
        name: &'r [u8],
    },
    Open {
        flags: u32,
    },
    OpenDir,
    Create {
        name: &'r [u8],
        mode: u32,
        umask: u32,
        flags: u32,
    },
    CreateUnnamed {
        mode: u32,
        umask: u32,
        flags: u32,
    },
    Read {
        file: u64,
        span: ReadRange,
        /// The flags of the open file.
        flags: u32,
        how: u32,
    },
    ReadDir(ReadRange),
    ReadDirPlus(ReadRange),
    Write {
        file: u64,
        offset: u64,
        data: Bytes,
        /// The flags of the open file.
        flags: u32,
        /// [`abi::WRITE_CACHE`] and others.
        how: u32,
    },
    Statfs,
    Release {
        file: u64,
    },
    /// A descriptor is closed.
    Flush,
    Fsync {
        file: u64,
        /// Whether times may stay unsynced, as for fdatasync.
        is_data_only: bool,
    },
    SetXattr {
        name: &'r [u8],
        value: &'r [u8],
        flags: u32,
        /// [`abi::SETXATTR_ACL_KILL_SGID`]; none: the kernel does not evaluate ACLs.
        acl_flags: Option<u32>,
    },
    GetXattr {
        name: &'r [u8],
        size: u32,
    },
    ListXattr {
        size: u32,
    },
    RemoveXattr(&'r [u8]),
    Ioctl {
        command: u32,
        argument: &'r [u8],
    },
    Allocate {
        file: u64,
        offset: u64,
        length: u64,
        mode: u32,
    },
    Seek {
        offset: i64,
        whence: u32,
    },
    Copy {
        from: u64,
        to_file: u64,
        to_node: u64,
        to: u64,
        len: u64,
    },
    /// The connection is about to end.
    Destroy,
}

fn header<T: FromBytes>(op: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(op)
        .map(|(header, _)| header)
        .map_err(|_| Errno::IO)
}

/// A name that ends with a zero byte, and the bytes after it.
fn name(bytes: &[u8]) -> Result<(&[u8], &[u8]), Errno> {
    let end = bytes.iter().position(|&byte| byte == 0).ok_or(Errno::IO)?;
    Ok((&bytes[..end], &bytes[end + 1..]))
}

fn time_update(
    valid: u32,
    (is_set, is_now): (u32, u32),
    (sec, nsec): (i64, u32),
) -> Result<Option<TimeUpdate>, Errno> {
    match (valid & is_set != 0, valid & is_now != 0) {
        (false, _) => Ok(None),
        (true, true) => Ok(Some(TimeUpdate::Now)),
        (true, false) if nsec > NSEC_MAX => Err(Errno::INVAL),
        (true, false) => Ok(Some(TimeUpdate::At(Time { sec, nsec }))),
    }
}

impl TryFrom<abi::SetAttrIn> for SetAttr {
    type Error = Errno;

    fn try_from(wished: abi::SetAttrIn) -> Result<SetAttr, Errno> {
        let valid = wished.valid;
        let if_set = |flag: u32, value: u32| (valid & flag != 0).then_some(value);
        let atime = (set::ATIME, set::ATIME_NOW);
        let mtime = (set::MTIME, set::MTIME_NOW);
        Ok(SetAttr {
            mode: if_set(set::MODE, wished.mode),
            uid: if_set(set::UID, wished.uid),
            gid: if_set(set::GID, wished.gid),
            size: (valid & set::SIZE != 0).then_some(wished.size),
            atime: time_update(valid, atime, (wished.atime, wished.atime_ns))?,
            mtime: time_update(valid, mtime, (wished.mtime, wished.mtime_ns))?,
            clears_setid: valid & set::KILL_SUIDGID != 0,
        })
    }
}

impl From<abi::ReadIn> for ReadRange {
    fn from(read: abi::ReadIn) -> ReadRange {
        ReadRange {
            offset: read.offset,
            size: read.size,
        }
    }
}

impl RawRequest {
    /// A contiguous request. None: it is shorter than a header.
    pub fn from_message(message: &Bytes, dialect: Dialect) -> Option<RawRequest> {
        let (header, rest) = abi::InHeader::read_from_prefix(message).ok()?;
        let op_len = abi::op_bytes(header.opcode, dialect).unwrap_or(0);
        let op_len = op_len.min(rest.len());
        let at = size_of::<abi::InHeader>();
        let payload = message.slice(at + op_len..);
        let op = &rest[..op_len];
        Some(RawRequest::from_parts(header, op, payload, dialect))
    }

    /// A request with separate parts.
    pub fn from_parts(
        header: abi::InHeader,
        op: &[u8],
        payload: Bytes,
        dialect: Dialect,
    ) -> RawRequest {
        let op_len = op.len().min(OP_BYTES_MAX);
        let mut own = [0; OP_BYTES_MAX];
        own[..op_len].copy_from_slice(&op[..op_len]);
        RawRequest {
            header,
            op: own,
            op_len,
            payload,
            dialect,
        }
    }

    /// Decodes the request.
    ///
    /// # Errors
    /// `ENOSYS` for an operation that is not served, `EIO` for a malformed request,
    /// `EINVAL` for an invalid time.
    pub fn decode(&self) -> Result<Request<'_>, Errno> {
        let op = &self.op[..self.op_len];
        let payload = &self.payload[..];
        Ok(match self.header.opcode {
            op::LOOKUP => Request::Lookup(name(payload)?.0),
            op::FORGET => Request::Forget(header::<abi::ForgetIn>(op)?.lookups),
            op::BATCH_FORGET => forget_all(header(op)?, payload)?,
            op::GETATTR => Request::GetAttr,
            op::STATX => Request::Statx,
            op::SETATTR => Request::SetAttr(header::<abi::SetAttrIn>(op)?.try_into()?),
            op::READLINK => Request::ReadLink,
            op::SYMLINK => symlink(payload)?,
            op::MKNOD => mknod(header(op)?, payload)?,
            op::MKDIR => mkdir(header(op)?, payload)?,
            op::UNLINK => Request::Unlink(name(payload)?.0),
            op::RMDIR => Request::Rmdir(name(payload)?.0),
            op::RENAME => rename(header::<abi::RenameIn>(op)?.to, 0, payload)?,
            op::RENAME2 => rename_with_flags(header(op)?, payload)?,
            op::LINK => link(header(op)?, payload)?,
            op::OPEN => open(header(op)?),
            op::OPENDIR => Request::OpenDir,
            op::CREATE => create(header(op)?, payload)?,
            op::TMPFILE => create_unnamed(header(op)?),
            op::READ => read(header(op)?),
            op::READDIR => Request::ReadDir(header::<abi::ReadIn>(op)?.into()),
            op::READDIRPLUS => Request::ReadDirPlus(header::<abi::ReadIn>(op)?.into()),
            op::WRITE => self.write(header(op)?)?,
            op::STATFS => Request::Statfs,
            op::RELEASE | op::RELEASEDIR => release(header(op)?),
            op::FLUSH => Request::Flush,
            op::FSYNC | op::FSYNCDIR => fsync(header(op)?),
            op::SETXATTR if self.dialect.has_acls => set_xattr_ext(header(op)?, payload)?,
            op::SETXATTR => set_xattr(header(op)?, payload)?,
            op::GETXATTR => get_xattr(header(op)?, payload)?,
            op::LISTXATTR => list_xattr(header(op)?),
            op::REMOVEXATTR => Request::RemoveXattr(name(payload)?.0),
            op::IOCTL => ioctl(header(op)?, payload),
            op::FALLOCATE => allocate(header(op)?),
            op::LSEEK => seek(header(op)?),
            op::COPY_FILE_RANGE => copy(header(op)?),
            op::DESTROY => Request::Destroy,
            _ => return Err(Errno::NOSYS),
        })
    }

    fn write(&self, write: abi::WriteIn) -> Result<Request<'_>, Errno> {
        let len = write.size as usize;
        if len > self.payload.len() {
            return Err(Errno::IO);
        }
        let data = if len < COPIED_BYTES_MAX {
            Bytes::copy_from_slice(&self.payload[..len])
        } else {
            self.payload.slice(..len)
        };
        Ok(Request::Write {
            file: write.file,
            offset: write.offset,
            data,
            flags: write.flags,
            how: write.write_flags,
        })
    }

    /// Whether it has no answer.
    pub fn has_no_reply(&self) -> bool {
        matches!(self.header.opcode, op::FORGET | op::BATCH_FORGET)
    }
}

fn symlink(payload: &[u8]) -> Result<Request<'_>, Errno> {
    let (own, rest) = name(payload)?;
    let target = name(rest)?.0;
    Ok(Request::Symlink { name: own, target })
}

fn mknod(node: abi::MknodIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    Ok(Request::Mknod {
        name: name(payload)?.0,
        mode: node.mode,
        umask: node.umask,
        device: node.device,
    })
}

fn mkdir(directory: abi::MkdirIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    Ok(Request::Mkdir {
        name: name(payload)?.0,
        mode: directory.mode,
        umask: directory.umask,
    })
}

fn rename(to: u64, flags: u32, payload: &[u8]) -> Result<Request<'_>, Errno> {
    let (old, rest) = name(payload)?;
    let new = name(rest)?.0;
    Ok(Request::Rename {
        name: old,
        to,
        new,
        flags,
    })
}

fn rename_with_flags(renamed: abi::Rename2In, payload: &[u8]) -> Result<Request<'_>, Errno> {
    rename(renamed.to, renamed.flags, payload)
}

fn link(link: abi::LinkIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    let name = name(payload)?.0;
    let node = link.node;
    Ok(Request::Link { node, name })
}

fn open(opened: abi::OpenIn) -> Request<'static> {
    Request::Open {
        flags: opened.flags,
    }
}

fn create(made: abi::CreateIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    Ok(Request::Create {
        name: name(payload)?.0,
        mode: made.mode,
        umask: made.umask,
        flags: made.flags,
    })
}

fn create_unnamed(made: abi::CreateIn) -> Request<'static> {
    Request::CreateUnnamed {
        mode: made.mode,
        umask: made.umask,
        flags: made.flags,
    }
}

fn read(read: abi::ReadIn) -> Request<'static> {
    Request::Read {
        file: read.file,
        flags: read.flags,
        how: read.read_flags,
        span: read.into(),
    }
}

fn release(released: abi::ReleaseIn) -> Request<'static> {
    Request::Release {
        file: released.file,
    }
}

fn fsync(synced: abi::FsyncIn) -> Request<'static> {
    Request::Fsync {
        file: synced.file,
        is_data_only: synced.flags & abi::FSYNC_DATA_ONLY != 0,
    }
}

fn set_xattr(set: abi::SetXattrIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    let abi::SetXattrIn { size, flags } = set;
    let (name, rest) = name(payload)?;
    let value = rest.get(..size as usize).ok_or(Errno::IO)?;
    Ok(Request::SetXattr {
        name,
        value,
        flags,
        acl_flags: None,
    })
}

fn set_xattr_ext(set: abi::SetXattrExtIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    let abi::SetXattrExtIn { size, flags, .. } = set;
    let (name, rest) = name(payload)?;
    Ok(Request::SetXattr {
        name,
        value: rest.get(..size as usize).ok_or(Errno::IO)?,
        flags,
        acl_flags: Some(set.acl_flags),
    })
}

fn get_xattr(get: abi::GetXattrIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    let name = name(payload)?.0;
    let size = get.size;
    Ok(Request::GetXattr { name, size })
}

fn list_xattr(list: abi::GetXattrIn) -> Request<'static> {
    Request::ListXattr { size: list.size }
}

fn ioctl(ioctl: abi::IoctlIn, payload: &[u8]) -> Request<'_> {
    Request::Ioctl {
        command: ioctl.command,
        argument: payload,
    }
}

fn allocate(wished: abi::FallocateIn) -> Request<'static> {
    Request::Allocate {
        file: wished.file,
        offset: wished.offset,
        length: wished.length,
        mode: wished.mode,
    }
}

fn seek(sought: abi::LseekIn) -> Request<'static> {
    let abi::LseekIn { offset, whence, .. } = sought;
    Request::Seek { offset, whence }
}

fn copy(copy: abi::CopyFileRangeIn) -> Request<'static> {
    Request::Copy {
        from: copy.from_offset,
        to_file: copy.to_file,
        to_node: copy.to,
        to: copy.to_offset,
        len: copy.len,
    }
}

fn forget_all(all: abi::BatchForgetIn, payload: &[u8]) -> Result<Request<'_>, Errno> {
    const BYTES: usize = size_of::<abi::ForgetOne>();
    let len = (all.count as usize).checked_mul(BYTES).ok_or(Errno::IO)?;
    let bytes = payload.get(..len).ok_or(Errno::IO)?;
    let all: Result<_, _> = bytes.chunks_exact(BYTES).map(header).collect();
    Ok(Request::ForgetAll(all?))
}

#[cfg(test)]
mod tests;
