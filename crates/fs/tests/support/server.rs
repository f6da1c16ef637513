//! A file system as a stateless server uses it.

use super::memory::MemorySpace;
use super::new_fs;
use bytes::Bytes;
use pagemesh_fs::{
    Attr, Caller, FileId, Fs, Ino, IoChannel, Pin, SetAttributes, Wcc, WccAttr, WccReply,
};
use rustix::io::Errno;
use std::sync::Arc;

pub const SIZE: u64 = 1 << 36;

pub const NOTHING: SetAttributes = SetAttributes {
    mode: None,
    uid: None,
    gid: None,
    size: None,
    atime: None,
    mtime: None,
};

pub fn mode(mode: u16) -> SetAttributes {
    SetAttributes {
        mode: Some(mode),
        ..NOTHING
    }
}

pub fn size(size: u64) -> SetAttributes {
    SetAttributes {
        size: Some(size),
        ..NOTHING
    }
}

pub struct Server {
    pub memory: MemorySpace,
    pub fs: Arc<Fs>,
    pub channel: IoChannel,
}

/// A caller without supplementary groups.
pub fn user(uid: u32, gid: u32) -> Caller {
    Caller::new(uid, gid, &[]).unwrap()
}

/// The owner of the root directory.
pub fn owner() -> Caller {
    user(super::OWNER.uid, super::OWNER.gid)
}

pub fn errno<T: std::fmt::Debug>(reply: &WccReply<T>) -> Errno {
    reply.result.as_ref().unwrap_err().errno()
}

/// The values of an attribute that a client compares.
pub fn compared(attr: &Attr) -> WccAttr {
    WccAttr {
        size: attr.size,
        mtime: attr.mtime,
        ctime: attr.ctime,
    }
}

/// Both parts of complete attributes around a change.
pub fn around(wcc: &Wcc) -> (WccAttr, Attr) {
    (wcc.before.unwrap(), wcc.after.clone().unwrap())
}

impl Server {
    pub fn new() -> Server {
        let memory = MemorySpace::new(SIZE);
        let (fs, channel) = new_fs(&memory);
        Server {
            fs: Arc::new(fs),
            channel,
            memory,
        }
    }

    pub fn root(&self) -> FileId {
        self.fs.attr(Ino::ROOT).unwrap().file_id()
    }

    /// A file of the owner, made as FUSE does, and then unknown to the kernel.
    pub fn file(&self, name: &str, mode: u16) -> FileId {
        let made = self.fs.create(
            Ino::ROOT,
            name.as_bytes(),
            pagemesh_fs::CreateKind::File,
            mode,
            super::OWNER,
        );
        let made = made.unwrap();
        self.fs.forget(made.ino, 1);
        made.file_id()
    }

    pub fn pin(&self, id: FileId) -> Pin {
        self.fs.pin(id).unwrap()
    }

    /// Writes as the owner, without a sync.
    pub fn write(&mut self, pin: &Pin, offset: u64, bytes: Vec<u8>) -> WccReply<u32> {
        self.write_as(&owner(), pin, offset, bytes)
    }

    pub fn write_as(
        &mut self,
        caller: &Caller,
        pin: &Pin,
        offset: u64,
        bytes: Vec<u8>,
    ) -> WccReply<u32> {
        let data = Bytes::from(bytes);
        self.fs.write_at(pin, offset, &data, false, caller)
    }

    /// All bytes of a file, as the owner reads them.
    pub fn read(&mut self, pin: &Pin) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let at = all.len() as u64;
            let reply = self.fs.read_at(pin, at, 1 << 20, &owner());
            let read = reply.result.unwrap();
            all.extend(read.bytes);
            if read.is_eof {
                return all;
            }
        }
    }
}
