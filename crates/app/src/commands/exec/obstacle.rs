//! Obstacles to the direct path in a program's file.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Maximum chain of `#!` interpreters: the kernel's limit.
const SCRIPTS_MAX: usize = 5;
/// Bytes of a script's first line that the kernel reads.
const LINE_MAX: usize = 256;

/// The reason why a program cannot load the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreloadObstacle {
    /// The loader would refuse the library with a message or an error.
    Refused(&'static str),
    /// The loader would silently ignore the library. Children of the program may load it.
    LeftOut(&'static str),
}

/// The first known obstacle; `None` also if the program is not found.
pub fn find_obstacle(program: &OsStr) -> Option<PreloadObstacle> {
    let mut path = find_program(program)?;
    for _ in 0..SCRIPTS_MAX {
        match interpreter(&path) {
            Some(next) => path = next,
            None => break,
        }
    }
    elf_obstacle(&path)
}

/// The path of the program, by the search path.
fn find_program(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH")?;
    let mut places = std::env::split_paths(&path).map(|dir| dir.join(program));
    places.find(|place| place.is_file())
}

/// The interpreter that the first line of a script names.
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

/// The obstacle that the ELF header or the loader's name shows (gabi, "Program Header").
fn elf_obstacle(path: &Path) -> Option<PreloadObstacle> {
    const INTERPRETER: u32 = 3;
    let file = File::open(path).ok()?;
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    if !header.starts_with(b"\x7fELF") {
        return None;
    }
    let (is_64, machine) = (header[4] == 2, read_u16(&header, 18)?);
    if !is_64 || machine != 62 {
        return Some(PreloadObstacle::Refused(
            "it is not a 64-bit program for x86-64",
        ));
    }
    if file.metadata().ok()?.mode() & 0o6000 != 0 {
        return Some(PreloadObstacle::LeftOut(
            "it has a set-user-id or set-group-id bit",
        ));
    }
    let (at, size, count) = (
        read_u64(&header, 32)?,
        read_u16(&header, 54)?,
        read_u16(&header, 56)?,
    );
    for number in 0..u64::from(count) {
        let mut part = [0; 56];
        let offset = at.checked_add(number * u64::from(size))?;
        file.read_exact_at(&mut part, offset).ok()?;
        if read_u32(&part, 0)? == INTERPRETER {
            let mut name = vec![0; read_u64(&part, 32)?.min(4096) as usize];
            file.read_exact_at(&mut name, read_u64(&part, 8)?).ok()?;
            let name = name
                .split(|byte| *byte == 0 || *byte == b'/')
                .rfind(|it| !it.is_empty())?;
            return match name.starts_with(b"ld-linux-x86-64") {
                true => None,
                false => Some(PreloadObstacle::Refused(
                    "its C library is not the GNU C library",
                )),
            };
        }
    }
    Some(PreloadObstacle::LeftOut("it is linked statically"))
}

fn bytes_at<const N: usize>(of: &[u8], at: usize) -> Option<[u8; N]> {
    of.get(at..)?.first_chunk().copied()
}

fn read_u16(of: &[u8], at: usize) -> Option<u16> {
    bytes_at(of, at).map(u16::from_le_bytes)
}

fn read_u32(of: &[u8], at: usize) -> Option<u32> {
    bytes_at(of, at).map(u32::from_le_bytes)
}

fn read_u64(of: &[u8], at: usize) -> Option<u64> {
    bytes_at(of, at).map(u64::from_le_bytes)
}
