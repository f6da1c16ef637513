//! Reports to the user which operations went directly and which by the kernel, and why. The report
//! is written at the end of the process, to the file that `PAGEMESH_REPORT` names (`-`: standard
//! error; a file is appended to). While the process runs, a message per reason goes to standard
//! error (`PAGEMESH_LOG`).
//!
//! Invariants: this code writes to descriptor 2 only if it leads to the same file as when the
//! library was loaded: a program may reuse that number for a file. If neither variable is set, a
//! call on a descriptor outside the table costs one more load.

use crate::engine::{self, Why};
use crate::open_description::OpenAttributes;
use crate::{descriptors, process, sys, thread, withdraw};
use libc::{c_char, c_int};
use pagemesh_direct::op_counters::{self, Level};
use pagemesh_direct::report::{self, FileName, Format};
use std::ffi::{CStr, OsString};
use std::fmt::Write;
use std::os::unix::ffi::OsStringExt;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

/// Most file names that are remembered: one for each file with counters of its own.
const NAMES_MAX: usize = op_counters::TRACKED_FILES;
/// Bytes of a message.
const LINE_MAX: usize = 256;
/// Bytes of a path, as the kernel has it.
const PATH_MAX: usize = 4096;

static IS_ON: AtomicBool = AtomicBool::new(false);
static IS_JSON: AtomicBool = AtomicBool::new(false);
/// The destination of the report: a copy that is never freed, as the program may change the
/// environment.
static DESTINATION: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());
static NAMES: Mutex<Vec<FileName>> = Mutex::new(Vec::new());
/// Messages up to this level are written.
static LEVEL: AtomicU32 = AtomicU32::new(Level::Off as u32);
/// Reasons that were logged.
static LOGGED: AtomicU64 = AtomicU64::new(0);
/// The file of standard error when the library was loaded.
static ERROR_DEVICE: AtomicU64 = AtomicU64::new(0);
static ERROR_INODE: AtomicU64 = AtomicU64::new(0);

/// Runs once, when the library is loaded.
pub fn begin() {
    if let Some(stat) = sys::fstat(libc::STDERR_FILENO) {
        ERROR_DEVICE.store(stat.st_dev, Relaxed);
        ERROR_INODE.store(stat.st_ino, Relaxed);
    }
    let place = engine::env_string(c"PAGEMESH_REPORT");
    if !place.is_null() {
        // SAFETY: a string of the environment.
        DESTINATION.store(unsafe { libc::strdup(place) }, Relaxed);
        IS_JSON.store(env_is(c"PAGEMESH_REPORT_OUTPUT", "json"), Relaxed);
        IS_ON.store(true, Relaxed);
    }
    let level = env_text(c"PAGEMESH_LOG").map_or(Level::Off, report::log_level);
    LEVEL.store(level as u32, Relaxed);
    if level > Level::Off {
        op_counters::set_listener(log_once);
        if withdraw::is_withdrawn() {
            log_once(Why::Confined);
        }
    }
}

fn env_text(name: &CStr) -> Option<&'static str> {
    let text = engine::env_string(name);
    if text.is_null() {
        return None;
    }
    // SAFETY: a string of the environment, read before the program runs.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

fn env_is(name: &CStr, word: &str) -> bool {
    env_text(name) == Some(word)
}

/// Whether there will be a report.
#[inline]
pub fn is_on() -> bool {
    IS_ON.load(Relaxed)
}

/// Remembers the name of an open file. The caller is inside, and in no handler.
pub fn record_name(fd: c_int, attributes: &OpenAttributes) {
    if !is_on() {
        return;
    }
    let Ok(mut names) = NAMES.try_lock() else {
        return;
    };
    let is_of = |name: &FileName| (name.device, name.ino) == (attributes.dev, attributes.ino);
    if names.len() < NAMES_MAX && !names.iter().any(is_of) {
        let mut path = vec![0; PATH_MAX];
        if let Some(len) = sys::path_of(fd, &mut path) {
            path.truncate(len);
            names.push(FileName {
                device: attributes.dev,
                ino: attributes.ino,
                path: OsString::from_vec(path).into(),
            });
        }
    }
}

/// Counts a call that goes to the kernel by a descriptor outside the table, if the descriptor leads
/// to a file on a pagemesh mount.
#[cold]
pub fn count_unknown_fd(fd: c_int) {
    if withdraw::is_withdrawn() {
        return;
    }
    let Some(inside) = thread::this().enter() else {
        return;
    };
    if inside.thread().is_in_handler() || !process::is_ours() {
        return;
    }
    let Some(stat) = sys::fstat(fd).filter(descriptors::is_file) else {
        return;
    };
    if sys::fs_type(fd).is_some_and(engine::may_be_direct_mount) && is_of_pagemesh(stat.st_dev) {
        op_counters::count_kernel(
            op_counters::index_of(stat.st_dev, stat.st_ino),
            Why::Unknown,
        );
        let attributes = OpenAttributes {
            dev: stat.st_dev,
            ino: stat.st_ino,
            is_readable: false,
            is_writable: false,
            appends: false,
            is_durable: false,
        };
        record_name(fd, &attributes);
    }
}

/// Whether a pagemesh mount has this device number; the last positive answer is cached.
fn is_of_pagemesh(device: u64) -> bool {
    static KNOWN: AtomicU64 = AtomicU64::new(0);
    if KNOWN.load(Relaxed) == device {
        return true;
    }
    let is_one = report::is_mount(device);
    if is_one {
        KNOWN.store(device, Relaxed);
    }
    is_one
}

/// Writes the report, if there are counts. Runs when the process ends.
pub fn end() {
    if !is_on() || !process::is_ours() || withdraw::is_filtered() {
        return;
    }
    let Some(inside) = thread::this().enter() else {
        return;
    };
    // The handler may have interrupted an allocation.
    if inside.thread().is_in_handler() {
        return;
    }
    let file_counts = engine::file_counts();
    if file_counts.is_empty() {
        return;
    }
    let names = NAMES.try_lock();
    let names = names.as_ref().map_or(&[][..], |names| &names[..]);
    let format = match IS_JSON.load(Relaxed) {
        true => Format::Json,
        false => Format::Text,
    };
    let text = report::render(format, &file_counts, names);
    let place = DESTINATION.load(Relaxed);
    // SAFETY: a string that is never freed.
    let place = unsafe { CStr::from_ptr(place) };
    if place == c"-" {
        write_error(text.as_bytes());
    } else if let Some(fd) = sys::open_to_append(place) {
        sys::write_all(fd, text.as_bytes());
        sys::close(fd);
    }
}

/// Writes to standard error, if the descriptor still leads to it.
fn write_error(bytes: &[u8]) {
    let is_same = |stat: libc::stat64| {
        stat.st_dev == ERROR_DEVICE.load(Relaxed) && stat.st_ino == ERROR_INODE.load(Relaxed)
    };
    if sys::fstat(libc::STDERR_FILENO).is_some_and(is_same) {
        sys::write_all(libc::STDERR_FILENO, bytes);
    }
}

/// A line that is formatted without the program's allocator, as a handler may be calling.
struct LogLine {
    bytes: [u8; LINE_MAX],
    len: usize,
}

impl Write for LogLine {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.bytes[self.len..];
        let len = text.len().min(room.len());
        room[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.len += len;
        Ok(())
    }
}

/// Logs each reason once.
fn log_once(why: Why) {
    if why.level() as u32 > LEVEL.load(Relaxed) {
        return;
    }
    let bit = 1 << why as u32;
    if LOGGED.load(Relaxed) & bit != 0 || LOGGED.fetch_or(bit, Relaxed) & bit != 0 {
        return;
    }
    let mut line = LogLine {
        bytes: [0; LINE_MAX],
        len: 0,
    };
    let (pid, text) = (sys::getpid(), why.text());
    let _ = writeln!(
        line,
        "pagemesh[{pid}]: the kernel serves operations on files of mounts: {text}"
    );
    write_error(&line.bytes[..line.len]);
}

/// Runs in a child of fork: it logs each reason again.
pub fn reset_in_child() {
    LOGGED.store(0, Relaxed);
}
