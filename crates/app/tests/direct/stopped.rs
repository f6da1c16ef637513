//! A direct client that is stopped in an operation: others soon continue, and it survives.

use super::stall_bounds::StallCase;
use super::support::until;
use pagemesh_base::resume::{StopReason, stop_reason};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Stops in an operation.
const STOPS: usize = 3;
/// The latest time at which others continue; on an idle machine they do after a tenth of a second.
const GOES_ON_MAX: Duration = Duration::from_secs(20);

/// Asserts that the victim is still stopped and alive, and that it works again after SIGCONT.
fn check_continues(case: &StallCase, victim: &mut super::ChildGuard) {
    let pid = victim.0.id();
    until("it is stopped again", || {
        stop_reason(pid) == Some(StopReason::Signal)
    });
    let before = case.victim_writes();
    kill_process(Pid::from_child(&victim.0), Signal::CONT).unwrap();
    until("it goes on", || case.victim_writes() > before + 50);
    assert!(victim.0.try_wait().unwrap().is_none(), "it lives");
}

fn check(by_kernel: bool, signals: &[Signal]) {
    let Some(case) = StallCase::new() else { return };
    case.await_others();
    let mut victim = case.victim();
    for _ in 0..STOPS {
        for &signal in signals {
            let inside = case.stop_in_operation_by(&victim, signal);
            let began = Instant::now();
            if by_kernel {
                // A request through the kernel needs all of the file.
                case.file.read_exact_at(&mut [0; 4096], 4096).unwrap();
            } else {
                // A slice is deleted once no client is in an operation.
                case.cluster.ok(&["fs", "create", "other", "--size", "24M"]);
                case.cluster.ok(&["fs", "delete", "other"]);
            }
            let took = began.elapsed();
            println!(
                "others went on after {took:?}; it was inside: {}",
                case.is_active(inside)
            );
            assert!(took <= GOES_ON_MAX, "{took:?}");
            check_continues(&case, &mut victim);
            case.await_others();
        }
    }
    victim.kill();
    // Each acknowledged write is there, and both copies are identical.
    case.end();
}

#[test]
fn stopped_client_lives_and_barrier_completes() {
    check(false, &[Signal::STOP, Signal::TSTP]);
}

#[test]
fn stopped_client_lives_and_kernel_io_completes() {
    check(true, &[Signal::STOP, Signal::TSTP]);
}
