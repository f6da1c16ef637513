//! A mount that this process has joined: the connection for requests about files, the shared
//! memory, and the slots.
//!
//! Invariants: a thread asks the mount only with the control link locked, and reads the answer
//! before it unlocks it. Once a mount is marked as gone, no operation begins on it, and the thread
//! that watches it gives everything back.

use super::backoff::Backoff;
use super::internal_fds;
use super::mount_link::{ConnectMethod, FORK_IN_PROGRESS, MountLink, device_name};
use super::read_mapping::ReadMappings;
use super::slot_resources::SlotResources;
use super::thread::RunMasked;
use crate::protocol::wire::{ClientRequest, FileRefusal, MountReply};
use crate::shared::op_counters::{IO_SLOTS, OpCounters, Why};
use crate::shared::shared_file_map::{SharedFileMap, memory_id};
use pagemesh_base::event_fd::EventFd;
use pagemesh_base::key::{KEY_BYTES, Key};
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::poison::lock;
use pagemesh_fabric::limits::Timeouts;
use pagemesh_volume::direct_access::DirectSegment;
use pagemesh_volume::{Transport, Transports};
use rustix::fd::{AsRawFd, RawFd};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The kernel identifies the peer of a unix socket, so bricks ask for no key.
const NO_KEY: [u8; KEY_BYTES] = [0; KEY_BYTES];

pub(super) struct JoinedMount {
    pub(super) device: String,
    pub(super) connect_method: ConnectMethod,
    pub(super) transports: Transports,
    pub(super) run_masked: RunMasked,
    pub(super) segment: DirectSegment,
    /// The identity of the segment's memory, see [`memory_id`].
    pub(super) segment_id: Option<(u64, u64)>,
    pub(super) io_slots: [Mutex<SlotResources>; IO_SLOTS],
    /// For requests about files.
    pub(super) control_link: Mutex<MountLink>,
    pub(super) file_maps: Mutex<HashMap<u64, Weak<SharedFileMap>>>,
    pub(super) read_mappings: ReadMappings,
    pub(super) is_gone: AtomicBool,
    /// When a slot may be equipped again.
    pub(super) equip_backoff: Backoff,
    /// None: the mount has no memory for counters.
    pub(super) counters: Option<OpCounters>,
    /// Wakes the thread that watches for ended bricks and the end of the mount.
    pub(super) wake_fd: EventFd,
}

impl Drop for JoinedMount {
    fn drop(&mut self) {
        internal_fds::remove(self.wake_fd.as_raw_fd());
    }
}

impl JoinedMount {
    /// Joins a mount. The row that the mount gives goes to slot `first`, the slot of the
    /// calling thread.
    pub(super) fn join(
        (device, file): (u64, RawFd),
        run_masked: RunMasked,
        first: usize,
    ) -> io::Result<Arc<JoinedMount>> {
        let (link, method) = MountLink::connect(device, file)?;
        let (reply, memory) = link.ask(ClientRequest::Join)?;
        let memory = memory.ok_or(io::ErrorKind::PermissionDenied)?;
        // The mount may have no row for it now; a later attempt may get one.
        let row = match reply {
            MountReply::Joined(row, _) => Some(row as usize),
            _ => None,
        };
        let (control_link, _) = MountLink::connect(device, file)?;
        let counters = match control_link.ask(ClientRequest::GetCounters)? {
            (MountReply::Success, Some(memory)) => {
                Some(OpCounters::join(memory).map_err(io::Error::other)?)
            }
            _ => None,
        };
        if let Some(counters) = &counters {
            counters.import_process_counts(device);
        }
        let creation = internal_fds::FdCreation::begin().ok_or(FORK_IN_PROGRESS)?;
        let mount = Arc::new(JoinedMount {
            transports: Transports::new(
                Key::from_bytes(NO_KEY),
                Transport::Map,
                Timeouts::default(),
            ),
            run_masked,
            segment_id: memory_id(&memory),
            segment: DirectSegment::join(memory).map_err(io::Error::other)?,
            io_slots: std::array::from_fn(|_| Mutex::default()),
            control_link: Mutex::new(control_link),
            file_maps: Mutex::default(),
            read_mappings: ReadMappings::default(),
            is_gone: AtomicBool::new(false),
            equip_backoff: Backoff::new(Why::Renewing),
            counters,
            wake_fd: EventFd::from_fd(move_fd_high(EventFd::new()?.into_fd())),
            device: device_name(device),
            connect_method: method,
        });
        internal_fds::add(mount.wake_fd.as_raw_fd());
        // Detected once, for all children: in a virtual machine the host answers CPUID, one request
        // after the other. No fork runs meanwhile: the child would wait for the answer for ever.
        let _known = pagemesh_pmem::cpu::cpu();
        drop(creation);
        if let Some(row) = row {
            let mut first = lock(&mount.io_slots[first]);
            first.link = Some(link);
            first.io_slot.set_row(row);
        }
        let watched = Arc::clone(&mount);
        std::thread::Builder::new()
            .name("pagemesh-guest".into())
            .spawn(move || watched.watch_ends())?;
        Ok(mount)
    }

    pub(super) fn file_map(&self, ino: u64, grows: bool) -> Result<Arc<SharedFileMap>, Why> {
        let request = if grows {
            ClientRequest::GetFileMapForAppend(ino)
        } else {
            ClientRequest::GetFileMap(ino)
        };
        let mut control_link = self.control_link.try_lock().map_err(|_| Why::Asking)?;
        let reply = control_link.ask(request);
        match reply {
            Ok((MountReply::Success, Some(memory))) => {
                let mut file_maps = lock(&self.file_maps);
                file_maps.retain(|_, file_map| file_map.strong_count() > 0);
                if let Some(known) = file_maps.get(&ino).and_then(Weak::upgrade) {
                    // Another file may have the inode number by now.
                    if known.is_backed_by(&memory) {
                        return Ok(known);
                    }
                }
                let file_map = Arc::new(SharedFileMap::join(memory).map_err(|_| Why::Version)?);
                file_maps.insert(ino, Arc::downgrade(&file_map));
                Ok(file_map)
            }
            Ok((MountReply::FileRefused(refusal), _)) => Err(match refusal {
                FileRefusal::Mapped => Why::Mapped,
                FileRefusal::Cached => Why::Cached,
                FileRefusal::Unsupported => Why::Shape,
                FileRefusal::TooManyFiles => Why::Boards,
            }),
            Ok(_) => Err(Why::Asking),
            Err(cause) => {
                // A late answer would be taken for the answer to the next request.
                match cause.kind() {
                    io::ErrorKind::WouldBlock => self.reconnect_control(&mut control_link),
                    _ => self.mark_gone(),
                }
                Err(Why::Asking)
            }
        }
    }

    /// The mount is slow but there: later requests go by another connection.
    #[cold]
    fn reconnect_control(&self, control_link: &mut MountLink) {
        let link = match self.connect_method {
            ConnectMethod::SocketName => MountLink::connect_by_name(&self.device),
            ConnectMethod::OpenFile => control_link.connect_again(),
        };
        match link {
            Ok(link) => {
                *control_link = link;
                self.wake();
            }
            Err(_) => self.mark_gone(),
        }
    }

    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    pub(super) fn mark_gone(&self) {
        self.is_gone.store(true, Ordering::Release);
        self.wake();
    }

    pub(super) fn wake(&self) {
        self.wake_fd.signal();
    }

    /// Why direct access is disabled at the moment.
    pub(super) fn disabled_reason(&self) -> Why {
        Why::of_disabled(self.segment.disabled_reason())
    }
}
