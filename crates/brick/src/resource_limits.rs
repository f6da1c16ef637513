//! Checks that the system has room for a pool, before anything is made.
//!
//! The kernel does not refuse memory that it does not have: it kills a process, without a message,
//! when the machine or its control group runs out. A file beyond the limit of file sizes also ends
//! the process (SIGXFSZ). So each limit is checked first, and the error names it.
//!
//! Sources: proc_meminfo(5), cgroups(7), Documentation/admin-guide/cgroup-v2.rst (memory)
//! and cgroup-v1/memory.rst.

use rustix::fs::{fstatfs, statfs};
use rustix::process::{Resource, getrlimit};
use std::fs::File;
use std::path::{Path, PathBuf};

const MIB: u64 = 1 << 20;
/// statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;
/// Memory that the kernel needs beyond a pool's pages, for its index and page tables: less than two
/// words for each page.
const OVERHEAD_SHIFT: u32 = 7;
/// Memory that the process itself needs until the pool is made.
const PROCESS_BYTES: u64 = 16 * MIB;

/// The limit that is exceeded, and how to change it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// The memory of the machine.
    #[error(
        "the memory of this machine (MemAvailable and SwapFree in /proc/meminfo); end other \
         programs"
    )]
    Machine,
    /// The memory limit of a control group.
    #[error(
        "the limit of memory of its control group, {}; raise it (systemd: MemoryMax= of the \
         unit; containers: the option --memory)", .0.display()
    )]
    Cgroup(PathBuf),
    /// The size of a file system in memory.
    #[error(
        "the size of the tmpfs at {}; make room on it, raise its size (mount -o \
         remount,size=SIZE)", .0.display()
    )]
    FileSystem(PathBuf),
    /// RLIMIT_FSIZE.
    #[error("the limit of file sizes; raise it (ulimit -f unlimited; systemd: LimitFSIZE=)")]
    FileSize,
    /// RLIMIT_AS.
    #[error("the limit of address space; raise it (ulimit -v unlimited; systemd: LimitAS=)")]
    AddressSpace,
}

/// A limit leaves less room than the pool needs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} MiB are needed, and {} MiB are left by {limit}", wanted_bytes.div_ceil(MIB), left_bytes / MIB)]
pub struct Shortage {
    /// Bytes needed.
    pub wanted_bytes: u64,
    /// Bytes left.
    pub left_bytes: u64,
    /// The lowest of all limits.
    pub limit: Limit,
}

fn check_limit(
    wanted_bytes: u64,
    left_bytes: u64,
    limit: impl FnOnce() -> Limit,
) -> Result<(), Shortage> {
    match wanted_bytes <= left_bytes {
        true => Ok(()),
        false => Err(Shortage {
            wanted_bytes,
            left_bytes,
            limit: limit(),
        }),
    }
}

/// Whether files of a directory are in memory.
#[must_use]
pub fn is_memory(dir: &Path) -> bool {
    statfs(dir).is_ok_and(|found| is_memory_type(found.f_type as u64))
}

fn is_memory_type(magic: u64) -> bool {
    [TMPFS_MAGIC, RAMFS_MAGIC].contains(&(magic & u64::from(u32::MAX)))
}

/// Memory that pools of this many bytes take, their overhead included.
fn pool_memory_bytes(bytes: u64) -> u64 {
    bytes
        .saturating_add(bytes >> OVERHEAD_SHIFT)
        .saturating_add(PROCESS_BYTES)
}

/// Refuses a pool in a new file for which a limit leaves no room.
///
/// # Errors
/// The limit.
pub(crate) fn check_file(dir: &Path, size_bytes: u64) -> Result<(), Shortage> {
    let file_max = getrlimit(Resource::Fsize).current;
    check_limit(size_bytes, file_max.unwrap_or(u64::MAX), || Limit::FileSize)?;
    if let Some(limit) = getrlimit(Resource::As).current {
        let left = limit.saturating_sub(own_address_bytes());
        check_limit(size_bytes, left, || Limit::AddressSpace)?;
    }
    check_pools(dir, size_bytes)
}

/// Refuses pools of this many bytes in all, if their directory is in memory and a limit leaves no
/// room for them.
///
/// # Errors
/// The limit.
pub fn check_pools(dir: &Path, bytes: u64) -> Result<(), Shortage> {
    if !is_memory(dir) {
        return Ok(());
    }
    // A tmpfs without a size reports no blocks.
    if let Ok(found) = statfs(dir)
        && found.f_blocks > 0
    {
        let left = found.f_bavail.saturating_mul(found.f_bsize as u64);
        check_limit(bytes, left, || Limit::FileSystem(dir.into()))?;
    }
    check_memory(pool_memory_bytes(bytes))
}

/// Refuses to fill holes of a file in memory for which a limit leaves no room.
///
/// # Errors
/// The limit.
pub(crate) fn check_holes(file: &File, missing_bytes: u64) -> Result<(), Shortage> {
    match fstatfs(file) {
        Ok(found) if is_memory_type(found.f_type as u64) => {
            check_memory(pool_memory_bytes(missing_bytes))
        }
        _ => Ok(()),
    }
}

fn own_address_bytes() -> u64 {
    let told = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    parse_kib_line(&told, "VmSize").unwrap_or(0)
}

/// Refuses this much more memory if the machine, or a control group of this process, does not have
/// it.
///
/// # Errors
/// The limit.
pub fn check_memory(wanted_bytes: u64) -> Result<(), Shortage> {
    check_memory_in(Path::new("/"), wanted_bytes)
}

/// Bytes of memory: the total, and the part that programs can still get.
#[must_use]
pub fn machine_memory() -> Option<(u64, u64)> {
    let told = Meminfo::read(Path::new("/"));
    Some((told.get("MemTotal")?, told.get("MemAvailable")?))
}

/// The same with the kernel's files below this directory.
fn check_memory_in(root: &Path, wanted_bytes: u64) -> Result<(), Shortage> {
    let told = Meminfo::read(root);
    let swap = told.get("SwapFree").unwrap_or(0);
    if let Some(available) = told.get("MemAvailable") {
        check_limit(wanted_bytes, available.saturating_add(swap), || {
            Limit::Machine
        })?;
    }
    for (file, left) in cgroup_limits(root, swap) {
        check_limit(wanted_bytes, left, || Limit::Cgroup(file))?;
    }
    Ok(())
}

struct Meminfo(String);

impl Meminfo {
    fn read(root: &Path) -> Meminfo {
        Meminfo(std::fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default())
    }

    fn get(&self, name: &str) -> Option<u64> {
        parse_kib_line(&self.0, name)
    }
}

/// The bytes of a line `NAME: NUMBER kB`.
fn parse_kib_line(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines();
    let rest = lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The file names of one version of control groups.
struct CgroupFiles {
    limit: &'static str,
    used: &'static str,
    /// Fields of `memory.stat` that are caches of files, which the kernel reclaims first.
    caches: [&'static str; 2],
    swap: Option<[&'static str; 2]>,
}

const CGROUP_V2: CgroupFiles = CgroupFiles {
    limit: "memory.max",
    used: "memory.current",
    caches: ["inactive_file", "active_file"],
    swap: Some(["memory.swap.max", "memory.swap.current"]),
};
const CGROUP_V1: CgroupFiles = CgroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    caches: ["total_inactive_file", "total_active_file"],
    swap: None,
};

/// The file of each limit above this process, and the bytes that it leaves.
fn cgroup_limits(root: &Path, swap: u64) -> Vec<(PathBuf, u64)> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
    let (own, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut found = Vec::new();
    for mount in mounts.lines() {
        let Some((names, top, path)) = memory_cgroup(mount, &own) else {
            continue;
        };
        let top = root.join(top.trim_start_matches('/'));
        let own = top.join(path.trim_start_matches('/'));
        let above = own.ancestors().take_while(|dir| dir.starts_with(&top));
        found.extend(above.filter_map(|dir| cgroup_bytes_left(dir, names, swap)));
    }
    found
}

/// For a line of mountinfo that mounts the memory controller: its file names, its mount point, and
/// the group of this process below that.
fn memory_cgroup<'t>(
    mount: &'t str,
    own: &'t str,
) -> Option<(&'static CgroupFiles, &'t str, &'t str)> {
    let words: Vec<&str> = mount.split(' ').collect();
    let dash = words.iter().position(|word| *word == "-")?;
    let (kind, options) = (*words.get(dash + 1)?, *words.get(dash + 3)?);
    let has = |list: &str, word| list.split(',').any(|it| it == word);
    let names = match kind {
        "cgroup2" => &CGROUP_V2,
        "cgroup" if has(options, "memory") => &CGROUP_V1,
        _ => return None,
    };
    let mut lines = own.lines().map(|line| line.splitn(3, ':'));
    let path = lines.find_map(|mut parts| {
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let is_it = match kind {
            "cgroup2" => controllers.is_empty(),
            _ => has(controllers, "memory"),
        };
        is_it.then_some(path)
    })?;
    // In a container the group may lie outside of the mounted subtree.
    let (root, top) = (*words.get(3)?, *words.get(4)?);
    Some((names, top, path.strip_prefix(root).unwrap_or("")))
}

fn cgroup_bytes_left(dir: &Path, names: &CgroupFiles, swap: u64) -> Option<(PathBuf, u64)> {
    let number = |name| read_number(&dir.join(name));
    let file = dir.join(names.limit);
    // `max` is not a number, and means no limit.
    let (limit, used) = (read_number(&file)?, number(names.used)?);
    let stat = std::fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let field = |name: &&str| {
        let mut lines = stat.lines();
        lines.find_map(|line| {
            line.strip_prefix(*name)?
                .strip_prefix(' ')?
                .parse::<u64>()
                .ok()
        })
    };
    let caches: u64 = names.caches.iter().filter_map(field).sum();
    let swap = match names.swap {
        None => 0,
        Some([limit, used]) => match (number(limit), number(used)) {
            (Some(limit), Some(used)) => swap.min(limit.saturating_sub(used)),
            (None, Some(_)) => swap,
            _ => 0,
        },
    };
    let left = limit.saturating_sub(used.saturating_sub(caches));
    Some((file, left.saturating_add(swap)))
}

fn read_number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MEMINFO: &str = "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapFree: 0 kB\n";

    /// A machine of 8 GiB, half of which is free, with these files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in [("proc/meminfo", MEMINFO)].iter().chain(files) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        root
    }

    #[track_caller]
    fn refused(root: &Path, wanted: u64) -> Shortage {
        check_memory_in(root, wanted).expect_err("too much")
    }

    #[test]
    fn machine_without_cgroups_has_all_available_memory() {
        let root = system(&[]);
        assert_eq!(check_memory_in(root.path(), 4 * GIB), Ok(()));
        let found = refused(root.path(), 4 * GIB + 1);
        assert_eq!((found.left_bytes, &found.limit), (4 * GIB, &Limit::Machine));
        assert!(found.to_string().contains("/proc/meminfo"), "{found}");
        std::fs::remove_file(root.path().join("proc/meminfo")).expect("removed");
        assert_eq!(check_memory_in(root.path(), u64::MAX), Ok(()));
    }

    #[test]
    fn each_cgroup_above_process_limits_memory() {
        let root = system(&[
            ("proc/self/cgroup", "0::/pod/pagemesh\n"),
            (
                "proc/self/mountinfo",
                "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            ),
            ("sys/fs/cgroup/pod/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/pod/memory.current", "900000000\n"),
            (
                "sys/fs/cgroup/pod/memory.stat",
                "anon 100000000\nfile 800000000\nshmem 0\ninactive_file 500000000\nactive_file 300000000\n",
            ),
            ("sys/fs/cgroup/pod/pagemesh/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/pagemesh/memory.current", "1000\n"),
        ]);
        // The kernel reclaims caches of files.
        let left = GIB - 100_000_000;
        assert_eq!(check_memory_in(root.path(), left), Ok(()));
        let found = refused(root.path(), left + 1);
        let file = root.path().join("sys/fs/cgroup/pod/memory.max");
        assert_eq!(found.limit, Limit::Cgroup(file));
        assert!(found.to_string().contains("MemoryMax="), "{found}");
    }

    #[test]
    fn cgroup_v1_limits_memory() {
        let root = system(&[
            (
                "proc/self/cgroup",
                "5:cpu,memory:/docker/abc\n1:name=systemd:/\n0::/x\n",
            ),
            (
                "proc/self/mountinfo",
                "30 24 0:26 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n",
            ),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "419430400\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "19430400\n"),
        ]);
        assert_eq!(check_memory_in(root.path(), 400_000_000), Ok(()));
        assert_eq!(refused(root.path(), 400_000_001).left_bytes, 400_000_000);
    }
}
