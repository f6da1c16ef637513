//! What goes over HTTP, as JSON. Ids are UUIDs as text, sizes are bytes,
//! epochs are numbers.

pub use crate::fault::Code;
pub use crate::records::{Attachment, Note};

use crate::durability::Durability;
use crate::shape::Kind;
use pagemesh_base::defect::{self, Defect};
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, LegState, VolumeName};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

/// A refusal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Error)]
pub struct ErrorBody {
    /// What is wrong, for people.
    pub error: String,
    /// What to do about it.
    pub hint: String,
    /// What kind of refusal, for programs.
    pub code: Code,
    /// The layout's epoch, in an `epoch-conflict`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epoch: Option<u32>,
}

/// What a brick says of itself with each heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickRegistration {
    /// The UUID of its pool; the same as in the path.
    #[schema(value_type = Uuid)]
    pub brick: BrickId,
    /// `host:port` of its tcp transport.
    pub address: String,
    /// The unix socket of its `map` transport: an absolute path.
    #[serde(default)]
    pub map_socket: Option<String>,
    /// What fails together with it: a machine, a rack.
    pub domain: String,
    /// Its pool's class.
    pub durability: Durability,
    /// Bytes that slices can use in all.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Rises with each opening of the pool: a later one replaces an earlier.
    pub incarnation: u32,
    /// Sessions open.
    #[serde(default)]
    pub sessions: u32,
    /// The scrubs of its pool.
    #[serde(default)]
    pub scrub: Option<BrickScrub>,
}

/// Whether a brick scrubs its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ScrubState {
    /// None is planned.
    Off,
    /// The next one has its time.
    Waiting,
    /// One is under way.
    Running,
}

/// The scrubs of a brick's pool since it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickScrub {
    /// What is going on.
    pub state: ScrubState,
    /// Scrubs that came to their end.
    pub passes: u64,
    /// How much of the one under way is done, in percent.
    pub progress_percent: Option<u8>,
    /// The time to the next one, if none is under way.
    pub next_in_ms: Option<u64>,
    /// What the one under way has found by now.
    pub pass: Option<ScrubFound>,
    /// What the last one found.
    pub last: Option<ScrubFound>,
    /// How long ago that one ended.
    pub ended_ms_ago: Option<u64>,
    /// What all of them have mended.
    pub mended: u64,
    /// The wish that the brick fulfilled last.
    #[serde(default)]
    pub fulfilled: Option<Uuid>,
}

/// What a scrub of a pool has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScrubFound {
    /// Places looked at.
    pub checked: u64,
    /// Superblocks written anew.
    pub superblocks: u64,
    /// Records of the journal mended.
    pub records: u64,
    /// Lanes of the journal with a record that cannot be mended and is not needed
    /// any more; slices are compared as a whole when they are attached next.
    pub left_behind: u64,
    /// Entries of the in-flight table written anew.
    pub in_flight: u64,
    /// Lines of the bitmap written anew.
    pub bitmap_lines: u64,
    /// Entries of the object table written anew.
    pub objects: u64,
    /// Slots of page tables mended.
    pub slots: u64,
    /// All that was put right.
    pub mended: u64,
    /// Places that only `pool check`, or another copy, can help.
    pub damaged: u64,
}

impl BrickScrub {
    /// Places that are damaged still, by what is known last.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        let found = [self.pass, self.last];
        let damaged = found.iter().flatten().map(|found| found.damaged);
        damaged.max().unwrap_or(0)
    }
}

/// Whether a scrub of a brick's pool is to begin or to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ScrubBrick {
    /// End the one under way, instead of beginning one.
    #[serde(default)]
    pub stop: bool,
}

/// Such a wish on its way to the brick: it is said with each answer to a
/// heartbeat until the brick says that it is fulfilled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScrubWish {
    /// Names it, so that it is fulfilled once.
    pub id: Uuid,
    /// End the one under way, instead of beginning one.
    pub stop: bool,
}

/// The answer to a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HeartbeatReply {
    /// When the next one is due.
    pub interval_ms: u64,
    /// Without one for so long, the brick counts as dead.
    pub dead_after_ms: u64,
    /// What the brick is to do.
    #[serde(default)]
    pub scrub: Option<ScrubWish>,
}

/// A brick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickInfo {
    /// The UUID of its pool.
    #[schema(value_type = Uuid)]
    pub brick: BrickId,
    /// Whether its heartbeats come.
    pub alive: bool,
    /// Age of the last heartbeat; none since this manager started if missing.
    pub heartbeat_age_ms: Option<u64>,
    /// `host:port` of its tcp transport.
    pub address: String,
    /// The unix socket of its `map` transport.
    pub map_socket: Option<String>,
    /// What fails together with it.
    pub domain: String,
    /// Its pool's class.
    pub durability: Durability,
    /// Bytes that slices can use in all.
    pub capacity_bytes: u64,
    /// Bytes in use, as last heard.
    pub used_bytes: u64,
    /// Bytes of all slices placed there, full or not.
    pub provisioned_bytes: u64,
    /// Slices of volumes.
    pub slices: usize,
    /// Slices of deleted volumes that it still holds.
    pub pending_deletions: usize,
    /// Sessions open, as last heard.
    pub sessions: u32,
    /// The scrubs of its pool, as last heard.
    #[serde(default)]
    pub scrub: Option<BrickScrub>,
    /// What it was asked to do and has not fulfilled yet.
    #[serde(default)]
    pub scrub_wish: Option<ScrubWish>,
}

/// What a volume holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// Blocks, for whoever exports it.
    #[default]
    Blocks,
    /// A file system, for whoever mounts it.
    Files,
}

/// A volume to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    /// 1 to 64 of `A-Z a-z 0-9 . _ -`, not starting with a dot or a dash.
    #[schema(value_type = String)]
    pub name: VolumeName,
    /// Whole pages of 4096 bytes; rounded up to whole stripes if striped. Of
    /// files: what they may take together.
    pub size_bytes: u64,
    /// `mirror` if missing.
    #[serde(default)]
    pub layout: Kind,
    /// Columns of a stripe: 2 if missing.
    #[serde(default)]
    pub columns: Option<usize>,
    /// Copies of a mirror: 2 if missing.
    #[serde(default)]
    pub copies: Option<usize>,
    /// The class of its bricks: the strongest that has room if missing.
    #[serde(default)]
    pub durability: Option<Durability>,
    /// `blocks` if missing. Files need one column on one brick per copy.
    #[serde(default)]
    pub content: Content,
}

/// How much a volume is to grow by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GrowVolume {
    /// The size afterwards: more than now, by whole pages.
    pub size_bytes: u64,
}

/// A further copy of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachReplica {
    /// The brick it goes to; if missing, each column goes where there is room.
    #[serde(default)]
    #[schema(value_type = Option<uuid::Uuid>)]
    pub brick: Option<BrickId>,
    /// Whether it gets changes only after they were acknowledged, in their order; what
    /// is to be durable is acknowledged when it has it. For volumes of one column, one
    /// such copy each.
    #[serde(default)]
    pub asynchronous: bool,
    /// Whether a client that can reach no in-sync copy, while every brick with one is
    /// dead, goes on with an asynchronous one, which may lack what was acknowledged last.
    #[serde(default)]
    pub auto_promote: bool,
}

/// A copy of a volume that is to be removed, or promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChooseReplica {
    /// Which, counted from 0 as in the layout's columns.
    pub copy: usize,
    /// Although a client has the volume, which is then fenced; to promote it, also
    /// although the copy is not in-sync, and to remove it, although no brick that is
    /// alive would have an in-sync one.
    #[serde(default)]
    pub force: bool,
    /// The epoch of the layout that copies were counted in: another one refuses it.
    #[serde(default)]
    #[schema(value_type = Option<u32>)]
    pub expected: Option<EpochNumber>,
}

/// A volume that was created or has grown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Sized {
    /// The volume.
    pub volume: VolumeDetail,
    /// What was asked for.
    pub asked_bytes: u64,
    /// Whether it got more, to fill whole stripes.
    pub rounded: bool,
    /// The rounding in words, where there was one.
    pub note: Option<String>,
}

/// Who wants a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachVolume {
    /// What the client calls itself, for people: 1 to 128 bytes.
    pub client: String,
    /// It attached a moment ago and could not reach any in-sync copy: one that follows
    /// may be promoted for it, where that was allowed.
    #[serde(default)]
    pub unreachable: bool,
}

/// How to reach a brick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickAddress {
    /// `host:port` of its tcp transport.
    pub tcp: String,
    /// The unix socket of its `map` transport.
    pub map_socket: Option<String>,
    /// Its pool's class.
    pub durability: Durability,
}

/// A layout and where its bricks are; after an attach, the layout's epoch
/// names the attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attached {
    /// Where the volume lies.
    #[schema(value_type = crate::api::document::Layout)]
    pub layout: Layout,
    /// By brick.
    #[schema(value_type = BTreeMap<String, BrickAddress>)]
    pub bricks: BTreeMap<BrickId, BrickAddress>,
}

/// Which attachment is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DetachVolume {
    /// The epoch that the attach gave; another attachment is left alone. If
    /// missing, any is ended.
    #[serde(default)]
    #[schema(value_type = Option<u32>)]
    pub attachment: Option<EpochNumber>,
}

/// What came of a detach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Detached {
    /// Whether there was such an attachment.
    pub detached: bool,
}

/// A wish to change what a leg may be used for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LegChange {
    /// Which segment of the layout, from 0.
    pub segment: usize,
    /// Which of its columns, from 0.
    pub column: usize,
    /// Which of its legs, from 0.
    pub leg: usize,
    /// What it becomes.
    #[schema(value_type = crate::api::document::LegState)]
    pub to: LegState,
    /// Why, for people; kept until the leg is in-sync again.
    #[serde(default)]
    pub note: Option<String>,
}

/// Compare-and-swap of leg states: all changes or none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeLegs {
    /// The epoch of the layout that led to the wish.
    #[schema(value_type = u32)]
    pub expected: EpochNumber,
    /// The attachment that asks; if it is over, the answer is `fenced`.
    #[serde(default)]
    #[schema(value_type = Option<u32>)]
    pub attachment: Option<EpochNumber>,
    /// Each leg at most once.
    pub changes: Vec<LegChange>,
}

/// How a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Health {
    /// All legs are in-sync.
    InSync,
    /// Legs are being brought up to date, none is stale.
    Syncing,
    /// A leg is stale.
    Degraded,
}

/// A volume in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeInfo {
    /// Its name.
    #[schema(value_type = String)]
    pub name: VolumeName,
    /// Its identity.
    pub id: Uuid,
    /// What it holds.
    #[serde(default)]
    pub content: Content,
    /// Its size; of files, what they may take.
    pub size_bytes: u64,
    /// Its kind of layout.
    pub layout: Kind,
    /// Columns of each segment.
    pub columns: usize,
    /// Copies of each column.
    pub copies: usize,
    /// The class of its bricks.
    pub durability: Durability,
    /// Its epoch.
    #[schema(value_type = u32)]
    pub epoch: EpochNumber,
    /// How its legs are.
    pub health: Health,
    /// Legs on bricks that count as dead.
    pub unreachable_legs: usize,
    /// Who has it.
    pub attached: Option<Attachment>,
    /// Whether its asynchronous copy is promoted by the manager.
    #[serde(default)]
    pub auto_promote: bool,
    /// Seconds since 1970.
    pub created_unix_s: u64,
}

/// All about a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeDetail {
    /// As in a list.
    pub info: VolumeInfo,
    /// Where it lies.
    #[schema(value_type = crate::api::document::Layout)]
    pub layout: Layout,
    /// Where its bricks are.
    #[schema(value_type = BTreeMap<String, BrickAddress>)]
    pub bricks: BTreeMap<BrickId, BrickAddress>,
    /// Why legs are not in-sync.
    pub notes: Vec<Note>,
    /// How its copies were that follow or return, when its client told last.
    #[serde(default)]
    pub told: Option<CopiesTold>,
}

/// What a client tells of its copies, when it asks for the layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TellCopies {
    /// The epoch that the attach gave.
    #[schema(value_type = u32)]
    pub attachment: EpochNumber,
    /// What the copy that follows has yet to get, if one does.
    #[serde(default)]
    pub lag: Option<Lag>,
    /// Copies that return, one of each number.
    #[serde(default)]
    pub returns: Vec<CopyReturn>,
}

/// How copies were that follow or return.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CopiesTold {
    /// What the copy that follows had yet to get.
    pub lag: Option<Lag>,
    /// How far those that return had come.
    pub returns: Vec<CopyReturn>,
    /// How long ago that was.
    pub told_us_ago: u64,
}

/// What a copy that follows has yet to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Lag {
    /// Changes that were not sent and done yet.
    pub changes: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Since the oldest of them was acknowledged, or could have been.
    pub age_us: u64,
}

/// How far the return of a copy has come, the first one included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyReturn {
    /// Which copy.
    pub copy: usize,
    /// Bytes to copy or compare, as far as that is known.
    pub bytes_todo: u64,
    /// Bytes of these that are done.
    pub bytes_done: u64,
    /// Since it began.
    pub elapsed_ms: u64,
}

impl VolumeDetail {
    /// Whether the volume is attached, and with this epoch: what a layout read
    /// later must say before a client may take it for its own.
    #[must_use]
    pub fn is_attached_as(&self, attachment: EpochNumber) -> bool {
        let attached = self.info.attached.as_ref();
        attached.is_some_and(|present| {
            present.epoch == attachment || defect::is(Defect::ForeignLayoutTaken)
        })
    }
}

/// Whether to do it although something speaks against it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct Force {
    /// `true` does it anyway.
    #[serde(default)]
    pub force: bool,
}

/// What came of a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Deleted {
    /// Slices that could not be deleted yet; the manager goes on trying.
    pub pending_deletions: usize,
}

/// The cluster at a glance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// The manager's version.
    pub version: String,
    /// Bricks known.
    pub bricks: usize,
    /// Of these, alive.
    pub bricks_alive: usize,
    /// Bytes of all bricks.
    pub capacity_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Bytes of all slices, full or not.
    pub provisioned_bytes: u64,
    /// Bytes of slices that a brick may be promised per byte of capacity.
    pub overprovision_factor: u64,
    /// Volumes.
    pub volumes: usize,
    /// Of these, attached.
    pub volumes_attached: usize,
    /// Of these, with a leg that is stale or syncing.
    pub volumes_degraded: usize,
    /// Slices of deleted volumes that bricks still hold.
    pub pending_deletions: usize,
    /// Bricks that scrub their pools now.
    #[serde(default)]
    pub bricks_scrubbing: usize,
    /// What scrubs of pools have mended, since the bricks started.
    #[serde(default)]
    pub scrubs_mended: u64,
    /// Places that they found damaged and could not mend.
    #[serde(default)]
    pub scrubs_damaged: u64,
}
