//! Page 0: the file system's identity, its limit, its reserve and its inode table.

use crate::error::Corruption;
use crate::format::Page;
use crate::format::inode::{INODE_BYTES, Inode, InodeKind};
use crate::format::page_map::{Span, is_span_within, span_bits, span_of_bits};
use pagemesh_base::bytes::{field, get_u32, get_u64, put};
use pagemesh_base::units::PAGE_BYTES;
use uuid::Uuid;

const MAGIC: [u8; 8] = *b"pagemfs\0";
pub(crate) const VERSION: u32 = 0;
/// Byte of the head at which the inode of the inode table lies.
const TABLE_AT: usize = 256;
/// Byte of the head at which the span of the reserve is named.
const RESERVE_AT: usize = 56;

/// The content of page 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) uuid: Uuid,
    /// The key of the hash of names.
    pub(crate) hash_key: [u64; 2],
    /// Limit in bytes for files and name space; 0: no limit but the pool's.
    pub(crate) limit_bytes: u64,
    /// The span of the reserve; `None` if it was never allocated.
    pub(crate) reserve: Option<Span>,
    /// The inode table, which is stored as a file.
    pub(crate) table: Inode,
}

impl Head {
    pub(crate) fn encode(&self) -> Page {
        let mut page = [0; PAGE_BYTES];
        put(&mut page, 0, MAGIC);
        put(&mut page, 8, VERSION.to_le_bytes());
        put(&mut page, 16, *self.uuid.as_bytes());
        put(&mut page, 32, self.hash_key[0].to_le_bytes());
        put(&mut page, 40, self.hash_key[1].to_le_bytes());
        put(&mut page, 48, self.limit_bytes.to_le_bytes());
        put(&mut page, RESERVE_AT, span_bits(self.reserve).to_le_bytes());
        put(&mut page, TABLE_AT, self.table.encode());
        page
    }

    pub(crate) fn decode(page: &Page, pages: u64) -> std::result::Result<Head, Corruption> {
        if page[..8] != MAGIC {
            return Err(Corruption(
                "there is no file system in it; make one with 'pagemesh fs create'".into(),
            ));
        }
        let version = get_u32(page, 8);
        if version != VERSION {
            return Err(Corruption(format!(
                "its format is version {version}, and this pagemesh knows version {VERSION}; \
                 use the pagemesh that made it"
            )));
        }
        let table = &page[TABLE_AT..TABLE_AT + INODE_BYTES];
        let table = Inode::decode(table, pages).map_err(|Corruption(cause)| {
            Corruption(format!("of the inode table it says: {cause}"))
        })?;
        let shares = table.map.spans.iter().any(|place| place.is_shared());
        let is_plain =
            table.kind() == InodeKind::File && table.xattrs.at == 0 && table.spare_span.is_none();
        let is_plain = is_plain && table.append_extent.is_none() && table.redo_log.is_none();
        if table.is_free() || !is_plain || shares {
            return Err(Corruption("it names no inode table".into()));
        }
        let limit_bytes = get_u64(page, 48);
        // Mounting reads the whole table: its time must be bounded.
        let most = match limit_bytes {
            0 => pages.saturating_mul(PAGE_BYTES as u64),
            limit => limit,
        };
        if table.size > most || !table.size.is_multiple_of(PAGE_BYTES as u64) {
            return Err(Corruption(format!(
                "its inode table has {} bytes, of {most} that the file system may take",
                table.size
            )));
        }
        let reserve = span_of_bits(get_u64(page, RESERVE_AT));
        if reserve.is_some_and(|span| !is_span_within(span, pages)) {
            return Err(Corruption("its reserve lies beyond the volume".into()));
        }
        Ok(Head {
            uuid: Uuid::from_bytes(field(page, 16)),
            hash_key: [get_u64(page, 32), get_u64(page, 40)],
            limit_bytes,
            reserve,
            table,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGES: u64 = 1 << 20;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn head_of_random_bytes_decodes_without_panic(
            words in prop::collection::vec(prop_oneof![any::<u64>(), Just(u64::MAX - 7), 0..PAGES], 512),
        ) {
            let mut page = [0; PAGE_BYTES];
            for (at, word) in words.iter().enumerate() {
                page[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
            }
            let _ = Head::decode(&page, PAGES);
        }
    }
}
