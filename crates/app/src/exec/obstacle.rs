//! Obstacles to the direct path in a program's file.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Interpreters that lead to each other by `#!`: as many as the kernel follows.
const SCRIPTS_MAX: usize = 5;
/// Bytes of a script's first line that the kernel reads.
const LINE_MAX: usize = 256;

/// Why the library cannot be in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// It would be refused with a message or an error.
    Refused(&'static str),
    /// It is left out in silence. Children of the program may have it.
    LeftOut(&'static str),
}

/// None: nothing is known against it, or it is not found.
pub fn obstacle(program: &OsStr) -> Option<Obstacle> {
    let mut path = found(program)?;
    for _ in 0..SCRIPTS_MAX {
        match interpreter(&path) {
            Some(next) => path = next,
            None => break,
        }
    }
    of_elf(&path)
}

/// Where the program is, by the search path.
fn found(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&path).map(|dir| dir.join(program));
    places.find(|place| place.is_file())
}

/// Of a script.
fn interpreter(path: &Path) -> Option<PathBuf> {
    let mut line = Vec::new();
    let file = File::open(path).ok()?;
    file.take(LINE_MAX as u64).read_to_end(&mut line).ok()?;
    let line = line
        .strip_prefix(b"#!")?
        .split(|byte| *byte == b'\n')
        .next()?;
    let mut words = line
        .split(|byte| b" \t".contains(byte))
        .filter(|word| !word.is_empty());
    Some(OsString::from_vec(words.next()?.to_vec()).into())
}

/// By the header and the name of the loader (gabi, "Program Header").
fn of_elf(path: &Path) -> Option<Obstacle> {
    const INTERPRETER: u32 = 3;
    let file = File::open(path).ok()?;
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    if !header.starts_with(b"\x7fELF") {
        return None;
    }
    let (is_64, machine) = (header[4] == 2, word16(&header, 18)?);
    if !is_64 || machine != 62 {
        return Some(Obstacle::Refused("it is not a 64-bit program for x86-64"));
    }
    if file.metadata().ok()?.mode() & 0o6000 != 0 {
        return Some(Obstacle::LeftOut(
            "it has a set-user-id or set-group-id bit",
        ));
    }
    let (at, size, count) = (
        word64(&header, 32)?,
        word16(&header, 54)?,
        word16(&header, 56)?,
    );
    for number in 0..u64::from(count) {
        let mut part = [0; 56];
        let offset = at.checked_add(number * u64::from(size))?;
        file.read_exact_at(&mut part, offset).ok()?;
        if word32(&part, 0)? == INTERPRETER {
            let mut name = vec![0; word64(&part, 32)?.min(4096) as usize];
            file.read_exact_at(&mut name, word64(&part, 8)?).ok()?;
            let name = name
                .split(|byte| *byte == 0 || *byte == b'/')
                .rfind(|it| !it.is_empty())?;
            return match name.starts_with(b"ld-linux-x86-64") {
                true => None,
                false => Some(Obstacle::Refused("its C library is not the GNU C library")),
            };
        }
    }
    Some(Obstacle::LeftOut("it is linked statically"))
}

fn bytes<const N: usize>(of: &[u8], at: usize) -> Option<[u8; N]> {
    of.get(at..)?.first_chunk().copied()
}

fn word16(of: &[u8], at: usize) -> Option<u16> {
    bytes(of, at).map(u16::from_le_bytes)
}

fn word32(of: &[u8], at: usize) -> Option<u32> {
    bytes(of, at).map(u32::from_le_bytes)
}

fn word64(of: &[u8], at: usize) -> Option<u64> {
    bytes(of, at).map(u64::from_le_bytes)
}
