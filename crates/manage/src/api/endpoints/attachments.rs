//! Endpoints for the client of a volume: attach, detach, leg states, reports.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::CallerApi;
use crate::api::document;
use crate::api::reply::{JsonBody, PathParam, Refusal};
use crate::client::{CALL_TIMEOUT, HEARTBEAT_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{
    AttachReply, AttachVolume, ChangeLegs, DetachReply, DetachVolume, ErrorBody, HolderStatus,
    LegChange, ReportHolder, ReportReplication, VolumeDetail,
};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use pagemesh_base::layout::{EpochNumber, Layout, VolumeName};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(attach_volume))
        .routes(routes!(detach_volume))
        .routes(routes!(show_holder))
        .routes(routes!(report_holder))
        .routes(routes!(report_replication))
        .routes(routes!(change_legs))
}

/// Attaches a volume to a client and fences the previous client.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/attach", tag = "volumes",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = AttachVolume,
    responses((status = 200, body = AttachReply), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn attach_volume(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<AttachVolume>,
) -> JsonResult<AttachReply> {
    let attach = move |manager: &Manager| manager.attach(&name, &request);
    api.run_store_work(attach).await.map(Json)
}

/// Ends an attachment; an attachment other than the current one stays.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/detach", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = DetachVolume,
    responses((status = 200, body = DetachReply), (status = 404, body = ErrorBody)))]
async fn detach_volume(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<DetachVolume>,
) -> JsonResult<DetachReply> {
    let detach = move |manager: &Manager| manager.detach(&name, request);
    api.run_store_work(detach).await.map(Json)
}

/// Shows the client that has attached a volume, and the signs of its life.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/holder", tag = "volumes",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume")),
    responses((status = 200, body = HolderStatus), (status = 404, body = ErrorBody)))]
async fn show_holder(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<HolderStatus> {
    let read = move |manager: &Manager| manager.holder(&name);
    api.run_store_work(read).await.map(Json)
}

/// Takes a sign of life of the attached client.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/holder", tag = "volumes",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = ReportHolder,
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn report_holder(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(report): JsonBody<ReportHolder>,
) -> Result<StatusCode, Refusal> {
    let take = move |manager: &Manager| manager.report_holder(&name, report);
    api.run_store_work(take).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes the report of the attached client about asynchronous and resyncing copies, and returns the
/// details of the volume.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/copies", tag = "volumes",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = ReportReplication,
    responses((status = 200, body = VolumeDetail), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn report_replication(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(report): JsonBody<ReportReplication>,
) -> JsonResult<VolumeDetail> {
    let take = move |manager: &Manager| manager.report_replication(&name, report);
    api.run_store_work(take).await.map(Json)
}

/// Changes the states of legs, if the layout has the expected epoch.
///
/// The client of the volume calls it, with the cluster key and its attachment. Omitting the
/// attachment is for tools.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/legs", tag = "volumes",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = ChangeLegs,
    responses((status = 200, body = document::Layout), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn change_legs(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<ChangeLegs>,
) -> JsonResult<Layout> {
    let change = move |manager: &Manager| manager.change_legs(&name, &request);
    api.run_store_work(change).await.map(Json)
}

impl ManagerClient {
    /// Attaches a volume; the layout's epoch in the answer names the attachment.
    #[allow(clippy::missing_errors_doc)]
    pub fn attach(&self, name: &VolumeName, client: &str) -> Result<AttachReply, ManagerError> {
        let request = AttachVolume {
            client: client.to_owned(),
            unreachable: false,
            process: None,
            replaces: None,
            receive: false,
        };
        self.attach_as(name, &request)
    }

    /// Attaches a volume by a whole request.
    #[allow(clippy::missing_errors_doc)]
    pub fn attach_as(
        &self,
        name: &VolumeName,
        request: &AttachVolume,
    ) -> Result<AttachReply, ManagerError> {
        let path = format!("volumes/{name}/attach");
        self.call(Method::POST, &path, CALL_TIMEOUT, request)
    }

    /// The client that has attached a volume, and its signs of life.
    #[allow(clippy::missing_errors_doc)]
    pub fn holder(&self, name: &VolumeName) -> Result<HolderStatus, ManagerError> {
        self.get(&format!("volumes/{name}/holder"))
    }

    /// Reports that this client lives.
    #[allow(clippy::missing_errors_doc)]
    pub fn report_holder(
        &self,
        name: &VolumeName,
        report: ReportHolder,
    ) -> Result<(), ManagerError> {
        let path = format!("volumes/{name}/holder");
        self.call_without_answer(Method::POST, &path, HEARTBEAT_TIMEOUT, &report)
    }

    /// Detaches a volume. An attachment other than the current one stays; without an epoch any
    /// attachment ends.
    #[allow(clippy::missing_errors_doc)]
    pub fn detach(
        &self,
        name: &VolumeName,
        attachment: Option<EpochNumber>,
    ) -> Result<DetachReply, ManagerError> {
        let request = DetachVolume { attachment };
        self.call(
            Method::POST,
            &format!("volumes/{name}/detach"),
            CALL_TIMEOUT,
            &request,
        )
    }

    /// Reports the asynchronous and resyncing copies of an attached volume, and reads the details.
    #[allow(clippy::missing_errors_doc)]
    pub fn report_replication(
        &self,
        name: &VolumeName,
        report: &ReportReplication,
    ) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/copies");
        self.call(Method::POST, &path, CALL_TIMEOUT, report)
    }

    /// Compare-and-swap of leg states.
    #[allow(clippy::missing_errors_doc)]
    pub fn change_legs(
        &self,
        name: &VolumeName,
        attachment: Option<EpochNumber>,
        expected: EpochNumber,
        changes: &[LegChange],
    ) -> Result<Layout, ManagerError> {
        let request = ChangeLegs {
            expected,
            attachment,
            changes: changes.to_vec(),
        };
        self.call(
            Method::POST,
            &format!("volumes/{name}/legs"),
            CALL_TIMEOUT,
            &request,
        )
    }
}
