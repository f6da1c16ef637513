//! The mount's side of guests: what a program on the file system does for them, and
//! beside them. Told again here is who asks for a board, and when.

use crate::checker::{SECTOR, fill};
use crate::guests::guest::Shown;
use crate::mount::pass_nap;
use bytes::Bytes;
use pagemesh_direct::board::Board;
use pagemesh_direct::rows::{self, FileBoard};
use pagemesh_fs::{Fs, Ino, Make, Port};
use pagemesh_fs_model::{Model, OWNER, Outcome};
use pagemesh_volume::guests::Segment;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Files that guests reach and overwrite.
pub(crate) const FILES: usize = 2;
/// The file behind those, which guests make longer.
pub(crate) const LOG: usize = FILES;
/// All.
pub(crate) const ALL_FILES: usize = FILES + 1;
/// Pages that each has at first: more than one of its spans.
pub(crate) const PAGES: u64 = 10;
/// Sectors that each has at first.
pub(crate) const FILE_SECTORS: u64 = PAGES * 4096 / SECTOR;

/// What the program does with one of the files, as the kernel would ask it to.
#[derive(Clone)]
pub(crate) enum Ask {
    /// Tells guests how it is, with room behind its end if they want that.
    Show(bool),
    /// From a byte on, so many.
    Read(u64, u32),
    /// From a byte on, or at the end.
    Write(Option<u64>, Vec<u8>),
}

/// What it says to that.
pub(crate) enum Reply {
    /// None: guests cannot have it.
    Shown(Option<Shown>),
    Data(Vec<u8>),
    Done,
}

/// What a mount shares with its guests.
pub(crate) struct Hall {
    segment: Arc<Segment>,
    inos: Vec<Ino>,
    boards: BTreeMap<u64, Arc<Board>>,
}

fn name(file: usize) -> String {
    format!("guests-{file}")
}

/// What operations of the program know of.
pub(crate) fn without_files(mut model: Model) -> Model {
    (0..ALL_FILES).for_each(|file| model.forget(name(file).as_bytes()));
    model
}

impl Hall {
    /// Opens the files, and makes those that are not there.
    pub(crate) fn new(fs: &Fs, port: &mut Port, segment: Arc<Segment>) -> Outcome<Hall> {
        let mut inos = Vec::new();
        for file in 0..ALL_FILES {
            let name = name(file);
            let found = fs.lookup(Ino::ROOT, name.as_bytes());
            let attr = match found {
                Ok(attr) => attr,
                Err(_) => fs
                    .create(Ino::ROOT, name.as_bytes(), Make::File, 0o600, OWNER)
                    .map_err(|error| error.errno())?,
            };
            fs.open(attr.ino).map_err(|error| error.errno())?;
            let bytes = FILE_SECTORS * SECTOR;
            if file != LOG && attr.size < bytes {
                let zeroes = Bytes::from(fill(0, (bytes - attr.size) / SECTOR));
                fs.write(port, attr.ino, Some(attr.size), &zeroes, true)
                    .map_err(|error| error.errno())?;
            }
            inos.push(attr.ino);
        }
        Ok(Hall {
            segment,
            inos,
            boards: BTreeMap::new(),
        })
    }

    /// Does what it is asked.
    pub(crate) fn answer(
        &mut self,
        fs: &Fs,
        port: &mut Port,
        file: usize,
        ask: &Ask,
    ) -> Outcome<Reply> {
        let ino = self.inos[file];
        let done = match ask {
            Ask::Show(grows) => self.show(fs, ino, *grows).map(Reply::Shown),
            Ask::Read(offset, len) => fs.read(port, ino, *offset, *len).map(Reply::Data),
            Ask::Write(offset, data) => {
                let data = Bytes::copy_from_slice(data);
                let written = fs.write(port, ino, *offset, &data, offset.is_none());
                written.map(|_| Reply::Done)
            }
        };
        done.map_err(|error| error.errno())
    }

    fn show(&mut self, fs: &Fs, ino: Ino, grows: bool) -> pagemesh_fs::Result<Option<Shown>> {
        let make = || {
            let board = Arc::new(Board::create().ok()?);
            self.boards.insert(ino.0, Arc::clone(&board));
            let segment = Arc::clone(&self.segment);
            let await_quiet = move || rows::await_quiet(&segment, ino, |_| pass_nap());
            Some(Arc::new(FileBoard::new(board, await_quiet)) as Arc<dyn pagemesh_fs::Board>)
        };
        let shown = match grows {
            true => fs.grow(ino, make)?,
            false => fs.show(ino, make)?,
        };
        let board = self.boards.get(&ino.0).filter(|_| shown.is_some());
        Ok(board.map(|board| Shown {
            ino: ino.0,
            board: Arc::clone(board),
        }))
    }
}
