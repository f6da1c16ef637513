//! Errors as JSON, and extractors that refuse with them.

use crate::error_code::ErrorCode;
use crate::fault::Fault;
use crate::wire::{ErrorBody, PROBLEM_JSON};
use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use std::time::Duration;

/// An error answer to a client.
#[derive(Debug)]
pub(super) struct Refusal {
    body: ErrorBody,
    headers: Vec<(HeaderName, HeaderValue)>,
}

impl Refusal {
    pub(super) fn new(
        code: ErrorCode,
        error: impl Into<String>,
        hint: impl Into<String>,
    ) -> Refusal {
        Refusal::from(ErrorBody {
            error: error.into(),
            hint: hint.into(),
            code,
            epoch: None,
        })
    }

    /// The refusal of a request without a valid credential. It is the same for all paths.
    pub(super) fn unauthorized() -> Refusal {
        Refusal::new(
            ErrorCode::Unauthorized,
            "the request does not carry this cluster's token",
            "use the cluster's key file (--key FILE or PAGEMESH_KEY), or a token (--token-file FILE or PAGEMESH_TOKEN)",
        )
    }

    /// Says when a repetition may succeed, in whole seconds.
    pub(super) fn with_retry_after(mut self, time: Duration) -> Refusal {
        let seconds = HeaderValue::from(time.as_secs() + 1);
        self.headers.push((header::RETRY_AFTER, seconds));
        self
    }

    /// Replaces the browser's cookie.
    pub(super) fn with_cookie(mut self, cookie: HeaderValue) -> Refusal {
        self.headers.push((header::SET_COOKIE, cookie));
        self
    }

    pub(super) fn overloaded() -> Refusal {
        Refusal::new(
            ErrorCode::Overloaded,
            "the manager has too many requests at once",
            "try again in a few seconds",
        )
    }
}

impl From<ErrorBody> for Refusal {
    fn from(body: ErrorBody) -> Refusal {
        let headers = vec![];
        Refusal { body, headers }
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        // Only an internal error is the manager's own failure; this is the one place that logs it.
        if fault.code() == ErrorCode::Internal {
            tracing::error!(error = %fault, "a request failed");
        }
        Refusal::from(fault.to_body())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.body.code.status());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.body)).into_response();
        let headers = response.headers_mut();
        let problem = HeaderValue::from_static(PROBLEM_JSON);
        headers.insert(header::CONTENT_TYPE, problem);
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            headers.insert(header::WWW_AUTHENTICATE, scheme);
        }
        headers.extend(self.headers);
        response
    }
}

/// An extractor of a JSON body.
pub(super) struct JsonBody<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for JsonBody<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<JsonBody<T>, Refusal> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(body)) => Ok(JsonBody(body)),
            Err(rejection) => Err(body_refusal(&rejection)),
        }
    }
}

fn body_refusal(rejection: &JsonRejection) -> Refusal {
    let (code, hint) = match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => (ErrorCode::TooLarge, "send less at once"),
        StatusCode::UNSUPPORTED_MEDIA_TYPE => (
            ErrorCode::NotJson,
            "send JSON with Content-Type: application/json",
        ),
        _ => (
            ErrorCode::BadRequest,
            "compare the body with /api/v1/openapi.json",
        ),
    };
    Refusal::new(code, rejection.body_text(), hint)
}

/// An extractor of a part of the path.
pub(super) struct PathParam<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for PathParam<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<PathParam<T>, Refusal> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(PathParam(value)),
            Err(rejection) => Err(Refusal::new(
                ErrorCode::BadRequest,
                rejection.body_text(),
                "volumes have names, bricks have names and UUIDs, events have numbers",
            )),
        }
    }
}

/// An extractor of the query part of the URL.
pub(super) struct QueryParam<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for QueryParam<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<QueryParam<T>, Refusal> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(QueryParam(value)),
            Err(rejection) => Err(Refusal::new(
                ErrorCode::BadRequest,
                rejection.body_text(),
                "compare the parameters with /api/v1/openapi.json",
            )),
        }
    }
}
