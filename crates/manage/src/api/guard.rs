//! What every request passes first: the token, the length, the number of
//! requests, the time.

use super::reply::Refusal;
use super::{Api, BODY_BYTES_MAX, REQUEST_TIMEOUT};
use crate::fault::Code;
use crate::token::is_authorized;
use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::Body;

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
    // Before it is sent; what comes without a length is counted as it comes.
    if request.body().size_hint().lower() > BODY_BYTES_MAX as u64 {
        let error = format!("the body is longer than {BODY_BYTES_MAX} bytes");
        return Refusal::new(Code::TooLarge, error, "send less at once").into_response();
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
