//! The simplest file system that can be right: everything in maps. Random
//! operations run on it and on the real one, and both must say the same.

use super::OWNER;
use bytes::Bytes;
use pagemesh_fs::{Allocate, Changes, Fs, FsError, Ino, Kind, Make, Port, Rename, Seek, SetXattr};
use std::collections::BTreeMap;

pub type Errno = rustix::io::Errno;

/// A node of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    File(Vec<u8>),
    Directory(BTreeMap<Vec<u8>, u64>),
    Symlink(Vec<u8>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub body: Body,
    pub mode: u16,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Nodes by number; 0 is the root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Model {
    pub nodes: BTreeMap<u64, Node>,
    next: u64,
}

/// An operation. Paths are lists of short names.
#[derive(Clone, Debug)]
pub enum Op {
    Create(Vec<u8>),
    /// A file without a name that is written, and gets this name.
    CreateUnnamed(Vec<u8>, usize, u8),
    MakeDirectory(Vec<u8>),
    Symlink(Vec<u8>, usize),
    Link(Vec<u8>, Vec<u8>),
    Unlink(Vec<u8>),
    RemoveDirectory(Vec<u8>),
    Rename(Vec<u8>, Vec<u8>, Rename),
    Write(Vec<u8>, u64, usize, u8),
    Append(Vec<u8>, usize, u8),
    SetSize(Vec<u8>, u64),
    Allocate(Vec<u8>, Allocate, u64, u64),
    SetMode(Vec<u8>, u16),
    SetXattr(Vec<u8>, u8, usize, SetXattr),
    RemoveXattr(Vec<u8>, u8),
    Copy(Vec<u8>, u64, Vec<u8>, u64, u64),
}

type Outcome<T> = Result<T, Errno>;

impl Model {
    pub fn new() -> Model {
        let root = Node {
            body: Body::Directory(BTreeMap::new()),
            mode: 0o755,
            xattrs: BTreeMap::new(),
        };
        Model {
            nodes: BTreeMap::from([(0, root)]),
            next: 1,
        }
    }

    fn directory(&self, number: u64) -> Outcome<&BTreeMap<Vec<u8>, u64>> {
        match &self.nodes[&number].body {
            Body::Directory(entries) => Ok(entries),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn entries(&mut self, number: u64) -> &mut BTreeMap<Vec<u8>, u64> {
        match &mut self.nodes.get_mut(&number).expect("there").body {
            Body::Directory(entries) => entries,
            _ => panic!("it was a directory"),
        }
    }

    /// Each byte of a path is a name of its own, of some length.
    fn parent(&self, path: &[u8]) -> Outcome<(u64, Vec<u8>)> {
        let (&last, above) = path.split_last().expect("a path");
        let mut at = 0;
        for &step in above {
            at = *self.directory(at)?.get(&name(step)).ok_or(Errno::NOENT)?;
        }
        self.directory(at)?;
        Ok((at, name(last)))
    }

    fn find(&self, path: &[u8]) -> Outcome<u64> {
        let (parent, name) = self.parent(path)?;
        self.directory(parent)?
            .get(&name)
            .copied()
            .ok_or(Errno::NOENT)
    }

    fn insert(&mut self, path: &[u8], body: Body, mut mode: u16) -> Outcome<()> {
        let (parent, name) = self.parent(path)?;
        if matches!(body, Body::Directory(_)) {
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

    /// Forgets what has no name left.
    fn sweep(&mut self) {
        let mut named: Vec<u64> = vec![0];
        for node in self.nodes.values() {
            if let Body::Directory(entries) = &node.body {
                named.extend(entries.values());
            }
        }
        self.nodes.retain(|number, _| named.contains(number));
    }

    fn is_below(&self, number: u64, above: u64) -> bool {
        number == above
            || self.nodes[&above]
                .clone()
                .children()
                .any(|child| self.is_below(number, child))
    }

    /// Paths of all nodes that are wanted, but for the root.
    pub fn paths(&self, wanted: &dyn Fn(&Body) -> bool) -> Vec<Vec<u8>> {
        let mut found = Vec::new();
        let mut above = vec![(Vec::new(), 0)];
        while let Some((path, number)) = above.pop() {
            let Body::Directory(entries) = &self.nodes[&number].body else {
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

    fn file(&mut self, path: &[u8]) -> Outcome<&mut Vec<u8>> {
        let number = self.find(path)?;
        match &mut self.nodes.get_mut(&number).expect("there").body {
            Body::File(bytes) => Ok(bytes),
            Body::Directory(_) => Err(Errno::ISDIR),
            Body::Symlink(_) => Err(Errno::INVAL),
        }
    }

    fn rename(&mut self, from: &[u8], to: &[u8], how: Rename) -> Outcome<()> {
        let (from_directory, old) = self.parent(from)?;
        let (to_directory, new) = self.parent(to)?;
        let moved = *self
            .directory(from_directory)?
            .get(&old)
            .ok_or(Errno::NOENT)?;
        let target = self.directory(to_directory)?.get(&new).copied();
        let is_directory = |number| matches!(self.nodes[&number].body, Body::Directory(_));
        if is_directory(moved) && self.is_below(to_directory, moved) {
            return Err(Errno::INVAL);
        }
        match (how, target) {
            (Rename::Exchange, None) => return Err(Errno::NOENT),
            (Rename::Exchange, Some(target)) => {
                if is_directory(target) && self.is_below(from_directory, target) {
                    return Err(Errno::INVAL);
                }
                self.entries(from_directory).insert(old, target);
                self.entries(to_directory).insert(new, moved);
                return Ok(());
            }
            (Rename::NoReplace, Some(_)) => return Err(Errno::EXIST),
            (_, Some(target)) if target == moved => return Ok(()),
            (_, Some(target)) => match (is_directory(moved), &self.nodes[&target].body) {
                (true, Body::Directory(entries)) if !entries.is_empty() => {
                    return Err(Errno::NOTEMPTY);
                }
                (true, Body::Directory(_)) => {}
                (true, _) => return Err(Errno::NOTDIR),
                (false, Body::Directory(_)) => return Err(Errno::ISDIR),
                (false, _) => {}
            },
            (_, None) => {}
        }
        self.entries(from_directory).remove(&old);
        self.entries(to_directory).insert(new, moved);
        self.sweep();
        Ok(())
    }

    /// Does an operation.
    pub fn run(&mut self, op: &Op) -> Outcome<()> {
        match op {
            Op::Create(path) => self.insert(path, Body::File(Vec::new()), 0o644)?,
            Op::CreateUnnamed(path, len, with) => {
                self.insert(path, Body::File(vec![*with; *len]), 0o600)?;
            }
            Op::MakeDirectory(path) => {
                self.insert(path, Body::Directory(BTreeMap::new()), 0o700)?;
            }
            Op::Symlink(path, len) => self.insert(path, Body::Symlink(vec![b't'; *len]), 0o777)?,
            Op::Link(old, new) => {
                let number = self.find(old)?;
                if matches!(self.nodes[&number].body, Body::Directory(_)) {
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
                if matches!(self.nodes[&number].body, Body::Directory(_)) {
                    return Err(Errno::ISDIR);
                }
                let (parent, name) = self.parent(path)?;
                self.entries(parent).remove(&name);
                self.sweep();
            }
            Op::RemoveDirectory(path) => {
                let number = self.find(path)?;
                if !self.directory(number)?.is_empty() {
                    return Err(Errno::NOTEMPTY);
                }
                let (parent, name) = self.parent(path)?;
                self.entries(parent).remove(&name);
                self.sweep();
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
                if let Allocate::Punch | Allocate::Zero { .. } = how {
                    let size = bytes.len();
                    bytes[first.min(size)..end.min(size)].fill(0);
                }
                if let Allocate::Reserve { keep_size: false }
                | Allocate::Zero { keep_size: false } = how
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
                    (true, SetXattr::Create) => return Err(Errno::EXIST),
                    (false, SetXattr::Replace) => return Err(Errno::NODATA),
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

    /// Asserts that a file system holds this and nothing else.
    pub fn check(&self, fs: &Fs, port: &mut Port) -> Result<(), String> {
        let mut numbers = BTreeMap::new();
        let mut links: BTreeMap<u64, u32> = BTreeMap::new();
        self.check_node(0, Ino::ROOT, fs, port, &mut numbers, &mut links)?;
        for (number, count) in links {
            let attr = fs.attr(numbers[&number]).map_err(|e| e.to_string())?;
            if attr.links != count {
                return Err(format!("{} names of {attr:?}", count));
            }
        }
        let inodes = fs.usage().inodes - 1;
        match inodes == self.nodes.len() as u64 {
            true => Ok(()),
            false => Err(format!("{inodes} inodes for {} nodes", self.nodes.len())),
        }
    }

    /// This with one file as it is found, each byte of which must be as it was before or
    /// as it is after.
    pub fn amid(
        &self,
        after: &Model,
        path: &[u8],
        fs: &Fs,
        port: &mut Port,
    ) -> Result<Model, String> {
        let (mut before, mut after) = (self.clone(), after.clone());
        let (Ok(old), Ok(new)) = (before.file(path), after.file(path)) else {
            return Ok(before);
        };
        let file = find(fs, path).map_err(|error| error.to_string())?;
        let found = fs.read(port, file.1, 0, 1 << 27);
        let found = found.map_err(|error| error.to_string())?;
        if found.len() < old.len().min(new.len()) || found.len() > old.len().max(new.len()) {
            return Err(format!("{} bytes", found.len()));
        }
        old.resize(found.len(), 0);
        new.resize(found.len(), 0);
        let bytes = found.iter().zip(old.iter().zip(new.iter()));
        for (at, (found, (old, new))) in bytes.enumerate() {
            // Of a page that two writes are made to at once either may be there.
            if found != old && found != new {
                return Err(format!("byte {at} is neither old nor new"));
            }
        }
        *old = found;
        Ok(before)
    }

    /// Asserts that files count the pages that they hold.
    pub fn check_counts(&self, fs: &Fs, port: &mut Port) {
        for path in self.paths(&|body| matches!(body, Body::File(_))) {
            let file = find(fs, &path).expect("it is there");
            let attr = fs.attr(file.1).expect("it is there");
            let (mut at, mut pages) = (0, 0);
            while let Ok(data) = fs.seek(port, file.1, at, Seek::Data) {
                let hole = fs.seek(port, file.1, data, Seek::Hole).expect("an end");
                pages += (hole.div_ceil(4096)) - data / 4096;
                at = hole;
            }
            assert_eq!(attr.pages, pages, "pages of {attr:?}");
        }
    }

    fn check_node(
        &self,
        number: u64,
        ino: Ino,
        fs: &Fs,
        port: &mut Port,
        numbers: &mut BTreeMap<u64, Ino>,
        links: &mut BTreeMap<u64, u32>,
    ) -> Result<(), String> {
        let fail = |what: &str| Err(format!("node {number} (inode {}): {what}", ino.0));
        let text = |error: FsError| format!("inode {}: {error}", ino.0);
        let is_directory = |number: &u64| matches!(self.nodes[number].body, Body::Directory(_));
        if !is_directory(&number) {
            *links.entry(number).or_default() += 1;
        }
        if let Some(other) = numbers.insert(number, ino) {
            return match other == ino {
                true => Ok(()),
                false => fail("has two inodes"),
            };
        }
        let node = &self.nodes[&number];
        let attr = fs.attr(ino).map_err(text)?;
        if attr.mode != node.mode {
            return fail(&format!("mode {:o} and not {:o}", attr.mode, node.mode));
        }
        let mut names = fs.xattr_names(ino).map_err(text)?;
        names.sort();
        if names != node.xattrs.keys().cloned().collect::<Vec<_>>() {
            return fail("other attributes");
        }
        for (name, value) in &node.xattrs {
            if fs.xattr(ino, name).map_err(text)? != *value {
                return fail("another value of an attribute");
            }
        }
        match &node.body {
            Body::File(bytes) => {
                let found = fs.read(port, ino, 0, 1 << 27).map_err(text)?;
                if attr.size != bytes.len() as u64 || found != *bytes {
                    let at = found.iter().zip(bytes).position(|(a, b)| a != b);
                    let of = |bytes: &[u8]| at.map(|at| bytes[at]);
                    return fail(&format!(
                        "{} bytes and not {}, at {at:?} {:?} and not {:?}",
                        attr.size,
                        bytes.len(),
                        of(&found),
                        of(bytes),
                    ));
                }
            }
            Body::Symlink(target) => {
                if attr.kind != Kind::Symlink || fs.read_link(ino).map_err(text)? != *target {
                    return fail("another target");
                }
            }
            Body::Directory(entries) => {
                let directories = entries.values().filter(|number| is_directory(number));
                if attr.links as usize != 2 + directories.count() {
                    return fail("links of a directory");
                }
                let mut listed = BTreeMap::new();
                let mut after = 0;
                loop {
                    let before = after;
                    let mut some = 0;
                    fs.list(ino, after, |entry| {
                        after = entry.cookie;
                        some += 1;
                        listed.insert(entry.name.clone(), entry.ino);
                        some < 7
                    })
                    .map_err(text)?;
                    if after == before {
                        break;
                    }
                }
                if listed.remove(&b"."[..]) != Some(ino) || listed.remove(&b".."[..]).is_none() {
                    return fail("no dots");
                }
                if listed.keys().ne(entries.keys()) {
                    return fail("other entries");
                }
                for (name, number) in entries {
                    self.check_node(*number, listed[name], fs, port, numbers, links)?;
                }
            }
        }
        Ok(())
    }
}

impl Node {
    fn children(self) -> impl Iterator<Item = u64> {
        let entries = match self.body {
            Body::Directory(entries) => entries,
            _ => BTreeMap::new(),
        };
        entries.into_values()
    }
}

pub fn name(step: u8) -> Vec<u8> {
    // Some long, so that leaves split early.
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

fn xattr(key: u8) -> Vec<u8> {
    format!("user.{key}").into_bytes()
}

/// Writes all, or fails as the write of the rest would.
fn write_all(
    fs: &Fs,
    port: &mut Port,
    ino: Ino,
    at: Option<u64>,
    data: &Bytes,
    durable: bool,
) -> Result<(), FsError> {
    let written = fs.write(port, ino, at, data, durable)?;
    match written.end - written.start < data.len() as u64 {
        true => Err(Errno::NOSPC.into()),
        false => Ok(()),
    }
}

/// Writes two halves at the same time where that can be, else one after the other.
fn write_halves(
    fs: &Fs,
    port: &mut Port,
    ino: Ino,
    offset: u64,
    data: Bytes,
) -> Result<(), FsError> {
    let (first, second) = (data.slice(..data.len() / 2), data.slice(data.len() / 2..));
    let between = offset + first.len() as u64;
    let halves = [(offset, first), (between, second)];
    let mut pipe = fs.pipe()?;
    let mut rest = Vec::new();
    for (name, (at, half)) in halves.iter().enumerate() {
        if !fs.begin_write(&mut pipe, name as u64, ino, *at, half, false)? {
            rest.push((*at, half));
        }
    }
    let mut ended = Ok(());
    while !pipe.is_empty() {
        pipe.reap(|_, result| ended = ended.clone().and(result.map(drop)));
    }
    ended?;
    for (at, half) in rest {
        write_all(fs, port, ino, Some(at), half, false)?;
    }
    Ok(())
}

/// Does an operation on a real file system, as a program would.
pub fn run(fs: &Fs, port: &mut Port, op: &Op) -> Outcome<()> {
    let result = try_run(fs, port, op);
    result.map_err(|error| error.errno())
}

/// An inode looked up, until it is dropped.
struct Held<'f>(&'f Fs, Ino);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.forget(self.1, 1);
    }
}

fn parent<'f>(fs: &'f Fs, path: &[u8]) -> Result<(Held<'f>, Vec<u8>), FsError> {
    let (&last, above) = path.split_last().expect("a path");
    let mut at = Held(fs, fs.lookup(Ino::ROOT, b".")?.ino);
    for &step in above {
        at = Held(fs, fs.lookup(at.1, &name(step))?.ino);
    }
    match fs.attr(at.1)?.kind {
        Kind::Directory => Ok((at, name(last))),
        _ => Err(Errno::NOTDIR.into()),
    }
}

fn find<'f>(fs: &'f Fs, path: &[u8]) -> Result<Held<'f>, FsError> {
    let (parent, name) = parent(fs, path)?;
    Ok(Held(fs, fs.lookup(parent.1, &name)?.ino))
}

fn try_run(fs: &Fs, port: &mut Port, op: &Op) -> Result<(), FsError> {
    let create = |path: &[u8], what: Make<'_>, mode| {
        let (parent, name) = parent(fs, path)?;
        let attr = fs.create(parent.1, &name, what, mode, OWNER)?;
        fs.forget(attr.ino, 1);
        Ok(())
    };
    match op {
        Op::Create(path) => create(path, Make::File, 0o644),
        Op::CreateUnnamed(path, len, with) => {
            let (parent, name) = parent(fs, path)?;
            let ino = fs.create_unnamed(parent.1, 0o600, OWNER)?.ino;
            let data = Bytes::from(vec![*with; *len]);
            let written = write_all(fs, port, ino, Some(0), &data, false);
            let linked = written.and_then(|()| fs.link(ino, parent.1, &name));
            fs.forget(ino, 1 + u64::from(linked.is_ok()));
            fs.release(ino);
            linked.map(drop)
        }
        Op::MakeDirectory(path) => create(path, Make::Directory, 0o700),
        Op::Symlink(path, len) => create(path, Make::Symlink(&vec![b't'; *len]), 0o777),
        Op::Link(old, new) => {
            let old = find(fs, old)?;
            let is_directory = fs.attr(old.1)?.kind == Kind::Directory;
            if is_directory {
                return Err(fs.link(old.1, Ino::ROOT, b"no").expect_err("refused"));
            }
            let (to, name) = parent(fs, new)?;
            fs.link(old.1, to.1, &name)?;
            fs.forget(old.1, 1);
            Ok(())
        }
        Op::Unlink(path) => {
            let (parent, name) = parent(fs, path)?;
            fs.unlink(parent.1, &name)
        }
        Op::RemoveDirectory(path) => {
            let (parent, name) = parent(fs, path)?;
            fs.rmdir(parent.1, &name)
        }
        Op::Rename(from, to, how) => {
            let (from, old) = parent(fs, from)?;
            let (to, new) = parent(fs, to)?;
            fs.rename((from.1, &old), (to.1, &new), *how)
        }
        Op::Write(path, offset, len, with) => {
            let file = find(fs, path)?;
            let data = Bytes::from(vec![*with; *len]);
            write_halves(fs, port, file.1, *offset, data)
        }
        Op::Append(path, len, with) => {
            let file = find(fs, path)?;
            let data = Bytes::from(vec![*with; *len]);
            write_all(fs, port, file.1, None, &data, true)
        }
        Op::SetSize(path, size) => {
            let file = find(fs, path)?;
            fs.set_size(port, file.1, *size).map(drop)
        }
        Op::Allocate(path, how, offset, len) => {
            let file = find(fs, path)?;
            fs.allocate(port, file.1, *how, *offset, *len)
        }
        Op::SetMode(path, mode) => {
            let node = find(fs, path)?;
            let changes = Changes {
                mode: Some(*mode),
                ..Changes::default()
            };
            fs.set_attr(node.1, changes).map(drop)
        }
        Op::SetXattr(path, key, len, how) => {
            let node = find(fs, path)?;
            fs.set_xattr(node.1, &xattr(*key), &vec![*key; *len], *how)
        }
        Op::RemoveXattr(path, key) => {
            let node = find(fs, path)?;
            fs.remove_xattr(node.1, &xattr(*key))
        }
        Op::Copy(from, source, to, target, len) => {
            let to = find(fs, to)?;
            let is_file = fs.attr(to.1)?.kind;
            match is_file {
                Kind::File => {}
                Kind::Directory => return Err(Errno::ISDIR.into()),
                _ => return Err(Errno::INVAL.into()),
            }
            let from = find(fs, from)?;
            fs.read(port, from.1, 0, 1)?;
            fs.copy(port, (from.1, *source), (to.1, *target), *len)
                .map(drop)
        }
    }
}
