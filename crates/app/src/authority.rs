//! The manager from the volume's point of view, over a manager client.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, VolumeName};
use pagemesh_manage::wire;
use pagemesh_manage::{ManagerClient, ManagerError};
use pagemesh_volume::{
    Authority, AuthorityError, BrickAddress, CopyReport, LegChange, ResolvedLayout,
};
use std::collections::BTreeMap;

/// Sends requests of a volume to a manager.
pub struct ManagerAuthority {
    /// The manager client.
    pub client: ManagerClient,
    /// Whether no in-sync copy was reachable after the last attach.
    pub unreachable: bool,
}

fn authority_error(cause: ManagerError) -> AuthorityError {
    match cause {
        ManagerError::Conflict { current, .. } => AuthorityError::Conflict {
            current: current.into(),
        },
        ManagerError::Fenced { .. } => AuthorityError::Fenced,
        ManagerError::Unreachable { .. } => AuthorityError::Unreachable(cause.to_string()),
        _ => AuthorityError::Refused(cause.to_string()),
    }
}

fn brick_address(address: wire::BrickAddress) -> BrickAddress {
    BrickAddress {
        tcp: address.tcp,
        map_socket: address.map_socket,
        durability: address.durability.to_string(),
    }
}

fn resolved_layout(
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

fn replication_report(attachment: Epoch, told: &CopyReport) -> wire::ReportReplication {
    let lag = told.lag.map(|lag| wire::ReplicaLag {
        changes: lag.changes,
        bytes: lag.bytes,
        age_us: lag.age_us,
    });
    let returns = told
        .resyncs
        .iter()
        .map(|(&copy, resync)| wire::ResyncProgress {
            copy,
            bytes_todo: resync.bytes_todo,
            bytes_done: resync.bytes_done,
            elapsed_ms: resync.elapsed_ms,
        });
    wire::ReportReplication {
        attachment: EpochNumber(attachment.0),
        lag,
        returns: returns.collect(),
    }
}

impl Authority for ManagerAuthority {
    fn attach(&self, name: &VolumeName, client: &str) -> Result<ResolvedLayout, AuthorityError> {
        let wire::AttachReply { layout, bricks } = self
            .client
            .attach_as(name, client, self.unreachable)
            .map_err(authority_error)?;
        Ok(resolved_layout(layout, bricks))
    }

    fn change_legs(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        expected: Epoch,
        changes: &[LegChange],
    ) -> Result<Layout, AuthorityError> {
        let changes: Vec<_> = changes
            .iter()
            .map(|change| wire::LegChange {
                segment: change.segment,
                column: change.column,
                leg: change.leg,
                to: change.to,
                note: None,
            })
            .collect();
        let attachment = Some(EpochNumber(attachment.0));
        self.client
            .change_legs(name, attachment, EpochNumber(expected.0), &changes)
            .map_err(authority_error)
    }

    fn layout(
        &self,
        name: &VolumeName,
        attachment: Epoch,
        told: &CopyReport,
    ) -> Result<ResolvedLayout, AuthorityError> {
        let detail = match told.is_empty() {
            true => self.client.volume(name),
            false => self
                .client
                .report_replication(name, &replication_report(attachment, told)),
        };
        let detail = detail.map_err(authority_error)?;
        match detail.is_attached_as(EpochNumber(attachment.0)) {
            true => Ok(resolved_layout(detail.layout, detail.bricks)),
            false => Err(AuthorityError::Fenced),
        }
    }

    fn detach(&self, name: &VolumeName, attachment: Epoch) -> Result<(), AuthorityError> {
        self.client
            .detach(name, Some(EpochNumber(attachment.0)))
            .map(drop)
            .map_err(authority_error)
    }
}
