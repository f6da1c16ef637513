//! Endpoints of the copies of a volume.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, CreatorApi, IfMatchHeader, KeyHeader};
use crate::api::document;
use crate::api::etag::created;
use crate::api::reply::{JsonBody, PathParam, Refusal};
use crate::client::{CALL_TIMEOUT, LONG_CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{AttachReplica, ChooseReplica, ErrorBody, VolumeDetail};
use axum::Json;
use axum::http::Method;
use axum::response::Response;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(attach_replica))
        .routes(routes!(detach_replica))
        .routes(routes!(promote_replica))
}

/// Adds a copy to every column of a volume, attached or not. A repetition with the same
/// `Idempotency-Key` gets the first answer again.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), IfMatchHeader, KeyHeader),
    request_body = AttachReplica,
    responses((status = 201, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 422, body = ErrorBody), (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn attach_replica(
    CreatorApi(api): CreatorApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<AttachReplica>,
) -> Result<Response, Refusal> {
    let attach = move |manager: &Manager| manager.attach_replica_keyed(&name, request);
    Ok(created(api.run_brick_work(attach).await?))
}

/// Removes a copy of a volume; with `force` also while a client has attached it.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas/detach", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), IfMatchHeader),
    request_body = ChooseReplica,
    responses((status = 200, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn detach_replica(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<ChooseReplica>,
) -> JsonResult<VolumeDetail> {
    let detach = move |manager: &Manager| manager.detach_replica(&name, request);
    api.run_brick_work(detach).await.map(Json)
}

/// Promotes one copy. With `force` also a copy that lacks writes, or while a client has attached
/// the volume.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas/promote", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), IfMatchHeader),
    request_body = ChooseReplica,
    responses((status = 200, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn promote_replica(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<ChooseReplica>,
) -> JsonResult<VolumeDetail> {
    let promote = move |manager: &Manager| manager.promote_replica(&name, request);
    api.run_store_work(promote).await.map(Json)
}

impl ManagerClient {
    /// Adds a copy to every column of a volume, on the given brick or where there is room. The client sends a
    /// key, and repeats the call if its answer was lost.
    #[allow(clippy::missing_errors_doc)]
    pub fn attach_replica(
        &self,
        name: &VolumeName,
        request: AttachReplica,
    ) -> Result<VolumeDetail, ManagerError> {
        self.create_with_key(&format!("volumes/{name}/replicas"), &request)
    }

    /// Removes a copy of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn detach_replica(
        &self,
        name: &VolumeName,
        choice: ChooseReplica,
    ) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/replicas/detach");
        self.call(Method::POST, &path, LONG_CALL_TIMEOUT, &choice)
    }

    /// Promotes one copy of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn promote_replica(
        &self,
        name: &VolumeName,
        choice: ChooseReplica,
    ) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/replicas/promote");
        self.call(Method::POST, &path, CALL_TIMEOUT, &choice)
    }
}
