//! Ends a process after another client has taken over its volume.
//!
//! A fenced client serves no request any more, and only a new attach changes that. So its process
//! exits, with its own exit code. A service manager must not restart it at once, or two machines
//! would fence each other in turn.

use pagemesh_volume::{Volume, VolumeState};
use std::sync::Weak;
use std::time::Duration;

/// The exit code of a process that was fenced.
pub const EXIT_CODE: u8 = 4;
/// Interval of checks of an idle volume, which has no request that would notice the fence.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The reason of the exit, for people.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FencedError(pub String);

/// Calls `on_fenced` once, soon after another client has attached the volume. The thread
/// ends with the volume.
pub fn watch(
    volume: Weak<Volume>,
    on_fenced: impl FnOnce() + Send + 'static,
) -> std::io::Result<()> {
    let look = move || {
        while let Some(volume) = volume.upgrade() {
            let status = volume.status();
            drop(volume);
            if status.is_some_and(|status| status.state == VolumeState::Fenced) {
                return on_fenced();
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    };
    let thread = std::thread::Builder::new().name("fenced".into());
    thread.spawn(look).map(drop)
}
