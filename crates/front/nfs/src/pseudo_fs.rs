//! The pseudo file system of NFSv4 (RFC 8881, section 7.3): the root of all exports, and the directories that lead to exports of
//! directories.
//!
//! It follows from the paths of a table of exports alone, and is never changed. A directory is visible to a client if the client has
//! access to an export at or below its path, so that a client learns nothing about other exports. Handles and file numbers follow
//! from the path: they survive restarts, takeovers and changes of other exports.

use crate::exports_file::ExportPath;
use siphasher::sip128::{Hasher128, SipHasher24};
use std::collections::HashMap;
use std::hash::Hasher;
use std::ops::Range;

/// The key of the hash that makes handles. It stays for ever, because clients keep handles.
const PATH_KEY: [u8; 16] = *b"pagemesh exports";
/// The handle of the root.
const ROOT_HANDLE: &[u8] = b"root";
/// The first bytes of the handles of other directories.
const HANDLE_PREFIX: [u8; 4] = *b"path";
/// Bytes of such a handle. Handles of files are longer.
const HANDLE_BYTES: usize = HANDLE_PREFIX.len() + 16;
/// The file number of the root. Other directories have greater ones.
const ROOT_INODE: u64 = 1;

/// The number of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PseudoNo(usize);

impl PseudoNo {
    pub(crate) const ROOT: Self = Self(0);
}

#[derive(Debug)]
struct PseudoDirectory {
    name: String,
    parent: PseudoNo,
    inode: u64,
    handle: Box<[u8]>,
    /// The export at this path, by its number in the table.
    export: Option<usize>,
    /// By their names.
    children: Vec<PseudoNo>,
    /// The places of the exports at or below this path, in the order of paths.
    exports: Range<usize>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct PseudoFs {
    /// The first one is the root.
    directories: Vec<PseudoDirectory>,
    by_handle: HashMap<Box<[u8]>, PseudoNo>,
    /// The numbers of exports in the order of their paths.
    ordered: Vec<usize>,
    /// The directory of each export, by its number.
    places: Vec<PseudoNo>,
    /// The change attribute of all directories, in nanoseconds since 1970. Tables made later have greater ones.
    change: u64,
}

impl PseudoFs {
    /// The directories of these paths, which are numbered in their order.
    pub(crate) fn new(paths: &[&ExportPath], change: u64) -> Self {
        let mut ordered: Vec<usize> = (0..paths.len()).collect();
        ordered.sort_by_key(|number| paths.get(*number));
        let mut all = Self {
            directories: vec![PseudoDirectory {
                name: String::new(),
                parent: PseudoNo::ROOT,
                inode: ROOT_INODE,
                handle: ROOT_HANDLE.into(),
                export: None,
                children: Vec::new(),
                exports: 0..0,
            }],
            by_handle: HashMap::from([(Box::from(ROOT_HANDLE), PseudoNo::ROOT)]),
            places: vec![PseudoNo::ROOT; paths.len()],
            ordered: Vec::new(),
            change,
        };
        for (place, number) in ordered.iter().enumerate() {
            if let Some(path) = paths.get(*number) {
                all.add(path, *number, place);
            }
        }
        all.ordered = ordered;
        all
    }

    /// Adds an export. A path begins with the path before it, or with a part of that.
    fn add(&mut self, path: &ExportPath, number: usize, place: usize) {
        let mut hasher = SipHasher24::new_with_key(&PATH_KEY);
        let mut at = PseudoNo::ROOT;
        self.directories[at.0].exports.end = place + 1;
        for name in std::iter::once(&path.file_system).chain(&path.directories) {
            hasher.write(b"/");
            hasher.write(name.as_bytes());
            let last = self.directories[at.0].children.last().copied();
            let last = last.filter(|last| self.directories[last.0].name == *name);
            at = last.unwrap_or_else(|| self.push(at, name, hasher.finish128(), place));
            self.directories[at.0].exports.end = place + 1;
        }
        self.directories[at.0].export = Some(number);
        if let Some(of_export) = self.places.get_mut(number) {
            *of_export = at;
        }
    }

    fn push(
        &mut self,
        parent: PseudoNo,
        name: &str,
        hash: siphasher::sip128::Hash128,
        place: usize,
    ) -> PseudoNo {
        let new = PseudoNo(self.directories.len());
        let handle: Box<[u8]> = [&HANDLE_PREFIX[..], &hash.as_bytes()].concat().into();
        self.by_handle.insert(handle.clone(), new);
        self.directories.push(PseudoDirectory {
            name: name.into(),
            parent,
            inode: (hash.h1 >> 1).max(ROOT_INODE + 1),
            handle,
            export: None,
            children: Vec::new(),
            exports: place..place,
        });
        self.directories[parent.0].children.push(new);
        new
    }

    /// Whether the bytes of a client have the form of a handle of this file system.
    pub(crate) fn is_handle(bytes: &[u8]) -> bool {
        bytes == ROOT_HANDLE || bytes.len() == HANDLE_BYTES && bytes.starts_with(&HANDLE_PREFIX)
    }

    /// The directory of a handle.
    pub(crate) fn by_handle(&self, bytes: &[u8]) -> Option<PseudoNo> {
        self.by_handle.get(bytes).copied()
    }

    pub(crate) fn handle(&self, at: PseudoNo) -> &[u8] {
        &self.directories[at.0].handle
    }

    pub(crate) fn inode(&self, at: PseudoNo) -> u64 {
        self.directories[at.0].inode
    }

    pub(crate) fn name(&self, at: PseudoNo) -> &str {
        &self.directories[at.0].name
    }

    /// The directory above; none for the root.
    pub(crate) fn parent(&self, at: PseudoNo) -> Option<PseudoNo> {
        (at != PseudoNo::ROOT).then(|| self.directories[at.0].parent)
    }

    /// The directories below, by their names.
    pub(crate) fn children(&self, at: PseudoNo) -> &[PseudoNo] {
        &self.directories[at.0].children
    }

    pub(crate) fn child(&self, at: PseudoNo, name: &[u8]) -> Option<PseudoNo> {
        let children = self.children(at);
        let found = children.binary_search_by(|child| self.name(*child).as_bytes().cmp(name));
        found.ok().and_then(|found| children.get(found)).copied()
    }

    /// The number of the export at the path of a directory.
    pub(crate) fn export(&self, at: PseudoNo) -> Option<usize> {
        self.directories[at.0].export
    }

    /// The numbers of the exports at or below the path of a directory.
    pub(crate) fn exports_below(&self, at: PseudoNo) -> &[usize] {
        let range = self.directories[at.0].exports.clone();
        self.ordered.get(range).unwrap_or_default()
    }

    /// The directory with the path of an export.
    pub(crate) fn place(&self, export: usize) -> PseudoNo {
        self.places.get(export).copied().unwrap_or(PseudoNo::ROOT)
    }

    pub(crate) fn change(&self) -> u64 {
        self.change
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(paths: &[&str]) -> PseudoFs {
        let paths = paths.iter().map(|it| ExportPath::parse(it).unwrap());
        let paths: Vec<_> = paths.collect();
        PseudoFs::new(&paths.iter().collect::<Vec<_>>(), 7)
    }

    fn names(all: &PseudoFs, at: PseudoNo) -> Vec<&str> {
        all.children(at).iter().map(|it| all.name(*it)).collect()
    }

    #[test]
    fn paths_become_directories() {
        let all = made(&["/b/x/y", "/a", "/b/x", "/b/w", "/b-c"]);
        assert_eq!(names(&all, PseudoNo::ROOT), ["a", "b", "b-c"]);
        let b = all.child(PseudoNo::ROOT, b"b").unwrap();
        assert_eq!((all.export(b), names(&all, b)), (None, vec!["w", "x"]));
        let x = all.child(b, b"x").unwrap();
        assert_eq!((all.export(x), all.place(2)), (Some(2), x));
        assert_eq!(all.exports_below(x), [2, 0]);
        assert_eq!(all.exports_below(PseudoNo::ROOT).len(), 5);
        assert_eq!((all.parent(x), all.parent(PseudoNo::ROOT)), (Some(b), None));
        assert_eq!(all.child(b, b"y"), None);
    }

    #[test]
    fn handles_follow_from_paths() {
        let (one, other) = (made(&["/a/b", "/c"]), made(&["/0", "/a/b/c", "/a/b"]));
        let find = |all: &PseudoFs| {
            let a = all.child(PseudoNo::ROOT, b"a").unwrap();
            all.child(a, b"b").unwrap()
        };
        let handle = one.handle(find(&one));
        assert_eq!(other.by_handle(handle), Some(find(&other)));
        assert_eq!(one.inode(find(&one)), other.inode(find(&other)));
        assert!(PseudoFs::is_handle(handle) && !PseudoFs::is_handle(b"path"));
        assert_eq!(made(&[]).by_handle(handle), None);
        assert_eq!(made(&[]).by_handle(ROOT_HANDLE), Some(PseudoNo::ROOT));
    }
}
