//! Mounting. A mount reads the inode table once, to find the free spans and numbers, and the
//! operations that a crash interrupted ([`super::scan`]).

use crate::alloc::inos::InoAllocator;
use crate::alloc::spans::SpanAllocator;
use crate::error::{Corruption, FsError, Result};
use crate::format::inode::{Ino, damaged_inode};
use crate::format::superblock::{Head, VERSION};
use crate::io::channel::{IoChannel, Wait};
use crate::mkfs::usable_pages_of;
use crate::recovery::replay;
use crate::recovery::scan::scan;
use crate::tree::directory::Tree;
use crate::txn::core::Core;
use crate::txn::manager::{Clock, TxManager};
use pagemesh_base::space::Space;
use std::collections::HashSet;
use std::sync::Arc;

/// See [`crate::Fs::mount`].
pub(crate) fn mount(space: Arc<dyn Space>, wait: Wait, clock: Clock) -> Result<TxManager> {
    let pages = usable_pages_of(&*space)?;
    let mut channel = IoChannel::open(&*space, wait)?;
    let head = Head::decode(&*channel.read_page(0)?, pages);
    let head = head.map_err(|cause| FsError::Damaged {
        what: format!("the head of the file system (version {VERSION})"),
        cause,
    })?;
    let found = scan(&mut channel, &head, pages)?;
    let damage = found.damages.summary();
    let spans = match damage {
        None => SpanAllocator::new(pages, found.spans.iter().map(|owned| owned.span)),
        // A damaged file system allocates nothing.
        Some(_) => SpanAllocator::new(0, std::iter::empty()),
    };
    let numbers = InoAllocator::new(found.free_inos, found.next_ino);
    let mut core = Core::new(head, pages, found.used_pages, numbers, spans, channel);
    core.untrusted.extend(found.damages.untrusted);
    core.share_counts = found.shares;
    let is_sound = damage.is_none();
    if let Some(damage) = damage {
        core.stop(damage);
    }
    check_root(&mut core)?;
    let txs = TxManager::new(space, wait, clock, core, found.reserved_pages)?;
    let files = found.redo_logs.iter().map(|&(ino, _)| ino);
    if !is_sound {
        // The files may lack pages that their logs hold.
        txs.lock_core().untrusted.extend(files);
        return Ok(txs);
    }
    replay::replay_redo_logs(&txs, &found.redo_logs)?;
    let logs: HashSet<Ino> = found.redo_logs.iter().map(|&(_, log)| log).collect();
    let mut orphans = found.orphans;
    // Applied logs are gone. Others must stay while a file names them.
    orphans.retain(|ino| !logs.contains(ino));
    txs.lock_core()
        .defer_crash_leftovers(orphans, found.unfinished);
    Ok(txs)
}

/// Refuses a damaged root inode. If only the root's entries are damaged, the file system is mounted
/// and takes no changes.
fn check_root(core: &mut Core) -> Result<()> {
    let root = core.inode(Ino::ROOT).map_err(|error| match error {
        FsError::Posix(_) => {
            damaged_inode(Ino::ROOT, Corruption("it is the root, and free".into()))
        }
        other => other,
    })?;
    if !root.is_directory() || root.links == 0 || root.parent != Ino::ROOT {
        let what = "it is the root, and no directory with a name that is its own parent";
        return Err(damaged_inode(Ino::ROOT, Corruption(what.into())));
    }
    let mut inode = root;
    let looked = Tree::new(&mut core.begin(), &mut inode).is_empty();
    match looked {
        Err(FsError::Damaged { .. }) => {
            core.stop_if_damaged(&looked);
            Ok(())
        }
        looked => looked.map(drop),
    }
}
