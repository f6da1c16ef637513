//! Steps of one program on many files, and many small reads of one file.
//!
//! A step calls the C library through `std::fs`, so that it uses the direct path under `pagemesh exec`. It runs in the
//! current directory of its process, and measures itself.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Files of a directory.
pub(super) const FILES_PER_DIRECTORY: u32 = 500;
/// Bytes of a file.
const FILE_BYTES: usize = 4096;
/// Directory of the files.
const FILES_DIR: &str = "files";
/// The file of small reads.
pub(super) const SMALL_READS_FILE: &str = "read-in-small-pieces";
/// Its bytes: ext4 takes about a second.
pub(super) const SMALL_READS_BYTES: u64 = 16 << 20;
/// Bytes of a small read.
const SMALL_READ_BYTES: usize = 4;

/// A step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileStep {
    /// Create files, each with open(2), write(2) and close(2).
    Create,
    /// Open each file, read it whole, and close it.
    Read,
    /// Call lstat(2) on each file.
    Stat,
    /// Rename each file within its directory.
    Rename,
    /// Read one file, 4 bytes with each read(2).
    SmallReads,
}

const STEPS: [FileStep; 5] = [
    FileStep::Create,
    FileStep::Read,
    FileStep::Stat,
    FileStep::Rename,
    FileStep::SmallReads,
];

impl FileStep {
    /// The names of all steps.
    #[must_use]
    pub fn ids() -> Vec<&'static str> {
        STEPS.iter().map(|step| step.id()).collect()
    }

    /// The step of this name.
    #[must_use]
    pub fn from_id(id: &str) -> Option<FileStep> {
        STEPS.into_iter().find(|step| step.id() == id)
    }

    /// Its name on the command line.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            FileStep::Create => "create",
            FileStep::Read => "read",
            FileStep::Stat => "stat",
            FileStep::Rename => "rename",
            FileStep::SmallReads => "small-reads",
        }
    }
}

/// Runs a step below the directory, and returns its time.
///
/// # Errors
/// If a call fails, or a file has another size.
pub fn run_step(step: FileStep, dir: &Path, files: u32) -> io::Result<Duration> {
    let names = FileNames::new(&dir.join(FILES_DIR), files);
    if step == FileStep::Create {
        names.make_directories()?;
    }
    let start = Instant::now();
    match step {
        FileStep::Create => names.create()?,
        FileStep::Read => names.read()?,
        FileStep::Stat => names.stat()?,
        FileStep::Rename => names.rename()?,
        FileStep::SmallReads => read_in_small_pieces(&dir.join(SMALL_READS_FILE))?,
    }
    Ok(start.elapsed())
}

/// The paths of all files, in the order of creation.
struct FileNames {
    directories: Vec<PathBuf>,
    files: Vec<PathBuf>,
    /// Their paths after the step that renames.
    renamed: Vec<PathBuf>,
}

impl FileNames {
    fn new(root: &Path, files: u32) -> FileNames {
        let directory = |at: u32| root.join(format!("directory-{at}"));
        let file = |prefix: &str, at: u32| {
            directory(at / FILES_PER_DIRECTORY).join(format!("{prefix}-{at}"))
        };
        FileNames {
            directories: (0..files.div_ceil(FILES_PER_DIRECTORY))
                .map(directory)
                .collect(),
            files: (0..files).map(|at| file("file", at)).collect(),
            renamed: (0..files).map(|at| file("renamed", at)).collect(),
        }
    }

    fn make_directories(&self) -> io::Result<()> {
        self.directories
            .iter()
            .try_for_each(std::fs::create_dir_all)
    }

    fn create(&self) -> io::Result<()> {
        let bytes = [b'x'; FILE_BYTES];
        for path in &self.files {
            File::create_new(path)?.write_all(&bytes)?;
        }
        Ok(())
    }

    fn read(&self) -> io::Result<()> {
        for path in &self.files {
            check_size(path, std::fs::read(path)?.len() as u64, FILE_BYTES as u64)?;
        }
        Ok(())
    }

    fn stat(&self) -> io::Result<()> {
        for path in &self.files {
            let bytes = std::fs::symlink_metadata(path)?.len();
            check_size(path, bytes, FILE_BYTES as u64)?;
        }
        Ok(())
    }

    fn rename(&self) -> io::Result<()> {
        let pairs = self.files.iter().zip(&self.renamed);
        for (path, renamed) in pairs {
            std::fs::rename(path, renamed)?;
        }
        Ok(())
    }
}

fn check_size(path: &Path, bytes: u64, expected: u64) -> io::Result<()> {
    match bytes == expected {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{} has {bytes} bytes and not {expected}",
            path.display()
        ))),
    }
}

/// Writes the file of small reads.
pub(super) fn write_small_reads_file(path: &Path) -> io::Result<()> {
    let block = [b'x'; 1 << 16];
    let mut file = File::create_new(path)?;
    for _ in 0..SMALL_READS_BYTES / block.len() as u64 {
        file.write_all(&block)?;
    }
    Ok(())
}

fn read_in_small_pieces(path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut piece = [0; SMALL_READ_BYTES];
    let mut bytes = 0;
    loop {
        match file.read(&mut piece)? {
            0 => return check_size(path, bytes, SMALL_READS_BYTES),
            read => bytes += read as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_find_the_files_of_the_first_one() {
        let dir = tempfile::tempdir().expect("made");
        let run = |step| run_step(step, dir.path(), FILES_PER_DIRECTORY + 1);
        for step in &STEPS[..4] {
            run(*step).expect("its files are there");
        }
        let missing = run(FileStep::Read).expect_err("they have other names");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let last = dir
            .path()
            .join(format!("files/directory-1/renamed-{FILES_PER_DIRECTORY}"));
        assert_eq!(std::fs::metadata(last).expect("renamed").len(), 4096);
    }

    #[test]
    fn shortened_file_ends_the_step() {
        let dir = tempfile::tempdir().expect("made");
        run_step(FileStep::Create, dir.path(), 3).expect("created");
        std::fs::write(dir.path().join("files/directory-0/file-1"), "short").expect("written");
        for step in [FileStep::Read, FileStep::Stat] {
            let error = run_step(step, dir.path(), 3).expect_err("another size");
            assert!(error.to_string().contains("file-1 has 5 bytes"), "{error}");
        }
    }

    #[test]
    fn small_reads_need_the_whole_file() {
        let dir = tempfile::tempdir().expect("made");
        let path = dir.path().join(SMALL_READS_FILE);
        std::fs::write(&path, "12345").expect("written");
        let error = run_step(FileStep::SmallReads, dir.path(), 1).expect_err("too short");
        assert!(error.to_string().contains("has 5 bytes"), "{error}");
    }

    #[test]
    fn steps_are_found_by_their_names() {
        for step in STEPS {
            assert_eq!(FileStep::from_id(step.id()), Some(step));
        }
        assert_eq!(FileStep::ids().len(), STEPS.len());
    }
}
