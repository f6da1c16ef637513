//! A direct client that is stopped inside of an operation: others go on soon, and it lives.

use super::bounds::Case;
use super::support::until;
use pagemesh_base::resume::{StopReason, stop_reason};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Stops inside of an operation.
const STOPS: usize = 3;
/// How soon others go on, at the latest: after a tenth of a second, on an idle machine.
const GOES_ON_MAX: Duration = Duration::from_secs(20);

/// The victim has stayed stopped, lives, and works again when it is continued.
fn goes_on(case: &Case, victim: &mut super::Child) {
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
    let Some(case) = Case::new() else { return };
    case.await_others();
    let mut victim = case.victim();
    for _ in 0..STOPS {
        for &signal in signals {
            let inside = case.stop_inside_by(&victim, signal);
            let began = Instant::now();
            if by_kernel {
                // A request of the kernel needs all of the file.
                case.file.read_exact_at(&mut [0; 4096], 4096).unwrap();
            } else {
                // A slice is deleted once nobody is inside of an operation.
                case.cluster.ok(&["fs", "create", "other", "--size", "24M"]);
                case.cluster.ok(&["fs", "delete", "other"]);
            }
            let took = began.elapsed();
            println!(
                "others went on after {took:?}; it was inside: {}",
                case.is_inside(inside)
            );
            assert!(took <= GOES_ON_MAX, "{took:?}");
            goes_on(&case, &mut victim);
            case.await_others();
        }
    }
    victim.kill();
    // Each acknowledged write is there, and both copies are the same.
    case.end();
}

#[test]
fn stopped_client_lives_and_a_barrier_goes_on() {
    check(false, &[Signal::STOP, Signal::TSTP]);
}

#[test]
fn stopped_client_lives_and_the_kernel_gets_its_file() {
    check(true, &[Signal::STOP, Signal::TSTP]);
}
