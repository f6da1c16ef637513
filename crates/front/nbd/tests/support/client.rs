//! A client that sends the messages of a test, valid or not.

#![allow(dead_code, clippy::unwrap_used)] // Not every test needs all of it.

use super::WAIT_MAX;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

pub const EXPORT_NAME: u32 = 1;
pub const ABORT: u32 = 2;
pub const LIST: u32 = 3;
pub const INFO: u32 = 6;
pub const GO: u32 = 7;
pub const STRUCTURED: u32 = 8;
pub const LIST_CONTEXT: u32 = 9;
pub const SET_CONTEXT: u32 = 10;

pub const ACK: u32 = 1;
pub const SERVER: u32 = 2;
pub const INFORMATION: u32 = 3;
pub const CONTEXT: u32 = 4;
pub const UNSUPPORTED: u32 = (1 << 31) + 1;
pub const POLICY: u32 = (1 << 31) + 2;
pub const INVALID: u32 = (1 << 31) + 3;
pub const UNKNOWN: u32 = (1 << 31) + 6;
pub const SHUTTING_DOWN: u32 = (1 << 31) + 7;
pub const TOO_BIG: u32 = (1 << 31) + 9;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISC: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const ZEROES: u16 = 6;
pub const STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const DF: u16 = 4;
pub const REQ_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;

pub const EPERM: u32 = 1;
pub const EIO: u32 = 5;
pub const EINVAL: u32 = 22;
pub const ENOSPC: u32 = 28;
pub const ENOTSUP: u32 = 95;
pub const ESHUTDOWN: u32 = 108;

/// A request of the client.
#[derive(Clone, Debug)]
pub struct NbdRequest {
    pub command: u16,
    pub flags: u16,
    pub offset: u64,
    pub len: u32,
    pub data: Vec<u8>,
}

impl NbdRequest {
    pub fn new(command: u16, offset: u64, len: u32) -> Self {
        let data = Vec::new();
        Self {
            command,
            flags: 0,
            offset,
            len,
            data,
        }
    }

    pub fn write(offset: u64, data: Vec<u8>) -> Self {
        Self {
            data: data.clone(),
            ..Self::new(WRITE, offset, data.len() as u32)
        }
    }

    pub fn flags(self, flags: u16) -> Self {
        Self { flags, ..self }
    }

    pub fn encode(&self, cookie: u64) -> Vec<u8> {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend(self.command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(self.offset.to_be_bytes());
        bytes.extend(self.len.to_be_bytes());
        bytes.extend(&self.data);
        bytes
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NbdReply {
    Done,
    Data(u64, Vec<u8>),
    /// Length and flags.
    Extents(Vec<(u32, u32)>),
    Error(u32, String),
}

impl NbdReply {
    pub fn errno(&self) -> u32 {
        match self {
            Self::Error(errno, _) => *errno,
            _ => 0,
        }
    }
}

pub struct NbdClient {
    pub stream: UnixStream,
    /// Size and flags of the export.
    pub size_bytes: u64,
    pub flags: u16,
}

impl NbdClient {
    /// A connected client, after the greeting.
    pub fn connect(path: &Path) -> Self {
        let mut client = Self::connect_without_handshake(path);
        assert_eq!(client.take(8), b"NBDMAGIC");
        assert_eq!(client.take(8), b"IHAVEOPT");
        assert_eq!(client.take(2), 3u16.to_be_bytes());
        client.send(&3u32.to_be_bytes());
        client
    }

    pub fn connect_without_handshake(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
        stream.set_write_timeout(Some(WAIT_MAX)).unwrap();
        Self {
            stream,
            size_bytes: 0,
            flags: 0,
        }
    }

    /// A client that chose `disk`, with structured replies and block status.
    pub fn open(path: &Path) -> Self {
        let mut client = Self::connect(path);
        assert_eq!(client.option(STRUCTURED, &[]), [(ACK, vec![])]);
        client.option(SET_CONTEXT, &context("disk", &["base:allocation"]));
        client.go("disk");
        client
    }

    /// A client that chose `disk`, with simple replies.
    pub fn open_simple(path: &Path) -> Self {
        let mut client = Self::connect(path);
        client.go("disk");
        client
    }

    pub fn go(&mut self, name: &str) {
        let answers = self.option(GO, &info(name, &[]));
        assert_eq!(answers.last().unwrap().0, ACK, "{answers:?}");
        let export = &answers
            .iter()
            .find(|(_, data)| data[..2] == [0, 0])
            .unwrap()
            .1;
        self.size_bytes = u64::from_be_bytes(export[2..10].try_into().unwrap());
        self.flags = u16::from_be_bytes(export[10..12].try_into().unwrap());
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn take(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn take_u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().unwrap())
    }

    pub fn take_u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    pub fn take_u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take(8).try_into().unwrap())
    }

    /// Whether the server has closed the connection; drops pending bytes.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        }
    }

    pub fn option(&mut self, kind: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(&option(kind, data));
        let mut answers = Vec::new();
        loop {
            let (of, answer, data) = self.take_answer();
            assert_eq!(of, kind);
            answers.push((answer, data));
            if answer == ACK || answer >= 1 << 31 {
                return answers;
            }
        }
    }

    pub fn take_answer(&mut self) -> (u32, u32, Vec<u8>) {
        assert_eq!(self.take_u64(), 0x0003_e889_0455_65a9);
        let (of, answer, len) = (self.take_u32(), self.take_u32(), self.take_u32());
        (of, answer, self.take(len as usize))
    }

    pub fn request(&mut self, ask: &NbdRequest) -> NbdReply {
        self.send(&ask.encode(42));
        let data = if ask.command == READ { ask.len } else { 0 };
        let (cookie, answer) = self.read_reply(|_| data);
        assert_eq!(cookie, 42);
        answer
    }

    /// The next reply; `data` returns the number of bytes after a simple one.
    pub fn read_reply(&mut self, data: impl Fn(u64) -> u32) -> (u64, NbdReply) {
        match self.take_u32() {
            0x6744_6698 => {
                let (errno, cookie) = (self.take_u32(), self.take_u64());
                let answer = match (errno, data(cookie)) {
                    (0, 0) => NbdReply::Done,
                    (0, len) => NbdReply::Data(0, self.take(len as usize)),
                    (errno, _) => NbdReply::Error(errno, String::new()),
                };
                (cookie, answer)
            }
            0x668e_33ef => self.read_chunk(),
            other => panic!("no reply starts with {other:#x}"),
        }
    }

    fn read_chunk(&mut self) -> (u64, NbdReply) {
        assert_eq!(self.take_u16(), 1, "every reply is one chunk");
        let kind = self.take_u16();
        let cookie = self.take_u64();
        let len = self.take_u32() as usize;
        let answer = match kind {
            1 => NbdReply::Data(self.take_u64(), self.take(len - 8)),
            5 => {
                assert_eq!(self.take_u32(), 1);
                let count = (len - 4) / 8;
                NbdReply::Extents(
                    (0..count)
                        .map(|_| (self.take_u32(), self.take_u32()))
                        .collect(),
                )
            }
            0x8001 => {
                let errno = self.take_u32();
                let len = self.take_u16();
                let why = self.take(len.into());
                NbdReply::Error(errno, String::from_utf8(why).unwrap())
            }
            other => panic!("unknown chunk {other}"),
        };
        (cookie, answer)
    }
}

pub fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The data of `INFO` and `GO`.
pub fn info(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((wanted.len() as u16).to_be_bytes());
    for kind in wanted {
        data.extend(kind.to_be_bytes());
    }
    data
}

/// The data of the options for metadata contexts.
pub fn context(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend(text(query));
    }
    data
}

fn text(text: &str) -> Vec<u8> {
    let mut data = (text.len() as u32).to_be_bytes().to_vec();
    data.extend(text.as_bytes());
    data
}
