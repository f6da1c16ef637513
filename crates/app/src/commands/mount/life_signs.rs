//! Signs of life of a process that serves a file system: reports to the manager that it has the file system, and whether it is ending. The
//! next process that wants the file system decides by them ([`takeover`](super::takeover)).
//!
//! A mount is ending when the kernel no longer has it. A process with an NFS server is ending when the server has stopped: the end of
//! a mount beside it does not count.
//!
//! Invariant: the state in a report is read after the manager has answered the report before. So the second report after
//! any moment tells the state after that moment.

use anyhow::Context;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use pagemesh_manage::wire::ReportHolder;
use pagemesh_manage::{ManagerClient, ManagerError, SIGN_INTERVAL};
use pagemesh_volume::Volume;
use std::sync::{Arc, OnceLock};

/// A thread that reports until the process ends, or until another client has attached the volume.
pub struct LifeSigns(Arc<OnceLock<IsEnding>>);

/// Whether this process no longer serves the file system.
type IsEnding = Box<dyn Fn() -> bool + Send + Sync>;

impl LifeSigns {
    /// Reports that this process is about to serve the file system.
    pub fn start(
        manager: ManagerClient,
        name: &VolumeName,
        volume: &Volume,
    ) -> anyhow::Result<LifeSigns> {
        let (name, attachment) = (name.clone(), EpochNumber(volume.attachment().0));
        let is_ending: Arc<OnceLock<IsEnding>> = Arc::default();
        let known = Arc::clone(&is_ending);
        let run = move || {
            loop {
                let report = ReportHolder {
                    attachment,
                    ending: known.get().is_some_and(|is_ending| is_ending()),
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
        Ok(LifeSigns(is_ending))
    }

    /// From now on the reports tell whether this process is ending.
    pub fn set_end(&self, is_ending: impl Fn() -> bool + Send + Sync + 'static) {
        // Only the first call has an effect.
        let _ = self.0.set(Box::new(is_ending));
    }
}
