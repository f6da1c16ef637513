//! Requests and answers through a ring: `Documentation/filesystems/fuse/
//! fuse-io-uring.rst`.
//!
//! An entry belongs to one of the kernel's queues. It is the kernel's while a command is
//! on its way, and this side's between its completion and the next command, which hands
//! over the answer and asks for the next request. Commands for an entry may go by the
//! rings of different threads; its next request comes by that of the last one.

use crate::abi;
use crate::device;
use crate::memory::{CommandRing, EntryMemory, WaitMode, make_ring};
use crate::reply::FuseReply;
use crate::request::RawRequest;
use crate::request_handler::DATA_BYTES_MAX;
use crate::worker_pool::EntryCounts;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Where the administrator switches it on.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// The kernel's queues: one for each of these.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// More queues than these would cost more memory and threads than they are worth.
pub(crate) const QUEUES_MAX: usize = 256;

/// Entries of each queue once requests wait for the volume, so that programs on one
/// processor do not wait for each other.
const ENTRIES_WANTED: usize = 8;
/// Queues, and processors, of which one thread collects what waits; programs need the
/// processors, too.
pub(crate) const QUEUES_PER_POOL: usize = 2;
/// For how many of all queues that holds: each may need a channel of the volume, which
/// has 64, and two of them are the file system's.
const ENTRIES_TOTAL_MAX: usize = 48;

/// Entries of each of so many queues, where so many threads are wished for.
pub(crate) fn entries(queues: usize, threads: usize) -> EntryCounts {
    let queues = queues.max(1);
    let first = threads.div_ceil(queues).max(1);
    let wanted = ENTRIES_WANTED.min(ENTRIES_TOTAL_MAX / queues);
    let more = wanted.saturating_sub(first);
    EntryCounts {
        initial: first,
        additional: more,
    }
}

/// How many queues the kernel has.
///
/// # Errors
/// Why there can be no ring, in words.
pub(crate) fn queues() -> Result<usize, String> {
    let switch = std::fs::read_to_string(SWITCH);
    match switch.as_deref().map(str::trim_end) {
        Ok("Y" | "1") => {}
        Ok(_) => return Err(format!("it is switched off; as root: echo Y > {SWITCH}")),
        Err(_) => return Err("this kernel does not have it (Linux 6.14 can)".into()),
    }
    let possible = std::fs::read_to_string(POSSIBLE);
    let possible = possible.map_err(|cause| format!("cannot read {POSSIBLE}: {cause}"))?;
    let queues = count_cpus(possible.trim_end());
    let queues = queues.ok_or_else(|| format!("{POSSIBLE} says {possible:?}"))?;
    if queues > QUEUES_MAX {
        return Err(format!(
            "{queues} processors are possible here, more than {QUEUES_MAX}"
        ));
    }
    make_ring(1, WaitMode::InRing).map_err(|cause| format!("no io_uring can be made: {cause}"))?;
    Ok(queues)
}

/// Numbers in a list such as `0-3,6`.
fn count_cpus(list: &str) -> Option<usize> {
    let mut all = 0usize;
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        all = all.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(all)
}

/// An entry whose request is to be answered.
pub(crate) struct RingRequest {
    entry: EntryMemory,
    pub(crate) header: abi::InHeader,
    /// The kernel's name for the request.
    commit_id: u64,
}

/// Keeps the calling thread on the processor whose callers it serves.
pub(crate) fn pin_to_cpu(processor: u16) {
    let mut only = CpuSet::new();
    only.set(processor.into());
    if let Err(cause) = sched_setaffinity(None, &only) {
        tracing::debug!(processor, %cause, "a thread of the ring is not kept on its processor");
    }
}

/// Whether a command ended because the mount did.
fn is_unmounted(code: i32) -> bool {
    let over = [Errno::NOTCONN, Errno::CONNABORTED, Errno::NODEV];
    over.iter().any(|errno| code == -errno.raw_os_error())
}

/// The kernel's queues of a mount.
pub(crate) struct RingQueues(pub(crate) Arc<OwnedFd>);

fn command(queue: u16, commit: u64) -> abi::RingCommand {
    abi::RingCommand {
        commit,
        queue,
        ..abi::RingCommand::default()
    }
}

impl RingQueues {
    /// Gives the kernel a new entry for a queue.
    pub(crate) fn register(&self, commands: &mut CommandRing, queue: u16) -> io::Result<()> {
        let entry = EntryMemory::new(queue, DATA_BYTES_MAX as usize)?;
        let (device, command) = (self.0.as_fd(), command(queue, 0));
        commands.submit_entry(device, abi::RING_REGISTER, &command, entry, true)
    }

    /// Gives back an answered entry, for the next request.
    pub(crate) fn commit(&self, commands: &mut CommandRing, taken: RingRequest) -> io::Result<()> {
        let (device, command) = (self.0.as_fd(), command(taken.queue(), taken.commit_id));
        let code = abi::RING_COMMIT_AND_FETCH;
        commands.submit_entry(device, code, &command, taken.entry, false)
    }

    /// What came in an entry whose command has ended so; None: the mount is no more.
    pub(crate) fn take(
        &self,
        entry: EntryMemory,
        code: i32,
    ) -> io::Result<Option<(RingRequest, RawRequest)>> {
        match code {
            0.. => {}
            // Whatever a command in the middle of the end is told.
            code if is_unmounted(code) || !device::is_alive(&self.0) => return Ok(None),
            code => return Err(io::Error::from_raw_os_error(-code)),
        }
        let header: abi::InHeader = entry.get(0);
        let op: [u8; abi::OP_BYTES_MAX] = entry.get(abi::ring::OP_AT);
        let about: abi::RingEntry = entry.get(abi::ring::ENTRY_AT);
        let payload = entry.payload(about.payload_len as usize);
        let mut taken = RingRequest {
            entry,
            header,
            commit_id: about.commit,
        };
        // Unless it is answered otherwise.
        taken.put_header(-Errno::IO.raw_os_error(), 0);
        Ok(Some((taken, RawRequest::from_parts(header, &op, payload))))
    }
}

impl RingRequest {
    pub(crate) fn queue(&self) -> u16 {
        self.entry.queue
    }

    /// Puts an answer, which the kernel gets with the entry. What holds the payload of the
    /// request should be gone.
    pub(crate) fn answer(&mut self, answer: &FuseReply) -> io::Result<()> {
        let bytes = answer.bytes();
        self.entry.put_payload(bytes)?;
        self.put_header(answer.error(), bytes.len());
        Ok(())
    }

    fn put_header(&mut self, error: i32, payload_len: usize) {
        let header = abi::OutHeader {
            len: (size_of::<abi::OutHeader>() + payload_len) as u32,
            error,
            unique: self.header.unique,
        };
        self.entry.put(0, header);
        let mut about: abi::RingEntry = self.entry.get(abi::ring::ENTRY_AT);
        about.payload_len = payload_len as u32;
        self.entry.put(abi::ring::ENTRY_AT, about);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getaffinity;

    #[test]
    fn thread_is_pinned_only_to_an_existing_cpu() {
        let stays_on = |processor| {
            let thread = std::thread::spawn(move || {
                pin_to_cpu(processor);
                sched_getaffinity(None).expect("the system tells").count()
            });
            thread.join().expect("it ends")
        };
        assert_eq!(stays_on(0), 1);
        // It serves from wherever it may be.
        let anywhere = sched_getaffinity(None).expect("the system tells").count();
        assert_eq!(stays_on(1023), anywhere);
    }

    #[test]
    fn possible_cpus_are_counted() {
        assert_eq!(count_cpus("0-1"), Some(2));
        assert_eq!(count_cpus("0"), Some(1));
        assert_eq!(count_cpus("0-3,8,10-11"), Some(7));
        for wrong in ["", "a", "3-1", "0-", "0,,1", "0-18446744073709551615"] {
            assert_eq!(count_cpus(wrong), None, "{wrong}");
        }
    }
}
