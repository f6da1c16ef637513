//! A user's requests to a simulated device.

use super::super::device::RequestKind;
use super::{DeviceRequest, RequestMemory};
use crate::disk::device_sim::{EndedRequest, Generation, RingNo, SimulatedDevice};
use std::collections::HashMap;
use std::sync::Arc;

/// See the module.
pub(in crate::disk) struct SimulatedRing {
    device: Arc<SimulatedDevice>,
    user: Generation,
    ring: RingNo,
    /// The memory of reads, by their buffers.
    reads: HashMap<usize, (RequestMemory, usize)>,
}

// SAFETY: the addresses are of memory that belongs to their requests, on any thread.
unsafe impl Send for SimulatedRing {}

impl SimulatedRing {
    pub(in crate::disk) fn new(device: Arc<SimulatedDevice>, user: Generation) -> SimulatedRing {
        let ring = device.new_ring();
        SimulatedRing {
            device,
            user,
            ring,
            reads: HashMap::new(),
        }
    }

    /// Starts a request.
    ///
    /// # Safety
    /// As of [`super::RequestRing::push`].
    pub(super) unsafe fn push(&mut self, request: DeviceRequest) {
        let DeviceRequest {
            kind,
            offset,
            memory,
            len,
            buffer,
        } = request;
        let mut written = None;
        if kind == RequestKind::Write {
            let mut bytes = vec![0; len];
            // SAFETY: the caller's promise.
            unsafe {
                copy_parts(memory, len, |part, at, count| {
                    std::ptr::copy_nonoverlapping(part, bytes.as_mut_ptr().add(at), count);
                })
            };
            written = Some(bytes);
        } else {
            self.reads.insert(buffer, (memory, len));
        }
        self.device
            .start(self.user, self.ring, (offset, len, buffer), written);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.device.has_ended(self.ring)
    }

    /// Waits until a request has ended. One must be in flight.
    pub(super) fn wait(&self) {
        while !self.has_ended() {
            let has_ended = self.device.end_first();
            assert!(has_ended, "a wait for a request has no end");
        }
    }

    /// Moves the buffers and results of requests that have ended to `into`.
    pub(super) fn take_ended(&mut self, into: &mut Vec<(usize, i32)>) {
        for ended in self.device.take_ended(self.ring) {
            let EndedRequest {
                buffer,
                result,
                bytes,
            } = ended;
            if let Some((memory, len)) = self.reads.remove(&buffer)
                && bytes.len() == len
            {
                // SAFETY: the memory belongs to the request until now, by the promise of `push`; `bytes` has `len` bytes.
                unsafe {
                    copy_parts(memory, len, |part, at, count| {
                        std::ptr::copy_nonoverlapping(bytes.as_ptr().add(at), part, count);
                    })
                };
            }
            into.push((buffer, result));
        }
    }
}

/// Calls `copy` with the address of each part, its place in the request, and its length.
///
/// # Safety
/// The memory has `len` bytes.
unsafe fn copy_parts(
    memory: RequestMemory,
    len: usize,
    mut copy: impl FnMut(*mut u8, usize, usize),
) {
    match memory {
        RequestMemory::Run(address) => copy(address, 0, len),
        RequestMemory::Parts(parts, count) => {
            let mut at = 0;
            // SAFETY: the caller's promise.
            for part in unsafe { std::slice::from_raw_parts(parts, count) } {
                copy(part.iov_base.cast(), at, part.iov_len);
                at += part.iov_len;
            }
        }
    }
}
