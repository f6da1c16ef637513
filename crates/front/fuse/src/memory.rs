//! Memory that the kernel writes requests into and reads answers from, and the two
//! calls to the kernel that no library makes safe.
//!
//! An [`Entry`]'s memory is the kernel's from the submission of a command until its
//! completion, and this side's between the two; it refuses to be touched while it is
//! away. The ring is made with `DEFER_TASKRUN`, so that the kernel touches the memory
//! only while the entry's thread is inside of `io_uring_enter`.

#![allow(unsafe_code)]

use crate::abi;
use bytes::Bytes;
use io_uring::IoUring;
use io_uring::squeue::Entry128;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::ioctl::{Setter, opcode};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Makes a freshly opened device a further one of a connection.
pub(crate) fn clone_device(fresh: BorrowedFd<'_>, of: BorrowedFd<'_>) -> io::Result<()> {
    /// `FUSE_DEV_IOC_CLONE`, `_IOR(229, 0, uint32_t)`.
    const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);
    let number = of.as_raw_fd().cast_unsigned();
    // SAFETY: the kernel reads a `u32` from the address that it is given: the number
    // of the other descriptor.
    let clone = unsafe { Setter::<CLONE, u32>::new(number) };
    // SAFETY: it changes which connection the descriptor belongs to, and no memory.
    unsafe { rustix::ioctl::ioctl(fresh, clone) }?;
    Ok(())
}

/// A command to a device, with the address of an array of `iovec` and its length. The
/// layout is that of `struct io_uring_sqe`.
fn submission(
    device: BorrowedFd<'_>,
    code: u32,
    (addr, len): (u64, u32),
    command: &abi::RingCommand,
) -> Entry128 {
    let command = command.as_bytes();
    /// `IORING_OP_URING_CMD`.
    const URING_CMD: u8 = 46;
    const COMMAND_AT: usize = 48;
    let mut bytes = [0u8; size_of::<Entry128>()];
    bytes[0] = URING_CMD;
    bytes[4..8].copy_from_slice(&device.as_raw_fd().to_ne_bytes());
    bytes[8..12].copy_from_slice(&code.to_ne_bytes());
    bytes[16..24].copy_from_slice(&addr.to_ne_bytes());
    bytes[24..28].copy_from_slice(&len.to_ne_bytes());
    bytes[COMMAND_AT..][..command.len()].copy_from_slice(command);
    // SAFETY: an entry is 128 bytes of numbers, `repr(C)`, all of whose values are
    // valid. Whether the kernel may act on it is the submitter's business.
    unsafe { std::mem::transmute::<[u8; 128], Entry128>(bytes) }
}

/// Mapped memory, unmapped when it is dropped.
#[derive(Debug)]
struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: it is memory, and no part of a thread; who may use it when is seen to by
// what has the mapping.
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn of(memory: &OwnedFd, len: usize) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address that nothing is mapped at.
        let at = unsafe {
            mmap(
                ptr::null_mut(),
                len,
                protection,
                MapFlags::SHARED,
                memory,
                0,
            )?
        };
        let at = NonNull::new(at.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { at, len })
    }

    /// Puts other memory at the same address. There must be no `Bytes` of it.
    fn replace(&mut self, memory: &OwnedFd) -> io::Result<()> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let at: *mut c_void = self.at.as_ptr().cast();
        // SAFETY: what was mapped there is this mapping, of which there are no
        // references: `Held` alone makes one, and of readers' mappings only.
        unsafe { mmap(at, self.len, protection, flags, memory, 0)? };
        Ok(())
    }

    /// Where so many bytes lie from `at` on.
    fn place(&self, at: usize, len: usize) -> NonNull<u8> {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{at} and {len} bytes lie within {}", self.len);
        // SAFETY: it is within the mapping.
        unsafe { self.at.add(at) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped so, and nothing refers to it any more.
        let unmapped = unsafe { munmap(self.at.as_ptr().cast(), self.len) };
        if let Err(cause) = unmapped {
            tracing::error!(%cause, "cannot unmap memory");
        }
    }
}

fn memory(len: usize) -> io::Result<OwnedFd> {
    let memory = memfd_create("pagemesh-fuse", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, len as u64)?;
    Ok(memory)
}

/// The payload of an entry: mapped once for the kernel and this side's answers, and
/// once for those who have what was written.
struct Payload {
    kernels: Mapping,
    /// The same memory. Shared by all `Bytes` of a request.
    readers: Arc<Mapping>,
}

/// Keeps the memory of `Bytes`.
struct Held {
    mapping: Arc<Mapping>,
    len: usize,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        let at = self.mapping.place(0, self.len);
        // SAFETY: it is within the mapping, which lives as long as this. Nobody
        // writes to the memory while this lives: answers are put, and the entry goes to
        // the kernel, only after `Payload::reclaim`.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), self.len) }
    }
}

impl Payload {
    fn new(len: usize) -> io::Result<Payload> {
        let memory = memory(len)?;
        Ok(Payload {
            kernels: Mapping::of(&memory, len)?,
            readers: Arc::new(Mapping::of(&memory, len)?),
        })
    }

    /// What was put there; less if there is no room for so many bytes.
    fn bytes(&self, len: usize) -> Bytes {
        let mapping = Arc::clone(&self.readers);
        let len = len.min(mapping.len);
        Bytes::from_owner(Held { mapping, len })
    }

    /// Sees to it that nobody has what was there: if somebody does, they keep it, and
    /// there is other memory for this side and the kernel.
    fn reclaim(&mut self) -> io::Result<()> {
        if Arc::get_mut(&mut self.readers).is_none() {
            let memory = memory(self.kernels.len)?;
            let readers = Mapping::of(&memory, self.kernels.len)?;
            self.kernels.replace(&memory)?;
            self.readers = Arc::new(readers);
        }
        Ok(())
    }

    fn put(&mut self, answer: &[u8]) -> io::Result<()> {
        self.reclaim()?;
        if answer.len() > self.kernels.len {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let to = self.kernels.place(0, answer.len());
        // SAFETY: it is within the mapping. Nobody else uses the memory: the entry is
        // this side's, and there are no `Bytes` of it. An answer is memory of its own.
        unsafe { ptr::copy_nonoverlapping(answer.as_ptr(), to.as_ptr(), answer.len()) };
        Ok(())
    }
}

/// What an entry and its thread have: a ring, headers and a payload.
struct Parts {
    ring: IoUring<Entry128>,
    headers: Mapping,
    payload: Payload,
}

/// An entry of a ring of the calling thread's own, which gives one command at a time
/// to the kernel.
pub(crate) struct Entry {
    /// Some until it is dropped.
    parts: Option<Parts>,
    /// Whether a command is on its way.
    is_away: bool,
}

impl Entry {
    pub(crate) fn new(payload_bytes: usize) -> io::Result<Entry> {
        let headers = Mapping::of(&memory(abi::ring::BYTES)?, abi::ring::BYTES)?;
        let parts = Parts {
            ring: make_ring()?,
            headers,
            payload: Payload::new(payload_bytes)?,
        };
        Ok(Entry {
            parts: Some(parts),
            is_away: false,
        })
    }

    fn parts(&mut self) -> &mut Parts {
        self.parts.as_mut().expect("they are there until the drop")
    }

    /// What is this side's.
    fn here(&mut self) -> &mut Parts {
        assert!(!self.is_away, "the kernel has the entry");
        self.parts()
    }

    /// A header.
    pub(crate) fn get<T: FromBytes>(&mut self, at: usize) -> T {
        let from = self.here().headers.place(at, size_of::<T>()).cast();
        // SAFETY: it is within the mapping, any bytes make a `T`, and the kernel does
        // not write meanwhile, as the entry is here.
        unsafe { from.read_unaligned() }
    }

    /// Puts a header.
    pub(crate) fn put<T: IntoBytes + Immutable>(&mut self, at: usize, value: T) {
        let to = self.here().headers.place(at, size_of::<T>()).cast();
        // SAFETY: it is within the mapping, and nobody else uses it meanwhile, as the
        // entry is here.
        unsafe { to.write_unaligned(value) }
    }

    /// The payload of a request; less if there is no room for so many bytes.
    pub(crate) fn payload(&mut self, len: usize) -> Bytes {
        self.here().payload.bytes(len)
    }

    /// Puts the payload of an answer.
    pub(crate) fn put_payload(&mut self, answer: &[u8]) -> io::Result<()> {
        self.here().payload.put(answer)
    }

    /// Gives the entry to the kernel, with a command. The first one tells it where the
    /// memory is, and is submitted at once; others with the next wait.
    pub(crate) fn give(
        &mut self,
        device: BorrowedFd<'_>,
        code: u32,
        command: &abi::RingCommand,
        is_first: bool,
    ) -> io::Result<()> {
        let parts = self.here();
        parts.payload.reclaim()?;
        // Two of the kernel's `iovec`.
        let places = [
            parts.headers.at.as_ptr() as u64,
            parts.headers.len as u64,
            parts.payload.kernels.at.as_ptr() as u64,
            parts.payload.kernels.len as u64,
        ];
        let places = match is_first {
            true => (places.as_ptr() as u64, 2),
            false => (0, 0),
        };
        let submission = submission(device, code, places, command);
        // SAFETY: the kernel knows no other memory than the headers and the payload.
        // They are not touched until the completion, and stay mapped until then, or
        // for ever. The array lives until the submission below.
        let pushed = unsafe { parts.ring.submission().push(&submission) };
        pushed.map_err(|_| io::ErrorKind::ResourceBusy)?;
        self.is_away = true;
        if is_first {
            self.parts().ring.submit()?;
        }
        Ok(())
    }

    /// How the command ended, if it did.
    pub(crate) fn completion(&mut self) -> Option<i32> {
        let completion = self.parts().ring.completion().next()?;
        self.is_away = false;
        Some(completion.result())
    }

    /// Submits what is there, and waits until the command has ended.
    pub(crate) fn wait(&mut self) -> io::Result<i32> {
        loop {
            if let Some(code) = self.completion() {
                return Ok(code);
            }
            match self.parts().ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(cause),
            }
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let (true, Some(parts)) = (self.is_away, self.parts.take()) {
            // The ring goes; the memory stays, as the kernel may still write to it.
            std::mem::forget((parts.headers, parts.payload));
        }
    }
}

/// A ring for the thread that calls.
pub(crate) fn make_ring() -> io::Result<IoUring<Entry128>> {
    /// At most one command is on its way.
    const DEPTH: u32 = 1;
    IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(DEPTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_holds_stays_as_it_was() {
        let mut payload = Payload::new(8192).expect("memory");
        payload.put(b"first").expect("it fits");
        let address = payload.kernels.at;
        let held = payload.bytes(5).slice(1..);
        payload.put(b"other").expect("it fits");
        assert_eq!(&held[..], b"irst");
        assert_eq!(payload.bytes(5), b"other"[..]);
        assert_eq!(payload.kernels.at, address, "the kernel knows this one");
        drop(held);
        // Nobody holds the second one: it stays.
        payload.put(b"third").expect("it fits");
        assert_eq!(payload.bytes(5), b"third"[..]);
        assert_eq!(payload.bytes(9000).len(), 8192);
        assert!(payload.put(&[0; 8193]).is_err());
    }
}
