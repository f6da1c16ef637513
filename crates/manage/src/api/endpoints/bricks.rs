//! Endpoints of bricks: registration, scrubs, the list.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::CallerApi;
use crate::api::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::client::{CALL_TIMEOUT, HEARTBEAT_TIMEOUT, ManagerClient, ManagerError};
use crate::fault::Fault;
use crate::wire::{
    BrickInfo, BrickRegistration, ErrorBody, ForceParam, HeartbeatReply, ScrubBrick,
};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use pagemesh_base::brick_name::BrickRef;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_bricks))
        .routes(routes!(heartbeat, forget_brick))
        .routes(routes!(scrub_brick))
}

/// Every brick.
#[utoipa::path(get, path = "/api/v1/bricks", tag = "bricks",
    responses((status = 200, body = Vec<BrickInfo>)))]
async fn list_bricks(State(api): State<ApiState>) -> JsonResult<Vec<BrickInfo>> {
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
async fn heartbeat(
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
    let beat = move |manager: &Manager| manager.heartbeat(registration);
    api.run_store_work(beat).await.map(Json)
}

/// Forgets a dead brick that holds no slice. With `force` also one that holds slices of deleted
/// volumes.
#[utoipa::path(delete, path = "/api/v1/bricks/{brick}", tag = "bricks",
    params(("brick" = String, Path, description = "Its name, or the UUID of its pool"), ForceParam),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
async fn forget_brick(
    CallerApi(api): CallerApi,
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
async fn scrub_brick(
    CallerApi(api): CallerApi,
    PathParam(brick): PathParam<BrickRef>,
    JsonBody(request): JsonBody<ScrubBrick>,
) -> JsonResult<BrickInfo> {
    api.run_store_work(move |manager| manager.scrub(brick, request))
        .await
        .map(Json)
}

impl ManagerClient {
    /// Every brick.
    #[allow(clippy::missing_errors_doc)]
    pub fn bricks(&self) -> Result<Vec<BrickInfo>, ManagerError> {
        self.get("bricks")
    }

    /// Registers a brick, or renews its registration.
    #[allow(clippy::missing_errors_doc)]
    pub fn heartbeat(
        &self,
        registration: &BrickRegistration,
    ) -> Result<HeartbeatReply, ManagerError> {
        let path = format!("bricks/{}", registration.brick);
        self.call(Method::PUT, &path, HEARTBEAT_TIMEOUT, registration)
    }

    /// Forgets a dead brick that holds no slices of volumes; with `force` also one that holds
    /// slices of deleted volumes.
    #[allow(clippy::missing_errors_doc)]
    pub fn forget_brick(
        &self,
        brick: impl Into<BrickRef>,
        force: bool,
    ) -> Result<(), ManagerError> {
        let path = format!("bricks/{}?force={force}", brick.into());
        let answer = self.send(Method::DELETE, &path, CALL_TIMEOUT, String::new())?;
        self.check_status(answer).map(drop)
    }

    /// Asks a brick to start a scrub of its pool, or to stop the running one.
    #[allow(clippy::missing_errors_doc)]
    pub fn scrub_brick(
        &self,
        brick: impl Into<BrickRef>,
        stop: bool,
    ) -> Result<BrickInfo, ManagerError> {
        let path = format!("bricks/{}/scrub", brick.into());
        self.call(Method::POST, &path, CALL_TIMEOUT, &ScrubBrick { stop })
    }
}
