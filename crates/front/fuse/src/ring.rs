//! Requests and answers through a ring: `Documentation/filesystems/fuse/
//! fuse-io-uring.rst`.
//!
//! A thread has a ring of its own with one entry, in one of the kernel's queues. The
//! entry is the kernel's while a command is on its way, and this side's between its
//! completion and the next command, which hands over the answer and asks for the next
//! request.

use crate::abi;
use crate::answer::Answer;
use crate::device;
use crate::line::{DATA_BYTES_MAX, Line};
use crate::memory::{Entry, make_ring};
use crate::request::Incoming;
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
    let queues = count(possible.trim_end());
    let queues = queues.ok_or_else(|| format!("{POSSIBLE} says {possible:?}"))?;
    if queues > QUEUES_MAX {
        return Err(format!(
            "{queues} processors are possible here, more than {QUEUES_MAX}"
        ));
    }
    make_ring().map_err(|cause| format!("no io_uring can be made: {cause}"))?;
    Ok(queues)
}

/// Numbers in a list such as `0-3,6`.
fn count(list: &str) -> Option<usize> {
    let mut all = 0usize;
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        all = all.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(all)
}

pub(crate) struct Ring {
    entry: Entry,
    device: Arc<OwnedFd>,
    queue: u16,
    /// The kernel's name for the request that is to be answered.
    commit: Option<u64>,
    /// How the last command ended, if nobody has looked at that yet.
    ended: Option<i32>,
}

/// Keeps the calling thread on the processor whose callers it serves.
fn stay_on(processor: u16) {
    let mut only = CpuSet::new();
    only.set(processor.into());
    if let Err(cause) = sched_setaffinity(None, &only) {
        tracing::debug!(processor, %cause, "a thread of the ring is not kept on its processor");
    }
}

/// Whether a command ended because the mount did.
fn is_over(code: i32) -> bool {
    let over = [Errno::NOTCONN, Errno::CONNABORTED, Errno::NODEV];
    over.iter().any(|errno| code == -errno.raw_os_error())
}

impl Ring {
    /// Gives the kernel an entry for a queue. To be called by the thread that serves.
    pub(crate) fn register(device: Arc<OwnedFd>, queue: u16) -> io::Result<Ring> {
        stay_on(queue);
        let mut ring = Ring {
            entry: Entry::new(DATA_BYTES_MAX as usize)?,
            device,
            queue,
            commit: None,
            ended: None,
        };
        ring.give(abi::RING_REGISTER, 0)?;
        // It ends at once only if it is refused, or a request is there already.
        ring.ended = ring.entry.completion();
        match ring.ended {
            Some(code) if code < 0 => Err(io::Error::from_raw_os_error(-code)),
            _ => Ok(ring),
        }
    }

    fn give(&mut self, code: u32, commit: u64) -> io::Result<()> {
        let command = abi::RingCommand {
            commit,
            queue: self.queue,
            ..abi::RingCommand::default()
        };
        let is_first = code == abi::RING_REGISTER;
        let device = self.device.as_fd();
        self.entry.give(device, code, &command, is_first)
    }

    fn put_header(&mut self, unique: u64, error: i32, payload_len: usize) {
        let header = abi::OutHeader {
            len: (size_of::<abi::OutHeader>() + payload_len) as u32,
            error,
            unique,
        };
        self.entry.put(0, header);
        let mut about: abi::RingEntry = self.entry.get(abi::ring::ENTRY_AT);
        about.payload_len = payload_len as u32;
        self.entry.put(abi::ring::ENTRY_AT, about);
    }
}

impl Line for Ring {
    fn receive(&mut self) -> io::Result<Option<Incoming>> {
        if let Some(commit) = self.commit.take() {
            self.give(abi::RING_COMMIT_AND_FETCH, commit)?;
        }
        let code = match self.ended.take() {
            Some(code) => code,
            None => self.entry.wait()?,
        };
        match code {
            0.. => {}
            // Whatever a command in the middle of the end is told.
            code if is_over(code) || !device::is_alive(&self.device) => return Ok(None),
            code => return Err(io::Error::from_raw_os_error(-code)),
        }
        let header: abi::InHeader = self.entry.get(0);
        let op: [u8; abi::OP_BYTES_MAX] = self.entry.get(abi::ring::OP_AT);
        let about: abi::RingEntry = self.entry.get(abi::ring::ENTRY_AT);
        let payload = self.entry.payload(about.payload_len as usize);
        self.commit = Some(about.commit);
        // Unless it is answered otherwise.
        self.put_header(header.unique, -Errno::IO.raw_os_error(), 0);
        Ok(Some(Incoming::apart(header, &op, payload)))
    }

    fn answer(&mut self, unique: u64, answer: &Answer) -> io::Result<()> {
        let bytes = answer.bytes();
        self.entry.put_payload(bytes)?;
        self.put_header(unique, answer.error(), bytes.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::sched_getaffinity;

    #[test]
    fn a_thread_stays_on_its_processor_where_there_is_one() {
        let stays_on = |processor| {
            let thread = std::thread::spawn(move || {
                stay_on(processor);
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
    fn processors_are_counted() {
        assert_eq!(count("0-1"), Some(2));
        assert_eq!(count("0"), Some(1));
        assert_eq!(count("0-3,8,10-11"), Some(7));
        for wrong in ["", "a", "3-1", "0-", "0,,1", "0-18446744073709551615"] {
            assert_eq!(count(wrong), None, "{wrong}");
        }
    }
}
