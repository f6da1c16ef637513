//! The differences between the trees of two snapshots of a file system, as `zfs diff` lists them.
//!
//! An inode with the same number and generation is the same file in both, under any name. A renamed directory is one
//! change: a name belongs to the inode of its directory, not to a path.

use anyhow::Context;
use pagemesh_fs::{Attr, Fs, Ino, InodeKind};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// Directories above a file, at most, in a path. A longer one would be a circle.
const DEPTH_MAX: usize = 4096;

/// A name in a directory: the directory's inode and generation, and the name.
type Link = (u64, u32, Vec<u8>);

/// An inode and its names.
struct FileNode {
    attr: Attr,
    links: BTreeSet<Link>,
}

/// All inodes with names in a file system.
pub struct FileTree {
    nodes: BTreeMap<u64, FileNode>,
}

/// A kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChangeKind {
    Deleted,
    Created,
    Renamed,
    Modified,
}

/// A changed file.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct FileChange {
    /// The path; the earlier one if it was renamed.
    pub path: String,
    pub change: ChangeKind,
    /// `file`, `directory`, `symlink` or `special`.
    pub kind: &'static str,
    pub inode: u64,
    /// The later path of a renamed file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

impl FileTree {
    /// Reads all directories of a file system.
    pub fn read(fs: &Fs) -> anyhow::Result<FileTree> {
        let root = fs.attr(Ino::ROOT).context("cannot read the root")?;
        let mut nodes = BTreeMap::new();
        let mut directories = vec![(Ino::ROOT, root.generation)];
        let links = BTreeSet::new();
        nodes.insert(Ino::ROOT.0, FileNode { attr: root, links });
        while let Some((directory, generation)) = directories.pop() {
            let mut entries = Vec::new();
            fs.list(directory, 0, |entry| {
                let is_dot = matches!(&entry.name[..], b"." | b"..");
                if !is_dot {
                    entries.push((entry.ino, entry.name.clone()));
                }
                true
            })
            .with_context(|| format!("cannot list the directory with inode {}", directory.0))?;
            for (ino, name) in entries {
                let link = (directory.0, generation, name);
                if let Some(node) = nodes.get_mut(&ino.0) {
                    let node: &mut FileNode = node;
                    node.links.insert(link);
                    continue;
                }
                let attr = fs.attr(ino);
                let attr = attr.with_context(|| format!("cannot read the inode {}", ino.0))?;
                if attr.kind == InodeKind::Directory {
                    directories.push((ino, attr.generation));
                }
                let links = BTreeSet::from([link]);
                nodes.insert(ino.0, FileNode { attr, links });
            }
        }
        Ok(FileTree { nodes })
    }

    /// The path of a name.
    fn path(&self, (parent, _, name): &Link) -> String {
        let mut names = vec![shown(name)];
        let mut at = *parent;
        while at != Ino::ROOT.0 && names.len() < DEPTH_MAX {
            let first = self.nodes.get(&at).and_then(|node| node.links.first());
            let Some((parent, _, name)) = first else {
                break;
            };
            names.push(shown(name));
            at = *parent;
        }
        names.push(String::new());
        names.reverse();
        names.join("/")
    }

    fn any_path(&self, node: &FileNode) -> String {
        let first = node.links.first();
        first.map_or_else(|| "/".to_owned(), |link| self.path(link))
    }
}

/// A name as text, without control characters.
fn shown(name: &[u8]) -> String {
    let text = String::from_utf8_lossy(name);
    let plain = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    text.chars().map(plain).collect()
}

fn kind_word(kind: InodeKind) -> &'static str {
    match kind {
        InodeKind::File => "file",
        InodeKind::Directory => "directory",
        InodeKind::Symlink => "symlink",
        _ => "special",
    }
}

/// The changes from one tree to another, by path. `is_content_changed` compares the contents of a file that has equal
/// attributes in both: times of writes are stored some time after the bytes.
pub fn compare(
    old: &FileTree,
    new: &FileTree,
    mut is_content_changed: impl FnMut(Ino) -> anyhow::Result<bool>,
) -> anyhow::Result<Vec<FileChange>> {
    let mut changes = Vec::new();
    for (ino, before) in &old.nodes {
        let after = new.nodes.get(ino);
        match after.filter(|after| after.attr.generation == before.attr.generation) {
            None => add_all(
                &mut changes,
                old,
                before,
                &before.links,
                ChangeKind::Deleted,
            ),
            Some(after) => {
                compare_links(&mut changes, (old, before), (new, after));
                if is_modified(before, after, &mut is_content_changed)? {
                    let path = new.any_path(after);
                    changes.push(change(ChangeKind::Modified, path, after));
                }
            }
        }
    }
    for (ino, after) in &new.nodes {
        let before = old.nodes.get(ino);
        if before.is_none_or(|before| before.attr.generation != after.attr.generation) {
            add_all(&mut changes, new, after, &after.links, ChangeKind::Created);
        }
    }
    changes.sort();
    Ok(changes)
}

fn change(change: ChangeKind, path: String, node: &FileNode) -> FileChange {
    FileChange {
        path,
        change,
        kind: kind_word(node.attr.kind),
        inode: node.attr.ino.0,
        to: None,
    }
}

fn add_all<'a>(
    changes: &mut Vec<FileChange>,
    tree: &FileTree,
    node: &FileNode,
    links: impl IntoIterator<Item = &'a Link>,
    kind: ChangeKind,
) {
    let paths = links.into_iter().map(|link| tree.path(link));
    changes.extend(paths.map(|path| change(kind, path, node)));
}

/// Pairs the names that a file lost with those that it got: each pair is a rename.
fn compare_links(
    changes: &mut Vec<FileChange>,
    (old, before): (&FileTree, &FileNode),
    (new, after): (&FileTree, &FileNode),
) {
    let mut lost = before.links.difference(&after.links);
    let mut got = after.links.difference(&before.links);
    loop {
        match (lost.next(), got.next()) {
            (None, None) => return,
            (Some(from), Some(to)) => changes.push(FileChange {
                to: Some(new.path(to)),
                ..change(ChangeKind::Renamed, old.path(from), after)
            }),
            (Some(from), None) => add_all(changes, old, after, [from], ChangeKind::Deleted),
            (None, Some(to)) => add_all(changes, new, after, [to], ChangeKind::Created),
        }
    }
}

fn is_modified(
    before: &FileNode,
    after: &FileNode,
    is_content_changed: &mut impl FnMut(Ino) -> anyhow::Result<bool>,
) -> anyhow::Result<bool> {
    let (old, new) = (&before.attr, &after.attr);
    let facts = |attr: &Attr| {
        let owner = (attr.mode, attr.uid, attr.gid, attr.device);
        // A directory's size follows from its entries.
        (owner, attr.size, attr.mtime)
    };
    // A change of the names alone changes the ctime, too.
    let has_equal_names = before.links == after.links && old.links == new.links;
    if facts(old) != facts(new) || has_equal_names && old.ctime != new.ctime {
        return Ok(true);
    }
    match new.kind {
        InodeKind::File => is_content_changed(new.ino),
        _ => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_fs::Time;

    fn attr(ino: u64, generation: u32, kind: InodeKind, ctime: i64) -> Attr {
        let time = Time { sec: 1, nsec: 0 };
        Attr {
            ino: Ino(ino),
            generation,
            kind,
            mode: 0o644,
            links: 1,
            uid: 0,
            gid: 0,
            size: 1,
            pages: 1,
            atime: time,
            mtime: time,
            ctime: Time {
                sec: ctime,
                nsec: 0,
            },
            btime: time,
            device: 0,
            has_volatile_size: false,
        }
    }

    /// An inode: number, generation, ctime, and its names with their directories.
    type Node<'n> = (u64, u32, i64, &'n [(u64, &'n str)]);

    /// A tree of the root and of inodes. An inode below 10 is a directory.
    fn tree(nodes: &[Node<'_>]) -> FileTree {
        let root = FileNode {
            attr: attr(1, 0, InodeKind::Directory, 0),
            links: BTreeSet::new(),
        };
        let mut all = BTreeMap::from([(1, root)]);
        for (ino, generation, ctime, links) in nodes {
            let kind = match ino {
                ..10 => InodeKind::Directory,
                _ => InodeKind::File,
            };
            let links = links.iter();
            let links = links.map(|(parent, name)| (*parent, 0, name.as_bytes().to_vec()));
            let node = FileNode {
                attr: attr(*ino, *generation, kind, *ctime),
                links: links.collect(),
            };
            all.insert(*ino, node);
        }
        FileTree { nodes: all }
    }

    #[track_caller]
    fn check(old: &FileTree, new: &FileTree, written: &[u64], expected: &[&str]) {
        let found = compare(old, new, |ino| Ok(written.contains(&ino.0))).expect("compared");
        let lines = found.iter().map(|it| {
            let to = it.to.as_ref().map_or(String::new(), |to| format!(" {to}"));
            format!("{:?} {}{to}", it.change, it.path)
        });
        assert_eq!(lines.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn renamed_directory_is_one_change() {
        let old = tree(&[(2, 0, 5, &[(1, "d")]), (10, 0, 5, &[(2, "f")])]);
        let new = tree(&[(2, 0, 6, &[(1, "e")]), (10, 0, 5, &[(2, "f")])]);
        check(&old, &new, &[], &["Renamed /d /e"]);
        check(&old, &new, &[10], &["Renamed /d /e", "Modified /e/f"]);
    }

    #[test]
    fn reused_inode_number_is_another_file() {
        let old = tree(&[(10, 0, 5, &[(1, "a")]), (11, 0, 5, &[(1, "b")])]);
        let new = tree(&[(10, 1, 5, &[(1, "a")]), (11, 0, 5, &[(1, "b")])]);
        check(&old, &new, &[], &["Deleted /a", "Created /a"]);
    }

    #[test]
    fn names_of_one_file_come_and_go() {
        let one = tree(&[(10, 0, 5, &[(1, "a")])]);
        let two = tree(&[(10, 0, 6, &[(1, "a"), (1, "b")])]);
        check(&one, &two, &[], &["Created /b"]);
        check(&two, &one, &[], &["Deleted /b"]);
        let moved = tree(&[(10, 0, 6, &[(1, "c\n")])]);
        check(&one, &moved, &[], &["Renamed /a /c\\n"]);
    }

    #[test]
    fn changed_attributes_and_contents_are_found() {
        let old = tree(&[(10, 0, 5, &[(1, "a")]), (11, 0, 5, &[(1, "b")])]);
        let new = tree(&[(10, 0, 6, &[(1, "a")]), (11, 0, 5, &[(1, "b")])]);
        check(&old, &new, &[], &["Modified /a"]);
        check(&old, &new, &[11], &["Modified /a", "Modified /b"]);
        check(&old, &old, &[], &[]);
    }
}
