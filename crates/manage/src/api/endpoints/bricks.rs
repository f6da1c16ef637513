//! Endpoints of bricks: registration, scrubs, the list.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, IfMatchHeader};
use crate::api::document;
use crate::api::etag::{IfNoneMatchHeader, tagged, tagged_list};
use crate::api::paging::{check_limit, json_name, next_page};
use crate::api::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::client::{CALL_TIMEOUT, HEARTBEAT_TIMEOUT, ManagerClient, ManagerError};
use crate::fault::Fault;
use crate::lists::brick_key;
use crate::wire::{
    BrickInfo, BrickRegistration, ErrorBody, ForceParam, HeartbeatReply, ListBricks, ScrubBrick,
};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use pagemesh_base::brick_name::BrickRef;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_bricks))
        .routes(routes!(show_brick, heartbeat, forget_brick))
        .routes(routes!(scrub_brick))
}

/// The bricks, by name; `If-None-Match` spares an unchanged list.
#[utoipa::path(get, path = "/api/v1/bricks", tag = "bricks",
    security(("token" = ["viewer"])), params(ListBricks, IfNoneMatchHeader),
    responses((status = 200, body = Vec<BrickInfo>), (status = 304), (status = 400, body = ErrorBody)))]
async fn list_bricks(
    State(api): State<ApiState>,
    QueryParam(asked): QueryParam<ListBricks>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    check_limit(asked.limit)?;
    let list = asked.clone();
    let list = api.run_store_work(move |manager| Ok(manager.list_bricks(&list)));
    let (bricks, has_more) = list.await?;
    let view: Vec<BrickInfo> = bricks.iter().cloned().map(without_age).collect();
    let mut response = tagged_list(&headers, &view, &bricks);
    if let Some(last) = bricks.last().filter(|_| has_more) {
        let health = asked.health.map(|it| json_name(&it));
        let link = next_page(
            "/api/v1/bricks",
            &[
                ("after", Some(brick_key(last))),
                ("limit", asked.limit.map(|it| it.to_string())),
                ("search", asked.search),
                ("health", health),
            ],
        );
        response.headers_mut().extend(link);
    }
    Ok(response)
}

fn without_age(brick: BrickInfo) -> BrickInfo {
    BrickInfo {
        heartbeat_age_ms: None,
        ..brick
    }
}

/// A brick. `ETag` names its state for `If-Match`.
#[utoipa::path(get, path = "/api/v1/bricks/{brick}", tag = "bricks",
    security(("token" = ["viewer"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool"), IfNoneMatchHeader),
    responses((status = 200, body = BrickInfo), (status = 304), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn show_brick(
    State(api): State<ApiState>,
    PathParam(brick): PathParam<BrickRef>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let show = api.run_store_work(move |manager| manager.show_brick(brick));
    let (brick, tag) = show.await?;
    Ok(tagged(&headers, tag, &without_age(brick.clone()), brick))
}

/// Registers a brick, or renews its registration.
#[utoipa::path(put, path = "/api/v1/bricks/{brick}", tag = "bricks",
    security(("token" = ["cluster"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool")),
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
    security(("token" = ["admin"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool"), ForceParam, IfMatchHeader),
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
    security(("token" = ["operator"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool"), IfMatchHeader),
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
    /// Every brick, read in pages.
    #[allow(clippy::missing_errors_doc)]
    pub fn bricks(&self) -> Result<Vec<BrickInfo>, ManagerError> {
        self.all_pages("bricks", brick_key)
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
