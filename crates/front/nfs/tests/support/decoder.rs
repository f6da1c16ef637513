//! A client's side of the wire: decodes results, without the encoder under test.

use pagemesh_nfs::nfs3::attributes::{
    Attributes, ChangeAttributes, DeviceNumber, EarlierAttributes, FileType, Time,
};

/// A client that decodes a reply. It panics on bytes that are not there.
pub struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    pub fn word(&mut self) -> u32 {
        let (first, rest) = self.0.split_at(4);
        self.0 = rest;
        u32::from_be_bytes(first.try_into().expect("four bytes"))
    }

    pub fn long(&mut self) -> u64 {
        u64::from(self.word()) << 32 | u64::from(self.word())
    }

    pub fn opaque(&mut self) -> &'a [u8] {
        let len = self.word() as usize;
        let (field, rest) = self.0.split_at(len.next_multiple_of(4));
        assert!(field[len..].iter().all(|byte| *byte == 0), "padding");
        self.0 = rest;
        &field[..len]
    }

    pub fn optional<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        match self.word() {
            0 => None,
            1 => Some(value(self)),
            other => panic!("the boolean {other}"),
        }
    }

    pub fn time(&mut self) -> Time {
        let (seconds, nanoseconds) = (self.word(), self.word());
        Time {
            seconds,
            nanoseconds,
        }
    }

    pub fn attributes(&mut self) -> Option<Attributes> {
        self.optional(|it| Attributes {
            kind: FileType::from_number(it.word()).expect("a type"),
            mode: it.word(),
            links: it.word(),
            uid: it.word(),
            gid: it.word(),
            size_bytes: it.long(),
            used_bytes: it.long(),
            device: DeviceNumber {
                major: it.word(),
                minor: it.word(),
            },
            file_system: it.long(),
            inode: it.long(),
            accessed: it.time(),
            modified: it.time(),
            changed: it.time(),
        })
    }

    pub fn change(&mut self) -> ChangeAttributes {
        let before = self.optional(|it| EarlierAttributes {
            size_bytes: it.long(),
            modified: it.time(),
            changed: it.time(),
        });
        let after = self.attributes();
        ChangeAttributes { before, after }
    }

    pub fn end(&self) {
        assert_eq!(self.0, b"", "bytes after the last field");
    }
}
