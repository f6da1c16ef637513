//! A program that maps files, and loads and stores through the mapping: through the kernel only, or
//! under `pagemesh exec`. A mapped file has no direct path.

use super::support::PAGEMESH;
use super::support::mounted::{self, TestMount};
use super::{FILES, FsxState, PAGE};
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Maps the whole pages around a range of the file, and returns the contents of the range after the
/// operation. A command is a file, an offset, a length and an operation, 8 bytes each, and the
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

/// Writes while a file is mapped: without the mapping, a direct client would write directly after
/// fewer.
const WRITES_BESIDE_MAX: u64 = 12;

/// Operations on a mapping.
#[derive(Clone, Copy, Debug)]
enum MapOp {
    Read,
    Store,
    /// Stores, and syncs the mapping.
    Sync,
    /// Stores, unmaps, and syncs the file.
    Fsync,
    /// Reads, and keeps the mapping.
    Keep,
    /// Reads through the mapping that `Keep` left.
    Again,
}

impl MapOp {
    fn stores(self) -> bool {
        matches!(self, MapOp::Store | MapOp::Sync | MapOp::Fsync)
    }
}

pub struct MapperProcess {
    child: Child,
    tell: ChildStdin,
    said: ChildStdout,
}

impl MapperProcess {
    pub fn start(mount: &TestMount, is_direct: bool) -> MapperProcess {
        let mut command = match is_direct {
            false => Command::new("python3"),
            true => {
                let mut command = Command::new(PAGEMESH);
                command.args(mounted::exec_args()).arg("python3");
                command
            }
        };
        command.args(["-c", MAP]).arg(&mount.dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("python3 is installed");
        MapperProcess {
            tell: child.stdin.take().unwrap(),
            said: child.stdout.take().unwrap(),
            child,
        }
    }

    fn execute(&mut self, what: MapOp, file: usize, offset: u64, bytes: &mut [u8]) {
        let words = [file as u64, offset, bytes.len() as u64, what as u64];
        let head: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.tell.write_all(&head).unwrap();
        if what.stores() {
            self.tell.write_all(bytes).unwrap();
        }
        self.said.read_exact(bytes).unwrap();
    }
}

impl Drop for MapperProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl FsxState {
    /// Loads or stores through a mapping. Each store is visible at once, and it is synced before
    /// any process dies.
    pub fn map_operation(&mut self, at: usize) {
        let size = self.models[at].len() as u64;
        if size == 0 {
            return;
        }
        let offset = self.below(size);
        let len = self.len().min(size - offset);
        let what = match self.below(8) {
            0 => MapOp::Read,
            1..=3 => return self.read_mapping_during_writes(at, offset, len),
            4 => MapOp::Store,
            5 => MapOp::Fsync,
            _ => MapOp::Sync,
        };
        self.run_map_op(what, at, offset, len);
        if matches!(what, MapOp::Store) {
            self.compare(at, offset / PAGE * PAGE, len + 2 * PAGE);
            self.operate_unsynced(at);
            self.open[at].sync_all().unwrap();
        }
    }

    fn run_map_op(&mut self, what: MapOp, at: usize, offset: u64, len: u64) {
        self.log_op(format!("map {at} {offset} {len}: {what:?}"));
        let mut bytes = self.bytes(len);
        if what.stores() {
            self.apply_write(at, offset, &bytes);
        }
        let mapper = self.mapper.as_mut().expect("there is one");
        mapper.execute(what, at, offset, &mut bytes);
        let model = &self.models[at][offset as usize..][..len as usize];
        let differs = (0..bytes.len()).find(|&byte| bytes[byte] != model[byte]);
        assert!(
            differs.is_none(),
            "file {at} mapped from {offset} on differs at {differs:?}: {:#?}",
            self.recent_ops
        );
    }

    /// A mapping shows writes that happen while it exists, by calls and on the direct path.
    fn read_mapping_during_writes(&mut self, at: usize, offset: u64, len: u64) {
        self.run_map_op(MapOp::Keep, at, offset, len);
        for _ in 0..self.below(WRITES_BESIDE_MAX) {
            self.overwrite_part(at, offset, len);
        }
        self.run_map_op(MapOp::Again, at, offset, len);
    }

    /// Calls on ranges with stores that are not synced yet.
    fn operate_unsynced(&mut self, at: usize) {
        let (offset, len) = (self.offset(), self.len());
        match self.below(4) {
            0 => {
                self.log_op(format!("write {at} {offset} {len} unsynced"));
                let bytes = self.bytes(len);
                let file = &self.open[at];
                std::os::unix::fs::FileExt::write_all_at(file, &bytes, offset).unwrap();
                self.apply_write(at, offset, &bytes);
            }
            1 => {
                let size = self.below(super::BYTES_MAX);
                self.log_op(format!("truncate {at} {size} unsynced"));
                self.open[at].set_len(size).unwrap();
                self.models[at].resize(size as usize, 0);
            }
            2 => self.copy((at + 1) % FILES, offset, len),
            _ => return,
        }
        self.compare(at, 0, super::BYTES_MAX);
    }
}
