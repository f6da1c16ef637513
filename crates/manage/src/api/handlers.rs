//! One function per path and method; each hands over to the manager.

use super::Api;
use super::document::document;
use super::reply::{Asked, Body, Named, Refusal};
use crate::fault::{Code, Fault};
use crate::wire::{
    AttachReplica, AttachVolume, Attached, BrickInfo, BrickRegistration, ChangeLegs, ChooseReplica,
    CreateVolume, Deleted, DetachVolume, Detached, ErrorBody, Force, GrowVolume, HeartbeatReply,
    ScrubBrick, Sized, Status, TellCopies, VolumeDetail, VolumeInfo,
};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use pagemesh_base::layout::{BrickId, Layout, VolumeName};
use utoipa::openapi::OpenApi;

type Answer<T> = Result<Json<T>, Refusal>;

/// Says that the manager runs; for everybody.
#[utoipa::path(get, path = "/healthz", tag = "manager", security(()),
    responses((status = 200, body = String)))]
pub(super) async fn healthz() -> &'static str {
    "ok\n"
}

pub(super) async fn no_such_path(uri: Uri) -> Refusal {
    let error = format!("there is nothing at {}", uri.path());
    Refusal::new(Code::NotFound, error, "read /api/v1/openapi.json")
}

pub(super) async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    let error = format!("{} does not take {method}", uri.path());
    Refusal::new(Code::WrongMethod, error, "read /api/v1/openapi.json")
}

/// This document.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "manager",
    responses((status = 200, description = "The OpenAPI document")))]
pub(super) async fn openapi() -> Json<OpenApi> {
    Json(document())
}

/// The cluster at a glance.
#[utoipa::path(get, path = "/api/v1/status", tag = "manager",
    responses((status = 200, body = Status)))]
pub(super) async fn status(State(api): State<Api>) -> Answer<Status> {
    api.quick(|manager| Ok(manager.status())).await.map(Json)
}

/// Every brick.
#[utoipa::path(get, path = "/api/v1/bricks", tag = "bricks",
    responses((status = 200, body = Vec<BrickInfo>)))]
pub(super) async fn list_bricks(State(api): State<Api>) -> Answer<Vec<BrickInfo>> {
    api.quick(|manager| Ok(manager.bricks())).await.map(Json)
}

/// Registers a brick, or says that it is still there.
#[utoipa::path(put, path = "/api/v1/bricks/{brick}", tag = "bricks",
    params(("brick" = uuid::Uuid, Path, description = "The UUID of its pool")),
    request_body = BrickRegistration,
    responses((status = 200, body = HeartbeatReply),
        (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn heartbeat(
    State(api): State<Api>,
    Named(brick): Named<BrickId>,
    Body(registration): Body<BrickRegistration>,
) -> Answer<HeartbeatReply> {
    if registration.brick != brick {
        let what = format!("the path names {brick}, the body {}", registration.brick);
        return Err(Fault::bad(what, "name the same brick in both").into());
    }
    if let Some(reply) = api.manager.repeated(&registration) {
        return Ok(Json(reply));
    }
    let beat = move |manager: &crate::Manager| manager.heartbeat(registration);
    api.quick(beat).await.map(Json)
}

/// Forgets a dead brick that holds no slice; with force also one that still
/// holds slices of deleted volumes.
#[utoipa::path(delete, path = "/api/v1/bricks/{brick}", tag = "bricks",
    params(("brick" = uuid::Uuid, Path, description = "The UUID of its pool"), Force),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn forget_brick(
    State(api): State<Api>,
    Named(brick): Named<BrickId>,
    Asked(Force { force }): Asked<Force>,
) -> Result<StatusCode, Refusal> {
    api.quick(move |manager| manager.forget(brick, force))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Asks a brick to begin a scrub of its pool, or to end the one under way. It
/// does so with its next heartbeat; to ask again changes nothing.
#[utoipa::path(post, path = "/api/v1/bricks/{brick}/scrub", tag = "bricks",
    params(("brick" = uuid::Uuid, Path, description = "The UUID of its pool")),
    request_body = ScrubBrick,
    responses((status = 200, body = BrickInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 502, body = ErrorBody)))]
pub(super) async fn scrub_brick(
    State(api): State<Api>,
    Named(brick): Named<BrickId>,
    Body(wish): Body<ScrubBrick>,
) -> Answer<BrickInfo> {
    api.quick(move |manager| manager.scrub(brick, wish))
        .await
        .map(Json)
}

/// Every volume.
#[utoipa::path(get, path = "/api/v1/volumes", tag = "volumes",
    responses((status = 200, body = Vec<VolumeInfo>)))]
pub(super) async fn list_volumes(State(api): State<Api>) -> Answer<Vec<VolumeInfo>> {
    api.quick(|manager| Ok(manager.volumes())).await.map(Json)
}

/// Creates a volume.
#[utoipa::path(post, path = "/api/v1/volumes", tag = "volumes", request_body = CreateVolume,
    responses((status = 201, body = Sized), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
pub(super) async fn create_volume(
    State(api): State<Api>,
    Body(wish): Body<CreateVolume>,
) -> Result<(StatusCode, Json<Sized>), Refusal> {
    let created = api.slow(move |manager| manager.create(&wish)).await?;
    Ok((StatusCode::CREATED, Json(created)))
}

/// All about a volume, its layout included.
#[utoipa::path(get, path = "/api/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "The volume")),
    responses((status = 200, body = VolumeDetail), (status = 404, body = ErrorBody)))]
pub(super) async fn show_volume(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
) -> Answer<VolumeDetail> {
    api.quick(move |manager| manager.show(&name))
        .await
        .map(Json)
}

/// Deletes a volume; with force also while a client has it.
#[utoipa::path(delete, path = "/api/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "The volume"), Force),
    responses((status = 200, body = Deleted), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
pub(super) async fn delete_volume(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Asked(Force { force }): Asked<Force>,
) -> Answer<Deleted> {
    let delete = move |manager: &crate::Manager| manager.delete(&name, force);
    api.slow(delete).await.map(Json)
}

/// Makes a volume larger, attached or not.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/grow", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = GrowVolume,
    responses((status = 200, body = Sized), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
pub(super) async fn grow_volume(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(wish): Body<GrowVolume>,
) -> Answer<Sized> {
    api.slow(move |manager| manager.grow(&name, wish))
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
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(wish): Body<AttachReplica>,
) -> Result<(StatusCode, Json<VolumeDetail>), Refusal> {
    let attach = move |manager: &crate::Manager| manager.attach_replica(&name, wish);
    Ok((StatusCode::CREATED, Json(api.slow(attach).await?)))
}

/// Removes a copy of a volume; with force also while a client has it.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas/detach", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = ChooseReplica,
    responses((status = 200, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn detach_replica(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(wish): Body<ChooseReplica>,
) -> Answer<VolumeDetail> {
    let detach = move |manager: &crate::Manager| manager.detach_replica(&name, wish);
    api.slow(detach).await.map(Json)
}

/// Has a volume go on with one copy alone; with force also one that is behind, or
/// while a client has it.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/replicas/promote", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = ChooseReplica,
    responses((status = 200, body = VolumeDetail), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn promote_replica(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(wish): Body<ChooseReplica>,
) -> Answer<VolumeDetail> {
    let promote = move |manager: &crate::Manager| manager.promote_replica(&name, wish);
    api.quick(promote).await.map(Json)
}

/// Gives a volume to a client and fences the client before.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/attach", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = AttachVolume,
    responses((status = 200, body = Attached), (status = 404, body = ErrorBody)))]
pub(super) async fn attach_volume(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(wish): Body<AttachVolume>,
) -> Answer<Attached> {
    let attach = move |manager: &crate::Manager| manager.attach(&name, &wish);
    api.quick(attach).await.map(Json)
}

/// All about a volume, for the client that has it and tells how copies are that
/// follow or return.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/copies", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = TellCopies,
    responses((status = 200, body = VolumeDetail), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
pub(super) async fn tell_copies(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(told): Body<TellCopies>,
) -> Answer<VolumeDetail> {
    let tell = move |manager: &crate::Manager| manager.tell_copies(&name, told);
    api.quick(tell).await.map(Json)
}

/// Ends an attachment; one that is not the present one is left alone.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/detach", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = DetachVolume,
    responses((status = 200, body = Detached), (status = 404, body = ErrorBody)))]
pub(super) async fn detach_volume(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(wish): Body<DetachVolume>,
) -> Answer<Detached> {
    let detach = move |manager: &crate::Manager| manager.detach(&name, wish);
    api.quick(detach).await.map(Json)
}

/// Changes states of legs, if the epoch is the expected one.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/legs", tag = "volumes",
    params(("name" = String, Path, description = "The volume")), request_body = ChangeLegs,
    responses((status = 200, body = super::document::Layout), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn change_legs(
    State(api): State<Api>,
    Named(name): Named<VolumeName>,
    Body(wish): Body<ChangeLegs>,
) -> Answer<Layout> {
    let change = move |manager: &crate::Manager| manager.change_legs(&name, &wish);
    api.quick(change).await.map(Json)
}
