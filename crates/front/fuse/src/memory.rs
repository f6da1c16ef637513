//! The memory that the kernel writes requests into and reads answers from, and two kernel calls
//! that no library makes safe.
//!
//! From the submission of a command until its completion the kernel owns the memory of an
//! [`EntryMemory`]. Meanwhile the entry lies in the [`CommandRing`] of a thread, so no code can
//! access it.

#![allow(unsafe_code)]

use crate::abi;
use bytes::Bytes;
use io_uring::IoUring;
use io_uring::opcode::MsgRingData;
use io_uring::squeue::{Entry128, Flags};
use io_uring::types::Fd;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::ioctl::{Setter, opcode};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Attaches a newly opened device to an existing connection.
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

/// A command to a device, with the address and length of an array of `iovec`. It has the layout of
/// `struct io_uring_sqe`.
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
    // SAFETY: an entry is 128 bytes of numbers, `repr(C)`, and all of their values are valid. The
    // submitter answers for the effects of the command.
    unsafe { std::mem::transmute::<[u8; 128], Entry128>(bytes) }
}

/// Mapped memory, unmapped when it is dropped.
#[derive(Debug)]
struct SharedMapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: it is memory, and no part of a thread. The owner of the mapping controls its use.
unsafe impl Send for SharedMapping {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    fn new(memory: &OwnedFd, len: usize) -> io::Result<SharedMapping> {
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
        Ok(SharedMapping { address: at, len })
    }

    /// Maps other memory at the same address. There must be no `Bytes` of the old memory.
    fn replace(&mut self, memory: &OwnedFd) -> io::Result<()> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let at: *mut c_void = self.address.as_ptr().cast();
        // SAFETY: the range is this mapping, and there are no references to it: only `PayloadBytes`
        // makes one, and only to readers' mappings.
        unsafe { mmap(at, self.len, protection, flags, memory, 0)? };
        Ok(())
    }

    /// The address of `len` bytes at offset `at`.
    fn address_of(&self, at: usize, len: usize) -> NonNull<u8> {
        let fits = at.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{at} and {len} bytes lie within {}", self.len);
        // SAFETY: it is within the mapping.
        unsafe { self.address.add(at) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this length, and nothing refers to it any more.
        let unmapped = unsafe { munmap(self.address.as_ptr().cast(), self.len) };
        if let Err(cause) = unmapped {
            tracing::error!(%cause, "cannot unmap memory");
        }
    }
}

fn create_memfd(len: usize) -> io::Result<OwnedFd> {
    let memory = memfd_create("pagemesh-fuse", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, len as u64)?;
    Ok(memory)
}

/// The payload of an entry: mapped once for the kernel and the server's answers, and once for
/// readers of the written data.
struct Payload {
    kernel_mapping: SharedMapping,
    /// The same memory. Shared by all `Bytes` of a request.
    reader_mapping: Arc<SharedMapping>,
}

/// Owns the memory of `Bytes`.
struct PayloadBytes {
    mapping: Arc<SharedMapping>,
    len: usize,
}

impl AsRef<[u8]> for PayloadBytes {
    fn as_ref(&self) -> &[u8] {
        let at = self.mapping.address_of(0, self.len);
        // SAFETY: it is within the mapping, which lives as long as this. No code writes to the
        // memory meanwhile: answers are put, and the entry goes to the kernel, only after
        // `Payload::reclaim`.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), self.len) }
    }
}

impl Payload {
    fn new(len: usize) -> io::Result<Payload> {
        let memory = create_memfd(len)?;
        Ok(Payload {
            kernel_mapping: SharedMapping::new(&memory, len)?,
            reader_mapping: Arc::new(SharedMapping::new(&memory, len)?),
        })
    }

    /// The request's payload; truncated to the length of the mapping.
    fn bytes(&self, len: usize) -> Bytes {
        let mapping = Arc::clone(&self.reader_mapping);
        let len = len.min(mapping.len);
        Bytes::from_owner(PayloadBytes { mapping, len })
    }

    /// Makes the memory exclusive. If readers still have the old contents, they keep that memory,
    /// and the server and the kernel get other memory.
    fn reclaim(&mut self) -> io::Result<()> {
        if Arc::get_mut(&mut self.reader_mapping).is_none() {
            let memory = create_memfd(self.kernel_mapping.len)?;
            let readers = SharedMapping::new(&memory, self.kernel_mapping.len)?;
            self.kernel_mapping.replace(&memory)?;
            self.reader_mapping = Arc::new(readers);
        }
        Ok(())
    }

    fn put(&mut self, answer: &[u8]) -> io::Result<()> {
        self.reclaim()?;
        if answer.len() > self.kernel_mapping.len {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let to = self.kernel_mapping.address_of(0, answer.len());
        // SAFETY: it is within the mapping. No other code uses the memory: the server owns the
        // entry, and there are no `Bytes` of it. The answer is separate memory.
        unsafe { ptr::copy_nonoverlapping(answer.as_ptr(), to.as_ptr(), answer.len()) };
        Ok(())
    }
}

/// The memory of an entry: headers and a payload. The kernel has it from
/// [`CommandRing::submit_entry`] until [`CommandRing::next_event`]; otherwise its owner has it
/// exclusively.
pub(crate) struct EntryMemory {
    /// The kernel's queue of this entry.
    pub(crate) queue: u16,
    headers: SharedMapping,
    payload: Payload,
}

impl EntryMemory {
    pub(crate) fn new(queue: u16, payload_bytes: usize) -> io::Result<EntryMemory> {
        Ok(EntryMemory {
            queue,
            headers: SharedMapping::new(&create_memfd(abi::ring::BYTES)?, abi::ring::BYTES)?,
            payload: Payload::new(payload_bytes)?,
        })
    }

    /// Reads a header.
    pub(crate) fn get<T: FromBytes>(&self, at: usize) -> T {
        let from = self.headers.address_of(at, size_of::<T>()).cast();
        // SAFETY: it is within the mapping, any bytes make a `T`, and the kernel does not write
        // meanwhile, as it does not have the entry.
        unsafe { from.read_unaligned() }
    }

    /// Writes a header.
    pub(crate) fn put<T: IntoBytes + Immutable>(&mut self, at: usize, value: T) {
        let to = self.headers.address_of(at, size_of::<T>()).cast();
        // SAFETY: it is within the mapping, and no other code uses it meanwhile, as the kernel does
        // not have the entry.
        unsafe { to.write_unaligned(value) }
    }

    /// The payload of a request; truncated to the length of the mapping.
    pub(crate) fn payload(&self, len: usize) -> Bytes {
        self.payload.bytes(len)
    }

    /// Writes the payload of an answer.
    pub(crate) fn put_payload(&mut self, answer: &[u8]) -> io::Result<()> {
        self.payload.put(answer)
    }
}

/// An event of a ring.
pub(crate) enum RingEvent {
    /// An entry, and the result of its command.
    Entry(EntryMemory, i32),
    /// Another thread woke this one.
    Wakeup,
}

/// A ring of the calling thread, with the entries of commands in flight.
pub(crate) struct CommandRing {
    ring: IoUring<Entry128>,
    /// Entries that the kernel has, by the number of their command.
    in_kernel: Vec<Option<EntryMemory>>,
    count: usize,
}

/// User data of messages, which are not commands for entries.
const WAKEUP: u64 = u64::MAX;
const WAKEUP_SENT: u64 = u64::MAX - 1;

impl CommandRing {
    /// A ring for so many entries at a time. A thread that sleeps otherwise than by
    /// [`CommandRing::wait`] must pass [`WaitMode::ByPoll`].
    pub(crate) fn new(entries: usize, sleeps: WaitMode) -> io::Result<CommandRing> {
        Ok(CommandRing {
            ring: make_ring(entries, sleeps)?,
            in_kernel: (0..entries).map(|_| None).collect(),
            count: 0,
        })
    }

    /// Entries that the kernel has.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Readable when there may be events, if the ring is for [`WaitMode::ByPoll`].
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.ring.as_fd()
    }

    /// Gives an entry to the kernel, with a command. The first command tells the kernel the place
    /// of the memory, and is submitted at once; later ones with the next poll or wait.
    pub(crate) fn submit_entry(
        &mut self,
        device: BorrowedFd<'_>,
        code: u32,
        command: &abi::RingCommand,
        mut entry: EntryMemory,
        is_first: bool,
    ) -> io::Result<()> {
        entry.payload.reclaim()?;
        // Two of the kernel's `iovec`.
        let places = [
            entry.headers.address.as_ptr() as u64,
            entry.headers.len as u64,
            entry.payload.kernel_mapping.address.as_ptr() as u64,
            entry.payload.kernel_mapping.len as u64,
        ];
        let places = match is_first {
            true => (places.as_ptr() as u64, 2),
            false => (0, 0),
        };
        let free = self.in_kernel.iter().position(Option::is_none);
        let number = free.ok_or(io::ErrorKind::ResourceBusy)?;
        let submission = submission(device, code, places, command);
        let submission = submission.user_data(number as u64);
        self.in_kernel[number] = Some(entry);
        self.count += 1;
        // SAFETY: the kernel knows no other memory than the headers and the payload. No code
        // accesses them until the completion, as the entry lies in `in_kernel`, and they stay
        // mapped until then, or for ever. The array lives until the submission below.
        unsafe { self.push(&submission) }?;
        if is_first {
            self.ring.submit()?;
        }
        Ok(())
    }

    /// # Safety
    /// The kernel owns the memory of the submission until its completion.
    unsafe fn push(&mut self, submission: &Entry128) -> io::Result<()> {
        if self.ring.submission().is_full() {
            self.ring.submit()?;
        }
        // SAFETY: the caller's.
        let pushed = unsafe { self.ring.submission().push(submission) };
        pushed.map_err(|_| io::ErrorKind::ResourceBusy.into())
    }

    /// Wakes the thread of another ring, which gets [`RingEvent::Wakeup`].
    pub(crate) fn wake(&mut self, other: BorrowedFd<'_>) -> io::Result<()> {
        let message = MsgRingData::new(Fd(other.as_raw_fd()), 0, WAKEUP, None).build();
        let message = message.flags(Flags::SKIP_SUCCESS).user_data(WAKEUP_SENT);
        // SAFETY: a message of two numbers names no memory.
        unsafe { self.push(&message.into()) }?;
        self.ring.submit()?;
        Ok(())
    }

    /// The next event that has come, if any.
    pub(crate) fn next_event(&mut self) -> io::Result<Option<RingEvent>> {
        let Some(completion) = self.ring.completion().next() else {
            return Ok(None);
        };
        let code = completion.result();
        let number = match completion.user_data() {
            WAKEUP => return Ok(Some(RingEvent::Wakeup)),
            WAKEUP_SENT => return Err(io::Error::from_raw_os_error(-code)),
            number => usize::try_from(number).unwrap_or(usize::MAX),
        };
        let entry = self.in_kernel.get_mut(number).and_then(Option::take);
        let entry = entry.ok_or_else(|| io::Error::other("no command has this number"))?;
        self.count -= 1;
        Ok(Some(RingEvent::Entry(entry, code)))
    }

    /// Whether commands have not been submitted.
    pub(crate) fn has_unsubmitted(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Submits pending commands, and collects completions.
    pub(crate) fn submit_pending(&mut self) -> io::Result<()> {
        let submissions = self.ring.submission();
        let is_idle =
            submissions.is_empty() && !submissions.taskrun() && !submissions.cq_overflow();
        drop(submissions);
        match is_idle {
            true => Ok(()),
            false => ignore_interrupted(self.ring.submit()),
        }
    }

    /// Submits pending commands, and waits until an event comes.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        ignore_interrupted(self.ring.submit_and_wait(1))
    }
}

fn ignore_interrupted(result: io::Result<usize>) -> io::Result<()> {
    match result {
        Err(cause) if cause.kind() != io::ErrorKind::Interrupted => Err(cause),
        _ => Ok(()),
    }
}

impl Drop for CommandRing {
    fn drop(&mut self) {
        // The ring is dropped; the memory is leaked, as the kernel may still write to it.
        self.in_kernel
            .drain(..)
            .flatten()
            .for_each(std::mem::forget);
    }
}

/// How a thread waits for events of its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// Only in the ring.
    InRing,
    /// Also by polling the ring's descriptor along with others.
    ByPoll,
}

/// A ring for the calling thread, for so many commands at a time.
pub(crate) fn make_ring(depth: usize, sleeps: WaitMode) -> io::Result<IoUring<Entry128>> {
    let mut builder = IoUring::builder();
    // Without `submit_all`, a failed submission would leave later ones in the queue, when the
    // memory that they name may be gone.
    builder
        .setup_single_issuer()
        .setup_taskrun_flag()
        .setup_submit_all();
    match sleeps {
        WaitMode::InRing => builder.setup_defer_taskrun(),
        // Deferred task work does not wake a thread that polls (Linux 6.18).
        WaitMode::ByPoll => builder.setup_coop_taskrun(),
    };
    builder.build(depth as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_payload_keeps_its_content() {
        let mut payload = Payload::new(8192).expect("memory");
        payload.put(b"first").expect("it fits");
        let address = payload.kernel_mapping.address;
        let held = payload.bytes(5).slice(1..);
        payload.put(b"other").expect("it fits");
        assert_eq!(&held[..], b"irst");
        assert_eq!(payload.bytes(5), b"other"[..]);
        assert_eq!(
            payload.kernel_mapping.address, address,
            "the kernel knows this one"
        );
        drop(held);
        // No reader has the second memory, so it stays.
        payload.put(b"third").expect("it fits");
        assert_eq!(payload.bytes(5), b"third"[..]);
        assert_eq!(payload.bytes(9000).len(), 8192);
        assert!(payload.put(&[0; 8193]).is_err());
    }
}
