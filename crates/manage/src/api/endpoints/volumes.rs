//! Endpoints of volumes: create, show, grow, delete.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, CreatorApi, IfMatchHeader, KeyHeader};
use crate::api::document;
use crate::api::etag::{IfNoneMatchHeader, created, tagged_list, tagged_volume};
use crate::api::paging::{check_limit, json_name, next_page};
use crate::api::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::client::{CALL_TIMEOUT, LONG_CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{
    CreateVolume, DeleteReply, DeleteVolumeParams, ErrorBody, GrowVolume, ListVolumes, SetLabels,
    VolumeDetail, VolumeInfo, VolumeSizeReply,
};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_volumes, create_volume))
        .routes(routes!(show_volume, delete_volume))
        .routes(routes!(grow_volume))
        .routes(routes!(set_labels))
}

/// The volumes, by name; `If-None-Match` spares an unchanged list.
#[utoipa::path(get, path = "/api/v1/volumes", tag = "volumes",
    security(("token" = ["viewer"])), params(ListVolumes, IfNoneMatchHeader),
    responses((status = 200, body = Vec<VolumeInfo>), (status = 304), (status = 400, body = ErrorBody)))]
async fn list_volumes(
    State(api): State<ApiState>,
    QueryParam(asked): QueryParam<ListVolumes>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    check_limit(asked.limit)?;
    let list = asked.clone();
    let list = api.run_store_work(move |manager| Ok(manager.list_volumes(&list)));
    let (volumes, has_more) = list.await?;
    let mut response = tagged_list(&headers, &volumes, &volumes);
    if let Some(last) = volumes.last().filter(|_| has_more) {
        let health = asked.health.map(|it| json_name(&it));
        let content = asked.content.map(|it| json_name(&it));
        let link = next_page(
            "/api/v1/volumes",
            &[
                ("after", Some(last.name.to_string())),
                ("limit", asked.limit.map(|it| it.to_string())),
                ("search", asked.search),
                ("health", health),
                ("content", content),
            ],
        );
        response.headers_mut().extend(link);
    }
    Ok(response)
}

/// Creates a volume. A repetition with the same `Idempotency-Key` gets the first answer again.
#[utoipa::path(post, path = "/api/v1/volumes", tag = "volumes", security(("token" = ["operator"])),
    params(KeyHeader), request_body = CreateVolume,
    responses((status = 201, body = VolumeSizeReply), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn create_volume(
    CreatorApi(api): CreatorApi,
    JsonBody(request): JsonBody<CreateVolume>,
) -> Result<Response, Refusal> {
    let create = api.run_brick_work(move |manager| manager.create_keyed(&request));
    Ok(created(create.await?))
}

/// The details of a volume, its layout included. `ETag` names its state for `If-Match`.
#[utoipa::path(get, path = "/api/v1/volumes/{name}", tag = "volumes",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume"), IfNoneMatchHeader),
    responses((status = 200, body = VolumeDetail), (status = 304), (status = 404, body = ErrorBody)))]
async fn show_volume(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let show = api.run_store_work(move |manager| manager.show_tagged(&name));
    let (detail, tag) = show.await?;
    Ok(tagged_volume(&headers, tag, detail))
}

/// Deletes a volume; with `force` also while a client has attached it, with `snapshots` also one that has snapshots.
#[utoipa::path(delete, path = "/api/v1/volumes/{name}", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), DeleteVolumeParams, IfMatchHeader),
    responses((status = 200, body = DeleteReply), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn delete_volume(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(params): QueryParam<DeleteVolumeParams>,
) -> JsonResult<DeleteReply> {
    let delete = move |manager: &Manager| manager.delete_with(&name, params);
    api.run_brick_work(delete).await.map(Json)
}

/// Grows a volume, attached or not.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/grow", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), IfMatchHeader),
    request_body = GrowVolume,
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

/// Sets and removes labels of a volume. Other labels stay.
#[utoipa::path(put, path = "/api/v1/volumes/{name}/labels", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), IfMatchHeader),
    request_body = SetLabels,
    responses((status = 200, body = VolumeInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn set_labels(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<SetLabels>,
) -> JsonResult<VolumeInfo> {
    let set = move |manager: &Manager| manager.set_labels(&name, &request);
    api.run_store_work(set).await.map(Json)
}

impl ManagerClient {
    /// Sets and removes labels of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn set_labels(
        &self,
        name: &VolumeName,
        labels: &SetLabels,
    ) -> Result<VolumeInfo, ManagerError> {
        let path = format!("volumes/{name}/labels");
        self.call(Method::PUT, &path, CALL_TIMEOUT, labels)
    }

    /// Every volume, read in pages.
    #[allow(clippy::missing_errors_doc)]
    pub fn volumes(&self) -> Result<Vec<VolumeInfo>, ManagerError> {
        self.all_pages("volumes", |volume: &VolumeInfo| volume.name.to_string())
    }

    /// Creates a volume, once: the client sends a key, and repeats the call if its answer was lost.
    #[allow(clippy::missing_errors_doc)]
    pub fn create(&self, request: &CreateVolume) -> Result<VolumeSizeReply, ManagerError> {
        self.create_with_key("volumes", request)
    }

    /// The details of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn volume(&self, name: &VolumeName) -> Result<VolumeDetail, ManagerError> {
        self.get(&format!("volumes/{name}"))
    }

    /// Deletes a volume; with `force` also while a client has attached it.
    #[allow(clippy::missing_errors_doc)]
    pub fn delete(&self, name: &VolumeName, force: bool) -> Result<DeleteReply, ManagerError> {
        let snapshots = false;
        self.delete_with(name, DeleteVolumeParams { force, snapshots })
    }

    /// The same, and its snapshots with it if the parameters say so.
    #[allow(clippy::missing_errors_doc)]
    pub fn delete_with(
        &self,
        name: &VolumeName,
        DeleteVolumeParams { force, snapshots }: DeleteVolumeParams,
    ) -> Result<DeleteReply, ManagerError> {
        let mut path = format!("volumes/{name}?force={force}");
        if snapshots {
            path.push_str("&snapshots=true");
        }
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
