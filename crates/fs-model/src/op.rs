//! Operations, and their random generator.

use crate::model::{FsModel, NodeContent};
use pagemesh_fs::{AllocateMode, RenameMode, SetXattrMode};
use pagemesh_fuzz::Random;

/// Bytes of a chunk.
const CHUNK: u64 = 2 << 20;

/// An operation. Each byte of a path is a name.
#[derive(Clone, Debug)]
pub enum Op {
    /// Creates a file.
    Create(Vec<u8>),
    /// Creates a file without a name, writes it, and links it: path, length, byte.
    CreateUnnamed(Vec<u8>, usize, u8),
    /// Creates a directory.
    MakeDirectory(Vec<u8>),
    /// Creates a symbolic link with a target of this length.
    Symlink(Vec<u8>, usize),
    /// Adds a name to a file.
    Link(Vec<u8>, Vec<u8>),
    /// Removes a name.
    Unlink(Vec<u8>),
    /// Removes a directory.
    RemoveDirectory(Vec<u8>),
    /// Renames: from, to.
    Rename(Vec<u8>, Vec<u8>, RenameMode),
    /// Writes at an offset: length, byte.
    Write(Vec<u8>, u64, usize, u8),
    /// Appends: length, byte.
    Append(Vec<u8>, usize, u8),
    /// Truncates or extends.
    SetSize(Vec<u8>, u64),
    /// Preallocates, punches or zeroes a range: offset, length.
    Allocate(Vec<u8>, AllocateMode, u64, u64),
    /// Sets permissions.
    SetMode(Vec<u8>, u16),
    /// Sets an extended attribute: key, length of the value.
    SetXattr(Vec<u8>, u8, usize, SetXattrMode),
    /// Removes an extended attribute by key.
    RemoveXattr(Vec<u8>, u8),
    /// Copies from a file at an offset to a file at an offset: length.
    Copy(Vec<u8>, u64, Vec<u8>, u64, u64),
}

impl Op {
    /// The file that the operation changes page by page, not atomically.
    #[must_use]
    pub fn non_atomic_file(&self) -> Option<&[u8]> {
        match self {
            Op::Write(path, ..)
            | Op::Append(path, ..)
            | Op::Allocate(path, ..)
            | Op::Copy(_, _, path, ..) => Some(path),
            _ => None,
        }
    }
}

/// The size of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpScale {
    /// Into the third chunk of 2 MiB of a file, with many names in one directory.
    Large,
    /// Small files and few names, for tests that copy and compare everything often.
    Small,
}

impl OpScale {
    /// Names in one directory.
    fn names(self) -> u64 {
        match self {
            OpScale::Large => 60,
            OpScale::Small => 8,
        }
    }
}

/// Random operations from a seed.
#[derive(Clone, Debug)]
pub struct OpGenerator {
    random: Random,
    scale: OpScale,
}

impl OpGenerator {
    /// The operations of a seed.
    #[must_use]
    pub fn new(seed: u64, reach: OpScale) -> OpGenerator {
        let random = Random::new(seed);
        OpGenerator {
            random,
            scale: reach,
        }
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.random.below(end as usize) as u64
    }

    /// True with a probability of one in `of`.
    pub fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    /// Mostly the path of an existing node of the wanted type.
    fn path(&mut self, model: &FsModel, wanted: impl Fn(&NodeContent) -> bool) -> Vec<u8> {
        let found: Vec<Vec<u8>> = model.paths(&wanted);
        if found.is_empty() || self.one_in(10) {
            self.new_path(model)
        } else {
            found[self.below(found.len() as u64) as usize].clone()
        }
    }

    /// Mostly a new name, mostly in an existing directory.
    fn new_path(&mut self, model: &FsModel) -> Vec<u8> {
        let above = model.paths(&|body: &NodeContent| matches!(body, NodeContent::Directory(_)));
        let at = self.below(above.len() as u64 + 2) as usize;
        let mut path = above.get(at).cloned().unwrap_or_default();
        path.push(self.below(self.scale.names()) as u8);
        path
    }

    fn offset(&mut self) -> u64 {
        // Edges of spans, of pages, and of the first chunk.
        let kinds = if self.scale == OpScale::Large { 12 } else { 10 };
        match self.below(kinds) {
            0..6 => self.below(40_000),
            6..10 => self.below(20) * 4096,
            10 => 2_090_000 + self.below(20_000),
            _ => 4_190_000 + self.below(10_000),
        }
    }

    /// A random operation on the nodes of a model.
    pub fn next_op(&mut self, model: &FsModel) -> Op {
        let file = |body: &NodeContent| matches!(body, NodeContent::File(_));
        let directory = |body: &NodeContent| matches!(body, NodeContent::Directory(_));
        let any = |_: &NodeContent| true;
        let fill = 1 + self.below(255) as u8;
        match self.below(49) {
            0..9 => Op::Create(self.new_path(model)),
            9 | 44 => {
                let len = self.below(30_000) as usize;
                Op::CreateUnnamed(self.new_path(model), len, fill)
            }
            10..14 => Op::MakeDirectory(self.new_path(model)),
            14 => Op::Symlink(self.new_path(model), 1 + self.below(300) as usize),
            15 => Op::Link(self.path(model, file), self.new_path(model)),
            16..19 => Op::Unlink(self.path(model, |body| !directory(body))),
            19 => Op::RemoveDirectory(self.path(model, directory)),
            20..24 => {
                let how = [
                    RenameMode::Replace,
                    RenameMode::Replace,
                    RenameMode::NoReplace,
                    RenameMode::Exchange,
                ];
                let how = *self.random.choose(&how);
                let from = self.path(model, any);
                let to = if self.one_in(2) {
                    self.new_path(model)
                } else {
                    self.path(model, any)
                };
                Op::Rename(from, to, how)
            }
            24..30 => {
                let len = 1 + self.below(30_000) as usize;
                Op::Write(self.path(model, file), self.offset(), len, fill)
            }
            30..33 => {
                let len = 1 + self.below(9_000) as usize;
                Op::Append(self.path(model, file), len, fill)
            }
            33..36 => Op::SetSize(self.path(model, file), self.offset()),
            36..39 => {
                let keep_size = self.one_in(2);
                let how = [
                    AllocateMode::Reserve { keep_size },
                    AllocateMode::Punch,
                    AllocateMode::Zero { keep_size },
                ];
                let how = *self.random.choose(&how);
                let len = 1 + self.below(30_000);
                Op::Allocate(self.path(model, file), how, self.offset(), len)
            }
            39 => Op::SetMode(self.path(model, any), self.below(0o10000) as u16),
            40 | 41 => {
                let how = [
                    SetXattrMode::Always,
                    SetXattrMode::Create,
                    SetXattrMode::Replace,
                ];
                let how = *self.random.choose(&how);
                let (key, len) = (self.below(4) as u8, self.below(9_000) as usize);
                Op::SetXattr(self.path(model, any), key, len, how)
            }
            42 => Op::RemoveXattr(self.path(model, any), self.below(4) as u8),
            _ => {
                let kinds = if self.scale == OpScale::Large { 4 } else { 1 };
                let (source, target, len) = match self.below(kinds) {
                    0 => (self.offset(), self.offset(), 1 + self.below(20_000)),
                    // Ranges that can be shared.
                    1 => (0, CHUNK * self.below(3), 1 + self.below(3 * CHUNK)),
                    2 => (CHUNK * self.below(3), CHUNK * self.below(3), 1 << 24),
                    _ => (0, 0, 1 << 24),
                };
                let from = self.path(model, file);
                Op::Copy(from, source, self.path(model, file), target, len)
            }
        }
    }
}
