//! A process that stays in an operation is killed once others have waited for it for long, and no
//! other process is.

use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::SliceId;
use pagemesh_base::slice::{BrickControl, SliceRequest, Stamp};
use pagemesh_brick::brick::{Brick, MaintenanceThread};
use pagemesh_brick::file;
use pagemesh_pmem::MappedMedia;
use pagemesh_store::pool_mapping::Handle;
use pagemesh_store::session::{LegSession, Session, write, write_numbered};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use uuid::Uuid;

const SLICE: SliceId = SliceId(Uuid::from_u128(5));
const PAGE: [u8; 4096] = [7; 4096];
const KILLED: i32 = 9;
/// The brick's limit, `OPERATION_LIMIT`.
const OPERATION_LIMIT: Duration = Duration::from_secs(1);
/// The limit for a process that is not stopped; waiters give up after ten seconds.
const UNRESPONSIVE_LIMIT: Duration = Duration::from_secs(8);

fn stamp() -> Stamp {
    Stamp {
        epoch: Epoch(1),
        op: 1,
        open_ops: 0,
    }
}

/// Killed when dropped, in a failing test too.
struct ChildProcess(Child);

impl ChildProcess {
    fn start() -> ChildProcess {
        ChildProcess(
            Command::new("sleep")
                .arg("1000")
                .spawn()
                .expect("sleep runs"),
        )
    }

    /// A field of its `stat` file, by its number in proc(5).
    fn stat(&self, number: usize) -> String {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id()));
        let stat = stat.expect("it is there");
        let (_, rest) = stat.rsplit_once(')').expect("a name in parentheses");
        rest.split_ascii_whitespace()
            .nth(number - 3)
            .expect("a field")
            .into()
    }

    fn stop(&self) {
        let pid = self.0.id().to_string();
        let status = Command::new("kill").args(["-s", "STOP", &pid]).status();
        assert!(status.expect("kill runs").success());
        while self.stat(3) != "T" {
            std::thread::yield_now();
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ended_already = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A brick, its directory and its maintenance thread, and a slice of it.
fn slice() -> (TempDir, Arc<Brick>, MaintenanceThread, Handle) {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let path = dir.path().join("pool");
    file::create(&path, 16 << 20).expect("a pool");
    let (brick, keeper, _) = Brick::open(&path).expect("a brick");
    brick.create(SLICE, 1 << 20).expect("room");
    let (object, _) = brick.attach(SLICE, Epoch(1)).expect("the slice");
    let handle = brick.mapping().handle(object, SLICE).expect("the object");
    (dir, brick, keeper, handle)
}

/// A session registered for the process.
fn session_of(brick: &Brick, process: &ChildProcess) -> u32 {
    let started = process.stat(22).parse().expect("a number");
    let number = brick.open_session(process.0.id(), started);
    number.expect("a session")
}

/// Writes, and stays in the operation with its lock words until the test continues it: it asks for
/// its operation number while it holds them.
fn write_slowly(
    session: &mut Session<MappedMedia>,
    handle: Handle,
    inside: &mpsc::Sender<()>,
    goes_on: &mpsc::Receiver<()>,
) {
    let stamp = || {
        inside.send(()).expect("the test waits");
        goes_on.recv().expect("the test tells");
        stamp()
    };
    let members = &mut [LegSession { session, handle }];
    write_numbered(members, 0, &PAGE, Epoch(1), stamp).expect("room");
}

/// The process of a session that others wait for is killed, whether it `stops` or runs.
fn check_blocking_process_is_ended(stops: bool) {
    let (_dir, brick, keeper, handle) = slice();
    let view = brick.mapping().clone();
    let mut process = ChildProcess::start();
    let own = std::process::id();
    let still = session_of(&brick, &process);
    let other = brick.open_session(own, 0).expect("a session");
    let [mut holder, mut waiter] = [still, other].map(|number| Session::new(view.clone(), number));
    let (inside, is_inside) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel();
    let ended = std::thread::scope(|scope| {
        // Dropped, this lets the session in the operation continue, also from a failing test.
        let go_on = go_on;
        scope.spawn(move || write_slowly(&mut holder, handle, &inside, &goes_on));
        is_inside.recv().expect("it gets there");
        let waits = scope.spawn(move || {
            let session = &mut waiter;
            write(&mut [LegSession { session, handle }], 0, &PAGE, stamp()).expect("room");
        });
        // Longer than the limit of a stalled process; but this one runs.
        let (began, rung) = (Instant::now(), view.control().doorbell_count());
        while began.elapsed() < 2 * OPERATION_LIMIT || view.control().doorbell_count() < rung + 12 {
            std::thread::yield_now();
        }
        assert!(process.0.try_wait().expect("a child").is_none(), "it runs");
        if stops {
            process.stop();
        }
        let stopped = Instant::now();
        let ended = loop {
            // The brick may trace it from this process, too: a wait here would take the tracer's
            // status.
            if process.stat(3) == "Z" {
                break process.0.wait().expect("a child");
            }
            assert!(stopped.elapsed() < UNRESPONSIVE_LIMIT, "it is not killed");
            std::thread::yield_now();
        };
        assert!(!waits.is_finished(), "the lock was freed");
        go_on.send(()).expect("it waits");
        waits.join().expect("no panic");
        ended
    });
    assert_eq!(ended.signal(), Some(KILLED));
    for number in [still, other] {
        brick.close_session(number);
    }
    keeper.stop();
}

#[test]
fn stopped_lock_holder_is_ended() {
    check_blocking_process_is_ended(true);
}

/// Like a process in a frozen container.
#[test]
fn unresponsive_lock_holder_is_ended_before_waiters_give_up() {
    check_blocking_process_is_ended(false);
}

/// A barrier finds a session in an operation that only waits for another's lock words. It kills the
/// process of the other one, which is not stopped either, and started its operation later.
#[test]
fn barrier_ends_lock_holder_and_not_waiter() {
    let (_dir, brick, keeper, handle) = slice();
    let view = brick.mapping().clone();
    let mut processes = [ChildProcess::start(), ChildProcess::start()];
    let numbers = [0, 1].map(|which: usize| session_of(&brick, &processes[which]));
    assert!(numbers[0] < numbers[1], "the waiter is found first");
    let [mut waiter, mut holder] = numbers.map(|number| Session::new(view.clone(), number));
    let (inside, is_inside) = mpsc::channel();
    let (go_on, goes_on) = mpsc::channel();
    std::thread::scope(|scope| {
        let go_on = go_on;
        scope.spawn(move || write_slowly(&mut holder, handle, &inside, &goes_on));
        is_inside.recv().expect("it gets there");
        let rung = view.control().doorbell_count();
        let waits = scope.spawn(move || {
            let session = &mut waiter;
            write(&mut [LegSession { session, handle }], 0, &PAGE, stamp())
        });
        // A session rings again and again while it waits for a lock; then it is past the check of the
        // epoch. It may also ring once before that, for frames.
        let began = Instant::now();
        while view.control().doorbell_count() < rung + 4 {
            assert!(began.elapsed() < UNRESPONSIVE_LIMIT, "it does not wait");
            std::thread::yield_now();
        }
        let barrier = scope.spawn(|| {
            let epoch = Epoch(2);
            brick.execute_as_owner(
                SLICE,
                epoch,
                SliceRequest::RaiseEpoch {
                    epoch,
                    lost_since: Epoch(0),
                },
            )
        });
        let began = Instant::now();
        let ended = loop {
            assert!(began.elapsed() < UNRESPONSIVE_LIMIT, "no process is killed");
            let ended = processes
                .each_mut()
                .map(|process| process.0.try_wait().expect("a child"));
            if ended.iter().any(Option::is_some) {
                break ended;
            }
            std::thread::yield_now();
        };
        let signals = ended.map(|ended| ended.and_then(|ended| ended.signal()));
        assert_eq!(signals, [None, Some(KILLED)]);
        go_on.send(()).expect("it waits");
        // The session entered the operation before the epoch was raised, and may finish.
        waits.join().expect("no panic").expect("the lock");
        brick.close_session(numbers[1]);
        barrier.join().expect("no panic").expect("no operation");
    });
    brick.close_session(numbers[0]);
    keeper.stop();
}
