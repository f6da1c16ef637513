//! Serves a program on the program's own processor.
//!
//! A program that makes one call after the other sleeps while its request is served, and the
//! serving thread sleeps while the program runs. On one processor each wakes the other by a context
//! switch. On two, each must interrupt the other processor, which costs more than most calls on
//! names take. So a thread that gets its requests from one task, and not only reads and writes, is
//! pinned to the processor of that task. The first request of another task ends that. Reads and
//! writes alone do not begin it: a program may have many of them in flight, and several processors
//! serve these sooner.
//!
//! Each serving thread decides for itself, by its own requests. The ring does not need this: its
//! threads are pinned to the processors of their callers in any case.

use crate::abi::op;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Requests of one task after which a thread checks the task's processor. A check takes as long as
/// a few requests.
const REQUESTS_PER_CHECK: u32 = 64;
/// Minimum of these requests that are not reads or writes.
const NAME_REQUESTS_MIN: u32 = REQUESTS_PER_CHECK / 4;
/// The field of `/proc/TASK/stat` with the processor, counted behind the name (proc_pid_stat(5):
/// field 39, and the name is field 2).
const PROCESSOR_FIELD: usize = 39 - 3;

/// The processor that one serving thread runs on.
#[derive(Debug, Default)]
pub(crate) struct CpuAffinity {
    /// The task with the counted requests; 0: none.
    task: u32,
    requests: u32,
    /// Requests that are not reads or writes.
    name_requests: u32,
    /// The processor that the thread is pinned to, and its previous affinity.
    pinned: Option<(usize, CpuSet)>,
}

impl CpuAffinity {
    /// Counts a request of a task, for the thread that serves it.
    pub(crate) fn record_request(&mut self, task: u32, opcode: u32) {
        // The kernel itself sent it, for no task.
        if task == 0 {
            return;
        }
        if task != self.task {
            self.unpin();
            *self = CpuAffinity {
                task,
                ..CpuAffinity::default()
            };
        }
        self.requests += 1;
        self.name_requests += u32::from(!matches!(opcode, op::READ | op::WRITE));
        if self.requests == REQUESTS_PER_CHECK {
            let processor = (self.name_requests >= NAME_REQUESTS_MIN).then(|| processor_of(task));
            match processor.flatten() {
                Some(processor) => self.pin_to(processor),
                None => self.unpin(),
            }
            (self.requests, self.name_requests) = (0, 0);
        }
    }

    fn pin_to(&mut self, processor: usize) {
        if matches!(self.pinned, Some((at, _)) if at == processor) || processor >= CpuSet::MAX_CPU {
            return;
        }
        let before = match self.pinned.take() {
            Some((_, before)) => Ok(before),
            None => sched_getaffinity(None),
        };
        let Ok(before) = before else { return };
        let mut only = CpuSet::new();
        only.set(processor);
        // This process may not be allowed to run on that processor.
        self.pinned = Some((processor, before));
        if !before.is_set(processor) || sched_setaffinity(None, &only).is_err() {
            self.unpin();
        }
    }

    /// Restores the thread's affinity.
    fn unpin(&mut self) {
        if let Some((_, before)) = self.pinned.take()
            && let Err(cause) = sched_setaffinity(None, &before)
        {
            tracing::debug!(%cause, "cannot restore the affinity of a serving thread; it stays on one processor");
        }
    }
}

/// The processor that a task ran on last, if this process may know it.
fn processor_of(task: u32) -> Option<usize> {
    Pid::from_raw(task.cast_signed())?;
    let stat = std::fs::read_to_string(format!("/proc/{task}/stat")).ok()?;
    // The name may hold any characters.
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(PROCESSOR_FIELD)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::gettid;

    fn current_task() -> u32 {
        gettid().as_raw_nonzero().get().cast_unsigned()
    }

    fn allowed_cpus() -> usize {
        sched_getaffinity(None).expect("it is told").count() as usize
    }

    fn record_many(near: &mut CpuAffinity, task: u32, opcode: u32) {
        (0..REQUESTS_PER_CHECK).for_each(|_| near.record_request(task, opcode));
    }

    #[test]
    fn name_requests_of_one_task_run_on_its_cpu() {
        let all = allowed_cpus();
        let (mut near, task) = (CpuAffinity::default(), current_task());
        record_many(&mut near, task, op::LOOKUP);
        assert_eq!(allowed_cpus(), 1);
        near.record_request(0, op::FORGET);
        assert_eq!(
            allowed_cpus(),
            1,
            "the kernel's own requests change nothing"
        );
        near.record_request(task + 1, op::LOOKUP);
        assert_eq!(allowed_cpus(), all, "another task ends it");
    }

    #[test]
    fn reads_and_writes_do_not_pin_the_thread() {
        let all = allowed_cpus();
        let (mut near, task) = (CpuAffinity::default(), current_task());
        record_many(&mut near, task, op::WRITE);
        assert_eq!(allowed_cpus(), all);
        record_many(&mut near, task, op::LOOKUP);
        record_many(&mut near, task, op::READ);
        assert_eq!(allowed_cpus(), all, "and end it");
    }

    #[test]
    fn exited_task_does_not_pin_the_thread() {
        let all = allowed_cpus();
        // Linux gives no task a number beyond this one.
        record_many(&mut CpuAffinity::default(), (1 << 22) + 1, op::LOOKUP);
        assert_eq!(allowed_cpus(), all);
    }
}
