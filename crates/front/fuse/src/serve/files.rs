//! Contents of files, and their open descriptors.

use super::{RequestContext, has_flag, refuse, written};
use crate::abi;
use crate::open_files::OpenFiles;
use crate::reply::FuseReply;
use crate::request::ReadRange;
use crate::thread_credentials;
use bytes::Bytes;
use pagemesh_fs::{AllocateMode, Ino, Result, SeekTarget};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

/// Bytes of one copy; callers with more ask again.
const COPIED_BYTES_MAX: u64 = 64 << 20;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

/// The offset of a write; none: to the end.
pub(super) fn write_offset(offset: u64, flags: u32) -> Option<u64> {
    (!has_flag(flags, OFlags::APPEND)).then_some(offset)
}

fn allocate_mode(mode: u32) -> Option<AllocateMode> {
    let mode = FallocateFlags::from_bits(mode)?;
    let keep_size = mode.contains(FallocateFlags::KEEP_SIZE);
    let rest = mode - FallocateFlags::KEEP_SIZE;
    match rest {
        rest if rest.is_empty() => Some(AllocateMode::Reserve { keep_size }),
        FallocateFlags::PUNCH_HOLE if keep_size => Some(AllocateMode::Punch),
        FallocateFlags::ZERO_RANGE => Some(AllocateMode::Zero { keep_size }),
        _ => None,
    }
}

impl RequestContext<'_> {
    pub(super) fn read(
        &self,
        file: u64,
        span: ReadRange,
        flags: u32,
        how: u32,
    ) -> Result<FuseReply> {
        if how & abi::READ_LOCK_OWNER == 0 {
            self.before_cached_read(file)?;
        }
        let mut channel = self.fs.borrow_channel()?;
        let (fs, channel, ino) = (self.fs, &mut *channel, self.ino);
        let bytes = match has_flag(flags, OFlags::NOATIME) {
            false => fs.read(channel, ino, span.offset, span.size)?,
            true => fs.read_without_time(channel, ino, span.offset, span.size)?,
        };
        Ok(FuseReply::Data(bytes))
    }

    pub(super) fn write(
        &self,
        file: u64,
        offset: u64,
        data: &Bytes,
        flags: u32,
        how: u32,
    ) -> Result<FuseReply> {
        if how & abi::WRITE_KILL_SUIDGID != 0 {
            self.clear_setid_unprivileged()?;
        }
        if how & (abi::WRITE_CACHE | abi::WRITE_LOCK_OWNER) == 0 {
            self.before_cached_write(file)?;
        }
        let mut channel = self.fs.borrow_channel()?;
        if how & abi::WRITE_CACHE != 0 {
            self.fs
                .buffer_mmap_write(&mut channel, self.ino, offset, data)?;
            return Ok(written(data.len()));
        }
        let at = write_offset(offset, flags);
        let is_durable = self.handler.is_write_durable(file, flags);
        let (fs, ino) = (self.fs, self.ino);
        let bytes = match how & abi::WRITE_LOCK_OWNER {
            0 => fs.write(&mut channel, ino, at, data, is_durable),
            _ => fs.write_past_cache(&mut channel, ino, at, data, is_durable),
        };
        drop(channel);
        let bytes = bytes.inspect_err(|_| self.before_failed_write_reply(how))?;
        self.before_write_reply(how, offset, bytes.clone());
        self.handler.record_write(file, how);
        Ok(written((bytes.end - bytes.start) as usize))
    }

    pub(super) fn open(&self, flags: u32) -> Result<FuseReply> {
        self.fs.open(self.ino)?;
        let opened = self.open_file(self.ino, flags);
        let opened = opened.inspect_err(|_| self.fs.release(self.ino))?;
        Ok(FuseReply::new(&opened))
    }

    pub(super) fn open_dir(&self) -> Result<FuseReply> {
        self.fs.open(self.ino)?;
        self.handler.open_files.add_directory(self.ino);
        Ok(FuseReply::new(&abi::OpenOut::default()))
    }

    pub(super) fn release(&self, file: u64) -> FuseReply {
        self.handler.open_files.close(self.fs, self.ino, file);
        self.fs.release(self.ino);
        FuseReply::DONE
    }

    pub(super) fn flush(&self) -> FuseReply {
        self.fs.record_close(self.ino);
        FuseReply::DONE
    }

    pub(super) fn fsync(&self, file: u64, is_data_only: bool) -> Result<FuseReply> {
        self.sync(self.ino, file, is_data_only)?;
        Ok(FuseReply::DONE)
    }

    pub(super) fn allocate(
        &self,
        file: u64,
        offset: u64,
        length: u64,
        mode: u32,
    ) -> Result<FuseReply> {
        let how = allocate_mode(mode).ok_or(Errno::OPNOTSUPP)?;
        self.clear_setid(self.ino)?;
        let mut channel = self.fs.borrow_channel()?;
        let done = self
            .fs
            .allocate(&mut channel, self.ino, how, offset, length);
        drop(channel);
        if !matches!(how, AllocateMode::Reserve { .. }) {
            let bytes = offset..offset.saturating_add(length);
            self.fs.drop_written_pages(self.ino, bytes);
        }
        done?;
        self.sync_if_opened_sync(self.ino, file)?;
        Ok(FuseReply::DONE)
    }

    pub(super) fn seek(&self, offset: i64, whence: u32) -> Result<FuseReply> {
        let what = match whence {
            SEEK_DATA => SeekTarget::Data,
            SEEK_HOLE => SeekTarget::Hole,
            _ => return refuse(Errno::INVAL),
        };
        let offset = u64::try_from(offset).map_err(|_| Errno::NXIO)?;
        let mut channel = self.fs.borrow_channel()?;
        let found = self.fs.seek(&mut channel, self.ino, offset, what)?;
        Ok(FuseReply::new(&abi::LseekOut {
            offset: found.cast_signed(),
        }))
    }

    pub(super) fn copy(
        &self,
        from: (Ino, u64),
        to: (Ino, u64),
        to_file: u64,
        len: u64,
    ) -> Result<FuseReply> {
        self.clear_setid(to.0)?;
        let mut channel = self.fs.borrow_channel()?;
        let len = len.min(COPIED_BYTES_MAX);
        let copied = self.fs.copy(&mut channel, from, to, len);
        drop(channel);
        self.fs
            .drop_written_pages(to.0, to.1..to.1.saturating_add(len));
        let copied = copied?;
        self.sync_if_opened_sync(to.0, to_file)?;
        Ok(written(copied as usize))
    }

    fn sync(&self, ino: Ino, file: u64, is_data_only: bool) -> Result<()> {
        let opened = self.handler.open_files.get(file);
        if let Some(opened) = &opened {
            opened.sync_pattern.record_sync(is_data_only);
        }
        let channel = &mut *self.fs.borrow_channel()?;
        match opened {
            Some(opened) if opened.take_expected_sync() || is_data_only => {
                self.fs.sync_data(channel, ino, &opened.lost_writes)
            }
            Some(opened) => self.fs.sync_open_file(channel, ino, &opened.lost_writes),
            // A directory, all of which is durable in any case.
            None => self.fs.sync(channel, ino),
        }
    }

    /// A change of a file that was opened with O_DSYNC or O_SYNC is durable when it returns.
    fn sync_if_opened_sync(&self, ino: Ino, file: u64) -> Result<()> {
        if OpenFiles::is_synced(file) {
            self.sync(ino, file, false)?;
        }
        Ok(())
    }

    /// Clears the set-id bits of a file that a caller without the privilege for them changes.
    pub(super) fn clear_setid(&self, ino: Ino) -> Result<()> {
        let caller = |gid| thread_credentials::caller(self.caller, self.thread, gid);
        self.fs.clear_setid(ino, caller)
    }

    /// The same for a caller that the kernel found to lack the privilege. The kernel reports it for writes and sizes only.
    pub(super) fn clear_setid_unprivileged(&self) -> Result<()> {
        let caller = |gid| thread_credentials::unprivileged_caller(self.caller, self.thread, gid);
        self.fs.clear_setid(self.ino, caller)
    }
}
