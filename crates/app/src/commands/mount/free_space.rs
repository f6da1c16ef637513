//! The space that a mount may use: the limit of its files, and the free space of the pools.

use crate::args::ManagerArgs;
use crate::client::cluster_client;
use pagemesh_fs::{Fs, FsError};
use pagemesh_fuse::FreeSpaceFn;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::VolumeDetail;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval of requests to the manager for the free space of the pools.
const FREE_SPACE_INTERVAL: Duration = Duration::from_secs(5);
/// The free space before the manager's first answer.
const UNKNOWN: u64 = u64::MAX;

/// Raises the limit of the file system to the manager's value.
pub fn raise_limit(fs: &Fs, detail: &VolumeDetail) {
    match fs.raise_limit(detail.info.size_bytes) {
        Ok(false) | Err(FsError::ReadOnly(_)) => {}
        Ok(true) => {
            let bytes = detail.info.size_bytes;
            tracing::info!(bytes, "the limit of the files is raised");
        }
        Err(cause) => tracing::warn!(%cause, "cannot raise the limit of the files"),
    }
}

/// Polls the manager for the free space of each copy's pool and for the limit of the files. The
/// smallest free space bounds the writes. The poll ends with the returned function.
pub fn watch(
    args: &ManagerArgs,
    detail: VolumeDetail,
    fs: &Arc<Fs>,
) -> anyhow::Result<FreeSpaceFn> {
    let free_bytes = Arc::new(AtomicU64::new(UNKNOWN));
    let mut poll = SpacePoll {
        manager: cluster_client(args)?,
        detail,
        fs: Arc::downgrade(fs),
    };
    let known = Arc::downgrade(&free_bytes);
    std::thread::Builder::new()
        .name("room".into())
        .spawn(move || {
            while let Some(free_bytes) = known.upgrade() {
                poll.refresh_limit();
                if let Some(free) = poll.free_bytes() {
                    free_bytes.store(free, Ordering::Relaxed);
                }
                drop(free_bytes);
                std::thread::sleep(FREE_SPACE_INTERVAL);
            }
        })?;
    Ok(Box::new(move || {
        let free = free_bytes.load(Ordering::Relaxed);
        (free != UNKNOWN).then_some(free)
    }))
}

/// The poll of the manager.
struct SpacePoll {
    manager: ManagerClient,
    /// The volume as of the last answer.
    detail: VolumeDetail,
    fs: Weak<Fs>,
}

impl SpacePoll {
    /// Raises the limit of the files if it has changed. A failed raise is retried after the next
    /// change of the limit, or by the next mount.
    fn refresh_limit(&mut self) {
        let Ok(new) = self.manager.volume(&self.detail.info.name) else {
            return;
        };
        if new.info.size_bytes != self.detail.info.size_bytes
            && let Some(fs) = self.fs.upgrade()
        {
            raise_limit(&fs, &new);
        }
        // The set of copies may change, too.
        self.detail = new;
    }

    /// The free space of the fullest pool; `None` if the manager does not answer.
    fn free_bytes(&self) -> Option<u64> {
        let all = self.manager.bricks().ok()?;
        let ours = all
            .iter()
            .filter(|info| self.detail.bricks.contains_key(&info.brick));
        let free = ours.map(|info| info.capacity_bytes.saturating_sub(info.used_bytes));
        Some(free.min().unwrap_or(UNKNOWN))
    }
}
