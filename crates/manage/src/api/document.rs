//! The OpenAPI document. The types here describe the JSON form of `pagemesh_base` types; a test
//! compares them with the real ones.

use super::{common_answers, document_schemas, endpoints};
use crate::access::RouteRoles;
use crate::wire::{Hello, PROBLEM_JSON, ScrubState};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ObjectBuilder, RefOr, Response, Schema, Type};
use utoipa::{Modify, OpenApi, PartialSchema, ToSchema};
use uuid::Uuid;

/// The pattern of names.
const NAME_PATTERN: &str = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,63}$";

/// A name, or the UUID of a brick.
pub struct Name;

impl PartialSchema for Name {
    fn schema() -> RefOr<Schema> {
        let text = "1 to 64 of `A-Z a-z 0-9 . _ -`, not starting with a dot or a dash. A brick may also have its UUID here.";
        let schema = ObjectBuilder::new().schema_type(Type::String);
        let schema = schema.pattern(Some(NAME_PATTERN));
        schema.description(Some(text)).build().into()
    }
}

impl ToSchema for Name {}

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
    /// The epoch of the oldest loss while a leg is neither in-sync nor an asynchronous replica in step, else 0.
    pub lost_since: u32,
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
    /// Whether the leg needs a full resync, independent of the epoch of its loss.
    #[serde(default)]
    pub needs_full_resync: bool,
    /// The earlier name of `needs_full_resync`; it has the same value.
    #[serde(default)]
    pub fresh: bool,
    /// Whether the leg is asynchronous: it becomes an asynchronous replica in step, instead of in-sync.
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
    /// An asynchronous replica in step: receives changes in order, after their acknowledgement. Status output
    /// shows it as `async-replica`, and requests may name it so.
    #[serde(rename = "following", alias = "async-replica")]
    AsyncReplica,
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

/// The scrubs of a brick's pool since it was opened.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BrickScrub {
    /// The current state.
    pub state: ScrubState,
    /// Completed scrubs.
    pub passes: u64,
    /// Progress of the running scrub, in percent.
    pub progress_percent: Option<u8>,
    /// Milliseconds until the next scrub, if none is running.
    pub next_in_ms: Option<u64>,
    /// Findings of the running scrub so far.
    pub pass: Option<ScrubReport>,
    /// Findings of the last completed scrub.
    pub last: Option<ScrubReport>,
    /// Milliseconds since the last completed scrub.
    pub ended_ms_ago: Option<u64>,
    /// Corrections by all scrubs together.
    pub corrected: u64,
    /// The earlier name of `corrected`; it has the same value.
    pub mended: u64,
    /// The scrub request that the brick carried out last.
    #[serde(default)]
    pub fulfilled: Option<Uuid>,
}

/// Findings of a scrub of a pool.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScrubReport {
    /// Structures checked.
    pub checked: u64,
    /// Superblocks rewritten.
    pub superblocks: u64,
    /// Journal records corrected.
    pub records: u64,
    /// Journals with a record that cannot be corrected and is no longer needed. Their slices are
    /// compared as a whole at the next attach.
    pub skipped_journals: u64,
    /// The earlier name of `skipped_journals`; it has the same value.
    pub left_behind: u64,
    /// In-flight table entries rewritten.
    pub in_flight: u64,
    /// Bitmap lines rewritten.
    pub bitmap_lines: u64,
    /// Object table entries rewritten.
    pub objects: u64,
    /// Page table slots corrected.
    pub slots: u64,
    /// All corrections together.
    pub corrected: u64,
    /// The earlier name of `corrected`; it has the same value.
    pub mended: u64,
    /// Structures that only `pool check` or another copy can repair.
    pub damaged: u64,
}

/// A message of the stream of changes.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct StreamMessage {
    /// `hello`, `status`, `brick`, `volume`, `event` or `acknowledged`.
    pub event: String,
    /// JSON: of a `hello` the type `Hello`, of the others the items of lists.
    pub data: String,
    /// The number of an `event`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// The kinds of operations that are counted apart.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OpKind {
    /// Reads.
    Read,
    /// Writes, transactions and deallocations.
    Write,
    /// Flushes.
    Flush,
}

/// The counters of a meter since its last report. RFD 025 describes the buckets.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FigureReport {
    /// Reads, writes and flushes, in this order.
    #[schema(min_items = 3, max_items = 3)]
    pub kinds: Vec<FigureReportKind>,
    /// Bytes that a brick wrote to its medium; missing in reports of volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media: Option<FigureReportMedia>,
}

/// Bytes written to a medium.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FigureReportMedia {
    /// Pages, and parts of pages that were changed in place.
    pub data: u64,
    /// Journals.
    pub journal: u64,
    /// Page tables, checksums, the bitmap and superblocks.
    pub tables: u64,
}

/// The counters of one kind of operation.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FigureReportKind {
    /// All operations.
    pub ops: u64,
    /// Bytes of all operations.
    pub bytes: u64,
    /// Pairs of a latency bucket and its timed operations, in ascending order of the buckets.
    pub latency: Vec<(u16, u64)>,
    /// Pairs of a power of two of the latency and the nanoseconds in each of the six stages, in ascending order.
    pub stages: Vec<(u8, Vec<u64>)>,
}

#[derive(OpenApi)]
#[openapi(
    info(title = "pagemesh manager",
        description = "Volumes, their layouts and the bricks they lie on. The bearer is a token (`pm_…`), or the hex of HMAC-SHA256 of `pagemesh rest v0` under the cluster key, which has the role `cluster`. Browsers may send a token as the cookie `pagemesh_token`. The scope of `security` is the role that a call needs; each of `viewer`, `operator`, `admin` and `cluster` may make the calls of those before it. Errors are problems of RFC 9457. `components.responses` has the refusals that many calls share."),
    security(("token" = [])),
    components(schemas(Hello)),
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
pub fn document() -> Value {
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
    for operation in operations {
        for (status, response) in &mut operation.responses.responses {
            complete_answer(status, response);
        }
        common_answers::add_to(operation);
    }
    common_answers::describe(document.components.get_or_insert_default());
    let mut document = serde_json::to_value(document).expect("the document has only JSON");
    document_schemas::correct(&mut document);
    document
}

/// Adds the meaning of the status and the media type of problems, which the annotations of handlers leave out.
fn complete_answer(status: &str, response: &mut RefOr<Response>) {
    let RefOr::T(response) = response else {
        return;
    };
    if response.description.is_empty() {
        response.description = meaning_of_status(status).to_owned();
    }
    if status.starts_with(['4', '5'])
        && let Some(content) = response.content.shift_remove("application/json")
    {
        response.content.insert(PROBLEM_JSON.to_owned(), content);
    }
}

/// The role that each route needs, as its annotation states.
#[must_use]
pub fn route_roles() -> RouteRoles {
    RouteRoles::of_document(&document())
}

/// The description of an answer without one of its own; OpenAPI 3.1 requires one.
fn meaning_of_status(status: &str) -> &'static str {
    match status {
        "200" => "done",
        "201" => "created",
        "204" => "done, without a body",
        "304" => "the client has it",
        "400" => "the request is invalid",
        "404" => "the named thing does not exist",
        "409" => "the present state does not permit it",
        "412" => "the thing has changed meanwhile",
        "422" => "another call had the key",
        "502" => "a brick failed or did not answer",
        "507" => "no bricks have the space",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire;
    use pagemesh_base::layout;
    use serde::de::DeserializeOwned;

    /// The described type reads the real one, and has the same keys.
    fn check<Described: Serialize + DeserializeOwned>(real: &impl Serialize) {
        let real = serde_json::to_value(real).expect("JSON");
        let read: Described = serde_json::from_value(real.clone()).expect("the described form");
        assert_eq!(serde_json::to_value(read).expect("JSON"), real);
    }

    #[test]
    fn described_types_have_keys_of_real_ones() {
        let leg = layout::Leg {
            brick: layout::BrickId(Uuid::from_u128(1)),
            slice: layout::SliceId(Uuid::from_u128(2)),
            state: layout::LegState::AsyncReplica,
            needs_full_resync: true,
            empty: true,
            asynchronous: true,
        };
        check::<Layout>(&layout::Layout {
            volume: Uuid::from_u128(3),
            name: "v".parse().expect("a name"),
            epoch: layout::EpochNumber(4),
            segments: vec![layout::Segment {
                bytes: 4096,
                columns: vec![layout::Column {
                    legs: vec![leg],
                    lost_since: layout::EpochNumber(0),
                }],
            }],
        });
        for state in ["in-sync", "stale", "syncing", "following"] {
            let real: layout::LegState = from_word(state);
            check::<LegState>(&real);
        }
        for class in pagemesh_base::durability::Durability::ALL {
            check::<Durability>(&class);
        }
        for kind in [
            pagemesh_telemetry::OpKind::Read,
            pagemesh_telemetry::OpKind::Write,
            pagemesh_telemetry::OpKind::Flush,
        ] {
            check::<OpKind>(&kind);
        }
        let mut report = pagemesh_telemetry::Report::default();
        report.kinds[1].latency = vec![(1, 2)];
        report.kinds[1].stages = vec![(3, [4, 5, 6, 7, 8, 9])];
        check::<FigureReport>(&report);
        report.media = Some(pagemesh_telemetry::MediaBytes {
            data: 1,
            journal: 2,
            tables: 3,
        });
        check::<FigureReport>(&report);
        let found = wire::ScrubReport {
            checked: 1,
            slots: 2,
            skipped_journals: 3,
            ..wire::ScrubReport::default()
        };
        check::<BrickScrub>(&wire::BrickScrub {
            state: ScrubState::Running,
            passes: 1,
            progress_percent: Some(2),
            next_in_ms: Some(3),
            pass: Some(found),
            last: Some(found),
            ended_ms_ago: Some(4),
            corrected: 5,
            fulfilled: Some(Uuid::from_u128(6)),
        });
    }

    fn from_word<T: DeserializeOwned>(word: &str) -> T {
        serde_json::from_value(Value::from(word)).expect("a word")
    }
}
