//! Endpoints of the policies of volumes in pools with disks behind memory.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, IfMatchHeader};
use crate::api::document;
use crate::api::reply::{JsonBody, PathParam};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::tier_policy::TierPolicy;
use crate::wire::{ErrorBody, NamedVolumeTier, SetTier, VolumeTier};
use axum::Json;
use axum::extract::State;
use axum::http::Method;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_tiers))
        .routes(routes!(show_tier, set_tier))
}

/// The volumes with a policy other than `auto`, or with legs in pools with disks behind memory, by name.
#[utoipa::path(get, path = "/api/v1/tiers", tag = "volumes", security(("token" = ["viewer"])),
    responses((status = 200, body = Vec<NamedVolumeTier>)))]
async fn list_tiers(State(api): State<ApiState>) -> JsonResult<Vec<NamedVolumeTier>> {
    let list = api.run_store_work(|manager| Ok(manager.volume_tiers()));
    list.await.map(Json)
}

/// Where the pages of a volume lie in pools with disks behind memory, and the bricks that obey.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/tier", tag = "volumes",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume")),
    responses((status = 200, body = VolumeTier), (status = 404, body = ErrorBody)))]
async fn show_tier(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
) -> JsonResult<VolumeTier> {
    let show = api.run_store_work(move |manager| manager.volume_tier(&name));
    show.await.map(Json)
}

/// Sets where the pages of a volume lie in pools with disks behind memory. The answers to the next heartbeats of its
/// bricks carry the policy, until they obey it.
#[utoipa::path(put, path = "/api/v1/volumes/{name}/tier", tag = "volumes",
    security(("token" = ["operator"])),
    params(("name" = document::Name, Path, description = "The volume"), IfMatchHeader),
    request_body = SetTier,
    responses((status = 200, body = VolumeTier), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn set_tier(
    CallerApi(api): CallerApi,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(request): JsonBody<SetTier>,
) -> JsonResult<VolumeTier> {
    let set = move |manager: &Manager| manager.set_tier(&name, request);
    api.run_store_work(set).await.map(Json)
}

impl ManagerClient {
    /// The volumes with a policy, or with legs in pools with disks behind memory.
    #[allow(clippy::missing_errors_doc)]
    pub fn volume_tiers(&self) -> Result<Vec<NamedVolumeTier>, ManagerError> {
        self.get("tiers")
    }

    /// Where the pages of a volume lie, and the bricks that obey.
    #[allow(clippy::missing_errors_doc)]
    pub fn volume_tier(&self, name: &VolumeName) -> Result<VolumeTier, ManagerError> {
        self.get(&format!("volumes/{name}/tier"))
    }

    /// Sets where the pages of a volume lie.
    #[allow(clippy::missing_errors_doc)]
    pub fn set_tier(
        &self,
        name: &VolumeName,
        policy: TierPolicy,
    ) -> Result<VolumeTier, ManagerError> {
        let path = format!("volumes/{name}/tier");
        self.call(Method::PUT, &path, CALL_TIMEOUT, &SetTier { policy })
    }
}
