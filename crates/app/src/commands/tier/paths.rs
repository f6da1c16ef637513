//! The tier of files and directories: an extended attribute, which the mount sends as a hint with each request for
//! their data.

use super::TierArg;
use crate::args::Output;
use crate::output;
use anyhow::{Context, bail};
use pagemesh_base::mounts::list_mounts;
use rustix::fs::{
    Advice, OFlags, SeekFrom, XattrFlags, fadvise, fgetxattr, fremovexattr, fsetxattr, getxattr,
    removexattr, seek, setxattr,
};
use rustix::io::Errno;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{ErrorKind, IsTerminal, Read, stderr};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The extended attribute of a file system.
const ATTRIBUTE: &str = "user.pagemesh.tier";
/// Bytes of one read.
const READ_BYTES: usize = 1 << 20;
/// The most bytes of the attribute's value.
const VALUE_BYTES_MAX: usize = 16;
/// Entries between two lines of progress.
const PROGRESS_ENTRIES: u64 = 1000;
/// Bytes between two lines of progress.
const PROGRESS_BYTES: u64 = 1 << 30;
/// A value that no tier has.
const NO_TIER: &[u8] = b"?";

/// The path in an argument that may be the name of a volume: a path has a slash.
pub(super) fn path_of(target: &str) -> Option<&Path> {
    target.contains('/').then(|| Path::new(target))
}

/// The scope of a change besides the path itself.
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
    /// Entries below that could not be changed.
    failed_entries: u64,
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
    let path = check_mount(path)?;
    check_release(&path)?;
    let device = rustix::fs::stat(&path)?.st_dev;
    let has_left_out = !scope.is_recursive && path.is_dir() && !entries(&path)?.is_empty();
    let mut change = PathChange {
        path: path.clone(),
        tier: name(tier),
        entries: 0,
        read_bytes: 0,
        failed_entries: 0,
        has_unchanged_entries: has_left_out,
    };
    let mut waiting = vec![path.clone()];
    while let Some(entry) = waiting.pop() {
        let result = change_entry(&entry, device, tier, scope, &mut change);
        match result {
            Ok(found) => waiting.extend(found),
            Err(cause) if entry == path => return Err(cause),
            Err(cause) => {
                eprintln!("{cause:#}");
                change.failed_entries += 1;
            }
        }
    }
    output::print(output, &change, || change_text(&change))?;
    match change.failed_entries {
        0 => Ok(()),
        failed => {
            bail!("{failed} entries keep their tier, for the causes above; repeat the command")
        }
    }
}

/// Changes one entry, unless it has gone, is neither a file nor a directory, or is of another file system. Returns the
/// entries below that are still to be changed.
fn change_entry(
    path: &Path,
    device: u64,
    tier: TierArg,
    scope: Scope,
    change: &mut PathChange,
) -> anyhow::Result<Vec<PathBuf>> {
    // The names may change meanwhile, and lead elsewhere.
    let mut options = OpenOptions::new();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    options.read(true).custom_flags(flags.bits() as i32);
    let is_ours = |found: &Metadata| found.dev() == device && (found.is_file() || found.is_dir());
    let opened = std::fs::symlink_metadata(path).and_then(|found| {
        let file = is_ours(&found).then(|| options.open(path));
        file.transpose()
    });
    let file = match opened {
        Err(cause) if cause.kind() == ErrorKind::NotFound => None,
        opened => opened.with_context(|| format!("cannot open {}", path.display()))?,
    };
    let Some(file) = file else {
        return Ok(Vec::new());
    };
    let found = file.metadata()?;
    if !is_ours(&found) {
        return Ok(Vec::new());
    }
    let before = set(&file, path, tier)?;
    change.entries += 1;
    // Marks of pages that were never pinned need no end.
    let needs_load = tier == TierArg::Memory || before == Some(TierArg::Memory);
    if found.is_file() && scope.loads && needs_load {
        load(file, &mut change.read_bytes).with_context(|| {
            format!(
                "the tier of {} is set, but its data cannot be read; repeat the command, or use --no-load",
                path.display()
            )
        })?;
    }
    if stderr().is_terminal() && change.entries.is_multiple_of(PROGRESS_ENTRIES) {
        show_progress(change);
    }
    match found.is_dir() && scope.is_recursive {
        true => entries(path),
        false => Ok(Vec::new()),
    }
}

fn show_progress(change: &PathChange) {
    eprintln!(
        "{} entries, {} MiB read",
        change.entries,
        change.read_bytes >> 20
    );
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
        let path = check_mount(path)?;
        let tier = get(&path)?;
        tiers.push(PathTier { path, tier });
    }
    output::print(output, &tiers, || {
        let lines = tiers
            .iter()
            .map(|it| format!("{}  {}", it.tier, it.path.display()));
        lines.collect::<Vec<_>>().join("\n")
    })
}

/// The path without symbolic links. Refuses one outside the file systems of pagemesh: another one would store the attribute,
/// and not obey it.
fn check_mount(path: &Path) -> anyhow::Result<PathBuf> {
    let full = path
        .canonicalize()
        .with_context(|| format!("cannot find {}", path.display()))?;
    let mounts = list_mounts().context("cannot read the mounts")?;
    let points: BTreeSet<PathBuf> = mounts.into_iter().map(|it| it.dir).collect();
    let of_ours = full.ancestors().find(|it| points.contains(*it));
    let device = |path: &Path| rustix::fs::stat(path).map(|it| it.st_dev).ok();
    match of_ours {
        Some(point) if device(point) == device(&full) => Ok(full),
        _ => bail!(
            "{} is in no file system of pagemesh; mount one, or name a volume, whose name has no slash",
            path.display()
        ),
    }
}

/// Refuses a mount of an earlier release, which would store any value as an attribute without a meaning.
fn check_release(path: &Path) -> anyhow::Result<()> {
    match setxattr(path, ATTRIBUTE, NO_TIER, XattrFlags::empty()) {
        Err(Errno::INVAL) => Ok(()),
        Ok(()) => {
            removexattr(path, ATTRIBUTE)?;
            bail!(
                "the mount of {} is of an earlier release, without tiers of files; mount it again",
                path.display()
            )
        }
        Err(cause) => Err(cause).with_context(|| cannot_set(path)),
    }
}

fn cannot_set(path: &Path) -> String {
    format!(
        "cannot set {ATTRIBUTE} of {}; the owner of a file may set it, in a file system that is mounted for writing",
        path.display()
    )
}

/// Sets the attribute, and returns its value before.
fn set(file: &File, path: &Path, tier: TierArg) -> anyhow::Result<Option<TierArg>> {
    let mut value = [0; VALUE_BYTES_MAX];
    let before = match fgetxattr(file, ATTRIBUTE, &mut value[..]) {
        Ok(len) => [TierArg::Memory, TierArg::Flash]
            .into_iter()
            .find(|it| name(*it).as_bytes() == &value[..len]),
        Err(_) => None,
    };
    let done = match tier {
        TierArg::Auto => match fremovexattr(file, ATTRIBUTE) {
            Err(Errno::NODATA) => Ok(()),
            done => done,
        },
        TierArg::Memory | TierArg::Flash => {
            fsetxattr(file, ATTRIBUTE, name(tier).as_bytes(), XattrFlags::empty())
        }
    };
    done.with_context(|| cannot_set(path))?;
    Ok(before)
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

/// Reads the data of a file, past its holes, through the mount. Pages that the kernel has are read again, because the
/// bricks would not hear of them.
fn load(mut file: File, total: &mut u64) -> anyhow::Result<()> {
    let shows_progress = stderr().is_terminal();
    fadvise(&file, 0, None, Advice::DontNeed)?;
    let mut bytes = vec![0; READ_BYTES];
    let mut at = 0;
    loop {
        match seek(&file, SeekFrom::Data(at)) {
            Ok(data) => at = data,
            Err(Errno::NXIO) => return Ok(()),
            // The mount does not list holes.
            Err(Errno::INVAL) => {}
            Err(cause) => return Err(cause.into()),
        }
        let read = file.read(&mut bytes)? as u64;
        if read == 0 {
            return Ok(());
        }
        at += read;
        *total += read;
        if shows_progress && *total % PROGRESS_BYTES < read {
            eprintln!("{} MiB read", *total >> 20);
        }
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
