//! A directory: a B+ tree of pages, after Bayer and McCreight (1972), with leaves
//! freed when they are empty and not merged before (Johnson and Shasha, 1993).
//!
//! A key is 55 bits of the name's hash and 8 bits that distinguish names of one hash. Keys are
//! ordered, so a listing can continue from a key after entries were added or removed. The root is
//! the directory's page 0 and stays there.
//!
//! Inconsistent pages are an error that names them. Every page is checked against the range of keys
//! that its parents give it, and the range shrinks from page to page. So a cycle of pages is not
//! followed for long, no entry is listed twice, and a listing ends. [`crate::format::directory_page`] has the format
//! of a page.

use crate::error::{Corruption, FsError, Result};
use crate::format::directory_page::{
    COLLISIONS_MAX, END_KEY, Entries, FIRST_KEY, FREE_AT, Node, PAGES_AT, PageResult, TreeEntry,
    child_for, damaged, insert_entry, remove_entry, replace_entry,
};
use crate::format::inode::{Ino, Inode, InodeKind, check_ino};
use crate::format::{Page, page_map};
use crate::tree::map_update;
use crate::txn::tx::Tx;
use pagemesh_base::bytes::{get_u32, put};
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;
use siphasher::sip::SipHasher24;
use std::hash::Hasher;
use std::ops::Range;

/// Inner nodes of 170 children at least, leaves of 14 entries: more than 2^32.
const DEPTH_MAX: usize = 6;

/// The lowest key that this name may have.
fn lowest_key(hash_key: [u64; 2], name: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new_with_keys(hash_key[0], hash_key[1]);
    hasher.write(name);
    (hasher.finish() >> 9).max(1) * COLLISIONS_MAX
}

/// A page of a directory, and where it lies in the space.
#[derive(Clone, Copy)]
struct DirPage {
    page: u32,
    space_page: u64,
}

impl DirPage {
    fn damaged(self, cause: Corruption) -> FsError {
        let DirPage {
            page,
            space_page: at,
        } = self;
        FsError::Damaged {
            what: format!("page {at} of the volume, which is page {page} of a directory,"),
            cause,
        }
    }
}

/// One directory in one operation. The caller stores its inode.
pub(crate) struct Tree<'t, 'c> {
    tx: &'t mut Tx<'c>,
    directory: &'t mut Inode,
}

/// An inner page on the path to a leaf.
struct PathStep {
    page: u32,
    /// Keys that lie below it.
    keys: Range<u64>,
    /// The child that was taken.
    index: usize,
}

/// The path to a leaf.
struct LeafPath {
    inner: Vec<PathStep>,
    leaf: u32,
    /// Keys that lie in the leaf; the end is the lowest key of the next.
    keys: Range<u64>,
}

impl<'t, 'c> Tree<'t, 'c> {
    pub(crate) fn new(tx: &'t mut Tx<'c>, inode: &'t mut Inode) -> Tree<'t, 'c> {
        Tree {
            tx,
            directory: inode,
        }
    }

    /// Makes an empty directory of an inode without pages.
    pub(crate) fn init_empty(&mut self) -> Result<()> {
        let run = map_update::find_or_allocate(self.tx, self.directory, 0)?;
        let page = self.tx.new_page(run.page);
        Node::Leaf(Vec::new()).encode(page);
        put(&mut page[..], PAGES_AT, 1u32.to_le_bytes());
        self.directory.size = PAGE_BYTES as u64;
        self.directory.pages = 1;
        Ok(())
    }

    fn locate(&mut self, page: u32) -> Result<DirPage> {
        let map = self.directory.map;
        let run = page_map::find(&map, u64::from(page), &mut |page| self.tx.page(page))?;
        match run {
            Some(run) if u64::from(page) * (PAGE_BYTES as u64) < self.directory.size => {
                Ok(DirPage {
                    page,
                    space_page: run.page,
                })
            }
            _ => Err(FsError::Damaged {
                what: "a directory".into(),
                cause: damaged(format!(
                    "it has no page {page}; its first lies at page {} of the volume",
                    map.spans[0].page()
                )),
            }),
        }
    }

    /// Decodes a page with `look`.
    fn read_page<T>(
        &mut self,
        place: DirPage,
        look: impl FnOnce(&Page) -> PageResult<T>,
    ) -> Result<T> {
        let seen = self.tx.with_page(place.space_page, look)?;
        seen.map_err(|cause| place.damaged(cause))
    }

    /// Changes a page.
    fn change_page<T>(
        &mut self,
        place: DirPage,
        change: impl FnOnce(&mut Page) -> PageResult<T>,
    ) -> Result<T> {
        change(self.tx.page_mut(place.space_page)?).map_err(|cause| place.damaged(cause))
    }

    fn read_node(&mut self, page: u32, keys: &Range<u64>) -> Result<Node> {
        let place = self.locate(page)?;
        self.read_page(place, |page| Node::decode(page, keys))
    }

    fn read_children(&mut self, step: &PathStep) -> Result<Vec<(u64, u32)>> {
        match self.read_node(step.page, &step.keys)? {
            Node::Inner(children) if step.index < children.len() => Ok(children),
            _ => Err(self.locate(step.page)?.damaged(damaged("a child is gone"))),
        }
    }

    fn write_node(&mut self, page: u32, node: &Node) -> Result<()> {
        let place = self.locate(page)?;
        node.encode(self.tx.page_mut(place.space_page)?);
        Ok(())
    }

    /// The leaf where the key belongs.
    fn path_to(&mut self, key: u64) -> Result<LeafPath> {
        let mut path = LeafPath {
            inner: Vec::new(),
            leaf: 0,
            keys: FIRST_KEY..END_KEY,
        };
        loop {
            let place = self.locate(path.leaf)?;
            let next = self.read_page(place, |page| child_for(page, key, &path.keys))?;
            let Some((index, child, keys)) = next else {
                return Ok(path);
            };
            if path.inner.len() == DEPTH_MAX {
                return Err(place.damaged(damaged("it lies too deep in its tree")));
            }
            path.inner.push(PathStep {
                page: path.leaf,
                keys: std::mem::replace(&mut path.keys, keys),
                index,
            });
            path.leaf = child;
        }
    }

    /// Entries with keys from `from` on, in order, until `visit` returns false.
    pub(crate) fn scan(
        &mut self,
        from: u64,
        mut visit: impl FnMut(TreeEntry, &[u8]) -> bool,
    ) -> Result<()> {
        let mut key = from;
        let leaves_max = self.directory.size / PAGE_BYTES as u64;
        for _ in 0..leaves_max {
            let path = self.path_to(key)?;
            let place = self.locate(path.leaf)?;
            let goes_on = self.read_page(place, |page| {
                for found in Entries::new(page, &path.keys)? {
                    let (_, entry, name) = found?;
                    if entry.key >= key && !visit(entry, name) {
                        return Ok(false);
                    }
                }
                Ok(true)
            })?;
            if !goes_on || path.keys.end == END_KEY {
                return Ok(());
            }
            // The range end is above the key, since the path chose the child so.
            key = path.keys.end;
        }
        let root = self.locate(0)?;
        Err(root.damaged(damaged("its tree has more leaves than pages")))
    }

    /// The entry of this name, or else the key that a new one would get.
    fn find_or_vacant(
        &mut self,
        name: &[u8],
    ) -> Result<std::result::Result<TreeEntry, Option<u64>>> {
        let first = lowest_key(self.tx.core.head.hash_key, name);
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

    pub(crate) fn find(&mut self, name: &[u8]) -> Result<Option<TreeEntry>> {
        Ok(self.find_or_vacant(name)?.ok())
    }

    /// The key for a new entry of this name.
    ///
    /// # Errors
    /// `EEXIST`; `ENOSPC` for the 257th name of one hash.
    pub(crate) fn vacant_key(&mut self, name: &[u8]) -> Result<u64> {
        match self.find_or_vacant(name)? {
            Ok(_) => Err(Errno::EXIST.into()),
            Err(key) => Ok(key.ok_or(Errno::NOSPC)?),
        }
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// As [`Tree::vacant_key`].
    pub(crate) fn insert(&mut self, name: &[u8], ino: Ino, kind: InodeKind) -> Result<()> {
        let key = self.vacant_key(name)?;
        self.insert_at(key, name, ino, kind)
    }

    /// Adds an entry under a key from [`Tree::vacant_key`].
    pub(crate) fn insert_at(
        &mut self,
        key: u64,
        name: &[u8],
        ino: Ino,
        kind: InodeKind,
    ) -> Result<()> {
        let entry = TreeEntry { key, ino, kind };
        let mut path = self.path_to(key)?;
        let leaf = self.locate(path.leaf)?;
        if self.change_page(leaf, |page| insert_entry(page, &path.keys, entry, name))? {
            return Ok(());
        }
        let Node::Leaf(mut entries) = self.read_node(path.leaf, &path.keys)? else {
            return Err(leaf.damaged(damaged("it is no leaf any more")));
        };
        let at = entries.partition_point(|(other, _)| other.key < key);
        entries.insert(at, (entry, name.to_vec()));
        let mut node = Node::Leaf(entries);
        let mut page = path.leaf;
        while !node.fits() {
            let (key, upper) = node.split();
            let upper_page = self.allocate_page()?;
            self.write_node(upper_page, &upper)?;
            let Some(above) = path.inner.pop() else {
                // The root keeps its page: its lower half moves, too.
                let lower_page = self.allocate_page()?;
                self.write_node(lower_page, &node)?;
                node = Node::Inner(vec![(0, lower_page), (key, upper_page)]);
                break;
            };
            self.write_node(page, &node)?;
            let mut children = self.read_children(&above)?;
            children.insert(above.index + 1, (key, upper_page));
            node = Node::Inner(children);
            page = above.page;
        }
        self.write_node(page, &node)
    }

    /// Makes an existing entry name another inode.
    pub(crate) fn replace(&mut self, key: u64, ino: Ino, kind: InodeKind) -> Result<()> {
        let path = self.path_to(key)?;
        let leaf = self.locate(path.leaf)?;
        self.change_page(leaf, |page| replace_entry(page, &path.keys, key, ino, kind))
    }

    /// Removes an existing entry.
    pub(crate) fn remove(&mut self, key: u64) -> Result<()> {
        let mut path = self.path_to(key)?;
        let leaf = self.locate(path.leaf)?;
        if self.change_page(leaf, |page| remove_entry(page, &path.keys, key))? > 0 {
            return Ok(());
        }
        let mut page = path.leaf;
        let mut node = Node::Leaf(Vec::new());
        while node.used_bytes() == 0 {
            let Some(above) = path.inner.pop() else {
                node = Node::Leaf(Vec::new());
                break;
            };
            self.free_page(page)?;
            let mut children = self.read_children(&above)?;
            let (key, _) = children.remove(above.index);
            if above.index == 0 && !children.is_empty() {
                children[0].0 = key;
            }
            node = Node::Inner(children);
            page = above.page;
        }
        self.write_node(page, &node)
    }

    pub(crate) fn is_empty(&mut self) -> Result<bool> {
        let mut is_empty = true;
        self.scan(0, |_, _| {
            is_empty = false;
            false
        })?;
        Ok(is_empty)
    }

    /// Allocates a page of the directory.
    fn allocate_page(&mut self) -> Result<u32> {
        let root = self.locate(0)?;
        let (free, pages) = self.read_page(root, |page| {
            Ok((get_u32(page, FREE_AT), get_u32(page, PAGES_AT)))
        })?;
        if free != 0 {
            let place = self.locate(free)?;
            let next = self.read_page(place, |page| match page[0] {
                0 => Ok(get_u32(page, FREE_AT)),
                _ => Err(damaged("it is called free and is in use")),
            })?;
            self.change_page(root, |page| {
                put(&mut page[..], FREE_AT, next.to_le_bytes());
                Ok(())
            })?;
            self.tx.new_page(place.space_page);
            return Ok(free);
        }
        // Nodes name pages below the size: a page below it may be in use.
        if u64::from(pages) * PAGE_BYTES as u64 != self.directory.size {
            let size = self.directory.size;
            let what = format!("it says that the directory has {pages} pages, of {size} bytes");
            return Err(root.damaged(damaged(what)));
        }
        let run = map_update::find_or_allocate(self.tx, self.directory, u64::from(pages))?;
        self.tx.new_page(run.page);
        let more = pages.checked_add(1).ok_or(Errno::NOSPC)?;
        self.change_page(root, |page| {
            put(&mut page[..], PAGES_AT, more.to_le_bytes());
            Ok(())
        })?;
        self.directory.size = u64::from(more) * PAGE_BYTES as u64;
        self.directory.pages = u64::from(more);
        Ok(pages)
    }

    fn free_page(&mut self, page: u32) -> Result<()> {
        let root = self.locate(0)?;
        let next = self.read_page(root, |page| Ok(get_u32(page, FREE_AT)))?;
        let place = self.locate(page)?;
        put(
            &mut self.tx.new_page(place.space_page)[..],
            FREE_AT,
            next.to_le_bytes(),
        );
        self.change_page(root, |root| {
            put(&mut root[..], FREE_AT, page.to_le_bytes());
            Ok(())
        })
    }
}

/// A directory to look names up in.
pub(crate) fn directory(tx: &mut Tx<'_>, ino: Ino) -> Result<Inode> {
    check_ino(ino)?;
    let inode = tx.inode(ino)?;
    check_directory(&inode)?;
    Ok(inode)
}

pub(crate) fn check_directory(inode: &Inode) -> Result<()> {
    match inode.is_directory() {
        true => Ok(()),
        false => Err(Errno::NOTDIR.into()),
    }
}

/// A directory to add names to.
pub(crate) fn linked_directory(tx: &mut Tx<'_>, ino: Ino) -> Result<Inode> {
    let inode = directory(tx, ino)?;
    match inode.links {
        0 => Err(Errno::NOENT.into()),
        _ => Ok(inode),
    }
}
