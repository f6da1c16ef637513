//! The OpenAPI document. The types here describe what `base` types look like
//! as JSON; a test holds them against the real ones.

use super::handlers;
use serde::{Deserialize, Serialize};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi, ToSchema};
use uuid::Uuid;

/// Where a volume lies. Every change raises the epoch.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// The volume's identity.
    pub volume: Uuid,
    /// Its name.
    pub name: String,
    /// Its fencing number.
    pub epoch: u32,
    /// In order of the volume's bytes.
    pub segments: Vec<Segment>,
}

/// A run of a volume, striped over its columns in units of 64 KiB.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// Bytes of the volume that lie here.
    pub bytes: u64,
    /// One or more.
    pub columns: Vec<Column>,
}

/// The same bytes in each leg.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// One to three copies.
    pub legs: Vec<Leg>,
    /// The degraded round: 1 to 15 while a leg is not in-sync, else 0.
    pub round: u8,
}

/// One copy of a column.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Leg {
    /// Where.
    pub brick: Uuid,
    /// Which slice of that brick.
    pub slice: Uuid,
    /// What it may be used for.
    pub state: LegState,
    /// Whether all of it may differ, whatever rounds say.
    #[serde(default)]
    pub fresh: bool,
    /// Whether it follows once it is up to date.
    #[serde(default)]
    pub asynchronous: bool,
    /// Whether it was never in-sync.
    #[serde(default)]
    pub empty: bool,
}

/// What a leg may be used for.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LegState {
    /// Holds everything acknowledged: written and read.
    InSync,
    /// Missed writes: neither written nor read.
    Stale,
    /// Being brought up to date: written, not read.
    Syncing,
    /// Gets changes after they were acknowledged, in their order.
    Following,
}

#[derive(OpenApi)]
#[openapi(
    info(title = "pagemesh manager",
        description = "Volumes, their layouts and the bricks they lie on. The token is the hex of HMAC-SHA256 of `pagemesh rest v0` under the cluster key."),
    paths(handlers::healthz, handlers::openapi, handlers::status,
        handlers::list_bricks, handlers::heartbeat, handlers::forget_brick, handlers::scrub_brick,
        handlers::list_volumes, handlers::create_volume, handlers::show_volume,
        handlers::delete_volume, handlers::grow_volume, handlers::attach_volume,
        handlers::detach_volume, handlers::change_legs, handlers::attach_replica,
        handlers::detach_replica, handlers::promote_replica, handlers::tell_copies),
    security(("token" = [])),
    modifiers(&Token)
)]
struct Document;

struct Token;

impl Modify for Token {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

/// The document.
#[must_use]
pub fn document() -> utoipa::openapi::OpenApi {
    Document::openapi()
}
