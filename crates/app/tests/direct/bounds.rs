//! How long others wait for a guest that dies, or stands still, inside of an operation.

use super::beside::{Model, PAGES, Programs, prepare};
use super::rows::joined;
use super::support::mounted::{self, Mounted};
use super::support::{Cluster, until};
use super::{Child, Direct, direct, filled, guest};
use pagemesh_volume::direct_access::DirectSegment;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Guests that are killed inside of an operation.
const KILLS: usize = 20;
/// From the signal on, for half of them: cleaning up takes a millisecond or two, and the end
/// of a process some more.
const CLEAR_MAX: Duration = Duration::from_millis(50);
/// From one acknowledgement of another guest to its next, whatever happens to the one.
const GAP_MAX: Duration = Duration::from_secs(1);
/// Guests that stand still inside of an operation.
const STILLS: usize = 3;
/// From one acknowledgement of another guest to its next beside one that stands still, for
/// half of them: far below the 8 s after which that one is ended (`LATE_MAX` of the
/// brick), whatever it holds up.
const HELD_MAX: Duration = Duration::from_millis(250);
/// When one that a debugger holds is ended, and cleaned up behind, at the latest: the brick does
/// so 8 s after another client has begun to wait for its page, the mount 15 s after a request came
/// by the kernel (`LATE_MAX` of both).
const ENDED_MAX: Duration = Duration::from_secs(30);
/// What the others rest between two writes, so that processors are left.
const REST: Duration = Duration::from_micros(20);
/// What the others write beside one that stands still, at least: no checkpoint passes that
/// one, and the lanes of these pools have 1024 lines, of which a write takes one.
const LANES: u64 = 2 * 1024;
/// What an operation takes that waits for nobody, many times over.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Pages whose lock words are not the same: the peer goes on while the victim has its own.
const VICTIM: [u64; 3] = [0, 0, PAGES];
const PEER: [u64; 3] = [1, 40, PAGES];
/// Of another file: all pages.
const FAR: [u64; 3] = [0, 0, 1];

/// A row, and what its guest said when it went in.
pub type Inside = (usize, u64);

/// One guest that dies or stands still, and a peer, write pages of a file; another one writes
/// a file of its own.
///
/// In the order of its end: what lies in the mount's directory can be removed only once it is
/// none.
pub struct Case {
    peer: Child,
    far: Child,
    pub file: File,
    mount: Mounted,
    programs: Programs,
    segment: DirectSegment,
    model: Model,
    far_model: Model,
    pub cluster: Cluster,
}

impl Case {
    pub fn new() -> Option<Case> {
        let cluster = mounted::cluster(&[256, 256], "200M")?;
        let mount = Mounted::by(&cluster, "files", "map", "auto");
        let programs = Programs::build(&cluster);
        let file = prepare(&mount, "file");
        prepare(&mount, "far");
        let (model, far_model) = (Model::new(&cluster, "model"), Model::new(&cluster, "other"));
        let peer = programs.start_resting(&mount.path("file"), &model, PEER, REST);
        let far = programs.start_resting(&mount.path("far"), &far_model, FAR, REST);
        let (.., segment) = joined(&mount);
        Some(Case {
            segment,
            cluster,
            mount,
            programs,
            file,
            model,
            far_model,
            peer,
            far,
        })
    }

    pub fn victim(&self) -> Child {
        let path = self.mount.path("file");
        self.programs.start_guest(&path, &self.model, VICTIM)
    }

    fn writes(&self) -> (u64, u64) {
        (self.peer_writes(), self.far_model.did(FAR[0]).writes)
    }

    fn peer_writes(&self) -> u64 {
        self.model.did(PEER[0]).writes
    }

    pub fn victim_writes(&self) -> u64 {
        self.model.did(VICTIM[0]).writes
    }

    /// Both others go on from now on.
    pub fn await_others(&self) {
        let before = self.writes();
        until("the others go on", || {
            let now = self.writes();
            now.0 > before.0 + 50 && now.1 > before.1 + 50
        });
    }

    /// Stops a guest, again and again, until it stands still inside of an operation on the
    /// file.
    fn stop_inside(&self, victim: &Child) -> Inside {
        self.stop_inside_by(victim, Signal::STOP)
    }

    pub fn stop_inside_by(&self, victim: &Child, stop: Signal) -> Inside {
        let pid = Pid::from_child(&victim.0);
        let ino = self.file.metadata().unwrap().ino();
        let mut found = None;
        until("it stands still inside of an operation", || {
            let before = self.model.did(VICTIM[0]).writes;
            until("it works", || self.model.did(VICTIM[0]).writes > before);
            kill_process(pid, stop).unwrap();
            until("it is stopped", || is_stopped(victim));
            let active = self.segment.active_ops();
            let of_file = active.filter(|(_, place)| place.file == ino);
            let inside = of_file.map(|(row, _)| (row, self.segment.row(row).op_sequence()));
            let inside: Vec<Inside> = inside.collect();
            // The peer leaves what it is inside of meanwhile.
            let (peer, looked) = (self.peer_writes(), Instant::now());
            while self.peer_writes() < peer + 5 && looked.elapsed() < AT_ONCE {
                std::thread::yield_now();
            }
            let goes_on = self.peer_writes() >= peer + 5;
            let stays = |&(row, said): &Inside| self.segment.row(row).op_sequence() == said;
            found = inside.into_iter().find(stays).filter(|_| goes_on);
            if found.is_none() {
                kill_process(pid, Signal::CONT).unwrap();
            }
            found.is_some()
        });
        found.unwrap()
    }

    pub fn is_inside(&self, (row, said): Inside) -> bool {
        self.segment.row(row).op_sequence() == said
    }

    fn longest(&self) -> [Duration; 2] {
        let all = [self.model.did(PEER[0]), self.far_model.did(FAR[0])];
        all.map(|did| Duration::from_nanos(did.longest_ns))
    }

    fn forget_longest(&self) {
        self.model.forget_longest(PEER[0]);
        self.far_model.forget_longest(FAR[0]);
    }

    pub fn end(mut self) {
        for other in [&mut self.peer, &mut self.far] {
            assert!(other.0.try_wait().unwrap().is_none(), "it found a fault");
            other.kill();
        }
        self.model.check(&self.file);
        drop(self.file);
        self.mount.stop(&self.cluster);
        self.cluster.check_identical("files");
    }
}

/// Traces a process that is stopped, as a debugger does, until this is dropped. So nobody lets it run.
pub struct Debugger(std::process::Child);

impl Debugger {
    fn attach(victim: &Child) -> Debugger {
        const TRACES: &str = r#"
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[1])
assert libc.ptrace(0x4206, pid, None, None) == 0, ctypes.get_errno()
os.waitpid(pid, 0x40000000)
print('traced', flush=True)
sys.stdin.read()
"#;
        let mut command = std::process::Command::new("python3");
        command.args(["-c", TRACES, &victim.0.id().to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut said)
            .unwrap();
        assert_eq!(said, "traced\n");
        Debugger(child)
    }
}

impl Drop for Debugger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// As proc(5) has it, behind the name in parentheses.
fn is_stopped(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.0.id())).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('T')
}

#[test]
fn a_dead_guest_is_cleaned_up_behind_in_milliseconds() {
    let Some(case) = Case::new() else { return };
    case.await_others();
    case.forget_longest();
    let mut took: Vec<Duration> = (0..KILLS)
        .map(|_| {
            let mut victim = case.victim();
            let inside = case.stop_inside(&victim);
            let began = Instant::now();
            victim.0.kill().unwrap();
            while case.is_inside(inside) {
                assert!(began.elapsed() < ENDED_MAX, "nobody cleans up");
                std::thread::yield_now();
            }
            let took = began.elapsed();
            victim.0.wait().unwrap();
            case.await_others();
            took
        })
        .collect();
    took.sort_unstable();
    let (median, longest) = (took[KILLS / 2], case.longest());
    println!("cleared after {took:?}; the others waited {longest:?} at most");
    assert!(median <= CLEAR_MAX, "cleared after {median:?}: {took:?}");
    assert!(longest.iter().all(|gap| *gap <= GAP_MAX), "{longest:?}");
    case.end();
}

/// A guest that writes the page that the victim is writing, the same bytes.
fn write_same(case: &Case, direct: &Direct) -> Option<usize> {
    let seq = case.model.acknowledged(VICTIM[1]) + 1;
    direct.write(&filled(VICTIM[1], seq), VICTIM[1] * 4096)
}

/// Stops a guest until another one that writes the same page waits for it.
fn stop_in_the_way<'s, 'e>(
    scope: &'s std::thread::Scope<'s, 'e>,
    case: &'e Case,
    direct: &'e Direct,
    victim: &Child,
) -> (Inside, ScopedJoinHandle<'s, Option<usize>>, Debugger) {
    let mut found = None;
    until("another one waits for it", || {
        let inside = case.stop_inside(victim);
        let debugger = Debugger::attach(victim);
        let same = scope.spawn(|| write_same(case, direct));
        let began = Instant::now();
        while !same.is_finished() && began.elapsed() < AT_ONCE {
            std::thread::yield_now();
        }
        if same.is_finished() {
            // It holds nothing yet, or no more.
            drop(debugger);
            kill_process(Pid::from_child(&victim.0), Signal::CONT).unwrap();
            same.join().unwrap();
            return false;
        }
        found = Some((inside, same, debugger));
        true
    });
    found.unwrap()
}

/// One stands still, and another one waits for its page until it is ended. The longest that
/// those had to wait who need other pages, and whether they filled their lanes beside it.
fn stand_still(case: &Case, direct: &Direct) -> ([Duration; 2], bool) {
    let mut victim = case.victim();
    std::thread::scope(|scope| {
        let (inside, same, debugger) = stop_in_the_way(scope, case, direct, &victim);
        case.forget_longest();
        let (before, began) = (case.writes(), Instant::now());
        let mut have_filled = false;
        while case.is_inside(inside) && !have_filled {
            assert!(began.elapsed() < ENDED_MAX, "nobody ends it");
            let now = case.writes();
            have_filled = now.0 > before.0 + LANES && now.1 > before.1 + LANES;
            std::thread::yield_now();
        }
        let longest = case.longest();
        let has_stayed = case.is_inside(inside);
        while case.is_inside(inside) {
            assert!(began.elapsed() < ENDED_MAX, "nobody ends it");
            std::thread::yield_now();
        }
        println!(
            "{have_filled}, waited {longest:?}, it was ended after {:?}",
            began.elapsed()
        );
        drop(debugger);
        let ended = victim.0.wait().unwrap();
        assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()));
        let written = same.join().unwrap();
        assert!(written.is_none_or(|bytes| bytes == 4096), "{written:?}");
        (longest, have_filled && has_stayed)
    })
}

/// A case, and a guest in this process.
fn with_guest() -> Option<(Case, Direct)> {
    let case = Case::new()?;
    let direct = direct(guest(), &case.file);
    let mut bytes = [0; 4096];
    until("guests are let in", || direct.read(&mut bytes, 0).is_some());
    case.await_others();
    Some((case, direct))
}

#[test]
fn who_stands_still_is_in_the_way_of_one_page_and_not_for_long() {
    let Some((case, direct)) = with_guest() else {
        return;
    };
    let mut gaps = [Vec::new(), Vec::new()];
    let mut filled = 0;
    for _ in 0..STILLS {
        let (longest, have_filled) = stand_still(&case, &direct);
        gaps.iter_mut()
            .zip(longest)
            .for_each(|(gaps, gap)| gaps.push(gap));
        filled += usize::from(have_filled);
        case.await_others();
    }
    for gaps in &mut gaps {
        gaps.sort_unstable();
        let median = gaps[STILLS / 2];
        assert!(median <= HELD_MAX, "others waited {median:?}: {gaps:?}");
    }
    assert!(
        filled > 0,
        "nobody filled a lane beside one that stands still"
    );
    drop(direct);
    case.end();
}

#[test]
fn who_stands_still_is_in_the_way_of_the_kernel_not_for_long() {
    let Some((case, direct)) = with_guest() else {
        return;
    };
    let mut victim = case.victim();
    let inside = case.stop_inside(&victim);
    let debugger = Debugger::attach(&victim);
    case.forget_longest();
    // Who comes by the kernel needs all of the file.
    let began = Instant::now();
    case.file.read_exact_at(&mut [0; 4096], 4096).unwrap();
    let (waited, longest) = (began.elapsed(), case.longest());
    println!("{waited:?} by the kernel, {longest:?} meanwhile");
    assert!(waited <= ENDED_MAX, "{waited:?}");
    drop(debugger);
    let ended = victim.0.wait().unwrap();
    assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()));
    assert!(!case.is_inside(inside), "it is cleaned up behind");
    assert!(longest[1] <= GAP_MAX, "another file waited {longest:?}");
    case.await_others();
    drop(direct);
    case.end();
}
