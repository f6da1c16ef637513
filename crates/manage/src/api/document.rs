//! The OpenAPI document. The types here describe the JSON form of `pagemesh_base` types; a test
//! compares them with the real ones.

use super::endpoints;
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi, ToSchema};
use uuid::Uuid;

/// The layout of a volume. Every change raises the epoch.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// The volume's identity.
    pub volume: Uuid,
    /// Its name.
    pub name: String,
    /// The fencing number of the layout.
    pub epoch: u32,
    /// In the order of the volume's bytes.
    pub segments: Vec<Segment>,
}

/// A range of a volume, striped over its columns in units of 64 KiB.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// Bytes of the volume in this segment.
    pub bytes: u64,
    /// One or more.
    pub columns: Vec<Column>,
}

/// A column; each leg holds the same bytes.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// One to three copies.
    pub legs: Vec<Leg>,
    /// The degraded round: 1 to 15 while a leg is neither in-sync nor following, else 0.
    pub round: u8,
}

/// One leg: a copy of a column.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Leg {
    /// The brick of the leg.
    pub brick: Uuid,
    /// The slice on that brick.
    pub slice: Uuid,
    /// The state of the leg.
    pub state: LegState,
    /// Whether the leg needs a full resync, independent of rounds.
    #[serde(default)]
    pub fresh: bool,
    /// Whether the leg is asynchronous: it becomes `following` once it is up to date.
    #[serde(default)]
    pub asynchronous: bool,
    /// Whether the leg was never in-sync.
    #[serde(default)]
    pub empty: bool,
}

/// The state of a leg.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LegState {
    /// Holds all acknowledged writes; clients write and read it.
    InSync,
    /// Missed writes; clients neither write nor read it.
    Stale,
    /// Being resynced; clients write but do not read it.
    Syncing,
    /// An asynchronous replica: receives changes in order, after their acknowledgement.
    Following,
}

/// A durability class, the strongest first. All copies of a volume have one class, so that the
/// volume makes one promise.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Durability {
    /// Persistent memory, with lines flushed from the caches.
    Pmem,
    /// Persistent memory with persistent caches.
    Eadr,
    /// A file: durable after a completed flush.
    FileSync,
    /// Survives the death of processes, but not of the machine.
    Process,
}

#[derive(OpenApi)]
#[openapi(
    info(title = "pagemesh manager",
        description = "Volumes, their layouts and the bricks they lie on. The token is the hex of HMAC-SHA256 of `pagemesh rest v0` under the cluster key."),
    security(("token" = [])),
    modifiers(&TokenScheme)
)]
struct DocumentHead;

struct TokenScheme;

impl Modify for TokenScheme {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
    }
}

/// The document without paths: title, description and token.
pub(super) fn head() -> utoipa::openapi::OpenApi {
    DocumentHead::openapi()
}

/// The document.
#[must_use]
pub fn document() -> utoipa::openapi::OpenApi {
    let mut document = endpoints::routes().into_openapi();
    let paths = document.paths.paths.values_mut();
    let operations = paths.flat_map(|path| {
        let methods = [
            &mut path.get,
            &mut path.put,
            &mut path.post,
            &mut path.delete,
        ];
        methods.into_iter().flatten()
    });
    for (status, response) in operations.flat_map(|it| &mut it.responses.responses) {
        if let RefOr::T(response) = response
            && response.description.is_empty()
        {
            response.description = meaning_of_status(status).to_owned();
        }
    }
    document
}

/// The description of an answer without one of its own; OpenAPI 3.1 requires one.
fn meaning_of_status(status: &str) -> &'static str {
    match status {
        "200" => "done",
        "201" => "created",
        "204" => "done, without a body",
        "400" => "the request is invalid",
        "404" => "the named thing does not exist",
        "409" => "the present state does not permit it",
        "502" => "a brick failed or did not answer",
        "507" => "no bricks have the space",
        _ => "",
    }
}
