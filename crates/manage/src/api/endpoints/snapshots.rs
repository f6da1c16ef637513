//! Endpoints of snapshots: list, create, show, delete, hold.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, CreatorApi, IfMatchHeader, KeyHeader};
use crate::api::document;
use crate::api::etag::{IfNoneMatchHeader, created, tagged, tagged_list};
use crate::api::paging::{PAGE_MAX, check_limit, next_page};
use crate::api::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::client::{CALL_TIMEOUT, LONG_CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::fault::Fault;
use crate::snapshots::{HoldTag, SNAPSHOTS_MAX, SnapshotName};
use crate::wire::{
    CloneProgressReply, CountSpace, CreateClone, CreateSnapshot, CreateSnapshots, CreatedSnapshots,
    DeleteSnapshotReply, ErrorBody, ListSnapshots, SnapshotDetail, SnapshotInfo, VolumeSizeReply,
    VolumeSpaceReply,
};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, Method};
use axum::response::Response;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Snapshots that a client asks for at once.
const PAGE_ENTRIES: usize = 1000;
/// Pages of the longest list, with a margin for snapshots that are made meanwhile.
const PAGES_MAX: usize = SNAPSHOTS_MAX / PAGE_ENTRIES + 16;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_all_snapshots, create_snapshots))
        .routes(routes!(list_snapshots, create_snapshot))
        .routes(routes!(show_snapshot, delete_snapshot))
        .routes(routes!(hold_snapshot, release_snapshot))
        .routes(routes!(create_clone))
        .routes(routes!(promote_clone))
        .routes(routes!(snapshot_space))
}

/// The snapshots of all volumes: by the name of the volume, newest first.
#[utoipa::path(get, path = "/api/v1/snapshots", tag = "snapshots",
    security(("token" = ["viewer"])), params(ListSnapshots, IfNoneMatchHeader),
    responses((status = 200, body = Vec<SnapshotInfo>), (status = 304), (status = 400, body = ErrorBody)))]
async fn list_all_snapshots(
    State(api): State<ApiState>,
    QueryParam(asked): QueryParam<ListSnapshots>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let limit = check_limit(asked.limit)?.unwrap_or(PAGE_MAX);
    let list = asked.clone();
    let list = api.run_store_work(move |manager| Ok(manager.list_all_snapshots(&list, limit)));
    let (snapshots, has_more) = list.await?;
    let path = "/api/v1/snapshots";
    Ok(page_answer(path, asked, &headers, &snapshots, has_more))
}

/// Makes snapshots of several volumes, one after the other: all or none.
#[utoipa::path(post, path = "/api/v1/snapshots", tag = "snapshots", security(("token" = ["operator"])),
    params(KeyHeader), request_body = CreateSnapshots,
    responses((status = 201, body = CreatedSnapshots), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn create_snapshots(
    CreatorApi(api): CreatorApi,
    JsonBody(request): JsonBody<CreateSnapshots>,
) -> Result<Response, Refusal> {
    let create = api.run_brick_work(move |manager| manager.create_snapshots_keyed(&request));
    Ok(created(create.await?))
}

/// Clones a snapshot: a new volume that begins with its contents, and shares its pages. A repetition with the same
/// `Idempotency-Key` gets the first answer again.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/snapshots/{snapshot}/clones", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"),
        ("snapshot" = document::Name, Path, description = "The snapshot"), KeyHeader),
    request_body = CreateClone,
    responses((status = 201, body = VolumeSizeReply), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn create_clone(
    CreatorApi(api): CreatorApi,
    PathParam((name, snapshot)): PathParam<(VolumeName, SnapshotName)>,
    JsonBody(request): JsonBody<CreateClone>,
) -> Result<Response, Refusal> {
    let create = move |manager: &Manager| manager.create_clone_keyed(&name, &snapshot, &request);
    Ok(created(api.run_brick_work(create).await?))
}

/// Copies pages that a clone shares with its snapshot, for a bounded time. Repeat it until nothing is left to do.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/promote-clone", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The clone")),
    responses((status = 200, body = CloneProgressReply), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
async fn promote_clone(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<CloneProgressReply> {
    let promote = move |manager: &Manager| manager.promote_clone(&name);
    api.run_brick_work(promote).await.map(Json)
}

/// The snapshots of a volume, newest first.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/snapshots", tag = "snapshots",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume"), ListSnapshots, IfNoneMatchHeader),
    responses((status = 200, body = Vec<SnapshotInfo>), (status = 304), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn list_snapshots(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(asked): QueryParam<ListSnapshots>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let limit = check_limit(asked.limit)?.unwrap_or(PAGE_MAX);
    if asked.after_volume.is_some() {
        let error = "after_volume is a parameter of the list of all volumes";
        return Err(Fault::invalid_field(error, "leave it out").into());
    }
    let (list, volume) = (asked.clone(), name.clone());
    let list = api.run_store_work(move |manager| manager.list_snapshots(&volume, &list, limit));
    let (snapshots, has_more) = list.await?;
    let path = format!("/api/v1/volumes/{name}/snapshots");
    Ok(page_answer(&path, asked, &headers, &snapshots, has_more))
}

/// Makes a snapshot of a volume, attached or not. Writers do not wait for it.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/snapshots", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), KeyHeader),
    request_body = CreateSnapshot,
    responses((status = 201, body = SnapshotInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn create_snapshot(
    CreatorApi(api): CreatorApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<CreateSnapshot>,
) -> Result<Response, Refusal> {
    let create = move |manager: &Manager| manager.create_snapshot_keyed(&name, &request);
    Ok(created(api.run_brick_work(create).await?))
}

/// A snapshot, and the legs to read it from. `ETag` names its state for `If-Match`.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/snapshots/{snapshot}", tag = "snapshots",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume"),
        ("snapshot" = document::Name, Path, description = "The snapshot"), IfNoneMatchHeader),
    responses((status = 200, body = SnapshotDetail), (status = 304), (status = 404, body = ErrorBody)))]
async fn show_snapshot(
    State(api): State<ApiState>,
    PathParam((name, snapshot)): PathParam<(VolumeName, SnapshotName)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let show = api.run_store_work(move |manager| manager.show_snapshot(&name, &snapshot));
    let (detail, tag) = show.await?;
    Ok(tagged(&headers, tag, &detail, &detail))
}

/// Deletes a snapshot. A hold keeps it.
#[utoipa::path(delete, path = "/api/v1/volumes/{name}/snapshots/{snapshot}", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"),
        ("snapshot" = document::Name, Path, description = "The snapshot"), IfMatchHeader),
    responses((status = 200, body = DeleteSnapshotReply), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn delete_snapshot(
    CallerApi(api): CallerApi,
    PathParam((name, snapshot)): PathParam<(VolumeName, SnapshotName)>,
) -> JsonResult<DeleteSnapshotReply> {
    let delete = move |manager: &Manager| manager.delete_snapshot(&name, &snapshot);
    api.run_brick_work(delete).await.map(Json)
}

/// The bytes that the snapshots of a volume keep, in one copy, and those that a deletion of some of them would free. Bricks
/// count the pages now.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/snapshot-space", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), CountSpace),
    responses((status = 200, body = VolumeSpaceReply), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 502, body = ErrorBody)))]
async fn snapshot_space(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(asked): QueryParam<CountSpace>,
) -> JsonResult<VolumeSpaceReply> {
    let names = asked.drop.unwrap_or_default();
    let names = names.split(',').filter(|name| !name.is_empty());
    let dropped: Result<Vec<SnapshotName>, _> = names.map(str::parse).collect();
    let dropped = dropped.map_err(|cause| {
        let error = format!("drop names no snapshots: {cause}");
        Fault::invalid_field(error, "name snapshots with a comma between two")
    })?;
    let count = move |manager: &Manager| manager.snapshot_space(&name, &dropped);
    api.run_brick_work(count).await.map(Json)
}

/// Holds a snapshot by a tag, so that it cannot be deleted. A repetition changes nothing.
#[utoipa::path(put, path = "/api/v1/volumes/{name}/snapshots/{snapshot}/holds/{tag}", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"),
        ("snapshot" = document::Name, Path, description = "The snapshot"),
        ("tag" = document::Name, Path, description = "The tag of the hold"), IfMatchHeader),
    responses((status = 200, body = SnapshotInfo), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
async fn hold_snapshot(
    CallerApi(api): CallerApi,
    PathParam((name, snapshot, tag)): PathParam<(VolumeName, SnapshotName, HoldTag)>,
) -> JsonResult<SnapshotInfo> {
    let hold = move |manager: &Manager| manager.hold_snapshot(&name, &snapshot, &tag);
    api.run_store_work(hold).await.map(Json)
}

/// Releases a hold of a snapshot.
#[utoipa::path(delete, path = "/api/v1/volumes/{name}/snapshots/{snapshot}/holds/{tag}", tag = "snapshots",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"),
        ("snapshot" = document::Name, Path, description = "The snapshot"),
        ("tag" = document::Name, Path, description = "The tag of the hold"), IfMatchHeader),
    responses((status = 200, body = SnapshotInfo), (status = 404, body = ErrorBody)))]
async fn release_snapshot(
    CallerApi(api): CallerApi,
    PathParam((name, snapshot, tag)): PathParam<(VolumeName, SnapshotName, HoldTag)>,
) -> JsonResult<SnapshotInfo> {
    let release = move |manager: &Manager| manager.release_snapshot(&name, &snapshot, &tag);
    api.run_store_work(release).await.map(Json)
}

/// A page of a list. `Link` has the next one.
fn page_answer(
    path: &str,
    asked: ListSnapshots,
    headers: &HeaderMap,
    snapshots: &[SnapshotInfo],
    has_more: bool,
) -> Response {
    let mut response = tagged_list(headers, &snapshots, snapshots);
    if let Some(last) = snapshots.last().filter(|_| has_more) {
        let is_of_all = path == "/api/v1/snapshots";
        let link = next_page(
            path,
            &[
                ("after", Some(last.epoch.0.to_string())),
                ("after_volume", is_of_all.then(|| last.volume.to_string())),
                ("limit", asked.limit.map(|it| it.to_string())),
                ("search", asked.search),
                ("label", asked.label),
                ("held", asked.held.map(|it| it.to_string())),
                ("deleting", asked.deleting.then(|| "true".to_owned())),
            ],
        );
        response.headers_mut().extend(link);
    }
    response
}

impl ManagerClient {
    /// The snapshots of a volume, or of all volumes, newest first for each volume. They are read in pages.
    #[allow(clippy::missing_errors_doc)]
    pub fn snapshots(
        &self,
        volume: Option<&VolumeName>,
        label: Option<&str>,
    ) -> Result<Vec<SnapshotInfo>, ManagerError> {
        let path = volume.map_or_else(
            || "snapshots".to_owned(),
            |volume| format!("volumes/{volume}/snapshots"),
        );
        let mut all: Vec<SnapshotInfo> = vec![];
        for _ in 0..PAGES_MAX {
            let last = all.last();
            let after_volume = last.filter(|_| volume.is_none());
            let query = [
                ("limit", Some(PAGE_ENTRIES.to_string())),
                ("after", last.map(|it| it.epoch.0.to_string())),
                ("after_volume", after_volume.map(|it| it.volume.to_string())),
                ("label", label.map(str::to_owned)),
            ];
            let page: Vec<SnapshotInfo> = self.get_with_query(&path, &query)?;
            let is_last = page.len() < PAGE_ENTRIES;
            all.extend(page);
            if is_last {
                break;
            }
        }
        Ok(all)
    }

    /// Makes a snapshot, once: the client sends a key, and repeats the call if its answer was lost.
    #[allow(clippy::missing_errors_doc)]
    pub fn create_snapshot(
        &self,
        volume: &VolumeName,
        request: &CreateSnapshot,
    ) -> Result<SnapshotInfo, ManagerError> {
        self.create_with_key(&format!("volumes/{volume}/snapshots"), request)
    }

    /// Makes snapshots of several volumes, once.
    #[allow(clippy::missing_errors_doc)]
    pub fn create_snapshots(
        &self,
        request: &CreateSnapshots,
    ) -> Result<CreatedSnapshots, ManagerError> {
        self.create_with_key("snapshots", request)
    }

    /// Clones a snapshot, once.
    #[allow(clippy::missing_errors_doc)]
    pub fn create_clone(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
        request: &CreateClone,
    ) -> Result<VolumeSizeReply, ManagerError> {
        self.create_with_key(
            &format!("volumes/{volume}/snapshots/{name}/clones"),
            request,
        )
    }

    /// Does a part of the promotion of a clone.
    #[allow(clippy::missing_errors_doc)]
    pub fn promote_clone(&self, name: &VolumeName) -> Result<CloneProgressReply, ManagerError> {
        let path = format!("volumes/{name}/promote-clone");
        let answer = self.send(Method::POST, &path, LONG_CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// A snapshot, and the legs to read it from.
    #[allow(clippy::missing_errors_doc)]
    pub fn snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Result<SnapshotDetail, ManagerError> {
        self.get(&format!("volumes/{volume}/snapshots/{name}"))
    }

    /// The bytes that the snapshots of a volume keep, and those that a deletion of some would free.
    #[allow(clippy::missing_errors_doc)]
    pub fn snapshot_space(
        &self,
        volume: &VolumeName,
        dropped: &[SnapshotName],
    ) -> Result<VolumeSpaceReply, ManagerError> {
        let names: Vec<&str> = dropped.iter().map(SnapshotName::as_str).collect();
        let names = Some(names.join(",")).filter(|names| !names.is_empty());
        let query = names.map_or_else(String::new, |names| format!("?drop={names}"));
        let path = format!("volumes/{volume}/snapshot-space{query}");
        let answer = self.send(Method::GET, &path, LONG_CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// Deletes a snapshot.
    #[allow(clippy::missing_errors_doc)]
    pub fn delete_snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
    ) -> Result<DeleteSnapshotReply, ManagerError> {
        let path = format!("volumes/{volume}/snapshots/{name}");
        let answer = self.send(Method::DELETE, &path, LONG_CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// Holds a snapshot by a tag.
    #[allow(clippy::missing_errors_doc)]
    pub fn hold_snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
        tag: &HoldTag,
    ) -> Result<SnapshotInfo, ManagerError> {
        let path = format!("volumes/{volume}/snapshots/{name}/holds/{tag}");
        let answer = self.send(Method::PUT, &path, CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// Releases a hold of a snapshot.
    #[allow(clippy::missing_errors_doc)]
    pub fn release_snapshot(
        &self,
        volume: &VolumeName,
        name: &SnapshotName,
        tag: &HoldTag,
    ) -> Result<SnapshotInfo, ManagerError> {
        let path = format!("volumes/{volume}/snapshots/{name}/holds/{tag}");
        let answer = self.send(Method::DELETE, &path, CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }
}
