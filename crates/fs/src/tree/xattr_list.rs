//! Extended attributes in the volume: all of an inode's in one span, as a list of records ([`crate::format::xattr_list`]).
//!
//! A change writes as few pages as it can: a new record goes to the end, and a removed one is replaced by the last record of
//! its length. A long list has an index in memory. So the time of a call depends little on the number of attributes. The
//! span has room for more, at most four times the list.

use crate::error::Result;
use crate::format::acl::AclKind;
use crate::format::inode::{Ino, Inode, Xattrs};
use crate::format::page_map::Span;
use crate::format::xattr_kinds::XattrKinds;
use crate::format::xattr_list::{Record, XattrList, encode_record};
use crate::txn::tx::Tx;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

/// The attribute that Linux keeps the capabilities of a program in.
pub(crate) const CAPABILITIES: &[u8] = b"security.capability";
/// Most bytes of all attributes of one inode. One transaction holds the new attributes, the
/// clearing of the old ones, and the inode.
const XATTRS_BYTES_MAX: usize = 31 * PAGE_BYTES;
/// A span with more than so many times the pages of its list is replaced.
const SPARE_FACTOR: usize = 4;

/// The list of an inode as an operation sees it.
pub(crate) fn load_xattrs(tx: &mut Tx<'_>, ino: Ino, inode: &Inode) -> Result<XattrList> {
    tx.core.check_trusted(ino)?;
    let Xattrs { at, len, .. } = inode.xattrs;
    let pages = at..at + u64::from(len).div_ceil(PAGE_BYTES as u64);
    let pages: Result<Vec<_>> = pages.map(|page| tx.page(page)).collect();
    Ok(XattrList::new(ino, inode.xattrs, pages?))
}

/// The kind of an attribute, if operations ask for it.
fn kind_of(name: &[u8]) -> Option<XattrKinds> {
    match AclKind::of_attribute(name) {
        Some(AclKind::Access) => Some(XattrKinds::ACCESS_ACL),
        Some(AclKind::Default) => Some(XattrKinds::DEFAULT_ACL),
        None => (name == CAPABILITIES).then_some(XattrKinds::CAPABILITIES),
    }
}

/// The value of an attribute of an inode.
pub(crate) fn get_xattr(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &Inode,
    name: &[u8],
) -> Result<Option<Vec<u8>>> {
    if kind_of(name).is_some_and(|kind| !inode.may_have_xattr(kind)) {
        return Ok(None);
    }
    let list = load_xattrs(tx, ino, inode)?;
    let found = tx.core.xattr_indexes.find(&list, name)?;
    Ok(found.map(|record| list.copy(record.value())))
}

/// Sets an attribute. The caller stores the inode.
///
/// # Errors
/// `ENOSPC`.
pub(crate) fn set_xattr(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &mut Inode,
    name: &[u8],
    value: &[u8],
) -> Result<()> {
    let list = load_xattrs(tx, ino, inode)?;
    let kinds = kinds_of(&list, inode)?;
    match tx.core.xattr_indexes.find(&list, name)? {
        Some(record) if record.value_len == value.len() => {
            write_at(tx, inode, record.value().start, value)?;
        }
        Some(record) => {
            remove_record(tx, inode, &list, record, &encode_record(name, value))?;
        }
        None => put_tail(tx, inode, (ino, list.len), &encode_record(name, value))?,
    }
    inode.xattrs.kinds = kinds.with(kind_of(name));
    Ok(())
}

/// Removes an attribute. Returns whether it was there. The caller stores the inode.
pub(crate) fn remove_xattr(
    tx: &mut Tx<'_>,
    ino: Ino,
    inode: &mut Inode,
    name: &[u8],
) -> Result<bool> {
    if kind_of(name).is_some_and(|kind| !inode.may_have_xattr(kind)) {
        return Ok(false);
    }
    let list = load_xattrs(tx, ino, inode)?;
    let kinds = kinds_of(&list, inode)?;
    let Some(record) = tx.core.xattr_indexes.find(&list, name)? else {
        return Ok(false);
    };
    remove_record(tx, inode, &list, record, &[])?;
    if inode.has_xattrs() {
        inode.xattrs.kinds = kinds.without(kind_of(name));
    }
    Ok(true)
}

/// The kinds of the attributes of an inode. An earlier release has not stored them.
fn kinds_of(list: &XattrList, inode: &Inode) -> Result<XattrKinds> {
    if inode.xattrs.kinds.is_known() {
        return Ok(inode.xattrs.kinds);
    }
    let names = list.names()?;
    let kinds = names.iter().filter_map(|name| kind_of(name));
    Ok(XattrKinds::of(kinds))
}

/// Removes a record, and adds bytes to the end. The last record of the same length takes the place of the removed one, so
/// that only records behind that one move.
fn remove_record(
    tx: &mut Tx<'_>,
    inode: &mut Inode,
    list: &XattrList,
    removed: Record,
    added: &[u8],
) -> Result<()> {
    let last = tx.core.xattr_indexes.last_of_len(list, removed)?;
    if last.at != removed.at {
        write_at(tx, inode, removed.at, &list.copy(last.at..last.end()))?;
    }
    let mut tail = list.copy(last.end()..list.len);
    tail.extend_from_slice(added);
    put_tail(tx, inode, (list.ino, last.at), &tail)
}

/// Ends the list of an inode with these bytes from an offset on.
fn put_tail(
    tx: &mut Tx<'_>,
    inode: &mut Inode,
    (ino, at): (Ino, usize),
    tail: &[u8],
) -> Result<()> {
    let len = at + tail.len();
    if len > XATTRS_BYTES_MAX {
        return Err(Errno::NOSPC.into());
    }
    let pages = len.div_ceil(PAGE_BYTES).next_power_of_two();
    let span_pages = 1usize << inode.xattrs.order;
    if len > 0 && inode.has_xattrs() && pages <= span_pages && span_pages <= pages * SPARE_FACTOR {
        write_at(tx, inode, at, tail)?;
        let written = inode.xattrs.len.div_ceil(PAGE_BYTES as u32);
        inode.xattrs.len = len as u32;
        let left = len.div_ceil(PAGE_BYTES) as u64;
        (left..written.into()).for_each(|page| tx.clear(inode.xattrs.at + page));
        return Ok(());
    }
    let mut bytes = load_xattrs(tx, ino, inode)?.copy(0..at);
    bytes.extend_from_slice(tail);
    clear_xattrs(tx, inode);
    if bytes.is_empty() {
        return Ok(());
    }
    let span = tx.allocate_span(pages.ilog2() as u8)?;
    tx.count_pages(pages as i64);
    inode.xattrs = Xattrs {
        at: span.page,
        order: span.order,
        ..Xattrs::default()
    };
    write_at(tx, inode, 0, &bytes)?;
    inode.xattrs.len = bytes.len() as u32;
    Ok(())
}

/// Writes bytes of the list within its span.
fn write_at(tx: &mut Tx<'_>, inode: &Inode, at: usize, bytes: &[u8]) -> Result<()> {
    let old_pages = u64::from(inode.xattrs.len).div_ceil(PAGE_BYTES as u64);
    let (mut at, mut rest) = (at, bytes);
    while !rest.is_empty() {
        let (index, within) = ((at / PAGE_BYTES) as u64, at % PAGE_BYTES);
        let (part, after) = rest.split_at(rest.len().min(PAGE_BYTES - within));
        let page = match index < old_pages {
            true => tx.page_mut(inode.xattrs.at + index)?,
            false => tx.new_page(inode.xattrs.at + index),
        };
        page[within..within + part.len()].copy_from_slice(part);
        (at, rest) = (at + part.len(), after);
    }
    Ok(())
}

/// Removes all attributes of an inode.
pub(crate) fn clear_xattrs(tx: &mut Tx<'_>, inode: &mut Inode) {
    let Xattrs { at, order, len, .. } = std::mem::take(&mut inode.xattrs);
    if at == 0 {
        return;
    }
    let written = (len as usize).div_ceil(PAGE_BYTES) as u64;
    (at..at + written).for_each(|page| tx.clear(page));
    tx.count_pages(-(1 << order));
    tx.free_span(Span { page: at, order });
}

/// Whether a file has capabilities.
pub(crate) fn has_capabilities(tx: &mut Tx<'_>, ino: Ino, inode: &Inode) -> Result<bool> {
    Ok(get_xattr(tx, ino, inode, CAPABILITIES)?.is_some())
}

/// Removes the capabilities of a file. Returns whether there were any. The caller stores the inode.
pub(crate) fn remove_capabilities(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode) -> Result<bool> {
    remove_xattr(tx, ino, inode, CAPABILITIES)
}
