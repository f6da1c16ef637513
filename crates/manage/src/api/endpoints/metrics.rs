//! The endpoint of metrics for Prometheus.

use crate::api::ApiState;
use crate::api::reply::Refusal;
use crate::error_code::ErrorCode;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use pagemesh_metrics::CONTENT_TYPE;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default().routes(routes!(metrics))
}

/// The manager's metrics, as text for Prometheus (format version 0.0.4).
#[utoipa::path(get, path = "/metrics", tag = "figures", security(("token" = ["viewer"])),
    responses((status = 200, body = String, content_type = "text/plain")))]
async fn metrics(State(api): State<ApiState>) -> Result<impl IntoResponse, Refusal> {
    let page = api.run_store_work(|manager| Ok(manager.metrics().text()));
    let text = page.await?.map_err(|error| {
        tracing::error!(%error, "the metrics have no text");
        Refusal::new(
            ErrorCode::Internal,
            "the manager could not write its metrics",
            "look at the manager's log",
        )
    })?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], text))
}
