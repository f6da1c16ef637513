//! The endpoints of the REST API. Each is a handler that calls the manager, and the method of [`ManagerClient`] that
//! calls the handler.
//!
//! Invariant: the annotation of a handler is the only place with its method, path, role and statuses. `routes` makes the
//! router and the OpenAPI document of it. Handlers of one path share a `routes!`.

mod access;
mod attachments;
mod bookmarks;
mod bricks;
mod cuts;
mod devices;
mod events;
mod figures;
mod metrics;
mod nfs;
mod replicas;
mod rollbacks;
mod schedules;
mod snapshot_checks;
mod snapshots;
mod tiers;
mod volumes;
mod watch;

pub(super) use access::cleared_cookie;
pub(super) use cuts::POLL_PATH;

use super::ApiState;
use super::document::{self, document};
use super::reply::Refusal;
use crate::client::{ManagerClient, ManagerError};
use crate::error_code::ErrorCode;
use crate::wire::ClusterStatus;
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, Refusal>;

/// All endpoints.
pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::with_openapi(document::head())
        .routes(routes!(healthz))
        .routes(routes!(openapi))
        .routes(routes!(status))
        .merge(access::routes())
        .merge(bricks::routes())
        .merge(devices::routes())
        .merge(volumes::routes())
        .merge(replicas::routes())
        .merge(snapshots::routes())
        .merge(snapshot_checks::routes())
        .merge(bookmarks::routes())
        .merge(schedules::routes())
        .merge(rollbacks::routes())
        .merge(cuts::routes())
        .merge(tiers::routes())
        .merge(attachments::routes())
        .merge(figures::routes())
        .merge(nfs::routes())
        .merge(events::routes())
        .merge(watch::routes())
        .merge(metrics::routes())
}

/// Reports that the manager runs and takes changes; needs no token.
#[utoipa::path(get, path = "/healthz", tag = "manager", security(()),
    responses((status = 200, body = String),
        (status = 503, body = String, description = "The manager answers reads, but its store takes no changes")))]
async fn healthz(State(api): State<ApiState>) -> (StatusCode, &'static str) {
    if api.manager.has_store_failed() {
        let text = "The store of the manager failed to write a change, so the manager takes no changes: \
                    make room on its disk or repair it, then start the manager again.\n";
        return (StatusCode::SERVICE_UNAVAILABLE, text);
    }
    (StatusCode::OK, "ok\n")
}

/// This document.
#[utoipa::path(get, path = "/api/v1/openapi.json", tag = "manager", security(("token" = ["viewer"])),
    responses((status = 200, description = "The OpenAPI document")))]
async fn openapi() -> Json<Value> {
    Json(document())
}

/// A summary of the cluster.
#[utoipa::path(get, path = "/api/v1/status", tag = "manager", security(("token" = ["viewer"])),
    responses((status = 200, body = ClusterStatus)))]
async fn status(State(api): State<ApiState>) -> JsonResult<ClusterStatus> {
    api.run_store_work(|manager| Ok(manager.status()))
        .await
        .map(Json)
}

pub(super) async fn no_such_path(uri: Uri) -> Refusal {
    let error = format!("there is nothing at {}", uri.path());
    Refusal::new(ErrorCode::NotFound, error, "read /api/v1/openapi.json")
}

pub(super) async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    let error = format!("{} does not take {method}", uri.path());
    Refusal::new(ErrorCode::WrongMethod, error, "read /api/v1/openapi.json")
}

impl ManagerClient {
    /// A summary of the cluster.
    ///
    /// # Errors
    /// See [`ManagerError`]; the same holds for every call.
    pub fn status(&self) -> Result<ClusterStatus, ManagerError> {
        self.get("status")
    }
}
