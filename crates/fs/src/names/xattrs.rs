//! Extended attributes: all of an inode's in one span, changed as a whole.
//!
//! One after the other: length of the name 1, length of the value 4, name, value.

use crate::Fs;
use crate::alloc::spans::Span;
use crate::error::{FsError, Result};
use crate::format::inode::{Corruption, Ino, Inode, Xattrs};
use crate::names::namespace::CAPABILITIES;
use crate::txn::core::Tx;
use pagemesh_base::bytes::get_u32;
use pagemesh_base::units::PAGE_BYTES;
use rustix::io::Errno;

/// Longest name in bytes, the limit of the kernel.
const NAME_MAX: usize = 255;
/// Longest value in bytes, the limit of the kernel.
const VALUE_MAX: usize = 65_536;
/// Most bytes of all attributes of one inode. One transaction holds the new attributes, the
/// clearing of the old ones, and the inode.
const XATTRS_BYTES_MAX: usize = 31 * PAGE_BYTES;

/// Condition for setting an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetXattrMode {
    /// None.
    Always,
    /// The attribute does not exist.
    Create,
    /// The attribute exists.
    Replace,
}

type XattrList = Vec<(Vec<u8>, Vec<u8>)>;

fn load_xattrs(tx: &mut Tx<'_>, ino: Ino, inode: &Inode) -> Result<XattrList> {
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

fn store_xattrs(tx: &mut Tx<'_>, inode: &mut Inode, all: &XattrList) -> Result<()> {
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
    };
    Ok(())
}

/// Removes all attributes of an inode.
pub(crate) fn clear_xattrs(tx: &mut Tx<'_>, inode: &mut Inode) {
    let Xattrs { at, order, len } = std::mem::take(&mut inode.xattrs);
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
    if !inode.has_xattrs() {
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

impl Fs {
    /// Removes the capabilities of a file, as every change of its bytes does, also by root
    /// (capabilities(7)). The caller holds the file exclusively.
    pub(crate) fn drop_capabilities(&self, ino: Ino) -> Result<()> {
        let has_some = self.inspect(|core| {
            let mut tx = core.begin();
            let inode = tx.inode(ino)?;
            has_capabilities(&mut tx, ino, &inode)
        })?;
        if !has_some {
            return Ok(());
        }
        let now = self.now();
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            remove_capabilities(tx, ino, &mut inode)?;
            inode.ctime = now;
            tx.put_inode(ino, &inode)
        })
    }

    /// The value of an attribute.
    ///
    /// # Errors
    /// `ENODATA` if the attribute does not exist.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let all = self.all_xattrs(ino)?;
        let found = all.into_iter().find(|(other, _)| other == name);
        Ok(found.ok_or(Errno::NODATA)?.1)
    }

    /// The names of all attributes.
    ///
    /// # Errors
    /// `ESTALE`.
    pub fn xattr_names(&self, ino: Ino) -> Result<Vec<Vec<u8>>> {
        Ok(self
            .all_xattrs(ino)?
            .into_iter()
            .map(|(name, _)| name)
            .collect())
    }

    fn all_xattrs(&self, ino: Ino) -> Result<XattrList> {
        self.inspect(|core| {
            let mut tx = core.begin();
            let inode = tx.inode(ino)?;
            load_xattrs(&mut tx, ino, &inode)
        })
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// `EEXIST`, `ENODATA`, `ERANGE`, `E2BIG`; `ENOSPC` if all attributes together would take more
    /// than 124 KiB.
    pub fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], how: SetXattrMode) -> Result<()> {
        if name.is_empty() || name.len() > NAME_MAX {
            return Err(Errno::RANGE.into());
        }
        if value.len() > VALUE_MAX {
            return Err(Errno::TOOBIG.into());
        }
        // A write through the kernel removes capabilities; direct clients must be blocked.
        let arms = name == CAPABILITIES;
        let armed = arms.then(|| self.file_lock(ino)).transpose()?;
        let _alone = armed.as_ref().map(|data| data.write());
        self.change_xattrs(ino, |all| {
            let found = all.iter_mut().find(|(other, _)| other == name);
            match (found, how) {
                (Some(_), SetXattrMode::Create) => return Err(Errno::EXIST.into()),
                (None, SetXattrMode::Replace) => return Err(Errno::NODATA.into()),
                (Some((_, old)), _) => *old = value.to_vec(),
                (None, _) => all.push((name.to_vec(), value.to_vec())),
            }
            Ok(())
        })
    }

    /// Removes an attribute.
    ///
    /// # Errors
    /// `ENODATA` if the attribute does not exist.
    pub fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        self.change_xattrs(ino, |all| {
            let index = all.iter().position(|(other, _)| other == name);
            all.remove(index.ok_or(Errno::NODATA)?);
            Ok(())
        })
    }

    fn change_xattrs(&self, ino: Ino, change: impl Fn(&mut XattrList) -> Result<()>) -> Result<()> {
        let now = self.now();
        self.change(|tx| {
            let mut inode = tx.inode(ino)?;
            let mut all = load_xattrs(tx, ino, &inode)?;
            change(&mut all)?;
            store_xattrs(tx, &mut inode, &all)?;
            inode.ctime = now;
            tx.put_inode(ino, &inode)
        })
    }
}
