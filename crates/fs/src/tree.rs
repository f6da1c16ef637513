//! A directory: a B+ tree of pages, after Bayer and McCreight (1972), with leaves
//! freed when they are empty and not merged before (Johnson and Shasha, 1993).
//!
//! A key is 55 bits of the name's hash and 8 bits that tell apart names of one
//! hash. Keys are in order, so a key is a place to go on listing from, whatever
//! came and went meanwhile. The root is the directory's page 0 and stays there.
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

use crate::core::Tx;
use crate::error::{FsError, Result};
use crate::format::{Damaged, Ino, Inode, Kind, Page};
use crate::map;
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;

const LEAF: u8 = 1;
const INNER: u8 = 2;
const HEAD: usize = 16;
const FREE_AT: usize = 8;
const PAGES_AT: usize = 12;
const FIXED: usize = 18;
const CHILD: usize = 12;
const CHILDREN_MAX: usize = (PAGE_BYTES - HEAD) / CHILD;
/// Names of one hash.
const COLLISIONS_MAX: u64 = 256;
/// Inner nodes of 170 children at least, leaves of 14 entries: more than 2^32.
const DEPTH_MAX: usize = 6;
/// Keys below are never a name's: listing begins there, and "." and ".." come first.
pub(crate) const FIRST_KEY: u64 = COLLISIONS_MAX;

/// What an entry of a directory says of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) key: u64,
    pub(crate) ino: Ino,
    pub(crate) kind: Kind,
}

fn kind_code(kind: Kind) -> u8 {
    (kind.bits() >> 12) as u8
}

/// The lowest key that this name may have.
fn key_of(hash_key: [u64; 2], name: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new_with_keys(hash_key[0], hash_key[1]);
    hasher.write(name);
    (hasher.finish() >> 9).max(1) * COLLISIONS_MAX
}

fn damaged(what: impl Into<String>) -> FsError {
    FsError::Damaged {
        what: "a directory".into(),
        cause: Damaged(what.into()),
    }
}

/// A node in memory: when it is split, or loses a child.
enum Node {
    Leaf(Vec<(Entry, Vec<u8>)>),
    /// Lowest keys, and pages. The first key is that of the whole node.
    Inner(Vec<(u64, u32)>),
}

/// What an entry takes of a page.
fn entry_len(name: &[u8]) -> usize {
    FIXED + name.len()
}

fn count_of(page: &Page) -> usize {
    usize::from(u16::from_le_bytes(field(page, 2)))
}

fn used_of(page: &Page) -> usize {
    usize::from(u16::from_le_bytes(field(page, 4)))
}

fn set_extent(page: &mut Page, count: usize, used: usize) {
    put(&mut page[..], 2, (count as u16).to_le_bytes());
    put(&mut page[..], 4, (used as u16).to_le_bytes());
}

fn put_entry(page: &mut Page, at: usize, entry: Entry, name: &[u8]) {
    put(&mut page[..], at, entry.key.to_le_bytes());
    put(&mut page[..], at + 8, entry.ino.0.to_le_bytes());
    page[at + 16] = kind_code(entry.kind);
    page[at + 17] = name.len() as u8;
    page[at + FIXED..][..name.len()].copy_from_slice(name);
}

/// The entries of a leaf, each with the byte of the page where it begins.
struct Entries<'p> {
    body: &'p [u8],
    left: usize,
    at: usize,
}

impl<'p> Entries<'p> {
    fn of(page: &'p Page) -> Result<Entries<'p>> {
        if page[0] != LEAF {
            return Err(damaged(format!("a leaf of kind {}", page[0])));
        }
        let body = page.get(HEAD..HEAD + used_of(page));
        Ok(Entries {
            body: body.ok_or_else(|| damaged("a page that is fuller than a page"))?,
            left: count_of(page),
            at: HEAD,
        })
    }

    fn take(&mut self) -> Result<(usize, Entry, &'p [u8])> {
        let cut = || damaged("an entry that goes beyond its page");
        let (fixed, rest) = self.body.split_at_checked(FIXED).ok_or_else(cut)?;
        let len = usize::from(fixed[17]);
        let (name, rest) = rest.split_at_checked(len).ok_or_else(cut)?;
        let kind = Kind::of_mode(u16::from(fixed[16]) << 12);
        let entry = Entry {
            key: get_u64(fixed, 0),
            ino: Ino(get_u64(fixed, 8)),
            kind: kind.ok_or_else(|| damaged(format!("an entry of kind {}", fixed[16])))?,
        };
        let at = self.at;
        (self.body, self.at) = (rest, at + entry_len(name));
        Ok((at, entry, name))
    }
}

impl<'p> Iterator for Entries<'p> {
    type Item = Result<(usize, Entry, &'p [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        Some(self.take())
    }
}

/// Puts an entry into a leaf; false: it has no room.
fn insert_into(page: &mut Page, entry: Entry, name: &[u8]) -> Result<bool> {
    let (count, len) = (count_of(page), entry_len(name));
    let mut entries = Entries::of(page)?;
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
    set_extent(page, count + 1, end + len - HEAD);
    Ok(true)
}

/// Takes an entry that is there out of a leaf; how many are left.
fn remove_from(page: &mut Page, key: u64) -> Result<usize> {
    let count = count_of(page);
    let mut entries = Entries::of(page)?;
    let mut cut = None;
    for found in &mut entries {
        let (begin, other, name) = found?;
        if other.key == key {
            cut = Some((begin, entry_len(name)));
        }
    }
    let end = entries.at;
    let (at, len) = cut.ok_or_else(|| damaged("an entry that was there"))?;
    page.copy_within(at + len..end, at);
    page[end - len..end].fill(0);
    set_extent(page, count - 1, end - len - HEAD);
    Ok(count - 1)
}

impl Node {
    fn decode(page: &Page) -> Result<Node> {
        let (count, used) = (count_of(page), used_of(page));
        match page[0] {
            LEAF => {
                let entries = Entries::of(page)?;
                let owned = entries.map(|found| {
                    let (_, entry, name) = found?;
                    Ok((entry, name.to_vec()))
                });
                Ok(Node::Leaf(owned.collect::<Result<_>>()?))
            }
            INNER if used == count * CHILD && (1..=CHILDREN_MAX).contains(&count) => {
                let children = page[HEAD..HEAD + used].chunks_exact(CHILD);
                Ok(Node::Inner(
                    children.map(|c| (get_u64(c, 0), get_u32(c, 8))).collect(),
                ))
            }
            kind => Err(damaged(format!("a page of kind {kind}"))),
        }
    }

    fn used(&self) -> usize {
        match self {
            Node::Leaf(entries) => entries.iter().map(|(_, name)| entry_len(name)).sum(),
            Node::Inner(children) => children.len() * CHILD,
        }
    }

    fn fits(&self) -> bool {
        HEAD + self.used() <= PAGE_BYTES
    }

    /// Writes it over a page, but for what a root says of the directory.
    fn encode(&self, page: &mut Page) {
        assert!(self.fits(), "a node of {} bytes", self.used());
        let (kind, count) = match self {
            Node::Leaf(entries) => (LEAF, entries.len()),
            Node::Inner(children) => (INNER, children.len()),
        };
        page[0] = kind;
        set_extent(page, count, self.used());
        let mut at = HEAD;
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
                    at += CHILD;
                }
            }
        }
        page[at..].fill(0);
    }

    /// Takes away the upper half, and tells its lowest key.
    fn split(&mut self) -> (u64, Node) {
        match self {
            Node::Leaf(entries) => {
                let len = |(_, name): &(Entry, Vec<u8>)| entry_len(name);
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

/// One directory in one operation. Its inode is put back by whoever began.
pub(crate) struct Tree<'t, 'c> {
    tx: &'t mut Tx<'c>,
    inode: &'t mut Inode,
}

/// The way to a leaf: pages, and which child was taken.
struct Path {
    inner: Vec<(u32, usize)>,
    leaf: u32,
    /// The lowest key of the next leaf.
    end: Option<u64>,
}

impl<'t, 'c> Tree<'t, 'c> {
    pub(crate) fn new(tx: &'t mut Tx<'c>, inode: &'t mut Inode) -> Tree<'t, 'c> {
        Tree { tx, inode }
    }

    /// Makes an empty directory of an inode without pages.
    pub(crate) fn init(&mut self) -> Result<()> {
        let run = map::ensure(self.tx, self.inode, 0)?;
        let page = self.tx.fresh(run.page);
        Node::Leaf(Vec::new()).encode(page);
        put(&mut page[..], PAGES_AT, 1u32.to_le_bytes());
        self.inode.size = PAGE_BYTES as u64;
        self.inode.pages = 1;
        Ok(())
    }

    fn place(&mut self, page: u32) -> Result<u64> {
        let map = self.inode.map;
        let run = map::find(&map, u64::from(page), &mut |page| self.tx.page(page))?;
        match run {
            Some(run) if u64::from(page) * PAGE_BYTES as u64 <= self.inode.size => Ok(run.page),
            _ => Err(damaged(format!("it has no page {page}"))),
        }
    }

    fn node(&mut self, page: u32) -> Result<Node> {
        let at = self.place(page)?;
        self.tx.with_page(at, Node::decode)?
    }

    fn store(&mut self, page: u32, node: &Node) -> Result<()> {
        let at = self.place(page)?;
        node.encode(self.tx.page_mut(at)?);
        Ok(())
    }

    /// The leaf where the key belongs.
    fn path_to(&mut self, key: u64) -> Result<Path> {
        let mut path = Path {
            inner: Vec::new(),
            leaf: 0,
            end: None,
        };
        while path.inner.len() <= DEPTH_MAX {
            let at = self.place(path.leaf)?;
            let next = self.tx.with_page(at, |page| child_for(page, key))??;
            let Some((index, child, end)) = next else {
                return Ok(path);
            };
            path.inner.push((path.leaf, index));
            path.leaf = child;
            path.end = end.or(path.end);
        }
        Err(damaged("a tree that is too deep"))
    }

    /// Entries with keys from `from` on, in order, until `visit` returns false.
    pub(crate) fn scan(
        &mut self,
        from: u64,
        mut visit: impl FnMut(Entry, &[u8]) -> bool,
    ) -> Result<()> {
        let mut key = from;
        let leaves_max = self.inode.size / PAGE_BYTES as u64;
        for _ in 0..leaves_max {
            let path = self.path_to(key)?;
            let at = self.place(path.leaf)?;
            let goes_on = self.tx.with_page(at, |page| -> Result<bool> {
                for found in Entries::of(page)? {
                    let (_, entry, name) = found?;
                    if entry.key >= key && !visit(entry, name) {
                        return Ok(false);
                    }
                }
                Ok(true)
            })??;
            if !goes_on {
                return Ok(());
            }
            match path.end {
                Some(end) if end > key => key = end,
                Some(_) => return Err(damaged("keys out of order")),
                None => return Ok(()),
            }
        }
        Err(damaged("more leaves than it has pages"))
    }

    /// The entry of this name, or else the key that a new one would get.
    fn look(&mut self, name: &[u8]) -> Result<std::result::Result<Entry, Option<u64>>> {
        let first = key_of(self.tx.core.head.hash_key, name);
        let mut found = None;
        let mut free = first;
        self.scan(first, |entry, its_name| {
            if entry.key >= first + COLLISIONS_MAX {
                return false;
            }
            if its_name == name {
                found = Some(entry);
            }
            if entry.key == free {
                free += 1;
            }
            found.is_none()
        })?;
        let free = (free < first + COLLISIONS_MAX).then_some(free);
        Ok(found.ok_or(free))
    }

    pub(crate) fn find(&mut self, name: &[u8]) -> Result<Option<Entry>> {
        Ok(self.look(name)?.ok())
    }

    /// The key that a new entry of this name gets.
    ///
    /// # Errors
    /// `EEXIST`; `ENOSPC` for the 257th name of one hash.
    pub(crate) fn vacant_key(&mut self, name: &[u8]) -> Result<u64> {
        match self.look(name)? {
            Ok(_) => Err(Errno::EXIST.into()),
            Err(key) => Ok(key.ok_or(Errno::NOSPC)?),
        }
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// As [`Tree::vacant_key`].
    pub(crate) fn insert(&mut self, name: &[u8], ino: Ino, kind: Kind) -> Result<()> {
        let key = self.vacant_key(name)?;
        self.insert_at(key, name, ino, kind)
    }

    /// Adds an entry under the key that its name was given.
    pub(crate) fn insert_at(&mut self, key: u64, name: &[u8], ino: Ino, kind: Kind) -> Result<()> {
        let entry = Entry { key, ino, kind };
        let mut path = self.path_to(key)?;
        let leaf = self.place(path.leaf)?;
        if insert_into(self.tx.page_mut(leaf)?, entry, name)? {
            return Ok(());
        }
        let Node::Leaf(mut entries) = self.node(path.leaf)? else {
            return Err(damaged("a leaf that is none"));
        };
        let at = entries.partition_point(|(other, _)| other.key < key);
        entries.insert(at, (entry, name.to_vec()));
        let mut node = Node::Leaf(entries);
        let mut page = path.leaf;
        while !node.fits() {
            let (key, upper) = node.split();
            let upper_page = self.allocate()?;
            self.store(upper_page, &upper)?;
            let Some((parent, index)) = path.inner.pop() else {
                // The root stays where it is: its lower half moves, too.
                let lower_page = self.allocate()?;
                self.store(lower_page, &node)?;
                node = Node::Inner(vec![(0, lower_page), (key, upper_page)]);
                break;
            };
            self.store(page, &node)?;
            let Node::Inner(mut children) = self.node(parent)? else {
                return Err(damaged("an inner page that is none"));
            };
            children.insert(index + 1, (key, upper_page));
            node = Node::Inner(children);
            page = parent;
        }
        self.store(page, &node)
    }

    /// Names another inode by an entry that is there.
    pub(crate) fn replace(&mut self, key: u64, ino: Ino, kind: Kind) -> Result<()> {
        let leaf = self.path_to(key)?.leaf;
        let leaf = self.place(leaf)?;
        let page = self.tx.page_mut(leaf)?;
        for found in Entries::of(page)? {
            let (at, entry, _) = found?;
            if entry.key == key {
                put(&mut page[..], at + 8, ino.0.to_le_bytes());
                page[at + 16] = kind_code(kind);
                return Ok(());
            }
        }
        Err(damaged("an entry that was there"))
    }

    /// Takes out an entry that is there.
    pub(crate) fn remove(&mut self, key: u64) -> Result<()> {
        let mut path = self.path_to(key)?;
        let leaf = self.place(path.leaf)?;
        if remove_from(self.tx.page_mut(leaf)?, key)? > 0 {
            return Ok(());
        }
        let mut page = path.leaf;
        let mut node = Node::Leaf(Vec::new());
        while node.used() == 0 {
            let Some((parent, index)) = path.inner.pop() else {
                node = Node::Leaf(Vec::new());
                break;
            };
            self.release(page)?;
            let Node::Inner(mut children) = self.node(parent)? else {
                return Err(damaged("an inner page that is none"));
            };
            let (key, _) = children.remove(index);
            if index == 0 && !children.is_empty() {
                children[0].0 = key;
            }
            node = Node::Inner(children);
            page = parent;
        }
        self.store(page, &node)
    }

    pub(crate) fn is_empty(&mut self) -> Result<bool> {
        let mut is_empty = true;
        self.scan(0, |_, _| {
            is_empty = false;
            false
        })?;
        Ok(is_empty)
    }

    /// A page of the directory that no node lies in.
    fn allocate(&mut self) -> Result<u32> {
        let root = self.place(0)?;
        let (free, pages) = self.tx.with_page(root, |page| {
            (get_u32(page, FREE_AT), get_u32(page, PAGES_AT))
        })?;
        if free != 0 {
            let at = self.place(free)?;
            let next = self.tx.with_page(at, |page| get_u32(page, FREE_AT))?;
            put(
                &mut self.tx.page_mut(root)?[..],
                FREE_AT,
                next.to_le_bytes(),
            );
            self.tx.fresh(at);
            return Ok(free);
        }
        let run = map::ensure(self.tx, self.inode, u64::from(pages))?;
        self.tx.fresh(run.page);
        let more = pages.checked_add(1).ok_or(Errno::NOSPC)?;
        put(
            &mut self.tx.page_mut(root)?[..],
            PAGES_AT,
            more.to_le_bytes(),
        );
        self.inode.size = u64::from(more) * PAGE_BYTES as u64;
        self.inode.pages = u64::from(more);
        Ok(pages)
    }

    fn release(&mut self, page: u32) -> Result<()> {
        let root = self.place(0)?;
        let next = self.tx.with_page(root, |page| get_u32(page, FREE_AT))?;
        let at = self.place(page)?;
        put(&mut self.tx.fresh(at)[..], FREE_AT, next.to_le_bytes());
        put(
            &mut self.tx.page_mut(root)?[..],
            FREE_AT,
            page.to_le_bytes(),
        );
        Ok(())
    }
}

/// Of an inner page, the child where the key belongs: its index, its page, the
/// lowest key of the next; none of a leaf.
#[allow(clippy::type_complexity)]
fn child_for(page: &Page, key: u64) -> Result<Option<(usize, u32, Option<u64>)>> {
    let count = usize::from(u16::from_le_bytes(field(page, 2)));
    match page[0] {
        LEAF => return Ok(None),
        INNER if (1..=CHILDREN_MAX).contains(&count) => {}
        kind => return Err(damaged(format!("a page of kind {kind}"))),
    }
    let child = |index: usize| &page[HEAD + index * CHILD..][..CHILD];
    let (mut low, mut high) = (0, count);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        match get_u64(child(middle), 0) <= key {
            true => low = middle,
            false => high = middle,
        }
    }
    let end = (low + 1 < count).then(|| get_u64(child(low + 1), 0));
    let number = get_u32(child(low), 8);
    match number {
        0 => Err(damaged("a root below itself")),
        number => Ok(Some((low, number, end))),
    }
}
