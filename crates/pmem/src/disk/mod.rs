//! Files and block devices as a medium, read and written by requests instead of a mapping (RFD 027).
//!
//! [`DiskMedia`] is a view of a [`Disk`]. The data view has what the disk holds after the next sync. The
//! overlay holds words of this process alone. Each device has a range of the disk's bytes; one cache and one writer serve all.
//!
//! ```text
//!  data view:  head (resident)  │  pages (cache) ──── writer ──── device
//!  overlay:    each page that was touched, in memory
//! ```
//!
//! Invariants:
//! - a page of the data view differs from the device only while it is dirty; a dirty page stays in
//!   memory, and the next group of the writer contains it;
//! - a sync returns after a group that began after the call: its pages and, on a device with a volatile write
//!   cache, a FLUSH after them, on each device that was written;
//! - a page of a frame that cannot be read has the bytes of [`PATTERN`](crate::unreadable::PATTERN), and is listed;
//! - after a failed write or FLUSH, and when a page of the head cannot be read, the disk has failed: nothing is written
//!   any more, and each sync fails.

mod cache;
mod device;
#[cfg(feature = "test-api")]
mod device_log;
mod device_map;
#[cfg(feature = "test-api")]
mod device_plan;
#[cfg(feature = "test-api")]
mod device_sim;
mod failure;
mod group_queue;
mod groups;
mod hand_over;
mod head;
mod io;
mod media;
mod memory;
mod parts;
mod queue;
mod requests;
mod resident;
#[cfg(feature = "test-api")]
mod simulated;
mod watch;
mod writer;

pub use device::{DeviceFacts, WriteCache};
#[cfg(feature = "test-api")]
pub use device_log::{DeviceEvent, DeviceLog};
#[cfg(feature = "test-api")]
pub use device_plan::{DeviceFault, DevicePlan, PlannedRequest};
#[cfg(feature = "test-api")]
pub use device_sim::{DeviceEnd, SimulatedCounts, SimulatedDevice, SimulatedFault};
pub use hand_over::{HandOver, SoundDevice};
pub use media::{Disk, DiskMedia, DiskOptions};
pub use requests::io_uring_refusal;
pub use watch::{REQUEST_LIMIT, RequestLimits};
