//! What mounting learns of a file system: one pass over the inode table and all maps
//! finds what is in use, and what two claim to own.
//!
//! Nothing found here is fatal: what is damaged is named, and whoever owns it is not
//! believed. Memory and time follow what is mapped in the space, whatever it says.

use crate::core::{damaged_inode, inodes_of};
use crate::error::{FsError, Result};
use crate::format::{Damaged, Head, INODE_BYTES, INODES_PER_PAGE, Ino, Inode, Kind, Page, TRIM};
use crate::io::Port;
use crate::map;
use crate::runs::Runs;
use crate::share::Shares;
use crate::spans::{Owned, Span, overlaps};
use pagemesh_base::space::SpaceError;
use pagemesh_base::units::PAGE_BYTES;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

const PAGE: u64 = PAGE_BYTES as u64;
/// Pages of the inode table read at once.
const READ_PAGES: u64 = 256;
/// Damages that are told one by one.
const TOLD_MAX: usize = 4;

/// What the inode table tells.
pub(crate) struct Found {
    /// In order.
    pub(crate) spans: Vec<Owned>,
    /// Map pages, and whose they are.
    maps: HashMap<u64, Ino>,
    /// Spans that places name as shared ones.
    sharers: HashMap<Span, Sharers>,
    pub(crate) shares: Shares,
    /// Free numbers below `next`.
    pub(crate) free: Runs,
    /// The number behind the last one in use.
    pub(crate) next: u64,
    /// Pages in use.
    pub(crate) used: u64,
    /// Those of them that the reserve has.
    pub(crate) reserved: u64,
    /// Without a name.
    pub(crate) orphans: Vec<Ino>,
    /// Marked.
    pub(crate) unfinished: Vec<Ino>,
    /// With the log that is to be copied to them.
    pub(crate) redo: Vec<(Ino, Ino)>,
    pub(crate) damages: Damages,
}

/// Who shares a span.
#[derive(Default)]
struct Sharers {
    owners: Vec<Ino>,
    /// Its mapped pages, if one of the owners tells.
    mapped: Option<u64>,
}

/// What makes no sense.
#[derive(Default)]
pub(crate) struct Damages {
    told: Vec<String>,
    count: u64,
    /// Inodes whose content is not to be believed.
    pub(crate) distrusted: HashSet<Ino>,
}

impl Damages {
    fn note(&mut self, what: impl FnOnce() -> String) {
        self.count += 1;
        if self.told.len() < TOLD_MAX {
            let what = what();
            tracing::error!(%what, "the file system is damaged");
            self.told.push(what);
        }
    }

    /// All of it in words; none, if nothing is damaged.
    pub(crate) fn told(&self) -> Option<String> {
        let more = self.count - self.told.len() as u64;
        let told = self.told.join("; ");
        match (self.count, more) {
            (0, _) => None,
            (_, 0) => Some(told),
            (_, more) => Some(format!("{told}; and {more} more")),
        }
    }
}

/// Damage in words; other errors, such as that of a volume out of reach, stay what
/// they are.
fn as_damage(error: FsError) -> Result<String> {
    match error {
        FsError::Damaged { what, cause } => Ok(format!("{what} is damaged: {cause}")),
        FsError::Space(cause @ SpaceError::Damaged { .. }) => Ok(cause.to_string()),
        other => Err(other),
    }
}

fn owner(ino: Ino) -> String {
    match ino {
        Ino::TABLE => "the inode table".into(),
        Ino(number) => format!("inode {number}"),
    }
}

/// Reads the inode table.
///
/// # Errors
/// When the volume fails otherwise than by damage.
pub(crate) fn scan(port: &mut Port, head: &Head, pages: u64) -> Result<Found> {
    let found = Found {
        spans: vec![Owned {
            span: Span { page: 0, order: 0 },
            owner: Ino::TABLE,
        }],
        maps: HashMap::new(),
        sharers: HashMap::new(),
        shares: Shares::default(),
        free: Runs::default(),
        next: Ino::ROOT.0,
        used: 1,
        reserved: 0,
        orphans: Vec::new(),
        unfinished: Vec::new(),
        redo: Vec::new(),
        damages: Damages::default(),
    };
    let mut scan = Scan { port, pages, found };
    scan.table(&head.table)?;
    if let Some(span) = head.reserve {
        scan.reserve(span)?;
    }
    let mut found = scan.found;
    let maps = found.maps.drain().map(|(page, owner)| Owned {
        span: Span { page, order: 0 },
        owner,
    });
    found.spans.extend(maps);
    tell_overlaps(&mut found.spans, &mut found.damages);
    distrust_sharers(&found.sharers, &mut found.damages);
    distrust_logs(&found.orphans, &found.redo, &mut found.damages);
    let again = counted_again(port, &found.sharers, &mut found.damages)?;
    found.used = found.used.saturating_sub(again);
    let places = found.sharers.drain();
    let places = places.map(|(span, sharers)| (span.page, sharers.owners.len() as i64));
    found.shares = Shares::new(places);
    Ok(found)
}

fn tell_overlaps(spans: &mut [Owned], damages: &mut Damages) {
    overlaps(spans, |one, other| {
        let page = one.span.page;
        damages.note(|| match one.owner == other.owner {
            true => format!(
                "page {page} of the volume is named twice by {}",
                owner(one.owner)
            ),
            false => format!(
                "page {page} of the volume is owned by {} and by {}",
                owner(one.owner),
                owner(other.owner)
            ),
        });
        damages.distrusted.extend([one.owner, other.owner]);
    });
}

/// Of a shared span one owner is known by name when others overlap it.
fn distrust_sharers(sharers: &HashMap<Span, Sharers>, damages: &mut Damages) {
    for Sharers { owners, .. } in sharers.values() {
        if owners
            .iter()
            .any(|owner| damages.distrusted.contains(owner))
        {
            damages.distrusted.extend(owners);
        }
    }
}

/// Whoever names a log that is none is not believed.
fn distrust_logs(orphans: &[Ino], redo: &[(Ino, Ino)], damages: &mut Damages) {
    let orphans: HashSet<Ino> = orphans.iter().copied().collect();
    let mut named = HashSet::new();
    for &(ino, log) in redo {
        if !orphans.contains(&log) || !named.insert(log) {
            let what = || format!("{} is to be written from {}", owner(ino), owner(log));
            damages.note(what);
            damages.distrusted.insert(ino);
        }
    }
}

/// Pages of shared spans that several inodes count.
fn counted_again(
    port: &mut Port,
    sharers: &HashMap<Span, Sharers>,
    damages: &mut Damages,
) -> Result<u64> {
    let mut all = 0u64;
    for (span, sharers) in sharers {
        let again = sharers.owners.len() as u64 - 1;
        let mapped = match sharers.mapped {
            Some(mapped) => mapped,
            None if again == 0 => 0,
            None => match port.count_mapped(span.page..span.end()).map_err(as_damage) {
                Ok(mapped) => mapped,
                Err(damage) => {
                    let damage = damage?;
                    damages.note(|| damage);
                    0
                }
            },
        };
        all = all.saturating_add(again.saturating_mul(mapped));
    }
    Ok(all)
}

struct Scan<'p> {
    port: &'p mut Port,
    pages: u64,
    found: Found,
}

impl Scan<'_> {
    fn table(&mut self, table: &Inode) -> Result<()> {
        self.take_spans(Ino::TABLE, table)?;
        let count = self.found.damages.count;
        // A table that names pages twice would be read for as long as it likes.
        tell_overlaps(&mut self.found.spans, &mut self.found.damages);
        if self.found.damages.count > count {
            self.found.spans.clear();
            return Ok(());
        }
        let end = inodes_of(table) / INODES_PER_PAGE;
        let mut index = 0;
        while index < end {
            let run = map::find(&table.map, index, &mut |page| {
                Ok(self.port.read_page(page)?.into())
            });
            let count = match run.map_err(as_damage) {
                Ok(Some(run)) => {
                    let count = run.len.min(end - index).min(READ_PAGES);
                    self.read(index, run.page, count)?;
                    count
                }
                Ok(None) => {
                    let what = || format!("the inode table has no page {index}");
                    self.found.damages.note(what);
                    map::to_next_span(index).min(end - index)
                }
                Err(damage) => {
                    let damage = damage?;
                    self.found.damages.note(|| damage);
                    map::to_next_span(index).min(end - index)
                }
            };
            index += count;
        }
        Ok(())
    }

    /// Takes in the span of the reserve, which has what a crash left of it.
    fn reserve(&mut self, span: Span) -> Result<()> {
        let counted = self.port.count_mapped(span.page..span.end());
        match counted.map_err(as_damage) {
            Ok(pages) => self.found.reserved = pages,
            Err(damage) => {
                let damage = damage?;
                self.found.damages.note(|| damage);
            }
        }
        self.found.used = self.found.used.saturating_add(self.found.reserved);
        self.found.spans.push(Owned {
            span,
            owner: Ino::TABLE,
        });
        Ok(())
    }

    /// Takes in pages of the table from `index` on, which lie one after the other.
    fn read(&mut self, index: u64, page: u64, count: u64) -> Result<()> {
        match self.port.read(page * PAGE, (count * PAGE) as u32) {
            Ok(bytes) => {
                let first = index * INODES_PER_PAGE;
                for (ino, bytes) in (first..).map(Ino).zip(bytes.chunks(INODE_BYTES)) {
                    self.take_in(ino, bytes)?;
                }
                Ok(())
            }
            Err(error) if count == 1 => {
                let damage = as_damage(error)?;
                let first = index * INODES_PER_PAGE;
                let last = first + INODES_PER_PAGE - 1;
                let what = || format!("inodes {first} to {last} cannot be read: {damage}");
                self.found.damages.note(what);
                Ok(())
            }
            Err(error) => {
                as_damage(error)?;
                (0..count).try_for_each(|more| self.read(index + more, page + more, 1))
            }
        }
    }

    fn take_in(&mut self, ino: Ino, bytes: &[u8]) -> Result<()> {
        let inode = match Inode::decode(bytes, self.pages) {
            Ok(inode) if inode.is_free() => return Ok(()),
            Ok(_) if ino == Ino::TABLE => Err(Damaged("it is the table's, and in use".into())),
            inode => inode,
        };
        if ino != Ino::TABLE {
            self.found.free.append(self.found.next..ino.0);
            self.found.next = ino.0 + 1;
        }
        let inode = match inode {
            Ok(inode) => inode,
            Err(cause) => {
                let damage = as_damage(damaged_inode(ino, cause))?;
                self.found.damages.note(|| damage);
                return Ok(());
            }
        };
        self.take_spans(ino, &inode)?;
        self.found.redo.extend(inode.redo.map(|log| (ino, log)));
        match (inode.links, inode.flags & TRIM) {
            (0, _) => self.found.orphans.push(ino),
            (_, 0) if inode.spare.is_none() && inode.growth.is_none() => {}
            _ => self.found.unfinished.push(ino),
        }
        Ok(())
    }

    /// Adds the spans of an inode to those in use. One that names others' pages, or
    /// none of the space, is not believed.
    fn take_spans(&mut self, ino: Ino, inode: &Inode) -> Result<()> {
        let Scan { port, pages, found } = self;
        let Found {
            spans,
            maps,
            sharers,
            damages,
            ..
        } = found;
        let (end, its_maps) = (*pages, maps.len());
        let mut own = 0;
        let mut wrong = None;
        let is_file = ino != Ino::TABLE && inode.kind() == Kind::File;
        let mut may_share = true;
        let visited = map::visit(
            &inode.map,
            0,
            &mut |page| Ok(Arc::<Page>::from(port.read_page(page)?)),
            &mut |piece| {
                let span = piece.span;
                if span.end() > end {
                    wrong = Some(span.page);
                    return false;
                }
                own += 1 << span.order;
                if piece.is_shared {
                    may_share &= is_file;
                    let sharers = sharers.entry(span).or_default();
                    sharers.owners.push(ino);
                    sharers.mapped = sharers.mapped.or(inode.mapped_in(&piece));
                    if sharers.owners.len() > 1 {
                        return true;
                    }
                }
                spans.push(Owned { span, owner: ino });
                true
            },
            &mut |page| {
                if page >= end {
                    return Err(beyond(ino, page));
                }
                match maps.insert(page, ino) {
                    None => Ok(()),
                    Some(other) => {
                        damages.distrusted.insert(other);
                        let what = format!("{} and {} name it", owner(other), owner(ino));
                        Err(map::damaged(page, what))
                    }
                }
            },
        );
        let visited = match wrong {
            Some(page) => Err(beyond(ino, page)),
            None if !may_share => {
                let what = "it shares pages, and is no file";
                visited.and(Err(damaged_inode(ino, Damaged(what.into()))))
            }
            // A mark says that pages are still to be counted.
            None if inode.flags & TRIM == 0 && inode.pages > own => {
                let what = format!("it counts {} pages, and names {own}", inode.pages);
                visited.and(Err(damaged_inode(ino, Damaged(what))))
            }
            None => visited,
        };
        if let Err(error) = visited {
            let damage = as_damage(error)?;
            damages.note(|| damage);
            damages.distrusted.insert(ino);
        }
        found
            .spans
            .extend(inode.spare.map(|span| Owned { span, owner: ino }));
        let own = inode.pages.saturating_add((maps.len() - its_maps) as u64);
        let own = own.saturating_add(inode.lent());
        found.used = found.used.saturating_add(own);
        if inode.xattrs.at != 0 {
            let order = inode.xattrs.order;
            found.used = found.used.saturating_add(1 << order);
            found.spans.push(Owned {
                span: Span {
                    page: inode.xattrs.at,
                    order,
                },
                owner: ino,
            });
        }
        Ok(())
    }
}

fn beyond(ino: Ino, page: u64) -> FsError {
    let what = format!("its map names page {page}, beyond the volume");
    damaged_inode(ino, Damaged(what))
}
