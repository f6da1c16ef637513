//! The thread that waits for bricks and the mount to end, and gives idle slots back.
//!
//! Invariants: it waits for no lock until the mount has ended: a slot or link that is locked is
//! looked at again soon. The legs and mappings of an ended brick go at once: otherwise the next
//! brick would have to kill this process.

use super::joined_mount::JoinedMount;
use super::slot_resources::SlotResources;
use pagemesh_base::poison::lock;
use pagemesh_base::slice::Leg;
use pagemesh_base::wait::until_readable;
use pagemesh_volume::MappedLeg;
use rustix::fd::{AsFd, AsRawFd, RawFd};
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Delay between two looks while a slot or the control link is locked: bricks wait two seconds
/// until a process that maps their pools lets go.
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// A slot is idle if no thread used it for at least this time, and for at most twice this time.
const IDLE_MAX: Duration = Duration::from_secs(5);

/// The properties that all watched slots and links shared.
#[derive(Default)]
struct Watched {
    /// A slot has a link to the mount.
    has_link: bool,
    /// A slot or the control link was locked, and is not watched.
    is_busy: bool,
}

impl JoinedMount {
    /// Watches for ended bricks and for the end of the mount, and then gives everything back.
    pub(super) fn watch_ends(&self) {
        let mut descriptors = Vec::new();
        let mut idle_check_at = None;
        while !self.is_gone() {
            let watched = self.collect_watched(&mut descriptors);
            // A process without links has nothing to give back, and sleeps.
            idle_check_at = if watched.has_link {
                idle_check_at.or(Some(Instant::now() + IDLE_MAX))
            } else {
                None
            };
            // The holder of a slot may wait for a stalled mount, while bricks come and go.
            let busy_until = watched.is_busy.then(|| Instant::now() + BUSY_POLL_INTERVAL);
            let until = idle_check_at.into_iter().chain(busy_until).min();
            if until_readable(&descriptors, until).is_err() {
                break;
            }
            if idle_check_at.is_some_and(|at| Instant::now() >= at) {
                idle_check_at = None;
                self.unlocked_slots()
                    .for_each(|mut slot| slot.release_if_idle());
            }
            self.wake_fd.drain();
            self.drop_ended_legs();
            self.read_mappings.unmap_ended();
            if self.is_mount_disconnected() {
                break;
            }
        }
        self.give_all_back();
    }

    /// The descriptors that report the end of a brick or of the mount, or wake this thread.
    fn collect_watched(&self, descriptors: &mut Vec<RawFd>) -> Watched {
        let mut watched = Watched::default();
        descriptors.clear();
        descriptors.push(self.wake_fd.as_raw_fd());
        // The thread that asks reads the answer. The link is not polled meanwhile.
        match self.control_link.try_lock() {
            Ok(control_link) => descriptors.push(control_link.as_fd().as_raw_fd()),
            Err(_) => watched.is_busy = true,
        }
        for io_slot in &self.io_slots {
            let Ok(slot) = io_slot.try_lock() else {
                watched.is_busy = true;
                continue;
            };
            watched.has_link |= slot.link.is_some();
            let legs = slot.io_slot.legs().iter();
            legs.for_each(|leg| leg.descriptors(descriptors));
        }
        watched
    }

    /// The slots that no thread has locked.
    fn unlocked_slots(&self) -> impl Iterator<Item = MutexGuard<'_, SlotResources>> {
        self.io_slots.iter().filter_map(|it| it.try_lock().ok())
    }

    fn drop_ended_legs(&self) {
        for mut slot in self.unlocked_slots() {
            let has_ended = |leg: &mut MappedLeg| leg.poll_closed().is_some();
            if slot.io_slot.legs_mut().any(has_ended) {
                slot.drop_legs();
            }
        }
    }

    fn give_all_back(&self) {
        self.is_gone.store(true, Ordering::Release);
        for io_slot in &self.io_slots {
            *lock(io_slot) = SlotResources::default();
        }
        if let Some(counters) = &self.counters {
            counters.export_direct_counts();
        }
        self.read_mappings.unmap_ended();
    }

    fn is_mount_disconnected(&self) -> bool {
        // The thread that asks reads the answer, and notices the end of the connection itself.
        let Ok(control_link) = self.control_link.try_lock() else {
            return false;
        };
        let flags = rustix::net::RecvFlags::PEEK | rustix::net::RecvFlags::DONTWAIT;
        let peeked = rustix::net::recv(&*control_link, &mut [0u8; 1], flags);
        matches!(peeked, Ok((_, 0)))
    }
}
