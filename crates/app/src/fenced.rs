//! The end of a process whose volume another client took over.
//!
//! A fenced client serves nothing any more, and only a new attach changes that. So its
//! process ends by itself, with an exit code of its own: a service manager must not start
//! it again at once, or two machines fence each other in turn.

use pagemesh_volume::{Volume, VolumeState};
use std::sync::Weak;
use std::time::Duration;

/// The exit code of a process that was fenced.
pub const EXIT_CODE: u8 = 4;
/// How often an idle volume is looked at: no request of its own tells of the fence.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Why a client ended: the words for people.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TakenOver(pub String);

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
            std::thread::sleep(LOOK_EVERY);
        }
    };
    let thread = std::thread::Builder::new().name("fenced".into());
    thread.spawn(look).map(drop)
}
