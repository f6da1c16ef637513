//! The kernel's list of mounts, and the processes that hold them.

use anyhow::Context;
use pagemesh_base::mounts::{MountEntry, list_mounts, parse_mountinfo};
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Maximum of mount namespaces in a message, and of processes of each.
const LISTED_MAX: usize = 4;

/// Resolves links in the parent of a path. It does not access the last component, because a file
/// system mounted there may hang or be dead.
pub fn resolve_parent(dir: &Path) -> anyhow::Result<PathBuf> {
    let dir = std::path::absolute(dir)?;
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else {
        return Ok(dir);
    };
    let parent = parent.canonicalize();
    let parent = parent.with_context(|| format!("there is no directory {}", dir.display()))?;
    Ok(parent.join(name))
}

pub fn find_mount_at(dir: &Path) -> anyhow::Result<Option<MountEntry>> {
    let mounts = list_mounts().context("cannot read the mounts")?;
    Ok(mounts.into_iter().rev().find(|known| known.dir == dir))
}

/// A mount namespace that contains a mount, and its processes.
#[derive(Debug)]
pub struct MountHolder {
    /// The mount point, as the namespace's first process sees it.
    dir: PathBuf,
    /// Process ids and commands.
    processes: Vec<(u32, String)>,
}

impl fmt::Display for MountHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = self.processes.iter().take(LISTED_MAX);
        let named: Vec<String> = named.map(|(pid, name)| format!("{pid} ({name})")).collect();
        let more = self.processes.len() - named.len();
        let named = named.join(", ");
        match (self.processes.len(), more) {
            (1, _) => write!(f, "process {named}")?,
            (_, 0) => write!(f, "processes {named}")?,
            (_, more) => write!(f, "processes {named} and {more} more")?,
        }
        write!(f, " with it on {}", self.dir.display())
    }
}

/// The mount namespaces of visible processes that contain the file system of a device.
pub fn holders(device: &str) -> Vec<MountHolder> {
    holders_in(Path::new("/proc"), device)
}

fn holders_in(proc: &Path, device: &str) -> Vec<MountHolder> {
    let mut pids: Vec<u32> = std::fs::read_dir(proc)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    let mut found: BTreeMap<PathBuf, Option<MountHolder>> = BTreeMap::new();
    for pid in pids {
        let dir = proc.join(pid.to_string());
        // A process that has exited meanwhile holds no mount.
        let Ok(namespace) = dir.join("ns/mnt").read_link() else {
            continue;
        };
        let holder = found.entry(namespace).or_insert_with(|| {
            let mounts = parse_mountinfo(&std::fs::read(dir.join("mountinfo")).ok()?);
            let mount = mounts.into_iter().find(|mount| mount.device == device)?;
            Some(MountHolder {
                dir: mount.dir,
                processes: Vec::new(),
            })
        });
        if let Some(holder) = holder {
            let name = std::fs::read_to_string(dir.join("comm")).unwrap_or_default();
            holder.processes.push((pid, name.trim().to_owned()));
        }
    }
    found.into_values().flatten().collect()
}

/// Describes the holders; `None` if no visible process holds the mount.
pub fn describe_holders(holders: &[MountHolder]) -> Option<String> {
    let named = holders.iter().take(LISTED_MAX).map(MountHolder::to_string);
    let named: Vec<String> = named.collect();
    let more = holders.len() - named.len();
    let named = named.join("; ");
    match (holders.len(), more) {
        (0, _) => None,
        (_, 0) => Some(named),
        (_, more) => Some(format!("{named}; and {more} more mount namespaces")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_holders_are_grouped_by_namespace() {
        let proc = tempfile::tempdir().expect("a directory");
        let ours = "98 29 0:53 / /mnt rw - fuse.pagemesh pagemesh:v rw,user_id=0\n";
        let others = "99 29 0:54 / /mnt rw - fuse.pagemesh pagemesh:w rw,user_id=0\n";
        for (pid, namespace, mounts) in [
            (7, "mnt:[1]", ours),
            (12, "mnt:[2]", others),
            (30, "mnt:[1]", ours),
            (31, "mnt:[3]", ours),
        ] {
            let dir = proc.path().join(pid.to_string());
            std::fs::create_dir_all(dir.join("ns")).expect("made");
            std::os::unix::fs::symlink(namespace, dir.join("ns/mnt")).expect("made");
            std::fs::write(dir.join("mountinfo"), mounts).expect("written");
            std::fs::write(dir.join("comm"), format!("name{pid}\n")).expect("written");
        }
        std::fs::create_dir(proc.path().join("self")).expect("made");
        let found = describe_holders(&holders_in(proc.path(), "0:53")).expect("some");
        assert_eq!(
            found,
            "processes 7 (name7), 30 (name30) with it on /mnt; process 31 (name31) with it on /mnt"
        );
        assert_eq!(describe_holders(&holders_in(proc.path(), "0:55")), None);
    }
}
