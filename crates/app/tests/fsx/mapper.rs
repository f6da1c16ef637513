//! A program that maps files, and reads and stores there: by the kernel alone, or under
//! `exec`, where a file that is mapped is nobody's on the direct path.

use super::support::PAGEMESH;
use super::support::mounted::{self, Mounted};
use super::{FILES, Files, PAGE};
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Maps whole pages around what it is told, which the file has, and says what is there
/// afterwards. A command is a file, an offset, a length and what to do, 8 bytes each, and the
/// bytes of a store.
const MAP: &str = r#"
import mmap, os, struct, sys
READ, STORE, SYNC, FSYNC, KEEP, AGAIN = range(6)
def say(found):
    sys.stdout.buffer.write(found)
    sys.stdout.buffer.flush()
while True:
    head = sys.stdin.buffer.read(32)
    if len(head) < 32:
        break
    file, offset, length, what = struct.unpack('<4Q', head)
    if what == AGAIN:
        say(pages[place])
        pages.close()
        continue
    stores = what in (STORE, SYNC, FSYNC)
    data = sys.stdin.buffer.read(length) if stores else b''
    kept = os.open(f'{sys.argv[1]}/f{file}', os.O_RDWR)
    first = offset // 4096 * 4096
    pages = mmap.mmap(kept, offset + length - first, offset=first)
    place = slice(offset - first, offset - first + length)
    if stores:
        pages[place] = data
    if what == SYNC:
        pages.flush()
    found = pages[place]
    if what != KEEP:
        pages.close()
    if what == FSYNC:
        os.fsync(kept)
    os.close(kept)
    say(found)
"#;

/// Writes while a file is mapped: a guest that may do so directly would after a few.
const WRITES_BESIDE_MAX: u64 = 12;

/// What is done with a mapping.
#[derive(Clone, Copy, Debug)]
enum What {
    Read,
    Store,
    /// Stores, and syncs the mapping.
    Sync,
    /// Stores, and syncs the file when it is mapped no more.
    Fsync,
    /// Reads, and goes on to have it mapped.
    Keep,
    /// Reads once more what was kept.
    Again,
}

impl What {
    fn stores(self) -> bool {
        matches!(self, What::Store | What::Sync | What::Fsync)
    }
}

pub struct Mapper {
    child: Child,
    tell: ChildStdin,
    said: ChildStdout,
}

impl Mapper {
    pub fn start(mount: &Mounted, is_direct: bool) -> Mapper {
        let mut command = match is_direct {
            false => Command::new("python3"),
            true => {
                let mut command = Command::new(PAGEMESH);
                command.args(mounted::exec()).arg("python3");
                command
            }
        };
        command.args(["-c", MAP]).arg(&mount.dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python3 is installed");
        Mapper {
            tell: child.stdin.take().unwrap(),
            said: child.stdout.take().unwrap(),
            child,
        }
    }

    fn does(&mut self, what: What, file: usize, offset: u64, bytes: &mut [u8]) {
        let words = [file as u64, offset, bytes.len() as u64, what as u64];
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.tell.write_all(&head).unwrap();
        if what.stores() {
            self.tell.write_all(bytes).unwrap();
        }
        self.said.read_exact(bytes).unwrap();
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Files {
    /// Reads or stores through a mapping. What is stored is seen at once; and it is synced
    /// before anything dies.
    pub fn map(&mut self, at: usize) {
        let size = self.models[at].len() as u64;
        if size == 0 {
            return;
        }
        let offset = self.roll(size);
        let len = self.len().min(size - offset);
        let what = match self.roll(8) {
            0 => What::Read,
            1..=3 => return self.look_while_others_write(at, offset, len),
            4 => What::Store,
            5 => What::Fsync,
            _ => What::Sync,
        };
        self.mapped(what, at, offset, len);
        if matches!(what, What::Store) {
            self.compare(at, offset / PAGE * PAGE, len + 2 * PAGE);
            self.operate_unsynced(at);
            self.open[at].sync_all().unwrap();
        }
    }

    fn mapped(&mut self, what: What, at: usize, offset: u64, len: u64) {
        self.did(format!("map {at} {offset} {len}: {what:?}"));
        let mut bytes = self.bytes(len);
        if what.stores() {
            self.put(at, offset, &bytes);
        }
        let mapper = self.mapper.as_mut().expect("there is one");
        mapper.does(what, at, offset, &mut bytes);
        let model = &self.models[at][offset as usize..][..len as usize];
        let differs = (0..bytes.len()).find(|&byte| bytes[byte] != model[byte]);
        assert!(
            differs.is_none(),
            "file {at} mapped from {offset} on differs at {differs:?}: {:#?}",
            self.last
        );
    }

    /// A mapping shows what is written while it is there, by calls and on the direct path.
    fn look_while_others_write(&mut self, at: usize, offset: u64, len: u64) {
        self.mapped(What::Keep, at, offset, len);
        for _ in 0..self.roll(WRITES_BESIDE_MAX) {
            self.write_beside(at, offset, len);
        }
        self.mapped(What::Again, at, offset, len);
    }

    /// Calls that meet what was stored and not synced.
    fn operate_unsynced(&mut self, at: usize) {
        let (offset, len) = (self.offset(), self.len());
        match self.roll(4) {
            0 => {
                self.did(format!("write {at} {offset} {len} unsynced"));
                let bytes = self.bytes(len);
                let file = &self.open[at];
                std::os::unix::fs::FileExt::write_all_at(file, &bytes, offset).unwrap();
                self.put(at, offset, &bytes);
            }
            1 => {
                let size = self.roll(super::BYTES_MAX);
                self.did(format!("truncate {at} {size} unsynced"));
                self.open[at].set_len(size).unwrap();
                self.models[at].resize(size as usize, 0);
            }
            2 => self.copy((at + 1) % FILES, offset, len),
            _ => return,
        }
        self.compare(at, 0, super::BYTES_MAX);
    }
}
