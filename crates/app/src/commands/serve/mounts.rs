//! Mounts, on this machine, of the file systems that this process serves to others.

use crate::commands::mount::serve::{SOURCE, check_dir};
use crate::commands::mount::served::{MountedParts, ServedMount};
use crate::commands::serve::fences::Fences;
use crate::commands::serve::nfs::{NfsArgs, OwnedFs};
use crate::shutdown::{Shutdown, ShutdownTrigger};
use anyhow::{Context, bail};
use pagemesh_base::layout::VolumeName;
use pagemesh_fuse::{Caching, MountFlags, MountOptions, Transport};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Threads of a mount. It starts more while all are stuck.
const THREADS: usize = 4;

/// A file system and the directory of its mount, `FS=DIR`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPoint {
    pub name: VolumeName,
    pub dir: PathBuf,
}

impl FromStr for MountPoint {
    type Err = String;

    fn from_str(text: &str) -> Result<MountPoint, String> {
        let parts = text.split_once('=').filter(|(_, dir)| !dir.is_empty());
        let Some((name, dir)) = parts else {
            return Err(format!("{text:?} is no FS=DIR"));
        };
        Ok(MountPoint {
            name: name.parse().map_err(|cause| format!("{cause}"))?,
            dir: dir.into(),
        })
    }
}

/// Checks the mount points, before the attach fences another client.
pub fn check(args: &NfsArgs) -> anyhow::Result<Vec<MountPoint>> {
    let mut checked: Vec<MountPoint> = Vec::new();
    for MountPoint { name, dir } in &args.mounts {
        let shown = dir.display();
        if !args.names.contains(name) {
            bail!(
                "cannot mount {name} on {shown}: it is not served here; name it: pagemesh serve nfs {name}"
            );
        }
        let dir = check_dir(dir)?;
        if checked.iter().any(|it| it.name == *name || it.dir == dir) {
            bail!(
                "cannot mount {name} on {shown}: each file system has one mount, on a directory of its own; leave one --mount out"
            );
        }
        let name = name.clone();
        checked.push(MountPoint { name, dir });
    }
    Ok(checked)
}

/// A mount with its thread.
pub struct ServingMount {
    dir: PathBuf,
    end: ShutdownTrigger,
    thread: JoinHandle<()>,
}

impl ServingMount {
    /// Mounts a file system, and serves the mount until its unmount or its end.
    fn start(
        args: &NfsArgs,
        point: MountPoint,
        owned: &OwnedFs,
        fences: &Fences,
    ) -> anyhow::Result<ServingMount> {
        let ending = Shutdown::of_part();
        let end = ending.trigger();
        let free_space = owned.free_space();
        let parts = MountedParts {
            fs: Arc::clone(&owned.fs),
            volume: owned.volume(),
            fenced: owned.fenced.clone(),
            free_space: Box::new(move || free_space()),
            snapshots: Arc::clone(&owned.snapshots),
        };
        let options = mount_options(args, &point.name);
        let mount = ServedMount::start(parts, &point.dir, &options, &ending)?;
        let dir = point.dir.clone();
        let serve = move || {
            let (served, ended) = mount.serve(&ending);
            let dir = point.dir.display();
            match served {
                Ok(()) => tracing::info!(%dir, "the mount has ended"),
                Err(cause) => {
                    tracing::error!(%dir, cause = format!("{cause:#}"), "the mount failed")
                }
            }
            ended.complete();
        };
        fences.add_mount(&owned.name, end.clone());
        let thread = std::thread::Builder::new().name("mount".into());
        Ok(ServingMount {
            dir,
            end,
            thread: thread.spawn(serve).context("cannot serve a mount")?,
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Unmounts, unless that is done, and waits until the mount has ended.
    pub fn end(self) {
        self.end.trigger();
        // The panic was reported already.
        let _ = self.thread.join();
    }
}

/// Starts all mounts. After an error none is left.
pub fn start(
    args: &NfsArgs,
    points: Vec<MountPoint>,
    owned: &[OwnedFs],
    fences: &Fences,
) -> anyhow::Result<Vec<ServingMount>> {
    let mut mounts = Vec::new();
    for point in points {
        let Some(fs) = owned.iter().find(|it| it.name == point.name) else {
            continue;
        };
        match ServingMount::start(args, point, fs, fences) {
            Ok(mount) => mounts.push(mount),
            Err(cause) => {
                mounts.into_iter().for_each(ServingMount::end);
                return Err(cause);
            }
        }
    }
    Ok(mounts)
}

fn mount_options(args: &NfsArgs, name: &VolumeName) -> MountOptions {
    MountOptions {
        source: format!("{SOURCE}{name}"),
        threads: THREADS,
        allow_other: args.allow_other,
        // The option is about NFS clients.
        flags: MountFlags::default(),
        transport: Transport::Auto,
        may_keep_cpus_awake: false,
        caching: Caching::PageCache,
        shows_snapshots: args.show_snapshots,
        is_shared: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_name_and_directory() {
        let point: MountPoint = "data=/mnt/a=b".parse().expect("a mount point");
        assert_eq!(
            (point.name.as_str(), point.dir),
            ("data", "/mnt/a=b".into())
        );
        for text in ["data", "data=", "=/mnt"] {
            assert!(text.parse::<MountPoint>().is_err(), "{text}");
        }
    }
}
