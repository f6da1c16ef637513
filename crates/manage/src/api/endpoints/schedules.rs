//! Endpoints of schedules: list, create, show, update, delete, plan, run, and the reports of replication.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::{CallerApi, CreatorApi, IfMatchHeader, KeyHeader};
use crate::api::document;
use crate::api::etag::{IfNoneMatchHeader, created, tagged, tagged_list};
use crate::api::reply::{JsonBody, PathParam, Refusal};
use crate::client::{CALL_TIMEOUT, LONG_CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::snapshots::SnapshotName;
use crate::wire::{
    CreateSchedule, ErrorBody, ReportSent, RunSchedule, ScheduleDetail, ScheduleInfo, SchedulePlan,
    SchedulePolicy, SnapshotInfo,
};
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::response::Response;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_schedules, create_schedule))
        .routes(routes!(show_schedule, update_schedule, delete_schedule))
        .routes(routes!(plan_schedule))
        .routes(routes!(run_schedule))
        .routes(routes!(report_sent))
}

/// All schedules, by name, with their health.
#[utoipa::path(get, path = "/api/v1/schedules", tag = "schedules", security(("token" = ["viewer"])),
    params(IfNoneMatchHeader), responses((status = 200, body = Vec<ScheduleInfo>), (status = 304)))]
async fn list_schedules(
    State(api): State<ApiState>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let found = api
        .run_store_work(|manager| Ok(manager.schedules()))
        .await?;
    Ok(tagged_list(&headers, &found, &found))
}

/// Makes a schedule. The manager carries it out from now on.
#[utoipa::path(post, path = "/api/v1/schedules", tag = "schedules", security(("token" = ["operator"])),
    params(KeyHeader), request_body = CreateSchedule,
    responses((status = 201, body = ScheduleInfo), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody), (status = 422, body = ErrorBody), (status = 507, body = ErrorBody)))]
async fn create_schedule(
    CreatorApi(api): CreatorApi,
    JsonBody(request): JsonBody<CreateSchedule>,
) -> Result<Response, Refusal> {
    let create = api.run_store_work(move |manager| manager.create_schedule_keyed(&request));
    Ok(created(create.await?))
}

/// A schedule with its volumes. `ETag` names its state for `If-Match`.
#[utoipa::path(get, path = "/api/v1/schedules/{schedule}", tag = "schedules",
    security(("token" = ["viewer"])),
    params(("schedule" = document::Name, Path, description = "The schedule"), IfNoneMatchHeader),
    responses((status = 200, body = ScheduleDetail), (status = 304), (status = 404, body = ErrorBody)))]
async fn show_schedule(
    State(api): State<ApiState>,
    PathParam(schedule): PathParam<SnapshotName>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let show = api.run_store_work(move |manager| manager.show_schedule(&schedule));
    let (detail, tag) = show.await?;
    Ok(tagged(&headers, tag, &detail, &detail))
}

/// Replaces the policy of a schedule.
#[utoipa::path(put, path = "/api/v1/schedules/{schedule}", tag = "schedules",
    security(("token" = ["operator"])),
    params(("schedule" = document::Name, Path, description = "The schedule"), IfMatchHeader),
    request_body = SchedulePolicy,
    responses((status = 200, body = ScheduleInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn update_schedule(
    CallerApi(api): CallerApi,
    PathParam(schedule): PathParam<SnapshotName>,
    JsonBody(policy): JsonBody<SchedulePolicy>,
) -> JsonResult<ScheduleInfo> {
    let update = move |manager: &Manager| manager.update_schedule(&schedule, &policy);
    api.run_store_work(update).await.map(Json)
}

/// Deletes a schedule. Its snapshots stay.
#[utoipa::path(delete, path = "/api/v1/schedules/{schedule}", tag = "schedules",
    security(("token" = ["operator"])),
    params(("schedule" = document::Name, Path, description = "The schedule"), IfMatchHeader),
    responses((status = 204), (status = 404, body = ErrorBody)))]
async fn delete_schedule(
    CallerApi(api): CallerApi,
    PathParam(schedule): PathParam<SnapshotName>,
) -> Result<StatusCode, Refusal> {
    let delete = move |manager: &Manager| manager.delete_schedule(&schedule);
    api.run_store_work(delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// The changes that a schedule would make now, by volume.
#[utoipa::path(get, path = "/api/v1/schedules/{schedule}/plan", tag = "schedules",
    security(("token" = ["viewer"])),
    params(("schedule" = document::Name, Path, description = "The schedule")),
    responses((status = 200, body = Vec<SchedulePlan>), (status = 404, body = ErrorBody)))]
async fn plan_schedule(
    State(api): State<ApiState>,
    PathParam(schedule): PathParam<SnapshotName>,
) -> JsonResult<Vec<SchedulePlan>> {
    let plan = api.run_store_work(move |manager| manager.plan_schedule(&schedule));
    plan.await.map(Json)
}

/// Makes a snapshot of a volume of the schedule out of turn. It deletes none.
#[utoipa::path(post, path = "/api/v1/schedules/{schedule}/run", tag = "schedules",
    security(("token" = ["operator"])),
    params(("schedule" = document::Name, Path, description = "The schedule")),
    request_body = RunSchedule,
    responses((status = 200, body = SnapshotInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 502, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
async fn run_schedule(
    CallerApi(api): CallerApi,
    PathParam(schedule): PathParam<SnapshotName>,
    JsonBody(request): JsonBody<RunSchedule>,
) -> JsonResult<SnapshotInfo> {
    let run = move |manager: &Manager| manager.run_schedule(&schedule, &request);
    api.run_brick_work(run).await.map(Json)
}

/// Notes that a target has a snapshot. A repetition changes nothing.
#[utoipa::path(post, path = "/api/v1/schedules/{schedule}/sent", tag = "schedules",
    security(("token" = ["operator"])),
    params(("schedule" = document::Name, Path, description = "The schedule")),
    request_body = ReportSent,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 507, body = ErrorBody)))]
async fn report_sent(
    CallerApi(api): CallerApi,
    PathParam(schedule): PathParam<SnapshotName>,
    JsonBody(report): JsonBody<ReportSent>,
) -> Result<StatusCode, Refusal> {
    let take = move |manager: &Manager| manager.report_sent(&schedule, &report);
    api.run_store_work(take).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl ManagerClient {
    /// All schedules, by name.
    #[allow(clippy::missing_errors_doc)]
    pub fn schedules(&self) -> Result<Vec<ScheduleInfo>, ManagerError> {
        self.get("schedules")
    }

    /// Makes a schedule, once.
    #[allow(clippy::missing_errors_doc)]
    pub fn create_schedule(&self, request: &CreateSchedule) -> Result<ScheduleInfo, ManagerError> {
        self.create_with_key("schedules", request)
    }

    /// A schedule with its volumes.
    #[allow(clippy::missing_errors_doc)]
    pub fn schedule(&self, name: &SnapshotName) -> Result<ScheduleDetail, ManagerError> {
        self.get(&format!("schedules/{name}"))
    }

    /// Replaces the policy of a schedule.
    #[allow(clippy::missing_errors_doc)]
    pub fn update_schedule(
        &self,
        name: &SnapshotName,
        policy: &SchedulePolicy,
    ) -> Result<ScheduleInfo, ManagerError> {
        let path = format!("schedules/{name}");
        self.call(Method::PUT, &path, CALL_TIMEOUT, policy)
    }

    /// Deletes a schedule.
    #[allow(clippy::missing_errors_doc)]
    pub fn delete_schedule(&self, name: &SnapshotName) -> Result<(), ManagerError> {
        let path = format!("schedules/{name}");
        let answer = self.send(Method::DELETE, &path, CALL_TIMEOUT, String::new())?;
        self.check_status(answer).map(drop)
    }

    /// The changes that a schedule would make now.
    #[allow(clippy::missing_errors_doc)]
    pub fn plan_schedule(&self, name: &SnapshotName) -> Result<Vec<SchedulePlan>, ManagerError> {
        self.get(&format!("schedules/{name}/plan"))
    }

    /// Makes a snapshot of a volume of a schedule out of turn.
    #[allow(clippy::missing_errors_doc)]
    pub fn run_schedule(
        &self,
        name: &SnapshotName,
        request: &RunSchedule,
    ) -> Result<SnapshotInfo, ManagerError> {
        let path = format!("schedules/{name}/run");
        self.call(Method::POST, &path, LONG_CALL_TIMEOUT, request)
    }

    /// Notes that a target has a snapshot.
    #[allow(clippy::missing_errors_doc)]
    pub fn report_sent(
        &self,
        name: &SnapshotName,
        report: &ReportSent,
    ) -> Result<(), ManagerError> {
        let path = format!("schedules/{name}/sent");
        self.call_without_answer(Method::POST, &path, CALL_TIMEOUT, report)
    }
}
