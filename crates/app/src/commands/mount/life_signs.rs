//! Signs of life of a mount: reports to the manager that this process has the file system, and whether the kernel
//! still has the mount. The next mount of the file system decides by them ([`takeover`](super::takeover)).
//!
//! Invariant: the state in a report is read after the manager has answered the report before. So the second report after
//! any moment tells the state after that moment.

use anyhow::Context;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_fuse::Unmounter;
use pagemesh_manage::wire::ReportHolder;
use pagemesh_manage::{ManagerClient, ManagerError, SIGN_INTERVAL};
use pagemesh_volume::Volume;
use std::sync::{Arc, OnceLock};

/// A thread that reports until the process ends, or until another client has attached the volume.
pub struct LifeSigns(Arc<OnceLock<Unmounter>>);

impl LifeSigns {
    /// Reports that this process is about to mount.
    pub fn start(
        manager: ManagerClient,
        name: &VolumeName,
        volume: &Volume,
    ) -> anyhow::Result<LifeSigns> {
        let (name, attachment) = (name.clone(), EpochNumber(volume.attachment().0));
        let mount: Arc<OnceLock<Unmounter>> = Arc::default();
        let known = Arc::clone(&mount);
        let run = move || {
            loop {
                let is_unmounted = known.get().is_some_and(|mount| !mount.is_mounted());
                let report = ReportHolder {
                    attachment,
                    ending: is_unmounted,
                };
                match manager.report_holder(&name, report) {
                    Ok(()) => {}
                    Err(ManagerError::Fenced { .. }) => return,
                    Err(cause) => tracing::debug!(%cause, "a sign of life was not reported"),
                }
                std::thread::sleep(SIGN_INTERVAL);
            }
        };
        let thread = std::thread::Builder::new().name("life-signs".into());
        thread
            .spawn(run)
            .context("cannot start the thread that reports signs of life")?;
        Ok(LifeSigns(mount))
    }

    /// From now on the reports tell whether the kernel has this mount.
    pub fn set_mount(&self, mount: Unmounter) {
        // Only the first call has an effect.
        let _ = self.0.set(mount);
    }
}
