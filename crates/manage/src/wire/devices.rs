//! Bodies about the devices of bricks' pools.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// The use of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceState {
    /// The pool writes to it.
    Active,
    /// Its data moves to the other devices.
    Draining,
    /// It has failed: its pages are damaged, and the pool does not use it.
    Failed,
    /// A state of a later version.
    #[serde(other)]
    Other,
}

impl DeviceState {
    /// Its name in REST and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DeviceState::Active => "active",
            DeviceState::Draining => "draining",
            DeviceState::Failed => "failed",
            DeviceState::Other => "other",
        }
    }
}

/// The progress of a device that is draining.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DrainProgress {
    /// Bytes in use on the device.
    pub left_bytes: u64,
    /// Bytes moved since the drain started or the brick was opened.
    pub moved_bytes: u64,
    /// Bytes moved per second, over the last seconds.
    pub bytes_per_s: u64,
    /// Seconds since the drain started or the brick was opened.
    pub running_s: u64,
    /// Why the drain does not proceed, if it does not.
    #[serde(default)]
    pub problem: Option<String>,
}

/// A device of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickDevice {
    /// Its id. The first device has the id of the pool.
    pub device: Uuid,
    /// Its path on the host of the brick, if it is known.
    #[serde(default)]
    pub path: Option<String>,
    /// Whether it is the first device, which has the journals and tables of the pool and stays.
    #[serde(default)]
    pub is_first: bool,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes in use for data and page tables.
    pub used_bytes: u64,
    /// Its use.
    pub state: DeviceState,
    /// Errors of the device after which the brick has opened its pool again. Only its process counts them: 0 after a restart.
    #[serde(default)]
    pub errors: u64,
    /// Seconds since the last of these errors.
    #[serde(default)]
    pub last_error_s: Option<u64>,
    /// The progress of its drain.
    #[serde(default)]
    pub drain: Option<DrainProgress>,
}

/// The devices of a brick, in its heartbeat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BrickDevices {
    /// The devices, the first one first.
    pub list: Vec<BrickDevice>,
    /// The results of the last requests.
    #[serde(default)]
    pub results: Vec<DeviceResult>,
}

/// Bytes of the longest path of a device: `PATH_MAX` without its end.
pub(crate) const PATH_BYTES_MAX: usize = 4095;
/// Bytes of the longest sentence of a brick about a device.
const SENTENCE_BYTES_MAX: usize = 4096;

impl BrickDevices {
    /// The same with sentences of bounded length without control characters, and without paths that are none. They are for
    /// people only, so a heartbeat is never refused because of them.
    #[must_use]
    pub fn cleaned(mut self) -> BrickDevices {
        for device in &mut self.list {
            device.path = device.path.take().filter(|path| is_device_path(path));
            if let Some(drain) = &mut device.drain {
                drain.problem = drain.problem.take().map(clean_sentence);
            }
        }
        for result in &mut self.results {
            result.error = result.error.take().map(clean_sentence);
        }
        self
    }
}

fn is_plain(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

/// Whether a text can be the path of a device.
pub(crate) fn is_device_path(path: &str) -> bool {
    path.starts_with('/') && path.len() <= PATH_BYTES_MAX && is_plain(path)
}

fn clean_sentence(mut text: String) -> String {
    if !is_plain(&text) {
        text = text.replace(char::is_control, " ");
    }
    text.truncate(text.floor_char_boundary(SENTENCE_BYTES_MAX));
    text
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceResult {
    /// The id of the request.
    pub request: Uuid,
    /// The device that it added or changed.
    #[serde(default)]
    pub device: Option<Uuid>,
    /// Why the brick refused it.
    #[serde(default)]
    pub error: Option<String>,
}

/// A file or block device to add to the pool of a brick.
///
/// **Data loss:** everything on it is lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddDevice {
    /// The absolute path on the host of the brick: a block device, or a plain file. A file that does not exist is created, and
    /// needs a size.
    #[schema(max_length = 4095, pattern = "^/")]
    pub path: String,
    /// The size. If missing, all of it.
    #[serde(default)]
    #[schema(minimum = 2_097_152)]
    pub size_bytes: Option<u64>,
}

/// Starts or cancels the drain of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DrainDevice {
    /// Cancel the drain: the pool writes to the device again.
    #[serde(default)]
    pub cancel: bool,
}

/// A change of the devices of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum DeviceChange {
    /// Add a device.
    Add {
        /// The absolute path on the host of the brick.
        path: String,
        /// The size; all of it if missing.
        #[serde(default)]
        size_bytes: Option<u64>,
    },
    /// Move all data off a device, and remove it from the pool.
    Drain {
        /// The device.
        device: Uuid,
    },
    /// Let the pool write to a draining device again.
    CancelDrain {
        /// The device.
        device: Uuid,
    },
    /// A change of a later version, which this version refuses.
    #[serde(other)]
    Other,
}

/// A request on its way to the brick. Each heartbeat answer repeats it until the brick reports its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceRequest {
    /// The id of the request, so that the brick carries it out only once.
    pub id: Uuid,
    /// The change.
    pub change: DeviceChange,
}

/// The state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceRequestState {
    /// The brick has not reported its result yet.
    Pending,
    /// The brick has carried it out.
    Done,
    /// The brick has refused it.
    Failed,
}

/// A request and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceRequestInfo {
    /// Its id.
    pub id: Uuid,
    /// The change.
    pub change: DeviceChange,
    /// Its state.
    pub state: DeviceRequestState,
    /// The device that it added or changed.
    #[serde(default)]
    pub device: Option<Uuid>,
    /// Why the brick refused it.
    #[serde(default)]
    pub error: Option<String>,
}

/// The devices of a brick's pool, by the last heartbeat, and the last requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceList {
    /// Whether the brick is alive.
    pub alive: bool,
    /// The devices, the first one first.
    pub devices: Vec<BrickDevice>,
    /// The requests since the start of the manager, the oldest first. Old ones with a result are forgotten.
    pub requests: Vec<DeviceRequestInfo>,
}
