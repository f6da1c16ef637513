//! Messages to standard error, one per reason for which the kernel serves operations
//! (`PAGEMESH_LOG`).
//!
//! Invariants: this code writes to descriptor 2 only if it leads to the same file as when the
//! library was loaded: a program may reuse that number for a file. It does not allocate.

use crate::kernel::sys;
use crate::state::withdrawal;
use pagemesh_direct::op_counters::{self, Level, Why};
use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Bytes of a message.
const LINE_MAX: usize = 256;

/// Messages up to this level are written.
static LEVEL: AtomicU32 = AtomicU32::new(Level::Off as u32);
/// Reasons that were logged.
static LOGGED: AtomicU64 = AtomicU64::new(0);
/// The file of standard error when the library was loaded.
static ERROR_DEVICE: AtomicU64 = AtomicU64::new(0);
static ERROR_INODE: AtomicU64 = AtomicU64::new(0);

/// Remembers the file of standard error. Runs once, when the library is loaded.
pub fn begin() {
    if let Some(stat) = sys::fstat(libc::STDERR_FILENO) {
        ERROR_DEVICE.store(stat.st_dev, Relaxed);
        ERROR_INODE.store(stat.st_ino, Relaxed);
    }
}

/// Writes messages up to this level from now on. Runs once, when the library is loaded.
pub fn set_level(level: Level) {
    LEVEL.store(level as u32, Relaxed);
    if level > Level::Off {
        op_counters::set_listener(log_once);
        if withdrawal::is_withdrawn() {
            log_once(Why::Confined);
        }
    }
}

/// Writes to standard error, if the descriptor still leads to it.
pub fn write_error(bytes: &[u8]) {
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
