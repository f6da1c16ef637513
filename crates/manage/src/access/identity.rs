//! The identity behind a request, and the roles.
//!
//! Invariant: the guard alone makes identities for requests; a handler reads them as an extension of
//! the request.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use utoipa::ToSchema;
use uuid::Uuid;

/// The name of every program that knows the cluster key.
const CLUSTER_KEY_NAME: &str = "cluster key";

/// The rights of an identity. Each role may do everything that the roles before it may do.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Reads everything but tokens.
    Viewer,
    /// Also changes volumes and replicas.
    Operator,
    /// Also makes tokens and forgets bricks.
    Admin,
    /// Also makes the calls of bricks and clients.
    Cluster,
}

impl Role {
    /// All roles, the weakest first.
    pub const ALL: [Role; 4] = [Role::Viewer, Role::Operator, Role::Admin, Role::Cluster];

    /// The name in JSON and in the OpenAPI document.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
            Role::Admin => "admin",
            Role::Cluster => "cluster",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The identity behind a request; an extension of each request that the guard let pass, except on
/// the paths that need no token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its rights.
    pub role: Role,
    /// The name of its token, or `cluster key`.
    pub name: Arc<str>,
    /// Its token; `None` for the cluster key.
    pub token: Option<Uuid>,
}

impl Identity {
    /// The identity of a program that knows the cluster key.
    #[must_use]
    pub fn cluster_key() -> Identity {
        Identity {
            role: Role::Cluster,
            name: CLUSTER_KEY_NAME.into(),
            token: None,
        }
    }
}

/// The address of a request's peer; an extension of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub IpAddr);
