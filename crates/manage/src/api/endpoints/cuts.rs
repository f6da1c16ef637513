//! Endpoints for the client that has attached a volume: it polls for orders to cut, and answers them.
//!
//! A poll waits without a thread and without a permit of requests (`api::request_guard`): each attached volume has one
//! at all times.

use crate::Manager;
use crate::api::ApiState;
use crate::api::document;
use crate::api::reply::{JsonBody, PathParam, QueryParam, Refusal};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::snapshots::PollState;
use crate::wire::{AnswerCut, CutOrder, ErrorBody, PollCut};
use axum::Json;
use axum::extract::State;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use pagemesh_base::layout::{EpochNumber, VolumeName};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The path of polls.
pub(in crate::api) const POLL_PATH: &str = "/api/v1/volumes/{name}/cut";
/// Limit of a poll for its client: longer than the manager lets it wait.
const POLL_TIMEOUT: Duration = Duration::from_secs(75);

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default().routes(routes!(poll_cut, answer_cut))
}

/// Waits for an order to cut the volume for a snapshot, at most 60 s; 204 if there is none. The client of the volume
/// calls it again and again. A later call of the same client ends the earlier one.
#[utoipa::path(get, path = "/api/v1/volumes/{name}/cut", tag = "snapshots",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume"), PollCut),
    responses((status = 200, body = CutOrder), (status = 204), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn poll_cut(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    QueryParam(PollCut { attachment }): QueryParam<PollCut>,
) -> Result<Response, Refusal> {
    let until = Instant::now() + api.manager.settings.cut.poll;
    let mut stopping = api.watch_streams.stopping();
    let mut number = None;
    loop {
        let volume = name.clone();
        let poll =
            move |manager: &Manager| manager.poll_cut(&volume, EpochNumber(attachment), number);
        let wake = match api.run_store_work(poll).await? {
            PollState::Order(epoch, step) => {
                return Ok(Json(CutOrder { epoch, step }).into_response());
            }
            PollState::Replaced => return Ok(StatusCode::NO_CONTENT.into_response()),
            PollState::Wait(taken, wake) => {
                number = Some(taken);
                wake
            }
        };
        tokio::select! {
            () = wake.notified() => continue,
            () = sleep_until(until) => {}
            _ = stopping.wait_for(|stopping| *stopping) => {}
        }
        if let Some(number) = number {
            api.manager.cut_orders.end_poll(&name, number);
        }
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
}

/// Takes the client's answer to an order. An answer that comes too late changes nothing.
#[utoipa::path(post, path = "/api/v1/volumes/{name}/cut", tag = "snapshots",
    security(("token" = ["cluster"])),
    params(("name" = document::Name, Path, description = "The volume")), request_body = AnswerCut,
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody)))]
async fn answer_cut(
    State(api): State<ApiState>,
    PathParam(name): PathParam<VolumeName>,
    JsonBody(answer): JsonBody<AnswerCut>,
) -> Result<StatusCode, Refusal> {
    let take = move |manager: &Manager| manager.answer_cut(&name, answer);
    api.run_store_work(take).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl ManagerClient {
    /// Waits for an order to cut a volume that this client has attached, for about a minute.
    #[allow(clippy::missing_errors_doc)]
    pub fn poll_cut(
        &self,
        name: &VolumeName,
        attachment: EpochNumber,
    ) -> Result<Option<CutOrder>, ManagerError> {
        let path = format!("volumes/{name}/cut?attachment={}", attachment.0);
        let answer = self.send(Method::GET, &path, POLL_TIMEOUT, String::new())?;
        if answer.status() == StatusCode::NO_CONTENT.as_u16() {
            return Ok(None);
        }
        self.read(answer).map(Some)
    }

    /// Answers an order.
    #[allow(clippy::missing_errors_doc)]
    pub fn answer_cut(&self, name: &VolumeName, answer: &AnswerCut) -> Result<(), ManagerError> {
        let path = format!("volumes/{name}/cut");
        self.call_without_answer(Method::POST, &path, CALL_TIMEOUT, answer)
    }
}
