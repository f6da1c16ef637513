//! Draws the calls of a load. The sequence follows from its seed, but for names of created files.

use super::file_set::{FileSet, GROWTH_BYTES_MAX, SPARES_MAX, SetFile};
use super::mix::{Operation, OperationMix};
use super::sizes::{
    APPEND_PERCENT, BLOCK_BYTES, FAILED_LOOKUP_PERCENT, draw_read_bytes, draw_write_bytes,
};
use pagemesh_base::rng::SplitMix64;
use pagemesh_nfs_client::nfs3::Status;

/// A call, by indexes into a [`FileSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A name of a file, or one that does not exist.
    Lookup {
        /// The file, or the file that the directory is taken from.
        file: u32,
        /// Whether the name exists.
        exists: bool,
    },
    /// Bytes of a file.
    Read {
        /// The file.
        file: u32,
        /// The first byte.
        offset: u32,
        /// The number of bytes.
        count: u32,
    },
    /// New bytes of a file, UNSTABLE or FILE_SYNC.
    Write {
        /// The file.
        file: u32,
        /// The first byte.
        offset: u32,
        /// The number of bytes.
        count: u32,
        /// Whether the server stores them before it answers.
        is_synchronous: bool,
    },
    /// Attributes of a file.
    GetAttr {
        /// The file.
        file: u32,
    },
    /// The target of a link.
    ReadLink {
        /// The link.
        link: u32,
    },
    /// The names of a directory.
    ReadDir {
        /// The directory.
        directory: u32,
    },
    /// The names of a directory, with attributes.
    ReadDirPlus {
        /// The directory.
        directory: u32,
    },
    /// A new file, GUARDED.
    Create {
        /// The directory.
        directory: u32,
        /// The number in its name.
        number: u64,
    },
    /// The end of a created file.
    Remove {
        /// The directory.
        directory: u32,
        /// The number in its name.
        number: u64,
    },
    /// The space of the file system.
    FsStat,
    /// A new size, or a mode.
    SetAttr {
        /// The file.
        file: u32,
        /// The new size; none: the mode.
        size_bytes: Option<u32>,
    },
    /// The rights on a file.
    Access {
        /// The file.
        file: u32,
    },
    /// A flush of a file.
    Commit {
        /// The file.
        file: u32,
    },
}

impl Request {
    /// Its operation.
    #[must_use]
    pub fn operation(&self) -> Operation {
        match self {
            Request::Lookup { .. } => Operation::Lookup,
            Request::Read { .. } => Operation::Read,
            Request::Write { .. } => Operation::Write,
            Request::GetAttr { .. } => Operation::GetAttr,
            Request::ReadLink { .. } => Operation::ReadLink,
            Request::ReadDir { .. } => Operation::ReadDir,
            Request::ReadDirPlus { .. } => Operation::ReadDirPlus,
            Request::Create { .. } => Operation::Create,
            Request::Remove { .. } => Operation::Remove,
            Request::FsStat => Operation::FsStat,
            Request::SetAttr { .. } => Operation::SetAttr,
            Request::Access { .. } => Operation::Access,
            Request::Commit { .. } => Operation::Commit,
        }
    }

    /// The status of a right reply.
    #[must_use]
    pub fn expected_status(&self) -> Status {
        match self {
            Request::Lookup { exists: false, .. } => Status::NOENT,
            _ => Status::OK,
        }
    }
}

/// A sequence of calls.
#[derive(Clone, Debug)]
pub struct Workload {
    rng: SplitMix64,
    mix: OperationMix,
    last_written: Option<u32>,
}

impl Workload {
    /// The sequence of a seed.
    #[must_use]
    pub fn new(mix: OperationMix, seed: u64) -> Workload {
        Workload {
            rng: SplitMix64::new(seed),
            mix,
            last_written: None,
        }
    }

    /// Draws the next call, and notes its effect in the set. A set without files has no calls but FSSTAT.
    pub fn draw(&mut self, set: &mut FileSet) -> Request {
        let operation = self.mix.draw(&mut self.rng);
        if set.files.is_empty() || set.directories.is_empty() {
            return Request::FsStat;
        }
        let file = match self.mix.access.is_uniform {
            true => self.rng.below(set.files.len() as u64) as u32,
            false => set.draw_file(&mut self.rng),
        };
        let directory = self.rng.below(set.directories.len() as u64) as u32;
        match operation {
            Operation::Lookup => Request::Lookup {
                file,
                exists: self.rng.below(100) >= FAILED_LOOKUP_PERCENT,
            },
            Operation::Read => self.read(set, file),
            Operation::Write => self.write(set, file),
            Operation::GetAttr => Request::GetAttr { file },
            Operation::ReadLink => match set.links.len() as u64 {
                0 => Request::GetAttr { file },
                links => Request::ReadLink {
                    link: self.rng.below(links) as u32,
                },
            },
            Operation::ReadDir => Request::ReadDir { directory },
            Operation::ReadDirPlus => Request::ReadDirPlus { directory },
            Operation::Create if set.spares.len() < SPARES_MAX => create(set, directory),
            Operation::Create | Operation::Remove => match set.spares.pop_front() {
                Some((directory, number)) => Request::Remove { directory, number },
                None => create(set, directory),
            },
            Operation::FsStat => Request::FsStat,
            Operation::SetAttr => set_attr(set, file),
            Operation::Access => Request::Access { file },
            Operation::Commit => Request::Commit {
                file: self.last_written.unwrap_or(file),
            },
        }
    }

    /// The operation of a call that is never sent.
    pub(crate) fn draw_unsent(&mut self) -> Operation {
        self.mix.draw(&mut self.rng)
    }

    fn block_offset(&mut self, length_bytes: u32) -> u32 {
        let block_bytes = self.mix.access.transfer_bytes.unwrap_or(BLOCK_BYTES).max(1);
        let blocks = length_bytes.div_ceil(block_bytes).max(1);
        self.rng.below(u64::from(blocks)) as u32 * block_bytes
    }

    fn read(&mut self, set: &FileSet, file: u32) -> Request {
        let offset = self.block_offset(set.files[file as usize].length_bytes);
        let count = match self.mix.access.transfer_bytes {
            Some(bytes) => bytes,
            None => draw_read_bytes(&mut self.rng),
        };
        Request::Read {
            file,
            offset,
            count,
        }
    }

    fn write(&mut self, set: &mut FileSet, file: u32) -> Request {
        self.last_written = Some(file);
        let is_synchronous = self.mix.access.is_synchronous;
        let wanted = draw_write_bytes(&mut self.rng);
        let is_append = self.rng.below(100) < APPEND_PERCENT;
        let SetFile {
            planned_bytes,
            length_bytes,
            ..
        } = &mut set.files[file as usize];
        let has_room = *length_bytes + wanted <= *planned_bytes + GROWTH_BYTES_MAX;
        if *length_bytes == 0 || (is_append && has_room) {
            let offset = *length_bytes;
            *length_bytes += wanted;
            return Request::Write {
                file,
                offset,
                count: wanted,
                is_synchronous,
            };
        }
        let length = *length_bytes;
        let offset = self.block_offset(length);
        Request::Write {
            file,
            offset,
            count: wanted.min(length - offset),
            is_synchronous,
        }
    }
}

fn create(set: &mut FileSet, directory: u32) -> Request {
    let number = set.next_spare;
    set.next_spare += 1;
    Request::Create { directory, number }
}

/// Truncates a file that has grown, or sets the mode of another. So files do not grow for ever.
fn set_attr(set: &mut FileSet, file: u32) -> Request {
    let entry = &mut set.files[file as usize];
    let size_bytes = (entry.length_bytes > entry.planned_bytes).then_some(entry.planned_bytes);
    entry.length_bytes = entry.length_bytes.min(entry.planned_bytes);
    Request::SetAttr { file, size_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_draw_equal_calls() {
        let draw = |seed| {
            let mut set = FileSet::made_up(600);
            let mut workload = Workload::new(OperationMix::SFS97, seed);
            let calls: Vec<Request> = (0..5000).map(|_| workload.draw(&mut set)).collect();
            calls
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn files_stay_within_their_growth() {
        let mut set = FileSet::made_up(60);
        let mut workload = Workload::new(OperationMix::SFS97, 5);
        let (mut appends, mut writes, mut truncations) = (0, 0, 0);
        for _ in 0..200_000 {
            let before = set.files.clone();
            match workload.draw(&mut set) {
                Request::Write {
                    file,
                    offset,
                    count,
                    ..
                } => {
                    let length = before[file as usize].length_bytes;
                    assert!(count > 0 && count <= BLOCK_BYTES);
                    assert!(offset <= length, "no holes");
                    writes += 1;
                    appends += u32::from(offset == length);
                }
                Request::SetAttr {
                    size_bytes: Some(_),
                    ..
                } => truncations += 1,
                _ => {}
            }
        }
        for file in &set.files {
            assert!(file.length_bytes <= file.planned_bytes + GROWTH_BYTES_MAX);
        }
        assert!(appends * 100 > writes * 50, "{appends} of {writes}");
        assert!(truncations > 100, "{truncations}");
    }

    #[test]
    fn removes_take_each_spare_once() {
        let mut set = FileSet::made_up(60);
        let mut workload = Workload::new(OperationMix::NAMES, 6);
        let mut known: std::collections::HashSet<u64> = (0..100).collect();
        for _ in 0..50_000 {
            match workload.draw(&mut set) {
                Request::Create { directory, number } => {
                    assert!(known.insert(number));
                    set.spares.push_back((directory, number));
                }
                Request::Remove { number, .. } => assert!(known.remove(&number)),
                _ => {}
            }
        }
    }

    #[test]
    fn page_reads_are_whole_pages_of_all_files() {
        let mut set = FileSet::made_up(600);
        let mut workload = Workload::new(OperationMix::PAGE_READS, 8);
        let mut files = std::collections::HashSet::new();
        for _ in 0..20_000 {
            let Request::Read {
                file,
                offset,
                count,
            } = workload.draw(&mut set)
            else {
                panic!("no read");
            };
            assert_eq!((offset % 4096, count), (0, 4096));
            assert!(offset < set.files[file as usize].length_bytes.max(1));
            files.insert(file);
        }
        assert_eq!(files.len(), 600);
    }

    #[test]
    fn set_without_files_has_harmless_calls() {
        let mut workload = Workload::new(OperationMix::SFS97, 7);
        assert_eq!(workload.draw(&mut FileSet::default()), Request::FsStat);
    }
}
