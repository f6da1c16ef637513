//! The memory of server processes.

use super::setup::NfsTarget;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// From one look at the memory to the next. A look walks the page tables of mapped pools, which takes some 10 ms.
pub(super) const MEMORY_INTERVAL: Duration = Duration::from_secs(1);
/// From one look at the end of the measurement to the next.
const END_PAUSE: Duration = Duration::from_millis(25);

/// Memory of processes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryBytes {
    /// All resident pages, also of mapped pools.
    pub(super) resident: u64,
    /// Pages without a file.
    pub(super) anonymous: u64,
}

/// The memory of processes by `Rss` and `Anonymous` of `/proc/PID/smaps_rollup` (`proc_pid_smaps(5)`). A process that has ended
/// has none.
pub(super) fn memory_bytes(pids: &[u32]) -> MemoryBytes {
    let mut sum = MemoryBytes::default();
    for pid in pids {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"));
        let text = text.unwrap_or_default();
        sum.resident += field_bytes(&text, "Rss:");
        sum.anonymous += field_bytes(&text, "Anonymous:");
    }
    sum
}

fn field_bytes(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

/// The process that serves a target, without the bricks.
pub(super) fn server_pids(target: &NfsTarget) -> &[u32] {
    &target.pids[target.pids.len().saturating_sub(1)..]
}

/// Runs a measurement, and looks at the anonymous memory of processes meanwhile.
pub(super) fn with_memory<T>(pids: &[u32], measure: impl FnOnce() -> T) -> (T, Vec<u64>) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sampler = scope.spawn(|| {
            let (mut samples, mut next) = (Vec::new(), Instant::now());
            while !is_over.load(Ordering::Relaxed) {
                if Instant::now() >= next {
                    samples.push(memory_bytes(pids).anonymous);
                    next += MEMORY_INTERVAL;
                }
                std::thread::sleep(END_PAUSE);
            }
            samples
        });
        let result = measure();
        is_over.store(true, Ordering::Relaxed);
        (result, sampler.join().unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_this_process_is_sampled() {
        let pid = std::process::id();
        let ((), samples) = with_memory(&[pid], || {
            // The sampler has looked at least once when it has been joined.
            while memory_bytes(&[pid]).anonymous == 0 {}
        });
        assert!(samples.iter().all(|bytes| *bytes > 0), "{samples:?}");
        assert_eq!(memory_bytes(&[u32::MAX]), MemoryBytes::default());
        let all = memory_bytes(&[pid]);
        assert!(all.resident >= all.anonymous, "{all:?}");
    }

    #[test]
    fn fields_of_smaps_are_found() {
        let text = "Rss:                4096 kB\nAnonymous:             8 kB\n";
        assert_eq!(field_bytes(text, "Rss:"), 4 << 20);
        assert_eq!(field_bytes(text, "Anonymous:"), 8192);
        assert_eq!(field_bytes(text, "Pss:"), 0);
    }
}
