//! Detects programs that cannot have this library, by the beginning of their files.
//!
//! Reads are bounded, and nothing here allocates: see `exec_environment`.

use crate::kernel::sys;
use libc::{c_char, c_int};

/// Nested interpreters (`#!`): as many as the kernel follows.
const SCRIPTS_MAX: usize = 5;
/// Bytes of a script's first line that the kernel reads.
const LINE_MAX: usize = 256;
/// Program headers that are read. Linkers put the loader's name in front.
const PROGRAM_HEADERS_MAX: u64 = 64;
/// Bytes read at the end of a loader's path: its name.
const NAME_MAX: usize = 64;
/// Whether a loader finds this library.
pub fn is_library_visible(own: *const c_char) -> bool {
    let opened = sys::open_for_inspection(libc::AT_FDCWD, own);
    if opened >= 0 {
        sys::close(opened as c_int);
    }
    let gone = [libc::ENOENT, libc::ENOTDIR, libc::EACCES];
    !gone.iter().any(|&error| opened == -(error as isize))
}

/// The kind of a program, by the beginning of its file.
enum ProgramKind {
    Compatible,
    Incompatible,
    /// A script. `classify` leaves the path of its interpreter in the line buffer.
    Script,
}

/// Whether a program cannot have this library.
pub fn is_incompatible(directory: c_int, path: *const c_char) -> bool {
    let mut line = [0; LINE_MAX + 1];
    let (mut directory, mut path) = (directory, path);
    for _ in 0..=SCRIPTS_MAX {
        let opened = sys::open_for_inspection(directory, path);
        let Ok(fd @ 0..) = c_int::try_from(opened) else {
            return false;
        };
        let judged = classify(fd, &mut line);
        sys::close(fd);
        match judged {
            ProgramKind::Compatible => return false,
            ProgramKind::Incompatible => return true,
            ProgramKind::Script => {
                (directory, path) = (libc::AT_FDCWD, line.as_ptr().cast());
            }
        }
    }
    false
}

/// Classifies by the header and the name of the loader (gabi, "Program Header").
fn classify(fd: c_int, line: &mut [u8; LINE_MAX + 1]) -> ProgramKind {
    const INTERPRETER: u32 = 3;
    const X86_64: u16 = 62;
    line.fill(0);
    let len = sys::read_at(fd, &mut line[..LINE_MAX], 0);
    if line.starts_with(b"#!") {
        return if extract_interpreter(line) {
            ProgramKind::Script
        } else {
            ProgramKind::Compatible
        };
    }
    if len < 64 || !line.starts_with(b"\x7fELF") {
        return ProgramKind::Compatible;
    }
    if line[4] != 2 || word::<2>(line, 18) != u64::from(X86_64) {
        return ProgramKind::Incompatible;
    }
    let (start, size, count) = (
        word::<8>(line, 32),
        word::<2>(line, 54),
        word::<2>(line, 56),
    );
    for number in 0..count.min(PROGRAM_HEADERS_MAX) {
        let mut part = [0; 56];
        let Some(place) = start.checked_add(number * size) else {
            break;
        };
        if sys::read_at(fd, &mut part, place) < part.len() {
            break;
        }
        if word::<4>(&part, 0) != u64::from(INTERPRETER) {
            continue;
        }
        let (from, size) = (word::<8>(&part, 8), word::<8>(&part, 32));
        let mut name = [0; NAME_MAX];
        let short = size.min(NAME_MAX as u64);
        let Some(from) = from.checked_add(size - short) else {
            break;
        };
        let len = sys::read_at(fd, &mut name[..short as usize], from);
        return if len > 0 && !is_gnu_loader(&name[..len]) {
            ProgramKind::Incompatible
        } else {
            ProgramKind::Compatible
        };
    }
    // Static, or unreadable.
    ProgramKind::Compatible
}

/// Whether the end of a loader's path names the loader of the GNU C library.
fn is_gnu_loader(path: &[u8]) -> bool {
    let mut parts = path.split(|byte| *byte == 0 || *byte == b'/');
    let name = parts.rfind(|part| !part.is_empty());
    name.is_some_and(|name| name.starts_with(b"ld-linux-x86-64"))
}

/// Leaves the path of a script's interpreter in the line, with a zero behind it.
fn extract_interpreter(line: &mut [u8; LINE_MAX + 1]) -> bool {
    let is_blank = |byte: &u8| b" \t".contains(byte);
    let is_end = |byte: &u8| b" \t\n\0".contains(byte);
    let Some(from) = line[2..].iter().position(|byte| !is_blank(byte)) else {
        return false;
    };
    let from = from + 2;
    let len = line[from..].iter().position(is_end).unwrap_or(0);
    line.copy_within(from..from + len, 0);
    line[len] = 0;
    len > 0
}

/// A little-endian number of `N` bytes.
fn word<const N: usize>(of: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word[..N].copy_from_slice(&of[at..at + N]);
    u64::from_le_bytes(word)
}
