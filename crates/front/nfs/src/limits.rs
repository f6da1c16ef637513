//! The bounds of the wire: every length and count.

/// Bytes of the data of one READ or WRITE. Clients learn it from FSINFO. Linux asks for no more.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Bytes of a record beyond the data of a WRITE: two authentication bodies, a file handle and the
/// fixed fields need less than 1 KiB, and a SYMLINK has a target instead of data.
pub const RECORD_OVERHEAD_BYTES: usize = 4 << 10;
/// Bytes of a record, which is one call.
pub const RECORD_BYTES_MAX: usize = TRANSFER_BYTES_MAX as usize + RECORD_OVERHEAD_BYTES;
/// Fragments of one record. Kernels send one; libraries with small buffers send a fragment for each
/// 16 KiB or more of a WRITE.
pub const FRAGMENTS_MAX: u32 = 64;
/// Bytes that a record reserves for a fragment before any of them arrives: all calls but large
/// WRITEs fit. A larger record takes memory as its bytes arrive.
pub const FRAGMENT_RESERVED_BYTES_MAX: usize = 16 << 10;
/// Bytes of the body of a credential or verifier (RFC 5531).
pub const AUTH_BODY_BYTES_MAX: usize = 400;
/// Bytes of the client's machine name in AUTH_SYS (RFC 5531).
pub const MACHINE_NAME_BYTES_MAX: usize = 255;
/// Supplementary groups in AUTH_SYS (RFC 5531).
pub const GROUPS_MAX: usize = 16;
/// Bytes of a file handle (RFC 1813).
pub const HANDLE_BYTES_MAX: usize = 64;
/// Bytes of a file's name, as in the file-system crate.
pub const NAME_BYTES_MAX: usize = 255;
/// Bytes of the target of a symbolic link: the longest path of Linux without its final zero.
pub const SYMLINK_BYTES_MAX: usize = 4095;
/// Bytes of a path in MOUNT (RFC 1813, MNTPATHLEN).
pub const MOUNT_PATH_BYTES_MAX: usize = 1024;
/// Bytes of the result of READDIR and READDIRPLUS. The file system holds a lock while it collects a
/// listing, so the result is shorter than a READ.
pub const LISTING_BYTES_MAX: u32 = 64 << 10;
