//! The maps of files that the mount publishes to its clients.
//!
//! Invariants: a map lives as long as the file system or a client's request uses it. The number of
//! maps is bounded, since each takes a descriptor.

use super::ServerShared;
use super::status::RefusalReason;
use crate::protocol::wire::{FileRefusal, MountReply};
use crate::shared::rows::DrainingFileMap;
use crate::shared::shared_file_map;
use pagemesh_base::poison::lock;
use pagemesh_fs::{Fs, Ino, SharedFileMap};
use std::sync::{Arc, Weak};

/// Files with maps, each of which takes a descriptor; the kernel serves further ones.
const FILE_MAPS_MAX: usize = 4096;

impl ServerShared {
    /// The current map of a file, with space behind its end if the client wants to append.
    pub(super) fn publish_file_map(
        self: &Arc<ServerShared>,
        ino: Ino,
        grows: bool,
    ) -> (MountReply, Option<Arc<DrainingFileMap>>) {
        let Some(fs) = self.fs.upgrade() else {
            return (MountReply::Unavailable, None);
        };
        let make = || {
            let mut file_maps = lock(&self.file_maps);
            file_maps.retain(|_, file_map| file_map.strong_count() > 0);
            if file_maps.len() >= FILE_MAPS_MAX {
                return None;
            }
            let file_map = match shared_file_map::SharedFileMap::create() {
                Ok(file_map) => file_map,
                Err(cause) => {
                    tracing::warn!(%cause, "no memory for a file map; the kernel serves the file");
                    return None;
                }
            };
            let shared = Arc::clone(self);
            let made = Arc::new(DrainingFileMap::new(Arc::new(file_map), move || {
                shared.drain_file(ino);
            }));
            file_maps.insert(ino, Arc::downgrade(&made));
            Some(made as Arc<dyn SharedFileMap>)
        };
        let published = if grows {
            fs.publish_file_map_for_append(ino, make)
        } else {
            fs.publish_file_map(ino, make)
        };
        match published {
            Ok(Some(_)) => {
                let file_map = lock(&self.file_maps).get(&ino).and_then(Weak::upgrade);
                match file_map {
                    Some(file_map) => (MountReply::Success, Some(file_map)),
                    None => (MountReply::Unavailable, None),
                }
            }
            Ok(None) => (MountReply::FileRefused(self.refusal_of(&fs, ino)), None),
            Err(cause) => {
                tracing::debug!(%cause, ino = ino.0, "cannot publish a file map; the kernel serves the file");
                (MountReply::Unavailable, None)
            }
        }
    }

    /// Why a file cannot be on the direct path.
    fn refusal_of(&self, fs: &Fs, ino: Ino) -> FileRefusal {
        let is_full = || lock(&self.file_maps).len() >= FILE_MAPS_MAX;
        let (refusal, refused) = match () {
            () if fs.is_mmapped(ino) => (FileRefusal::Mapped, RefusalReason::FileMapped),
            () if fs.is_cached(ino) => (FileRefusal::Cached, RefusalReason::FileCached),
            () if is_full() => (FileRefusal::TooManyFiles, RefusalReason::TooManyFiles),
            () => (FileRefusal::Unsupported, RefusalReason::FileUnsupported),
        };
        self.clients.count_refusal(refused);
        refusal
    }
}
