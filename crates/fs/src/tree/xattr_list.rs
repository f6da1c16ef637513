//! Extended attributes in the volume: all of an inode's in one span, changed as a whole.
//!
//! One after the other: length of the name 1, length of the value 4, name, value.

use crate::error::{Corruption, FsError, Result};
use crate::format::acl::AclKind;
use crate::format::inode::{Ino, Inode, Xattrs};
use crate::format::page_map::Span;
use crate::format::xattr_kinds::XattrKinds;
use crate::txn::tx::Tx;
use pagemesh_base::bytes::get_u32;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

/// The attribute that Linux keeps the capabilities of a program in.
pub(crate) const CAPABILITIES: &[u8] = b"security.capability";
/// Most bytes of all attributes of one inode. One transaction holds the new attributes, the
/// clearing of the old ones, and the inode.
const XATTRS_BYTES_MAX: usize = 31 * PAGE_BYTES;

pub(crate) type XattrList = Vec<(Vec<u8>, Vec<u8>)>;

pub(crate) fn load_xattrs(tx: &mut Tx<'_>, ino: Ino, inode: &Inode) -> Result<XattrList> {
    tx.core.check_trusted(ino)?;
    let Xattrs { at, len, .. } = inode.xattrs;
    let len = len as usize;
    let mut bytes = Vec::with_capacity(len.next_multiple_of(PAGE_BYTES));
    for page in at..at + len.div_ceil(PAGE_BYTES) as u64 {
        tx.with_page(page, |page| bytes.extend_from_slice(page))?;
    }
    let cut = || FsError::Damaged {
        what: format!("page {at} of the volume, attributes of inode {},", ino.0),
        cause: Corruption("an attribute goes beyond the end".into()),
    };
    let mut all = XattrList::new();
    let mut rest = &bytes[..len];
    while !rest.is_empty() {
        let (head, after) = rest.split_at_checked(5).ok_or_else(cut)?;
        let (name, after) = after
            .split_at_checked(usize::from(head[0]))
            .ok_or_else(cut)?;
        let (value, after) = after
            .split_at_checked(get_u32(head, 1) as usize)
            .ok_or_else(cut)?;
        all.push((name.to_vec(), value.to_vec()));
        rest = after;
    }
    Ok(all)
}

pub(crate) fn store_xattrs(tx: &mut Tx<'_>, inode: &mut Inode, all: &XattrList) -> Result<()> {
    let mut bytes = Vec::new();
    for (name, value) in all {
        bytes.push(name.len() as u8);
        bytes.extend_from_slice(&(value.len() as u32).to_le_bytes());
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(value);
    }
    if bytes.len() > XATTRS_BYTES_MAX {
        return Err(Errno::NOSPC.into());
    }
    clear_xattrs(tx, inode);
    if bytes.is_empty() {
        return Ok(());
    }
    let pages = bytes.len().div_ceil(PAGE_BYTES).next_power_of_two();
    let span = tx.allocate_span(pages.ilog2() as u8)?;
    tx.count_pages(pages as i64);
    for (page, part) in (span.page..).zip(bytes.chunks(PAGE_BYTES)) {
        tx.new_page(page)[..part.len()].copy_from_slice(part);
    }
    inode.xattrs = Xattrs {
        at: span.page,
        order: span.order,
        len: bytes.len() as u32,
        kinds: XattrKinds::of(all.iter().filter_map(|(name, _)| kind_of(name))),
    };
    Ok(())
}

/// The kind of an attribute, if operations ask for it.
fn kind_of(name: &[u8]) -> Option<XattrKinds> {
    match AclKind::of_attribute(name) {
        Some(AclKind::Access) => Some(XattrKinds::ACCESS_ACL),
        Some(AclKind::Default) => Some(XattrKinds::DEFAULT_ACL),
        None => (name == CAPABILITIES).then_some(XattrKinds::CAPABILITIES),
    }
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
    if !inode.may_have_xattr(XattrKinds::CAPABILITIES) {
        return Ok(false);
    }
    let all = load_xattrs(tx, ino, inode)?;
    Ok(all.iter().any(|(name, _)| name == CAPABILITIES))
}

/// Removes the capabilities of a file. Returns whether there were any. The caller stores the inode.
pub(crate) fn remove_capabilities(tx: &mut Tx<'_>, ino: Ino, inode: &mut Inode) -> Result<bool> {
    if !has_capabilities(tx, ino, inode)? {
        return Ok(false);
    }
    let mut all = load_xattrs(tx, ino, inode)?;
    all.retain(|(name, _)| name != CAPABILITIES);
    store_xattrs(tx, inode, &all)?;
    Ok(true)
}
