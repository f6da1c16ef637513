//! The directory of a cluster that `up` runs: its lock, its pools, and its removal.
//!
//! Pools in memory are in a directory on a tmpfs. The link `pools` points to that directory, and
//! the file `cluster` in it names the cluster's directory.
//!
//! Invariant: a removal deletes only files that `up` creates, and a directory only if it is then
//! empty.

use crate::output::bytes;
use anyhow::{Context, bail};
use pagemesh_manage::ADMIN_TOKEN_FILE;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name prefix of each directory with pools in memory.
const MEMORY_PREFIX: &str = "pagemesh-";
/// The file in such a directory with the path of the cluster's directory.
const BACK_REFERENCE: &str = "cluster";
/// Limit of the wait for locks of processes that have ended.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);
/// Interval of looks at these locks.
const RELEASE_PAUSE: Duration = Duration::from_millis(10);

/// Locks the directory for one `up`.
///
/// # Errors
/// When another `up` has locked it.
pub fn lock(dir: &Path) -> anyhow::Result<File> {
    match try_lock(dir)? {
        Some(lock) => Ok(lock),
        None => bail!(
            "another pagemesh up runs on {}; end it, or name another directory with --dir",
            dir.display()
        ),
    }
}

/// Locks the directory; `None` if an `up` has locked it.
pub fn try_lock(dir: &Path) -> anyhow::Result<Option<File>> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(dir.join("lock"))
        .with_context(|| format!("cannot write to {}", dir.display()))?;
    Ok(try_lock_file(&file, dir)?.then_some(file))
}

/// Opens the lock of a directory that `up` has made. The file can be locked even after the
/// directory is gone.
pub fn open_lock(dir: &Path) -> anyhow::Result<File> {
    let path = dir.join("lock");
    let file = OpenOptions::new().write(true).open(&path);
    file.with_context(|| format!("cannot open {}", path.display()))
}

/// Locks the directory by its open lock; false if an `up` has locked it.
pub fn try_lock_file(lock: &File, dir: &Path) -> anyhow::Result<bool> {
    match rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(cause) => Err(cause).with_context(|| format!("cannot lock {}", dir.display())),
    }
}

/// The process that holds the lock, by the kernel's lock list (proc_locks(5)).
pub fn lock_holder(dir: &Path) -> anyhow::Result<Option<u32>> {
    let lock = std::fs::metadata(dir.join("lock"))?;
    let (major, minor) = (rustix::fs::major(lock.dev()), rustix::fs::minor(lock.dev()));
    let inode = format!("{major:02x}:{minor:02x}:{}", lock.ino());
    let locks = std::fs::read_to_string("/proc/locks").context("cannot read /proc/locks")?;
    Ok(locks.lines().find_map(|line| holder_of(line, &inode)))
}

/// The holder in a line of that list, if the line describes an flock(2) of this inode.
fn holder_of(line: &str, inode: &str) -> Option<u32> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    match fields[..] {
        [_, "FLOCK", _, _, holder, found, ..] if found == inode => holder.parse().ok(),
        _ => None,
    }
}

/// Creates the directory of the pools: the cluster's own, or one on the tmpfs.
///
/// # Errors
/// When the directory cannot be created.
pub fn make_pools_dir(dir: &Path, tmpfs: Option<&Path>) -> anyhow::Result<PathBuf> {
    let link = dir.join("pools");
    if let Ok(target) = link.read_link() {
        // A restart of the machine empties the tmpfs.
        make_memory_dir(&target, dir)?;
        return Ok(target);
    }
    let has_pools = dir.join("brick-1.pool").exists();
    let Some(tmpfs) = tmpfs.filter(|_| !has_pools) else {
        return Ok(dir.to_owned());
    };
    let target = tmpfs.join(format!("{MEMORY_PREFIX}{}", uuid::Uuid::new_v4()));
    make_memory_dir(&target, dir)?;
    std::os::unix::fs::symlink(&target, &link)
        .with_context(|| format!("cannot make {}", link.display()))?;
    Ok(target)
}

fn make_memory_dir(target: &Path, dir: &Path) -> anyhow::Result<()> {
    let make = || {
        std::fs::create_dir_all(target)?;
        std::fs::write(
            target.join(BACK_REFERENCE),
            dir.as_os_str().as_encoded_bytes(),
        )
    };
    make().with_context(|| format!("cannot make {}", target.display()))
}

/// Removes a directory of pools in memory that holds no pool, and the link to it.
pub fn remove_if_without_pools(dir: &Path, pools: &Path) {
    if pools != dir && !has_pools(pools) {
        // A leftover file is harmless: the next start uses the directory again.
        let _ = std::fs::remove_file(pools.join(BACK_REFERENCE));
        if std::fs::remove_dir(pools).is_ok() {
            let _ = std::fs::remove_file(dir.join("pools"));
        }
    }
}

fn has_pools(dir: &Path) -> bool {
    file_names(dir).iter().any(|name| name.ends_with(".pool"))
}

fn file_names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.collect()
}

/// Pools in memory of a cluster with no directory any more.
pub struct LeftoverPools {
    pub dir: PathBuf,
    pub cluster: PathBuf,
    pub bytes: u64,
}

/// A pool in a directory that a process goes on to lock. The kernel may release the lock of a process that has
/// ended a moment later, because the mapping of the pool holds it, too.
fn pool_that_stays_locked(dir: &Path) -> Option<PathBuf> {
    let until = Instant::now() + RELEASE_LIMIT;
    loop {
        let pool = locked_pool(dir)?;
        if Instant::now() > until {
            return Some(pool);
        }
        std::thread::sleep(RELEASE_PAUSE);
    }
}

/// A pool in a directory that a brick or a client has locked.
fn locked_pool(dir: &Path) -> Option<PathBuf> {
    let pools = file_names(dir)
        .into_iter()
        .filter(|name| name.ends_with(".pool"));
    pools.map(|name| dir.join(name)).find(|path| {
        let shared = FlockOperation::NonBlockingLockShared;
        File::open(path).is_ok_and(|file| rustix::fs::flock(&file, shared).is_err())
    })
}

/// The pool directories on a tmpfs that no cluster directory links to. A running cluster in another
/// mount namespace, which this process cannot see, has its pools locked and is skipped.
pub fn leftovers(tmpfs: &Path) -> Vec<LeftoverPools> {
    let dirs = file_names(tmpfs)
        .into_iter()
        .filter(|name| name.starts_with(MEMORY_PREFIX));
    let leftover = |name: String| {
        let dir = tmpfs.join(name);
        let cluster = PathBuf::from(std::fs::read_to_string(dir.join(BACK_REFERENCE)).ok()?);
        let is_used = cluster
            .join("pools")
            .read_link()
            .is_ok_and(|target| target == dir);
        let sizes = file_names(&dir)
            .into_iter()
            .filter_map(|name| dir.join(name).metadata().ok());
        let bytes = sizes.map(|found| found.blocks() * 512).sum();
        let is_used = is_used || locked_pool(&dir).is_some();
        (!is_used).then_some(LeftoverPools {
            dir,
            cluster,
            bytes,
        })
    };
    dirs.filter_map(leftover).collect()
}

/// Warns of memory in use by leftover pools.
pub fn warn_of_leftovers(tmpfs: &Path) {
    for LeftoverPools {
        dir,
        cluster,
        bytes: held,
    } in leftovers(tmpfs)
    {
        eprintln!(
            "note: {} holds {} of memory for a cluster in {}, which no longer exists; remove it with: rm -r {}",
            dir.display(),
            bytes(held),
            cluster.display(),
            dir.display()
        );
    }
}

/// Whether `up` creates a file of this name.
fn is_cluster_file(name: &str) -> bool {
    const FIXED: [&str; 7] = [
        ADMIN_TOKEN_FILE,
        "key",
        "lock",
        "manager.redb",
        "manager.log",
        "pools",
        BACK_REFERENCE,
    ];
    let is_of_brick = || {
        let (number, extension) = name.strip_prefix("brick-")?.split_once('.')?;
        let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        (is_number && ["log", "pool", "sock"].contains(&extension)).then_some(())
    };
    FIXED.contains(&name) || is_of_brick().is_some()
}

/// Removes the cluster with its data; the caller holds the lock. Returns the files that stay
/// because `up` does not create them.
///
/// # Errors
/// When a client uses a pool, or a file cannot be removed.
pub fn remove(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut left = Vec::new();
    let memory = dir.join("pools").read_link().ok();
    for each in memory.iter().map(PathBuf::as_path).chain([dir]) {
        if let Some(pool) = pool_that_stays_locked(each) {
            bail!(
                "a client uses {}; end exports and mounts of this cluster, then remove it with: pagemesh \
                 down --remove --dir {}",
                pool.display(),
                dir.display()
            );
        }
    }
    for each in memory.iter().map(PathBuf::as_path).chain([dir]) {
        for name in file_names(each) {
            let path = each.join(&name);
            match is_cluster_file(&name) {
                true => std::fs::remove_file(&path)
                    .with_context(|| format!("cannot remove {}", path.display()))?,
                false => left.push(path),
            }
        }
        match std::fs::remove_dir(each) {
            Ok(()) => {}
            Err(cause) if cause.kind() == std::io::ErrorKind::DirectoryNotEmpty => {}
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {}
            Err(cause) => {
                return Err(cause).with_context(|| format!("cannot remove {}", each.display()));
            }
        }
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_holder_is_found_by_inode() {
        let line = "3: FLOCK  ADVISORY  WRITE 4711 00:2f:1234 0 EOF";
        assert_eq!(holder_of(line, "00:2f:1234"), Some(4711));
        assert_eq!(holder_of(line, "00:2f:123"), None);
        let posix = line.replace("FLOCK", "POSIX");
        assert_eq!(holder_of(&posix, "00:2f:1234"), None);
    }

    #[test]
    fn own_lock_is_found_in_the_list() {
        let dir = tempfile::tempdir().expect("a directory");
        let held = lock(dir.path()).expect("the lock");
        assert!(try_lock(dir.path()).expect("a file").is_none());
        let holder = lock_holder(dir.path()).expect("a list");
        assert_eq!(holder, Some(std::process::id()));
        drop(held);
        assert!(try_lock(dir.path()).expect("a file").is_some());
    }

    #[test]
    fn removal_leaves_foreign_files() {
        let tmpfs = tempfile::tempdir().expect("a directory");
        let dir = tempfile::tempdir().expect("a directory");
        let pools = make_pools_dir(dir.path(), Some(tmpfs.path())).expect("a directory of pools");
        for name in ["brick-1.pool", "brick-12.pool"] {
            std::fs::write(pools.join(name), b"pages").expect("written");
        }
        for name in [
            "key",
            "admin-token",
            "brick-1.log",
            "notes.txt",
            "brick-x.log",
        ] {
            std::fs::write(dir.path().join(name), b"text").expect("written");
        }
        let client = File::open(pools.join("brick-1.pool")).expect("opened");
        rustix::fs::flock(&client, FlockOperation::LockExclusive).expect("locked");
        let refused = remove(dir.path()).expect_err("a client uses a pool");
        assert!(refused.to_string().contains("a client uses"), "{refused}");
        assert!(dir.path().join("key").exists() && pools.join("brick-12.pool").exists());
        drop(client);
        let mut left = remove(dir.path()).expect("removed");
        left.sort();
        assert_eq!(
            left,
            ["brick-x.log", "notes.txt"].map(|name| dir.path().join(name))
        );
        assert!(!pools.exists());
        assert!(!dir.path().join("key").exists());
        assert!(!dir.path().join("admin-token").exists());
    }

    #[test]
    fn leftovers_are_directories_without_their_cluster() {
        let tmpfs = tempfile::tempdir().expect("a directory");
        let [kept, lost] = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let made = |dir: &Path| make_pools_dir(dir, Some(tmpfs.path())).expect("a directory");
        made(kept.path());
        let pools = made(lost.path());
        assert!(leftovers(tmpfs.path()).is_empty());
        let path = lost.path().to_owned();
        drop(lost);
        let found = leftovers(tmpfs.path());
        assert_eq!(found.len(), 1);
        assert_eq!((&found[0].dir, &found[0].cluster), (&pools, &path));
        std::fs::write(pools.join("brick-1.pool"), b"pages").expect("written");
        let used = File::open(pools.join("brick-1.pool")).expect("opened");
        rustix::fs::flock(&used, FlockOperation::LockExclusive).expect("locked");
        assert!(leftovers(tmpfs.path()).is_empty());
    }
}
