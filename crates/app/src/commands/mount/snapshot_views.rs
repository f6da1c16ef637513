//! The snapshots of a mounted file system, for `.snapshot/NAME` in its directories.

use crate::args::{ManagerArgs, Transport};
use crate::client::open_snapshot;
use crate::snapshot_path::SnapshotPath;
use pagemesh_base::layout::VolumeName;
use pagemesh_fs::Fs;
use pagemesh_fuse::SnapshotSource;
use pagemesh_manage::wire::ErrorCode;
use pagemesh_manage::{ManagerClient, ManagerError};
use rustix::io::Errno;
use std::sync::Arc;

/// The snapshots as the manager lists them. A snapshot is known by its epoch, which no other one of the volume ever has.
pub struct MountSnapshots {
    pub manager: ManagerClient,
    pub volume: VolumeName,
    pub transport: Transport,
    pub client: ManagerArgs,
}

impl MountSnapshots {
    fn path(&self, name: &str) -> Result<SnapshotPath, Errno> {
        Ok(SnapshotPath {
            volume: self.volume.clone(),
            name: name.parse().map_err(|_| Errno::NOENT)?,
        })
    }

    /// The epoch of a snapshot; `missing` if there is none of this name.
    fn epoch(&self, path: &SnapshotPath, missing: Errno) -> Result<u64, Errno> {
        match self.manager.snapshot(&path.volume, &path.name) {
            Ok(detail) => Ok(detail.info.epoch.0.into()),
            Err(ManagerError::Refused {
                code: ErrorCode::NotFound,
                ..
            }) => Err(missing),
            Err(cause) => {
                tracing::warn!(snapshot = %path, %cause, "a snapshot was not found out");
                Err(Errno::IO)
            }
        }
    }
}

impl SnapshotSource for MountSnapshots {
    fn names(&self) -> Result<Vec<String>, Errno> {
        let found = self.manager.snapshots(Some(&self.volume), None);
        let found = found.map_err(|cause| {
            tracing::warn!(volume = %self.volume, %cause, "the snapshots cannot be listed");
            Errno::IO
        })?;
        Ok(found.into_iter().map(|it| it.name.to_string()).collect())
    }

    fn find(&self, name: &str) -> Result<u64, Errno> {
        self.epoch(&self.path(name)?, Errno::NOENT)
    }

    fn open(&self, name: &str, id: u64) -> Result<Arc<Fs>, Errno> {
        let path = self.path(name)?;
        let unreadable = |cause: &dyn std::fmt::Display| {
            tracing::error!(snapshot = %path, %cause, "a snapshot cannot be read");
            Errno::IO
        };
        let space = open_snapshot(&self.client, self.transport, &path);
        // A deleted snapshot may have left its name to another one, before or while it was opened.
        if self.epoch(&path, Errno::STALE)? != id {
            tracing::warn!(snapshot = %path, "a snapshot in use was deleted");
            return Err(Errno::STALE);
        }
        let space = space.map_err(|cause| unreadable(&format!("{cause:#}")))?;
        if space.epoch() != pagemesh_base::ids::Epoch(id as u32) {
            return Err(Errno::STALE);
        }
        let fs = Fs::mount_snapshot(Arc::new(space), pagemesh_fuse::wait, pagemesh_fuse::now);
        fs.map(Arc::new).map_err(|cause| unreadable(&cause))
    }
}
