//! The NFS exports of volumes, as the processes that serve them report.
//!
//! Invariants: the last report of a volume is kept in memory, and is bounded. It counts only as long as the client that sent it has
//! the volume attached. The lock of the reports is taken after the manager's, never before it.

use crate::events::EventDraft;
use crate::fault::Fault;
use crate::manager::Manager;
use crate::nfs_book::ReceivedNfs;
use crate::nfs_fault::NfsClientFault;
use crate::nfs_orders::{OrderOutcome, OrderRefusal};
use crate::volumes::check_attachment;
use crate::wire::{
    LostNfsState, NFS_LIST_MAX, NFS_ORDERS_MAX, NFS_TEXT_BYTES_MAX, Nfs4ClientId, NfsExpiryResult,
    NfsExport, NfsExportState, NfsOrders, ReportNfs,
};
use pagemesh_base::layout::VolumeName;
use std::time::Instant;

impl Manager {
    /// Takes the state of the NFS export of a volume from the client that has attached it, and returns the orders to it.
    ///
    /// # Errors
    /// When there is no such volume, another client has attached it, or a list or text is too long.
    pub fn report_nfs(&self, name: &VolumeName, report: ReportNfs) -> Result<NfsOrders, Fault> {
        check_bounds(&report)?;
        // Held over the record: a report would otherwise come back after its volume was deleted.
        let book = self.state();
        check_attachment(name, book.volume(name)?, Some(report.attachment))?;
        let Some(export) = report.export else {
            self.nfs_exports.remove(name);
            return Ok(NfsOrders::default());
        };
        let received = ReceivedNfs {
            attachment: report.attachment,
            at: self.clock.elapsed(),
            export,
        };
        self.nfs_exports.reports().insert(name.clone(), received);
        let expire = self.nfs_exports.orders.exchange(name, &report.expiries);
        Ok(NfsOrders { expire })
    }

    /// Lets the server of a client of NFSv4.1 expire it, and waits for the result: the client has lost its opens and locks, and cannot
    /// reclaim them.
    ///
    /// # Errors
    /// When no server has the client, the server does not answer in time, or it could not complete the expiry.
    pub fn expire_nfs_client(&self, client: Nfs4ClientId) -> Result<LostNfsState, Fault> {
        let volumes = self.volumes_of_nfs_client(client)?;
        let orders = &self.nfs_exports.orders;
        orders
            .place(&volumes, client)
            .map_err(|refusal| match refusal {
                OrderRefusal::Running => NfsClientFault::Busy(client).into(),
                OrderRefusal::Full => Fault::TooMany {
                    what: "orders to expire clients of this NFS server",
                    most: NFS_ORDERS_MAX,
                },
            })?;
        let (volume, outcome) = self.await_nfs_expiry(volumes, client)?;
        self.record_nfs_expiry(&volume, client, outcome);
        let result = match outcome {
            OrderOutcome::Answered(result) => result,
            OrderOutcome::NotGiven => return Err(NfsClientFault::NotGiven(volume).into()),
            OrderOutcome::NotAnswered => return Err(NfsClientFault::NotAnswered(volume).into()),
        };
        match result {
            NfsExpiryResult::Expired(lost) => Ok(lost),
            NfsExpiryResult::Unknown => Err(NfsClientFault::Unknown(client).into()),
            NfsExpiryResult::Running(requests) => {
                Err(NfsClientFault::Running { client, requests }.into())
            }
            NfsExpiryResult::Unwritten => Err(NfsClientFault::Unwritten(client).into()),
        }
    }

    /// A volume of the server of a client: the one with the newest report. If no report has the client, the volumes of all servers that
    /// have more clients than their reports.
    fn volumes_of_nfs_client(&self, client: Nfs4ClientId) -> Result<Vec<VolumeName>, Fault> {
        let has_client = |it: &&NfsExport| {
            let mut clients = it.export.nfs4_clients.iter();
            clients.any(|known| known.client == client)
        };
        let exports = self.nfs_exports();
        let reporting = exports.iter().filter(has_client);
        if let Some(newest) = reporting.min_by_key(|it| it.reported_ms_ago) {
            return Ok(vec![newest.volume.clone()]);
        }
        let leaves_clients_out =
            |it: &&NfsExport| it.export.nfs4_clients_total > it.export.nfs4_clients.len() as u64;
        let others = exports.iter().filter(leaves_clients_out);
        let volumes: Vec<_> = others.map(|it| it.volume.clone()).collect();
        match volumes.is_empty() {
            true => Err(NfsClientFault::Unknown(client).into()),
            false => Ok(volumes),
        }
    }

    /// Waits for the orders to expire a client, and ends them all: the outcome of the server that has the client.
    fn await_nfs_expiry(
        &self,
        volumes: Vec<VolumeName>,
        client: Nfs4ClientId,
    ) -> Result<(VolumeName, OrderOutcome), Fault> {
        let until = Instant::now() + self.settings.nfs_order;
        let ends = volumes.into_iter().map(|volume| {
            let left = until.saturating_duration_since(Instant::now());
            let outcome = self.nfs_exports.orders.wait(&volume, client, left);
            (volume, outcome)
        });
        let decisive = ends.max_by_key(|(_, outcome)| outcome.weight());
        Ok(decisive.ok_or(NfsClientFault::Unknown(client))?)
    }

    /// Records an expiry, also one that its server may complete later.
    fn record_nfs_expiry(&self, volume: &VolumeName, client: Nfs4ClientId, outcome: OrderOutcome) {
        let effect = match outcome {
            OrderOutcome::NotGiven | OrderOutcome::Answered(NfsExpiryResult::Unknown) => return,
            OrderOutcome::Answered(NfsExpiryResult::Expired(LostNfsState { opens, locks })) => {
                format!("was expired. It has lost {opens} opens and {locks} locked ranges.")
            }
            OrderOutcome::Answered(_) => {
                "was expired. It loses its opens and locks as soon as its server can release them."
                    .into()
            }
            OrderOutcome::NotAnswered => {
                "is to be expired. Its server got the order, and did not answer in time.".into()
            }
        };
        let expired = EventDraft::nfs_client_expired(volume, &self.actor(), client, &effect);
        if let Err(error) = self.commit(&mut self.state(), &[], vec![expired]) {
            tracing::error!(%error, "cannot write down that an NFS client was expired");
        }
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
fn check_bounds(report: &ReportNfs) -> Result<(), Fault> {
    let export = report.export.as_ref();
    let (longest_list, longest_text) = export.map_or((0, 0), longest);
    if longest_list > NFS_LIST_MAX
        || longest_text > NFS_TEXT_BYTES_MAX
        || report.expiries.len() > NFS_ORDERS_MAX
    {
        return Err(Fault::invalid_field(
            format!(
                "a report of an NFS export has lists of at most {NFS_LIST_MAX} entries and texts of at most {NFS_TEXT_BYTES_MAX} bytes"
            ),
            "report the state of the pagemesh command of this version",
        ));
    }
    Ok(())
}

/// The entries of the longest list, and the bytes of the longest text.
fn longest(export: &NfsExportState) -> (usize, usize) {
    let rules = export.paths.iter().map(|it| it.rules.len());
    let holders = export.nfs4_clients.iter();
    let lists = [
        export.addresses.len(),
        export.paths.len(),
        export.clients.len(),
        export.operations.len(),
        export.nfs4_clients.len(),
    ];
    let file_systems = holders.clone().map(|it| it.file_systems.len());
    let lists = lists.into_iter().chain(rules).chain(file_systems);
    let paths = export.paths.iter();
    let path_texts = paths.flat_map(|it| std::iter::once(&it.path).chain(&it.rules));
    let holder_texts =
        holders.flat_map(|it| [&it.address, &it.name].into_iter().chain(&it.file_systems));
    let texts = path_texts
        .chain(holder_texts)
        .chain(&export.addresses)
        .chain(export.clients.iter().map(|it| &it.address))
        .chain(export.operations.iter().map(|it| &it.name))
        .chain([&export.workers.last_change]);
    let longest_text = texts.map(String::len).max();
    (lists.max().unwrap_or(0), longest_text.unwrap_or(0))
}
