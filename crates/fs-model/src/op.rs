//! Operations, and dice that roll them.

use crate::model::{FsModel, NodeContent};
use pagemesh_fs::{AllocateMode, RenameMode, SetXattrMode};
use pagemesh_fuzz::Random;

/// Bytes of a chunk.
const CHUNK: u64 = 2 << 20;

/// An operation. Each byte of a path is a name.
#[derive(Clone, Debug)]
pub enum Op {
    /// A file.
    Create(Vec<u8>),
    /// A file without a name that is written, and gets this name.
    CreateUnnamed(Vec<u8>, usize, u8),
    /// A directory.
    MakeDirectory(Vec<u8>),
    /// A link with a target of so many bytes.
    Symlink(Vec<u8>, usize),
    /// A further name.
    Link(Vec<u8>, Vec<u8>),
    /// Takes a name away.
    Unlink(Vec<u8>),
    /// As it says.
    RemoveDirectory(Vec<u8>),
    /// From, to.
    Rename(Vec<u8>, Vec<u8>, RenameMode),
    /// At an offset, so many of one byte.
    Write(Vec<u8>, u64, usize, u8),
    /// At the end, so many of one byte.
    Append(Vec<u8>, usize, u8),
    /// Cuts or grows.
    SetSize(Vec<u8>, u64),
    /// Offset and length come last.
    Allocate(Vec<u8>, AllocateMode, u64, u64),
    /// Permissions.
    SetMode(Vec<u8>, u16),
    /// Key, and length of the value.
    SetXattr(Vec<u8>, u8, usize, SetXattrMode),
    /// By key.
    RemoveXattr(Vec<u8>, u8),
    /// From a file at an offset to another, so many bytes.
    Copy(Vec<u8>, u64, Vec<u8>, u64, u64),
}

impl Op {
    /// The file whose pages an operation changes one after the other.
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

/// How far operations go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpScale {
    /// Into the third chunk of 2 MiB of a file, with many names in one directory.
    Large,
    /// Little, and few names: for what copies and compares everything often.
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

/// Operations that follow from a seed.
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

    /// True once in so many times.
    pub fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    /// Mostly the path of something that is there, of the wanted kind.
    fn path(&mut self, model: &FsModel, wanted: impl Fn(&NodeContent) -> bool) -> Vec<u8> {
        let found: Vec<Vec<u8>> = model.paths(&wanted);
        match found.is_empty() || self.one_in(10) {
            true => self.new_path(model),
            false => found[self.below(found.len() as u64) as usize].clone(),
        }
    }

    /// A name, mostly a new one, in a directory, mostly one that is there.
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

    /// An operation on what a model has.
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
                let to = match self.one_in(2) {
                    true => self.new_path(model),
                    false => self.path(model, any),
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
                    // What may be shared.
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
