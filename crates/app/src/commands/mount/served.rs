//! A mount of a file system that this process has open: its kernel side, the sockets of its device, and its end.

use crate::commands::mount::end::{UnmountSequence, serve_until_end};
use crate::commands::mount::mount_table::find_mount_at;
use crate::commands::mount::serve::FenceFlag;
use crate::commands::mount::waiters::{
    AddressWait, NOBODY_WAITS, UnmountWaiters, close_address, notify_complete, notify_unmounted,
    serve_waiters,
};
use crate::shutdown::Shutdown;
use anyhow::Context;
use pagemesh_direct::server::{DirectServer, IsMounted};
use pagemesh_fs::{Fs, FsError, OpenSnapshots};
use pagemesh_fuse::{FreeSpaceFn, FuseMount, MountOptions, Unmounter};
use pagemesh_volume::Volume;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Limit of the wait for the addresses of an ending mount, before this mount does without them. It
/// is longer than that mount waits for unreachable bricks and an unreachable manager. The owner of
/// an address may also be no mount.
pub(super) const ADDRESS_TIMEOUT: Duration = Duration::from_secs(40);

/// Counts the direct clients of a mount.
pub type ClientCounter = Box<dyn Fn() -> usize + Send + Sync>;

/// The file system of a mount.
pub struct MountedParts {
    pub fs: Arc<Fs>,
    pub volume: Arc<Volume>,
    pub fenced: FenceFlag,
    pub free_space: FreeSpaceFn,
    pub snapshots: Arc<OpenSnapshots>,
}

/// See the module.
pub struct ServedMount {
    mounted: FuseMount,
    endpoints: Endpoints,
    dir: PathBuf,
    volume: Arc<Volume>,
    files: Weak<Fs>,
    fenced: FenceFlag,
    is_shared: bool,
}

/// A mount that has ended. Processes may wait for its data.
pub struct EndedMount {
    waiters: Option<UnmountWaiters>,
    device: Option<String>,
    is_shared: bool,
}

impl EndedMount {
    /// Reports that all data is stored.
    pub fn complete(self) {
        if let Some(waiters) = &self.waiters {
            notify_complete(waiters);
            if let Some(device) = self.device.filter(|_| self.is_shared) {
                close_address(waiters, &device);
            }
        }
    }
}

impl ServedMount {
    /// Mounts a file system on a checked directory.
    pub fn start(
        parts: MountedParts,
        dir: &Path,
        options: &MountOptions,
        ending: &Shutdown,
    ) -> anyhow::Result<ServedMount> {
        let files = Arc::downgrade(&parts.fs);
        let on_error = parts.fenced.clone();
        let mounted = pagemesh_fuse::mount_with_snapshots(
            parts.fs,
            dir,
            options,
            Box::new(move |error: &FsError| on_error.check_error(error)),
            parts.free_space,
            Some(parts.snapshots),
        )?;
        tracing::info!(transport = ?mounted.transport(), "mounted");
        Ok(ServedMount {
            endpoints: Endpoints::open(&mounted, dir, &parts.volume, &files, ending, options),
            mounted,
            dir: dir.to_owned(),
            volume: parts.volume,
            files,
            fenced: parts.fenced,
            is_shared: options.is_shared,
        })
    }

    /// See [`FuseMount::defer_commits`].
    pub fn defer_commits(&mut self, interval: Duration) -> anyhow::Result<()> {
        Ok(self.mounted.defer_commits(interval)?)
    }

    pub fn unmounter(&self) -> Unmounter {
        self.mounted.unmounter()
    }

    /// Counts the direct clients, if the mount serves any.
    pub fn client_counter(&self) -> Option<ClientCounter> {
        let direct = self.endpoints.direct.as_ref();
        direct.map(|direct| Box::new(direct.client_counter()) as ClientCounter)
    }

    /// Serves until the mount has ended, by an unmount or by a shutdown.
    pub fn serve(self, ending: &Shutdown) -> (anyhow::Result<()>, EndedMount) {
        let ServedMount {
            mounted, endpoints, ..
        } = self;
        let Endpoints {
            device,
            waiters,
            direct,
        } = endpoints;
        let end = UnmountSequence {
            unmounter: mounted.unmounter(),
            dir: &self.dir,
            device: device.as_deref(),
            is_urgent: || self.fenced.is_set(),
            before_cut: || {
                if let Some(direct) = &direct {
                    direct.stop();
                }
            },
            before_exit: || save_state(&self.files, &self.volume),
        };
        let waiting = waiters.clone();
        let gone = move || {
            if let Some(waiters) = &waiting {
                notify_unmounted(waiters);
            }
        };
        let served = serve_until_end(move || Ok(mounted.serve_with_hook(gone)?), &end, ending);
        drop(direct);
        let ended = EndedMount {
            waiters,
            device,
            is_shared: self.is_shared,
        };
        (served, ended)
    }
}

/// The sockets of a mount, named by its device. A mount works without them.
struct Endpoints {
    /// `major:minor`, if known.
    device: Option<String>,
    /// Processes that wait for the end of the mount.
    waiters: Option<UnmountWaiters>,
    /// The server for direct clients.
    direct: Option<DirectServer>,
}

impl Endpoints {
    fn open(
        mounted: &FuseMount,
        dir: &Path,
        volume: &Arc<Volume>,
        files: &Weak<Fs>,
        ending: &Shutdown,
        options: &MountOptions,
    ) -> Endpoints {
        let until = Instant::now() + ADDRESS_TIMEOUT;
        let unmounter = mounted.unmounter();
        let is_mounted: IsMounted = Arc::new(move || unmounter.is_mounted());
        let device = mount_device(dir);
        let patience = AddressWait {
            until,
            shutdown: ending,
            is_mounted: &is_mounted,
        };
        let waiters = device
            .as_deref()
            .map(|device| serve_waiters(device, &patience));
        // A direct write waits for no asynchronous replica, and `sync` means that, too.
        let direct = device
            .as_deref()
            .filter(|_| !options.flags.is_sync)
            .and_then(|device| start_direct_server(volume, files, device, &patience));
        if let Some(direct) = &direct {
            mounted.set_connect_hook(Box::new(direct.connector()));
        }
        Endpoints {
            device,
            waiters,
            direct,
        }
    }
}

/// The device of the new mount.
pub(super) fn mount_device(dir: &Path) -> Option<String> {
    find_mount_at(dir)
        .and_then(|known| Ok(known.context("the mount is not there")?.device))
        .inspect_err(|cause| tracing::warn!(%cause, "{NOBODY_WAITS}"))
        .ok()
}

/// Starts the server for direct clients. If it fails, the kernel path serves all processes.
fn start_direct_server(
    volume: &Arc<Volume>,
    fs: &Weak<Fs>,
    device: &str,
    patience: &AddressWait<'_>,
) -> Option<DirectServer> {
    let fs = fs.upgrade()?;
    let is_mounted = patience.is_mounted;
    let start = || DirectServer::start(Arc::clone(volume), &fs, device, Arc::clone(is_mounted));
    patience
        .take_when_free(start, || pagemesh_direct::server::serving_process(device))
        .inspect_err(|cause| tracing::warn!(%cause, "cannot start the server for direct clients; the kernel serves all processes"))
        .ok()
}

/// Saves the state that a process can save when it must exit while it serves requests.
fn save_state(fs: &Weak<Fs>, volume: &Volume) {
    if let Some(fs) = fs.upgrade() {
        let saved = fs
            .borrow_channel()
            .and_then(|mut channel| fs.sync_all(&mut channel));
        if let Err(cause) = saved {
            tracing::error!(%cause, "DATA LOSS: writes to mapped files, file times and uncommitted changes may be lost");
        }
    }
    volume.detach();
}
