//! The mounts of a process. It joins each once, and does not soon ask a mount again that refused
//! it.
//!
//! Invariants: one thread asks a mount; the others go on meanwhile, by the kernel. The lock of the
//! list is held for a look, never while a mount is asked.

use super::backoff::{FORK_RETRY, FULL_RETRY, RETRY, now_ms};
use super::file::DirectFile;
use super::joined_mount::JoinedMount;
use super::mount_link::is_fork_in_progress;
use super::thread::{RunMasked, run_on_helper_stack, thread_number};
use crate::shared::op_counters::{self, FileCounts, IO_SLOTS, Why};
use pagemesh_base::poison::lock;
use rustix::fd::RawFd;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Mounts that one process reaches directly; the kernel serves further ones.
const MOUNTS_MAX: usize = 16;
/// Attempts of a caller that waits for forks to end.
const FORK_TRIES_MAX: u32 = 100;

/// The mounts that a process has joined, or failed to join, by device number.
pub struct DirectClient {
    mounts: Mutex<Vec<(u64, MountState)>>,
    run_masked: RunMasked,
    /// Calls that the kernel serves before this process joins a mount.
    patience: AtomicU32,
    has_left: AtomicBool,
}

/// The state of a mount in this process.
enum MountState {
    Joined(Arc<JoinedMount>),
    /// The mount refused this process. The client does not ask it again before this time, in
    /// milliseconds of the monotonic clock.
    Refused(u64, Why),
    /// A thread of this process is joining it.
    Joining,
}

/// Why an attempt to join a mount failed.
fn join_failure_reason(cause: &io::Error) -> Why {
    use io::ErrorKind as Kind;
    match cause.kind() {
        _ if is_fork_in_progress(cause) => Why::Joining,
        Kind::UnexpectedEof | Kind::ConnectionReset | Kind::BrokenPipe => Why::Turned,
        // It speaks another version of the protocol.
        Kind::Other => Why::Version,
        _ => Why::NoMount,
    }
}

impl DirectClient {
    /// A client without mounts. The kernel serves the first `patience` calls before a mount is
    /// joined: the resources for writes cost a process more than a hundred calls.
    #[must_use]
    pub const fn new(run_masked: RunMasked, patience: u32) -> DirectClient {
        DirectClient {
            mounts: Mutex::new(Vec::new()),
            run_masked,
            patience: AtomicU32::new(patience),
            has_left: AtomicBool::new(false),
        }
    }

    /// The file with this device number and inode, also if its mount refuses this process. The
    /// caller keeps it open until the [`DirectFile`] is dropped; at this call it is open by this
    /// descriptor.
    #[must_use]
    pub fn open(&'static self, device: u64, ino: u64, descriptor: RawFd) -> DirectFile {
        let file = DirectFile::new(self, (device, ino, descriptor));
        if self.patience.load(Ordering::Relaxed) == 0 {
            // Each call tries again.
            let _ = file.join();
        }
        file
    }

    /// As [`DirectClient::open`], but waits for forks in progress. The caller knows that the
    /// process forks only briefly, and does not wait for a command meanwhile.
    #[must_use]
    pub fn open_waiting_for_forks(
        &'static self,
        device: u64,
        ino: u64,
        descriptor: RawFd,
    ) -> DirectFile {
        let file = self.open(device, ino, descriptor);
        let is_put_off = || matches!(file.try_join(), Err((wait, _)) if wait == FORK_RETRY);
        for _ in 0..FORK_TRIES_MAX {
            if !is_put_off() {
                break;
            }
            std::thread::sleep(FORK_RETRY);
        }
        file
    }

    /// The counts of direct operations and of operations by the kernel, file by file.
    #[must_use]
    pub fn file_counts(&self) -> Vec<FileCounts> {
        let mounts = self.mounts.try_lock();
        let mounts = mounts.iter().flat_map(|mounts| mounts.iter());
        let joined = mounts.filter_map(|(_, known)| match known {
            MountState::Joined(mount) if !mount.is_gone() => mount.counters.as_ref(),
            _ => None,
        });
        op_counters::file_counts(&joined.collect::<Vec<_>>())
    }

    /// Leaves all mounts, and joins none any more. Its threads end soon afterwards.
    pub fn leave(&self) {
        self.has_left.store(true, Ordering::SeqCst);
        for (_, known) in lock(&self.mounts).drain(..) {
            if let MountState::Joined(mount) = known {
                mount.mark_gone();
            }
        }
    }

    /// Whether the kernel serves one call more.
    pub(super) fn consume_patience(&self) -> bool {
        let less = |left: u32| left.checked_sub(1);
        let order = Ordering::Relaxed;
        self.patience.fetch_update(order, order, less).is_ok()
    }

    /// The mount, if it lets this process in; otherwise the delay until the next attempt, and the
    /// reason. One thread asks a mount; other threads go on meanwhile, here and at other mounts.
    pub(super) fn mount(
        &self,
        device: u64,
        file: RawFd,
    ) -> Result<Arc<JoinedMount>, (Duration, Why)> {
        if self.has_left.load(Ordering::SeqCst) {
            return Err((FULL_RETRY, Why::Confined));
        }
        if let Some(known) = self.known_mount(device) {
            return known;
        }
        let first = thread_number() % IO_SLOTS;
        let opened = run_on_helper_stack(self.run_masked, || {
            JoinedMount::join((device, file), self.run_masked, first)
        });
        let opened = opened.unwrap_or(Err(io::ErrorKind::Other.into()));
        let known = match &opened {
            Ok(mount) => Some(MountState::Joined(Arc::clone(mount))),
            Err(cause) if is_fork_in_progress(cause) => None,
            Err(cause) => {
                let until = now_ms() + FULL_RETRY.as_millis() as u64;
                Some(MountState::Refused(until, join_failure_reason(cause)))
            }
        };
        let mut mounts = lock(&self.mounts);
        mounts.retain(|(other, _)| *other != device);
        mounts.extend(known.map(|known| (device, known)));
        drop(mounts);
        if self.has_left.load(Ordering::SeqCst) {
            self.leave();
        }
        opened.map_err(|cause| {
            let wait = if is_fork_in_progress(&cause) {
                FORK_RETRY
            } else {
                FULL_RETRY
            };
            (wait, join_failure_reason(&cause))
        })
    }

    /// The known state of the mount. None: the caller must ask; until then the state is `Joining`.
    fn known_mount(&self, device: u64) -> Option<Result<Arc<JoinedMount>, (Duration, Why)>> {
        let now = now_ms();
        let mut mounts = lock(&self.mounts);
        mounts.retain(|(_, known)| match known {
            MountState::Joined(mount) => !mount.is_gone(),
            MountState::Refused(until, _) => now < *until,
            MountState::Joining => true,
        });
        let known = mounts.iter().find(|(known, _)| *known == device);
        match known.map(|(_, known)| known) {
            Some(MountState::Joined(mount)) => Some(Ok(Arc::clone(mount))),
            Some(MountState::Refused(_, why)) => Some(Err((FULL_RETRY, *why))),
            Some(MountState::Joining) => Some(Err((RETRY, Why::Joining))),
            None if mounts.len() == MOUNTS_MAX => Some(Err((FULL_RETRY, Why::NoMount))),
            None => {
                mounts.push((device, MountState::Joining));
                None
            }
        }
    }
}
