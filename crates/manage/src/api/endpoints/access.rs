//! Endpoints of identities and tokens: login, logout, the caller's identity, and the list of tokens.

use super::JsonResult;
use crate::access::{COOKIE_NAME, Identity, PeerAddress, TokenSecret};
use crate::api::ApiState;
use crate::api::caller::CallerApi;
use crate::api::reply::{JsonBody, PathParam, Refusal};
use crate::client::{CALL_TIMEOUT, ManagerClient, ManagerError};
use crate::error_code::ErrorCode;
use crate::wire::{CreateToken, CreatedToken, ErrorBody, LoginRequest, TokenInfo, WhoAmI};
use crate::{Manager, access};
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, SET_COOKIE};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use axum::response::{AppendHeaders, IntoResponse};
use axum::{Extension, Json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use uuid::Uuid;

/// Answers with a token must not stay in a cache.
const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");
/// Scripts do not see the cookie, and pages of other sites do not send it.
const COOKIE_ATTRIBUTES: &str = "HttpOnly; SameSite=Strict; Path=/";

pub(super) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::default()
        .routes(routes!(whoami))
        .routes(routes!(login))
        .routes(routes!(logout))
        .routes(routes!(list_tokens, create_token))
        .routes(routes!(revoke_token))
}

/// The identity behind the request.
#[utoipa::path(get, path = "/api/v1/whoami", tag = "access", security(("token" = ["viewer"])),
    responses((status = 200, body = WhoAmI)))]
async fn whoami(
    State(api): State<ApiState>,
    Extension(identity): Extension<Identity>,
) -> Json<WhoAmI> {
    Json(describe(&api.manager, &identity))
}

/// Checks a token, and sets it as the cookie `pagemesh_token`. For browsers; programs send the token
/// as `Authorization: Bearer`.
#[utoipa::path(post, path = "/api/v1/login", tag = "access", security(()),
    request_body = LoginRequest,
    responses((status = 200, body = WhoAmI),
        (status = 401, description = "the token is missing or not valid", body = ErrorBody),
        (status = 403, description = "another site's page sent the request, or its `Host` is not allowed",
            body = ErrorBody),
        (status = 429, description = "too many wrong tokens; `Retry-After` says when to try again",
            body = ErrorBody)))]
async fn login(
    State(api): State<ApiState>,
    Extension(peer): Extension<PeerAddress>,
    uri: Uri,
    headers: HeaderMap,
    body: Result<JsonBody<LoginRequest>, Refusal>,
) -> Result<impl IntoResponse, Refusal> {
    // The errors of the decoder repeat parts of the body, so none is shown.
    let JsonBody(LoginRequest { token }) = body.map_err(|_| Refusal::unauthorized())?;
    let request = access::browser_request(&api.allowed_hosts, &uri, &headers);
    let is_own = request.and_then(|it| it.check_no_other_site());
    is_own.map_err(|error| Refusal::new(ErrorCode::Forbidden, error.text(), error.hint()))?;
    let token = TokenSecret::parse(&token);
    let identity = token.as_ref().and_then(|token| api.manager.identify(token));
    let (Some(token), Some(identity)) = (token, identity) else {
        return Err(api.refuse_wrong_token(peer));
    };
    let cookie = format!("{COOKIE_NAME}={}; {COOKIE_ATTRIBUTES}", token.expose());
    let mut cookie = HeaderValue::try_from(cookie).expect("a token has plain characters");
    cookie.set_sensitive(true);
    let headers = AppendHeaders([(SET_COOKIE, cookie), (CACHE_CONTROL, NO_STORE)]);
    Ok((headers, Json(describe(&api.manager, &identity))))
}

/// Clears the cookie. The token stays valid.
#[utoipa::path(post, path = "/api/v1/logout", tag = "access", security(("token" = ["viewer"])),
    responses((status = 204)))]
async fn logout() -> impl IntoResponse {
    let headers = AppendHeaders([(SET_COOKIE, cleared_cookie())]);
    (StatusCode::NO_CONTENT, headers)
}

/// The header that makes a browser forget the cookie.
pub(in crate::api) fn cleared_cookie() -> HeaderValue {
    let cookie = format!("{COOKIE_NAME}=; {COOKIE_ATTRIBUTES}; Max-Age=0");
    HeaderValue::try_from(cookie).expect("plain characters")
}

/// Every token, without the tokens themselves, in the order of their names.
#[utoipa::path(get, path = "/api/v1/tokens", tag = "access", security(("token" = ["admin"])),
    responses((status = 200, body = Vec<TokenInfo>)))]
async fn list_tokens(State(api): State<ApiState>) -> JsonResult<Vec<TokenInfo>> {
    api.run_store_work(|manager| Ok(manager.tokens()))
        .await
        .map(Json)
}

/// Creates a token. Only the answer has it; the store has its hash. An expired token of the same name
/// is replaced.
#[utoipa::path(post, path = "/api/v1/tokens", tag = "access", security(("token" = ["admin"])),
    request_body = CreateToken,
    responses((status = 201, body = CreatedToken), (status = 400, body = ErrorBody),
        (status = 409, body = ErrorBody),
        (status = 507, description = "there are too many tokens", body = ErrorBody)))]
async fn create_token(
    CallerApi(api): CallerApi,
    JsonBody(request): JsonBody<CreateToken>,
) -> Result<impl IntoResponse, Refusal> {
    let create = move |manager: &Manager| manager.create_token(&request);
    let created = api.run_store_work(create).await?;
    let headers = AppendHeaders([(CACHE_CONTROL, NO_STORE)]);
    Ok((StatusCode::CREATED, headers, Json(created)))
}

/// Revokes a token. The next request with it is refused, and its streams end within 5 s.
#[utoipa::path(delete, path = "/api/v1/tokens/{id}", tag = "access", security(("token" = ["admin"])),
    params(("id" = Uuid, Path, description = "The id of the token")),
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
async fn revoke_token(
    CallerApi(api): CallerApi,
    PathParam(id): PathParam<Uuid>,
) -> Result<StatusCode, Refusal> {
    api.run_store_work(move |manager| manager.revoke_token(id))
        .await?;
    Ok(StatusCode::NO_CONTENT)
}

fn describe(manager: &Manager, identity: &Identity) -> WhoAmI {
    let token = identity.token.and_then(|id| manager.token(id));
    WhoAmI {
        name: identity.name.to_string(),
        role: identity.role,
        expires_unix_s: token.and_then(|token| token.expires_unix_s),
    }
}

impl ManagerClient {
    /// The identity behind the calls of this client.
    #[allow(clippy::missing_errors_doc)]
    pub fn whoami(&self) -> Result<WhoAmI, ManagerError> {
        self.get("whoami")
    }

    /// Every token, without the tokens themselves.
    #[allow(clippy::missing_errors_doc)]
    pub fn tokens(&self) -> Result<Vec<TokenInfo>, ManagerError> {
        self.get("tokens")
    }

    /// Creates a token.
    #[allow(clippy::missing_errors_doc)]
    pub fn create_token(&self, request: &CreateToken) -> Result<CreatedToken, ManagerError> {
        self.call(Method::POST, "tokens", CALL_TIMEOUT, request)
    }

    /// Revokes a token.
    #[allow(clippy::missing_errors_doc)]
    pub fn revoke_token(&self, id: Uuid) -> Result<(), ManagerError> {
        let path = format!("tokens/{id}");
        let answer = self.send(Method::DELETE, &path, CALL_TIMEOUT, String::new())?;
        self.check_status(answer).map(drop)
    }
}
