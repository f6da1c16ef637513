//! The check of an inode that was read: its fields are consistent, and name only pages of the space.

use crate::error::Corruption;
use crate::format::inode::{
    AppendExtent, FILE_BYTES_MAX, HAS_RESERVED_PAGES, INLINE, INLINE_MAX, Ino, Inode, InodeKind,
    NEEDS_TRIM, TARGET_MAX, TIER, Xattrs,
};
use crate::format::page_map::{
    MAP_HEIGHT_MAX, PageMap, Span, is_span_within, pages_to_next_span, span_order,
};
use pagemesh_base::units::PAGE_BYTES;

/// Attributes lie in a span of up to 2^5 pages.
const XATTRS_ORDER_MAX: u8 = 5;
const NSEC_MAX: u32 = 999_999_999;

type CheckResult = std::result::Result<(), Corruption>;

fn refuse(why: String) -> CheckResult {
    Err(Corruption(why))
}

/// Whether the span lies in a space of `pages` pages, or there is none.
fn is_span_or_none(page: u64, order: u8, pages: u64) -> bool {
    page == 0 || is_span_within(Span { page, order }, pages)
}

impl Inode {
    /// Checks an inode in use. `pages` is the size of the space.
    pub(super) fn check(&self, pages: u64) -> CheckResult {
        if self.flags & !(NEEDS_TRIM | HAS_RESERVED_PAGES | INLINE | TIER) != 0
            || self.flags & TIER == TIER
        {
            return refuse(format!("its flags are {:#x}", self.flags));
        }
        self.check_size()?;
        self.check_times()?;
        self.check_spans(pages)?;
        self.check_append_extent()?;
        self.check_redo_log()?;
        self.check_map_root(pages)?;
        self.check_xattrs(pages)?;
        if self.pages > pages {
            return refuse(format!("it has {} pages", self.pages));
        }
        Ok(())
    }

    fn check_size(&self) -> CheckResult {
        let is_link = self.kind() == InodeKind::Symlink;
        let is_inline = self.flags & INLINE != 0;
        let longest = match (is_link, is_inline) {
            (true, true) => INLINE_MAX as u64,
            (true, false) => TARGET_MAX as u64,
            (false, true) => return refuse("it has a target and is no link".into()),
            (false, false) => FILE_BYTES_MAX,
        };
        // An orphan may have lost its target.
        if self.size > longest || (is_link && self.size == 0 && self.links > 0) {
            return refuse(format!("its size is {}", self.size));
        }
        Ok(())
    }

    fn check_times(&self) -> CheckResult {
        let times = [self.atime, self.mtime, self.ctime, self.btime];
        match times.iter().find(|time| time.nsec > NSEC_MAX) {
            Some(time) => refuse(format!("a second of its times has {} ns", time.nsec)),
            None => Ok(()),
        }
    }

    /// Checks the spans that the inode names itself. Only files share spans, and have a spare.
    fn check_spans(&self, pages: u64) -> CheckResult {
        let is_file = self.kind() == InodeKind::File;
        for (index, place) in self.map.spans.iter().enumerate() {
            let at = place.page();
            if !is_span_or_none(at, span_order(index), pages) {
                return refuse(format!("its span {index} begins at page {at}"));
            }
            if place.is_shared() && (at == 0 || !is_file) {
                return refuse(format!("its span {index} is shared"));
            }
        }
        match self.spare_span {
            Some(spare) if !is_span_within(spare, pages) || !is_file => {
                refuse(format!("its spare span begins at page {}", spare.page))
            }
            _ => Ok(()),
        }
    }

    /// The append extent begins at the end of a plain file, and ends within the same span.
    fn check_append_extent(&self) -> CheckResult {
        let Some(AppendExtent { limit_page, .. }) = self.append_extent else {
            return Ok(());
        };
        let first = self.size / PAGE_BYTES as u64;
        let end = first + pages_to_next_span(first);
        let is_plain =
            self.kind() == InodeKind::File && self.flags & (NEEDS_TRIM | HAS_RESERVED_PAGES) == 0;
        if !is_plain || limit_page <= first || limit_page > end {
            return refuse(format!("it grows up to page {limit_page}"));
        }
        Ok(())
    }

    fn check_redo_log(&self) -> CheckResult {
        let can_have_log = self.kind() == InodeKind::File && self.append_extent.is_none();
        match self.redo_log {
            Some(log) if log <= Ino::ROOT || !can_have_log => {
                refuse(format!("it is to be written from inode {}", log.0))
            }
            _ => Ok(()),
        }
    }

    fn check_map_root(&self, pages: u64) -> CheckResult {
        let PageMap { root, height, .. } = self.map;
        if height > MAP_HEIGHT_MAX || root >= pages || (root == 0) != (height == 0) {
            return refuse(format!("its map of height {height} begins at page {root}"));
        }
        Ok(())
    }

    fn check_xattrs(&self, pages: u64) -> CheckResult {
        let Xattrs { at, order, len, .. } = self.xattrs;
        let is_span = order <= XATTRS_ORDER_MAX && is_span_or_none(at, order, pages);
        if !is_span || (at == 0) != (len == 0) {
            return refuse(format!(
                "its attributes begin at page {at}, with order {order}"
            ));
        }
        if u64::from(len) > (PAGE_BYTES as u64) << order {
            return refuse(format!("its attributes have {len} bytes"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::inode::INODE_BYTES;
    use crate::format::page_map::SpanRef;

    const PAGES: u64 = 1 << 20;

    /// The sum of this page and the length of its span overflows to 0.
    #[test]
    fn span_with_overflowing_end_is_refused() {
        let mut inode = Inode::decode(&[0; INODE_BYTES], PAGES).expect("a free one");
        inode.map.spans[0] = SpanRef(u64::MAX >> 1 & !7);
        inode.check(PAGES).expect_err("beyond the volume");
    }
}
