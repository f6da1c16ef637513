//! What every request passes first: the token, the length, the number of
//! requests, the time.

use super::reply::Refusal;
use super::{Api, BODY_BYTES_MAX, REQUEST_TIMEOUT};
use crate::fault::Code;
use crate::token::is_authorized;
use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::http::header::{AUTHORIZATION, CONNECTION};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::Body;
use std::time::Duration;

/// The one path for everybody: says that the manager runs, and no more.
const OPEN_PATH: &str = "/healthz";
/// How much of a refused request's body is read, and for how long, to keep
/// its connection.
const UNREAD_BYTES_MAX: usize = 64 << 10;
const UNREAD_TIME: Duration = Duration::from_secs(2);

pub(super) async fn guard(State(api): State<Api>, request: Request, next: Next) -> Response {
    if request.uri().path() != OPEN_PATH && !may_pass(&api, &request) {
        let refusal = Refusal::new(
            Code::Unauthorized,
            "the request does not carry this cluster's token",
            "use the cluster's key file: --key FILE or PAGEMESH_KEY",
        );
        return refuse_unread(refusal, request).await;
    }
    // Before it is sent; what comes without a length is counted as it comes.
    if request.body().size_hint().lower() > BODY_BYTES_MAX as u64 {
        let error = format!("the body is longer than {BODY_BYTES_MAX} bytes");
        let refusal = Refusal::new(Code::TooLarge, error, "send less at once");
        return refuse_unread(refusal, request).await;
    }
    let Ok(_permit) = api.requests.clone().try_acquire_owned() else {
        return refuse_unread(Refusal::overloaded(), request).await;
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

/// Refuses a request whose body was not looked at, and leaves its connection
/// as the client expects it: free for the next request, or said to be closed
/// (RFC 9112, section 9.6). Closing it without a word would make the client's
/// next request fail, and might take this answer from it, too.
async fn refuse_unread(refusal: Refusal, request: Request) -> Response {
    let mut response = refusal.into_response();
    let body = request.into_body();
    let is_read = body.size_hint().lower() <= UNREAD_BYTES_MAX as u64 && {
        let unread = axum::body::to_bytes(body, UNREAD_BYTES_MAX);
        matches!(tokio::time::timeout(UNREAD_TIME, unread).await, Ok(Ok(_)))
    };
    if !is_read {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
    response
}

fn may_pass(api: &Api, request: &Request) -> bool {
    let mut headers = request.headers().get_all(AUTHORIZATION).iter();
    match (headers.next(), headers.next()) {
        (Some(header), None) => is_authorized(&api.key, header.as_bytes()),
        _ => false,
    }
}
