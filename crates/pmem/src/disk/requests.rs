//! Requests to a device: in flight together by io_uring, or one at a time where the system refuses it.
//!
//! Invariant: a request that was pushed is in the clock until its completion is taken.

#[cfg(feature = "test-api")]
pub(super) mod simulated;

use super::device::{Device, RequestKind};
use super::device_map::DeviceMap;
use super::watch::{RequestClock, WatchedRequests};
use crate::map_error::MapError;
use crate::mapped_media::system;
use io_uring::{IoUring, opcode, types};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// The memory of a request.
#[derive(Clone, Copy)]
pub(super) enum RequestMemory {
    /// The address of a run of bytes.
    Run(*mut u8),
    /// Parts one after the other, and their number.
    Parts(*const libc::iovec, usize),
}

/// A request for bytes between a device and a buffer of this process.
#[derive(Clone, Copy)]
pub(super) struct DeviceRequest {
    pub(super) kind: RequestKind,
    /// The byte of the device.
    pub(super) offset: u64,
    pub(super) memory: RequestMemory,
    pub(super) len: usize,
    /// The number of the request's buffer, below the number of entries.
    pub(super) buffer: usize,
}

/// A user's requests in flight, to all devices of a disk.
pub(super) struct RequestRing {
    /// None: the system refuses io_uring.
    ring: Option<IoUring>,
    /// Buffers and results of requests that ended outside of the ring.
    ended: Vec<(usize, i32)>,
    /// Requests in the ring that the kernel has not taken.
    unsubmitted: usize,
    clock: Arc<RequestClock>,
    #[cfg(feature = "test-api")]
    simulated: Option<simulated::SimulatedRing>,
}

impl RequestRing {
    /// # Errors
    /// When the system is out of a resource.
    pub(super) fn new(
        watched: &WatchedRequests,
        devices: &DeviceMap,
        entries: usize,
    ) -> Result<RequestRing, MapError> {
        Ok(RequestRing {
            ring: open_ring(devices, entries)?,
            ended: Vec::new(),
            unsubmitted: 0,
            clock: watched.add(entries),
            #[cfg(feature = "test-api")]
            simulated: devices
                .iter()
                .find_map(|it| it.device.simulation())
                .map(|(device, user)| simulated::SimulatedRing::new(device, user)),
        })
    }

    /// Starts a request, or queues it for [`RequestRing::submit`].
    ///
    /// # Safety
    /// The buffer belongs to this request until its completion was taken.
    pub(super) unsafe fn push(&mut self, device: &Device, request: DeviceRequest) {
        #[cfg(feature = "test-api")]
        if let Some(ring) = &mut self.simulated {
            // SAFETY: the caller's promise.
            return unsafe { ring.push(request) };
        }
        let DeviceRequest {
            kind,
            offset,
            memory,
            len,
            buffer,
        } = request;
        self.clock.start(buffer, device.byte_in_disk(offset));
        #[cfg(feature = "test-api")]
        if let Some(ring) = &mut self.ring
            && let Some(fd) = device.planned_hang(kind.into(), offset, len)
        {
            let hang = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build();
            // SAFETY: it uses no memory.
            let pushed = unsafe { ring.submission().push(&hang.user_data(buffer as u64)) };
            pushed.expect("the ring has an entry for each buffer");
            self.unsubmitted += 1;
            return;
        }
        #[cfg(feature = "test-api")]
        if let Some(result) = device.planned_result(kind.into(), offset, len) {
            self.ended.push((buffer, result));
            return;
        }
        let fd = device.file().as_raw_fd();
        let Some(ring) = &mut self.ring else {
            // SAFETY: the caller's promise; the descriptor is open as long as the device.
            self.ended
                .push((buffer, unsafe { execute(fd, kind, offset, memory, len) }));
            return;
        };
        let fd = types::Fd(fd);
        let len = len as u32;
        let entry = match (kind, memory) {
            (RequestKind::Read, RequestMemory::Run(address)) => {
                opcode::Read::new(fd, address, len).offset(offset).build()
            }
            (RequestKind::Write, RequestMemory::Run(address)) => {
                opcode::Write::new(fd, address, len).offset(offset).build()
            }
            (RequestKind::Read, RequestMemory::Parts(parts, count)) => {
                let read = opcode::Readv::new(fd, parts, count as u32);
                read.offset(offset).build()
            }
            (RequestKind::Write, RequestMemory::Parts(parts, count)) => {
                let write = opcode::Writev::new(fd, parts, count as u32);
                write.offset(offset).build()
            }
        };
        // SAFETY: the caller's promise.
        let pushed = unsafe { ring.submission().push(&entry.user_data(buffer as u64)) };
        pushed.expect("the ring has an entry for each buffer");
        self.unsubmitted += 1;
    }

    /// Hands queued requests to the kernel. After an error they stay queued.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        match &self.ring {
            Some(ring) if self.unsubmitted > 0 => {
                self.unsubmitted = self.unsubmitted.saturating_sub(ring.submit()?);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Requests that wait for [`RequestRing::submit`].
    pub(super) fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Waits until a request has ended. One must be in flight.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn wait(&mut self) -> io::Result<()> {
        #[cfg(feature = "test-api")]
        if let Some(ring) = &self.simulated {
            ring.wait();
            return Ok(());
        }
        let Some(ring) = &self.ring else {
            return Ok(());
        };
        if !self.ended.is_empty() {
            return self.submit();
        }
        loop {
            match ring.submit_and_wait(1) {
                Ok(taken) => {
                    self.unsubmitted = self.unsubmitted.saturating_sub(taken);
                    return Ok(());
                }
                Err(cause) if cause.raw_os_error() == Some(libc::EINTR) => {}
                Err(cause) => return Err(cause),
            }
        }
    }

    /// Moves the buffers and results of requests that have ended to `into`.
    pub(super) fn take_ended(&mut self, into: &mut Vec<(usize, i32)>) {
        self.take_ended_max(usize::MAX, into);
    }

    /// The same for at most `max` of those in the ring. Its descriptor stays readable if others are left.
    pub(super) fn take_ended_max(&mut self, max: usize, into: &mut Vec<(usize, i32)>) {
        #[cfg(feature = "test-api")]
        if let Some(ring) = &mut self.simulated {
            return ring.take_ended(into);
        }
        let first = into.len();
        into.append(&mut self.ended);
        if let Some(ring) = &mut self.ring {
            let completed = ring.completion().take(max);
            into.extend(completed.map(|entry| (entry.user_data() as usize, entry.result())));
        }
        for &(buffer, _) in &into[first..] {
            self.clock.end(buffer);
        }
    }

    /// Whether a request of a simulated device has ended.
    #[cfg(feature = "test-api")]
    pub(super) fn has_ended(&self) -> bool {
        let ring = self.simulated.as_ref();
        ring.is_some_and(simulated::SimulatedRing::has_ended)
    }

    /// Whether requests have ended of which no descriptor tells.
    pub(super) fn has_ended_outside(&self) -> bool {
        !self.ended.is_empty()
    }

    /// A descriptor that becomes readable when requests have ended. None: they end at once.
    pub(super) fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        let ring = self.ring.as_ref()?;
        // SAFETY: the ring is open as long as `self`.
        Some(unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) })
    }
}

fn open_ring(devices: &DeviceMap, entries: usize) -> Result<Option<IoUring>, MapError> {
    if devices.is_simulated() {
        return Ok(None);
    }
    let mut all = devices.iter().map(|it| &it.device);
    let opened = match all.any(Device::refuses_io_uring) {
        true => Err(io::Error::from_raw_os_error(libc::EPERM)),
        false => IoUring::new(entries as u32),
    };
    match opened {
        Ok(ring) => Ok(Some(ring)),
        Err(cause) if is_refusal(&cause) => {
            if let Some(first) = devices.iter().next() {
                first.device.warn_of_refusal(&cause);
            }
            Ok(None)
        }
        Err(cause) => Err(system("set up io_uring")(cause)),
    }
}

/// The reason why the system refuses io_uring to this process; none if it does not.
#[must_use]
pub fn io_uring_refusal() -> Option<io::Error> {
    IoUring::new(1).err().filter(is_refusal)
}

/// Whether the system has no io_uring for this process: by a sysctl, a filter of system calls, its version, or a
/// limit of locked memory.
fn is_refusal(cause: &io::Error) -> bool {
    let refusals = [libc::EPERM, libc::EACCES, libc::ENOSYS, libc::ENOMEM];
    cause
        .raw_os_error()
        .is_some_and(|code| refusals.contains(&code))
}

/// Executes a request. Returns the number of bytes, or a negated error number.
///
/// # Safety
/// The descriptor is open, and the memory has `len` bytes for this request.
unsafe fn execute(
    fd: i32,
    kind: RequestKind,
    offset: u64,
    memory: RequestMemory,
    len: usize,
) -> i32 {
    let at = offset as libc::off_t;
    loop {
        // SAFETY: the caller's promise.
        let result = unsafe {
            match (kind, memory) {
                (RequestKind::Read, RequestMemory::Run(to)) => libc::pread(fd, to.cast(), len, at),
                (RequestKind::Write, RequestMemory::Run(from)) => {
                    libc::pwrite(fd, from.cast(), len, at)
                }
                (RequestKind::Read, RequestMemory::Parts(parts, count)) => {
                    libc::preadv(fd, parts, count as i32, at)
                }
                (RequestKind::Write, RequestMemory::Parts(parts, count)) => {
                    libc::pwritev(fd, parts, count as i32, at)
                }
            }
        };
        if result >= 0 {
            return result as i32;
        }
        match io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) => {}
            code => return -code.unwrap_or(libc::EIO),
        }
    }
}
