//! The protocol between a direct client and a mount, in packets of a unix socket.
//!
//! ```text
//!  client                              mount
//!    │ 1 join                            │   same user, or root? a row free?
//!    ├──────────────────────────────────▶│
//!    │   row, lease; segment's memory    │
//!    │◀──────────────────────────────────┤
//!    │ 2 map of a file                   │
//!    ├──────────────────────────────────▶│
//!    │   found or not; map's memory      │
//!    │◀──────────────────────────────────┤
//! ```
//!
//! | request | meaning |
//! |---|---|
//! | 1 | join: a row, the layout lease, and the segment's memory |
//! | 2 | the map of a file |
//! | 3 | the current layout lease |
//! | 5 | wake the thread that sends direct writes to the asynchronous replica; no answer |
//! | 6 | as 2, with an append extent |
//! | 7 | overwrite parts of a file together; they come in memory (below) |
//! | 8 | give the row back; no answer |
//! | 9 | serve the socket that comes along as another connection of the client; no answer |
//! | 10 | the `map_leg` socket of the brick of a leg, as an `O_PATH` descriptor |
//! | 11 | the memory of the process's counters ([`op_counters`](crate::shared::op_counters)) |
//! | 12 | the status of the mount's direct clients, as JSON in memory |
//!
//! There is no 4. A client that reached the mount through an open file may see neither the name of
//! the mount's socket nor the paths of the bricks' sockets: 9 and 10 serve it. The memory of 7
//! holds: number of parts 4, zero 4; for each part offset 8, length 8; then all bytes.
//!
//! A request: magic 4, version 2, request 2, number 8. An answer: magic 4, version 2, status 2 (0
//! yes, 1 no, 2 joined, 3 failed, 4 refused), row, error or reason 4, legs 4, generation 8, epoch
//! 4; for each leg brick 16, slice 16, length 2, path of its `map_leg` socket. Without legs there
//! is no layout lease at the moment. All numbers are little endian.
//!
//! A packet with memory carries one descriptor. Answers come in the order of requests. Each side
//! closes a connection with malformed packets.

use bytes::Bytes;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, LEGS_MAX, SliceId};
use pagemesh_base::move_fd_high::move_fd_high;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::ATOMIC_PAGES_MAX;
use pagemesh_volume::direct_access::{LayoutLease, LeaseLeg, ROWS};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, recvmsg, sendmsg,
    socket_with,
};
use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use uuid::Uuid;

const MAGIC: u32 = u32::from_le_bytes(*b"pmdg");
const VERSION: u16 = 5;
const REQUEST_BYTES: usize = 16;
const REPLY_HEADER_BYTES: usize = 28;
/// Bytes of a socket's path, as the kernel has it.
const PATH_MAX: usize = 108;
/// Bytes of the longest packet.
const PACKET_MAX: usize = REPLY_HEADER_BYTES + LEGS_MAX * (16 + 16 + 2 + PATH_MAX);

/// A request of a direct client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientRequest {
    /// Asks for a row of its own, the segment, and the current layout lease.
    Join,
    /// Asks for the current layout lease.
    GetLayout,
    /// Asks for the current map of a file that it has open.
    GetFileMap(u64),
    /// As `GetFileMap`, with an append extent.
    GetFileMapForAppend(u64),
    /// Reports that the replication ring has entries; no answer.
    WakeReplicator,
    /// Asks the mount to overwrite parts of a file that it has open, together.
    WriteAtomic(u64),
    /// Gives the row back; no answer. A connection that ends without this request may have been
    /// closed by accident, by a process that goes on.
    ReleaseRow,
    /// Asks for another connection, by the socket that comes along.
    Connect,
    /// Asks for the socket of the brick of a leg of the current layout lease.
    GetBrickSocket(u64),
    /// Asks for the counters of this process.
    GetCounters,
    /// Asks for the status of the mount's direct clients.
    GetStatus,
}

/// The answer of a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountReply {
    /// A row, and the current layout lease, if there is one.
    Joined(u32, Option<LayoutLease>),
    /// The request succeeded; the file map or other memory comes along.
    Success,
    /// Not at the moment: there is no row, though the segment comes along; or no such object.
    Unavailable,
    /// The file cannot be on the direct path as it is.
    FileRefused(FileRefusal),
    /// The request failed, with this error of the system.
    Failed(i32),
}

/// Why a file cannot be on the direct path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRefusal {
    /// A program maps it, or bytes stored into a mapping are not written to it yet.
    Mapped = 1,
    /// It has holes, shared pages, set-id bits or extended attributes.
    Unsupported = 2,
    /// The limit of files on the direct path is reached.
    TooManyFiles = 3,
    /// The kernel caches its pages: a program without the library has it open.
    Cached = 4,
}

/// Bytes of the longest parts, with their headers.
pub const PARTS_BYTES_MAX: usize =
    PARTS_HEAD_BYTES + ATOMIC_PAGES_MAX as usize * (PART_HEAD_BYTES + PAGE_BYTES);
const PARTS_HEAD_BYTES: usize = 8;
const PART_HEAD_BYTES: usize = 16;

/// Encodes the memory that goes with [`ClientRequest::WriteAtomic`].
#[must_use]
pub fn encode_parts(parts: &[(u64, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((parts.len() as u64).to_le_bytes());
    for (offset, data) in parts {
        bytes.extend(offset.to_le_bytes());
        bytes.extend((data.len() as u64).to_le_bytes());
    }
    parts.iter().for_each(|(_, data)| bytes.extend(*data));
    bytes
}

/// Decodes the memory that came with [`ClientRequest::WriteAtomic`].
///
/// # Errors
/// If it is malformed.
pub fn decode_parts(bytes: &Bytes) -> Result<Vec<(u64, Bytes)>, MalformedPacket> {
    let mut from = PacketReader(bytes);
    let count = u64::from_le_bytes(from.take()?);
    if count > ATOMIC_PAGES_MAX {
        return Err(MalformedPacket("too many parts"));
    }
    let mut places = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let place = (
            u64::from_le_bytes(from.take()?),
            u64::from_le_bytes(from.take()?),
        );
        places.push(place);
    }
    let mut parts = Vec::with_capacity(places.len());
    for (offset, len) in places {
        let len = usize::try_from(len).map_err(|_| MalformedPacket("a long part"))?;
        parts.push((offset, bytes.slice_ref(from.slice(len)?)));
    }
    from.check_end()?;
    Ok(parts)
}

/// A malformed packet.
#[derive(Debug, thiserror::Error)]
#[error("malformed packet on the direct path ({0}); use one version of pagemesh")]
pub struct MalformedPacket(&'static str);

impl ClientRequest {
    /// Encodes the packet.
    #[must_use]
    pub fn encode(self) -> [u8; REQUEST_BYTES] {
        let (code, number) = match self {
            ClientRequest::Join => (1u16, 0),
            ClientRequest::GetFileMap(file) => (2, file),
            ClientRequest::GetLayout => (3, 0),
            ClientRequest::WakeReplicator => (5, 0),
            ClientRequest::ReleaseRow => (8, 0),
            ClientRequest::GetFileMapForAppend(file) => (6, file),
            ClientRequest::WriteAtomic(file) => (7, file),
            ClientRequest::Connect => (9, 0),
            ClientRequest::GetBrickSocket(leg) => (10, leg),
            ClientRequest::GetCounters => (11, 0),
            ClientRequest::GetStatus => (12, 0),
        };
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&code.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<ClientRequest, MalformedPacket> {
        let mut from = PacketReader(bytes);
        from.check_header()?;
        let code = u16::from_le_bytes(from.take()?);
        let number = u64::from_le_bytes(from.take()?);
        from.check_end()?;
        match (code, number) {
            (1, 0) => Ok(ClientRequest::Join),
            (2, file) => Ok(ClientRequest::GetFileMap(file)),
            (3, 0) => Ok(ClientRequest::GetLayout),
            (5, 0) => Ok(ClientRequest::WakeReplicator),
            (8, 0) => Ok(ClientRequest::ReleaseRow),
            (6, file) => Ok(ClientRequest::GetFileMapForAppend(file)),
            (7, file) => Ok(ClientRequest::WriteAtomic(file)),
            (9, 0) => Ok(ClientRequest::Connect),
            (10, leg) => Ok(ClientRequest::GetBrickSocket(leg)),
            (11, 0) => Ok(ClientRequest::GetCounters),
            (12, 0) => Ok(ClientRequest::GetStatus),
            _ => Err(MalformedPacket("an unknown request")),
        }
    }
}

impl MountReply {
    /// Encodes the packet.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (status, row, lease) = match self {
            MountReply::Joined(row, lease) => (2u16, *row, lease.as_ref()),
            MountReply::Success => (0, 0, None),
            MountReply::Unavailable => (1, 0, None),
            MountReply::FileRefused(refusal) => (4, *refusal as u32, None),
            MountReply::Failed(error) => (3, *error as u32, None),
        };
        let legs = lease.map_or(&[][..], |lease| &lease.legs);
        let mut bytes = Vec::with_capacity(PACKET_MAX);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(status.to_le_bytes());
        bytes.extend(row.to_le_bytes());
        bytes.extend((legs.len() as u32).to_le_bytes());
        bytes.extend(lease.map_or(0, |it| it.generation).to_le_bytes());
        bytes.extend(lease.map_or(0, |it| it.epoch.0).to_le_bytes());
        for lease_leg in legs {
            let path = lease_leg.socket.as_os_str().as_bytes();
            bytes.extend(lease_leg.brick.0.as_bytes());
            bytes.extend(lease_leg.slice.0.as_bytes());
            bytes.extend((path.len() as u16).to_le_bytes());
            bytes.extend(path);
        }
        bytes
    }

    /// Decodes a packet.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<MountReply, MalformedPacket> {
        let mut from = PacketReader(bytes);
        from.check_header()?;
        let status = u16::from_le_bytes(from.take()?);
        let row = u32::from_le_bytes(from.take()?);
        let count = u32::from_le_bytes(from.take()?) as usize;
        let generation = u64::from_le_bytes(from.take()?);
        let epoch = Epoch(u32::from_le_bytes(from.take()?));
        if count > LEGS_MAX || row as usize >= ROWS {
            return Err(MalformedPacket("too many legs or rows"));
        }
        let mut legs = Vec::with_capacity(count);
        for _ in 0..count {
            let brick = BrickId(Uuid::from_bytes(from.take()?));
            let slice = SliceId(Uuid::from_bytes(from.take()?));
            let len = u16::from_le_bytes(from.take()?) as usize;
            if len > PATH_MAX {
                return Err(MalformedPacket("a long path"));
            }
            let socket = Path::new(OsStr::from_bytes(from.slice(len)?)).to_owned();
            legs.push(LeaseLeg {
                brick,
                slice,
                socket,
            });
        }
        from.check_end()?;
        let has_none = legs.is_empty();
        let lease = (!has_none).then_some(LayoutLease {
            generation,
            epoch,
            legs,
        });
        match status {
            0 if has_none => Ok(MountReply::Success),
            1 if has_none => Ok(MountReply::Unavailable),
            4 if has_none => {
                let all = [
                    FileRefusal::Mapped,
                    FileRefusal::Unsupported,
                    FileRefusal::TooManyFiles,
                    FileRefusal::Cached,
                ];
                let found = all.into_iter().find(|&refusal| refusal as u32 == row);
                found
                    .map(MountReply::FileRefused)
                    .ok_or(MalformedPacket("an unknown reason"))
            }
            2 => Ok(MountReply::Joined(row, lease)),
            3 if has_none => Ok(MountReply::Failed(row as i32)),
            _ => Err(MalformedPacket("an unknown answer")),
        }
    }
}

struct PacketReader<'b>(&'b [u8]);

impl<'b> PacketReader<'b> {
    fn slice(&mut self, len: usize) -> Result<&'b [u8], MalformedPacket> {
        let (taken, rest) = self
            .0
            .split_at_checked(len)
            .ok_or(MalformedPacket("too short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], MalformedPacket> {
        let taken = self.slice(N)?;
        taken.try_into().map_err(|_| MalformedPacket("too short"))
    }

    fn check_header(&mut self) -> Result<(), MalformedPacket> {
        if u32::from_le_bytes(self.take()?) != MAGIC {
            return Err(MalformedPacket("another protocol"));
        }
        match u16::from_le_bytes(self.take()?) {
            VERSION => Ok(()),
            _ => Err(MalformedPacket("another version")),
        }
    }

    fn check_end(&self) -> Result<(), MalformedPacket> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(MalformedPacket("too long"))
        }
    }
}

pub(crate) fn socket_name(device: &str) -> String {
    format!("pagemesh-direct-{device}")
}

/// The address that the mount with this device number (`major:minor`) listens at.
///
/// # Errors
/// If it is too long.
pub fn socket_address(device: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(
        socket_name(device).as_bytes(),
    )?)
}

/// A socket of the kind that both sides use.
///
/// # Errors
/// If the system has none.
pub fn new_socket() -> io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let flags = SocketFlags::CLOEXEC;
    Ok(move_fd_high(socket_with(
        AddressFamily::UNIX,
        kind,
        flags,
        None,
    )?))
}

/// Sends a packet, with memory if there is some. It does not wait for room: there is one request at
/// a time.
///
/// # Errors
/// The error of the system.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    memory: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: &[BorrowedFd<'_>] = memory.as_slice();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    loop {
        return match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => continue,
            Err(cause) => Err(cause.into()),
            Ok(sent) if sent == bytes.len() => Ok(()),
            Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        };
    }
}

/// Waits for the next packet; none: the other side is gone.
///
/// # Errors
/// The error of the system.
pub fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Option<OwnedFd>)>> {
    let mut bytes = vec![0; PACKET_MAX + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(cause) => return Err(cause.into()),
            Ok(received) => break received.bytes,
        }
    };
    let memory = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    bytes.truncate(received);
    Ok((received > 0).then_some((bytes, memory)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout_lease() -> LayoutLease {
        let lease_leg = |number| LeaseLeg {
            brick: BrickId(Uuid::from_u128(number)),
            slice: SliceId(Uuid::from_u128(number + 9)),
            socket: format!("/run/brick-{number}.sock").into(),
        };
        LayoutLease {
            generation: 1 << 40,
            epoch: Epoch(7),
            legs: vec![lease_leg(1), lease_leg(2)],
        }
    }

    #[test]
    fn requests_and_replies_round_trip() {
        for request in [
            ClientRequest::Join,
            ClientRequest::GetLayout,
            ClientRequest::GetFileMap(u64::MAX),
            ClientRequest::WakeReplicator,
            ClientRequest::ReleaseRow,
            ClientRequest::GetFileMapForAppend(8),
            ClientRequest::WriteAtomic(9),
            ClientRequest::Connect,
            ClientRequest::GetBrickSocket(1),
            ClientRequest::GetCounters,
            ClientRequest::GetStatus,
        ] {
            assert_eq!(
                ClientRequest::decode(&request.encode()).expect("sense"),
                request
            );
        }
        let replies = [
            MountReply::Joined(255, Some(layout_lease())),
            MountReply::Joined(3, None),
            MountReply::Success,
            MountReply::Unavailable,
            MountReply::FileRefused(FileRefusal::Unsupported),
            MountReply::Failed(28),
        ];
        for reply in replies {
            assert_eq!(MountReply::decode(&reply.encode()).expect("sense"), reply);
        }
    }

    #[test]
    fn parts_round_trip() {
        let parts: [(u64, &[u8]); 3] = [(4096, b"one"), (u64::MAX, b""), (0, &[7; 5000])];
        let bytes = Bytes::from(encode_parts(&parts));
        let decoded = decode_parts(&bytes).expect("sense");
        let decoded: Vec<_> = decoded.iter().map(|(at, data)| (*at, &data[..])).collect();
        assert_eq!(decoded, parts);
        for len in (0..60).chain([bytes.len() - 1]) {
            assert!(decode_parts(&bytes.slice(..len)).is_err(), "{len} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(decode_parts(&longer.into()).is_err());
        let many = vec![(0, &[][..]); ATOMIC_PAGES_MAX as usize + 1];
        assert!(decode_parts(&encode_parts(&many).into()).is_err());
    }

    #[test]
    fn malformed_packets_are_refused() {
        let whole = MountReply::Joined(3, Some(layout_lease())).encode();
        for len in 0..whole.len() {
            assert!(MountReply::decode(&whole[..len]).is_err(), "{len} bytes");
        }
        for at in 0..28 {
            let mut changed = whole.clone();
            changed[at] ^= 0xff;
            // Numbers may have any value; the fields that they count are checked.
            let decoded = MountReply::decode(&changed);
            assert!(
                decoded.is_err() || (8..9).contains(&at) || at >= 16,
                "byte {at}"
            );
        }
        let whole = ClientRequest::GetFileMap(1).encode();
        for len in 0..whole.len() {
            assert!(ClientRequest::decode(&whole[..len]).is_err(), "{len} bytes");
        }
        assert!(ClientRequest::decode(&[whole.as_slice(), &[0]].concat()).is_err());
    }
}
