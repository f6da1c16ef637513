//! JSON bodies about identities and tokens.
//!
//! Invariant: debug output has no token.

use crate::access::{Role, TokenName, TokenRole};
use serde::{Deserialize, Serialize};
use std::fmt;
use utoipa::ToSchema;
use uuid::Uuid;

/// A token to create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateToken {
    /// Not a UUID, and not `manager`.
    #[schema(value_type = crate::api::document::Name)]
    pub name: TokenName,
    /// Its rights.
    pub role: TokenRole,
    /// Seconds until it expires, 1 to ten years; it does not expire if missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 315_360_000)]
    pub expires_s: Option<u64>,
}

/// A token, without the token itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TokenInfo {
    /// Its identity.
    pub id: Uuid,
    /// Its name.
    #[schema(value_type = crate::api::document::Name)]
    pub name: TokenName,
    /// Its rights.
    pub role: TokenRole,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// Seconds since 1970; null for a token that does not expire.
    pub expires_unix_s: Option<u64>,
    /// Whether it has expired.
    pub expired: bool,
}

/// A new token. Only this answer has it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreatedToken {
    /// The token.
    pub token: String,
    /// Its record.
    #[serde(flatten)]
    pub info: TokenInfo,
}

impl fmt::Debug for CreatedToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CreatedToken")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

/// A login.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoginRequest {
    /// The token.
    pub token: String,
}

impl fmt::Debug for LoginRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoginRequest").finish_non_exhaustive()
    }
}

/// The identity behind the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WhoAmI {
    /// The name of its token, or `cluster key`.
    pub name: String,
    /// Its rights.
    pub role: Role,
    /// Seconds since 1970; null if it does not expire.
    pub expires_unix_s: Option<u64>,
}
