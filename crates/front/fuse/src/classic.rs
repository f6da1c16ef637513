//! Requests and answers through `/dev/fuse`.

use crate::abi::{self, DATA_BYTES_MAX, Dialect};
use crate::busy::RequestCounter;
use crate::cpu_affinity::CpuAffinity;
use crate::reply::FuseReply;
use crate::request::RawRequest;
use crate::request_handler::RequestHandler;
use bytes::{Bytes, BytesMut};
use pagemesh_base::wait::until_readable;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::io::{self, IoSlice};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// The kernel requires room for the longest write and its headers, and counts a page for those.
const BUFFER_BYTES: usize = DATA_BYTES_MAX as usize + 4096;

/// Delay between two checks whether an additional thread is needed.
const NEED_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// The result of polling the device.
#[allow(clippy::large_enum_variant, reason = "it is passed on at once")]
pub(crate) enum ReceiveResult {
    Request(RawRequest),
    Empty,
    /// The mount is gone.
    Unmounted,
}

pub(crate) struct Classic {
    device: Arc<OwnedFd>,
    request_counter: RequestCounter,
    cpu_affinity: CpuAffinity,
    /// The current mode of the device's open file.
    is_blocking: bool,
    /// The buffer of the last request.
    request_buffer: Bytes,
    dialect: Dialect,
}

impl Classic {
    pub(crate) fn new(device: Arc<OwnedFd>, noter: RequestCounter, dialect: Dialect) -> Classic {
        Classic {
            device,
            request_counter: noter,
            cpu_affinity: CpuAffinity::default(),
            is_blocking: true,
            request_buffer: Bytes::new(),
            dialect,
        }
    }

    /// Readable when there may be requests.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.device.as_raw_fd()
    }

    /// Waits for the next request; None: the mount is gone.
    pub(crate) fn receive(&mut self) -> io::Result<Option<RawRequest>> {
        self.set_blocking(true)?;
        let mut buffer = self.reclaim_buffer();
        let len = read(&self.device, &mut buffer)?;
        self.request_buffer = buffer.freeze();
        len.map(|len| self.request(len)).transpose()
    }

    pub(crate) fn answer(&self, unique: u64, answer: &FuseReply) {
        write(&self.device, unique, answer);
    }

    /// The next request, if there is one already. Earlier requests need not be answered.
    pub(crate) fn try_receive(&mut self) -> io::Result<ReceiveResult> {
        self.set_blocking(false)?;
        let mut buffer = self.reclaim_buffer();
        let read = read_once(&self.device, &mut buffer)?;
        self.request_buffer = buffer.freeze();
        match read {
            ReadResult::Bytes(len) => self.request(len).map(ReceiveResult::Request),
            ReadResult::Empty => Ok(ReceiveResult::Empty),
            ReadResult::Unmounted => Ok(ReceiveResult::Unmounted),
        }
    }

    /// Only this thread uses this open file.
    fn set_blocking(&mut self, blocks: bool) -> io::Result<()> {
        if self.is_blocking != blocks {
            let flags = match blocks {
                true => OFlags::empty(),
                false => OFlags::NONBLOCK,
            };
            rustix::fs::fcntl_setfl(&*self.device, flags)?;
            self.is_blocking = blocks;
        }
        Ok(())
    }

    fn request(&mut self, len: usize) -> io::Result<RawRequest> {
        self.request_counter.count_request();
        let incoming = RawRequest::from_message(&self.request_buffer.slice(..len), self.dialect);
        let what = || io::Error::other(format!("the kernel sent {len} bytes that are no request"));
        let incoming = incoming.ok_or_else(what)?;
        self.cpu_affinity
            .record_request(incoming.header.pid, incoming.header.opcode);
        Ok(incoming)
    }

    /// A buffer without other references.
    fn reclaim_buffer(&mut self) -> BytesMut {
        match std::mem::take(&mut self.request_buffer).try_into_mut() {
            Ok(back) if back.len() == BUFFER_BYTES => back,
            // It is the first one, or another owner still has a part of the old one.
            _ => BytesMut::zeroed(BUFFER_BYTES),
        }
    }
}

/// Reads until there is a request. None: the mount is gone.
pub(crate) fn read(device: &OwnedFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match read_once(device, buffer)? {
            ReadResult::Bytes(len) => return Ok(Some(len)),
            ReadResult::Empty => {}
            ReadResult::Unmounted => return Ok(None),
        }
    }
}

enum ReadResult {
    Bytes(usize),
    /// The open file does not block.
    Empty,
    /// The mount is gone.
    Unmounted,
}

fn read_once(device: &OwnedFd, buffer: &mut [u8]) -> io::Result<ReadResult> {
    loop {
        return match rustix::io::read(device, &mut *buffer) {
            Ok(len) => Ok(ReadResult::Bytes(len)),
            // ENOENT: the kernel withdrew the request before it could be read.
            Err(Errno::INTR | Errno::NOENT) => continue,
            Err(Errno::AGAIN) => Ok(ReadResult::Empty),
            // CONNABORTED: the mount ended while the kernel handed out a request, such as the release
            // of a file just before an unmount.
            Err(Errno::NODEV | Errno::CONNABORTED) => Ok(ReadResult::Unmounted),
            Err(errno) => Err(errno.into()),
        };
    }
}

/// Writes an answer. Its caller may have gone already.
pub(crate) fn write(device: &OwnedFd, unique: u64, answer: &FuseReply) {
    let bytes = answer.bytes();
    let header = abi::OutHeader {
        len: (size_of::<abi::OutHeader>() + bytes.len()) as u32,
        error: answer.error(),
        unique,
    };
    let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(bytes)];
    loop {
        match rustix::io::writev(device, &parts) {
            Ok(_) => return,
            Err(Errno::INTR) => {}
            Err(Errno::NOENT | Errno::NODEV) => {
                tracing::debug!(unique, "the caller of a request is gone");
                return;
            }
            Err(errno) => {
                // The kernel has failed the request, and goes on.
                tracing::error!(unique, cause = %errno, "the kernel refused an answer");
                return;
            }
        }
    }
}

/// Makes the kernel drop its cached attributes and pages of an inode. It waits for requests that
/// read or write pages. Returns whether the kernel did it.
pub(crate) fn invalidate_inode(device: &OwnedFd, node: u64) -> bool {
    notify_invalidate(device, node, 0, 0)
}

/// Drops attributes and the pages with these bytes; an empty range counts as one byte.
pub(crate) fn invalidate_bytes(device: &OwnedFd, node: u64, bytes: Range<u64>) -> bool {
    let len = bytes.end.saturating_sub(bytes.start).max(1);
    notify_invalidate(device, node, bytes.start.cast_signed(), len.cast_signed())
}

/// Drops attributes alone: it waits for nothing.
pub(crate) fn invalidate_attributes(device: &OwnedFd, node: u64) -> bool {
    notify_invalidate(device, node, abi::NO_PAGES, 0)
}

/// A length of 0: to the end.
fn notify_invalidate(device: &OwnedFd, node: u64, offset: i64, len: i64) -> bool {
    let body = abi::NotifyInvalInodeOut { node, offset, len };
    notify(device, node, abi::NOTIFY_INVAL_INODE, &[body.as_bytes()])
}

/// Reports a minimum size of a file to the kernel, with its last byte. This may put a page into the
/// cache.
pub(crate) fn notify_size(device: &OwnedFd, node: u64, size: u64, last: u8) {
    let Some(offset) = size.checked_sub(1) else {
        return;
    };
    let body = abi::NotifyStoreOut {
        node,
        offset,
        size: 1,
        ..abi::NotifyStoreOut::default()
    };
    let parts = [body.as_bytes(), &[last]];
    notify(device, node, abi::NOTIFY_STORE, &parts);
}

/// Makes the kernel ask for a name of a directory again. It waits for the lock of the directory. Returns whether the kernel did it, or
/// has no such name.
pub(crate) fn invalidate_entry(device: &OwnedFd, parent: u64, name: &[u8]) -> bool {
    let body = abi::NotifyInvalEntryOut {
        parent,
        name_len: name.len() as u32,
        flags: 0,
    };
    let parts = [body.as_bytes(), name, &[0]];
    notify(device, parent, abi::NOTIFY_INVAL_ENTRY, &parts)
}

/// The same for a name that was removed, with its inode.
pub(crate) fn notify_delete(device: &OwnedFd, parent: u64, child: u64, name: &[u8]) -> bool {
    let body = abi::NotifyDeleteOut {
        parent,
        child,
        name_len: name.len() as u32,
        unused: 0,
    };
    let parts = [body.as_bytes(), name, &[0]];
    notify(device, parent, abi::NOTIFY_DELETE, &parts)
}

/// Returns whether the kernel did it, or has no such inode.
fn notify(device: &OwnedFd, node: u64, code: i32, body: &[&[u8]]) -> bool {
    let len: usize = body.iter().map(|part| part.len()).sum();
    let header = abi::OutHeader {
        len: (size_of::<abi::OutHeader>() + len) as u32,
        error: code,
        unique: 0,
    };
    let mut parts = vec![IoSlice::new(header.as_bytes())];
    parts.extend(body.iter().map(|part| IoSlice::new(part)));
    match rustix::io::writev(device, &parts) {
        Ok(_) | Err(Errno::NOENT) => true,
        Err(cause) => {
            tracing::debug!(node, code, %cause, "the kernel refused a notification about an inode");
            false
        }
    }
}

/// Serves one request after the other, until the mount is gone.
pub(crate) fn serve(line: &mut Classic, files: &dyn RequestHandler) -> io::Result<()> {
    while let Some(incoming) = line.receive()? {
        handle(line, files, incoming);
    }
    Ok(())
}

/// Serves as long as there are requests, or the thread is needed for new ones.
pub(crate) fn serve_while(
    line: &mut Classic,
    files: &dyn RequestHandler,
    is_needed: impl Fn() -> bool,
) -> io::Result<()> {
    loop {
        match line.try_receive()? {
            ReceiveResult::Request(incoming) => handle(line, files, incoming),
            ReceiveResult::Empty if is_needed() => {
                until_readable(
                    &[line.descriptor()],
                    Some(Instant::now() + NEED_CHECK_INTERVAL),
                )?;
            }
            ReceiveResult::Empty | ReceiveResult::Unmounted => return Ok(()),
        }
    }
}

fn handle(line: &mut Classic, files: &dyn RequestHandler, incoming: RawRequest) {
    let header = incoming.header;
    let answer = match incoming.decode() {
        Ok(request) => files.handle(&header, request),
        Err(errno) => FuseReply::Error(errno),
    };
    if !incoming.has_no_reply() {
        // Drops the references to the buffer's memory.
        drop(incoming);
        line.answer(header.unique, &answer);
    }
}
