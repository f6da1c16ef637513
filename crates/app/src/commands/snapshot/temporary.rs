//! A snapshot of the present that lasts as long as a command.

use super::SnapshotPath;
use crate::args::{ManagerArgs, Transport};
use crate::client::{DetachGuard, attach_replacing};
use crate::snapshot_cuts;
use anyhow::Context;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_manage::wire::{CreateSnapshot, ErrorCode};
use pagemesh_manage::{ManagerClient, ManagerError};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// The attachment of a volume that no client has attached.
const NONE: EpochNumber = EpochNumber(0);
/// The label of such a snapshot. One with it that is left over may be deleted.
const LABEL: &str = "temporary";

/// A snapshot of the present, deleted with the value.
pub struct TemporarySnapshot<'a> {
    manager: &'a ManagerClient,
    pub path: SnapshotPath,
}

impl TemporarySnapshot<'_> {
    /// Makes one. Writers go on.
    pub fn create<'a>(
        args: &ManagerArgs,
        transport: Transport,
        manager: &'a ManagerClient,
        volume: &VolumeName,
    ) -> anyhow::Result<TemporarySnapshot<'a>> {
        #[allow(clippy::disallowed_methods)] // A name for people; no decision depends on it.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix_ms = now.map_or(0, |now| now.as_millis());
        let name = format!("now-{unix_ms}-{}", std::process::id()).parse()?;
        let request = CreateSnapshot {
            name,
            labels: vec![LABEL.to_owned()],
        };
        let made = match manager.create_snapshot(volume, &request) {
            // The copies may differ after a client ended during writes. An attach makes them equal.
            Err(cause) if is_failed_brick(&cause) => {
                let attached = Arc::new(attach_replacing(args, transport, volume, Some(NONE))??);
                let _guard = DetachGuard(Arc::clone(&attached));
                let served = [(volume.clone(), Arc::downgrade(&attached))];
                snapshot_cuts::serve(manager, &served)?;
                manager.create_snapshot(volume, &request)
            }
            made => made,
        };
        let made = made.with_context(|| {
            format!("cannot make a temporary snapshot of {volume} to compare its present state")
        })?;
        let path = SnapshotPath {
            volume: volume.clone(),
            name: made.name,
        };
        Ok(TemporarySnapshot { manager, path })
    }
}

fn is_failed_brick(cause: &ManagerError) -> bool {
    matches!(
        cause,
        ManagerError::Refused {
            code: ErrorCode::BrickFailed,
            ..
        }
    )
}

impl Drop for TemporarySnapshot<'_> {
    fn drop(&mut self) {
        let SnapshotPath { volume, name } = &self.path;
        if let Err(cause) = self.manager.delete_snapshot(volume, name) {
            eprintln!(
                "warning: the temporary snapshot {} is left over: {cause}; delete it with: pagemesh snapshot delete {}",
                self.path, self.path
            );
        }
    }
}
