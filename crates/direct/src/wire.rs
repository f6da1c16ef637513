//! What a guest and a mount say to each other, in packets of a unix socket.
//!
//! ```text
//!  guest                               mount
//!    │ 1 join                            │   same user, or root? a row free?
//!    ├──────────────────────────────────▶│
//!    │   row, picture; segment's memory  │
//!    │◀──────────────────────────────────┤
//!    │ 2 board of a file                 │
//!    ├──────────────────────────────────▶│
//!    │   found or not; board's memory    │
//!    │◀──────────────────────────────────┤
//! ```
//! 3 looks for a newer picture. 5 has no answer: it calls who sends what guests changed to a copy
//! that follows. 6 is 2 for who wants to make the file longer. 7 has the mount overwrite parts of
//! a file together, which come in memory: how many 4, 0 4; for each offset 8, length 8; all bytes
//! behind each other. 8 gives the row back, and has no answer. 9 brings a socket: the mount serves
//! it as another connection of the guest; no answer. 10 asks for the `map_leg` socket of the brick of a leg, as
//! a descriptor that only names it (`O_PATH`). A guest that reached the mount by a file may see
//! neither the name of the mount's socket nor the paths of the bricks'. 11 asks for the memory of
//! the process's ledger ([`op_counters`](crate::account)). 12 asks what the mount knows of its processes, which
//! comes as JSON in memory. There is no 4.
//!
//! A question: magic 4, version 2, what 2, number 8. An answer: magic 4, version 2, status 2
//! (0 yes, 1 no, 2 joined, 3 failed, 4 hidden), row, error or reason 4, legs 4, generation 8, epoch 4; for each leg brick
//! 16, slice 16, length 2, path of its `map_leg` socket. Without legs there is no picture to
//! work by at the moment. Little endian. A packet with memory
//! carries one descriptor. Answers come in the order of questions; a connection whose
//! packets make no sense is ended.

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

/// What a guest asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientRequest {
    /// For a row of its own, with the segment; and the picture that counts now.
    Join,
    /// For what counts now.
    GetLayout,
    /// For the board of a file that it has open, as it is now.
    GetFileMap(u64),
    /// The same, with room behind its end.
    GetFileMapForAppend(u64),
    /// For nothing: there is something in the ring.
    WakeReplicator,
    /// For parts of a file that it has open to be overwritten together.
    WriteAtomic(u64),
    /// For nothing: it needs the row no more. A connection that ends without a word may have
    /// been closed by accident, by a process that goes on.
    ReleaseRow,
    /// For another connection, by the socket that comes with it.
    Connect,
    /// For the socket of the brick of a leg of the present picture.
    GetBrickSocket(u64),
    /// For the ledger of this process.
    GetCounters,
    /// For what the mount knows of its processes.
    GetStatus,
}

/// What a mount answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountReply {
    /// A row, and what to work by, if there is something.
    Joined(u32, Option<LayoutLease>),
    /// The board shows the file.
    Success,
    /// Not now: there is no row, though the segment comes; or no such thing.
    Unavailable,
    /// Guests cannot have the file as it is.
    FileRefused(FileRefusal),
    /// It failed, with this error of the system.
    Failed(i32),
}

/// Why guests cannot have a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRefusal {
    /// A program maps it, or something that was stored into a mapping is not in it yet.
    Mapped = 1,
    /// It has holes, shared pages, set-id bits or extended attributes.
    Unsupported = 2,
    /// As many files as there may be are on the path.
    TooManyFiles = 3,
    /// The kernel caches its pages: a program without the library has it open.
    Cached = 4,
}

/// Bytes of the longest parts, with what tells of them.
pub const PARTS_BYTES_MAX: usize =
    PARTS_HEAD_BYTES + ATOMIC_PAGES_MAX as usize * (PART_HEAD_BYTES + PAGE_BYTES);
const PARTS_HEAD_BYTES: usize = 8;
const PART_HEAD_BYTES: usize = 16;

/// What goes with [`ClientRequest::WriteAtomic`].
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

/// What came with [`ClientRequest::WriteAtomic`].
///
/// # Errors
/// When it makes no sense.
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

/// A packet that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error(
    "the other side of the direct path says what makes no sense ({0}); use one version of pagemesh"
)]
pub struct MalformedPacket(&'static str);

impl ClientRequest {
    /// The packet.
    #[must_use]
    pub fn encode(self) -> [u8; REQUEST_BYTES] {
        let (what, number) = match self {
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
        bytes[6..8].copy_from_slice(&what.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// What a packet says.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn decode(bytes: &[u8]) -> Result<ClientRequest, MalformedPacket> {
        let mut from = PacketReader(bytes);
        from.check_header()?;
        let what = u16::from_le_bytes(from.take()?);
        let number = u64::from_le_bytes(from.take()?);
        from.check_end()?;
        match (what, number) {
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
            _ => Err(MalformedPacket("an unknown question")),
        }
    }
}

impl MountReply {
    /// The packet.
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

    /// What a packet says.
    ///
    /// # Errors
    /// When it makes no sense.
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
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(MalformedPacket("too long")),
        }
    }
}

pub(crate) fn socket_name(device: &str) -> String {
    format!("pagemesh-direct-{device}")
}

/// Where the mount with this device number (`major:minor`) listens.
///
/// # Errors
/// When it is too long.
pub fn socket_address(device: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(
        socket_name(device).as_bytes(),
    )?)
}

/// A socket of the kind that both sides use.
///
/// # Errors
/// When the system has none.
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

/// Sends a packet, with memory if there is some. Does not wait for room: there is one
/// question at a time.
///
/// # Errors
/// What the system says.
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

/// The next packet; none: the other side is gone. Waits for it.
///
/// # Errors
/// What the system says.
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
            // Numbers may be any; what they count may not.
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
