//! The mount's side of direct clients: the operations of a program on the file system for them and
//! concurrent with them. The simulation decides itself when a file's map is requested.

use crate::checker::{SECTOR, fill};
use crate::direct_clients::client_thread::ExposedFile;
use crate::mount::yield_and_poll;
use bytes::Bytes;
use pagemesh_direct::rows::{self, DrainingFileMap};
use pagemesh_direct::shared_file_map::SharedFileMap;
use pagemesh_fs::{CreateKind, Fs, Ino, IoChannel};
use pagemesh_fs_model::{FsModel, OWNER, OpResult};
use pagemesh_volume::direct_access::DirectSegment;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Files that direct clients overwrite.
pub(crate) const OVERWRITTEN_FILES: usize = 2;
/// The file to which direct clients append; its number follows those files.
pub(crate) const APPEND_FILE: usize = OVERWRITTEN_FILES;
/// Number of all files.
pub(crate) const ALL_FILES: usize = OVERWRITTEN_FILES + 1;
/// Initial pages of each file: more than one span of its map.
pub(crate) const PAGES: u64 = 10;
/// Initial sectors of each file.
pub(crate) const FILE_SECTORS: u64 = PAGES * 4096 / SECTOR;

/// A request for an operation of the program on one of the files, as the kernel would make it.
#[derive(Clone)]
pub(crate) enum FileRequest {
    /// Exposes the file to direct clients, with append space if the flag is set.
    Expose(bool),
    /// Reads from a byte offset, this many bytes.
    Read(u64, u32),
    /// Writes at a byte offset, or at the end.
    Write(Option<u64>, Vec<u8>),
}

/// The program's answer to a request.
pub(crate) enum FileReply {
    /// None: direct clients cannot use the file.
    Exposed(Option<ExposedFile>),
    Data(Vec<u8>),
    Done,
}

/// The state that a mount shares with its direct clients.
pub(crate) struct SharedFiles {
    segment: Arc<DirectSegment>,
    inos: Vec<Ino>,
    maps: BTreeMap<u64, Arc<SharedFileMap>>,
}

fn file_name(file: usize) -> String {
    format!("guests-{file}")
}

/// The part of the model that operations of the program use.
pub(crate) fn without_shared_files(mut model: FsModel) -> FsModel {
    (0..ALL_FILES).for_each(|file| model.remove_root_file(file_name(file).as_bytes()));
    model
}

impl SharedFiles {
    /// Opens the files, and creates the missing ones.
    pub(crate) fn new(
        fs: &Fs,
        port: &mut IoChannel,
        segment: Arc<DirectSegment>,
    ) -> OpResult<SharedFiles> {
        let mut inos = Vec::new();
        for file in 0..ALL_FILES {
            let name = file_name(file);
            let found = fs.lookup(Ino::ROOT, name.as_bytes());
            let attr = match found {
                Ok(attr) => attr,
                Err(_) => fs
                    .create(Ino::ROOT, name.as_bytes(), CreateKind::File, 0o600, OWNER)
                    .map_err(|error| error.errno())?,
            };
            fs.open(attr.ino).map_err(|error| error.errno())?;
            let bytes = FILE_SECTORS * SECTOR;
            if file != APPEND_FILE && attr.size < bytes {
                let zeroes = Bytes::from(fill(0, (bytes - attr.size) / SECTOR));
                fs.write(port, attr.ino, Some(attr.size), &zeroes, true)
                    .map_err(|error| error.errno())?;
            }
            inos.push(attr.ino);
        }
        Ok(SharedFiles {
            segment,
            inos,
            maps: BTreeMap::new(),
        })
    }

    /// Runs a request.
    pub(crate) fn answer(
        &mut self,
        fs: &Fs,
        port: &mut IoChannel,
        file: usize,
        ask: &FileRequest,
    ) -> OpResult<FileReply> {
        let ino = self.inos[file];
        let done = match ask {
            FileRequest::Expose(grows) => self.expose(fs, ino, *grows).map(FileReply::Exposed),
            FileRequest::Read(offset, len) => {
                fs.read(port, ino, *offset, *len).map(FileReply::Data)
            }
            FileRequest::Write(offset, data) => {
                let data = Bytes::copy_from_slice(data);
                let written = fs.write(port, ino, *offset, &data, offset.is_none());
                written.map(|_| FileReply::Done)
            }
        };
        done.map_err(|error| error.errno())
    }

    fn expose(
        &mut self,
        fs: &Fs,
        ino: Ino,
        wants_append_space: bool,
    ) -> pagemesh_fs::Result<Option<ExposedFile>> {
        let make = || {
            let board = Arc::new(SharedFileMap::create().ok()?);
            self.maps.insert(ino.0, Arc::clone(&board));
            let segment = Arc::clone(&self.segment);
            let await_quiet = move || rows::drain_file(&segment, ino, |_| yield_and_poll());
            Some(Arc::new(DrainingFileMap::new(board, await_quiet))
                as Arc<dyn pagemesh_fs::SharedFileMap>)
        };
        let shown = match wants_append_space {
            true => fs.publish_file_map_for_append(ino, make)?,
            false => fs.publish_file_map(ino, make)?,
        };
        let board = self.maps.get(&ino.0).filter(|_| shown.is_some());
        Ok(board.map(|board| ExposedFile {
            ino: ino.0,
            map: Arc::clone(board),
        }))
    }
}
