//! The checks before every request: identity and role, length, number of requests, time limit.
//!
//! Invariant: a request without a credential takes no permit before its body has arrived.

use super::credentials::admit;
use super::endpoints::POLL_PATH;
use super::reply::Refusal;
use super::{ApiState, BODY_BYTES_MAX, REQUEST_TIMEOUT};
use crate::connection_slots::AuthenticatedMark;
use crate::error_code::ErrorCode;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::Body;
use std::time::Duration;

/// Bytes and time that the server spends on the body of a refused request, to keep its connection
/// usable.
const UNREAD_BYTES_MAX: usize = 64 << 10;
const UNREAD_TIME: Duration = Duration::from_secs(2);
/// Bytes and time for the body of a request that needs no credential, as a login. The permits of requests are few:
/// a peer without a credential must not hold one while it sends.
const OPEN_BODY_BYTES_MAX: usize = 128 << 10;
const OPEN_BODY_TIME: Duration = Duration::from_secs(3);

pub(super) async fn guard(
    State(api): State<ApiState>,
    mut request: Request,
    next: Next,
) -> Response {
    let identity = match admit(&api, &request) {
        Ok(identity) => identity,
        Err(refusal) => return refuse_and_drain(refusal, request).await,
    };
    let body_max = match identity {
        Some(_) => BODY_BYTES_MAX,
        None => OPEN_BODY_BYTES_MAX,
    };
    // Check a declared length before the client sends the body. The extractor counts a body without
    // a declared length while it arrives.
    if request.body().size_hint().lower() > body_max as u64 {
        let error = format!("the body is longer than {body_max} bytes");
        let refusal = Refusal::new(ErrorCode::TooLarge, error, "send less at once");
        return refuse_and_drain(refusal, request).await;
    }
    if let Some(identity) = identity {
        if let Some(mark) = request.extensions().get::<AuthenticatedMark>() {
            mark.set();
        }
        request.extensions_mut().insert(identity);
    } else {
        request = match read_open_body(request).await {
            Ok(whole) => whole,
            Err(refusal) => return refuse_and_close(refusal),
        };
    }
    let (permits, limit) = match is_poll(&request) {
        true => {
            let longest = api.manager.settings.cut.poll;
            (&api.poll_permits, longest + REQUEST_TIMEOUT)
        }
        false => (&api.request_permits, REQUEST_TIMEOUT),
    };
    let Ok(_permit) = permits.clone().try_acquire_owned() else {
        return refuse_and_drain(Refusal::overloaded(), request).await;
    };
    let answer = tokio::time::timeout(limit, next.run(request));
    answer.await.unwrap_or_else(|_| {
        Refusal::new(
            ErrorCode::TimedOut,
            "the request took too long; what it asked for may still be done",
            "look at the result before trying again",
        )
        .into_response()
    })
}

/// Whether a request waits for an order to its client. Such requests must not take the permits of others.
fn is_poll(request: &Request) -> bool {
    let path = request.extensions().get::<MatchedPath>();
    let has_path = path.is_some_and(|path| path.as_str() == POLL_PATH);
    has_path && [Method::GET, Method::HEAD].contains(request.method())
}

/// The request with its whole body.
async fn read_open_body(request: Request) -> Result<Request, Refusal> {
    let (head, body) = request.into_parts();
    let read = axum::body::to_bytes(body, OPEN_BODY_BYTES_MAX);
    match tokio::time::timeout(OPEN_BODY_TIME, read).await {
        Ok(Ok(bytes)) => Ok(Request::from_parts(head, bytes.into())),
        Ok(Err(_)) => Err(Refusal::new(
            ErrorCode::TooLarge,
            format!("the body is longer than {OPEN_BODY_BYTES_MAX} bytes, or incomplete"),
            "send less",
        )),
        Err(_) => Err(Refusal::new(
            ErrorCode::TimedOut,
            "the body took too long",
            "send it again",
        )),
    }
}

fn refuse_and_close(refusal: Refusal) -> Response {
    let mut response = refusal.into_response();
    let close = HeaderValue::from_static("close");
    response.headers_mut().insert(CONNECTION, close);
    response
}

/// Refuses a request without using its body, and leaves its connection in a defined state: ready
/// for the next request, or announced as closed (RFC 9112, section 9.6). An unannounced close would
/// fail the client's next request, and might destroy this answer, too.
async fn refuse_and_drain(refusal: Refusal, request: Request) -> Response {
    let body = request.into_body();
    let is_read = body.size_hint().lower() <= UNREAD_BYTES_MAX as u64 && {
        let unread = axum::body::to_bytes(body, UNREAD_BYTES_MAX);
        matches!(tokio::time::timeout(UNREAD_TIME, unread).await, Ok(Ok(_)))
    };
    match is_read {
        true => refusal.into_response(),
        false => refuse_and_close(refusal),
    }
}
