//! The NFS exports of volumes, as the processes that serve them report.
//!
//! Invariants: the last report of a volume is kept in memory, and is bounded. It counts only as long as the client that sent it has
//! the volume attached. The lock of the reports is taken after the manager's, never before it.

use crate::fault::Fault;
use crate::manager::Manager;
use crate::nfs_book::ReceivedNfs;
use crate::volumes::check_attachment;
use crate::wire::{NFS_LIST_MAX, NFS_TEXT_BYTES_MAX, NfsExport, NfsExportState, ReportNfs};
use pagemesh_base::layout::VolumeName;

impl Manager {
    /// Takes the state of the NFS export of a volume from the client that has attached it.
    ///
    /// # Errors
    /// When there is no such volume, another client has attached it, or a list or text is too long.
    pub fn report_nfs(&self, name: &VolumeName, report: ReportNfs) -> Result<(), Fault> {
        if let Some(export) = &report.export {
            check_bounds(export)?;
        }
        // Held over the record: a report would otherwise come back after its volume was deleted.
        let book = self.state();
        check_attachment(name, book.volume(name)?, Some(report.attachment))?;
        let Some(export) = report.export else {
            self.nfs_exports.remove(name);
            return Ok(());
        };
        let received = ReceivedNfs {
            attachment: report.attachment,
            at: self.clock.elapsed(),
            export,
        };
        self.nfs_exports.reports().insert(name.clone(), received);
        Ok(())
    }

    /// The NFS exports of the volumes that are attached by the client that serves them, by name.
    #[must_use]
    pub fn nfs_exports(&self) -> Vec<NfsExport> {
        let book = self.state();
        let now = self.clock.elapsed();
        let reports = self.nfs_exports.reports();
        let shown = reports.iter().filter(|(name, received)| {
            let record = book.volume(name);
            record.is_ok_and(|it| check_attachment(name, it, Some(received.attachment)).is_ok())
        });
        shown
            .map(|(name, received)| received.shown(name, now))
            .collect()
    }

    /// The NFS export of a volume.
    ///
    /// # Errors
    /// When there is no such volume, or no process serves it over NFS.
    pub fn nfs_export(&self, name: &VolumeName) -> Result<NfsExport, Fault> {
        let book = self.state();
        let record = book.volume(name)?;
        let now = self.clock.elapsed();
        let reports = self.nfs_exports.reports();
        let received = reports.get(name);
        let present = received
            .filter(|it| check_attachment(name, record, Some(it.attachment)).is_ok())
            .ok_or_else(|| Fault::NotServed(name.clone()))?;
        Ok(present.shown(name, now))
    }
}

/// Checks that a report is no larger than a server makes it.
fn check_bounds(export: &NfsExportState) -> Result<(), Fault> {
    let rules = export.paths.iter().map(|it| it.rules.len());
    let lists = [
        export.addresses.len(),
        export.paths.len(),
        export.clients.len(),
        export.operations.len(),
    ];
    let longest_list = lists.into_iter().chain(rules).max().unwrap_or(0);
    let paths = export.paths.iter();
    let path_texts = paths.flat_map(|it| std::iter::once(&it.path).chain(&it.rules));
    let texts = path_texts
        .chain(&export.addresses)
        .chain(export.clients.iter().map(|it| &it.address))
        .chain(export.operations.iter().map(|it| &it.name))
        .chain([&export.workers.last_change]);
    let longest_text = texts.map(String::len).max().unwrap_or(0);
    if longest_list > NFS_LIST_MAX || longest_text > NFS_TEXT_BYTES_MAX {
        return Err(Fault::invalid_field(
            format!(
                "a report of an NFS export has lists of at most {NFS_LIST_MAX} entries and texts of at most {NFS_TEXT_BYTES_MAX} bytes"
            ),
            "report the state of the pagemesh command of this version",
        ));
    }
    Ok(())
}
