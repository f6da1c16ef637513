//! A tree of files like a program's sources, the same in each run, and its archive.

use super::PROGRAM_TIME_MAX;
use crate::error::BenchError;
use crate::load::Rng;
use crate::process::{ChildProcess, command_killed_with_thread};
use std::fs;
use std::path::{Path, PathBuf};

/// Files of a directory.
const FILES_PER_DIRECTORY: u32 = 15;
/// Subdirectories of a directory.
const SUBDIRECTORIES: u32 = 4;
/// Least bytes of a file.
const FILE_BYTES_MIN: u64 = 200;
/// A file has at least [`FILE_BYTES_MIN`] bytes, doubled up to so many times less one, and less than twice that.
const DOUBLINGS: u64 = 8;
/// Bytes of a line of text, at least.
const LINE_BYTES: usize = 60;
const SEED: u64 = 4650;
/// The words of the files.
const WORDS: [&str; 12] = [
    "let", "file", "match", "return", "index", "struct", "buffer", "size", "option", "table", "of",
    "length",
];

/// A file of the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TreeFile {
    path: PathBuf,
    bytes: usize,
}

/// The files in the order of their directories.
fn tree_files(count: u32) -> Vec<TreeFile> {
    let mut random = Rng::new(SEED);
    let file = |at: u32| {
        let least = FILE_BYTES_MIN << random.below(DOUBLINGS);
        TreeFile {
            path: directory_path(at / FILES_PER_DIRECTORY).join(format!("source-{at}.c")),
            bytes: (least + random.below(least)) as usize,
        }
    };
    (0..count).map(file).collect()
}

/// The path of a directory by its number: directory 0 is the root.
fn directory_path(at: u32) -> PathBuf {
    match at {
        0 => PathBuf::from("tree"),
        at => directory_path((at - 1) / SUBDIRECTORIES).join(format!("module-{at}")),
    }
}

/// Lines of words.
fn text(bytes: usize, random: &mut Rng) -> String {
    let mut text = String::with_capacity(bytes + LINE_BYTES);
    let mut line_start = 0;
    while text.len() < bytes {
        text.push_str(WORDS[random.below(WORDS.len() as u64) as usize]);
        let is_full = text.len() - line_start >= LINE_BYTES;
        text.push(if is_full { '\n' } else { ' ' });
        if is_full {
            line_start = text.len();
        }
    }
    text.truncate(bytes);
    text
}

fn write_tree(dir: &Path, count: u32) -> std::io::Result<()> {
    let mut random = Rng::new(SEED);
    for file in tree_files(count) {
        let path = dir.join(&file.path);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(path, text(file.bytes, &mut random))?;
    }
    Ok(())
}

/// Makes the archive of a tree in a directory, and returns its path. The archive holds the directory `tree`.
pub(super) fn make_archive(dir: &Path, count: u32) -> Result<PathBuf, BenchError> {
    let cannot = || BenchError::system(format!("make a tree of files in {}", dir.display()));
    write_tree(dir, count).map_err(cannot())?;
    let archive = dir.join("tree.tar");
    let mut command = command_killed_with_thread("tar");
    command
        .args(["--sort=name", "--create", "--file"])
        .arg(&archive)
        .arg("--directory")
        .arg(dir)
        .arg("tree");
    ChildProcess::start("tar", command)?.wait_for_success(PROGRAM_TIME_MAX)?;
    fs::remove_dir_all(dir.join("tree")).map_err(cannot())?;
    Ok(archive)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::everyday::ABSENT_TEXT;

    #[test]
    fn tree_is_the_same_in_each_run() {
        assert_eq!(tree_files(100), tree_files(100));
        let [one, other] = [(); 2].map(|()| text(5000, &mut Rng::new(SEED)));
        assert_eq!(one, other);
        assert_eq!(one.len(), 5000);
        assert!(!one.contains(ABSENT_TEXT));
        assert!(one.lines().all(|line| line.len() < LINE_BYTES + 10));
    }

    #[test]
    fn tree_has_sizes_and_depths_of_sources() {
        let files = tree_files(4650);
        let bytes: Vec<usize> = files.iter().map(|file| file.bytes).collect();
        let mean = bytes.iter().sum::<usize>() / bytes.len();
        assert!((8_000..12_000).contains(&mean), "{mean}");
        assert!(bytes.iter().all(|bytes| (200..51_200).contains(bytes)));
        let depth = |file: &TreeFile| file.path.components().count();
        let deepest = files.iter().map(depth).max();
        assert_eq!(deepest, Some(6));
        let mut paths: Vec<&PathBuf> = files.iter().map(|file| &file.path).collect();
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), 4650);
    }

    #[test]
    fn archive_replaces_the_tree() {
        let dir = tempfile::tempdir().expect("made");
        let archive = make_archive(dir.path(), 20).expect("made");
        let left: Vec<PathBuf> = fs::read_dir(dir.path())
            .expect("there")
            .map(|entry| entry.expect("read").path())
            .collect();
        assert_eq!(left, std::slice::from_ref(&archive));
        assert!(fs::metadata(archive).expect("there").len() > 20 * 512);
    }
}
