//! A page of a directory: its format, and changes of it. [`crate::tree::directory`] has the tree of these
//! pages.
//!
//! The caller passes the range of keys that the parents of a page promise. Other keys are damage.
//!
//! ```text
//!  0 kind   1   0 a page that is free, 1 leaf, 2 inner
//!  1 zero   1
//!  2 count  2
//!  4 used   2   bytes of entries
//!  6 zero   2
//!  8 free   4   the root: first free page; a free page: the next; 0: none
//! 12 pages  4   the root: pages of the directory
//! 16 entries    leaf: key 8, inode 8, kind 1, length 1, name; inner: key 8, page 4
//! ```

use crate::error::Corruption;
use crate::format::Page;
use crate::format::inode::{Ino, InodeKind};
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use std::ops::Range;

const LEAF: u8 = 1;
const INNER: u8 = 2;
const HEADER_BYTES: usize = 16;
pub(crate) const FREE_AT: usize = 8;
pub(crate) const PAGES_AT: usize = 12;
const ENTRY_FIXED_BYTES: usize = 18;
const CHILD_BYTES: usize = 12;
const CHILDREN_MAX: usize = (PAGE_BYTES - HEADER_BYTES) / CHILD_BYTES;
/// Most names that share one hash.
pub(crate) const COLLISIONS_MAX: u64 = 256;
/// The lowest key of a name. Listing begins there; "." and ".." come before.
pub(crate) const FIRST_KEY: u64 = COLLISIONS_MAX;
/// Behind all keys: they have 63 bits.
pub(crate) const END_KEY: u64 = 1 << 63;

/// An entry of a directory, without its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreeEntry {
    pub(crate) key: u64,
    pub(crate) ino: Ino,
    pub(crate) kind: InodeKind,
}

fn kind_code(kind: InodeKind) -> u8 {
    (kind.bits() >> 12) as u8
}

/// The decoded content of a page, or why it is damaged.
pub(crate) type PageResult<T> = std::result::Result<T, Corruption>;

pub(crate) fn damaged(cause: impl Into<String>) -> Corruption {
    Corruption(cause.into())
}

/// A decoded node, to be split or to lose a child.
pub(crate) enum Node {
    Leaf(Vec<(TreeEntry, Vec<u8>)>),
    /// Lowest keys, and pages. The first key is the lowest of the node.
    Inner(Vec<(u64, u32)>),
}

/// Bytes of an entry in a page.
fn entry_len(name: &[u8]) -> usize {
    ENTRY_FIXED_BYTES + name.len()
}

fn entry_count(page: &Page) -> usize {
    usize::from(u16::from_le_bytes(field(page, 2)))
}

fn used_bytes(page: &Page) -> usize {
    usize::from(u16::from_le_bytes(field(page, 4)))
}

fn set_usage(page: &mut Page, count: usize, used: usize) {
    put(&mut page[..], 2, (count as u16).to_le_bytes());
    put(&mut page[..], 4, (used as u16).to_le_bytes());
}

fn put_entry(page: &mut Page, at: usize, entry: TreeEntry, name: &[u8]) {
    put(&mut page[..], at, entry.key.to_le_bytes());
    put(&mut page[..], at + 8, entry.ino.0.to_le_bytes());
    page[at + 16] = kind_code(entry.kind);
    page[at + 17] = name.len() as u8;
    page[at + ENTRY_FIXED_BYTES..][..name.len()].copy_from_slice(name);
}

/// The entries of a leaf, each with the byte of the page where it begins. Their keys
/// rise, within the range of the leaf.
pub(crate) struct Entries<'p> {
    body: &'p [u8],
    remaining: usize,
    at: usize,
    keys: Range<u64>,
}

impl<'p> Entries<'p> {
    pub(crate) fn new(page: &'p Page, keys: &Range<u64>) -> PageResult<Entries<'p>> {
        if page[0] != LEAF {
            return Err(damaged(format!("it is of kind {} and not a leaf", page[0])));
        }
        let body = page.get(HEADER_BYTES..HEADER_BYTES + used_bytes(page));
        Ok(Entries {
            body: body.ok_or_else(|| damaged("it is fuller than a page"))?,
            remaining: entry_count(page),
            at: HEADER_BYTES,
            keys: keys.clone(),
        })
    }

    fn next_entry(&mut self) -> PageResult<(usize, TreeEntry, &'p [u8])> {
        let cut = || damaged("an entry goes beyond its end");
        let (fixed, rest) = self
            .body
            .split_at_checked(ENTRY_FIXED_BYTES)
            .ok_or_else(cut)?;
        let len = usize::from(fixed[17]);
        let (name, rest) = rest.split_at_checked(len).ok_or_else(cut)?;
        let kind = InodeKind::of_mode(u16::from(fixed[16]) << 12).filter(|_| fixed[16] < 16);
        let entry = TreeEntry {
            key: get_u64(fixed, 0),
            ino: Ino(get_u64(fixed, 8)),
            kind: kind.ok_or_else(|| damaged(format!("an entry is of kind {}", fixed[16])))?,
        };
        if !self.keys.contains(&entry.key) {
            return Err(damaged(format!("the key {} is out of order", entry.key)));
        }
        self.keys.start = entry.key + 1;
        let at = self.at;
        (self.body, self.at) = (rest, at + entry_len(name));
        Ok((at, entry, name))
    }
}

impl<'p> Iterator for Entries<'p> {
    type Item = PageResult<(usize, TreeEntry, &'p [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.remaining.checked_sub(1) {
            Some(left) => {
                self.remaining = left;
                Some(self.next_entry())
            }
            None if self.body.is_empty() => None,
            None => {
                self.body = &[];
                Some(Err(damaged("there are bytes behind its entries")))
            }
        }
    }
}

/// Inserts an entry into a leaf; false if the leaf has no room.
pub(crate) fn insert_entry(
    page: &mut Page,
    keys: &Range<u64>,
    entry: TreeEntry,
    name: &[u8],
) -> PageResult<bool> {
    let (count, len) = (entry_count(page), entry_len(name));
    let mut entries = Entries::new(page, keys)?;
    let mut at = None;
    for found in &mut entries {
        let (begin, other, _) = found?;
        if other.key > entry.key && at.is_none() {
            at = Some(begin);
        }
    }
    let end = entries.at;
    if end + len > PAGE_BYTES {
        return Ok(false);
    }
    let at = at.unwrap_or(end);
    page.copy_within(at..end, at + len);
    put_entry(page, at, entry, name);
    set_usage(page, count + 1, end + len - HEADER_BYTES);
    Ok(true)
}

/// Removes an existing entry from a leaf. Returns the number of entries left.
pub(crate) fn remove_entry(page: &mut Page, keys: &Range<u64>, key: u64) -> PageResult<usize> {
    let count = entry_count(page);
    let mut entries = Entries::new(page, keys)?;
    let mut cut = None;
    for found in &mut entries {
        let (begin, other, name) = found?;
        if other.key == key {
            cut = Some((begin, entry_len(name)));
        }
    }
    let end = entries.at;
    let (at, len) = cut.ok_or_else(|| damaged("an entry is gone that was there"))?;
    page.copy_within(at + len..end, at);
    page[end - len..end].fill(0);
    set_usage(page, count - 1, end - len - HEADER_BYTES);
    Ok(count - 1)
}

/// Makes an existing entry name another inode.
pub(crate) fn replace_entry(
    page: &mut Page,
    keys: &Range<u64>,
    key: u64,
    ino: Ino,
    kind: InodeKind,
) -> PageResult<()> {
    for found in Entries::new(page, keys)? {
        let (at, entry, _) = found?;
        if entry.key == key {
            put(&mut page[..], at + 8, ino.0.to_le_bytes());
            page[at + 16] = kind_code(kind);
            return Ok(());
        }
    }
    Err(damaged("an entry is gone that was there"))
}

impl Node {
    pub(crate) fn decode(page: &Page, keys: &Range<u64>) -> PageResult<Node> {
        let (count, used) = (entry_count(page), used_bytes(page));
        match page[0] {
            LEAF => {
                let entries = Entries::new(page, keys)?;
                let owned = entries.map(|found| {
                    let (_, entry, name) = found?;
                    Ok((entry, name.to_vec()))
                });
                Ok(Node::Leaf(owned.collect::<PageResult<_>>()?))
            }
            INNER if used == count * CHILD_BYTES && (1..=CHILDREN_MAX).contains(&count) => {
                let children = page[HEADER_BYTES..HEADER_BYTES + used].chunks_exact(CHILD_BYTES);
                let children: Vec<(u64, u32)> =
                    children.map(|c| (get_u64(c, 0), get_u32(c, 8))).collect();
                let rises = children.is_sorted_by(|(one, _), (next, _)| one < next);
                let is_within = children[1..].iter().all(|(key, _)| keys.contains(key));
                if rises && is_within {
                    Ok(Node::Inner(children))
                } else {
                    Err(damaged("its keys are out of order"))
                }
            }
            kind => Err(damaged(format!("it is of kind {kind} and not a node"))),
        }
    }

    pub(crate) fn used_bytes(&self) -> usize {
        match self {
            Node::Leaf(entries) => entries.iter().map(|(_, name)| entry_len(name)).sum(),
            Node::Inner(children) => children.len() * CHILD_BYTES,
        }
    }

    pub(crate) fn fits(&self) -> bool {
        HEADER_BYTES + self.used_bytes() <= PAGE_BYTES
    }

    /// Writes the node into a page, except for the root's header fields of the directory.
    pub(crate) fn encode(&self, page: &mut Page) {
        assert!(self.fits(), "a node of {} bytes", self.used_bytes());
        let (kind, count) = match self {
            Node::Leaf(entries) => (LEAF, entries.len()),
            Node::Inner(children) => (INNER, children.len()),
        };
        page[0] = kind;
        set_usage(page, count, self.used_bytes());
        let mut at = HEADER_BYTES;
        match self {
            Node::Leaf(entries) => {
                for (entry, name) in entries {
                    put_entry(page, at, *entry, name);
                    at += entry_len(name);
                }
            }
            Node::Inner(children) => {
                for (key, child) in children {
                    put(&mut page[..], at, key.to_le_bytes());
                    put(&mut page[..], at + 8, child.to_le_bytes());
                    at += CHILD_BYTES;
                }
            }
        }
        page[at..].fill(0);
    }

    /// Splits off the upper half. Returns its lowest key and its node.
    pub(crate) fn split(&mut self) -> (u64, Node) {
        match self {
            Node::Leaf(entries) => {
                let len = |(_, name): &(TreeEntry, Vec<u8>)| entry_len(name);
                let half = entries.iter().map(len).sum::<usize>() / 2;
                let mut sum = 0;
                let lower = entries.iter().take_while(|entry| {
                    sum += len(entry);
                    sum <= half
                });
                let lower = lower.count().clamp(1, entries.len() - 1);
                let upper = entries.split_off(lower);
                (upper[0].0.key, Node::Leaf(upper))
            }
            Node::Inner(children) => {
                let upper = children.split_off(children.len() / 2);
                (upper[0].0, Node::Inner(upper))
            }
        }
    }
}

/// The child of an inner page to which the key belongs: its index, its page, its range of keys.
/// `None` for a leaf.
#[allow(clippy::type_complexity)]
pub(crate) fn child_for(
    page: &Page,
    key: u64,
    keys: &Range<u64>,
) -> PageResult<Option<(usize, u32, Range<u64>)>> {
    let count = entry_count(page);
    match page[0] {
        LEAF => return Ok(None),
        INNER if (1..=CHILDREN_MAX).contains(&count) => {}
        kind => return Err(damaged(format!("it is of kind {kind} and not a node"))),
    }
    let child = |index: usize| &page[HEADER_BYTES + index * CHILD_BYTES..][..CHILD_BYTES];
    let (mut low, mut high) = (0, count);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        if get_u64(child(middle), 0) <= key {
            low = middle;
        } else {
            high = middle;
        }
    }
    // The first child also has keys below its stored key.
    let start = match low {
        0 => keys.start,
        low => get_u64(child(low), 0),
    };
    let end = if low + 1 < count {
        get_u64(child(low + 1), 0)
    } else {
        keys.end
    };
    if start < keys.start || start >= end || end > keys.end {
        return Err(damaged("its keys are out of order"));
    }
    match get_u32(child(low), 8) {
        0 => Err(damaged("its root lies below itself")),
        number => Ok(Some((low, number, start..end))),
    }
}
