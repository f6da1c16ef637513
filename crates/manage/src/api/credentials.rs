//! The identity that the credentials of a request prove.
//!
//! A request has at most one credential that counts: the `Authorization` header if there is one,
//! otherwise the cookie.
//!
//! Invariant: every refusal here is the same for all paths, so that it does not show which exist.

use super::ApiState;
use super::endpoints::cleared_cookie;
use super::reply::Refusal;
use crate::access::{
    self, CookieToken, Identity, PeerAddress, Role, RouteRights, TokenSecret, looks_like_token,
};
use crate::error_code::ErrorCode;
use crate::token::is_authorized;
use axum::extract::{MatchedPath, Request};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderValue, Method};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::PoisonError;

/// The address of a request that came over no connection, as in a test of the router alone.
const NO_PEER: PeerAddress = PeerAddress(IpAddr::V4(Ipv4Addr::UNSPECIFIED));

/// The identity behind a request that may pass; `None` on a path that needs none.
pub(super) fn admit(api: &ApiState, request: &Request) -> Result<Option<Identity>, Refusal> {
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map(MatchedPath::as_str);
    let RouteRights::Needs(needed) = api.roles.of_request(request.method(), path) else {
        return Ok(None);
    };
    let identity = authenticate(api, request)?;
    if identity.role < needed {
        return Err(forbidden(&identity, needed));
    }
    Ok(Some(identity))
}

fn forbidden(identity: &Identity, needed: Role) -> Refusal {
    let error = format!(
        "the call needs the role {needed}; {} has the role {}",
        identity.name, identity.role
    );
    let hint = match needed {
        Role::Cluster => "use the cluster's key file: --key FILE or PAGEMESH_KEY",
        _ => "use a token with that role, or the cluster's key file",
    };
    Refusal::new(ErrorCode::Forbidden, error, hint)
}

fn authenticate(api: &ApiState, request: &Request) -> Result<Identity, Refusal> {
    let mut headers = request.headers().get_all(AUTHORIZATION).iter();
    match (headers.next(), headers.next()) {
        (Some(header), None) => of_header(api, request, header),
        (None, _) => of_cookie(api, request),
        (Some(_), Some(_)) => Err(Refusal::unauthorized()),
    }
}

fn of_header(api: &ApiState, request: &Request, header: &HeaderValue) -> Result<Identity, Refusal> {
    if is_authorized(&api.key, header.as_bytes()) {
        return Ok(Identity::cluster_key());
    }
    let bearer = header.to_str().ok().and_then(|it| it.split_once(' '));
    match bearer {
        Some((scheme, credential))
            if scheme.eq_ignore_ascii_case("bearer") && looks_like_token(credential) =>
        {
            of_token(api, request, credential)
        }
        _ => Err(Refusal::unauthorized()),
    }
}

fn of_cookie(api: &ApiState, request: &Request) -> Result<Identity, Refusal> {
    let cookie = match access::cookie_token(request.headers()) {
        CookieToken::One(cookie) => cookie,
        CookieToken::None | CookieToken::Ambiguous => return Err(Refusal::unauthorized()),
    };
    let browser = access::browser_request(&api.allowed_hosts, request.uri(), request.headers());
    let counts = browser.and_then(|it| {
        if [Method::GET, Method::HEAD].contains(request.method()) {
            Ok(())
        } else {
            it.check_same_site()
        }
    });
    counts.map_err(|error| Refusal::new(ErrorCode::Unauthorized, error.text(), error.hint()))?;
    let identity = of_token(api, request, cookie);
    identity.map_err(|refusal| refusal.with_cookie(cleared_cookie()))
}

fn of_token(api: &ApiState, request: &Request, text: &str) -> Result<Identity, Refusal> {
    let token = TokenSecret::parse(text);
    let identity = token.and_then(|token| api.manager.identify(&token));
    identity.ok_or_else(|| {
        let peer = request.extensions().get::<PeerAddress>();
        api.refuse_wrong_token(peer.copied().unwrap_or(NO_PEER))
    })
}

impl ApiState {
    /// Counts a wrong token of an address, and refuses it.
    pub(super) fn refuse_wrong_token(&self, peer: PeerAddress) -> Refusal {
        let mut wrong = self
            .wrong_tokens
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match wrong.count(peer.0, self.manager.clock.elapsed()) {
            Ok(()) => Refusal::new(
                ErrorCode::Unauthorized,
                "the token is wrong, revoked or expired",
                "log in with another one; pagemesh token create makes one",
            ),
            Err(limited) => {
                if limited.is_first {
                    self.record_wrong_tokens(peer);
                }
                Refusal::new(
                    ErrorCode::RateLimited,
                    "too many wrong tokens came from this address",
                    "wait a minute; a right token is taken at once",
                )
                .with_retry_after(limited.remaining)
            }
        }
    }

    /// Records the event in the background, unless the manager is busy: the answer needs no disk.
    fn record_wrong_tokens(&self, peer: PeerAddress) {
        let Ok(permit) = self.blocking_permits.clone().try_acquire_owned() else {
            return;
        };
        let manager = self.manager.clone();
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            manager.record_wrong_tokens(peer.0);
        });
    }
}
