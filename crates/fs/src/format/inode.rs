//! The on-disk format: head, inodes, map pages. `docs/formats.md` draws it. Little endian. The
//! store checksums every page, so bytes that are read are those that were written. Any client of
//! the volume may have written them; this module checks that they are consistent.

use crate::TARGET_MAX;
use crate::alloc::spans::Span;
use crate::tree::page_map::pages_to_next_span;
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use uuid::Uuid;

pub(crate) type Page = [u8; PAGE_BYTES];

const MAGIC: [u8; 8] = *b"pagemfs\0";
pub(crate) const VERSION: u32 = 0;
pub(crate) const INODE_BYTES: usize = 256;
pub(crate) const INODES_PER_PAGE: u64 = (PAGE_BYTES / INODE_BYTES) as u64;
/// Byte of the head at which the inode of the inode table lies.
const TABLE_AT: usize = 256;
/// Longest link target in bytes that fits into the inode.
pub(crate) const INLINE_MAX: usize = INODE_BYTES - INLINE_AT;
const INLINE_AT: usize = 112;
const SPARE_SPAN_AT: usize = 176;
/// Byte of the head at which the span of the reserve is named.
const RESERVE_AT: usize = 56;
/// Spans that an inode names; together they hold the first `SMALL_PAGES`.
pub(crate) const SPANS: usize = 7;
/// Pages of a file below its first chunk; as many as one leaf of a page table.
pub(crate) const SMALL_PAGES: u64 = 1 << CHUNK_ORDER;
/// A chunk is a span of 2^9 pages.
pub(crate) const CHUNK_ORDER: u8 = 9;
/// Entries of a map page.
pub(crate) const MAP_ENTRIES: u64 = (PAGE_BYTES / 8) as u64;
/// Three levels reach 2^27 chunks of 2 MiB, far beyond `FILE_BYTES_MAX`.
pub(crate) const MAP_HEIGHT_MAX: u8 = 3;
/// Bytes of the longest file: 16 TiB, a quarter of the largest slice.
pub const FILE_BYTES_MAX: u64 = 1 << 44;

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
/// Attributes lie in a span of up to 2^5 pages.
const XATTRS_ORDER_MAX: u8 = 5;
const NSEC_MAX: u32 = 999_999_999;

pub(crate) const KIND_MASK: u16 = 0o170_000;

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
}

/// The first page of a span of a file, and whether other places may name the span too. A shared
/// span is immutable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpanRef(pub(crate) u64);

impl SpanRef {
    const SHARED: u64 = 1 << 63;

    /// A span that no other place names.
    pub(crate) fn exclusive(page: u64) -> SpanRef {
        SpanRef(page)
    }

    pub(crate) fn shared(page: u64) -> SpanRef {
        SpanRef(page | SpanRef::SHARED)
    }

    pub(crate) fn page(self) -> u64 {
        self.0 & !SpanRef::SHARED
    }

    pub(crate) fn is_shared(self) -> bool {
        self.0 & SpanRef::SHARED != 0
    }

    pub(crate) fn is_none(self) -> bool {
        self.page() == 0
    }
}

/// The map of a file's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PageMap {
    pub(crate) spans: [SpanRef; SPANS],
    /// The root of the radix tree over chunks; 0: none.
    pub(crate) root: u64,
    pub(crate) height: u8,
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
    /// The target of a link of at most `INLINE_MAX` bytes.
    pub(crate) target: Vec<u8>,
}

/// Inconsistent bytes: not written by pagemesh, or by one with a defect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Corruption(pub String);

/// The stored form of an optional span; 0: none.
fn span_bits(span: Option<Span>) -> u64 {
    span.map_or(0, |Span { page, order }| page | u64::from(order) << 56)
}

fn span_of_bits(bits: u64) -> Option<Span> {
    (bits != 0).then_some(Span {
        page: bits & !(0xff << 56),
        order: (bits >> 56) as u8,
    })
}

/// Whether the span can lie in a space of `pages` pages. Page 0 is the head.
fn is_span_within(Span { page, order }: Span, pages: u64) -> bool {
    page != 0
        && order <= CHUNK_ORDER
        && page.is_multiple_of(1 << order)
        && page.checked_add(1 << order).is_some_and(|end| end <= pages)
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
            target: Vec::new(),
        }
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
        let Xattrs { at, order, len } = self.xattrs;
        put(&mut bytes, 96, (at | u64::from(order) << 56).to_le_bytes());
        put(&mut bytes, 104, len.to_le_bytes());
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
            put(&mut bytes, 2, flags.to_le_bytes());
        } else {
            bytes[INLINE_AT..][..self.target.len()].copy_from_slice(&self.target);
        }
        bytes
    }

    /// The pages that an inode counts, and those of its append extent. Does not check the bytes.
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
    pub(crate) fn decode(bytes: &[u8], pages: u64) -> Result<Inode, Corruption> {
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
        }
        inode.check(pages)?;
        Ok(inode)
    }

    fn check(&self, pages: u64) -> Result<(), Corruption> {
        let refuse = |why: String| Err(Corruption(why));
        if self.flags & !(NEEDS_TRIM | HAS_RESERVED_PAGES | INLINE) != 0 {
            return refuse(format!("its flags are {:#x}", self.flags));
        }
        let longest = match self.kind() {
            InodeKind::Symlink if self.flags & INLINE != 0 => INLINE_MAX as u64,
            InodeKind::Symlink => TARGET_MAX as u64,
            _ if self.flags & INLINE != 0 => {
                return refuse("it has a target and is no link".into());
            }
            _ => FILE_BYTES_MAX,
        };
        // An orphan may have lost its target.
        if self.size > longest
            || (self.kind() == InodeKind::Symlink && self.size == 0 && self.links > 0)
        {
            return refuse(format!("its size is {}", self.size));
        }
        let times = [self.atime, self.mtime, self.ctime, self.btime];
        if let Some(time) = times.iter().find(|time| time.nsec > NSEC_MAX) {
            return refuse(format!("a second of its times has {} ns", time.nsec));
        }
        let is_span = |page, order| page == 0 || is_span_within(Span { page, order }, pages);
        let map = &self.map;
        for (index, place) in map.spans.iter().enumerate() {
            let at = place.page();
            if !is_span(at, span_order(index)) {
                return refuse(format!("its span {index} begins at page {at}"));
            }
            if place.is_shared() && (at == 0 || self.kind() != InodeKind::File) {
                return refuse(format!("its span {index} is shared"));
            }
        }
        if let Some(spare) = self.spare_span
            && (!is_span_within(spare, pages) || self.kind() != InodeKind::File)
        {
            return refuse(format!("its spare span begins at page {}", spare.page));
        }
        if let Some(growth) = self.append_extent {
            let first = self.size / PAGE_BYTES as u64;
            let span = first..first + pages_to_next_span(first);
            let is_plain = self.kind() == InodeKind::File
                && self.flags & (NEEDS_TRIM | HAS_RESERVED_PAGES) == 0;
            if !is_plain || growth.limit_page <= span.start || growth.limit_page > span.end {
                return refuse(format!("it grows up to page {}", growth.limit_page));
            }
        }
        if let Some(log) = self.redo_log
            && (log <= Ino::ROOT || self.kind() != InodeKind::File || self.append_extent.is_some())
        {
            return refuse(format!("it is to be written from inode {}", log.0));
        }
        if map.height > MAP_HEIGHT_MAX || map.root >= pages || (map.root == 0) != (map.height == 0)
        {
            let PageMap { root, height, .. } = map;
            return refuse(format!("its map of height {height} begins at page {root}"));
        }
        let Xattrs { at, order, len } = self.xattrs;
        if order > XATTRS_ORDER_MAX || !is_span(at, order) || (at == 0) != (len == 0) {
            return refuse(format!(
                "its attributes begin at page {at}, with order {order}"
            ));
        }
        if u64::from(len) > (PAGE_BYTES as u64) << order {
            return refuse(format!("its attributes have {len} bytes"));
        }
        match self.pages > pages {
            true => refuse(format!("it has {} pages", self.pages)),
            false => Ok(()),
        }
    }
}

/// The order of the span with this index.
pub(crate) fn span_order(index: usize) -> u8 {
    (index as u8 + 2).max(3)
}

/// The span that holds a file's page below `SMALL_PAGES`: its index, and its
/// first page in the file.
pub(crate) fn span_holding(page: u64) -> (usize, u64) {
    assert!(page < SMALL_PAGES, "page {page} lies in a chunk");
    match page.checked_ilog2() {
        Some(order) if order >= 3 => (order as usize - 2, 1 << order),
        _ => (0, 0),
    }
}

/// The content of page 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) uuid: Uuid,
    /// The key of the hash of names.
    pub(crate) hash_key: [u64; 2],
    /// Limit in bytes for files and name space; 0: no limit but the pool's.
    pub(crate) limit_bytes: u64,
    /// The span of the reserve; `None` if it was never allocated.
    pub(crate) reserve: Option<Span>,
    /// The inode table, which is stored as a file.
    pub(crate) table: Inode,
}

impl Head {
    pub(crate) fn encode(&self) -> Page {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, 0, MAGIC);
        put(&mut page, 8, VERSION.to_le_bytes());
        put(&mut page, 16, *self.uuid.as_bytes());
        put(&mut page, 32, self.hash_key[0].to_le_bytes());
        put(&mut page, 40, self.hash_key[1].to_le_bytes());
        put(&mut page, 48, self.limit_bytes.to_le_bytes());
        put(&mut page, RESERVE_AT, span_bits(self.reserve).to_le_bytes());
        put(&mut page, TABLE_AT, self.table.encode());
        page
    }

    pub(crate) fn decode(page: &Page, pages: u64) -> Result<Head, Corruption> {
        if page[..8] != MAGIC {
            return Err(Corruption(
                "there is no file system in it; make one with 'pagemesh fs create'".into(),
            ));
        }
        let version = get_u32(page, 8);
        if version != VERSION {
            return Err(Corruption(format!(
                "its format is version {version}, and this pagemesh knows version {VERSION}; \
                 use the pagemesh that made it"
            )));
        }
        let table = &page[TABLE_AT..TABLE_AT + INODE_BYTES];
        let table = Inode::decode(table, pages).map_err(|Corruption(cause)| {
            Corruption(format!("of the inode table it says: {cause}"))
        })?;
        let shares = table.map.spans.iter().any(|place| place.is_shared());
        let is_plain =
            table.kind() == InodeKind::File && table.xattrs.at == 0 && table.spare_span.is_none();
        let is_plain = is_plain && table.append_extent.is_none() && table.redo_log.is_none();
        if table.is_free() || !is_plain || shares {
            return Err(Corruption("it names no inode table".into()));
        }
        let limit_bytes = get_u64(page, 48);
        // Mounting reads the whole table: its time must be bounded.
        let most = match limit_bytes {
            0 => pages.saturating_mul(PAGE_BYTES as u64),
            limit => limit,
        };
        if table.size > most || !table.size.is_multiple_of(PAGE_BYTES as u64) {
            return Err(Corruption(format!(
                "its inode table has {} bytes, of {most} that the file system may take",
                table.size
            )));
        }
        let reserve = span_of_bits(get_u64(page, RESERVE_AT));
        if reserve.is_some_and(|span| !is_span_within(span, pages)) {
            return Err(Corruption("its reserve lies beyond the volume".into()));
        }
        Ok(Head {
            uuid: Uuid::from_bytes(field(page, 16)),
            hash_key: [get_u64(page, 32), get_u64(page, 40)],
            limit_bytes,
            reserve,
            table,
        })
    }
}

/// The location of an inode: page of the table, byte of that page.
pub(crate) fn inode_at(ino: Ino) -> (u64, usize) {
    let index = (ino.0 % INODES_PER_PAGE) as usize;
    (ino.0 / INODES_PER_PAGE, index * INODE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: u64 = 1 << 20;

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

        #[test]
        fn head_of_random_bytes_decodes_without_panic(
            words in prop::collection::vec(prop_oneof![any::<u64>(), Just(u64::MAX - 7), 0..PAGES], 512),
        ) {
            let mut page = [0; PAGE_BYTES];
            for (at, word) in words.iter().enumerate() {
                page[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
            }
            let _ = Head::decode(&page, PAGES);
        }
    }

    /// The sum of this page and the length of its span overflows to 0.
    #[test]
    fn span_with_overflowing_end_is_refused() {
        let mut inode = Inode::decode(&[0; INODE_BYTES], PAGES).expect("a free one");
        inode.map.spans[0] = SpanRef(u64::MAX >> 1 & !7);
        inode.check(PAGES).expect_err("beyond the volume");
    }
}
