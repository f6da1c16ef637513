//! Making a file system, and mounting one: the inode table is read once, to learn
//! which spans and numbers are free and what a crash left to be finished.

use crate::core::{Core, damaged_inode, inodes_of};
use crate::error::{FsError, Result};
use crate::format::{
    Damaged, Head, INODE_BYTES, INODES_PER_PAGE, Ino, Inode, Kind, Page, TRIM, VERSION,
};
use crate::io::{Port, Wait};
use crate::map;
use crate::namespace::make_root;
use crate::numbers::Numbers;
use crate::spans::{Span, Spans};
use crate::{Caller, Clock, Fs};
use pagemesh_base::space::{Request, Space};
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Condvar, Mutex};
use uuid::Uuid;

const PAGE: u64 = PAGE_BYTES as u64;
/// The head, the table's first span, a directory's: less is no file system.
const PAGES_MIN: u64 = 1 << 9;
/// Pages of the inode table read at once.
const READ_PAGES: u64 = 256;

/// What a file system is made with.
#[derive(Clone, Copy, Debug)]
pub struct MakeOptions {
    /// Its identity.
    pub uuid: Uuid,
    /// Of the hash of names: random, and secret enough that nobody makes names
    /// that collide.
    pub hash_key: [u64; 2],
    /// Bytes that it may take; 0: as many as its pools have.
    pub limit_bytes: u64,
    /// Who owns the root.
    pub owner: Caller,
    /// The root's permissions.
    pub mode: u16,
}

/// Makes an empty file system in a space that holds nothing.
///
/// # Errors
/// When the space is too small, or holds something.
pub fn make(space: &Arc<dyn Space>, wait: Wait, clock: Clock, options: MakeOptions) -> Result<()> {
    let pages = space.size_bytes() / PAGE;
    let refuse = |why: String| FsError::Damaged {
        what: "the volume".into(),
        cause: Damaged(why),
    };
    if pages < PAGES_MIN {
        let least = PAGES_MIN * PAGE;
        return Err(refuse(format!("it is smaller than {least} bytes; grow it")));
    }
    let mut port = Port::open(&**space, wait)?;
    if *port.read_page(0)? != [0; PAGE_BYTES] {
        let why = "it is not empty; take a new one, or delete what is in it";
        return Err(refuse(why.into()));
    }
    let mut table = Inode::free(0);
    table.mode = Kind::File.bits() | 0o600;
    table.links = 1;
    let head = Head {
        uuid: options.uuid,
        hash_key: options.hash_key,
        limit_bytes: options.limit_bytes,
        table,
    };
    let used = vec![Span { page: 0, order: 0 }];
    let spans = Spans::new(pages, used).expect("the head alone");
    let numbers = Numbers::new(BTreeSet::new(), Ino::ROOT.0);
    let core = Core::new(head, pages, 1, numbers, spans, port);
    let fs = Fs::new(space.clone(), wait, clock, core)?;
    let now = clock();
    fs.change(|tx| make_root(tx, options.owner, options.mode, now))?;
    fs.borrow()?.call(Request::Flush)?;
    Ok(())
}

/// What the inode table tells.
struct Found {
    spans: Vec<Span>,
    /// Map pages.
    maps: HashSet<u64>,
    free: BTreeSet<u64>,
    next: u64,
    used: u64,
    /// Without a name.
    orphans: Vec<Ino>,
    /// Marked.
    unfinished: Vec<Ino>,
}

impl Fs {
    fn new(space: Arc<dyn Space>, wait: Wait, clock: Clock, core: Core) -> Result<Fs> {
        let commits = Port::open(&*space, wait)?;
        Ok(Fs {
            space,
            wait,
            clock,
            core: Mutex::new(core),
            ended: Condvar::new(),
            commits: Mutex::new(commits),
            spare: Mutex::default(),
        })
    }

    /// Mounts the file system of a space, and finishes what a crash interrupted.
    ///
    /// # Errors
    /// When there is none, of another version, or a damaged one.
    pub fn mount(space: Arc<dyn Space>, wait: Wait, clock: Clock) -> Result<Fs> {
        let pages = space.size_bytes() / PAGE;
        let mut port = Port::open(&*space, wait)?;
        let head = Head::decode(&*port.read_page(0)?, pages);
        let head = head.map_err(|cause| FsError::Damaged {
            what: format!("the head of the file system (version {VERSION})"),
            cause,
        })?;
        let found = scan(&mut port, &head, pages)?;
        let spans = Spans::new(pages, found.spans).map_err(|span| FsError::Damaged {
            what: "the inode table".into(),
            cause: Damaged(format!("page {} has two owners", span.page)),
        })?;
        let numbers = Numbers::new(found.free, found.next);
        let core = Core::new(head, pages, found.used, numbers, spans, port);
        let fs = Fs::new(space, wait, clock, core)?;
        for ino in found.orphans {
            fs.free(ino)?;
        }
        for ino in found.unfinished {
            fs.trim(&mut *fs.borrow()?, ino, None)?;
        }
        Ok(fs)
    }

    /// The file system's identity.
    #[must_use]
    pub fn uuid(&self) -> Uuid {
        self.core().head.uuid
    }
}

/// Adds the spans of an inode to those in use.
fn add_spans(inode: &Inode, port: &mut Port, found: &mut Found) -> Result<()> {
    let (spans, maps) = (&mut found.spans, &mut found.maps);
    let before = maps.len();
    map::visit(
        &inode.map,
        0,
        &mut |page| Ok(Arc::<Page>::from(port.read_page(page)?)),
        &mut |piece| {
            spans.push(piece.span);
            true
        },
        &mut |span| maps.insert(span.page),
    )?;
    let own = inode.pages.saturating_add((maps.len() - before) as u64);
    found.used = found.used.saturating_add(own);
    if inode.xattrs.at != 0 {
        let order = inode.xattrs.order;
        found.used += 1 << order;
        found.spans.push(Span {
            page: inode.xattrs.at,
            order,
        });
    }
    Ok(())
}

fn scan(port: &mut Port, head: &Head, pages: u64) -> Result<Found> {
    let table = &head.table;
    let mut found = Found {
        spans: vec![Span { page: 0, order: 0 }],
        maps: HashSet::new(),
        free: BTreeSet::new(),
        next: Ino::ROOT.0,
        used: 1,
        orphans: Vec::new(),
        unfinished: Vec::new(),
    };
    add_spans(table, port, &mut found)?;
    let end = inodes_of(table) / INODES_PER_PAGE;
    let mut index = 0;
    while index < end {
        let run = map::find(&table.map, index, &mut |page| {
            Ok(port.read_page(page)?.into())
        })?;
        let run = run.ok_or_else(|| FsError::Damaged {
            what: "the inode table".into(),
            cause: Damaged(format!("it has no page {index}")),
        })?;
        let count = run.len.min(end - index).min(READ_PAGES);
        let bytes = port.read(run.page * PAGE, (count * PAGE) as u32)?;
        let first = index * INODES_PER_PAGE;
        for (ino, bytes) in (first..).map(Ino).zip(bytes.chunks(INODE_BYTES)) {
            if ino != Ino::TABLE {
                take_in(ino, bytes, pages, port, &mut found)?;
            }
        }
        index += count;
    }
    found.free.retain(|&ino| ino < found.next);
    let maps = found.maps.iter();
    let maps = maps.map(|&page| Span { page, order: 0 });
    found.spans.extend(maps);
    Ok(found)
}

fn take_in(ino: Ino, bytes: &[u8], pages: u64, port: &mut Port, found: &mut Found) -> Result<()> {
    let inode = Inode::decode(bytes, pages).map_err(|cause| damaged_inode(ino, cause))?;
    if inode.is_free() {
        found.free.insert(ino.0);
        return Ok(());
    }
    found.next = ino.0 + 1;
    add_spans(&inode, port, found)?;
    match (inode.links, inode.flags & TRIM) {
        (0, _) => found.orphans.push(ino),
        (_, 0) => {}
        _ => found.unfinished.push(ino),
    }
    Ok(())
}
