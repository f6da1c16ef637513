//! How long other processes wait for a direct client that dies or stalls in an operation.

use super::client_rows::join_mount;
use super::support::mounted::{self, TestMount};
use super::support::{Cluster, until};
use super::uncaught_writers::{PAGES, PageModel, WriterPrograms, prepare};
use super::{ChildGuard, Direct, direct_file, filled, new_client};
use pagemesh_volume::direct_access::DirectSegment;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Direct clients that are killed in an operation.
const KILLS: usize = 20;
/// Median time from the signal to the end of the cleanup: the cleanup takes a millisecond or two,
/// and the end of a process some more.
const CLEANUP_MAX: Duration = Duration::from_millis(50);
/// Time between two acknowledgements of another direct client, also while the victim dies or
/// stalls.
const GAP_MAX: Duration = Duration::from_secs(1);
/// Direct clients that are stalled in an operation.
const STALLS: usize = 3;
/// Median time between two acknowledgements of another direct client while the victim is stalled.
/// It is far below the 8 s after which the brick kills a blocking victim (`UNRESPONSIVE_LIMIT` of
/// the brick).
const WAIT_MAX: Duration = Duration::from_millis(250);
/// Latest time for the kill and the cleanup of a client that a debugger holds. The brick kills it
/// 8 s after another client has begun to wait for its page, the mount 15 s after a request through
/// the kernel (`OPERATION_TIME_MAX`).
const ENDED_MAX: Duration = Duration::from_secs(30);
/// Pause of the other clients between two writes, so that processors are left.
const WRITE_PAUSE: Duration = Duration::from_micros(20);
/// Least number of writes of the others while the victim is stalled: no checkpoint passes the
/// victim. The journals of these pools have 1024 lines, and a write takes one line.
const JOURNAL_LINES: u64 = 2 * 1024;
/// Many times the duration of an operation that does not wait.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Pages with different lock words: the peer writes on while the victim holds its own.
const VICTIM: [u64; 3] = [0, 0, PAGES];
const PEER: [u64; 3] = [1, 40, PAGES];
/// All pages of another file.
const FAR: [u64; 3] = [0, 0, 1];

/// A row, and the operation sequence number that its client stored at the start of the operation.
pub type ActiveRow = (usize, u64);

/// A direct client that dies or stalls and a peer write pages of one file; another client writes a
/// file of its own.
///
/// The fields are in drop order: files in the mount's directory can be removed only after the
/// unmount.
pub struct StallCase {
    peer_writer: ChildGuard,
    far_writer: ChildGuard,
    pub file: File,
    mount: TestMount,
    programs: WriterPrograms,
    segment: DirectSegment,
    model: PageModel,
    far_model: PageModel,
    pub cluster: Cluster,
}

impl StallCase {
    pub fn new() -> Option<StallCase> {
        let cluster = mounted::cluster(&[256, 256], "200M")?;
        let mount = TestMount::with_fuse(&cluster, "files", "map", "auto");
        let programs = WriterPrograms::build(&cluster);
        let file = prepare(&mount, "file");
        prepare(&mount, "far");
        let (model, far_model) = (
            PageModel::new(&cluster, "model"),
            PageModel::new(&cluster, "other"),
        );
        let peer = programs.start_paced(&mount.path("file"), &model, PEER, WRITE_PAUSE);
        let far = programs.start_paced(&mount.path("far"), &far_model, FAR, WRITE_PAUSE);
        let (.., segment) = join_mount(&mount);
        Some(StallCase {
            segment,
            cluster,
            mount,
            programs,
            file,
            model,
            far_model,
            peer_writer: peer,
            far_writer: far,
        })
    }

    pub fn victim(&self) -> ChildGuard {
        let path = self.mount.path("file");
        self.programs.start_direct(&path, &self.model, VICTIM)
    }

    fn writes(&self) -> (u64, u64) {
        (self.peer_writes(), self.far_model.stats(FAR[0]).writes)
    }

    fn peer_writes(&self) -> u64 {
        self.model.stats(PEER[0]).writes
    }

    pub fn victim_writes(&self) -> u64 {
        self.model.stats(VICTIM[0]).writes
    }

    /// Waits until both other clients have written again.
    pub fn await_others(&self) {
        let before = self.writes();
        until("the others go on", || {
            let now = self.writes();
            now.0 > before.0 + 50 && now.1 > before.1 + 50
        });
    }

    /// Stops a direct client again and again, until it is stalled in an operation on the file.
    fn stop_in_operation(&self, victim: &ChildGuard) -> ActiveRow {
        self.stop_in_operation_by(victim, Signal::STOP)
    }

    pub fn stop_in_operation_by(&self, victim: &ChildGuard, stop: Signal) -> ActiveRow {
        let pid = Pid::from_child(&victim.0);
        let ino = self.file.metadata().unwrap().ino();
        let mut found = None;
        until("it is stalled in an operation", || {
            let before = self.model.stats(VICTIM[0]).writes;
            until("it works", || self.model.stats(VICTIM[0]).writes > before);
            kill_process(pid, stop).unwrap();
            until("it is stopped", || is_stopped(victim));
            let active = self.segment.active_ops();
            let of_file = active.filter(|(_, place)| place.file == ino);
            let inside = of_file.map(|(row, _)| (row, self.segment.row(row).op_sequence()));
            let inside: Vec<ActiveRow> = inside.collect();
            // Meanwhile the peer leaves the operation that it may be in.
            let (peer, looked) = (self.peer_writes(), Instant::now());
            while self.peer_writes() < peer + 5 && looked.elapsed() < AT_ONCE {
                std::thread::yield_now();
            }
            let goes_on = self.peer_writes() >= peer + 5;
            let stays = |&(row, said): &ActiveRow| self.segment.row(row).op_sequence() == said;
            found = inside.into_iter().find(stays).filter(|_| goes_on);
            if found.is_none() {
                kill_process(pid, Signal::CONT).unwrap();
            }
            found.is_some()
        });
        found.unwrap()
    }

    pub fn is_active(&self, (row, said): ActiveRow) -> bool {
        self.segment.row(row).op_sequence() == said
    }

    fn longest(&self) -> [Duration; 2] {
        let all = [self.model.stats(PEER[0]), self.far_model.stats(FAR[0])];
        all.map(|did| Duration::from_nanos(did.longest_ns))
    }

    fn forget_longest(&self) {
        self.model.reset_longest(PEER[0]);
        self.far_model.reset_longest(FAR[0]);
    }

    pub fn end(mut self) {
        for other in [&mut self.peer_writer, &mut self.far_writer] {
            assert!(other.0.try_wait().unwrap().is_none(), "it found a fault");
            other.kill();
        }
        self.model.check(&self.file);
        drop(self.file);
        self.mount.stop(&self.cluster);
        self.cluster.check_identical("files");
    }
}

/// Traces a stopped process, as a debugger does, until this value is dropped. No other process can
/// continue it meanwhile.
pub struct Debugger(std::process::Child);

impl Debugger {
    fn attach(victim: &ChildGuard) -> Debugger {
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

/// The state is after the name in parentheses; see proc(5).
fn is_stopped(child: &ChildGuard) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.0.id())).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('T')
}

#[test]
fn dead_client_is_cleaned_up_in_milliseconds() {
    let Some(case) = StallCase::new() else { return };
    case.await_others();
    case.forget_longest();
    let mut took: Vec<Duration> = (0..KILLS)
        .map(|_| {
            let mut victim = case.victim();
            let inside = case.stop_in_operation(&victim);
            let began = Instant::now();
            victim.0.kill().unwrap();
            while case.is_active(inside) {
                assert!(began.elapsed() < ENDED_MAX, "there was no cleanup");
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
    assert!(median <= CLEANUP_MAX, "cleared after {median:?}: {took:?}");
    assert!(longest.iter().all(|gap| *gap <= GAP_MAX), "{longest:?}");
    case.end();
}

/// A direct client that writes the same bytes to the page that the victim is writing.
fn write_same(case: &StallCase, direct: &Direct) -> Option<usize> {
    let seq = case.model.acknowledged(VICTIM[1]) + 1;
    direct.write(&filled(VICTIM[1], seq), VICTIM[1] * 4096)
}

/// Stops a direct client in a state in which another writer of the same page waits for it.
fn stop_blocking_writer<'s, 'e>(
    scope: &'s std::thread::Scope<'s, 'e>,
    case: &'e StallCase,
    direct: &'e Direct,
    victim: &ChildGuard,
) -> (ActiveRow, ScopedJoinHandle<'s, Option<usize>>, Debugger) {
    let mut found = None;
    until("another one waits for it", || {
        let inside = case.stop_in_operation(victim);
        let debugger = Debugger::attach(victim);
        let same = scope.spawn(|| write_same(case, direct));
        let began = Instant::now();
        while !same.is_finished() && began.elapsed() < AT_ONCE {
            std::thread::yield_now();
        }
        if same.is_finished() {
            // The victim does not hold the page yet, or any more.
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

/// Stalls the victim while another client waits for its page, until the brick kills the victim.
/// Returns the longest waits of the clients that need other pages, and whether they filled their
/// journals meanwhile.
fn stall_victim(case: &StallCase, direct: &Direct) -> ([Duration; 2], bool) {
    let mut victim = case.victim();
    std::thread::scope(|scope| {
        let (inside, same, debugger) = stop_blocking_writer(scope, case, direct, &victim);
        case.forget_longest();
        let (before, began) = (case.writes(), Instant::now());
        let mut have_filled = false;
        while case.is_active(inside) && !have_filled {
            assert!(began.elapsed() < ENDED_MAX, "the victim was not killed");
            let now = case.writes();
            have_filled = now.0 > before.0 + JOURNAL_LINES && now.1 > before.1 + JOURNAL_LINES;
            std::thread::yield_now();
        }
        let longest = case.longest();
        let has_stayed = case.is_active(inside);
        while case.is_active(inside) {
            assert!(began.elapsed() < ENDED_MAX, "the victim was not killed");
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

/// A test case, and a direct client in this process.
fn with_client() -> Option<(StallCase, Direct)> {
    let case = StallCase::new()?;
    let direct = direct_file(new_client(), &case.file);
    let mut bytes = [0; 4096];
    until("direct access is allowed", || {
        direct.read(&mut bytes, 0).is_some()
    });
    case.await_others();
    Some((case, direct))
}

#[test]
fn stalled_client_blocks_one_page_briefly() {
    let Some((case, direct)) = with_client() else {
        return;
    };
    let mut gaps = [Vec::new(), Vec::new()];
    let mut filled = 0;
    for _ in 0..STALLS {
        let (longest, have_filled) = stall_victim(&case, &direct);
        gaps.iter_mut()
            .zip(longest)
            .for_each(|(gaps, gap)| gaps.push(gap));
        filled += usize::from(have_filled);
        case.await_others();
    }
    for gaps in &mut gaps {
        gaps.sort_unstable();
        let median = gaps[STALLS / 2];
        assert!(median <= WAIT_MAX, "others waited {median:?}: {gaps:?}");
    }
    assert!(
        filled > 0,
        "no client filled its journal while the victim was stalled"
    );
    drop(direct);
    case.end();
}

#[test]
fn stalled_client_blocks_kernel_io_briefly() {
    let Some((case, direct)) = with_client() else {
        return;
    };
    let mut victim = case.victim();
    let inside = case.stop_in_operation(&victim);
    let debugger = Debugger::attach(&victim);
    case.forget_longest();
    // A request through the kernel needs all of the file.
    let began = Instant::now();
    case.file.read_exact_at(&mut [0; 4096], 4096).unwrap();
    let (waited, longest) = (began.elapsed(), case.longest());
    println!("{waited:?} by the kernel, {longest:?} meanwhile");
    assert!(waited <= ENDED_MAX, "{waited:?}");
    drop(debugger);
    let ended = victim.0.wait().unwrap();
    assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()));
    assert!(!case.is_active(inside), "it is cleaned up behind");
    assert!(longest[1] <= GAP_MAX, "another file waited {longest:?}");
    case.await_others();
    drop(direct);
    case.end();
}
