//! Whether the kernel has FUSE over io_uring (`Documentation/filesystems/fuse/fuse-io-uring.rst`),
//! and how many queues, entries and threads a mount gets. The threads are in `worker_pool`.

use crate::memory::{WaitMode, make_ring};
use crate::worker_pool::EntryCounts;
use rustix::thread::{CpuSet, sched_setaffinity};

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

/// Pins the calling thread to the processor of the callers that it serves.
pub(crate) fn pin_to_cpu(processor: u16) {
    let mut only = CpuSet::new();
    only.set(processor.into());
    if let Err(cause) = sched_setaffinity(None, &only) {
        tracing::debug!(processor, %cause, "cannot pin a thread of the ring to its processor");
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
