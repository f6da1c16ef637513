//! The shared state, acting for one request: changes that a handler makes through it name the actor
//! of the request.

use super::ApiState;
use super::reply::Refusal;
use crate::access::Identity;
use crate::call::{CallContext, RecordTag};
use crate::call_key::{BadKey, IdempotencyKey, KEY_HEADER, ScopedKey};
use crate::fault::Fault;
use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::IF_MATCH;
use axum::http::request::Parts;
use std::convert::Infallible;
use std::sync::Arc;
use utoipa::IntoParams;

/// An extractor of [`ApiState`] for handlers that change state, or whose answer depends on the role.
pub(super) struct CallerApi(pub ApiState);

impl FromRequestParts<ApiState> for CallerApi {
    type Rejection = Infallible;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &ApiState,
    ) -> Result<CallerApi, Infallible> {
        let identity = parts.extensions.get::<Identity>();
        let mut call = CallContext::default();
        if let Some(identity) = identity {
            call.actor = identity.name.clone();
            call.role = identity.role;
        }
        call.expected = if_match(&parts.headers);
        let manager = Arc::new(state.manager.acting_for(call));
        Ok(CallerApi(ApiState {
            manager,
            ..state.clone()
        }))
    }
}

/// An extractor of [`ApiState`] for handlers that create something: the call may have a key.
pub(super) struct CreatorApi(pub ApiState);

/// The header with the expected state, for the OpenAPI document.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it describes the header; the extractor reads it")]
pub(super) struct IfMatchHeader {
    /// The `ETag` of the state that the change is based on. Several are separated by commas; `*` stands for any.
    #[param(rename = "If-Match")]
    if_match: Option<String>,
}

/// The header of the key, for the OpenAPI document.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
#[expect(dead_code, reason = "it describes the header; the extractor reads it")]
pub(super) struct KeyHeader {
    /// A random name of the call, such as a UUID: 1 to 64 visible characters of ASCII. It counts for
    /// the token that sends it, for 24 hours.
    #[param(
        rename = "Idempotency-Key",
        min_length = 1,
        max_length = 64,
        pattern = "^[!-~]+$"
    )]
    idempotency_key: Option<String>,
}

impl FromRequestParts<ApiState> for CreatorApi {
    type Rejection = Refusal;

    async fn from_request_parts(
        parts: &mut Parts,
        state: &ApiState,
    ) -> Result<CreatorApi, Refusal> {
        let Ok(CallerApi(api)) = CallerApi::from_request_parts(parts, state).await;
        let Some(text) = idempotency_key(&parts.headers)? else {
            return Ok(CreatorApi(api));
        };
        let identity = parts.extensions.get::<Identity>();
        let mut call = api.manager.call.clone();
        call.key = Some(ScopedKey {
            token: identity.and_then(|it| it.token),
            text,
        });
        let manager = Arc::new(api.manager.acting_for(call));
        Ok(CreatorApi(ApiState { manager, ..api }))
    }
}

/// The key of the request, if it has one.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<IdempotencyKey>, Fault> {
    let mut values = headers.get_all(KEY_HEADER).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => {
            let text = value.to_str().map_err(|_| BadKey)?;
            Ok(Some(text.parse()?))
        }
        (Some(_), Some(_)) => Err(BadKey.into()),
    }
}

/// The states that the request expects; `None` for any. A tag that no thing has matches nothing.
fn if_match(headers: &HeaderMap) -> Option<Arc<[RecordTag]>> {
    let mut values = headers.get_all(IF_MATCH).iter().peekable();
    values.peek()?;
    let texts = values.map(|value| value.to_str().unwrap_or_default());
    let tags: Vec<&str> = texts
        .flat_map(|text| text.split(','))
        .map(str::trim)
        .collect();
    let any = tags.contains(&"*");
    (!any).then(|| tags.into_iter().filter_map(RecordTag::parse).collect())
}
