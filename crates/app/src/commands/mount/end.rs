//! The end of a mount, by an unmount or by a shutdown.
//!
//! Invariant: after a shutdown request a mount ends within a limit, even if it is in use. The
//! process unmounts it and then cuts off other mount namespaces and open files.

use crate::commands::mount::mount_table;
use crate::shutdown::Shutdown;
use anyhow::bail;
use pagemesh_fuse::Unmounter;
use std::path::Path;
use std::time::{Duration, Instant};

/// Limit of the wait for other mount namespaces during a shutdown.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of checks for these namespaces.
const NAMESPACE_POLL: Duration = Duration::from_millis(20);

/// The steps of a shutdown.
pub struct UnmountSequence<'e, U, C, E> {
    pub unmounter: Unmounter,
    pub dir: &'e Path,
    /// `major:minor`, if known.
    pub device: Option<&'e str>,
    /// Whether the mount can no longer serve requests.
    pub is_urgent: U,
    pub before_cut: C,
    pub before_exit: E,
}

impl<U: Fn() -> bool, C: Fn(), E: Fn()> UnmountSequence<'_, U, C, E> {
    /// Unmounts: first from the mount point, and shortly after from all processes.
    fn run(&self, ending: &Shutdown) {
        let dir = self.dir.display();
        if !(self.is_urgent)() {
            match self.unmounter.unmount() {
                Ok(()) if self.wait_for_other_namespaces(ending) => return,
                Ok(()) => {
                    let holders = self.device.map(mount_table::holders).unwrap_or_default();
                    let holders = mount_table::describe_holders(&holders);
                    let holders = holders.unwrap_or_else(|| "programs with open files".into());
                    tracing::warn!(%dir, holders, "the mount is in use in other mount namespaces, and is cut off");
                }
                Err(_) => {
                    tracing::warn!(%dir, "files are open; the mount cuts off their processes")
                }
            }
        }
        (self.before_cut)();
        if let Err(cause) = self.unmounter.abort() {
            // The exit of the process closes the connection to the kernel, and so ends the mount.
            tracing::error!(%cause, %dir, "the kernel does not abort the mount; this process exits");
            (self.before_exit)();
            std::process::exit(1);
        }
    }

    /// Waits until no mount namespace has the mount. A second signal ends the wait.
    fn wait_for_other_namespaces(&self, ending: &Shutdown) -> bool {
        let until = Instant::now() + NAMESPACE_TIMEOUT;
        while self.unmounter.is_mounted() {
            if Instant::now() >= until || ending.wait_for(NAMESPACE_POLL) {
                return !self.unmounter.is_mounted();
            }
        }
        true
    }
}

/// Serves until the mount has ended, by an unmount or by a shutdown.
pub fn serve_until_end<U: Fn() -> bool, C: Fn(), E: Fn()>(
    serve: impl FnOnce() -> anyhow::Result<()> + Send,
    end: &UnmountSequence<'_, U, C, E>,
    ending: &Shutdown,
) -> anyhow::Result<()> {
    let tell = ending.trigger();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let served = serve();
            // Wake the other side, which may wait for a signal.
            tell.trigger();
            served
        });
        ending.wait();
        if !serving.is_finished() {
            end.run(ending);
        }
        match serving.join() {
            Ok(served) => served,
            Err(_) => bail!("the server panicked"),
        }
    })
}
