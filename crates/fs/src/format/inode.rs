//! Inodes: their fields and their bytes. `docs/formats.md` draws them. Little endian. The store
//! checksums every page, so bytes that are read are those that were written. Any client of the
//! volume may have written them; [`super::inode_check`] checks that they are consistent.

use crate::error::{Corruption, FsError, Result};
use crate::format::file_id::FileId;
use crate::format::page_map::{FileSpan, PageMap, Span, SpanRef, span_bits, span_of_bits};
use crate::format::xattr_kinds::XattrKinds;
use crate::format::{PAGE, page_count};
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

pub(crate) const INODE_BYTES: usize = 256;
pub(crate) const INODES_PER_PAGE: u64 = (PAGE_BYTES / INODE_BYTES) as u64;
/// Longest link target in bytes that fits into the inode.
pub(crate) const INLINE_MAX: usize = INODE_BYTES - INLINE_AT;
/// Byte of the inode at which the kinds of its extended attributes lie.
const XATTR_KINDS_AT: usize = 108;
const INLINE_AT: usize = 112;
const SPARE_SPAN_AT: usize = 176;
/// Bytes of the longest file: 16 TiB, a quarter of the largest slice.
pub const FILE_BYTES_MAX: u64 = 1 << 44;
/// Bytes of the longest name of an entry.
pub const NAME_MAX: usize = 255;
/// Bytes of the longest target of a link.
pub const TARGET_MAX: usize = 4095;
/// Names of one file: the limit of ext4.
pub const LINKS_MAX: u32 = 65_000;
/// Pages beyond the size may still have to be freed, and the page count is not reliable.
pub(crate) const NEEDS_TRIM: u16 = 1;
/// Pages beyond the size may be mapped, all zeroes.
pub(crate) const HAS_RESERVED_PAGES: u16 = 2;
/// The inode holds the target of a link in place of the spans.
pub(crate) const INLINE: u16 = 4;
/// Direct clients may have extended the file. In memory it is [`Inode::append_extent`].
const HAS_APPEND_EXTENT: u16 = 8;
/// Byte of the inode at which the append extent lies.
const APPEND_EXTENT_AT: usize = 184;
/// A redo log must be applied to the file. In memory it is [`Inode::redo_log`].
const HAS_REDO_LOG: u16 = 16;
/// Byte of the inode at which the log is named.
const REDO_LOG_AT: usize = 200;
/// The data should lie in memory, in a pool of memory with disks behind it.
pub(crate) const TIER_MEMORY: u16 = 32;
/// The data should lie on disks behind memory.
pub(crate) const TIER_FLASH: u16 = 64;
/// The flags of the tier. None of them: pages move by their use.
pub(crate) const TIER: u16 = TIER_MEMORY | TIER_FLASH;
/// Byte of the inode at which the verifier of an exclusive create lies.
const CREATE_VERIFIER_AT: usize = 216;
/// Byte of the inode at which the identity of the service file lies: number 8, generation 4, fold of the birth time 4.
const SERVICE_FILE_AT: usize = 224;
/// How far ahead of an overwrite the stored times may be ([`crate::file::times`]): the time between two flushes of times, twice.
pub(crate) const TIME_GRANT_S: i64 = 2;
/// A clock that is this far behind the last change was set back. Within a tick, at most 10 ms, it stands still, and after a crash it
/// may be behind times that were stored ahead.
const CLOCK_STEP_S_MIN: i64 = TIME_GRANT_S + 1;
const NSEC_LAST: u32 = 999_999_999;
const KIND_MASK: u16 = 0o170_000;
/// Bits that a write through the kernel clears. Direct clients do not clear them.
pub(crate) const SET_ID: u16 = 0o6000;

/// The number of an inode. 0 is the inode table itself, 1 the root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

impl Ino {
    pub(crate) const TABLE: Ino = Ino(0);

    /// The root directory.
    pub const ROOT: Ino = Ino(1);
}

/// A point in time, since 1970 in UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time {
    /// Seconds.
    pub sec: i64,
    /// Nanoseconds, below a second.
    pub nsec: u32,
}

impl Time {
    /// A nanosecond later.
    fn next(self) -> Time {
        match self.nsec {
            NSEC_LAST => Time {
                sec: self.sec.saturating_add(1),
                nsec: 0,
            },
            nsec => Time {
                nsec: nsec + 1,
                ..self
            },
        }
    }
}

/// The type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InodeKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A socket.
    Socket,
}

impl InodeKind {
    /// The bits of `st_mode`.
    #[must_use]
    pub fn bits(self) -> u16 {
        match self {
            InodeKind::Fifo => 0o010_000,
            InodeKind::CharDevice => 0o020_000,
            InodeKind::Directory => 0o040_000,
            InodeKind::BlockDevice => 0o060_000,
            InodeKind::File => 0o100_000,
            InodeKind::Symlink => 0o120_000,
            InodeKind::Socket => 0o140_000,
        }
    }

    /// The type in `st_mode` bits.
    #[must_use]
    pub fn of_mode(mode: u16) -> Option<InodeKind> {
        Some(match mode & KIND_MASK {
            0o010_000 => InodeKind::Fifo,
            0o020_000 => InodeKind::CharDevice,
            0o040_000 => InodeKind::Directory,
            0o060_000 => InodeKind::BlockDevice,
            0o100_000 => InodeKind::File,
            0o120_000 => InodeKind::Symlink,
            0o140_000 => InodeKind::Socket,
            _ => return None,
        })
    }
}

/// Location and length of an inode's extended attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Xattrs {
    /// The span; 0: there are none.
    pub(crate) at: u64,
    pub(crate) order: u8,
    pub(crate) len: u32,
    pub(crate) kinds: XattrKinds,
}

/// The range behind a file's size that direct clients may append to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppendExtent {
    /// Tells footers of this grant from other bytes.
    pub nonce: u64,
    /// The first page of the file that they may not write.
    pub limit_page: u64,
}

/// An inode. Times are exact to the nanosecond.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    /// `st_mode`; 0: free.
    pub(crate) mode: u16,
    pub(crate) flags: u16,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) size: u64,
    /// Mapped pages of the file, and pages of its map and attributes.
    pub(crate) pages: u64,
    pub(crate) atime: Time,
    pub(crate) mtime: Time,
    pub(crate) ctime: Time,
    pub(crate) btime: Time,
    pub(crate) device: u32,
    /// Distinguishes the files that had this number, one after the other.
    pub(crate) generation: u32,
    /// Of a directory.
    pub(crate) parent: Ino,
    pub(crate) xattrs: Xattrs,
    pub(crate) map: PageMap,
    /// A span that will replace a shared one, or is to be freed.
    pub(crate) spare_span: Option<Span>,
    /// Set while direct clients may extend the file.
    pub(crate) append_extent: Option<AppendExtent>,
    /// A file without a name that holds pages to be written to this one ([`crate::file::redo_log`]).
    pub(crate) redo_log: Option<Ino>,
    /// The number by which an NFS client recognizes a file that it has created; 0: none. An earlier release clears it. Then the
    /// repeated create fails.
    pub(crate) create_verifier: u64,
    /// Of the root: the file without a name that servers keep their state in ([`crate::file::service_file`]). An earlier release
    /// clears it, and frees the file at its mount.
    pub(crate) service_file: Option<FileId>,
    /// The target of a link of at most `INLINE_MAX` bytes.
    pub(crate) target: Vec<u8>,
}

fn time_at(bytes: &[u8], at: usize) -> Time {
    Time {
        sec: get_u64(bytes, at).cast_signed(),
        nsec: get_u32(bytes, at + 8),
    }
}

fn put_time(bytes: &mut [u8], at: usize, time: Time) {
    put(bytes, at, time.sec.to_le_bytes());
    put(bytes, at + 8, time.nsec.to_le_bytes());
}

/// The identity of a file; `None` for number 0.
fn file_id_at(bytes: &[u8], at: usize) -> Option<FileId> {
    let id = FileId {
        ino: Ino(get_u64(bytes, at)),
        generation: get_u32(bytes, at + 8),
        birth: get_u32(bytes, at + 12),
    };
    (id.ino != Ino::TABLE).then_some(id)
}

fn put_file_id(bytes: &mut [u8], at: usize, id: Option<FileId>) {
    if let Some(id) = id {
        put(bytes, at, id.ino.0.to_le_bytes());
        put(bytes, at + 8, id.generation.to_le_bytes());
        put(bytes, at + 12, id.birth.to_le_bytes());
    }
}

impl Inode {
    /// A free inode of this generation.
    pub(crate) fn free(generation: u32) -> Inode {
        Inode {
            mode: 0,
            flags: 0,
            links: 0,
            uid: 0,
            gid: 0,
            size: 0,
            pages: 0,
            atime: Time::default(),
            mtime: Time::default(),
            ctime: Time::default(),
            btime: Time::default(),
            device: 0,
            generation,
            parent: Ino(0),
            xattrs: Xattrs::default(),
            map: PageMap::default(),
            spare_span: None,
            append_extent: None,
            redo_log: None,
            create_verifier: 0,
            service_file: None,
            target: Vec::new(),
        }
    }

    /// The time of a change now: later than the time of the change before, so that two changes in one tick of the clock differ.
    pub(crate) fn change_time(&self, now: Time) -> Time {
        let is_same_tick =
            now <= self.ctime && self.ctime.sec.saturating_sub(now.sec) <= CLOCK_STEP_S_MIN;
        match is_same_tick {
            true => self.ctime.next(),
            false => now,
        }
    }

    /// Records a change of anything but the content.
    pub(crate) fn touch(&mut self, now: Time) {
        self.ctime = self.change_time(now);
    }

    /// Records a change of the content.
    pub(crate) fn touch_content(&mut self, now: Time) {
        self.touch(now);
        self.mtime = self.ctime;
    }

    pub(crate) fn is_free(&self) -> bool {
        self.mode == 0
    }

    pub(crate) fn kind(&self) -> InodeKind {
        InodeKind::of_mode(self.mode).unwrap_or(InodeKind::File)
    }

    pub(crate) fn is_directory(&self) -> bool {
        self.kind() == InodeKind::Directory
    }

    pub(crate) fn has_xattrs(&self) -> bool {
        self.xattrs.at != 0
    }

    /// Whether the inode has extended attributes of a kind; true if only the attributes can tell.
    pub(crate) fn may_have_xattr(&self, kind: XattrKinds) -> bool {
        self.has_xattrs() && self.xattrs.kinds.may_have(kind)
    }

    /// Whether every page below the size is mapped, and no other. The page count of a file that is
    /// being trimmed is not reliable, and direct clients may have mapped more pages.
    pub(crate) fn is_dense(&self) -> bool {
        self.is_dense_before_append() && self.append_extent.is_none()
    }

    /// As [`Inode::is_dense`], without the pages of direct clients.
    pub(crate) fn is_dense_before_append(&self) -> bool {
        let is_settled =
            self.flags & (HAS_RESERVED_PAGES | NEEDS_TRIM) == 0 && self.redo_log.is_none();
        is_settled && self.pages == page_count(self.size)
    }

    /// Whether the root may name the inode as its service file. A name leads to no service file, and its number is free for
    /// another inode after an earlier release has freed it.
    pub(crate) fn can_be_service_file(&self) -> bool {
        self.links == 0 && self.kind() == InodeKind::File
    }

    /// Whether a write removes set-id bits or capabilities.
    pub(crate) fn needs_remove_privs(&self) -> bool {
        self.mode & SET_ID != 0 || self.may_have_xattr(XattrKinds::CAPABILITIES)
    }

    /// Mapped pages of a span; `None` if only the volume can tell.
    pub(crate) fn mapped_pages_in(&self, piece: &FileSpan) -> Option<u64> {
        let pages = self.pages.saturating_sub(piece.first_page);
        self.is_dense().then(|| pages.min(1 << piece.span.order))
    }

    /// Pages of the append extent that may be mapped, beyond those that the inode counts.
    pub(crate) fn granted_pages(&self) -> u64 {
        let reach = self.append_extent.map_or(0, |extent| extent.limit_page);
        reach.saturating_sub(page_count(self.size))
    }

    pub(crate) fn encode(&self) -> [u8; INODE_BYTES] {
        let mut bytes = [0; INODE_BYTES];
        put(&mut bytes, 0, self.mode.to_le_bytes());
        put(&mut bytes, 2, self.flags.to_le_bytes());
        put(&mut bytes, 4, self.links.to_le_bytes());
        put(&mut bytes, 8, self.uid.to_le_bytes());
        put(&mut bytes, 12, self.gid.to_le_bytes());
        put(&mut bytes, 16, self.size.to_le_bytes());
        put(&mut bytes, 24, self.pages.to_le_bytes());
        let times = [self.atime, self.mtime, self.ctime, self.btime];
        for (i, time) in times.into_iter().enumerate() {
            put_time(&mut bytes, 32 + 12 * i, time);
        }
        put(&mut bytes, 80, self.device.to_le_bytes());
        put(&mut bytes, 84, self.generation.to_le_bytes());
        put(&mut bytes, 88, self.parent.0.to_le_bytes());
        let Xattrs {
            at,
            order,
            len,
            kinds,
        } = self.xattrs;
        put(&mut bytes, 96, (at | u64::from(order) << 56).to_le_bytes());
        put(&mut bytes, 104, len.to_le_bytes());
        put(&mut bytes, XATTR_KINDS_AT, kinds.encode().to_le_bytes());
        if self.flags & INLINE == 0 {
            for (i, span) in self.map.spans.into_iter().enumerate() {
                put(&mut bytes, INLINE_AT + 8 * i, span.0.to_le_bytes());
            }
            let root = self.map.root | u64::from(self.map.height) << 56;
            put(&mut bytes, 168, root.to_le_bytes());
            put(
                &mut bytes,
                SPARE_SPAN_AT,
                span_bits(self.spare_span).to_le_bytes(),
            );
            let mut flags = self.flags;
            if let Some(AppendExtent {
                nonce,
                limit_page: reach,
            }) = self.append_extent
            {
                flags |= HAS_APPEND_EXTENT;
                put(&mut bytes, APPEND_EXTENT_AT, nonce.to_le_bytes());
                put(&mut bytes, APPEND_EXTENT_AT + 8, reach.to_le_bytes());
            }
            if let Some(log) = self.redo_log {
                flags |= HAS_REDO_LOG;
                put(&mut bytes, REDO_LOG_AT, log.0.to_le_bytes());
            }
            let verifier = self.create_verifier.to_le_bytes();
            put(&mut bytes, CREATE_VERIFIER_AT, verifier);
            put_file_id(&mut bytes, SERVICE_FILE_AT, self.service_file);
            put(&mut bytes, 2, flags.to_le_bytes());
        } else {
            bytes[INLINE_AT..][..self.target.len()].copy_from_slice(&self.target);
        }
        bytes
    }

    /// The pages that an inode counts, and its append extent. Does not check the bytes.
    pub(crate) fn stored_pages(bytes: &[u8]) -> u64 {
        let flags = u16::from_le_bytes(field(bytes, 2));
        let mut inode = Inode::free(0);
        inode.mode = u16::from_le_bytes(field(bytes, 0));
        if inode.is_free() {
            return 0;
        }
        inode.size = get_u64(bytes, 16);
        inode.pages = get_u64(bytes, 24);
        if flags & INLINE == 0 && flags & HAS_APPEND_EXTENT != 0 {
            inode.append_extent = Some(AppendExtent {
                nonce: 0,
                limit_page: get_u64(bytes, APPEND_EXTENT_AT + 8),
            });
        }
        inode.pages.saturating_add(inode.granted_pages())
    }

    /// Decodes and checks an inode. `pages` is the size of the space: no span may lie beyond it.
    pub(crate) fn decode(bytes: &[u8], pages: u64) -> std::result::Result<Inode, Corruption> {
        let mut inode = Inode::free(get_u32(bytes, 84));
        inode.mode = u16::from_le_bytes(field(bytes, 0));
        if inode.is_free() {
            return Ok(inode);
        }
        if InodeKind::of_mode(inode.mode).is_none() {
            return Err(Corruption(format!("its mode is {:o}", inode.mode)));
        }
        inode.flags = u16::from_le_bytes(field(bytes, 2));
        inode.links = get_u32(bytes, 4);
        inode.uid = get_u32(bytes, 8);
        inode.gid = get_u32(bytes, 12);
        inode.size = get_u64(bytes, 16);
        inode.pages = get_u64(bytes, 24);
        inode.atime = time_at(bytes, 32);
        inode.mtime = time_at(bytes, 44);
        inode.ctime = time_at(bytes, 56);
        inode.btime = time_at(bytes, 68);
        inode.device = get_u32(bytes, 80);
        inode.parent = Ino(get_u64(bytes, 88));
        let named = get_u64(bytes, 96);
        inode.xattrs = Xattrs {
            at: named & !(0xff << 56),
            order: (named >> 56) as u8,
            len: get_u32(bytes, 104),
            kinds: XattrKinds::decode(get_u32(bytes, XATTR_KINDS_AT)),
        };
        if inode.flags & INLINE != 0 {
            let len = inode.size.min(INLINE_MAX as u64) as usize;
            inode.target = bytes[INLINE_AT..][..len].to_vec();
        } else {
            for (i, span) in inode.map.spans.iter_mut().enumerate() {
                *span = SpanRef(get_u64(bytes, INLINE_AT + 8 * i));
            }
            let root = get_u64(bytes, 168);
            inode.map.root = root & !(0xff << 56);
            inode.map.height = (root >> 56) as u8;
            inode.spare_span = span_of_bits(get_u64(bytes, SPARE_SPAN_AT));
            if inode.flags & HAS_APPEND_EXTENT != 0 {
                inode.flags &= !HAS_APPEND_EXTENT;
                inode.append_extent = Some(AppendExtent {
                    nonce: get_u64(bytes, APPEND_EXTENT_AT),
                    limit_page: get_u64(bytes, APPEND_EXTENT_AT + 8),
                });
            }
            if inode.flags & HAS_REDO_LOG != 0 {
                inode.flags &= !HAS_REDO_LOG;
                inode.redo_log = Some(Ino(get_u64(bytes, REDO_LOG_AT)));
            }
            inode.create_verifier = get_u64(bytes, CREATE_VERIFIER_AT);
            inode.service_file = file_id_at(bytes, SERVICE_FILE_AT);
        }
        inode.check(pages)?;
        Ok(inode)
    }
}

/// The location of an inode: page of the table, byte of that page.
pub(crate) fn inode_at(ino: Ino) -> (u64, usize) {
    let index = (ino.0 % INODES_PER_PAGE) as usize;
    (ino.0 / INODES_PER_PAGE, index * INODE_BYTES)
}

/// Number of inodes in the table's pages.
pub(crate) fn table_inodes(table: &Inode) -> u64 {
    table.size / PAGE * INODES_PER_PAGE
}

pub(crate) fn damaged_inode(ino: Ino, cause: Corruption) -> FsError {
    FsError::Damaged {
        what: format!("inode {}", ino.0),
        cause,
    }
}

pub(crate) fn check_ino(ino: Ino) -> Result<()> {
    match ino {
        Ino::TABLE => Err(Errno::STALE.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::page_map::span_order;
    use proptest::prelude::*;

    const PAGES: u64 = 1 << 20;

    /// A change at `now` after one at `before`.
    fn check_change(before: (i64, u32), now: (i64, u32), expected: (i64, u32)) {
        let time = |(sec, nsec)| Time { sec, nsec };
        let mut inode = Inode::free(1);
        inode.ctime = time(before);
        inode.touch_content(time(now));
        assert_eq!((inode.ctime, inode.mtime), (time(expected), time(expected)));
    }

    #[test]
    fn changes_in_one_tick_have_rising_times() {
        check_change((5, 7), (5, 8), (5, 8));
        check_change((5, 7), (5, 7), (5, 8));
        check_change((5, 7), (5, 6), (5, 8));
        check_change((5, NSEC_LAST), (5, NSEC_LAST), (6, 0));
        // A crash has left times that were stored ahead.
        check_change((7, 8), (5, 7), (7, 9));
        // The clock was set back.
        check_change((9, 7), (5, 8), (5, 8));
        check_change((i64::MAX, 7), (i64::MIN, 8), (i64::MIN, 8));
    }

    /// Arbitrary bytes of an inode, as any client of the volume may write them.
    fn some_inode() -> impl Strategy<Value = Vec<u8>> {
        let words = prop::collection::vec(
            prop_oneof![any::<u64>(), 0..PAGES, (u64::MAX - 600)..=u64::MAX, Just(0)],
            INODE_BYTES / 8,
        );
        let mode = prop_oneof![
            Just(0o100_644u16),
            Just(0o040_755),
            Just(0o120_777),
            any::<u16>()
        ];
        (words, mode, any::<bool>()).prop_map(|(words, mode, inline)| {
            let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            bytes[..2].copy_from_slice(&mode.to_le_bytes());
            let known = NEEDS_TRIM
                | HAS_RESERVED_PAGES
                | HAS_APPEND_EXTENT
                | HAS_REDO_LOG
                | if inline { INLINE } else { 0 };
            bytes[2] &= known as u8;
            bytes[3] = 0;
            for at in [40, 52, 64, 76] {
                // The highest byte of nanoseconds.
                bytes[at + 3] &= 0x3f;
            }
            bytes
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn stored_pages_are_counted_as_decoded(bytes in some_inode()) {
            if let Ok(inode) = Inode::decode(&bytes, PAGES) {
                let counted = inode.pages + inode.granted_pages();
                prop_assert_eq!(Inode::stored_pages(&bytes), counted);
            }
        }

        #[test]
        fn decoded_inode_names_only_pages_of_the_space(bytes in some_inode()) {
            if let Ok(inode) = Inode::decode(&bytes, PAGES) {
                for (index, at) in inode.map.spans.iter().enumerate() {
                    prop_assert!(at.page() <= PAGES - (1 << span_order(index)));
                }
                prop_assert!(inode.xattrs.at < PAGES && inode.map.root < PAGES);
                prop_assert!(u64::from(inode.xattrs.len) <= PAGES * 4096);
                prop_assert!(inode.flags & INLINE == 0 || inode.kind() == InodeKind::Symlink);
                let again = Inode::decode(&inode.encode(), PAGES);
                prop_assert_eq!(again, Ok(inode.clone()));
                prop_assert!(inode.pages <= PAGES && inode.size <= FILE_BYTES_MAX);
            }
        }
    }
}
