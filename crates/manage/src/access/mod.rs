//! Access to the API: the identity behind a request, tokens and their roles, and the checks of
//! requests that a browser sends.
//!
//! Invariants: the store and memory have the hash of a token, never the token. No log line, error or
//! answer repeats a token or a hash, except the answer that creates the token. A token that is
//! revoked or expired is refused from the next request on, whatever the wall clock does later.

mod browser;
mod identity;
mod roles;
mod secret;
mod state;
mod token_book;
mod token_record;
mod token_time;
mod wrong_tokens;

pub(crate) use browser::{
    AllowedHosts, COOKIE_NAME, CookieToken, browser_request, cookie_token, looks_like_token,
};
pub use identity::{Identity, PeerAddress, Role};
pub(crate) use roles::stated_rights;
pub use roles::{RouteRights, RouteRoles};
pub use secret::{TokenHash, TokenSecret};
pub(crate) use state::AccessState;
pub use token_book::{BookError, EXPIRES_S_MAX, TOKENS_MAX, TokenBook};
pub use token_record::{BadTokenName, TokenName, TokenRecord, TokenRole};
pub use token_time::{MARK_INTERVAL_S, TokenTime};
pub(crate) use wrong_tokens::network;
pub use wrong_tokens::{
    ADDRESSES_MAX, WRONG_TOKENS_MAX, WRONG_TOKENS_WINDOW, WrongTokenError, WrongTokens,
};
