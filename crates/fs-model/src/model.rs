//! The model: nodes in a map.

use crate::OpResult;
use crate::op::Op;
use pagemesh_fs::{AllocateMode, RenameMode, SetXattrMode};
use rustix::io::Errno;
use std::collections::BTreeMap;

/// The content of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeContent {
    /// Bytes.
    File(Vec<u8>),
    /// Names, and the numbers of nodes.
    Directory(BTreeMap<Vec<u8>, u64>),
    /// The target.
    Symlink(Vec<u8>),
}

/// A node of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its content.
    pub body: NodeContent,
    /// Permissions.
    pub mode: u16,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Nodes by number; 0 is the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsModel {
    pub(crate) nodes: BTreeMap<u64, Node>,
    pub(crate) next: u64,
}

impl Default for FsModel {
    fn default() -> FsModel {
        let root = Node {
            body: NodeContent::Directory(BTreeMap::new()),
            mode: 0o755,
            xattrs: BTreeMap::new(),
        };
        FsModel {
            nodes: BTreeMap::from([(0, root)]),
            next: 1,
        }
    }
}

impl FsModel {
    fn directory(&self, number: u64) -> OpResult<&BTreeMap<Vec<u8>, u64>> {
        match &self.nodes[&number].body {
            NodeContent::Directory(entries) => Ok(entries),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn entries(&mut self, number: u64) -> &mut BTreeMap<Vec<u8>, u64> {
        match &mut self.nodes.get_mut(&number).expect("there").body {
            NodeContent::Directory(entries) => entries,
            _ => panic!("it was a directory"),
        }
    }

    /// Each byte of a path stands for one name, long or short.
    fn parent(&self, path: &[u8]) -> OpResult<(u64, Vec<u8>)> {
        let (&last, above) = path.split_last().expect("a path");
        let mut at = 0;
        for &step in above {
            at = *self.directory(at)?.get(&name(step)).ok_or(Errno::NOENT)?;
        }
        self.directory(at)?;
        Ok((at, name(last)))
    }

    fn find(&self, path: &[u8]) -> OpResult<u64> {
        let (parent, name) = self.parent(path)?;
        self.directory(parent)?
            .get(&name)
            .copied()
            .ok_or(Errno::NOENT)
    }

    fn insert(&mut self, path: &[u8], body: NodeContent, mut mode: u16) -> OpResult<()> {
        let (parent, name) = self.parent(path)?;
        if matches!(body, NodeContent::Directory(_)) {
            mode |= self.nodes[&parent].mode & 0o2000;
        }
        if self.directory(parent)?.contains_key(&name) {
            return Err(Errno::EXIST);
        }
        let number = self.next;
        self.next += 1;
        self.entries(parent).insert(name, number);
        let xattrs = BTreeMap::new();
        self.nodes.insert(number, Node { body, mode, xattrs });
        Ok(())
    }

    /// Removes a file in the root that is not part of the operations.
    pub fn remove_root_file(&mut self, name: &[u8]) {
        self.entries(0).remove(name);
        self.remove_unnamed();
    }

    /// Removes nodes without a name.
    fn remove_unnamed(&mut self) {
        let mut named: Vec<u64> = vec![0];
        for node in self.nodes.values() {
            if let NodeContent::Directory(entries) = &node.body {
                named.extend(entries.values());
            }
        }
        self.nodes.retain(|number, _| named.contains(number));
    }

    fn is_descendant(&self, number: u64, above: u64) -> bool {
        number == above
            || self.nodes[&above]
                .clone()
                .children()
                .any(|child| self.is_descendant(number, child))
    }

    /// Paths of all wanted nodes except the root.
    #[must_use]
    pub fn paths(&self, wanted: &dyn Fn(&NodeContent) -> bool) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let mut above = vec![(Vec::new(), 0)];
        while let Some((path, number)) = above.pop() {
            let NodeContent::Directory(entries) = &self.nodes[&number].body else {
                continue;
            };
            for (name, number) in entries {
                let mut path: Vec<u8> = path.clone();
                path.push(step_of(name));
                if wanted(&self.nodes[number].body) {
                    found.push(path.clone());
                }
                above.push((path, *number));
            }
        }
        found
    }

    fn file(&mut self, path: &[u8]) -> OpResult<&mut Vec<u8>> {
        let number = self.find(path)?;
        match &mut self.nodes.get_mut(&number).expect("there").body {
            NodeContent::File(bytes) => Ok(bytes),
            NodeContent::Directory(_) => Err(Errno::ISDIR),
            NodeContent::Symlink(_) => Err(Errno::INVAL),
        }
    }

    fn rename(&mut self, from: &[u8], to: &[u8], how: RenameMode) -> OpResult<()> {
        let (from_directory, old) = self.parent(from)?;
        let (to_directory, new) = self.parent(to)?;
        let moved = *self
            .directory(from_directory)?
            .get(&old)
            .ok_or(Errno::NOENT)?;
        let target = self.directory(to_directory)?.get(&new).copied();
        let is_directory = |number| matches!(self.nodes[&number].body, NodeContent::Directory(_));
        if is_directory(moved) && self.is_descendant(to_directory, moved) {
            return Err(Errno::INVAL);
        }
        match (how, target) {
            (RenameMode::Exchange, None) => return Err(Errno::NOENT),
            (RenameMode::Exchange, Some(target)) => {
                if is_directory(target) && self.is_descendant(from_directory, target) {
                    return Err(Errno::INVAL);
                }
                self.entries(from_directory).insert(old, target);
                self.entries(to_directory).insert(new, moved);
                return Ok(());
            }
            (RenameMode::NoReplace, Some(_)) => return Err(Errno::EXIST),
            (_, Some(target)) if target == moved => return Ok(()),
            (_, Some(target)) => match (is_directory(moved), &self.nodes[&target].body) {
                (true, NodeContent::Directory(entries)) if !entries.is_empty() => {
                    return Err(Errno::NOTEMPTY);
                }
                (true, NodeContent::Directory(_)) => {}
                (true, _) => return Err(Errno::NOTDIR),
                (false, NodeContent::Directory(_)) => return Err(Errno::ISDIR),
                (false, _) => {}
            },
            (_, None) => {}
        }
        self.entries(from_directory).remove(&old);
        self.entries(to_directory).insert(new, moved);
        self.remove_unnamed();
        Ok(())
    }

    /// Whether a path leads to a directory.
    #[must_use]
    pub fn is_directory(&self, path: &[u8]) -> bool {
        self.find(path)
            .is_ok_and(|number| self.directory(number).is_ok())
    }

    /// Runs an operation.
    ///
    /// # Errors
    /// The error that a program gets.
    pub fn run(&mut self, op: &Op) -> OpResult<()> {
        match op {
            Op::Create(path) => self.insert(path, NodeContent::File(Vec::new()), 0o644)?,
            Op::CreateUnnamed(path, len, with) => {
                self.insert(path, NodeContent::File(vec![*with; *len]), 0o600)?;
            }
            Op::MakeDirectory(path) => {
                self.insert(path, NodeContent::Directory(BTreeMap::new()), 0o700)?;
            }
            Op::Symlink(path, len) => {
                self.insert(path, NodeContent::Symlink(vec![b't'; *len]), 0o777)?
            }
            Op::Link(old, new) => {
                let number = self.find(old)?;
                if matches!(self.nodes[&number].body, NodeContent::Directory(_)) {
                    return Err(Errno::PERM);
                }
                let (parent, name) = self.parent(new)?;
                if self.directory(parent)?.contains_key(&name) {
                    return Err(Errno::EXIST);
                }
                self.entries(parent).insert(name, number);
            }
            Op::Unlink(path) => {
                let number = self.find(path)?;
                if matches!(self.nodes[&number].body, NodeContent::Directory(_)) {
                    return Err(Errno::ISDIR);
                }
                let (parent, name) = self.parent(path)?;
                self.entries(parent).remove(&name);
                self.remove_unnamed();
            }
            Op::RemoveDirectory(path) => {
                let number = self.find(path)?;
                if !self.directory(number)?.is_empty() {
                    return Err(Errno::NOTEMPTY);
                }
                let (parent, name) = self.parent(path)?;
                self.entries(parent).remove(&name);
                self.remove_unnamed();
            }
            Op::Rename(from, to, how) => self.rename(from, to, *how)?,
            Op::Write(path, offset, len, with) => {
                let bytes = self.file(path)?;
                let (first, end) = (*offset as usize, *offset as usize + len);
                bytes.resize(bytes.len().max(end), 0);
                bytes[first..end].fill(*with);
            }
            Op::Append(path, len, with) => {
                let bytes = self.file(path)?;
                bytes.resize(bytes.len() + len, *with);
            }
            Op::SetSize(path, size) => self.file(path)?.resize(*size as usize, 0),
            Op::Allocate(path, how, offset, len) => {
                let bytes = self.file(path)?;
                let (first, end) = (*offset as usize, (*offset + *len) as usize);
                if let AllocateMode::Punch | AllocateMode::Zero { .. } = how {
                    let size = bytes.len();
                    bytes[first.min(size)..end.min(size)].fill(0);
                }
                if let AllocateMode::Reserve { keep_size: false }
                | AllocateMode::Zero { keep_size: false } = how
                {
                    bytes.resize(bytes.len().max(end), 0);
                }
            }
            Op::SetMode(path, mode) => {
                let number = self.find(path)?;
                self.nodes.get_mut(&number).expect("there").mode = *mode;
            }
            Op::SetXattr(path, key, len, how) => {
                let number = self.find(path)?;
                let xattrs = &mut self.nodes.get_mut(&number).expect("there").xattrs;
                match (xattrs.contains_key(&xattr(*key)), how) {
                    (true, SetXattrMode::Create) => return Err(Errno::EXIST),
                    (false, SetXattrMode::Replace) => return Err(Errno::NODATA),
                    _ => {}
                }
                xattrs.insert(xattr(*key), vec![*key; *len]);
            }
            Op::RemoveXattr(path, key) => {
                let number = self.find(path)?;
                let xattrs = &mut self.nodes.get_mut(&number).expect("there").xattrs;
                xattrs.remove(&xattr(*key)).ok_or(Errno::NODATA)?;
            }
            Op::Copy(from, source, to, target, len) => {
                self.file(to)?;
                let bytes = self.file(from)?;
                let size = bytes.len();
                let is_same = self.find(from)? == self.find(to)?;
                if is_same && source.abs_diff(*target) < *len {
                    return Err(Errno::INVAL);
                }
                let bytes = self.file(from)?;
                let (first, end) = (*source as usize, (*source + *len) as usize);
                let part = bytes[first.min(size)..end.min(size)].to_vec();
                let into = self.file(to)?;
                let end = *target as usize + part.len();
                if !part.is_empty() {
                    into.resize(into.len().max(end), 0);
                    into[*target as usize..end].copy_from_slice(&part);
                }
            }
        }
        Ok(())
    }

    /// The same nodes, numbered in the order of a walk.
    fn canonical(&self) -> FsModel {
        let mut walk = CanonicalWalk {
            model: self,
            numbers: BTreeMap::new(),
            nodes: BTreeMap::new(),
        };
        walk.visit(0);
        let next = walk.nodes.len() as u64;
        let nodes = walk.nodes;
        FsModel { nodes, next }
    }

    /// Checks that `found` equals this model.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self, found: &FsModel) -> Result<(), String> {
        let (this, found) = (self.canonical(), found.canonical());
        for (number, node) in &this.nodes {
            let Some(other) = found.nodes.get(number) else {
                return Err(format!("node {number} is missing: {}", node.describe()));
            };
            if node != other {
                let at = node.first_difference(other);
                let (node, other) = (node.describe(), other.describe());
                return Err(format!("node {number} is {other} and not {node}{at}"));
            }
        }
        if found.nodes.len() == this.nodes.len() {
            Ok(())
        } else {
            Err("there are more nodes".into())
        }
    }

    /// Checks the state after a crash during `op`: this model, or `after`. If `op` is not atomic,
    /// each byte of its file may be old or new. Returns the state that was found.
    ///
    /// # Errors
    /// The differences from each of them.
    pub fn crash_outcome(
        &self,
        op: &Op,
        after: &FsModel,
        found: &FsModel,
    ) -> Result<FsModel, String> {
        let Err(before) = self.check(found) else {
            return Ok(self.clone());
        };
        let Err(not_after) = after.check(found) else {
            return Ok(after.clone());
        };
        let amid = op.non_atomic_file().map(|path| {
            let amid = self.merge_partial(after, path, found)?;
            amid.check(found).map(|()| amid)
        });
        match amid {
            Some(Ok(amid)) => Ok(amid),
            amid => Err(format!(
                "not before: {before}; not after: {not_after}; nor between: {amid:?}"
            )),
        }
    }

    fn merge_partial(
        &self,
        after: &FsModel,
        path: &[u8],
        found: &FsModel,
    ) -> Result<FsModel, String> {
        let (mut before, mut after, mut found) = (self.clone(), after.clone(), found.clone());
        let (Ok(old), Ok(new)) = (before.file(path), after.file(path)) else {
            return Ok(before);
        };
        let found = found.file(path).map_err(|error| error.to_string())?;
        if found.len() < old.len().min(new.len()) || found.len() > old.len().max(new.len()) {
            return Err(format!("{} bytes", found.len()));
        }
        old.resize(found.len(), 0);
        new.resize(found.len(), 0);
        let bytes = found.iter().zip(old.iter().zip(new.iter()));
        for (at, (found, (old, new))) in bytes.enumerate() {
            // After two concurrent writes to a page either may be there.
            if found != old && found != new {
                return Err(format!("byte {at} is neither old nor new"));
            }
        }
        old.clone_from(found);
        Ok(before)
    }
}

struct CanonicalWalk<'m> {
    model: &'m FsModel,
    numbers: BTreeMap<u64, u64>,
    nodes: BTreeMap<u64, Node>,
}

impl CanonicalWalk<'_> {
    fn visit(&mut self, number: u64) -> u64 {
        let next = self.numbers.len() as u64;
        if let Some(&seen) = self.numbers.get(&number) {
            return seen;
        }
        self.numbers.insert(number, next);
        let mut node = self.model.nodes[&number].clone();
        if let NodeContent::Directory(entries) = &mut node.body {
            for below in entries.values_mut() {
                *below = self.visit(*below);
            }
        }
        self.nodes.insert(next, node);
        next
    }
}

impl Node {
    fn describe(&self) -> String {
        let what = match &self.body {
            NodeContent::File(bytes) => format!("a file of {} bytes", bytes.len()),
            NodeContent::Directory(entries) => {
                let names = entries.iter().map(|(name, to)| (step_of(name), to));
                format!("a directory of {:?}", names.collect::<Vec<_>>())
            }
            NodeContent::Symlink(target) => format!("a link of {} bytes", target.len()),
        };
        let xattrs = self.xattrs.iter();
        let xattrs = xattrs.map(|(name, value)| (String::from_utf8_lossy(name), value.len()));
        let xattrs: Vec<_> = xattrs.collect();
        format!("{what}, mode {:o}, attributes {xattrs:?}", self.mode)
    }

    fn first_difference(&self, found: &Node) -> String {
        let (NodeContent::File(this), NodeContent::File(found)) = (&self.body, &found.body) else {
            return String::new();
        };
        let at = this
            .iter()
            .zip(found)
            .position(|(this, found)| this != found);
        at.map_or_else(String::new, |at| {
            format!(": byte {at} is {} and not {}", found[at], this[at])
        })
    }

    fn children(self) -> impl Iterator<Item = u64> {
        let entries = match self.body {
            NodeContent::Directory(entries) => entries,
            _ => BTreeMap::new(),
        };
        entries.into_values()
    }
}

pub(crate) fn name(step: u8) -> Vec<u8> {
    // Some names are long, so that leaves split early.
    let len = if step.is_multiple_of(2) { 1 } else { 200 };
    vec![b'a' + step % 26; len]
        .into_iter()
        .chain(step.to_string().into_bytes())
        .collect()
}

fn step_of(name: &[u8]) -> u8 {
    let digits = name.iter().rposition(|byte| !byte.is_ascii_digit());
    let digits = &name[digits.map_or(0, |at| at + 1)..];
    digits
        .iter()
        .fold(0, |step, digit| step * 10 + (digit - b'0'))
}

pub(crate) fn xattr(key: u8) -> Vec<u8> {
    format!("user.{key}").into_bytes()
}
