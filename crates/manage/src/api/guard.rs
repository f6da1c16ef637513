//! What every request passes first: the token, the number of requests, the
//! time.

use super::reply::Refusal;
use super::{Api, REQUEST_TIMEOUT};
use crate::fault::Code;
use crate::token::is_authorized;
use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// The one path for everybody: says that the manager runs, and no more.
const OPEN_PATH: &str = "/healthz";

pub(super) async fn guard(State(api): State<Api>, request: Request, next: Next) -> Response {
    if request.uri().path() != OPEN_PATH && !may_pass(&api, &request) {
        return Refusal::new(
            Code::Unauthorized,
            "the request does not carry this cluster's token",
            "use the cluster's key file: --key FILE or PAGEMESH_KEY",
        )
        .into_response();
    }
    let Ok(_permit) = api.requests.clone().try_acquire_owned() else {
        return Refusal::overloaded().into_response();
    };
    let answer = tokio::time::timeout(REQUEST_TIMEOUT, next.run(request));
    answer.await.unwrap_or_else(|_| {
        Refusal::new(
            Code::TimedOut,
            "the request took too long; what it asked for may still be done",
            "look at the result before trying again",
        )
        .into_response()
    })
}

fn may_pass(api: &Api, request: &Request) -> bool {
    let mut headers = request.headers().get_all(AUTHORIZATION).iter();
    match (headers.next(), headers.next()) {
        (Some(header), None) => is_authorized(&api.key, header.as_bytes()),
        _ => false,
    }
}
