//! The shared state, acting for one request: changes that a handler makes through it name the actor
//! of the request.

use super::ApiState;
use crate::access::Identity;
use crate::call::{CallContext, RecordTag};
use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::IF_MATCH;
use axum::http::request::Parts;
use std::convert::Infallible;
use std::sync::Arc;

/// An extractor of [`ApiState`] for handlers that change state.
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
        }
        call.expected = if_match(&parts.headers);
        let manager = Arc::new(state.manager.acting_for(call));
        Ok(CallerApi(ApiState {
            manager,
            ..state.clone()
        }))
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
