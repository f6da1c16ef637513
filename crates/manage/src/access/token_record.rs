//! The record of a token in the store, its name and its role.

use super::identity::Role;
use super::secret::TokenHash;
use pagemesh_base::brick_name::{BadBrickName, BrickName};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use utoipa::ToSchema;
use uuid::Uuid;

/// The actor of the manager's own changes; a token of this name would pass for it.
const RESERVED_NAME: &str = "manager";

/// The name of a token, by the rules of [`BrickName`]; never a UUID, so that a command can take a
/// name or an id.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TokenName(String);

/// Why a text is not the name of a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadTokenName {
    /// It breaks the rules of names.
    #[error(transparent)]
    Name(#[from] BadBrickName),
    /// Events name the manager itself so.
    #[error("'{RESERVED_NAME}' is the manager itself; choose another name")]
    Reserved,
}

impl TokenName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for TokenName {
    type Error = BadTokenName;

    fn try_from(text: String) -> Result<TokenName, BadTokenName> {
        if text == RESERVED_NAME {
            return Err(BadTokenName::Reserved);
        }
        Ok(TokenName(BrickName::try_from(text)?.into()))
    }
}

impl FromStr for TokenName {
    type Err = BadTokenName;

    fn from_str(text: &str) -> Result<TokenName, BadTokenName> {
        TokenName::try_from(text.to_owned())
    }
}

impl From<TokenName> for String {
    fn from(name: TokenName) -> String {
        name.0
    }
}

impl fmt::Display for TokenName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The role of a token. No token has the role `cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TokenRole {
    /// Reads everything but tokens.
    Viewer,
    /// Also changes volumes and replicas, starts scrubs and drains devices.
    Operator,
    /// Also makes tokens, forgets bricks and adds devices.
    Admin,
}

impl TokenRole {
    /// The name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        Role::from(self).name()
    }
}

impl From<TokenRole> for Role {
    fn from(role: TokenRole) -> Role {
        match role {
            TokenRole::Viewer => Role::Viewer,
            TokenRole::Operator => Role::Operator,
            TokenRole::Admin => Role::Admin,
        }
    }
}

/// A token in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Its identity.
    pub id: Uuid,
    /// Its name; no two tokens have the same.
    pub name: TokenName,
    /// Its rights.
    pub role: TokenRole,
    /// The hash of its text.
    pub hash: TokenHash,
    /// Seconds since 1970.
    pub created_unix_s: u64,
    /// Seconds since 1970; `None` for a token that does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_unix_s: Option<u64>,
    /// Whether it has expired. Once stored, no clock matters any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub expired: bool,
}

impl TokenRecord {
    /// Whether the token has expired at this time.
    #[must_use]
    pub fn is_expired(&self, now_unix_s: u64) -> bool {
        self.expired || self.expires_unix_s.is_some_and(|at| at <= now_unix_s)
    }
}
