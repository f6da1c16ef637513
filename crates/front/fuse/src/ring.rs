//! Requests and answers through a ring: `Documentation/filesystems/fuse/
//! fuse-io-uring.rst`.
//!
//! An entry belongs to one of the kernel's queues. The kernel owns it while a command is in flight;
//! the server owns it between the completion and the next command, which hands over the answer and
//! fetches the next request. Commands for an entry may go through the rings of different threads;
//! the next request comes through the ring of the last one.

use crate::abi::{self, DATA_BYTES_MAX};
use crate::device;
use crate::memory::{CommandRing, EntryMemory, WaitMode, make_ring};
use crate::reply::FuseReply;
use crate::request::RawRequest;
use crate::worker_pool::EntryCounts;
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// The file by which the administrator enables it.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// The kernel has one queue for each of these processors.
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
/// More queues would cost more memory and threads than they are worth.
pub(crate) const QUEUES_MAX: usize = 256;

/// Entries of each queue once requests wait for the volume, so that programs on one processor do
/// not wait for each other.
const ENTRIES_WANTED: usize = 8;
/// Queues, and processors, that share one lead thread; programs need the processors, too.
pub(crate) const QUEUES_PER_POOL: usize = 2;
/// Most entries of all queues: each may need a channel of the volume, which has 64, and the file
/// system uses two of them.
const ENTRIES_TOTAL_MAX: usize = 48;

/// Entries of each of so many queues, for a requested number of threads.
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

/// The number of the kernel's queues.
///
/// # Errors
/// The reason for which there can be no ring.
pub(crate) fn queues() -> Result<usize, String> {
    let switch = std::fs::read_to_string(SWITCH);
    match switch.as_deref().map(str::trim_end) {
        Ok("Y" | "1") => {}
        Ok(_) => {
            return Err(format!(
                "it is disabled; enable it as root: echo Y > {SWITCH}"
            ));
        }
        Err(_) => return Err("this kernel lacks it; use Linux 6.14 or newer".into()),
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
    make_ring(1, WaitMode::InRing)
        .map_err(|cause| format!("cannot create an io_uring: {cause}"))?;
    Ok(queues)
}

/// The count of numbers in a list such as `0-3,6`.
fn count_cpus(list: &str) -> Option<usize> {
    let mut all = 0usize;
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        all = all.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(all)
}

/// An entry with a request to answer.
pub(crate) struct RingRequest {
    entry: EntryMemory,
    pub(crate) header: abi::InHeader,
    /// The kernel's id of the request.
    commit_id: u64,
}

/// Pins the calling thread to the processor of the callers that it serves.
pub(crate) fn pin_to_cpu(processor: u16) {
    let mut only = CpuSet::new();
    only.set(processor.into());
    if let Err(cause) = sched_setaffinity(None, &only) {
        tracing::debug!(processor, %cause, "cannot pin a thread of the ring to its processor");
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

    /// The request of an entry after its command ended with this code; None: the mount is gone.
    pub(crate) fn take(
        &self,
        entry: EntryMemory,
        code: i32,
    ) -> io::Result<Option<(RingRequest, RawRequest)>> {
        match code {
            0.. => {}
            // The kernel may end a command with any error while the mount ends.
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
        // The default answer is an error.
        taken.put_header(-Errno::IO.raw_os_error(), 0);
        Ok(Some((taken, RawRequest::from_parts(header, &op, payload))))
    }
}

impl RingRequest {
    pub(crate) fn queue(&self) -> u16 {
        self.entry.queue
    }

    /// Puts an answer, which the kernel gets with the entry. The caller should have dropped the
    /// payload of the request.
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
        // It serves from any processor.
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
