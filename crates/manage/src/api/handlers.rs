//! One handler per path and method; each calls the manager.

use super::ApiState;
use super::document::document;
use super::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::fault::{ErrorCode, Fault};
use crate::wire::{
    AttachReplica, AttachReply, AttachVolume, BrickInfo, BrickRegistration, ChangeLegs,
    ChooseReplica, ClusterStatus, CreateVolume, DeleteReply, DetachReply, DetachVolume, ErrorBody,
    ForceParam, GrowVolume, HeartbeatReply, ReportReplication, ScrubBrick, VolumeDetail,
    VolumeInfo, VolumeSizeReply,
};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::{Layout, VolumeName};
use utoipa::openapi::OpenApi;

type JsonResult<T> = Result<Json<T>, Refusal>;

/// Reports that the manager runs; needs no token.
#[utoipa::path(get, path = "/healthz", tag = "manager", security(()),
    responses((status = 200, body = String)))]
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

pub(super) async fn no_such_path(uri: Uri) -> Refusal {
    let error = format!("there is nothing at {}", uri.path());
    Refusal::new(ErrorCode::NotFound, error, "read /api/v1/openapi.json")
}

pub(super) async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    let error = format!("{} does not take {method}", uri.path());
    Refusal::new(ErrorCode::WrongMethod, error, "read /api/v1/openapi.json")
}

/// This document.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "manager",
    responses((status = 200, description = "The OpenAPI document")))]
pub(super) async fn openapi() -> Json<OpenApi> {
    Json(document())
}

/// A summary of the cluster.
#[utoipa::path(get, path = "/api/v1/status", tag = "manager",
    responses((status = 200, body = ClusterStatus)))]
pub(super) async fn status(State(api): State<ApiState>) -> JsonResult<ClusterStatus> {
    api.run_store_work(|manager| Ok(manager.status()))
        .await
        .map(Json)
}

/// Every brick.
#[utoipa::path(get, path = "/api/v1/bricks", tag = "bricks",
    responses((status = 200, body = Vec<BrickInfo>)))]
pub(super) async fn list_bricks(State(api): State<ApiState>) -> JsonResult<Vec<BrickInfo>> {
    api.run_store_work(|manager| Ok(manager.bricks()))
        .await
        .map(Json)
}

/// Registers a brick, or renews its registration.
#[utoipa::path(put, path = "/api/v1/bricks/{brick}", tag = "bricks",
    params(("brick" = String, Path, description = "Its name, or the UUID of its pool")),
    request_body = BrickRegistration,
    responses((status = 200, body = HeartbeatReply),
        (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn heartbeat(
    State(api): State<ApiState>,
    PathParam(brick): PathParam<BrickRef>,
    JsonBody(registration): JsonBody<BrickRegistration>,
) -> JsonResult<HeartbeatReply> {
    let is_same = match &brick {
        BrickRef::Id(id) => *id == registration.brick,
        BrickRef::Name(name) => registration.name.as_ref() == Some(name),
    };
    if !is_same {
        let what = format!("the path names {brick}, the body {}", registration.brick);
        return Err(Fault::invalid_field(what, "name the same brick in both").into());
    }
    if let Some(reply) = api.manager.heartbeat_if_unchanged(&registration) {
        return Ok(Json(reply));
    }
    let beat = move |manager: &crate::Manager| manager.heartbeat(registration);
    api.run_store_work(beat).await.map(Json)
}

/// Forgets a dead brick that holds no slice. With `force` also one that holds slices of deleted
/// volumes.
#[utoipa::path(delete, path = "/api/v1/bricks/{brick}", tag = "bricks",
    params(("brick" = String, Path, description = "Its name, or the UUID of its pool"), ForceParam),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn forget_brick(
    State(api): State<ApiState>,
    PathParam(brick): PathParam<BrickRef>,
    QueryParam(ForceParam { force }): QueryParam<ForceParam>,
) -> Result<StatusCode, Refusal> {
    api.run_store_work(move |manager| manager.forget(brick, force))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Asks a brick to start a scrub of its pool, or to stop the running one. The answer to its next
/// heartbeat carries the request; repeating the request changes nothing.
#[utoipa::path(post, path = "/api/v1/bricks/{brick}/scrub", tag = "bricks",
    params(("brick" = String, Path, description = "Its name, or the UUID of its pool")),
    request_body = ScrubBrick,
    responses((status = 200, body = BrickInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 502, body = ErrorBody)))]
pub(super) async fn scrub_brick(
    State(api): State<ApiState>,
    PathParam(brick): PathParam<BrickRef>,
    JsonBody(wish): JsonBody<ScrubBrick>,
) -> JsonResult<BrickInfo> {
    api.run_store_work(move |manager| manager.scrub(brick, wish))
        .await
        .map(Json)
}

/// Every volume.
#[utoipa::path(get, path = "/api/v1/volumes", tag = "volumes",
    responses((status = 200, body = Vec<VolumeInfo>)))]
pub(super) async fn list_volumes(State(api): State<ApiState>) -> JsonResult<Vec<VolumeInfo>> {
    api.run_store_work(|manager| Ok(manager.volumes()))
        .await
        .map(Json)
}

/// Creates a volume.
#[utoipa::path(post, path = "/api/v1/volumes", tag = "volumes", request_body = CreateVolume,
    responses((status = 201, body = VolumeSizeReply), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
pub(super) async fn create_volume(
    State(api): State<ApiState>,
    JsonBody(wish): JsonBody<CreateVolume>,
) -> Result<(StatusCode, Json<VolumeSizeReply>), Refusal> {
    let created = api
        .run_brick_work(move |manager| manager.create(&wish))
        .await?;
    Ok((StatusCode::CREATED, Json(created)))
}

/// The details of a volume, its layout included.
#[utoipa::path(get, path = "/api/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "The volume")),
    responses((status = 200, body = VolumeDetail), (status = 404, body = ErrorBody)))]
pub(super) async fn show_volume(
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
pub(super) async fn delete_volume(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(ForceParam { force }): QueryParam<ForceParam>,
) -> JsonResult<DeleteReply> {
    let delete = move |manager: &crate::Manager| manager.delete(&name, force);
    api.run_brick_work(delete).await.map(Json)
}

/// Grows a volume, attached or not.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/grow", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = GrowVolume,
    responses((status = 200, body = VolumeSizeReply), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
pub(super) async fn grow_volume(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(wish): JsonBody<GrowVolume>,
) -> JsonResult<VolumeSizeReply> {
    api.run_brick_work(move |manager| manager.grow(&name, wish))
        .await
        .map(Json)
}

/// Adds a copy to every column of a volume, attached or not.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = AttachReplica,
    responses((status = 201, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
pub(super) async fn attach_replica(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(wish): JsonBody<AttachReplica>,
) -> Result<(StatusCode, Json<VolumeDetail>), Refusal> {
    let attach = move |manager: &crate::Manager| manager.attach_replica(&name, wish);
    Ok((StatusCode::CREATED, Json(api.run_brick_work(attach).await?)))
}

/// Removes a copy of a volume; with `force` also while a client has attached it.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas/detach", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = ChooseReplica,
    responses((status = 200, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn detach_replica(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(wish): JsonBody<ChooseReplica>,
) -> JsonResult<VolumeDetail> {
    let detach = move |manager: &crate::Manager| manager.detach_replica(&name, wish);
    api.run_brick_work(detach).await.map(Json)
}

/// Promotes one copy. With `force` also a copy that lacks writes, or while a client has attached
/// the volume.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas/promote", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = ChooseReplica,
    responses((status = 200, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn promote_replica(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(wish): JsonBody<ChooseReplica>,
) -> JsonResult<VolumeDetail> {
    let promote = move |manager: &crate::Manager| manager.promote_replica(&name, wish);
    api.run_store_work(promote).await.map(Json)
}

/// Attaches a volume to a client and fences the previous client.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/attach", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = AttachVolume,
    responses((status = 200, body = AttachReply), (status = 404, body = ErrorBody)))]
pub(super) async fn attach_volume(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(wish): JsonBody<AttachVolume>,
) -> JsonResult<AttachReply> {
    let attach = move |manager: &crate::Manager| manager.attach(&name, &wish);
    api.run_store_work(attach).await.map(Json)
}

/// Takes the report of the attached client about asynchronous and resyncing copies, and returns the
/// details of the volume.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/copies", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = ReportReplication,
    responses((status = 200, body = VolumeDetail), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
pub(super) async fn report_replication(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(told): JsonBody<ReportReplication>,
) -> JsonResult<VolumeDetail> {
    let tell = move |manager: &crate::Manager| manager.report_replication(&name, told);
    api.run_store_work(tell).await.map(Json)
}

/// Ends an attachment; an attachment other than the current one stays.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/detach", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = DetachVolume,
    responses((status = 200, body = DetachReply), (status = 404, body = ErrorBody)))]
pub(super) async fn detach_volume(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(wish): JsonBody<DetachVolume>,
) -> JsonResult<DetachReply> {
    let detach = move |manager: &crate::Manager| manager.detach(&name, wish);
    api.run_store_work(detach).await.map(Json)
}

/// Changes the states of legs, if the layout has the expected epoch.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/legs", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = ChangeLegs,
    responses((status = 200, body = super::document::Layout), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn change_legs(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(wish): JsonBody<ChangeLegs>,
) -> JsonResult<Layout> {
    let change = move |manager: &crate::Manager| manager.change_legs(&name, &wish);
    api.run_store_work(change).await.map(Json)
}
