//! Creation of file systems.

use crate::alloc::inos::InoAllocator;
use crate::alloc::range_set::RangeSet;
use crate::alloc::spans::{SpanAllocator, usable_pages};
use crate::error::{Corruption, FsError, Result};
use crate::format::PAGE;
use crate::format::inode::{Ino, Inode, InodeKind};
use crate::format::page_map::Span;
use crate::format::superblock::Head;
use crate::io::channel::{IoChannel, Wait};
use crate::tree::new_inode::{Credentials, make_root};
use crate::txn::core::Core;
use crate::txn::manager::{Clock, TxManager};
use pagemesh_base::space::{Request, Space};
use pagemesh_base::units::PAGE_BYTES;
use std::sync::Arc;
use uuid::Uuid;

/// Least pages of a file system: the head, and the first spans of the table and a directory.
const PAGES_MIN: u64 = 1 << 9;

/// Options for a new file system.
#[derive(Clone, Copy, Debug)]
pub struct MkfsOptions {
    /// Its identity.
    pub uuid: Uuid,
    /// Key of the hash of names. It is random and secret, so that users cannot choose names that
    /// collide.
    pub hash_key: [u64; 2],
    /// Limit in bytes; 0: only its pools limit it.
    pub limit_bytes: u64,
    /// Owner and group of the root.
    pub owner: Credentials,
    /// The root's permissions.
    pub mode: u16,
}

/// Creates an empty file system in an empty space.
///
/// # Errors
/// If the space is too small, or not empty.
pub fn mkfs(space: &Arc<dyn Space>, wait: Wait, clock: Clock, options: MkfsOptions) -> Result<()> {
    let pages = usable_pages_of(&**space)?;
    let mut channel = IoChannel::open(&**space, wait)?;
    if *channel.read_page(0)? != [0; PAGE_BYTES] {
        let why = "it is not empty; use a new volume, or delete its content";
        return Err(damaged_volume(why.into()));
    }
    let mut table = Inode::free(0);
    table.mode = InodeKind::File.bits() | 0o600;
    table.links = 1;
    let head = Head {
        uuid: options.uuid,
        hash_key: options.hash_key,
        limit_bytes: options.limit_bytes,
        reserve: None,
        table,
    };
    let spans = SpanAllocator::new(pages, [Span { page: 0, order: 0 }].into_iter());
    let numbers = InoAllocator::new(RangeSet::default(), Ino::ROOT.0);
    let core = Core::new(head, pages, 1, numbers, spans, channel);
    let txs = TxManager::new(space.clone(), wait, clock, core, 0)?;
    let now = clock();
    txs.change(|tx| make_root(tx, options.owner, options.mode, now))?;
    txs.lock_commit_channel().call(Request::Flush)?;
    Ok(())
}

fn damaged_volume(why: String) -> FsError {
    FsError::Damaged {
        what: "the volume".into(),
        cause: Corruption(why),
    }
}

/// Pages that spans can lie in.
pub(crate) fn usable_pages_of(space: &dyn Space) -> Result<u64> {
    let pages = usable_pages(space.size_bytes() / PAGE);
    if pages < PAGES_MIN {
        let least = PAGES_MIN * PAGE;
        return Err(damaged_volume(format!(
            "it is smaller than {least} bytes; grow it"
        )));
    }
    Ok(pages)
}
