//! Operations on a real file system, as a program does them, and a real file system read as a
//! model.

use crate::model::{FsModel, Node, NodeContent, name, xattr};
use crate::op::Op;
use crate::{OWNER, OpResult};
use bytes::Bytes;
use pagemesh_fs::{
    Attr, AttrChanges, CreateKind, Fs, FsError, Ino, InodeKind, IoChannel, SeekTarget,
};
use rustix::io::Errno;
use std::collections::BTreeMap;

/// More bytes than the longest file of the operations.
const FILE_BYTES_MAX: u32 = 1 << 27;

/// Reads a file system into a model.
///
/// # Errors
/// Unreadable or inconsistent parts.
pub fn read(fs: &Fs, channel: &mut IoChannel) -> Result<FsModel, String> {
    let mut reader = FsReader {
        fs,
        channel,
        numbers: BTreeMap::new(),
        names: BTreeMap::new(),
        nodes: BTreeMap::new(),
    };
    reader.visit(Ino::ROOT)?;
    let FsReader { names, nodes, .. } = reader;
    for (attr, count) in names.values() {
        if attr.links != *count {
            return Err(format!("{count} names of {attr:?}"));
        }
    }
    let inodes = fs.usage().inodes - 1;
    let next = nodes.len() as u64;
    if inodes == next {
        Ok(FsModel { nodes, next })
    } else {
        Err(format!("{inodes} inodes for {next} nodes"))
    }
}

struct FsReader<'f> {
    fs: &'f Fs,
    channel: &'f mut IoChannel,
    numbers: BTreeMap<Ino, u64>,
    /// Nodes other than directories, and how many names of each were found.
    names: BTreeMap<u64, (Attr, u32)>,
    nodes: BTreeMap<u64, Node>,
}

impl FsReader<'_> {
    /// The number of a node. Reads the nodes below it.
    fn visit(&mut self, ino: Ino) -> Result<u64, String> {
        let text = |error: FsError| format!("inode {}: {error}", ino.0);
        if let Some(&number) = self.numbers.get(&ino) {
            let named = self.names.get_mut(&number);
            named
                .ok_or_else(|| format!("directory {} has two names", ino.0))?
                .1 += 1;
            return Ok(number);
        }
        let number = self.numbers.len() as u64;
        self.numbers.insert(ino, number);
        let attr = self.fs.attr(ino).map_err(text)?;
        let mut xattrs = BTreeMap::new();
        for name in self.fs.xattr_names(ino).map_err(text)? {
            let value = self.fs.xattr(ino, &name).map_err(text)?;
            xattrs.insert(name, value);
        }
        let mode = attr.mode;
        let body = match attr.kind {
            InodeKind::Directory => NodeContent::Directory(self.entries(ino, &attr)?),
            InodeKind::Symlink => NodeContent::Symlink(self.fs.read_link(ino).map_err(text)?),
            _ => {
                let found = self.fs.read(self.channel, ino, 0, FILE_BYTES_MAX);
                let bytes = found.map_err(text)?;
                if bytes.len() as u64 != attr.size {
                    return Err(format!("{} bytes of {attr:?}", bytes.len()));
                }
                NodeContent::File(bytes)
            }
        };
        if !matches!(body, NodeContent::Directory(_)) {
            self.names.insert(number, (attr, 1));
        }
        self.nodes.insert(number, Node { body, mode, xattrs });
        Ok(number)
    }

    fn entries(&mut self, ino: Ino, attr: &Attr) -> Result<BTreeMap<Vec<u8>, u64>, String> {
        let mut listed = BTreeMap::new();
        let mut after = 0;
        loop {
            let before = after;
            let mut some = 0;
            let told = self.fs.list(ino, after, |entry| {
                after = entry.cookie;
                some += 1;
                listed.insert(entry.name.clone(), entry.ino);
                some < 7
            });
            told.map_err(|error| format!("inode {}: {error}", ino.0))?;
            if after == before {
                break;
            }
        }
        if listed.remove(&b"."[..]) != Some(ino) || listed.remove(&b".."[..]).is_none() {
            return Err(format!("no dots in directory {}", ino.0));
        }
        let (mut entries, mut directories) = (BTreeMap::new(), 0);
        for (name, below) in listed {
            let number = self.visit(below)?;
            let is_directory = matches!(self.nodes[&number].body, NodeContent::Directory(_));
            directories += u32::from(is_directory);
            entries.insert(name, number);
        }
        if attr.links == 2 + directories {
            Ok(entries)
        } else {
            Err(format!("{directories} directories in {attr:?}"))
        }
    }
}

/// Asserts that files count their mapped pages.
///
/// # Panics
/// If a file does not.
pub fn check_page_counts(model: &FsModel, fs: &Fs, channel: &mut IoChannel) {
    for path in model.paths(&|body| matches!(body, NodeContent::File(_))) {
        let file = find(fs, &path).expect("it is there");
        let attr = fs.attr(file.1).expect("it is there");
        let (mut at, mut pages) = (0, 0);
        while let Ok(data) = fs.seek(channel, file.1, at, SeekTarget::Data) {
            let hole = fs
                .seek(channel, file.1, data, SeekTarget::Hole)
                .expect("an end");
            pages += (hole.div_ceil(4096)) - data / 4096;
            at = hole;
        }
        assert_eq!(attr.pages, pages, "pages of {attr:?}");
    }
}

/// Writes all bytes, or fails as a write of the rest would.
fn write_all(
    fs: &Fs,
    channel: &mut IoChannel,
    ino: Ino,
    at: Option<u64>,
    data: &Bytes,
    durable: bool,
) -> Result<(), FsError> {
    let written = fs.write(channel, ino, at, data, durable)?;
    if written.end - written.start < data.len() as u64 {
        Err(Errno::NOSPC.into())
    } else {
        Ok(())
    }
}

/// Writes two halves concurrently if possible, else in sequence.
fn write_halves(
    fs: &Fs,
    channel: &mut IoChannel,
    ino: Ino,
    offset: u64,
    data: Bytes,
) -> Result<(), FsError> {
    let (first, second) = (data.slice(..data.len() / 2), data.slice(data.len() / 2..));
    let between = offset + first.len() as u64;
    let halves = [(offset, first), (between, second)];
    let mut pipe = fs.write_queue()?;
    let mut rest = Vec::new();
    for (name, (at, half)) in halves.iter().enumerate() {
        if !fs.begin_write(&mut pipe, name as u64, ino, *at, half, false)? {
            rest.push((*at, half));
        }
    }
    let mut ended = Ok(());
    while !pipe.is_empty() {
        pipe.reap(|_, result| ended = ended.clone().and(result.map(drop)));
        if !pipe.is_empty() {
            pipe.wait(None);
        }
    }
    ended?;
    for (at, half) in rest {
        write_all(fs, channel, ino, Some(at), half, false)?;
    }
    Ok(())
}

/// Runs an operation on a real file system, as a program would.
///
/// # Errors
/// The error that a program gets.
pub fn run_op(fs: &Fs, channel: &mut IoChannel, op: &Op) -> OpResult<()> {
    let result = try_run(fs, channel, op);
    result.map_err(|error| error.errno())
}

/// An inode looked up, until it is dropped.
struct LookedUpInode<'f>(&'f Fs, Ino);

impl Drop for LookedUpInode<'_> {
    fn drop(&mut self) {
        self.0.forget(self.1, 1);
    }
}

fn parent<'f>(fs: &'f Fs, path: &[u8]) -> Result<(LookedUpInode<'f>, Vec<u8>), FsError> {
    let (&last, above) = path.split_last().expect("a path");
    let mut at = LookedUpInode(fs, fs.lookup(Ino::ROOT, b".")?.ino);
    for &step in above {
        at = LookedUpInode(fs, fs.lookup(at.1, &name(step))?.ino);
    }
    match fs.attr(at.1)?.kind {
        InodeKind::Directory => Ok((at, name(last))),
        _ => Err(Errno::NOTDIR.into()),
    }
}

fn find<'f>(fs: &'f Fs, path: &[u8]) -> Result<LookedUpInode<'f>, FsError> {
    let (parent, name) = parent(fs, path)?;
    Ok(LookedUpInode(fs, fs.lookup(parent.1, &name)?.ino))
}

fn try_run(fs: &Fs, channel: &mut IoChannel, op: &Op) -> Result<(), FsError> {
    let create = |path: &[u8], what: CreateKind<'_>, mode| {
        let (parent, name) = parent(fs, path)?;
        let attr = fs.create(parent.1, &name, what, mode, OWNER)?;
        fs.forget(attr.ino, 1);
        Ok(())
    };
    match op {
        Op::Create(path) => create(path, CreateKind::File, 0o644),
        Op::CreateUnnamed(path, len, with) => {
            let (parent, name) = parent(fs, path)?;
            let ino = fs.create_unnamed(parent.1, 0o600, OWNER)?.ino;
            let data = Bytes::from(vec![*with; *len]);
            let written = write_all(fs, channel, ino, Some(0), &data, false);
            let linked = written.and_then(|()| fs.link(ino, parent.1, &name));
            fs.forget(ino, 1 + u64::from(linked.is_ok()));
            fs.release(ino);
            linked.map(drop)
        }
        Op::MakeDirectory(path) => create(path, CreateKind::Directory, 0o700),
        Op::Symlink(path, len) => create(path, CreateKind::Symlink(&vec![b't'; *len]), 0o777),
        Op::Link(old, new) => {
            let old = find(fs, old)?;
            let is_directory = fs.attr(old.1)?.kind == InodeKind::Directory;
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
            write_halves(fs, channel, file.1, *offset, data)
        }
        Op::Append(path, len, with) => {
            let file = find(fs, path)?;
            let data = Bytes::from(vec![*with; *len]);
            write_all(fs, channel, file.1, None, &data, true)
        }
        Op::SetSize(path, size) => {
            let file = find(fs, path)?;
            fs.set_size(channel, file.1, *size).map(drop)
        }
        Op::Allocate(path, how, offset, len) => {
            let file = find(fs, path)?;
            fs.allocate(channel, file.1, *how, *offset, *len)
        }
        Op::SetMode(path, mode) => {
            let node = find(fs, path)?;
            let changes = AttrChanges {
                mode: Some(*mode),
                ..AttrChanges::default()
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
                InodeKind::File => {}
                InodeKind::Directory => return Err(Errno::ISDIR.into()),
                _ => return Err(Errno::INVAL.into()),
            }
            let from = find(fs, from)?;
            fs.read(channel, from.1, 0, 1)?;
            // An error ends a copy short if it has copied something. The next call reports it.
            let size = fs.attr(from.1)?.size;
            let mut copied = fs.copy(channel, (from.1, *source), (to.1, *target), *len)?;
            let len = size.saturating_sub(*source).min(*len);
            while copied < len {
                let (source, target) = (*source + copied, *target + copied);
                match fs.copy(channel, (from.1, source), (to.1, target), len - copied)? {
                    0 => break,
                    more => copied += more,
                }
            }
            Ok(())
        }
    }
}
