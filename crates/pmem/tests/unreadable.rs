//! Memory that cannot be read: the end of a file in memory is truncated below a mapping.

use pagemesh_base::units::PAGE_BYTES;
use pagemesh_pmem::unreadable::{self, PAGES_MAX, PATTERN};
use pagemesh_pmem::{MappedMedia, Media};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

const PAGES: usize = 100;

/// A mapping with only `left` pages left, each filled with its number plus one.
fn truncated_mapping(left: usize) -> MappedMedia {
    let file = tempfile::Builder::new()
        .prefix("cut-off")
        .tempfile_in("/dev/shm")
        .expect("a file in memory");
    let file = file.into_file();
    file.set_len((PAGES * PAGE_BYTES) as u64).expect("room");
    let medium = MappedMedia::new(file.try_clone().expect("the file"), PAGES * PAGE_BYTES);
    let medium = medium.expect("a mapping");
    for page in 0..PAGES {
        medium.store(page * PAGE_BYTES, page as u64 + 1);
    }
    file.set_len((left * PAGE_BYTES) as u64).expect("cut off");
    medium
}

#[test]
fn unreadable_page_reads_as_pattern_and_is_listed() {
    let medium = truncated_mapping(98);
    medium.tolerate_unreadable(50 * PAGE_BYTES);
    assert!(!medium.is_unreadable(99 * PAGE_BYTES), "no thread read it");
    let mut page = [0; PAGE_BYTES];
    // Several threads fault on it at once.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut page = [0; PAGE_BYTES];
                medium.read(99 * PAGE_BYTES, &mut page);
                assert_eq!(page.as_chunks::<8>().0, [PATTERN.to_le_bytes(); 512]);
            });
        }
    });
    assert_eq!(medium.load(98 * PAGE_BYTES + 8), PATTERN);
    medium.read(97 * PAGE_BYTES, &mut page);
    assert_eq!(page[0], 98, "the rest is unchanged");
    let mut known = medium.unreadable_pages();
    known.sort_unstable();
    assert_eq!(known, [98 * PAGE_BYTES, 99 * PAGE_BYTES]);
    assert!(medium.is_unreadable(99 * PAGE_BYTES + 4000));
    assert!(!medium.is_unreadable(97 * PAGE_BYTES));

    // A later mapping, possibly at the same address, has pages of its own.
    drop(medium);
    let medium = truncated_mapping(PAGES);
    medium.tolerate_unreadable(0);
    assert_eq!(medium.unreadable_pages(), []);
    assert_eq!(medium.load(99 * PAGE_BYTES), 100);
}

#[test]
fn overlay_keeps_stores_on_unreadable_page() {
    let medium = truncated_mapping(99);
    let overlay = medium.overlay().expect("an overlay");
    overlay.tolerate_unreadable(0);
    assert_eq!(overlay.load(99 * PAGE_BYTES), PATTERN);
    overlay.store(99 * PAGE_BYTES, 5);
    assert_eq!(overlay.load(99 * PAGE_BYTES), 5);
    assert!(medium.unreadable_pages().is_empty());
}

/// Runs one of the ignored tests below in a process of its own.
fn run(test: &str) -> Output {
    let itself = std::env::current_exe().expect("this test");
    let mut command = Command::new(itself);
    command.args(["--ignored", "--exact", "--nocapture", test]);
    let no_core = || {
        let limit = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: a valid limit.
        match unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: between fork and exec it makes one system call.
    unsafe { command.pre_exec(no_core) };
    command.output().expect("a process")
}

#[track_caller]
fn assert_ends(test: &str, by: i32, byte: usize) {
    let output = run(test);
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(by), "{told}");
    let wanted = format!("pagemesh: byte {byte} of /dev/shm/cut-off");
    let line = told.lines().rfind(|line| line.starts_with(&wanted));
    assert!(
        line.is_some_and(|line| line.ends_with(" cannot be accessed: the medium fails")),
        "{told}"
    );
}

#[test]
fn untolerated_fault_ends_process_and_names_byte() {
    assert_ends(
        "reads_where_nothing_is_tolerated",
        libc::SIGBUS,
        98 * PAGE_BYTES + 16,
    );
    assert_ends(
        "reads_more_than_is_tolerated",
        libc::SIGBUS,
        PAGES_MAX * PAGE_BYTES,
    );
    assert_ends(
        "stores_to_an_unreadable_page",
        libc::SIGSEGV,
        98 * PAGE_BYTES + 8,
    );
}

#[test]
#[ignore = "ends the process"]
fn reads_where_nothing_is_tolerated() {
    let medium = truncated_mapping(98);
    medium.tolerate_unreadable(99 * PAGE_BYTES);
    medium.load(98 * PAGE_BYTES + 16);
}

#[test]
#[ignore = "ends the process"]
fn reads_more_than_is_tolerated() {
    let medium = truncated_mapping(0);
    medium.tolerate_unreadable(0);
    for page in 0..PAGES {
        medium.load(page * PAGE_BYTES);
    }
}

#[test]
#[ignore = "ends the process"]
fn stores_to_an_unreadable_page() {
    let medium = truncated_mapping(98);
    medium.tolerate_unreadable(0);
    assert_eq!(medium.load(98 * PAGE_BYTES), PATTERN);
    medium.store(98 * PAGE_BYTES + 8, 1);
}

/// A fault outside of our mappings is handled by the previous handler.
#[test]
fn unrelated_fault_ends_process_as_before() {
    let output = run("runs_out_of_its_stack");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{told}");
    assert!(told.contains("has overflowed its stack"), "{told}");
}

#[test]
#[ignore = "ends the process"]
fn runs_out_of_its_stack() {
    fn deeper(depth: u64) -> u64 {
        let frame = std::hint::black_box([depth; 512]);
        match depth {
            u64::MAX => 0,
            _ => deeper(depth + 1) + frame[depth as usize % 512],
        }
    }
    let _medium = truncated_mapping(PAGES);
    std::hint::black_box(deeper(0));
}

static HANDLED_SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count(_signal: libc::c_int) {
    HANDLED_SIGNALS.fetch_add(1, Ordering::Relaxed);
}

fn handle(signal: libc::c_int, by: libc::sighandler_t) {
    // SAFETY: the handler is async-signal-safe, or there is none.
    assert_ne!(unsafe { libc::signal(signal, by) }, libc::SIG_ERR);
}

fn send(signal: libc::c_int) {
    // SAFETY: it touches no memory.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

#[test]
fn sent_signals_reach_previous_handler() {
    let output = run("handles_and_ignores_what_is_sent");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    // With Rust's handler installed before, which restores the default, and without one.
    for test in [
        "leaves_what_is_sent_to_rust",
        "leaves_what_is_sent_to_the_default",
    ] {
        let output = run(test);
        assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{test}");
    }
}

#[test]
#[ignore = "a part of another test"]
fn handles_and_ignores_what_is_sent() {
    handle(libc::SIGSEGV, count as *const () as usize);
    handle(libc::SIGBUS, libc::SIG_IGN);
    let medium = truncated_mapping(99);
    for _ in 0..2 {
        send(libc::SIGSEGV);
        send(libc::SIGBUS);
    }
    assert_eq!(HANDLED_SIGNALS.load(Ordering::Relaxed), 2);
    // Unreadable memory is handled as before.
    medium.tolerate_unreadable(0);
    assert_eq!(medium.load(99 * PAGE_BYTES), PATTERN);
}

#[test]
#[ignore = "a part of another test"]
fn leaves_what_is_sent_to_the_default() {
    handle(libc::SIGSEGV, libc::SIG_DFL);
    let _medium = truncated_mapping(99);
    send(libc::SIGSEGV);
}

#[test]
#[ignore = "a part of another test"]
fn leaves_what_is_sent_to_rust() {
    let _medium = truncated_mapping(99);
    send(libc::SIGSEGV);
}

#[test]
fn forked_child_maps_while_parent_threads_map() {
    let output = run("forks_while_others_map");
    assert!(output.status.success(), "{output:?}");
}

#[test]
#[ignore = "it is run by another"]
fn forks_while_others_map() {
    const CHILD_S_MAX: u32 = 20;
    let (is_over, file) = (AtomicU32::new(0), tempfile::tempfile().expect("a file"));
    file.set_len(PAGE_BYTES as u64).expect("room");
    let map = || {
        let file = file.try_clone().expect("the file");
        drop(MappedMedia::new(file, PAGE_BYTES).expect("a mapping"));
    };
    map();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while is_over.load(Ordering::Relaxed) == 0 {
                    map();
                }
            });
        }
        for _ in 0..500 {
            // SAFETY: the C library makes its allocator safe; nothing else is shared.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: it ends this process if it hangs; only the parent knows it.
                unsafe { libc::alarm(CHILD_S_MAX) };
                unreadable::reset_after_fork();
                map();
                // SAFETY: nothing of this process is needed.
                unsafe { libc::_exit(0) };
            }
            let mut status = 0;
            // SAFETY: it fills a number on this stack.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            if status != 0 {
                is_over.store(1, Ordering::Relaxed);
            }
            assert_eq!(status, 0, "a child that waited");
        }
        is_over.store(1, Ordering::Relaxed);
    });
}
