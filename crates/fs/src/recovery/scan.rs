//! The scan at mount: one pass over the inode table and all maps finds the pages in use, and pages
//! with two owners.
//!
//! No damage is fatal here. The scan reports it, and marks its owners untrusted. Memory and time
//! are bounded by the mapped pages of the space, even if those are damaged.

use crate::alloc::range_set::RangeSet;
use crate::alloc::share_counts::ShareCounts;
use crate::alloc::spans::{OwnedSpan, for_each_overlap};
use crate::error::{Corruption, FsError, Result};
use crate::format::file_id::FileId;
use crate::format::inode::{
    INODE_BYTES, INODES_PER_PAGE, Ino, Inode, InodeKind, NEEDS_TRIM, Xattrs, damaged_inode,
    table_inodes,
};
use crate::format::page_map::{FileSpan, Span};
use crate::format::superblock::Head;
use crate::format::{PAGE, Page, page_map};
use crate::io::channel::IoChannel;
use crate::recovery::damage_log::{DamageLog, damage_text, owner_name};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Pages of the inode table read at once.
const READ_PAGES: u64 = 256;

/// The result of a scan.
pub(crate) struct ScanResult {
    /// Sorted.
    pub(crate) spans: Vec<OwnedSpan>,
    /// Map pages and their owners.
    map_owners: HashMap<u64, Ino>,
    /// Spans that are named as shared, and their owners.
    sharers: HashMap<Span, SpanSharers>,
    pub(crate) shares: ShareCounts,
    /// Free numbers below `next`.
    pub(crate) free_inos: RangeSet,
    /// The number behind the last one in use.
    pub(crate) next_ino: u64,
    /// Pages in use.
    pub(crate) used_pages: u64,
    /// Mapped pages of the reserve; part of `used_pages`.
    pub(crate) reserved_pages: u64,
    /// Inodes without a name.
    pub(crate) orphans: Vec<Ino>,
    /// Inodes with pages to be freed, a spare span or an append extent.
    pub(crate) unfinished: Vec<Ino>,
    /// Files that name a redo log, each with its log.
    pub(crate) redo_logs: Vec<(Ino, Ino)>,
    /// The service file that the root names; it is no orphan.
    service_file: ServiceFileScan,
    pub(crate) damages: DamageLog,
}

/// The service file, as the scan finds it. The root comes first.
#[derive(Default)]
struct ServiceFileScan {
    named: Option<FileId>,
    is_found: bool,
}

/// The owners of a shared span.
#[derive(Default)]
struct SpanSharers {
    owners: Vec<Ino>,
    /// Its mapped pages, if the inode of an owner tells.
    mapped_pages: Option<u64>,
}

/// Reads the inode table.
///
/// # Errors
/// Errors of the volume other than damage.
pub(crate) fn scan(channel: &mut IoChannel, head: &Head, pages: u64) -> Result<ScanResult> {
    let found = ScanResult {
        spans: vec![OwnedSpan {
            span: Span { page: 0, order: 0 },
            owner: Ino::TABLE,
        }],
        map_owners: HashMap::new(),
        sharers: HashMap::new(),
        shares: ShareCounts::default(),
        free_inos: RangeSet::default(),
        next_ino: Ino::ROOT.0,
        used_pages: 1,
        reserved_pages: 0,
        orphans: Vec::new(),
        unfinished: Vec::new(),
        redo_logs: Vec::new(),
        service_file: ServiceFileScan::default(),
        damages: DamageLog::default(),
    };
    let mut scan = InodeScan {
        channel,
        pages,
        result: found,
    };
    scan.scan_table(&head.table)?;
    if let Some(span) = head.reserve {
        scan.scan_reserve(span)?;
    }
    let mut found = scan.result;
    found.service_file.report();
    let maps = found.map_owners.drain().map(|(page, owner)| OwnedSpan {
        span: Span { page, order: 0 },
        owner,
    });
    found.spans.extend(maps);
    record_overlaps(&mut found.spans, &mut found.damages);
    mark_sharers_untrusted(&found.sharers, &mut found.damages);
    mark_log_owners_untrusted(&found.orphans, &found.redo_logs, &mut found.damages);
    let again = duplicate_pages(channel, &found.sharers, &mut found.damages)?;
    found.used_pages = found.used_pages.saturating_sub(again);
    let places = found.sharers.drain();
    let places = places.map(|(span, sharers)| (span.page, sharers.owners.len() as i64));
    found.shares = ShareCounts::new(places);
    Ok(found)
}

fn record_overlaps(spans: &mut [OwnedSpan], damages: &mut DamageLog) {
    for_each_overlap(spans, |one, other| {
        let page = one.span.page;
        damages.record(|| {
            if one.owner == other.owner {
                format!(
                    "page {page} of the volume is named twice by {}",
                    owner_name(one.owner)
                )
            } else {
                format!(
                    "page {page} of the volume is owned by {} and by {}",
                    owner_name(one.owner),
                    owner_name(other.owner)
                )
            }
        });
        damages.untrusted.extend([one.owner, other.owner]);
    });
}

/// [`record_overlaps`] sees only one owner of a shared span. If that one is untrusted, all are.
fn mark_sharers_untrusted(sharers: &HashMap<Span, SpanSharers>, damages: &mut DamageLog) {
    for SpanSharers { owners, .. } in sharers.values() {
        if owners.iter().any(|owner| damages.untrusted.contains(owner)) {
            damages.untrusted.extend(owners);
        }
    }
}

/// Marks files untrusted that name a log which is no orphan, or which another file names too.
fn mark_log_owners_untrusted(orphans: &[Ino], redo: &[(Ino, Ino)], damages: &mut DamageLog) {
    let orphans: HashSet<Ino> = orphans.iter().copied().collect();
    let mut named = HashSet::new();
    for &(ino, log) in redo {
        if !orphans.contains(&log) || !named.insert(log) {
            let what = || {
                format!(
                    "{} is to be written from {}",
                    owner_name(ino),
                    owner_name(log)
                )
            };
            damages.record(what);
            damages.untrusted.insert(ino);
        }
    }
}

/// Pages of shared spans that more than one inode counts.
fn duplicate_pages(
    channel: &mut IoChannel,
    sharers: &HashMap<Span, SpanSharers>,
    damages: &mut DamageLog,
) -> Result<u64> {
    let mut all = 0u64;
    for (span, sharers) in sharers {
        let again = sharers.owners.len() as u64 - 1;
        let mapped = match sharers.mapped_pages {
            Some(mapped) => mapped,
            None if again == 0 => 0,
            None => match channel
                .count_mapped_pages(span.page..span.end())
                .map_err(damage_text)
            {
                Ok(mapped) => mapped,
                Err(damage) => {
                    let damage = damage?;
                    damages.record(|| damage);
                    0
                }
            },
        };
        all = all.saturating_add(again.saturating_mul(mapped));
    }
    Ok(all)
}

impl ServiceFileScan {
    /// Whether this inode is the service file.
    fn visit(&mut self, ino: Ino, inode: &Inode) -> bool {
        if ino == Ino::ROOT {
            self.named = inode.service_file;
        }
        let is_it = inode.can_be_service_file() && self.named == Some(FileId::of(ino, inode));
        self.is_found |= is_it;
        is_it
    }

    /// Logs a name that leads to no such file. It is no damage: an earlier release frees the file and leaves the name.
    fn report(&self) {
        if let Some(FileId { ino, .. }) = self.named.filter(|_| !self.is_found) {
            tracing::warn!(
                ino = ino.0,
                "the root names a service file that is gone or has another use, as after a mount by an earlier release: its content \
                 is lost, and the next server begins a new one"
            );
        }
    }
}

struct InodeScan<'p> {
    channel: &'p mut IoChannel,
    pages: u64,
    result: ScanResult,
}

impl InodeScan<'_> {
    fn scan_table(&mut self, table: &Inode) -> Result<()> {
        self.add_spans(Ino::TABLE, table)?;
        let count = self.result.damages.count;
        // A table that names pages twice could make the scan read without bound.
        record_overlaps(&mut self.result.spans, &mut self.result.damages);
        if self.result.damages.count > count {
            self.result.spans.clear();
            return Ok(());
        }
        let end = table_inodes(table) / INODES_PER_PAGE;
        let mut index = 0;
        while index < end {
            let run = page_map::find(&table.map, index, &mut |page| {
                Ok(self.channel.read_page(page)?.into())
            });
            let count = match run.map_err(damage_text) {
                Ok(Some(run)) => {
                    let count = run.len.min(end - index).min(READ_PAGES);
                    self.scan_table_pages(index, run.page, count)?;
                    count
                }
                Ok(None) => {
                    let what = || format!("the inode table has no page {index}");
                    self.result.damages.record(what);
                    page_map::pages_to_next_span(index).min(end - index)
                }
                Err(damage) => {
                    let damage = damage?;
                    self.result.damages.record(|| damage);
                    page_map::pages_to_next_span(index).min(end - index)
                }
            };
            index += count;
        }
        Ok(())
    }

    /// Adds the span of the reserve; a crash may have left only a part of it mapped.
    fn scan_reserve(&mut self, span: Span) -> Result<()> {
        let counted = self.channel.count_mapped_pages(span.page..span.end());
        match counted.map_err(damage_text) {
            Ok(pages) => self.result.reserved_pages = pages,
            Err(damage) => {
                let damage = damage?;
                self.result.damages.record(|| damage);
            }
        }
        self.result.used_pages = self
            .result
            .used_pages
            .saturating_add(self.result.reserved_pages);
        self.result.spans.push(OwnedSpan {
            span,
            owner: Ino::TABLE,
        });
        Ok(())
    }

    /// Scans `count` consecutive pages of the table from `index` on.
    fn scan_table_pages(&mut self, index: u64, page: u64, count: u64) -> Result<()> {
        match self.channel.read(page * PAGE, (count * PAGE) as u32) {
            Ok(bytes) => {
                let first = index * INODES_PER_PAGE;
                for (ino, bytes) in (first..).map(Ino).zip(bytes.chunks(INODE_BYTES)) {
                    self.add_inode(ino, bytes)?;
                }
                Ok(())
            }
            Err(error) if count == 1 => {
                let damage = damage_text(error)?;
                let first = index * INODES_PER_PAGE;
                let last = first + INODES_PER_PAGE - 1;
                let what = || format!("inodes {first} to {last} cannot be read: {damage}");
                self.result.damages.record(what);
                Ok(())
            }
            Err(error) => {
                damage_text(error)?;
                (0..count).try_for_each(|more| self.scan_table_pages(index + more, page + more, 1))
            }
        }
    }

    fn add_inode(&mut self, ino: Ino, bytes: &[u8]) -> Result<()> {
        let inode = match Inode::decode(bytes, self.pages) {
            Ok(inode) if inode.is_free() => return Ok(()),
            Ok(_) if ino == Ino::TABLE => Err(Corruption("it is the table's, and in use".into())),
            inode => inode,
        };
        if ino != Ino::TABLE {
            self.result
                .free_inos
                .append_range(self.result.next_ino..ino.0);
            self.result.next_ino = ino.0 + 1;
        }
        let inode = match inode {
            Ok(inode) => inode,
            Err(cause) => {
                let damage = damage_text(damaged_inode(ino, cause))?;
                self.result.damages.record(|| damage);
                return Ok(());
            }
        };
        self.add_spans(ino, &inode)?;
        self.result
            .redo_logs
            .extend(inode.redo_log.map(|log| (ino, log)));
        let is_service_file = self.result.service_file.visit(ino, &inode);
        match (inode.links, inode.flags & NEEDS_TRIM) {
            (0, _) if !is_service_file => self.result.orphans.push(ino),
            (_, 0) if inode.spare_span.is_none() && inode.append_extent.is_none() => {}
            _ => self.result.unfinished.push(ino),
        }
        Ok(())
    }

    /// Adds the spans of an inode to those in use. Marks an inode untrusted that names pages of
    /// other inodes, or pages beyond the space.
    fn add_spans(&mut self, ino: Ino, inode: &Inode) -> Result<()> {
        let maps_before = self.result.map_owners.len();
        if let Err(error) = self.visit_map(ino, inode) {
            let damage = damage_text(error)?;
            self.result.damages.record(|| damage);
            self.result.damages.untrusted.insert(ino);
        }
        let maps = self.result.map_owners.len() - maps_before;
        self.add_inode_pages(ino, inode, maps as u64);
        Ok(())
    }

    /// Adds the spans and the map pages that the map of an inode names. An error reports the
    /// first inconsistency.
    fn visit_map(&mut self, ino: Ino, inode: &Inode) -> Result<()> {
        let end = self.pages;
        let channel = &mut *self.channel;
        let ScanResult {
            spans,
            map_owners,
            sharers,
            damages,
            ..
        } = &mut self.result;
        let mut named = NamedSpans::default();
        let visited = page_map::visit(
            &inode.map,
            0,
            &mut |page| Ok(Arc::<Page>::from(channel.read_page(page)?)),
            &mut |piece| {
                let span = piece.span;
                if span.end() > end {
                    named.beyond = Some(span.page);
                    return false;
                }
                named.pages += 1 << span.order;
                named.has_shared |= piece.is_shared;
                if !piece.is_shared || add_sharer(sharers, ino, inode, &piece) {
                    spans.push(OwnedSpan { span, owner: ino });
                }
                true
            },
            &mut |page| {
                if page >= end {
                    return Err(beyond_volume(ino, page));
                }
                add_map_page(map_owners, damages, ino, page)
            },
        );
        named.check(ino, inode, visited)
    }

    /// Adds the pages of an inode apart from the spans in its map: those that it counts, `maps` map
    /// pages, its append extent, its spare span and its attributes.
    fn add_inode_pages(&mut self, ino: Ino, inode: &Inode, maps: u64) {
        let found = &mut self.result;
        found
            .spans
            .extend(inode.spare_span.map(|span| OwnedSpan { span, owner: ino }));
        let own = inode.pages.saturating_add(maps);
        let own = own.saturating_add(inode.granted_pages());
        found.used_pages = found.used_pages.saturating_add(own);
        if inode.xattrs.at != 0 {
            let Xattrs { at, order, .. } = inode.xattrs;
            found.used_pages = found.used_pages.saturating_add(1 << order);
            found.spans.push(OwnedSpan {
                span: Span { page: at, order },
                owner: ino,
            });
        }
    }
}

/// The spans in the map of one inode.
#[derive(Default)]
struct NamedSpans {
    /// Their pages.
    pages: u64,
    has_shared: bool,
    /// The first page of a span that ends beyond the space.
    beyond: Option<u64>,
}

impl NamedSpans {
    /// Checks them against the inode. `visited` is the result of the visit.
    fn check(&self, ino: Ino, inode: &Inode, visited: Result<()>) -> Result<()> {
        let may_share = ino != Ino::TABLE && inode.kind() == InodeKind::File;
        if let Some(page) = self.beyond {
            return Err(beyond_volume(ino, page));
        }
        visited?;
        if self.has_shared && !may_share {
            let what = "it shares pages, and is no file";
            return Err(damaged_inode(ino, Corruption(what.into())));
        }
        // The mark says that the pages are still to be counted.
        if inode.flags & NEEDS_TRIM == 0 && inode.pages > self.pages {
            let what = format!("it counts {} pages, and names {}", inode.pages, self.pages);
            return Err(damaged_inode(ino, Corruption(what)));
        }
        Ok(())
    }
}

/// Records a place that names a shared span. Returns whether it is the first one.
fn add_sharer(
    sharers: &mut HashMap<Span, SpanSharers>,
    ino: Ino,
    inode: &Inode,
    piece: &FileSpan,
) -> bool {
    let sharers = sharers.entry(piece.span).or_default();
    sharers.owners.push(ino);
    sharers.mapped_pages = sharers.mapped_pages.or(inode.mapped_pages_in(piece));
    sharers.owners.len() == 1
}

/// Records the owner of a map page. If another inode has the page, both are untrusted.
fn add_map_page(
    owners: &mut HashMap<u64, Ino>,
    damages: &mut DamageLog,
    ino: Ino,
    page: u64,
) -> Result<()> {
    match owners.insert(page, ino) {
        None => Ok(()),
        Some(other) => {
            damages.untrusted.insert(other);
            let what = format!("{} and {} name it", owner_name(other), owner_name(ino));
            Err(page_map::damaged(page, what))
        }
    }
}

fn beyond_volume(ino: Ino, page: u64) -> FsError {
    let what = format!("its map names page {page}, beyond the volume");
    damaged_inode(ino, Corruption(what))
}
