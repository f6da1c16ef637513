//! Endpoints of rollbacks: begin, show, attach, copy, finish, undo.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::CallerApi;
use crate::api::document;
use crate::api::reply::{JsonBody, PathParam};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::rollback::Rollback;
use crate::wire::{
    AttachReply, AttachVolume, BeginRollback, EndedRollback, ErrorBody, FinishRollback,
    StartRollbackCopy,
};
use axum::Json;
use axum::extract::State;
use axum::http::Method;
use pagemesh_base::layout::{EpochNumber, VolumeName};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(show_rollback, begin_rollback, undo_rollback))
        .routes(routes!(attach_for_rollback))
        .routes(routes!(start_rollback_copy))
        .routes(routes!(finish_rollback))
}

/// The rollback of a volume that has not ended.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/rollback", tag = "snapshots",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume")),
    responses((status = 200, body = Rollback), (status = 404, body = ErrorBody)))]
async fn show_rollback(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<Rollback> {
    let show = move |manager: &Manager| manager.show_rollback(&name);
    api.run_store_work(show).await.map(Json)
}

/// Begins a rollback, or takes it up. Until it has ended, other uses of the volume are refused.
///
/// The caller then attaches the volume for the rollback, makes the snapshot of before, copies the pages, and finishes it.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/rollback", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = BeginRollback,
    responses((status = 200, body = Rollback), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn begin_rollback(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<BeginRollback>,
) -> JsonResult<Rollback> {
    let begin = move |manager: &Manager| manager.begin_rollback(&name, &request);
    api.run_store_work(begin).await.map(Json)
}

/// Turns a rollback back. It ends at once if nothing was changed. Otherwise the client copies from the snapshot of before.
#[utoipa::path(delete, path = "/api/v1/volumes/{name}/rollback", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume")),
    responses((status = 200, body = EndedRollback), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn undo_rollback(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<EndedRollback> {
    let undo = move |manager: &Manager| manager.undo_rollback(&name);
    api.run_store_work(undo).await.map(Json)
}

/// Attaches a volume for its rollback, and fences the previous client.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/rollback/attach", tag = "snapshots",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = AttachVolume,
    responses((status = 200, body = AttachReply), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn attach_for_rollback(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<AttachVolume>,
) -> JsonResult<AttachReply> {
    let attach = move |manager: &Manager| manager.attach_for_rollback(&name, &request);
    api.run_store_work(attach).await.map(Json)
}

/// Notes that the snapshot of before exists, and holds it. From then on the client may change pages.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/rollback/copy", tag = "snapshots",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = StartRollbackCopy,
    responses((status = 200, body = Rollback), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn start_rollback_copy(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<StartRollbackCopy>,
) -> JsonResult<Rollback> {
    let start = move |manager: &Manager| manager.start_rollback_copy(&name, request.attachment);
    api.run_store_work(start).await.map(Json)
}

/// Ends a rollback after all pages are copied.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/rollback/finish", tag = "snapshots",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = FinishRollback,
    responses((status = 200, body = EndedRollback), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn finish_rollback(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<FinishRollback>,
) -> JsonResult<EndedRollback> {
    let finish = move |manager: &Manager| manager.finish_rollback(&name, request);
    api.run_store_work(finish).await.map(Json)
}

impl ManagerClient {
    /// The rollback of a volume that has not ended.
    #[allow(clippy::missing_errors_doc)]
    pub fn rollback(&self, volume: &VolumeName) -> Result<Rollback, ManagerError> {
        self.get(&format!("volumes/{volume}/rollback"))
    }

    /// Begins a rollback, or takes it up.
    #[allow(clippy::missing_errors_doc)]
    pub fn begin_rollback(
        &self,
        volume: &VolumeName,
        request: &BeginRollback,
    ) -> Result<Rollback, ManagerError> {
        let path = format!("volumes/{volume}/rollback");
        self.call(Method::POST, &path, CALL_TIMEOUT, request)
    }

    /// Turns a rollback back.
    #[allow(clippy::missing_errors_doc)]
    pub fn undo_rollback(&self, volume: &VolumeName) -> Result<EndedRollback, ManagerError> {
        let path = format!("volumes/{volume}/rollback");
        let answer = self.send(Method::DELETE, &path, CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// Attaches a volume for its rollback.
    #[allow(clippy::missing_errors_doc)]
    pub fn attach_for_rollback(
        &self,
        volume: &VolumeName,
        request: &AttachVolume,
    ) -> Result<AttachReply, ManagerError> {
        let path = format!("volumes/{volume}/rollback/attach");
        self.call(Method::POST, &path, CALL_TIMEOUT, request)
    }

    /// Notes that the snapshot of before exists, and holds it.
    #[allow(clippy::missing_errors_doc)]
    pub fn start_rollback_copy(
        &self,
        volume: &VolumeName,
        attachment: EpochNumber,
    ) -> Result<Rollback, ManagerError> {
        let path = format!("volumes/{volume}/rollback/copy");
        let request = StartRollbackCopy { attachment };
        self.call(Method::POST, &path, CALL_TIMEOUT, &request)
    }

    /// Ends a rollback after all pages are copied.
    #[allow(clippy::missing_errors_doc)]
    pub fn finish_rollback(
        &self,
        volume: &VolumeName,
        request: &FinishRollback,
    ) -> Result<EndedRollback, ManagerError> {
        let path = format!("volumes/{volume}/rollback/finish");
        self.call(Method::POST, &path, CALL_TIMEOUT, request)
    }
}
