//! The files of a load: sizes by SFS97, 30 in a directory, a hot tenth, and a number that grows with the load.
//!
//! SFS97 makes 10 MB of files for each operation per second of the offered load, and uses a tenth of them. Source figures of
//! fstress have 40 files for each. Both need tens of gigabytes at 20 000 operations per second, so the number per operation
//! is an option, and reports name it.
//!
//! Invariant: a file of the set is never removed. REMOVE takes files that CREATE has made.

use super::sizes::{FILE_BYTES_MEAN, draw_file_bytes};
use pagemesh_base::rng::SplitMix64;
use pagemesh_nfs_client::nfs3::Handle;
use std::collections::VecDeque;

/// Files in a directory.
pub const FILES_PER_DIRECTORY: u32 = 30;
/// Files for each symbolic link.
const FILES_PER_LINK: u32 = 5;
/// One file of so many is hot.
const HOT_ONE_IN: u64 = 10;
/// Percent of accesses to hot files.
const HOT_PERCENT: u64 = 99;
/// Bytes that appends add to a file at most. Later writes overwrite, until a SETATTR truncates the file.
pub const GROWTH_BYTES_MAX: u32 = 256 << 10;
/// Most files of a set: their handles take about 100 bytes each.
pub const FILES_MAX: u32 = 2_000_000;
/// Files that CREATE may make before a REMOVE must follow.
pub const SPARES_MAX: usize = 100_000;

/// The number of files for a load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FileSetScale {
    /// Files for each operation per second.
    pub files_per_op: f64,
    /// The smallest set.
    pub files_min: u32,
    /// The largest set: the file systems have room for it.
    pub files_max: u32,
}

impl FileSetScale {
    /// A scale with a largest set that fits into this many bytes, with room for growth and created files.
    #[must_use]
    pub fn with_room(files_per_op: f64, size_bytes: u64) -> FileSetScale {
        let fitting = size_bytes / 2 / (FILE_BYTES_MEAN + 4096);
        FileSetScale {
            files_per_op,
            files_min: 10 * FILES_PER_DIRECTORY,
            files_max: u32::try_from(fitting).unwrap_or(FILES_MAX).min(FILES_MAX),
        }
    }

    /// The number of files at this rate.
    #[must_use]
    pub fn files_at(&self, rate_per_s: f64) -> u32 {
        let wanted = (rate_per_s * self.files_per_op).min(f64::from(FILES_MAX)) as u32;
        wanted.max(self.files_min).min(self.files_max)
    }
}

/// A file of the set.
#[derive(Clone, Debug)]
pub struct SetFile {
    /// Its handle.
    pub handle: Handle,
    /// Its size when it was made.
    pub planned_bytes: u32,
    /// Its size now, if all writes that were sent have been executed.
    pub length_bytes: u32,
}

/// A set on one export.
#[derive(Clone, Debug, Default)]
pub struct FileSet {
    /// Any file for FSSTAT: the root.
    pub root: Option<Handle>,
    /// The directories.
    pub directories: Vec<Handle>,
    /// The files: number `n` is in directory `n / FILES_PER_DIRECTORY`.
    pub files: Vec<SetFile>,
    /// The symbolic links.
    pub links: Vec<Handle>,
    /// Files that REMOVE may take: a directory, and the number in the name.
    pub spares: VecDeque<(u32, u64)>,
    /// The number in the name of the next created file.
    pub next_spare: u64,
}

impl FileSet {
    /// The size of file `n`, which follows from its number.
    #[must_use]
    pub fn planned_bytes(n: u32) -> u32 {
        draw_file_bytes(&mut SplitMix64::new(0x5f5_0097 ^ (u64::from(n) << 20)))
    }

    /// The name of file `n`.
    #[must_use]
    pub fn file_name(n: u32) -> String {
        format!("f{n:07}")
    }

    /// The name of a file that CREATE makes.
    #[must_use]
    pub fn spare_name(number: u64) -> String {
        format!("s{number:010}")
    }

    /// Whether this many files have one more link than one file fewer.
    #[must_use]
    pub fn has_link(n: u32) -> bool {
        n.is_multiple_of(FILES_PER_LINK)
    }

    /// Bytes of all files as they were made.
    #[must_use]
    pub fn planned_sum(&self) -> u64 {
        let planned = |file: &SetFile| u64::from(file.planned_bytes);
        self.files.iter().map(planned).sum()
    }

    /// Draws a file: mostly a hot one.
    pub fn draw_file(&self, rng: &mut SplitMix64) -> u32 {
        let files = (self.files.len() as u64).max(1);
        let hot = files.div_ceil(HOT_ONE_IN);
        match rng.below(100) < HOT_PERCENT {
            true => (rng.below(hot) * HOT_ONE_IN) as u32,
            false => rng.below(files) as u32,
        }
    }

    /// A set with made-up handles.
    #[cfg(test)]
    pub(crate) fn made_up(files: u32) -> FileSet {
        let handle = |n: u32| Handle(n.to_be_bytes().repeat(8));
        let file = |n| SetFile {
            handle: handle(n),
            planned_bytes: FileSet::planned_bytes(n),
            length_bytes: FileSet::planned_bytes(n),
        };
        FileSet {
            root: Some(handle(1 << 31)),
            directories: (0..files.div_ceil(FILES_PER_DIRECTORY))
                .map(handle)
                .collect(),
            files: (0..files).map(file).collect(),
            links: vec![handle(1 << 30)],
            spares: (0..100).map(|number| (0, number)).collect(),
            next_spare: 100,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hot_tenth_takes_nearly_all_accesses() {
        let set = FileSet::made_up(3000);
        let mut rng = SplitMix64::new(9);
        let mut counts = vec![0u32; 3000];
        (0..200_000).for_each(|_| counts[set.draw_file(&mut rng) as usize] += 1);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let hot: u32 = counts[..300].iter().sum();
        assert!((197_000..199_500).contains(&hot), "{hot}");
        assert!(counts[1000..].iter().any(|count| *count > 0));
    }

    #[test]
    fn set_grows_with_the_load_up_to_its_room() {
        let scale = FileSetScale::with_room(40.0, 1 << 30);
        assert_eq!(scale.files_at(1.0), 300);
        assert_eq!(scale.files_at(100.0), 4000);
        let most = scale.files_at(1e9);
        assert_eq!(most, scale.files_max);
        assert!(u64::from(most) * FILE_BYTES_MEAN < 1 << 29);
    }

    #[test]
    fn planned_sizes_follow_from_the_number() {
        let sum = |count| {
            (0..count)
                .map(|n| u64::from(FileSet::planned_bytes(n)))
                .sum()
        };
        let (sum, count): (u64, u64) = (sum(20_000), 20_000);
        let mean = sum / count;
        assert!(mean.abs_diff(FILE_BYTES_MEAN) < 3000, "{mean}");
    }
}
