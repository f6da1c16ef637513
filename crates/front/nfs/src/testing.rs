//! Bytes and values of the unit tests.

#[path = "../../../fs/tests/support/memory.rs"]
#[allow(dead_code, clippy::unwrap_used)]
pub(crate) mod memory;

use crate::connection::Connection;
use crate::connections::Connections;
use crate::export_table::Exports;
use crate::handle::{EncodedHandle, FileHandle, HandleKey};
use crate::limits::Limits;
use crate::nfs3::attributes::{Attributes, DeviceNumber, FileType, Time};
use crate::xdr::{Decode, Encode, Reader, Writer, XdrError};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

/// The big-endian form of words.
pub(crate) fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// The fields of a value, without its tail.
pub(crate) fn encoded(value: &impl Encode) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.value(value);
    writer.into_bytes()
}

/// The fields and the tail of a result, without padding.
pub(crate) fn encoded_with_tail(value: &impl Encode) -> Vec<u8> {
    [&encoded(value)[..], &value.tail()].concat()
}

/// Decodes a value that must take all bytes, and that no shorter input has.
#[track_caller]
pub(crate) fn decoded<'a, T: Decode<'a>>(bytes: &'a [u8]) -> T {
    for len in 0..bytes.len() {
        let short = T::decode(&mut Reader::new(&bytes[..len]));
        assert!(matches!(short, Err(XdrError::Short { .. })), "cut at {len}");
    }
    let mut reader = Reader::new(bytes);
    let value = T::decode(&mut reader).expect("a value");
    assert_eq!(reader.finish("the test's value"), Ok(()));
    value
}

/// The error of bytes that are no value.
#[track_caller]
pub(crate) fn decode_error<'a, T: Decode<'a>>(bytes: &'a [u8]) -> XdrError {
    match T::decode(&mut Reader::new(bytes)) {
        Ok(_) => panic!("the bytes are a value"),
        Err(error) => error,
    }
}

/// A handle of this server.
pub(crate) fn handle() -> EncodedHandle {
    HandleKey::new([1; 16]).encode(&FileHandle {
        volume: [2; 16],
        snapshot_epoch: 0,
        inode: 77,
        generation: 0,
        birth_fold: 3,
    })
}

/// The handle of [`handle`] on the wire: 45 bytes, with length and padding.
pub(crate) fn handle_on_wire() -> Vec<u8> {
    [&[0, 0, 0, 45][..], handle().bytes(), &[0; 3]].concat()
}

/// The attributes of a regular file with the mode 0644.
pub(crate) fn attributes() -> Attributes {
    Attributes {
        kind: FileType::Regular,
        mode: 0o644,
        links: 2,
        uid: 1000,
        gid: 100,
        size_bytes: 0x1_0000_0002,
        used_bytes: 0x1_0000_1000,
        device: DeviceNumber { major: 8, minor: 9 },
        file_system: 0x0102_0304_0506_0708,
        inode: 77,
        accessed: time(10),
        modified: time(20),
        changed: time(30),
    }
}

pub(crate) fn time(seconds: u32) -> Time {
    let nanoseconds = seconds + 1;
    Time {
        seconds,
        nanoseconds,
    }
}

/// The attributes of [`attributes`] on the wire: 21 words in the order of RFC 1813, section 2.6.
#[rustfmt::skip]
pub(crate) const ATTRIBUTE_WORDS: [u32; 21] = [
    1, 0o644, 2, 1000, 100, // type, mode, nlink, uid, gid
    1, 2, 1, 0x1000, // size, used
    8, 9, // rdev
    0x0102_0304, 0x0506_0708, 0, 77, // fsid, fileid
    10, 11, 20, 21, 30, 31, // atime, mtime, ctime
];

/// Optional attributes on the wire, with a value.
pub(crate) fn some_attributes() -> Vec<u32> {
    [&[1][..], &ATTRIBUTE_WORDS].concat()
}

/// The earlier attributes that belong to [`attributes`], with the mark of an optional value: size,
/// mtime, ctime.
pub(crate) const SOME_EARLIER: [u32; 7] = [1, 1, 2, 20, 21, 30, 31];

/// A connection without a server, and its client.
pub(crate) struct Connected {
    pub(crate) connections: Arc<Connections>,
    pub(crate) connection: Arc<Connection>,
    #[allow(dead_code)]
    pub(crate) client: TcpStream,
}

/// Each one has the number 1 and its own bounds.
pub(crate) fn connected() -> Connected {
    let connections = connections_with(Limits::default());
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let address = listener.local_addr().expect("an address");
    let client = TcpStream::connect(address).expect("connected");
    let accepted = listener.accept().expect("a client");
    let connection = Connection::new(1, accepted, Arc::clone(&connections));
    connection.start().expect("started");
    Connected {
        connections,
        connection: Arc::new(connection),
        client,
    }
}

/// The connections of a server that has none yet.
pub(crate) fn connections_with(limits: Limits) -> Arc<Connections> {
    let exports = Exports::new(Vec::new()).expect("no exports");
    let connections = Connections::new(limits, Arc::default(), exports);
    Arc::new(connections.expect("connections"))
}
