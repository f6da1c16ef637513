//! Endpoints of the devices of bricks' pools.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, CreatorApi, IfMatchHeader, KeyHeader};
use crate::api::document;
use crate::api::etag::created;
use crate::api::reply::{JsonBody, PathParam, Refusal};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{AddDevice, DeviceList, DeviceRequestInfo, DrainDevice, ErrorBody};
use axum::Json;
use axum::extract::State;
use axum::http::Method;
use axum::response::Response;
use pagemesh_base::brick_name::BrickRef;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_devices, add_device))
        .routes(routes!(drain_device))
}

/// The devices of a brick's pool, by its last heartbeat, and the last requests to change them.
#[utoipa::path(get, path = "/api/v1/bricks/{brick}/devices", tag = "bricks",
    security(("token" = ["viewer"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool")),
    responses((status = 200, body = DeviceList), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 502, body = ErrorBody)))]
async fn list_devices(
    State(api): State<ApiState>,
    PathParam(brick): PathParam<BrickRef>,
) -> JsonResult<DeviceList> {
    let list = api.run_store_work(move |manager| manager.devices(brick));
    list.await.map(Json)
}

/// Asks a brick to add a file or block device of its host to its pool. **Data loss:** everything on it is lost. The
/// answer to the brick's next heartbeat carries the request; `GET` of the same path shows its result. A repetition
/// with the same `Idempotency-Key` gets the first answer again.
#[utoipa::path(post, path = "/api/v1/bricks/{brick}/devices", tag = "bricks",
    security(("token" = ["admin"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool"), IfMatchHeader, KeyHeader),
    request_body = AddDevice,
    responses((status = 201, body = DeviceRequestInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 422, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn add_device(
    CreatorApi(api): CreatorApi,
    PathParam(brick): PathParam<BrickRef>,
    JsonBody(request): JsonBody<AddDevice>,
) -> Result<Response, Refusal> {
    let add = move |manager: &Manager| manager.add_device_keyed(&brick, request);
    Ok(created(api.run_store_work(add).await?))
}

/// Asks a brick to move all data off a device and to remove it from its pool, or to cancel that. The answer to the
/// brick's next heartbeat carries the request; repeating it changes nothing.
#[utoipa::path(post, path = "/api/v1/bricks/{brick}/devices/{device}/drain", tag = "bricks",
    security(("token" = ["operator"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool"),
        ("device" = Uuid, Path, description = "The device"), IfMatchHeader),
    request_body = DrainDevice,
    responses((status = 200, body = DeviceRequestInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 502, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn drain_device(
    CallerApi(api): CallerApi,
    PathParam((brick, device)): PathParam<(BrickRef, Uuid)>,
    JsonBody(request): JsonBody<DrainDevice>,
) -> JsonResult<DeviceRequestInfo> {
    let drain = move |manager: &Manager| manager.drain_device(brick, device, request);
    api.run_store_work(drain).await.map(Json)
}

impl ManagerClient {
    /// The devices of a brick's pool, and the last requests to change them.
    #[allow(clippy::missing_errors_doc)]
    pub fn devices(&self, brick: impl Into<BrickRef>) -> Result<DeviceList, ManagerError> {
        self.get(&format!("bricks/{}/devices", brick.into()))
    }

    /// Asks a brick to add a device to its pool. The client sends a key, and repeats the call if its answer was lost.
    #[allow(clippy::missing_errors_doc)]
    pub fn add_device(
        &self,
        brick: impl Into<BrickRef>,
        request: &AddDevice,
    ) -> Result<DeviceRequestInfo, ManagerError> {
        self.create_with_key(&format!("bricks/{}/devices", brick.into()), request)
    }

    /// Asks a brick to drain a device of its pool, or to cancel that.
    #[allow(clippy::missing_errors_doc)]
    pub fn drain_device(
        &self,
        brick: impl Into<BrickRef>,
        device: Uuid,
        cancel: bool,
    ) -> Result<DeviceRequestInfo, ManagerError> {
        let path = format!("bricks/{}/devices/{device}/drain", brick.into());
        self.call(Method::POST, &path, CALL_TIMEOUT, &DrainDevice { cancel })
    }
}
