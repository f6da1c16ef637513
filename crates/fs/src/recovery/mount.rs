//! Creation and mounting of file systems. A mount reads the inode table once, to find the free
//! spans and numbers, and the operations that a crash interrupted ([`crate::recovery::scan`]).

use crate::alloc::inos::InoAllocator;
use crate::alloc::range_set::RangeSet;
use crate::alloc::spans::{Span, SpanAllocator, usable_pages};
use crate::error::{FsError, Result};
use crate::file::sync::LostWriteCursor;
use crate::format::inode::{Corruption, Head, Ino, Inode, InodeKind, VERSION};
use crate::io::channel::{IoChannel, Wait};
use crate::io::channel_pool::ChannelPool;
use crate::names::namespace::make_root;
use crate::recovery::scan::scan;
use crate::tree::directory::Tree;
use crate::txn::core::{Core, damaged_inode};
use crate::{Clock, Credentials, Fs};
use pagemesh_base::space::{Request, Space};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::HashSet;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
/// Least pages of a file system: the head, the first span of the table, and that of a directory.
const PAGES_MIN: u64 = 1 << 9;

/// Options for a new file system.
#[derive(Clone, Copy, Debug)]
pub struct MkfsOptions {
    /// Its identity.
    pub uuid: Uuid,
    /// Key of the hash of names. It is random and secret, so that users cannot choose names that
    /// collide.
    pub hash_key: [u64; 2],
    /// Limit in bytes; 0: no limit but that of its pools.
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
    let fs = Fs::new(space.clone(), wait, clock, core, 0)?;
    let now = clock();
    fs.change(|tx| make_root(tx, options.owner, options.mode, now))?;
    fs.lock_commit_channel().call(Request::Flush)?;
    Ok(())
}

fn damaged_volume(why: String) -> FsError {
    FsError::Damaged {
        what: "the volume".into(),
        cause: Corruption(why),
    }
}

/// Pages that spans can lie in.
fn usable_pages_of(space: &dyn Space) -> Result<u64> {
    let pages = usable_pages(space.size_bytes() / PAGE);
    if pages < PAGES_MIN {
        let least = PAGES_MIN * PAGE;
        return Err(damaged_volume(format!(
            "it is smaller than {least} bytes; grow it"
        )));
    }
    Ok(pages)
}

impl Fs {
    fn new(
        space: Arc<dyn Space>,
        wait: Wait,
        clock: Clock,
        core: Core,
        reserved: u64,
    ) -> Result<Fs> {
        let commits = IoChannel::open_ready(&*space, wait)?;
        Ok(Fs {
            space,
            wait,
            clock,
            core: Mutex::new(core),
            batch_done: Condvar::new(),
            commit_channel: Mutex::new(commits),
            reserved_pages: Mutex::new(reserved),
            reported_losses: LostWriteCursor::default(),
            is_resend_stopped: AtomicBool::new(false),
            channel_pool: ChannelPool::default(),
            append_hook: OnceLock::new(),
            open_hook: OnceLock::new(),
            kernel_callbacks: OnceLock::new(),
        })
    }

    /// Mounts the file system of a space. Pages of interrupted operations count as in use until
    /// [`Fs::free_deferred_piece`] frees them. If inodes or their pages are damaged, the file
    /// system takes no changes ([`Fs::damage`]), and its undamaged parts can be read.
    ///
    /// # Errors
    /// If there is no file system, its version is another, or its head or root is damaged.
    pub fn mount(space: Arc<dyn Space>, wait: Wait, clock: Clock) -> Result<Fs> {
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
        let fs = Fs::new(space, wait, clock, core, found.reserved_pages)?;
        let files = found.redo_logs.iter().map(|&(ino, _)| ino);
        if !is_sound {
            // The files may lack pages that their logs hold.
            fs.lock_core().untrusted.extend(files);
            return Ok(fs);
        }
        fs.replay_redo_logs(&found.redo_logs)?;
        let logs: HashSet<Ino> = found.redo_logs.iter().map(|&(_, log)| log).collect();
        let mut orphans = found.orphans;
        // Applied logs are gone. Others must stay while a file names them.
        orphans.retain(|ino| !logs.contains(ino));
        fs.lock_core()
            .defer_crash_leftovers(orphans, found.unfinished);
        Ok(fs)
    }

    /// The file system's identity.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.lock_core().head.uuid
    }
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
