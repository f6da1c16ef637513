//! Answers to the kernel.

use crate::abi;
use crate::attr::{CacheTimeout, attr_timeout_s, attributes};
use pagemesh_fs::Attr;
use rustix::io::Errno;
use zerocopy::{Immutable, IntoBytes};

/// An entry and its open reply: the longest structures of an answer.
const FIXED_MAX: usize = size_of::<abi::EntryOut>() + size_of::<abi::OpenOut>();
/// Entries of a listing begin at multiples of this.
const ALIGN: usize = 8;

/// The answer to a request.
#[derive(Debug)]
pub(crate) enum FuseReply {
    Error(Errno),
    Fixed([u8; FIXED_MAX], usize),
    Data(Vec<u8>),
}

impl FuseReply {
    /// Success, without data.
    pub(crate) const DONE: FuseReply = FuseReply::Fixed([0; FIXED_MAX], 0);

    pub(crate) fn new(value: &(impl IntoBytes + Immutable)) -> FuseReply {
        FuseReply::from_pair(value, &[0u8; 0])
    }

    pub(crate) fn from_pair(
        first: &(impl IntoBytes + Immutable),
        second: &(impl IntoBytes + Immutable),
    ) -> FuseReply {
        let (first, second) = (first.as_bytes(), second.as_bytes());
        let len = first.len() + second.len();
        let mut bytes = [0; FIXED_MAX];
        bytes[..first.len()].copy_from_slice(first);
        bytes[first.len()..len].copy_from_slice(second);
        FuseReply::Fixed(bytes, len)
    }

    pub(crate) fn error(&self) -> i32 {
        match self {
            FuseReply::Error(errno) => -errno.raw_os_error(),
            _ => 0,
        }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            FuseReply::Error(_) => &[],
            FuseReply::Fixed(bytes, len) => &bytes[..*len],
            FuseReply::Data(bytes) => bytes,
        }
    }
}

pub(crate) fn entry(attr: &Attr, cache: CacheTimeout) -> abi::EntryOut {
    abi::EntryOut {
        node: attr.ino.0,
        generation: attr.generation.into(),
        entry_s: cache.seconds,
        attr_s: attr_timeout_s(attr, cache),
        attr: attributes(attr),
        ..abi::EntryOut::default()
    }
}

pub(crate) fn attr(attr: &Attr, cache: CacheTimeout) -> abi::AttrOut {
    abi::AttrOut {
        attr_s: attr_timeout_s(attr, cache),
        attr: attributes(attr),
        ..abi::AttrOut::default()
    }
}

/// An answer to SETATTR about a file of direct clients. The kernel must not cache it: a client may
/// have begun to extend the file since, and the kernel does not compare such an answer with
/// notifications in between.
pub(crate) fn uncached_attr(attr: &Attr) -> abi::AttrOut {
    abi::AttrOut {
        attr_s: 0,
        ..self::attr(attr, CacheTimeout::NONE)
    }
}

pub(crate) fn statx(attr: &Attr, cache: CacheTimeout) -> FuseReply {
    let told = abi::StatxOut {
        attr_s: attr_timeout_s(attr, cache),
        attr: crate::attr::statx(attr),
        ..abi::StatxOut::default()
    };
    FuseReply::Data(told.as_bytes().to_vec())
}

/// Entries of a directory, as many as fit.
pub(crate) struct Listing {
    bytes: Vec<u8>,
    bytes_max: usize,
}

impl Listing {
    pub(crate) fn new(bytes_max: u32) -> Listing {
        let bytes_max = bytes_max.min(abi::DATA_BYTES_MAX) as usize;
        Listing {
            bytes: Vec::with_capacity(bytes_max),
            bytes_max,
        }
    }

    /// Adds an entry, after its attributes if they are included. False: it does not fit any more.
    pub(crate) fn add(
        &mut self,
        told: Option<&abi::EntryOut>,
        (node, cookie, kind): (u64, u64, u32),
        name: &[u8],
    ) -> bool {
        let told = told.map_or(&[][..], IntoBytes::as_bytes);
        let before = told.len() + size_of::<abi::Dirent>();
        let len = (before + name.len()).next_multiple_of(ALIGN);
        if self.bytes.len() + len > self.bytes_max {
            return false;
        }
        let entry = abi::Dirent {
            node,
            cookie,
            name_len: name.len() as u32,
            kind,
        };
        let end = self.bytes.len() + len;
        for part in [told, entry.as_bytes(), name] {
            self.bytes.extend_from_slice(part);
        }
        self.bytes.resize(end, 0);
        true
    }

    pub(crate) fn finish(self) -> FuseReply {
        FuseReply::Data(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listing_stops_when_full() {
        let mut listing = Listing::new(80);
        assert!(listing.add(None, (7, 1, 4), b"nine char"));
        assert!(listing.add(None, (8, 2, 4), b"x"));
        assert!(!listing.add(None, (9, 3, 4), b""));
        let FuseReply::Data(bytes) = listing.finish() else {
            panic!("bytes");
        };
        assert_eq!(bytes.len(), 40 + 32);
        assert_eq!(&bytes[24..40], b"nine char\0\0\0\0\0\0\0");
        assert_eq!((bytes[40], bytes[48], bytes[56]), (8, 2, 1));
    }
}
