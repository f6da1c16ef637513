//! The requirements of direct I/O, which programs ask for with the `ioctl` of XFS (`XFS_IOC_DIOINFO`): QEMU, fsstress.
//!
//! The mount takes each offset, length and address. It reports a block of 512 bytes because programs allocate buffers by the
//! reported number, and QEMU takes a report of one byte for a failed one. QEMU assumes 4096 bytes without a report.
//!
//! `STATX_DIOALIGN` cannot be answered: the protocol has no field for it (Linux 6.18, `fuse_do_statx`).

use crate::abi;
use crate::reply::FuseReply;
use pagemesh_fs::{InodeKind, Result};
use rustix::io::Errno;

/// `_IOR('X', 30, struct dioattr)`.
pub(crate) const LIMITS_IOCTL: u32 =
    2 << 30 | (size_of::<abi::DirectIoLimits>() as u32) << 16 | (b'X' as u32) << 8 | 30;
/// The reported alignment of offsets, lengths and addresses.
const BLOCK_BYTES: u32 = 512;
/// The kernel cuts longer requests (`MAX_RW_COUNT`).
const REQUEST_BYTES_MAX: u32 = 0x7fff_f000;

/// The answer for an inode of this kind.
pub(crate) fn limits_reply(kind: InodeKind) -> Result<FuseReply> {
    if kind != InodeKind::File {
        // The caller gets `ENOTTY`.
        return Err(Errno::NOSYS.into());
    }
    let limits = abi::DirectIoLimits {
        memory_align: BLOCK_BYTES,
        request_bytes_min: BLOCK_BYTES,
        request_bytes_max: REQUEST_BYTES_MAX,
    };
    Ok(FuseReply::from_pair(&abi::IoctlOut::default(), &limits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_io_ioctl_has_the_number_of_xfs() {
        assert_eq!(LIMITS_IOCTL, 0x800c_581e);
        assert_eq!(REQUEST_BYTES_MAX % BLOCK_BYTES, 0);
    }
}
