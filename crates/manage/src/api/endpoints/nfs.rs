//! Endpoints of NFS exports.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::document;
use crate::api::reply::{JsonBody, PathParam, Refusal};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{ErrorBody, NfsExport, ReportNfs};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_nfs))
        .routes(routes!(show_nfs, report_nfs))
}

/// The volumes that are served over NFS, by name: clients, operations and workers.
#[utoipa::path(get, path = "/api/v1/nfs", tag = "nfs", security(("token" = ["viewer"])),
    responses((status = 200, body = Vec<NfsExport>)))]
async fn list_nfs(State(api): State<ApiState>) -> JsonResult<Vec<NfsExport>> {
    let list = api.run_store_work(|manager| Ok(manager.nfs_exports()));
    list.await.map(Json)
}

/// The NFS export of a volume.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/nfs", tag = "nfs",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume")),
    responses((status = 200, body = NfsExport), (status = 404, body = ErrorBody)))]
async fn show_nfs(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<NfsExport> {
    let show = api.run_store_work(move |manager| manager.nfs_export(&name));
    show.await.map(Json)
}

/// Takes the state of the NFS export of a volume from the client that has attached the volume.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/nfs", tag = "nfs",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = ReportNfs,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn report_nfs(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(report): JsonBody<ReportNfs>,
) -> Result<StatusCode, Refusal> {
    let take = move |manager: &Manager| manager.report_nfs(&name, report);
    api.run_store_work(take).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl ManagerClient {
    /// The volumes that are served over NFS.
    #[allow(clippy::missing_errors_doc)]
    pub fn nfs_exports(&self) -> Result<Vec<NfsExport>, ManagerError> {
        self.get("nfs")
    }

    /// The NFS export of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn nfs_export(&self, name: &VolumeName) -> Result<NfsExport, ManagerError> {
        self.get(&format!("volumes/{name}/nfs"))
    }

    /// Reports the state of the NFS export of an attached volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn report_nfs(&self, name: &VolumeName, report: &ReportNfs) -> Result<(), ManagerError> {
        let path = format!("volumes/{name}/nfs");
        self.call_without_answer(Method::POST, &path, CALL_TIMEOUT, report)
    }
}
