//! The head of a redo log: the file that the log is for, and the numbers of its pages, in order. The
//! pages themselves follow.

use crate::format::PAGE;
use crate::format::inode::Ino;
use pagemesh_base::bytes::{get_u64, put};
use pagemesh_base::units::PAGE_BYTES;

const MAGIC: [u8; 8] = *b"pmeshlog";
const INO_AT: usize = 8;
const GENERATION_AT: usize = 16;
const COUNT_AT: usize = 24;
/// Byte at which the page numbers begin.
pub(crate) const PAGES_AT: usize = 32;

/// Bytes of the head of a log of `count` pages.
pub(crate) fn head_bytes(count: u64) -> u64 {
    (PAGES_AT as u64 + 8 * count).next_multiple_of(PAGE)
}

/// The head without its page numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RedoLogHead {
    /// The file, and its generation.
    pub(crate) ino: Ino,
    pub(crate) generation: u64,
    /// Number of pages.
    pub(crate) count: u64,
}

impl RedoLogHead {
    /// The bytes of the head, with `count` page numbers.
    pub(crate) fn encode(self, pages: impl Iterator<Item = u64>) -> Vec<u8> {
        let mut bytes = vec![0; head_bytes(self.count) as usize];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, INO_AT, self.ino.0.to_le_bytes());
        put(&mut bytes, GENERATION_AT, self.generation.to_le_bytes());
        put(&mut bytes, COUNT_AT, self.count.to_le_bytes());
        for (index, page) in pages.enumerate() {
            put(&mut bytes, PAGES_AT + 8 * index, page.to_le_bytes());
        }
        bytes
    }

    /// Decodes the first page of a log. `None` if it does not begin like one.
    pub(crate) fn decode(page: &[u8]) -> Option<RedoLogHead> {
        (page.len() >= PAGE_BYTES && page[..8] == MAGIC).then(|| RedoLogHead {
            ino: Ino(get_u64(page, INO_AT)),
            generation: get_u64(page, GENERATION_AT),
            count: get_u64(page, COUNT_AT),
        })
    }
}
