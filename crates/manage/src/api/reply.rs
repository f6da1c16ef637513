//! Refusals as JSON, and extractors whose refusals are.

use crate::fault::{Code, Fault};
use crate::wire::ErrorBody;
use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;

/// A refusal on its way to the client.
#[derive(Debug)]
pub(super) struct Refusal(ErrorBody);

impl Refusal {
    pub(super) fn new(code: Code, error: impl Into<String>, hint: impl Into<String>) -> Refusal {
        Refusal(ErrorBody {
            error: error.into(),
            hint: hint.into(),
            code,
            epoch: None,
        })
    }

    pub(super) fn overloaded() -> Refusal {
        Refusal::new(
            Code::Overloaded,
            "the manager has too many requests at once",
            "try again in a moment",
        )
    }
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Refusal {
        // The only kind that is the manager's own trouble, and the one place
        // where it is logged.
        if fault.code() == Code::Internal {
            tracing::error!(error = %fault, "a request failed");
        }
        Refusal(ErrorBody {
            error: fault.to_string(),
            hint: fault.hint().to_owned(),
            code: fault.code(),
            epoch: fault.epoch().map(|epoch| epoch.0),
        })
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.code.status());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(self.0)).into_response();
        if status == StatusCode::UNAUTHORIZED {
            let scheme = header::HeaderValue::from_static("Bearer");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

/// A JSON body.
pub(super) struct Body<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &S) -> Result<Body<T>, Refusal> {
        match Json::<T>::from_request(request, state).await {
            Ok(Json(body)) => Ok(Body(body)),
            Err(rejection) => Err(refuse_body(&rejection)),
        }
    }
}

fn refuse_body(rejection: &JsonRejection) -> Refusal {
    let (code, hint) = match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => (Code::TooLarge, "send less at once"),
        StatusCode::UNSUPPORTED_MEDIA_TYPE => (
            Code::NotJson,
            "send JSON with Content-Type: application/json",
        ),
        _ => (
            Code::BadRequest,
            "compare the body with /api/v1/openapi.json",
        ),
    };
    Refusal::new(code, rejection.body_text(), hint)
}

/// A part of the path.
pub(super) struct Named<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Named<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Named<T>, Refusal> {
        match Path::<T>::from_request_parts(parts, state).await {
            Ok(Path(value)) => Ok(Named(value)),
            Err(rejection) => Err(Refusal::new(
                Code::BadRequest,
                rejection.body_text(),
                "volumes have names, bricks have UUIDs",
            )),
        }
    }
}

/// The part of the URL after the question mark.
pub(super) struct Asked<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Asked<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Asked<T>, Refusal> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(value)) => Ok(Asked(value)),
            Err(rejection) => Err(Refusal::new(
                Code::BadRequest,
                rejection.body_text(),
                "the only parameter is force=true or force=false",
            )),
        }
    }
}
