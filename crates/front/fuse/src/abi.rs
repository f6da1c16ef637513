//! The used part of the kernel's protocol: `include/uapi/linux/fuse.h`, version 7.42. Numbers are
//! in the machine's byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub const MAJOR: u32 = 7;
/// The version of this server; 42 has the ring.
pub const MINOR: u32 = 42;
/// Linux 5.4. Older ones have shorter structures.
pub const MINOR_MIN: u32 = 31;

/// Bytes of the longest operation header, and the room for it in the ring.
pub const OP_BYTES_MAX: usize = 128;

/// Most bytes that are written or read at once.
pub const DATA_BYTES_MAX: u32 = 1 << 20;

/// The kernel's operation codes.
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const CREATE: u32 = 35;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
}

/// Features that both sides negotiate in the first request.
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    /// The mount applies the umask, which requests carry.
    pub const DONT_MASK: u64 = 1 << 6;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// The kernel evaluates ACLs. Linux 4.9.
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    /// `SETXATTR` begins with `SetXattrExtIn`. Linux 5.12.
    pub const SETXATTR_EXT: u64 = 1 << 29;
    /// The upper half of the flags is present.
    pub const EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Bits of `SetAttrIn::valid`.
pub mod set {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

/// The sync of an fdatasync.
pub const FSYNC_DATA_ONLY: u32 = 1 << 0;

/// Bit of `SetXattrExtIn::acl_flags`: the ACL clears set-group-id.
pub const SETXATTR_ACL_KILL_SGID: u32 = 1 << 0;

/// The page cache is written back.
pub const WRITE_CACHE: u32 = 1 << 0;
/// The write clears set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// In the flags of a write: it bypasses the page cache.
pub const WRITE_LOCK_OWNER: u32 = 1 << 1;
/// In the flags of a read: it bypasses the page cache.
pub const READ_LOCK_OWNER: u32 = 1 << 1;

/// How an opened file is used.
pub const OPEN_DIRECT_IO: u32 = 1 << 0;
/// No `FLUSH` when a descriptor is closed. Linux 5.16.
pub const OPEN_NO_FLUSH: u32 = 1 << 5;
/// Pages that the kernel caches stay valid when the file is opened.
pub const OPEN_KEEP_CACHE: u32 = 1 << 1;
pub const OPEN_PARALLEL_DIRECT_WRITES: u32 = 1 << 6;

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $of:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $(pub $field: $of),* }
    )*};
}

/// In place of an error, for a notification.
pub const NOTIFY_INVAL_INODE: i32 = 2;
/// In place of an error: a name that the kernel asks for again.
pub const NOTIFY_INVAL_ENTRY: i32 = 3;
/// In place of an error: a name that was removed. Watchers learn of it.
pub const NOTIFY_DELETE: i32 = 6;
/// In place of an error: bytes for the page cache. Behind the end they extend the file there.
pub const NOTIFY_STORE: i32 = 4;
/// An offset of `NotifyInvalInodeOut` for attributes alone.
pub const NO_PAGES: i64 = -1;

structures! {
    /// Before every request.
    InHeader { len: u32, opcode: u32, unique: u64, node: u64, uid: u32, gid: u32, pid: u32, more: u32 }
    /// Before every answer; `error` is a negative number of an error, or 0.
    OutHeader { len: u32, error: i32, unique: u64 }
    /// Invalidates the kernel's cache of an inode: its attributes, and pages from this offset on,
    /// all of them if the length is 0.
    NotifyInvalInodeOut { node: u64, offset: i64, len: i64 }
    /// A name of this length and a NUL follow.
    NotifyInvalEntryOut { parent: u64, name_len: u32, flags: u32 }
    /// A name of this length and a NUL follow.
    NotifyDeleteOut { parent: u64, child: u64, name_len: u32, unused: u32 }
    NotifyStoreOut { node: u64, offset: u64, size: u32, unused: u32 }

    InitIn { major: u32, minor: u32, readahead_max: u32, flags: u32, flags2: u32, unused: [u32; 11] }
    InitOut {
        major: u32, minor: u32, readahead_max: u32, flags: u32,
        background_max: u16, congestion: u16, write_max: u32, time_ns: u32,
        pages_max: u16, alignment: u16, flags2: u32, unused: [u32; 7],
    }
    ForgetIn { lookups: u64 }
    BatchForgetIn { count: u32, unused: u32 }
    ForgetOne { node: u64, lookups: u64 }
    GetAttrIn { flags: u32, unused: u32, file: u64 }
    StatxIn { flags: u32, unused: u32, file: u64, statx_flags: u32, mask: u32 }
    SetAttrIn {
        valid: u32, unused: u32, file: u64, size: u64, owner: u64,
        atime: i64, mtime: i64, ctime: i64, atime_ns: u32, mtime_ns: u32, ctime_ns: u32,
        mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    }
    MknodIn { mode: u32, device: u32, umask: u32, unused: u32 }
    MkdirIn { mode: u32, umask: u32 }
    RenameIn { to: u64 }
    Rename2In { to: u64, flags: u32, unused: u32 }
    LinkIn { node: u64 }
    OpenIn { flags: u32, open_flags: u32 }
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 }
    ReleaseIn { file: u64, flags: u32, release_flags: u32, owner: u64 }
    FlushIn { file: u64, unused: u32, padding: u32, owner: u64 }
    ReadIn { file: u64, offset: u64, size: u32, read_flags: u32, owner: u64, flags: u32, unused: u32 }
    WriteIn { file: u64, offset: u64, size: u32, write_flags: u32, owner: u64, flags: u32, unused: u32 }
    FsyncIn { file: u64, flags: u32, unused: u32 }
    SetXattrIn { size: u32, flags: u32 }
    SetXattrExtIn { size: u32, flags: u32, acl_flags: u32, unused: u32 }
    GetXattrIn { size: u32, unused: u32 }
    IoctlIn { file: u64, flags: u32, command: u32, arg: u64, in_bytes: u32, out_bytes: u32 }
    FallocateIn { file: u64, offset: u64, length: u64, mode: u32, unused: u32 }
    LseekIn { file: u64, offset: i64, whence: u32, unused: u32 }
    CopyFileRangeIn {
        from_file: u64, from_offset: u64, to: u64, to_file: u64, to_offset: u64, len: u64, flags: u64,
    }

    Attributes {
        node: u64, size: u64, blocks: u64, atime: i64, mtime: i64, ctime: i64,
        atime_ns: u32, mtime_ns: u32, ctime_ns: u32, mode: u32, links: u32,
        uid: u32, gid: u32, device: u32, block_bytes: u32, flags: u32,
    }
    /// With the times for which the kernel may cache the name and the attributes.
    EntryOut {
        node: u64, generation: u64, entry_s: u64, attr_s: u64, entry_ns: u32, attr_ns: u32,
        attr: Attributes,
    }
    AttrOut { attr_s: u64, attr_ns: u32, unused: u32, attr: Attributes }
    StatxTime { sec: i64, nsec: u32, unused: i32 }
    Statx {
        mask: u32, block_bytes: u32, attributes: u64, links: u32, uid: u32, gid: u32,
        mode: u16, unused: u16, node: u64, size: u64, blocks: u64, attributes_mask: u64,
        atime: StatxTime, btime: StatxTime, ctime: StatxTime, mtime: StatxTime,
        device_major: u32, device_minor: u32, own_major: u32, own_minor: u32, unused2: [u64; 14],
    }
    StatxOut { attr_s: u64, attr_ns: u32, flags: u32, unused: [u64; 2], attr: Statx }
    OpenOut { file: u64, flags: u32, backing: u32 }
    WriteOut { size: u32, unused: u32 }
    GetXattrOut { size: u32, unused: u32 }
    IoctlOut { result: i32, flags: u32, in_parts: u32, out_parts: u32 }
    /// `struct dioattr` of XFS.
    DirectIoLimits { memory_align: u32, request_bytes_min: u32, request_bytes_max: u32 }
    LseekOut { offset: i64 }
    StatfsOut {
        blocks: u64, free: u64, available: u64, files: u64, files_free: u64,
        block_bytes: u32, name_max: u32, fragment_bytes: u32, unused: [u32; 7],
    }
    /// Before the name of an entry of a listing.
    Dirent { node: u64, cookie: u64, name_len: u32, kind: u32 }

    /// The id that the answer to a ring request must carry, and the length of its payload.
    RingEntry { flags: u64, commit: u64, payload_len: u32, unused: u32, reserved: u64 }
    /// A command to the ring.
    RingCommand { flags: u64, commit: u64, queue: u16, unused: [u8; 6] }
}

/// Commands to the ring.
pub const RING_REGISTER: u32 = 1;
pub const RING_COMMIT_AND_FETCH: u32 = 2;

/// The offsets of the headers in the page of a ring's entry.
pub mod ring {
    pub const OP_AT: usize = 128;
    pub const ENTRY_AT: usize = 256;
    pub const BYTES: usize = ENTRY_AT + size_of::<super::RingEntry>();
}

/// The negotiated form of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dialect {
    /// Set by `init::SETXATTR_EXT`, with the features for ACLs.
    pub has_acls: bool,
}

/// Bytes of an operation's own header; None: the operation is not served.
pub fn op_bytes(opcode: u32, dialect: Dialect) -> Option<usize> {
    Some(match opcode {
        op::SETXATTR if dialect.has_acls => size_of::<SetXattrExtIn>(),
        op::LOOKUP | op::READLINK | op::SYMLINK | op::UNLINK | op::RMDIR => 0,
        op::STATFS | op::REMOVEXATTR | op::DESTROY => 0,
        op::FORGET => size_of::<ForgetIn>(),
        op::BATCH_FORGET => size_of::<BatchForgetIn>(),
        op::GETATTR => size_of::<GetAttrIn>(),
        op::STATX => size_of::<StatxIn>(),
        op::SETATTR => size_of::<SetAttrIn>(),
        op::MKNOD => size_of::<MknodIn>(),
        op::MKDIR => size_of::<MkdirIn>(),
        op::RENAME => size_of::<RenameIn>(),
        op::RENAME2 => size_of::<Rename2In>(),
        op::LINK => size_of::<LinkIn>(),
        op::OPEN | op::OPENDIR => size_of::<OpenIn>(),
        op::CREATE | op::TMPFILE => size_of::<CreateIn>(),
        op::RELEASE | op::RELEASEDIR => size_of::<ReleaseIn>(),
        op::FLUSH => size_of::<FlushIn>(),
        op::READ | op::READDIR | op::READDIRPLUS => size_of::<ReadIn>(),
        op::WRITE => size_of::<WriteIn>(),
        op::FSYNC | op::FSYNCDIR => size_of::<FsyncIn>(),
        op::SETXATTR => size_of::<SetXattrIn>(),
        op::GETXATTR | op::LISTXATTR => size_of::<GetXattrIn>(),
        op::IOCTL => size_of::<IoctlIn>(),
        op::FALLOCATE => size_of::<FallocateIn>(),
        op::LSEEK => size_of::<LseekIn>(),
        op::COPY_FILE_RANGE => size_of::<CopyFileRangeIn>(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn struct_sizes_match_the_kernel() {
        assert_eq!(size_of::<InHeader>(), 40);
        assert_eq!(size_of::<OutHeader>(), 16);
        assert_eq!((size_of::<InitIn>(), size_of::<InitOut>()), (64, 64));
        assert_eq!((size_of::<SetAttrIn>(), size_of::<Attributes>()), (88, 88));
        assert_eq!((size_of::<EntryOut>(), size_of::<AttrOut>()), (128, 104));
        assert_eq!((size_of::<StatxIn>(), size_of::<StatxOut>()), (24, 288));
        assert_eq!((size_of::<ReadIn>(), size_of::<WriteIn>()), (40, 40));
        assert_eq!((size_of::<StatfsOut>(), size_of::<Dirent>()), (80, 24));
        assert_eq!((size_of::<RingEntry>(), size_of::<RingCommand>()), (32, 24));
        assert_eq!(size_of::<CopyFileRangeIn>(), 56);
        assert_eq!(
            (size_of::<SetXattrIn>(), size_of::<SetXattrExtIn>()),
            (8, 16)
        );
        assert_eq!((size_of::<IoctlIn>(), size_of::<IoctlOut>()), (32, 16));
        assert_eq!(size_of::<NotifyInvalInodeOut>(), 24);
        assert_eq!(size_of::<NotifyStoreOut>(), 24);
    }
}
