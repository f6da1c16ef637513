//! Endpoints of NFS exports.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::CallerApi;
use crate::api::document;
use crate::api::reply::{JsonBody, PathParam};
use crate::client::{CALL_TIMEOUT, LONG_CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{ErrorBody, LostNfsState, Nfs4ClientId, NfsExport, NfsOrders, ReportNfs};
use axum::Json;
use axum::extract::State;
use axum::http::Method;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_nfs))
        .routes(routes!(show_nfs, report_nfs))
        .routes(routes!(expire_nfs_client))
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

/// Takes the state of the NFS export of a volume from the client that has attached the volume, and returns the orders to it.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/nfs", tag = "nfs",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = ReportNfs,
    responses((status = 200, body = NfsOrders), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn report_nfs(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(report): JsonBody<ReportNfs>,
) -> JsonResult<NfsOrders> {
    let take = move |manager: &Manager| manager.report_nfs(&name, report);
    api.run_store_work(take).await.map(Json)
}

/// Expires a client of NFSv4.1: it loses its sessions, opens and locks, and cannot reclaim them. Waits for its server, at most 25 s.
#[utoipa::path(delete, path = "/api/v1/nfs/clients/{client}", tag = "nfs",
    security(("token" = ["operator"])),
    params(("client" = String, Path, description = "The id of the client: 16 hexadecimal digits")),
    responses((status = 200, body = LostNfsState), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn expire_nfs_client(
    CallerApi(api): CallerApi,
    PathParam(client): PathParam<Nfs4ClientId>,
) -> JsonResult<LostNfsState> {
    let expire = move |manager: &Manager| manager.expire_nfs_client(client);
    api.run_brick_work(expire).await.map(Json)
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
    pub fn report_nfs(
        &self,
        name: &VolumeName,
        report: &ReportNfs,
    ) -> Result<NfsOrders, ManagerError> {
        let path = format!("volumes/{name}/nfs");
        self.call(Method::POST, &path, CALL_TIMEOUT, report)
    }

    /// Expires a client of NFSv4.1.
    #[allow(clippy::missing_errors_doc)]
    pub fn expire_nfs_client(&self, client: Nfs4ClientId) -> Result<LostNfsState, ManagerError> {
        let path = format!("nfs/clients/{client}");
        let answer = self.send(Method::DELETE, &path, LONG_CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }
}
