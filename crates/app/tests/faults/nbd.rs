//! A small NBD client over a unix socket: many requests in flight, simple or
//! structured replies.

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const EIO: u32 = 5;
pub const ENOSPC: u32 = 28;
/// Another client has the volume.
pub const SHUTDOWN: u32 = 108;

/// Longer than any stall that a volume may have before it fails a request.
const REPLY_LIMIT: Duration = Duration::from_secs(60);

const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED: u32 = 8;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;

const REQUEST: u32 = 0x2560_9513;
const SIMPLE: u32 = 0x6744_6698;
const STRUCTURED: u32 = 0x668e_33ef;
const CHUNK_DONE: u16 = 1;
const CHUNK_DATA: u16 = 1;
const CHUNK_HOLE: u16 = 2;
const CHUNK_ERROR: u16 = 1 << 15;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Read = 0,
    Write = 1,
    Flush = 3,
    Trim = 4,
    Zero = 6,
}

/// With this flag a change is durable when it is acknowledged.
pub const FUA: u16 = 1;

/// An answer; `errno` 0 is success.
#[derive(Debug)]
pub struct Reply {
    pub cookie: u64,
    pub errno: u32,
    pub data: Vec<u8>,
}

/// A connection to one export.
pub struct NbdConnection {
    input: BufReader<UnixStream>,
    output: UnixStream,
    pub size_bytes: u64,
    structured: bool,
    /// The message of the last error, with structured replies.
    pub last_error: String,
    /// Offset and data so far of each read.
    reads: HashMap<u64, (u64, Vec<u8>)>,
}

fn protocol_error(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

impl NbdConnection {
    /// Connects to an export.
    pub fn connect(socket: &Path, export: &str, structured: bool) -> io::Result<NbdConnection> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(REPLY_LIMIT))?;
        stream.set_write_timeout(Some(REPLY_LIMIT))?;
        let mut nbd = NbdConnection {
            input: BufReader::with_capacity(256 << 10, stream.try_clone()?),
            output: stream,
            size_bytes: 0,
            structured,
            last_error: String::new(),
            reads: HashMap::new(),
        };
        if nbd.take::<16>()? != *b"NBDMAGICIHAVEOPT" {
            return Err(protocol_error("no greeting"));
        }
        nbd.take::<2>()?;
        nbd.output.write_all(&3u32.to_be_bytes())?;
        if structured {
            nbd.send_option(OPTION_STRUCTURED, &[])?;
            nbd.take_option()?;
        }
        let mut wish = (export.len() as u32).to_be_bytes().to_vec();
        wish.extend(export.as_bytes());
        wish.extend(0u16.to_be_bytes());
        nbd.send_option(OPTION_GO, &wish)?;
        loop {
            let (kind, info) = nbd.take_option()?;
            if kind == REPLY_ACK {
                return Ok(nbd);
            }
            if kind == REPLY_INFO && info.starts_with(&[0, 0]) && info.len() >= 10 {
                let size = info[2..10]
                    .try_into()
                    .map_err(|_| protocol_error("no size"))?;
                nbd.size_bytes = u64::from_be_bytes(size);
            }
        }
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.input.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn take_vec(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.input.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn send_option(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.output.write_all(&bytes)
    }

    fn take_option(&mut self) -> io::Result<(u32, Vec<u8>)> {
        self.take::<12>()?;
        let kind = u32::from_be_bytes(self.take()?);
        let len = u32::from_be_bytes(self.take()?) as usize;
        let data = self.take_vec(len)?;
        match kind >> 31 {
            0 => Ok((kind, data)),
            _ => Err(protocol_error(format!(
                "an option was refused: {}",
                String::from_utf8_lossy(&data)
            ))),
        }
    }

    /// Sends a request; `data` holds the bytes of a write.
    pub fn send(
        &mut self,
        cookie: u64,
        (command, flags): (Command, u16),
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(28 + data.len());
        bytes.extend(REQUEST.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        bytes.extend((command as u16).to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes.extend(data);
        if command == Command::Read {
            self.reads.insert(cookie, (offset, vec![0; len as usize]));
        }
        self.output.write_all(&bytes)
    }

    /// Receives replies until a request is answered in full, and returns its answer.
    pub fn reply(&mut self) -> io::Result<Reply> {
        let mut errno = 0;
        loop {
            match u32::from_be_bytes(self.take()?) {
                SIMPLE => {
                    let errno = u32::from_be_bytes(self.take()?);
                    let cookie = u64::from_be_bytes(self.take()?);
                    let (_, mut data) = self.reads.remove(&cookie).unwrap_or_default();
                    if errno == 0 {
                        if self.structured && !data.is_empty() {
                            return Err(protocol_error("a simple reply to a read"));
                        }
                        self.input.read_exact(&mut data)?;
                    }
                    return Ok(Reply {
                        cookie,
                        errno,
                        data,
                    });
                }
                STRUCTURED => {
                    let flags = u16::from_be_bytes(self.take()?);
                    let kind = u16::from_be_bytes(self.take()?);
                    let cookie = u64::from_be_bytes(self.take()?);
                    let len = u32::from_be_bytes(self.take()?) as usize;
                    let payload = self.take_vec(len)?;
                    self.take_chunk(cookie, kind, &payload, &mut errno)?;
                    if flags & CHUNK_DONE != 0 {
                        let (_, data) = self.reads.remove(&cookie).unwrap_or_default();
                        return Ok(Reply {
                            cookie,
                            errno,
                            data,
                        });
                    }
                }
                other => return Err(protocol_error(format!("magic {other:#x}"))),
            }
        }
    }

    fn take_chunk(
        &mut self,
        cookie: u64,
        kind: u16,
        payload: &[u8],
        errno: &mut u32,
    ) -> io::Result<()> {
        match kind {
            CHUNK_DATA => {
                let (at, data) = payload
                    .split_at_checked(8)
                    .ok_or_else(|| protocol_error("short"))?;
                let at = u64::from_be_bytes(at.try_into().map_err(|_| protocol_error("short"))?);
                let read = self.reads.get_mut(&cookie);
                let (offset, whole) = read.ok_or_else(|| protocol_error("no such read"))?;
                let at = at.wrapping_sub(*offset) as usize;
                let place = whole.get_mut(at..at.saturating_add(data.len()));
                place
                    .ok_or_else(|| protocol_error("beyond the read"))?
                    .copy_from_slice(data);
            }
            // The buffer is zero already.
            CHUNK_HOLE | 0 => {}
            kind if kind & CHUNK_ERROR != 0 => {
                let error = payload
                    .first_chunk()
                    .ok_or_else(|| protocol_error("short"))?;
                *errno = u32::from_be_bytes(*error);
                // Two bytes of length precede the message.
                let message = payload.get(6..).unwrap_or_default();
                self.last_error = String::from_utf8_lossy(message).into_owned();
            }
            kind => return Err(protocol_error(format!("chunk {kind}"))),
        }
        Ok(())
    }
}
