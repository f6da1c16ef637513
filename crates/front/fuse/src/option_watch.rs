//! The options for access times. The kernel accepts and shows them, and leaves their effect to the server.
//!
//! A remount changes them without a request. The kernel then marks its list of mounts, proc_pid_mountinfo(5).

use crate::device::Device;
use pagemesh_base::mounts::MountEntry;
use pagemesh_base::wait::until_ready;
use pagemesh_fs::{Fs, ReadTimes};
use rustix::event::{PollFd, PollFlags};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// Watches the options of a mount.
pub(crate) struct OptionWatch {
    mounts: File,
    device: Arc<Device>,
}

impl OptionWatch {
    /// Applies the options of a mount to its file system, and begins to watch them.
    pub(crate) fn start(fs: &Fs, device: &Arc<Device>) -> io::Result<OptionWatch> {
        let watch = OptionWatch {
            // Later changes are those since this open.
            mounts: File::open("/proc/self/mountinfo")?,
            device: Arc::clone(device),
        };
        watch.apply(fs);
        Ok(watch)
    }

    /// Applies the options if the list of mounts has changed.
    pub(crate) fn refresh(&self, fs: &Fs) {
        let mut polled = [PollFd::new(&self.mounts, PollFlags::PRI)];
        // A wait that the kernel refuses finds no change.
        let _ = until_ready(&mut polled, Some(Instant::now()));
        if polled[0].revents().contains(PollFlags::PRI) {
            self.apply(fs);
        }
    }

    fn apply(&self, fs: &Fs) {
        // A mount that is not in its place any more keeps its options.
        if let Some(entry) = self.device.entry() {
            fs.set_read_times(read_times(&entry));
        }
    }
}

/// The reads that set the access time on a mount.
fn read_times(entry: &MountEntry) -> ReadTimes {
    if entry.has_option("ro") || entry.has_option("noatime") {
        ReadTimes::None
    } else if entry.has_option("nodiratime") {
        ReadTimes::WithoutDirectories
    } else {
        ReadTimes::Relative
    }
}
