//! Reports to the user which operations went directly and which by the kernel, and why. The report
//! is written at the end of the process, to the file that `PAGEMESH_REPORT` names (`-`: standard
//! error; a file is appended to). While the process runs, `state::log` writes a message per reason.
//!
//! Invariants: if `PAGEMESH_REPORT` is not set, a call on a descriptor outside the table costs one
//! more load.

use crate::c_library::environment;
use crate::descriptors::attributes::OpenAttributes;
use crate::engine::{self, Why};
use crate::kernel::sys;
use crate::process::ownership;
use crate::state::{log, thread, withdrawal};
use libc::{c_char, c_int};
use pagemesh_direct::op_counters::{self, Level};
use pagemesh_direct::report::{self, FileName, Format};
use std::ffi::{CStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};

/// Most file names that are remembered: one for each file with counters of its own.
const NAMES_MAX: usize = op_counters::TRACKED_FILES;

/// Bytes of a path, as the kernel has it.
const PATH_MAX: usize = 4096;

static IS_ON: AtomicBool = AtomicBool::new(false);
static IS_JSON: AtomicBool = AtomicBool::new(false);
/// The destination of the report: a copy that is never freed, as the program may change the
/// environment.
static DESTINATION: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());
static NAMES: Mutex<Vec<FileName>> = Mutex::new(Vec::new());

/// Runs once, when the library is loaded.
pub fn begin() {
    log::begin();
    let place = environment::string(c"PAGEMESH_REPORT");
    if !place.is_null() {
        // SAFETY: a string of the environment.
        DESTINATION.store(unsafe { libc::strdup(place) }, Relaxed);
        let is_json = environment::text(c"PAGEMESH_REPORT_OUTPUT") == Some("json");
        IS_JSON.store(is_json, Relaxed);
        IS_ON.store(true, Relaxed);
    }
    log::set_level(environment::text(c"PAGEMESH_LOG").map_or(Level::Off, report::log_level));
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
    if withdrawal::is_withdrawn() {
        return;
    }
    let Some(inside) = thread::this().enter() else {
        return;
    };
    if inside.thread().is_in_handler() || !ownership::is_ours() {
        return;
    }
    let Some(stat) = sys::fstat(fd).filter(sys::is_file) else {
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
    if !is_on() || !ownership::is_ours() || withdrawal::is_filtered() {
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
    let format = if IS_JSON.load(Relaxed) {
        Format::Json
    } else {
        Format::Text
    };
    let text = report::render(format, &file_counts, names);
    let place = DESTINATION.load(Relaxed);
    // SAFETY: a string that is never freed.
    let place = unsafe { CStr::from_ptr(place) };
    if place == c"-" {
        log::write_error(text.as_bytes());
    } else if let Some(fd) = sys::open_to_append(place) {
        sys::write_all(fd, text.as_bytes());
        sys::close(fd);
    }
}
