//! Endpoints of events: the list, acknowledgements.

use super::JsonResult;
use crate::Manager;
use crate::api::ApiState;
use crate::api::caller::CallerApi;
use crate::api::paging::{PAGE_MAX, check_limit, next_page};
use crate::api::reply::{PathParam, QueryParam, Refusal};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::wire::{ErrorBody, EventFilter, EventRecord};
use axum::Json;
use axum::http::{HeaderMap, Method};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(list_events))
        .routes(routes!(acknowledge_event))
}

/// The events of the cluster, in the order of their numbers. Events about tokens are for the role
/// `admin` and above.
#[utoipa::path(get, path = "/api/v1/events", tag = "events",
    security(("token" = ["viewer"])),
    params(EventFilter),
    responses((status = 200, body = Vec<EventRecord>), (status = 400, body = ErrorBody)))]
async fn list_events(
    CallerApi(api): CallerApi,
    QueryParam(filter): QueryParam<EventFilter>,
) -> Result<(HeaderMap, Json<Vec<EventRecord>>), Refusal> {
    let limit = check_limit(filter.limit)?.unwrap_or(PAGE_MAX);
    check_limit(filter.last)?;
    let asked = filter.clone();
    let list = api.run_store_work(move |manager| {
        let (events, has_more) = manager.list_events(&asked, limit);
        let events: Vec<_> = events.iter().map(|it| EventRecord::clone(it)).collect();
        Ok((events, has_more))
    });
    let (events, has_more) = list.await?;
    let last = events.last().filter(|_| has_more);
    let link = last.map(|last| {
        let severity = filter.severity.map(|it| it.name().to_owned());
        next_page(
            "/api/v1/events",
            &[
                ("after", Some(last.seq.to_string())),
                ("limit", Some(limit.to_string())),
                ("severity", severity),
                ("subject", filter.subject),
            ],
        )
    });
    Ok((link.unwrap_or_default(), Json(events)))
}

/// Acknowledges an event. A second acknowledgement changes nothing. Events about tokens are for the
/// role `admin` and above; for others there are none.
#[utoipa::path(post, path = "/api/v1/events/{seq}/acknowledge", tag = "events",
    security(("token" = ["operator"])),
    params(("seq" = u64, Path, description = "The number of the event")),
    responses((status = 200, body = EventRecord), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody)))]
async fn acknowledge_event(
    CallerApi(api): CallerApi,
    PathParam(seq): PathParam<u64>,
) -> JsonResult<EventRecord> {
    let acknowledge = move |manager: &Manager| {
        let event = manager.acknowledge(seq)?;
        Ok(EventRecord::clone(&event))
    };
    api.run_store_work(acknowledge).await.map(Json)
}

impl ManagerClient {
    /// One page of events that match.
    #[allow(clippy::missing_errors_doc)]
    pub fn events(&self, filter: &EventFilter) -> Result<Vec<EventRecord>, ManagerError> {
        let severity = filter.severity.map(|it| it.name().to_owned());
        let number = |it: usize| it.to_string();
        self.get_with_query(
            "events",
            &[
                ("after", filter.after.map(|it| it.to_string())),
                ("limit", filter.limit.map(number)),
                ("last", filter.last.map(number)),
                ("severity", severity),
                ("subject", filter.subject.clone()),
            ],
        )
    }

    /// Acknowledges an event.
    #[allow(clippy::missing_errors_doc)]
    pub fn acknowledge_event(&self, seq: u64) -> Result<EventRecord, ManagerError> {
        let path = format!("events/{seq}/acknowledge");
        self.read(self.send(Method::POST, &path, CALL_TIMEOUT, String::new())?)
    }
}
