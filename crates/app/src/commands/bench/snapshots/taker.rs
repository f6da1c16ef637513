//! Snapshots by way of the manager, as the command takes them.

use anyhow::Context;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::BenchError;
use pagemesh_bench::snapshots::SnapshotTaker;
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::CreateSnapshot;
use std::error::Error;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The limit of the wait for the space of dropped snapshots.
const SPACE_LIMIT: Duration = Duration::from_secs(120);
const SPACE_POLL: Duration = Duration::from_millis(200);
/// The pools are as before once so much is in use beyond: sessions hold frames, and tables of versions stay.
const SPACE_SLACK: u64 = 512 << 20;

/// Takes snapshots of one volume, named by their numbers.
pub(super) struct ManagerSnapshots {
    pub(super) client: ManagerClient,
    pub(super) name: VolumeName,
    taken: AtomicU64,
    /// Bytes of all copies of all volumes.
    live_bytes: u64,
}

impl ManagerSnapshots {
    pub(super) fn new(
        client: ManagerClient,
        name: VolumeName,
        live_bytes: u64,
    ) -> ManagerSnapshots {
        ManagerSnapshots {
            client,
            name,
            taken: AtomicU64::new(0),
            live_bytes,
        }
    }

    fn used_bytes(&self) -> anyhow::Result<u64> {
        let bricks = self.client.bricks()?;
        Ok(bricks.iter().map(|brick| brick.used_bytes).sum())
    }

    /// Takes a snapshot, and returns its name.
    pub(super) fn create(&self) -> anyhow::Result<String> {
        let name = format!("s{}", self.taken.fetch_add(1, Ordering::Relaxed));
        let request = CreateSnapshot {
            name: name.parse()?,
            labels: vec![],
        };
        self.client.create_snapshot(&self.name, &request)?;
        Ok(name)
    }

    /// Deletes a snapshot. The bricks free its space later.
    pub(super) fn delete(&self, name: &str) -> anyhow::Result<()> {
        self.client.delete_snapshot(&self.name, &name.parse()?)?;
        Ok(())
    }

    /// Deletes all snapshots, and waits for their space.
    pub(super) fn delete_all(&self) -> anyhow::Result<()> {
        for snapshot in self.client.snapshots(Some(&self.name), None)? {
            self.client.delete_snapshot(&self.name, &snapshot.name)?;
        }
        let began = Instant::now();
        let wanted = self.live_bytes + SPACE_SLACK;
        loop {
            let used = self.used_bytes()?;
            if used <= wanted {
                return Ok(());
            }
            let is_late = began.elapsed() > SPACE_LIMIT;
            anyhow::ensure!(
                !is_late,
                "{used} bytes are still in use after the snapshots"
            );
            std::thread::sleep(SPACE_POLL);
        }
    }
}

impl SnapshotTaker for ManagerSnapshots {
    fn take(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        let taken = self.create().context("cannot take a snapshot");
        taken.map(drop).map_err(anyhow::Error::into_boxed_dyn_error)
    }

    fn drop_all(&self) -> Result<(), Box<dyn Error + Send + Sync>> {
        let dropped = self.delete_all().context("cannot drop snapshots");
        dropped.map_err(anyhow::Error::into_boxed_dyn_error)
    }
}

/// An error of a step between measurements.
pub(super) fn step_error(cause: anyhow::Error) -> BenchError {
    BenchError::Mount(cause.into_boxed_dyn_error())
}
