//! `pagemesh fs restore`: copies a file or a directory of a mounted file system back from a snapshot.
//!
//! Invariant: the copy is made in a directory beside its place that nobody else can enter, reached by its descriptor, and renamed
//! when it is whole. So no other user sees it without its attributes, or leads it elsewhere.

use crate::args::Output;
use crate::output;
use anyhow::{Context, anyhow, bail, ensure};
use clap::Args;
use pagemesh_manage::snapshots::SnapshotName;
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, RenameFlags, SeekFrom, Timespec, Timestamps, Uid, XattrFlags,
    chownat, fstat, lgetxattr, llistxattr, lsetxattr, renameat_with, seek, utimensat,
};
use rustix::io::Errno;
use serde::Serialize;
use std::ffi::{CStr, OsString};
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The directory with the views of snapshots.
const SNAPSHOT_DIR: &str = ".snapshot";
/// Bytes of one read.
const PIECE_BYTES: usize = 1 << 20;
/// Bytes of the longest value of an extended attribute, and of all their names (xattr(7)).
const XATTR_BYTES_MAX: usize = 64 << 10;

/// Copy a file or a directory of a mounted file system back from a snapshot.
///
/// The newest snapshot that has it is used. Owner, mode, times and extended attributes are kept; a file with several names gets
/// a copy for each. Nothing is overwritten without `--force`.
#[derive(Args)]
pub struct RestoreArgs {
    /// File or directory in a mount. It may be deleted.
    pub path: PathBuf,
    /// Snapshot to take it from; the newest one that has it if missing.
    #[arg(long, value_name = "NAME")]
    pub from: Option<SnapshotName>,
    /// Where to put the copy; its own place if missing.
    #[arg(long, value_name = "PATH")]
    pub to: Option<PathBuf>,
    /// Replace an existing file. A directory is never replaced.
    #[arg(long)]
    pub force: bool,
    /// Output: a table for people or JSON for programs.
    #[arg(long, value_enum, default_value = "table")]
    pub output: Output,
}

/// The result, for programs.
#[derive(Serialize)]
struct Restored {
    path: PathBuf,
    snapshot: String,
    files: u64,
    bytes: u64,
}

/// Restores a file or a directory.
pub fn run(args: &RestoreArgs) -> anyhow::Result<()> {
    let path = std::path::absolute(&args.path)?;
    let to = match &args.to {
        Some(to) => std::path::absolute(to)?,
        None => path.clone(),
    };
    let (snapshot, source) = find(&path, args.from.as_ref())?;
    let existing = fs::symlink_metadata(&to).ok();
    if let Some(existing) = &existing {
        let shown = to.display();
        ensure!(
            args.force && !existing.is_dir(),
            "{shown} exists; move it away, name another place with --to, or replace a file with --force"
        );
    }
    let parent = to.parent().context("the root cannot be replaced")?;
    ensure!(
        parent.is_dir(),
        "the directory {} does not exist; restore that one, or name another place with --to",
        parent.display()
    );
    ensure!(to.file_name().is_some(), "the path has no name");
    let staging = PrivateDirectory::new(parent)?;
    let partial = staging.inside("copy");
    let mut copied = Copied::default();
    let done = copy(&source, &partial, &mut copied).and_then(|()| {
        let flags = match existing.is_some() {
            true => RenameFlags::empty(),
            false => RenameFlags::NOREPLACE,
        };
        renameat_with(CWD, &partial, CWD, &to, flags)
            .with_context(|| format!("cannot put the copy at {}", to.display()))
    });
    done?;
    let restored = Restored {
        path: to,
        snapshot,
        files: copied.files,
        bytes: copied.bytes,
    };
    output::print(args.output, &restored, || {
        let (shown, data) = (restored.path.display(), output::bytes(restored.bytes));
        format!(
            "restored {shown} from the snapshot {}: {} files, {data}",
            restored.snapshot, restored.files
        )
    })
}

/// A directory that its owner alone can enter. It is deleted with its content in the end.
struct PrivateDirectory {
    directory: tempfile::TempDir,
    opened: OwnedFd,
}

impl PrivateDirectory {
    fn new(parent: &Path) -> anyhow::Result<PrivateDirectory> {
        let cannot = || format!("cannot make a directory in {}", parent.display());
        let mut made = tempfile::Builder::new();
        let made = made
            .prefix(".restore-")
            .permissions(Permissions::from_mode(0o700));
        let directory = made.tempdir_in(parent);
        let directory = directory.with_context(cannot)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(directory.path(), flags, Mode::empty());
        let opened = opened.with_context(cannot)?;
        let found = fstat(&opened).with_context(cannot)?;
        // The owner of the parent may have put another directory in its place.
        let is_own = found.st_uid == rustix::process::geteuid().as_raw();
        ensure!(
            is_own && found.st_mode & 0o077 == 0,
            "another process has replaced {}",
            directory.path().display()
        );
        Ok(PrivateDirectory { directory, opened })
    }

    /// A path in the directory, wherever it has been moved.
    fn inside(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.opened.as_raw_fd())).join(name)
    }
}

impl Drop for PrivateDirectory {
    fn drop(&mut self) {
        if self.directory.path().exists() {
            remove(&self.inside("copy"));
        }
    }
}

/// Removes the rest of a copy.
fn remove(partial: &Path) {
    let removed = match fs::symlink_metadata(partial) {
        Err(_) => return,
        Ok(found) if found.is_dir() => fs::remove_dir_all(partial),
        Ok(_) => fs::remove_file(partial),
    };
    if let Err(cause) = removed {
        eprintln!("warning: {} is left over: {cause}", partial.display());
    }
}

/// The snapshot that has the path, and the path in it.
fn find(path: &Path, from: Option<&SnapshotName>) -> anyhow::Result<(String, PathBuf)> {
    // The directory itself may be deleted, too.
    let parents = path.ancestors().skip(1);
    let existing = parents.into_iter().find(|parent| parent.is_dir());
    let existing = existing.ok_or_else(|| anyhow!("{} has no directory", path.display()))?;
    let views = existing.join(SNAPSHOT_DIR);
    let list = || -> io::Result<Vec<OsString>> {
        let entries = fs::read_dir(&views)?;
        entries
            .map(|entry| entry.map(|it| it.file_name()))
            .collect()
    };
    // The newest come first.
    let names = match from {
        Some(name) => vec![OsString::from(name.as_str())],
        None => list().with_context(|| {
            format!(
                "{} has no snapshots; name a path in a mount of pagemesh",
                existing.display()
            )
        })?,
    };
    for name in &names {
        // A directory that was made again has no earlier views. Those of its parents have the former one.
        for above in existing.ancestors() {
            let Ok(rest) = path.strip_prefix(above) else {
                break;
            };
            let view = above.join(SNAPSHOT_DIR).join(name);
            if !view.is_dir() {
                continue;
            }
            let found = view.join(rest);
            if fs::symlink_metadata(&found).is_ok() {
                return Ok((name.to_string_lossy().into_owned(), found));
            }
        }
    }
    match from {
        Some(name) => bail!("the snapshot {name} does not have {}", path.display()),
        None => bail!("none of {} snapshots has {}", names.len(), path.display()),
    }
}

#[derive(Default)]
struct Copied {
    files: u64,
    bytes: u64,
}

/// Copies a file, or a directory with all in it. Directories get their attributes after their entries.
fn copy(from: &Path, to: &Path, copied: &mut Copied) -> anyhow::Result<()> {
    let mut directories = Vec::new();
    let mut left = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = left.pop() {
        let what = || format!("cannot copy {}", from.display());
        let found = fs::symlink_metadata(&from).with_context(what)?;
        copied.files += 1;
        if found.is_dir() {
            fs::create_dir(&to).with_context(what)?;
            for entry in fs::read_dir(&from).with_context(what)? {
                let name = entry.with_context(what)?.file_name();
                left.push((from.join(&name), to.join(&name)));
            }
            directories.push((from, to, found));
            continue;
        }
        copy_one(&from, &to, &found, copied).with_context(what)?;
        keep_attributes(&from, &to, &found).with_context(what)?;
    }
    for (from, to, found) in directories.iter().rev() {
        keep_attributes(from, to, found)
            .with_context(|| format!("cannot keep the attributes of {}", from.display()))?;
    }
    Ok(())
}

fn copy_one(from: &Path, to: &Path, found: &Metadata, copied: &mut Copied) -> anyhow::Result<()> {
    let kind = found.file_type();
    if kind.is_symlink() {
        std::os::unix::fs::symlink(fs::read_link(from)?, to)?;
    } else if kind.is_file() {
        copied.bytes += copy_data(&open_source(from)?, &File::create_new(to)?, found.len())?;
    } else {
        let kind = rustix::fs::FileType::from_raw_mode(found.mode());
        let mode = Mode::from_raw_mode(found.mode());
        rustix::fs::mknodat(CWD, to, kind, mode, found.rdev())?;
    }
    Ok(())
}

/// Opens a file that is no link.
fn open_source(from: &Path) -> anyhow::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(from, flags, Mode::empty())?))
}

/// Copies the data of a file, and leaves its holes out.
fn copy_data(from: &File, to: &File, len: u64) -> anyhow::Result<u64> {
    to.set_len(len)?;
    let (mut at, mut copied) = (0, 0);
    let mut piece = vec![0; PIECE_BYTES];
    while at < len {
        at = match seek(from, SeekFrom::Data(at)) {
            Ok(at) => at,
            Err(Errno::NXIO) => break,
            Err(cause) => return Err(cause.into()),
        };
        let end = seek(from, SeekFrom::Hole(at))?;
        while at < end {
            let most = PIECE_BYTES.min((end - at) as usize);
            let count = from.read_at(&mut piece[..most], at)?;
            ensure!(count > 0, "the file ends early");
            to.write_all_at(&piece[..count], at)?;
            at += count as u64;
            copied += count as u64;
        }
    }
    Ok(copied)
}

/// Gives a copy the owner, extended attributes, mode and times of its original.
fn keep_attributes(from: &Path, to: &Path, found: &Metadata) -> anyhow::Result<()> {
    let (owner, group) = (Uid::from_raw(found.uid()), Gid::from_raw(found.gid()));
    match chownat(CWD, to, Some(owner), Some(group), AtFlags::SYMLINK_NOFOLLOW) {
        // An ordinary user restores own files.
        Err(Errno::PERM) if found.uid() != rustix::process::geteuid().as_raw() => {}
        changed => changed?,
    }
    keep_xattrs(from, to)?;
    if !found.is_symlink() {
        fs::set_permissions(to, Permissions::from_mode(found.mode() & 0o7777))?;
    }
    let time = |tv_sec, nsec: i64| Timespec {
        tv_sec,
        tv_nsec: nsec as _,
    };
    let times = Timestamps {
        last_access: time(found.atime(), found.atime_nsec()),
        last_modification: time(found.mtime(), found.mtime_nsec()),
    };
    utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}

fn keep_xattrs(from: &Path, to: &Path) -> anyhow::Result<()> {
    let mut names = vec![0u8; XATTR_BYTES_MAX];
    let count = llistxattr(from, &mut names)?;
    for name in names[..count].split_inclusive(|byte| *byte == 0) {
        let name = CStr::from_bytes_with_nul(name)?;
        let mut value = vec![0u8; XATTR_BYTES_MAX];
        let count = lgetxattr(from, name, &mut value)?;
        match lsetxattr(to, name, &value[..count], XattrFlags::empty()) {
            // Only root sets trusted and security attributes.
            Err(Errno::PERM) => {}
            set => set?,
        }
    }
    Ok(())
}
