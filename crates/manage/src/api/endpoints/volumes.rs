//! Endpoints of volumes: create, show, grow, delete.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::CallerApi;
use crate::api::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::client::{LONG_CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{
    CreateVolume, DeleteReply, ErrorBody, ForceParam, GrowVolume, VolumeDetail, VolumeInfo,
    VolumeSizeReply,
};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_volumes, create_volume))
        .routes(routes!(show_volume, delete_volume))
        .routes(routes!(grow_volume))
}

/// Every volume.
#[utoipa::path(get, path = "/api/v1/volumes", tag = "volumes",
    responses((status = 200, body = Vec<VolumeInfo>)))]
async fn list_volumes(State(api): State<ApiState>) -> JsonResult<Vec<VolumeInfo>> {
    api.run_store_work(|manager| Ok(manager.volumes()))
        .await
        .map(Json)
}

/// Creates a volume.
#[utoipa::path(post, path = "/api/v1/volumes", tag = "volumes", request_body = CreateVolume,
    responses((status = 201, body = VolumeSizeReply), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
async fn create_volume(
    CallerApi(api): CallerApi,
    JsonBody(request): JsonBody<CreateVolume>,
) -> Result<(StatusCode, Json<VolumeSizeReply>), Refusal> {
    let created = api
        .run_brick_work(move |manager| manager.create(&request))
        .await?;
    Ok((StatusCode::CREATED, Json(created)))
}

/// The details of a volume, its layout included.
#[utoipa::path(get, path = "/api/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "The volume")),
    responses((status = 200, body = VolumeDetail), (status = 404, body = ErrorBody)))]
async fn show_volume(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<VolumeDetail> {
    api.run_store_work(move |manager| manager.show(&name))
        .await
        .map(Json)
}

/// Deletes a volume; with `force` also while a client has attached it.
#[utoipa::path(delete, path = "/api/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "The volume"), ForceParam),
    responses((status = 200, body = DeleteReply), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn delete_volume(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(ForceParam { force }): QueryParam<ForceParam>,
) -> JsonResult<DeleteReply> {
    let delete = move |manager: &Manager| manager.delete(&name, force);
    api.run_brick_work(delete).await.map(Json)
}

/// Grows a volume, attached or not.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/grow", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = GrowVolume,
    responses((status = 200, body = VolumeSizeReply), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn grow_volume(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<GrowVolume>,
) -> JsonResult<VolumeSizeReply> {
    api.run_brick_work(move |manager| manager.grow(&name, request))
        .await
        .map(Json)
}

impl ManagerClient {
    /// Every volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn volumes(&self) -> Result<Vec<VolumeInfo>, ManagerError> {
        self.get("volumes")
    }

    /// Creates a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn create(&self, request: &CreateVolume) -> Result<VolumeSizeReply, ManagerError> {
        self.call(Method::POST, "volumes", LONG_CALL_TIMEOUT, request)
    }

    /// The details of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn volume(&self, name: &VolumeName) -> Result<VolumeDetail, ManagerError> {
        self.get(&format!("volumes/{name}"))
    }

    /// Deletes a volume; with `force` also while a client has attached it.
    #[allow(clippy::missing_errors_doc)]
    pub fn delete(&self, name: &VolumeName, force: bool) -> Result<DeleteReply, ManagerError> {
        let path = format!("volumes/{name}?force={force}");
        let answer = self.send(Method::DELETE, &path, LONG_CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// Grows a volume to a new size.
    #[allow(clippy::missing_errors_doc)]
    pub fn grow(
        &self,
        name: &VolumeName,
        size_bytes: u64,
    ) -> Result<VolumeSizeReply, ManagerError> {
        let path = format!("volumes/{name}/grow");
        self.call(
            Method::POST,
            &path,
            LONG_CALL_TIMEOUT,
            &GrowVolume { size_bytes },
        )
    }
}
