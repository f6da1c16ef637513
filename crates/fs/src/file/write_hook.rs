//! Work of a caller inside the core lock or transaction of its write: checks before the change, and attributes around it.

use crate::error::Result;
use crate::file::access::{self, Caller};
use crate::file::attr::{Attr, attr};
use crate::file::wcc::{Wcc, WccAttr};
use crate::format::file_id::FileId;
use crate::format::inode::{Ino, Inode};
use crate::txn::batch::Acknowledge;
use crate::txn::core::Core;
use crate::txn::tx::Tx;
use rustix::io::Errno;

/// Called by a write, in the lock or transaction of each of its parts. A transaction may run again.
pub(crate) trait WriteHook {
    /// The inode before a part changes it. An error ends the write.
    fn begin(&mut self, tx: &mut Tx<'_>, ino: Ino, inode: &Inode) -> Result<()>;

    /// The inode before a part changes its attributes, if that is another lock than the one of [`WriteHook::begin`]: the bytes of the
    /// part are there by now.
    fn begin_attributes(&mut self, inode: &Inode);

    /// The mode of the inode after the write, which may clear set-id bits.
    fn mode_after(&self, inode: &Inode) -> u16;

    /// The inode as a part leaves it.
    fn end(&mut self, core: &mut Core, ino: Ino, inode: &Inode) -> Result<()>;

    /// The part is complete.
    fn complete(&mut self);

    /// When a write that need not be durable returns.
    fn acknowledge(&self) -> Acknowledge {
        Acknowledge::Deferrable
    }
}

/// The kernel has checked the caller, and gets no attributes from a write.
impl WriteHook for () {
    fn begin(&mut self, _: &mut Tx<'_>, _: Ino, _: &Inode) -> Result<()> {
        Ok(())
    }

    fn begin_attributes(&mut self, _: &Inode) {}

    fn mode_after(&self, inode: &Inode) -> u16 {
        inode.mode
    }

    fn end(&mut self, _: &mut Core, _: Ino, _: &Inode) -> Result<()> {
        Ok(())
    }

    fn complete(&mut self) {}
}

/// Checks the permissions of a caller, and collects attributes.
pub(crate) struct CheckedWrite<'c> {
    id: FileId,
    caller: &'c Caller,
    before: Option<WccAttr>,
    /// After the part that runs.
    ended: Option<Attr>,
    /// After the last part that is complete.
    completed: Option<Attr>,
    /// Another change came between two parts.
    is_interleaved: bool,
}

impl CheckedWrite<'_> {
    pub(crate) fn new(id: FileId, caller: &Caller) -> CheckedWrite<'_> {
        CheckedWrite {
            id,
            caller,
            before: None,
            ended: None,
            completed: None,
            is_interleaved: false,
        }
    }

    /// Records the inode before a part.
    fn record_before(&mut self, inode: &Inode) {
        let now = WccAttr::of(inode);
        match &self.completed {
            None => self.before = Some(now),
            Some(last) => self.is_interleaved |= WccAttr::of_attr(last) != now,
        }
    }

    /// `None` if no part is complete.
    pub(crate) fn wcc(self) -> Option<Wcc> {
        Some(Wcc {
            before: self.before.filter(|_| !self.is_interleaved),
            after: Some(self.completed?),
        })
    }
}

impl WriteHook for CheckedWrite<'_> {
    fn begin(&mut self, tx: &mut Tx<'_>, ino: Ino, inode: &Inode) -> Result<()> {
        // A pin keeps the number, and this is the proof.
        if FileId::of(self.id.ino, inode) != self.id {
            return Err(Errno::STALE.into());
        }
        access::check_write(tx, (ino, inode), self.caller)?;
        self.record_before(inode);
        Ok(())
    }

    fn begin_attributes(&mut self, inode: &Inode) {
        self.record_before(inode);
    }

    fn mode_after(&self, inode: &Inode) -> u16 {
        access::mode_after_write(inode, self.caller)
    }

    fn end(&mut self, core: &mut Core, ino: Ino, inode: &Inode) -> Result<()> {
        let mut inode = inode.clone();
        core.apply_pending_times(ino, &mut inode);
        self.ended = Some(attr(core, ino, &inode)?);
        Ok(())
    }

    fn complete(&mut self) {
        self.completed = self.ended.take();
    }

    fn acknowledge(&self) -> Acknowledge {
        Acknowledge::Unstable
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::inode::Time;

    fn inode(nsec: u32) -> Inode {
        let mut inode = Inode::free(1);
        inode.mode = 0o100_600;
        inode.mtime.nsec = nsec;
        inode
    }

    /// A write of two parts; the second one finds this inode.
    fn check(second: &Inode, is_connected: bool) {
        let caller = Caller::trusted(0, 0);
        let id = FileId::new(Ino(5), 1, Time::default());
        let mut hook = CheckedWrite::new(id, &caller);
        hook.record_before(&inode(1));
        hook.ended = Some(Attr::of(Ino(5), &inode(2)));
        hook.complete();
        hook.record_before(second);
        hook.ended = Some(Attr::of(Ino(5), &inode(4)));
        hook.complete();
        let wcc = hook.wcc().expect("parts are complete");
        let before = is_connected.then(|| WccAttr::of(&inode(1)));
        assert_eq!(
            (wcc.before, wcc.after.map(|it| it.mtime.nsec)),
            (before, Some(4))
        );
    }

    #[test]
    fn change_between_parts_hides_attributes_before() {
        check(&inode(2), true);
        check(&inode(3), false);
    }
}
