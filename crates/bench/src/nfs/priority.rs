//! The processor and the priority of the generator's thread, so that a busy server does not delay it.
//!
//! The generator has a processor for itself, if there are others: it polls, so threads of a server that wait there
//! behind it would be delayed by tens of milliseconds. It takes the processor with the fewest interrupts of devices so far: the
//! kernel ends requests of a disk on the processor that gets its interrupts.
//!
//! SCHED_RR needs the right of root, and `chrt` of util-linux sets it, since this crate calls no system call without a safe
//! wrapper. Without it a lower nice value takes its place. Children do not inherit either, and the drop restores both.

use rustix::process::{getpriority_process, setpriority_process};
use rustix::thread::{
    CpuSet, Pid, current_timer_slack, gettid, sched_getaffinity, sched_setaffinity,
    set_current_timer_slack,
};
use std::collections::BTreeMap;
use std::num::NonZero;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The generator's own processor.
static OWN_PROCESSOR: OnceLock<CpuSet> = OnceLock::new();

/// Leaves a processor to generators: this thread, and processes and threads that it starts, get the others. Call
/// it before the servers start. It does nothing with one processor.
pub fn reserve_generator_processor() {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let interrupts = std::fs::read_to_string("/proc/interrupts").unwrap_or_default();
    let Some((own, others)) = split(&allowed, &interrupts) else {
        return;
    };
    // Without the right to it the generator shares the processors.
    if sched_setaffinity(None, &others).is_ok() {
        // A second call finds fewer processors, and changes nothing.
        let _ = OWN_PROCESSOR.set(own);
    }
}

/// The processor of a set with the fewest interrupts of devices, the last of equal ones, and the others; none if there is only one.
fn split(all: &CpuSet, interrupts: &str) -> Option<(CpuSet, CpuSet)> {
    let counts = device_interrupts(interrupts);
    let count = |processor: &usize| counts.get(processor).copied().unwrap_or(0);
    let processors = (0..CpuSet::MAX_CPU).rev().filter(|&it| all.is_set(it));
    let quietest = processors.min_by_key(count)?;
    let (mut own, mut others) = (CpuSet::new(), *all);
    own.set(quietest);
    others.unset(quietest);
    (others.count() > 0).then_some((own, others))
}

/// Interrupts of devices by processor, from the text of `/proc/interrupts` (`proc_interrupts(5)`). Lines of devices begin with a
/// number.
fn device_interrupts(text: &str) -> BTreeMap<usize, u64> {
    let mut lines = text.lines();
    let heads = lines.next().unwrap_or_default().split_whitespace();
    let processors: Vec<usize> = heads
        .filter_map(|it| it.strip_prefix("CPU")?.parse().ok())
        .collect();
    let mut counts = BTreeMap::new();
    for line in lines {
        let Some((name, rest)) = line.trim_start().split_once(':') else {
            continue;
        };
        if name.parse::<u32>().is_err() {
            continue;
        }
        for (&processor, count) in processors.iter().zip(rest.split_whitespace()) {
            *counts.entry(processor).or_default() += count.parse().unwrap_or(0);
        }
    }
    counts
}

/// The nice value without SCHED_RR.
const NICE: i32 = -10;

/// The scheduling of a generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GeneratorScheduling {
    /// SCHED_RR with the lowest of its priorities.
    RoundRobin,
    /// SCHED_OTHER with [`NICE`].
    Nice,
    /// No right to raise it.
    Unchanged,
}

impl GeneratorScheduling {
    /// Its name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            GeneratorScheduling::RoundRobin => "SCHED_RR, priority 1",
            GeneratorScheduling::Nice => "SCHED_OTHER, nice -10",
            GeneratorScheduling::Unchanged => "SCHED_OTHER, not raised",
        }
    }
}

/// A raised priority and the finest timers of this thread, up to the drop.
pub(crate) struct GeneratorPriority {
    scheduling: GeneratorScheduling,
    thread: Pid,
    nice_before: Option<i32>,
    slack_before: Option<NonZero<u64>>,
    processors_before: Option<CpuSet>,
}

impl GeneratorPriority {
    pub(crate) fn raise() -> GeneratorPriority {
        let thread = gettid();
        let slack_before = current_timer_slack().ok().and_then(NonZero::new);
        // The wait ends late by the slack if the system refuses; the lateness shows it.
        let _ = set_current_timer_slack(Some(NonZero::<u64>::MIN));
        let nice_before = getpriority_process(Some(thread)).ok();
        let scheduling = if change_policy(thread, &["--reset-on-fork", "--rr"], "1") {
            GeneratorScheduling::RoundRobin
        } else if setpriority_process(Some(thread), NICE).is_ok() {
            GeneratorScheduling::Nice
        } else {
            GeneratorScheduling::Unchanged
        };
        let processors_before = OWN_PROCESSOR.get().and_then(|own| {
            let before = sched_getaffinity(None).ok()?;
            sched_setaffinity(None, own).ok().map(|()| before)
        });
        GeneratorPriority {
            scheduling,
            thread,
            nice_before,
            slack_before,
            processors_before,
        }
    }

    pub(crate) fn scheduling(&self) -> GeneratorScheduling {
        self.scheduling
    }
}

impl Drop for GeneratorPriority {
    fn drop(&mut self) {
        // Lowering needs no right, so each call succeeds.
        match (self.scheduling, self.nice_before) {
            (GeneratorScheduling::RoundRobin, _) => {
                change_policy(self.thread, &["--other"], "0");
            }
            (GeneratorScheduling::Nice, Some(before)) => {
                let _ = setpriority_process(Some(self.thread), before);
            }
            _ => {}
        }
        let _ = set_current_timer_slack(self.slack_before);
        if let Some(before) = &self.processors_before {
            let _ = sched_setaffinity(None, before);
        }
    }
}

/// Sets the policy of a thread. Returns whether the system took it.
fn change_policy(thread: Pid, policy: &[&str], priority: &str) -> bool {
    let changed = Command::new("chrt")
        .args(policy)
        .args(["--pid", priority, &thread.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    changed.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The policy of this thread: field 41 of `/proc/PID/stat` (`proc_pid_stat(5)`).
    fn policy() -> Option<u32> {
        let text = std::fs::read_to_string("/proc/thread-self/stat").ok()?;
        let (_, rest) = text.rsplit_once(')')?;
        rest.split_whitespace().nth(38)?.parse().ok()
    }

    #[test]
    fn generator_gets_the_processor_with_the_fewest_interrupts() {
        let set = |processors: &[usize]| {
            let mut set = CpuSet::new();
            processors.iter().for_each(|&it| set.set(it));
            set
        };
        let of_last = "       CPU0  CPU3  CPU5\n  1:  7  0  900  PCI-MSIX 1-edge disk\n 36:  0  2  1  net\nLOC: 9 9999 9 timer\n";
        for (all, interrupts, own, others) in [
            (vec![0, 3, 5], "", 5, vec![0, 3]),
            (vec![0, 3, 5], of_last, 3, vec![0, 5]),
            (vec![0, 5], of_last, 0, vec![5]),
        ] {
            let expected = Some((set(&[own]), set(&others)));
            assert_eq!(split(&set(&all), interrupts), expected, "{interrupts}");
        }
        assert_eq!(split(&set(&[4]), of_last), None);
        assert_eq!(split(&set(&[]), of_last), None);
    }

    #[test]
    fn drop_restores_policy_and_timers() {
        const SCHED_RR: u32 = 2;
        let before = (policy(), current_timer_slack().ok());
        let raised = GeneratorPriority::raise();
        // A thread of SCHED_RR has no slack at all.
        assert!(current_timer_slack().is_ok_and(|slack| slack <= 1));
        let is_rr = raised.scheduling() == GeneratorScheduling::RoundRobin;
        assert_eq!(policy() == Some(SCHED_RR), is_rr);
        drop(raised);
        assert_eq!((policy(), current_timer_slack().ok()), before);
    }
}
