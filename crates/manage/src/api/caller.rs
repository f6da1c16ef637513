//! The shared state, acting for one request: changes that a handler makes through it name the actor
//! of the request.

use super::ApiState;
use crate::access::Identity;
use crate::call::CallContext;
use axum::extract::FromRequestParts;
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
        let call = identity.map_or_else(CallContext::default, |identity| CallContext {
            actor: identity.name.clone(),
        });
        let manager = Arc::new(state.manager.acting_for(call));
        Ok(CallerApi(ApiState {
            manager,
            ..state.clone()
        }))
    }
}
