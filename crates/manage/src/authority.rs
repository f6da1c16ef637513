//! The manager as the authority of an attached volume, over any connection to a manager.
//!
//! The command calls a manager over HTTP; the simulation calls one over its own network. Requests,
//! answers and errors are translated here, once for both.

use crate::client::{ManagerClient, ManagerError};
use crate::error_code::ErrorCode;
use crate::wire::{
    self, AttachReply, AttachVolume, ChangeLegs, DetachVolume, ReportReplication, SnapshotDetail,
    VolumeDetail,
};
use pagemesh_base::authority::{
    Authority, AuthorityError, BrickAddress, CopyReport, LegChange, ResolvedLayout,
};
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, VolumeName};
use std::collections::BTreeMap;

/// The calls of an attached volume to a manager. Each call blocks for a bounded time.
#[allow(clippy::missing_errors_doc)]
pub trait VolumeConnection: Send + Sync {
    /// Attaches the volume.
    fn attach(
        &self,
        name: &VolumeName,
        request: &AttachVolume,
    ) -> Result<AttachReply, ManagerError>;

    /// Changes leg states by compare-and-swap.
    fn change_legs(&self, name: &VolumeName, request: &ChangeLegs) -> Result<Layout, ManagerError>;

    /// Passes on a report, if there is one, and reads the details of the volume.
    fn detail(
        &self,
        name: &VolumeName,
        report: Option<&ReportReplication>,
    ) -> Result<VolumeDetail, ManagerError>;

    /// Detaches the volume.
    fn detach(&self, name: &VolumeName, request: DetachVolume) -> Result<(), ManagerError>;
}

impl VolumeConnection for ManagerClient {
    fn attach(
        &self,
        name: &VolumeName,
        request: &AttachVolume,
    ) -> Result<AttachReply, ManagerError> {
        self.attach_as(name, request)
    }

    fn change_legs(&self, name: &VolumeName, request: &ChangeLegs) -> Result<Layout, ManagerError> {
        let ChangeLegs {
            expected,
            attachment,
            changes,
        } = request;
        ManagerClient::change_legs(self, name, *attachment, *expected, changes)
    }

    fn detail(
        &self,
        name: &VolumeName,
        report: Option<&ReportReplication>,
    ) -> Result<VolumeDetail, ManagerError> {
        match report {
            None => self.volume(name),
            Some(report) => self.report_replication(name, report),
        }
    }

    fn detach(&self, name: &VolumeName, request: DetachVolume) -> Result<(), ManagerError> {
        ManagerClient::detach(self, name, request.attachment).map(drop)
    }
}

/// The authority of a volume over a connection to a manager.
#[derive(Clone, Debug)]
pub struct ManagerAuthority<C> {
    /// The connection.
    pub connection: C,
    /// Whether no in-sync copy was reachable after the last attach.
    pub unreachable: bool,
    /// The identity of this process, for later clients on this machine.
    pub process: Option<String>,
    /// The only attachment that an attach may end, see [`AttachVolume`].
    pub replaces: Option<EpochNumber>,
    /// Whether this process receives snapshots, see [`AttachVolume`].
    pub receive: bool,
}

impl<C: VolumeConnection> Authority for ManagerAuthority<C> {
    fn attach(&self, name: &VolumeName, client: &str) -> Result<ResolvedLayout, AuthorityError> {
        let request = AttachVolume {
            client: client.to_owned(),
            unreachable: self.unreachable,
            process: self.process.clone(),
            replaces: self.replaces,
            receive: self.receive,
        };
        let AttachReply { layout, bricks } = self.connection.attach(name, &request)?;
        Ok(resolved_layout(layout, bricks))
    }

    fn change_legs(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        expected: Epoch,
        changes: &[LegChange],
    ) -> Result<Layout, AuthorityError> {
        let request = ChangeLegs {
            expected: EpochNumber(expected.0),
            attachment: Some(EpochNumber(attachment.0)),
            changes: changes.iter().map(leg_change).collect(),
        };
        Ok(self.connection.change_legs(name, &request)?)
    }

    fn layout(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        report: &CopyReport,
    ) -> Result<ResolvedLayout, AuthorityError> {
        let report = (!report.is_empty()).then(|| replication_report(attachment, report));
        let detail = match self.connection.detail(name, report.as_ref()) {
            Err(cause) if is_refused_report(&cause, report.as_ref()) => {
                let report = report.map(|it| ReportReplication {
                    replica_snapshots: vec![],
                    ..it
                });
                self.connection.detail(name, report.as_ref())?
            }
            answer => answer?,
        };
        if detail.is_attached_as(EpochNumber(attachment.0)) {
            Ok(resolved_layout(detail.layout, detail.bricks))
        } else {
            Err(AuthorityError::Fenced)
        }
    }

    fn detach(&self, name: &VolumeName, attachment: Epoch) -> Result<(), AuthorityError> {
        let request = DetachVolume {
            attachment: Some(EpochNumber(attachment.0)),
        };
        Ok(self.connection.detach(name, request)?)
    }
}

impl From<ManagerError> for AuthorityError {
    fn from(cause: ManagerError) -> AuthorityError {
        match cause {
            ManagerError::Conflict { current, .. } => AuthorityError::Conflict {
                current: current.into(),
            },
            ManagerError::Fenced { .. } => AuthorityError::Fenced,
            ManagerError::Unreachable { .. } => AuthorityError::Unreachable(cause.to_string()),
            _ => AuthorityError::Refused(cause.to_string()),
        }
    }
}

fn leg_change(change: &LegChange) -> wire::LegChange {
    wire::LegChange {
        segment: change.segment,
        column: change.column,
        leg: change.leg,
        to: change.to,
        note: None,
    }
}

/// The layout to read a snapshot by.
#[must_use]
pub fn snapshot_layout(detail: &SnapshotDetail) -> ResolvedLayout {
    resolved_layout(detail.layout.clone(), detail.bricks.clone())
}

/// A layout of an answer of the manager, for a volume or a snapshot.
#[must_use]
pub fn resolved_layout(
    layout: Layout,
    bricks: BTreeMap<BrickId, wire::BrickAddress>,
) -> ResolvedLayout {
    let bricks = bricks.into_iter();
    ResolvedLayout {
        layout,
        bricks: bricks
            .map(|(brick, at)| (brick, brick_address(at)))
            .collect(),
    }
}

fn brick_address(address: wire::BrickAddress) -> BrickAddress {
    BrickAddress {
        name: address.name,
        tcp: address.tcp,
        map_socket: address.map_socket,
        durability: address.durability.to_string(),
    }
}

fn replication_report(attachment: Epoch, report: &CopyReport) -> ReportReplication {
    let lag = report.lag.map(|lag| wire::ReplicaLag {
        changes: lag.changes,
        bytes: lag.bytes,
        age_us: lag.age_us,
    });
    let resyncs = report
        .resyncs
        .iter()
        .map(|(&copy, resync)| wire::ResyncProgress {
            copy,
            bytes_todo: resync.bytes_todo,
            bytes_done: resync.bytes_done,
            elapsed_ms: resync.elapsed_ms,
        });
    let snapshots = report.replica_snapshots.iter();
    let snapshots = snapshots.map(|it| wire::ReplicaSnapshot {
        slice: it.slice,
        epoch: EpochNumber(it.snapshot.0),
    });
    ReportReplication {
        attachment: EpochNumber(attachment.0),
        lag,
        resyncs: resyncs.collect(),
        replica_snapshots: snapshots.collect(),
    }
}

/// Whether the manager may not know snapshots of a replica in a report, as one of an earlier release. After any other answer
/// the client reports them again.
fn is_refused_report(cause: &ManagerError, report: Option<&ReportReplication>) -> bool {
    let has_snapshots = report.is_some_and(|it| !it.replica_snapshots.is_empty());
    let is_unknown = matches!(
        cause,
        ManagerError::Refused {
            code: ErrorCode::BadRequest,
            ..
        }
    );
    has_snapshots && is_unknown
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_base::authority::ReplicaSnapshot;
    use pagemesh_base::layout::SliceId;

    fn refused(code: ErrorCode) -> ManagerError {
        let (error, hint) = (String::new(), String::new());
        ManagerError::Refused {
            status: code.status(),
            code,
            error,
            hint,
        }
    }

    /// A snapshot that is left out once counts as reported. So only a manager that cannot know it gets a shorter report.
    #[test]
    fn reported_snapshots_are_left_out_only_if_they_are_unknown() {
        let snapshot = ReplicaSnapshot {
            slice: SliceId(uuid::Uuid::from_u128(1)),
            snapshot: Epoch(3),
        };
        let copies = CopyReport {
            replica_snapshots: vec![snapshot],
            ..CopyReport::default()
        };
        let report = replication_report(Epoch(1), &copies);
        for code in [
            ErrorCode::Internal,
            ErrorCode::InUse,
            ErrorCode::RateLimited,
        ] {
            assert!(!is_refused_report(&refused(code), Some(&report)));
        }
        let unknown = refused(ErrorCode::BadRequest);
        assert!(is_refused_report(&unknown, Some(&report)));
        assert!(!is_refused_report(&unknown, None));
    }
}
