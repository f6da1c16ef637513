//! The snapshots of a file system that this process serves, for `.snapshot/NAME` in its directories.

use crate::args::{ManagerArgs, Transport};
use crate::client::{cluster_client, open_snapshot};
use crate::snapshot_path::SnapshotPath;
use pagemesh_base::layout::VolumeName;
use pagemesh_fs::{Fs, OpenSnapshots, SnapshotEntry, SnapshotSource};
use pagemesh_manage::wire::ErrorCode;
use pagemesh_manage::{ManagerClient, ManagerError};
use rustix::io::Errno;
use std::sync::Arc;

/// The snapshots as the manager lists them. A snapshot is known by its epoch, which no other one of the volume ever has.
pub struct MountSnapshots {
    manager: ManagerClient,
    volume: VolumeName,
    transport: Transport,
    client: ManagerArgs,
}

impl MountSnapshots {
    /// The snapshots of a file system, none of them open.
    pub fn of(
        volume: &VolumeName,
        transport: Transport,
        client: &ManagerArgs,
    ) -> anyhow::Result<Arc<OpenSnapshots>> {
        let source = MountSnapshots {
            manager: cluster_client(client)?,
            volume: volume.clone(),
            transport,
            client: client.clone(),
        };
        Ok(Arc::new(OpenSnapshots::new(Box::new(source))))
    }

    /// The path of a snapshot by its epoch.
    fn path_of(&self, id: u32) -> Result<SnapshotPath, Errno> {
        let found = self.list()?.into_iter().find(|it| it.id == id);
        let name = found.ok_or(Errno::STALE)?.name;
        self.path(&name)
    }

    fn path(&self, name: &str) -> Result<SnapshotPath, Errno> {
        Ok(SnapshotPath {
            volume: self.volume.clone(),
            name: name.parse().map_err(|_| Errno::NOENT)?,
        })
    }

    /// The epoch of a snapshot; `missing` if there is none of this name.
    fn epoch(&self, path: &SnapshotPath, missing: Errno) -> Result<u32, Errno> {
        match self.manager.snapshot(&path.volume, &path.name) {
            Ok(detail) => Ok(detail.info.epoch.0),
            Err(ManagerError::Refused {
                code: ErrorCode::NotFound,
                ..
            }) => Err(missing),
            Err(cause) => {
                tracing::warn!(snapshot = %path, %cause, "a snapshot was not found out");
                Err(errno_of(&cause))
            }
        }
    }
}

/// The error of a request to the manager. `EAGAIN`: a manager that restarts answers later.
fn errno_of(cause: &ManagerError) -> Errno {
    match cause {
        ManagerError::Unreachable { .. } => Errno::AGAIN,
        _ => Errno::IO,
    }
}

impl SnapshotSource for MountSnapshots {
    fn list(&self) -> Result<Vec<SnapshotEntry>, Errno> {
        let found = self.manager.snapshots(Some(&self.volume), None);
        let found = found.map_err(|cause| {
            tracing::warn!(volume = %self.volume, %cause, "the snapshots cannot be listed");
            errno_of(&cause)
        })?;
        let entries = found.into_iter().map(|it| SnapshotEntry {
            name: it.name.to_string(),
            id: it.epoch.0,
        });
        Ok(entries.collect())
    }

    fn find(&self, name: &str) -> Result<u32, Errno> {
        self.epoch(&self.path(name)?, Errno::NOENT)
    }

    fn open(&self, id: u32) -> Result<Arc<Fs>, Errno> {
        let path = self.path_of(id)?;
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
        if space.epoch() != pagemesh_base::ids::Epoch(id) {
            return Err(Errno::STALE);
        }
        let fs = Fs::mount_snapshot(Arc::new(space), pagemesh_fuse::wait, pagemesh_fuse::now);
        fs.map(Arc::new).map_err(|cause| unreadable(&cause))
    }
}
