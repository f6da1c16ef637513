//! Endpoints of bookmarks, and of the promotion of a volume that receives snapshots.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, CreatorApi, IfMatchHeader, KeyHeader};
use crate::api::document;
use crate::api::etag::{IfNoneMatchHeader, created, tagged, tagged_list};
use crate::api::reply::{JsonBody, PathParam, Refusal};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::snapshots::SnapshotName;
use crate::wire::{BookmarkDetail, BookmarkInfo, CreateBookmark, ErrorBody, VolumeDetail};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_bookmarks, create_bookmark))
        .routes(routes!(show_bookmark, delete_bookmark))
        .routes(routes!(promote_volume))
}

/// The bookmarks of a volume, by name.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/bookmarks", tag = "snapshots",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume"), IfNoneMatchHeader),
    responses((status = 200, body = Vec<BookmarkInfo>), (status = 304), (status = 404, body = ErrorBody)))]
async fn list_bookmarks(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let list = api.run_store_work(move |manager| manager.bookmarks(&name));
    let found = list.await?;
    Ok(tagged_list(&headers, &found, &found))
}

/// Makes a bookmark of a snapshot: its epoch without its data. Changes since can be sent after the snapshot is deleted.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/bookmarks", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), KeyHeader),
    request_body = CreateBookmark,
    responses((status = 201, body = BookmarkInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
async fn create_bookmark(
    CreatorApi(api): CreatorApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<CreateBookmark>,
) -> Result<Response, Refusal> {
    let create = move |manager: &Manager| manager.create_bookmark_keyed(&name, &request);
    Ok(created(api.run_store_work(create).await?))
}

/// A bookmark, and the legs that can tell the changes since. `ETag` names its state for `If-Match`.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/bookmarks/{bookmark}", tag = "snapshots",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume"),
        ("bookmark" = document::Name, Path, description = "The bookmark"), IfNoneMatchHeader),
    responses((status = 200, body = BookmarkDetail), (status = 304), (status = 404, body = ErrorBody)))]
async fn show_bookmark(
    State(api): State<ApiState>,
    PathParam((name, bookmark)): PathParam<(VolumeName, SnapshotName)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let show = api.run_store_work(move |manager| manager.show_bookmark(&name, &bookmark));
    let (detail, tag) = show.await?;
    Ok(tagged(&headers, tag, &detail, &detail))
}

/// Deletes a bookmark.
#[utoipa::path(delete, path = "/api/v1/volumes/{name}/bookmarks/{bookmark}", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"),
        ("bookmark" = document::Name, Path, description = "The bookmark"), IfMatchHeader),
    responses((status = 204), (status = 404, body = ErrorBody)))]
async fn delete_bookmark(
    CallerApi(api): CallerApi,
    PathParam((name, bookmark)): PathParam<(VolumeName, SnapshotName)>,
) -> Result<StatusCode, Refusal> {
    let delete = move |manager: &Manager| manager.delete_bookmark(&name, &bookmark);
    api.run_store_work(delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lets clients write to a volume that received snapshots. It receives no more. A repetition changes nothing.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/promote", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), IfMatchHeader),
    responses((status = 200, body = VolumeDetail), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn promote_volume(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<VolumeDetail> {
    let promote = move |manager: &Manager| manager.promote_volume(&name);
    api.run_store_work(promote).await.map(Json)
}

impl ManagerClient {
    /// The bookmarks of a volume, by name.
    #[allow(clippy::missing_errors_doc)]
    pub fn bookmarks(&self, volume: &VolumeName) -> Result<Vec<BookmarkInfo>, ManagerError> {
        self.get(&format!("volumes/{volume}/bookmarks"))
    }

    /// Makes a bookmark, once.
    #[allow(clippy::missing_errors_doc)]
    pub fn create_bookmark(
        &self,
        volume: &VolumeName,
        request: &CreateBookmark,
    ) -> Result<BookmarkInfo, ManagerError> {
        self.create_with_key(&format!("volumes/{volume}/bookmarks"), request)
    }

    /// A bookmark, and the legs that can tell the changes since.
    #[allow(clippy::missing_errors_doc)]
    pub fn bookmark(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Result<BookmarkDetail, ManagerError> {
        self.get(&format!("volumes/{volume}/bookmarks/{name}"))
    }

    /// Deletes a bookmark.
    #[allow(clippy::missing_errors_doc)]
    pub fn delete_bookmark(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Result<(), ManagerError> {
        let path = format!("volumes/{volume}/bookmarks/{name}");
        let answer = self.send(Method::DELETE, &path, CALL_TIMEOUT, String::new())?;
        self.check_status(answer).map(drop)
    }

    /// Lets clients write to a volume that received snapshots.
    #[allow(clippy::missing_errors_doc)]
    pub fn promote_volume(&self, name: &VolumeName) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/promote");
        let answer = self.send(Method::POST, &path, CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }
}
