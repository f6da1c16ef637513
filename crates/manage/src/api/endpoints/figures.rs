//! Endpoints of figures: reports, histories, the last minute, stages.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::document;
use crate::api::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{
    ErrorBody, FigureSeries, FigureSpan, RecentFigures, ReportBrickFigures, ReportFigures,
    SpanParam, StageFigures, StageParams,
};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::VolumeName;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(recent_figures))
        .routes(routes!(cluster_figures))
        .routes(routes!(volume_figures))
        .routes(routes!(brick_figures))
        .routes(routes!(stage_figures))
        .routes(routes!(report_volume_figures))
        .routes(routes!(report_brick_figures))
}

/// The last minute of every volume and brick.
#[utoipa::path(get, path = "/api/v1/figures", tag = "figures",
    security(("token" = ["viewer"])),
    responses((status = 200, body = RecentFigures)))]
async fn recent_figures(State(api): State<ApiState>) -> JsonResult<RecentFigures> {
    api.run_store_work(|manager| Ok(manager.recent_figures()))
        .await
        .map(Json)
}

/// The history of the sum of all volumes.
#[utoipa::path(get, path = "/api/v1/figures/cluster", tag = "figures",
    security(("token" = ["viewer"])),
    params(SpanParam),
    responses((status = 200, body = FigureSeries), (status = 400, body = ErrorBody)))]
async fn cluster_figures(
    State(api): State<ApiState>,
    QueryParam(SpanParam { span }): QueryParam<SpanParam>,
) -> JsonResult<FigureSeries> {
    api.run_store_work(move |manager| Ok(manager.cluster_figures(span)))
        .await
        .map(Json)
}

/// The history of a volume.
#[utoipa::path(get, path = "/api/v1/figures/volumes/{name}", tag = "figures",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume"), SpanParam),
    responses((status = 200, body = FigureSeries), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn volume_figures(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(SpanParam { span }): QueryParam<SpanParam>,
) -> JsonResult<FigureSeries> {
    api.run_store_work(move |manager| manager.volume_figures(&name, span))
        .await
        .map(Json)
}

/// The history of a brick: the requests over `tcp`.
#[utoipa::path(get, path = "/api/v1/figures/bricks/{brick}", tag = "figures",
    security(("token" = ["viewer"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool"), SpanParam),
    responses((status = 200, body = FigureSeries), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn brick_figures(
    State(api): State<ApiState>,
    PathParam(brick): PathParam<BrickRef>,
    QueryParam(SpanParam { span }): QueryParam<SpanParam>,
) -> JsonResult<FigureSeries> {
    api.run_store_work(move |manager| manager.brick_figures(&brick, span))
        .await
        .map(Json)
}

/// Where the time of a volume's operations went in the last minute, by stage.
#[utoipa::path(get, path = "/api/v1/why/volumes/{name}", tag = "figures",
    security(("token" = ["viewer"])),
    params(("name" = document::Name, Path, description = "The volume"), StageParams),
    responses((status = 200, body = StageFigures), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn stage_figures(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(StageParams { kind, quantile }): QueryParam<StageParams>,
) -> JsonResult<StageFigures> {
    api.run_store_work(move |manager| manager.stage_figures(&name, kind, quantile))
        .await
        .map(Json)
}

/// Takes the report of the client that has attached a volume.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/figures", tag = "figures",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = ReportFigures,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn report_volume_figures(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(report): JsonBody<ReportFigures>,
) -> Result<StatusCode, Refusal> {
    let take = move |manager: &Manager| manager.report_volume_figures(&name, &report);
    api.run_store_work(take).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Takes the report of a brick.
#[utoipa::path(post, path = "/api/v1/bricks/{brick}/figures", tag = "figures",
    security(("token" = ["cluster"])),
    params(("brick" = document::Name, Path, description = "Its name, or the UUID of its pool")),
    request_body = ReportBrickFigures,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
async fn report_brick_figures(
    State(api): State<ApiState>,
    PathParam(brick): PathParam<BrickRef>,
    JsonBody(report): JsonBody<ReportBrickFigures>,
) -> Result<StatusCode, Refusal> {
    let take = move |manager: &Manager| manager.report_brick_figures(&brick, &report);
    api.run_store_work(take).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl ManagerClient {
    /// The last minute of every volume and brick.
    #[allow(clippy::missing_errors_doc)]
    pub fn recent_figures(&self) -> Result<RecentFigures, ManagerError> {
        self.get("figures")
    }

    /// The history of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn volume_figures(
        &self,
        name: &VolumeName,
        span: FigureSpan,
    ) -> Result<FigureSeries, ManagerError> {
        let span = match span {
            FigureSpan::Hour => "1h",
            FigureSpan::Day => "24h",
        };
        self.get(&format!("figures/volumes/{name}?span={span}"))
    }

    /// Where the time of a volume's operations went in the last minute, by stage.
    #[allow(clippy::missing_errors_doc)]
    pub fn stage_figures(
        &self,
        name: &VolumeName,
        params: StageParams,
    ) -> Result<StageFigures, ManagerError> {
        let StageParams { kind, quantile } = params;
        let kind = kind.name();
        self.get(&format!(
            "why/volumes/{name}?kind={kind}&quantile={quantile}"
        ))
    }

    /// Reports the operations of an attached volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn report_volume_figures(
        &self,
        name: &VolumeName,
        report: &ReportFigures,
    ) -> Result<(), ManagerError> {
        self.post_figures(&format!("volumes/{name}/figures"), report)
    }

    /// Reports the operations of a brick.
    #[allow(clippy::missing_errors_doc)]
    pub fn report_brick_figures(
        &self,
        brick: impl Into<BrickRef>,
        report: &ReportBrickFigures,
    ) -> Result<(), ManagerError> {
        self.post_figures(&format!("bricks/{}/figures", brick.into()), report)
    }

    fn post_figures(&self, path: &str, body: &impl serde::Serialize) -> Result<(), ManagerError> {
        self.call_without_answer(Method::POST, path, CALL_TIMEOUT, body)
    }
}
