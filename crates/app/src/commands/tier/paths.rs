//! The tier of files and directories: an extended attribute, which the mount sends as a hint with each request for
//! their data.

use super::TierArg;
use crate::args::Output;
use crate::output;
use anyhow::{Context, bail};
use pagemesh_base::mounts::list_mounts;
use rustix::fs::{Advice, SeekFrom, XattrFlags, fadvise, getxattr, removexattr, seek, setxattr};
use rustix::io::Errno;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{IsTerminal, Read, stderr};
use std::path::{Path, PathBuf};

/// The extended attribute of a file system.
const ATTRIBUTE: &str = "user.pagemesh.tier";
/// Bytes of one read.
const READ_BYTES: usize = 1 << 20;
/// The most bytes of the attribute's value.
const VALUE_BYTES_MAX: usize = 16;
/// Entries between two lines of progress.
const PROGRESS_ENTRIES: u64 = 1000;

/// The path in an argument that may be the name of a volume: a path has a slash.
pub(super) fn path_of(target: &str) -> Option<&Path> {
    target.contains('/').then(|| Path::new(target))
}

/// What a change applies to besides the path itself.
#[derive(Clone, Copy)]
pub(super) struct Scope {
    pub(super) is_recursive: bool,
    /// Whether data is read, so that bricks learn the hint of its pages at once.
    pub(super) loads: bool,
}

/// The result of a change.
#[derive(Serialize)]
struct PathChange {
    path: PathBuf,
    tier: &'static str,
    /// Files and directories with the attribute set.
    entries: u64,
    /// Bytes of data that were read.
    read_bytes: u64,
    #[serde(skip)]
    has_unchanged_entries: bool,
}

/// The tier of one path.
#[derive(Serialize)]
struct PathTier {
    path: PathBuf,
    tier: String,
}

fn name(tier: TierArg) -> &'static str {
    match tier {
        TierArg::Auto => "auto",
        TierArg::Memory => "memory",
        TierArg::Flash => "flash",
    }
}

/// Sets the tier of a file or directory.
pub(super) fn change(
    path: &Path,
    tier: TierArg,
    scope: Scope,
    output: Output,
) -> anyhow::Result<()> {
    check_mount(path)?;
    let mut change = PathChange {
        path: path.to_owned(),
        tier: name(tier),
        entries: 0,
        read_bytes: 0,
        has_unchanged_entries: !scope.is_recursive && path.is_dir() && has_entries(path)?,
    };
    let shows_progress = stderr().is_terminal();
    let mut waiting = vec![path.to_owned()];
    while let Some(path) = waiting.pop() {
        let found = std::fs::symlink_metadata(&path);
        let kind = found
            .with_context(|| format!("cannot look at {}", path.display()))?
            .file_type();
        if !kind.is_file() && !kind.is_dir() {
            continue;
        }
        set(&path, tier)?;
        change.entries += 1;
        if kind.is_dir() && scope.is_recursive {
            waiting.extend(entries(&path)?);
        }
        if kind.is_file() && scope.loads {
            let read = load(&path);
            change.read_bytes += read.with_context(|| {
                format!(
                    "the tier of {} is set, but its data cannot be read; repeat the command, or use --no-load",
                    path.display()
                )
            })?;
        }
        if shows_progress && change.entries.is_multiple_of(PROGRESS_ENTRIES) {
            eprintln!(
                "{} entries, {} MiB read",
                change.entries,
                change.read_bytes >> 20
            );
        }
    }
    output::print(output, &change, || change_text(&change))
}

fn change_text(change: &PathChange) -> String {
    let mut text = format!(
        "the tier of {} is {} now: {} files and directories, {} bytes read",
        change.path.display(),
        change.tier,
        change.entries,
        change.read_bytes
    );
    if change.has_unchanged_entries {
        text.push_str("\nonly new entries get it; use --recursive for those that exist");
    }
    text
}

/// Shows the tiers of files and directories.
pub(super) fn stat(paths: &[&Path], output: Output) -> anyhow::Result<()> {
    let mut tiers = Vec::with_capacity(paths.len());
    for path in paths {
        check_mount(path)?;
        let tier = get(path)?;
        tiers.push(PathTier {
            path: path.to_path_buf(),
            tier,
        });
    }
    output::print(output, &tiers, || {
        let lines = tiers
            .iter()
            .map(|it| format!("{}  {}", it.tier, it.path.display()));
        lines.collect::<Vec<_>>().join("\n")
    })
}

/// Refuses a path outside the file systems of pagemesh: another one would store the attribute, and not obey it.
fn check_mount(path: &Path) -> anyhow::Result<()> {
    let full = path
        .canonicalize()
        .with_context(|| format!("cannot find {}", path.display()))?;
    let mounts = list_mounts().context("cannot read the mounts")?;
    let points: BTreeSet<PathBuf> = mounts.into_iter().map(|it| it.dir).collect();
    let of_ours = full.ancestors().find(|it| points.contains(*it));
    let device = |path: &Path| rustix::fs::stat(path).map(|it| it.st_dev).ok();
    match of_ours {
        Some(point) if device(point) == device(&full) => Ok(()),
        _ => bail!(
            "{} is in no file system of pagemesh; mount one, or name a volume, whose name has no slash",
            path.display()
        ),
    }
}

fn set(path: &Path, tier: TierArg) -> anyhow::Result<()> {
    let done = match tier {
        TierArg::Auto => match removexattr(path, ATTRIBUTE) {
            Err(Errno::NODATA) => Ok(()),
            done => done,
        },
        TierArg::Memory | TierArg::Flash => {
            setxattr(path, ATTRIBUTE, name(tier).as_bytes(), XattrFlags::empty())
        }
    };
    done.with_context(|| {
        format!(
            "cannot set {ATTRIBUTE} of {}; update the mount if it is of an earlier release",
            path.display()
        )
    })
}

fn get(path: &Path) -> anyhow::Result<String> {
    let mut value = [0; VALUE_BYTES_MAX];
    match getxattr(path, ATTRIBUTE, &mut value[..]) {
        Ok(len) => Ok(String::from_utf8_lossy(&value[..len]).into_owned()),
        Err(Errno::NODATA) => Ok(name(TierArg::Auto).to_owned()),
        Err(cause) => {
            Err(cause).with_context(|| format!("cannot read {ATTRIBUTE} of {}", path.display()))
        }
    }
}

fn entries(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let failed = || format!("cannot list {}", path.display());
    let listed = std::fs::read_dir(path).with_context(failed)?;
    let paths = listed.map(|entry| Ok(entry?.path()));
    paths.collect::<std::io::Result<_>>().with_context(failed)
}

fn has_entries(path: &Path) -> anyhow::Result<bool> {
    Ok(!entries(path)?.is_empty())
}

/// Reads the data of a file, past its holes, through the mount. Pages that the kernel has are read again, because the
/// bricks would not hear of them.
fn load(path: &Path) -> anyhow::Result<u64> {
    let mut file = File::open(path)?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    let mut bytes = vec![0; READ_BYTES];
    let (mut at, mut total) = (0, 0);
    loop {
        match seek(&file, SeekFrom::Data(at)) {
            Ok(data) => at = data,
            Err(Errno::NXIO) => return Ok(total),
            // The mount does not list holes.
            Err(Errno::INVAL) => {}
            Err(cause) => return Err(cause.into()),
        }
        let read = file.read(&mut bytes)? as u64;
        if read == 0 {
            return Ok(total);
        }
        at += read;
        total += read;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_with_slash_is_a_path() {
        assert_eq!(path_of("/mnt/db"), Some(Path::new("/mnt/db")));
        assert_eq!(path_of("./db"), Some(Path::new("./db")));
        assert_eq!(path_of("db"), None);
    }

    #[test]
    fn path_outside_mounts_is_refused() {
        let refused = check_mount(Path::new("/proc/self")).expect_err("not a mount of ours");
        assert!(refused.to_string().contains("no file system of pagemesh"));
    }
}
