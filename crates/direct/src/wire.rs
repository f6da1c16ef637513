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
//! it as another connection of the guest; no answer. 10 asks for the `map` socket of the brick of a leg, as
//! a descriptor that only names it (`O_PATH`). A guest that reached the mount by a file may see
//! neither the name of the mount's socket nor the paths of the bricks'. 11 asks for the memory of
//! the process's ledger ([`account`](crate::account)). 12 asks what the mount knows of its processes, which
//! comes as JSON in memory. There is no 4.
//!
//! A question: magic 4, version 2, what 2, number 8. An answer: magic 4, version 2, status 2
//! (0 yes, 1 no, 2 joined, 3 failed, 4 hidden), row, error or reason 4, legs 4, generation 8, epoch 4; for each leg brick
//! 16, slice 16, length 2, path of its `map` socket. Without legs there is no picture to
//! work by at the moment. Little endian. A packet with memory
//! carries one descriptor. Answers come in the order of questions; a connection whose
//! packets make no sense is ended.

use bytes::Bytes;
use pagemesh_base::aside::aside;
use pagemesh_base::ids::Epoch;
use pagemesh_base::layout::{BrickId, COPIES_MAX, SliceId};
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_fs::TOGETHER_PAGES_MAX;
use pagemesh_volume::guests::{Picture, ROWS, Seat};
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
const QUESTION_BYTES: usize = 16;
const ANSWER_BYTES: usize = 28;
/// Bytes of a socket's path, as the kernel has it.
const PATH_MAX: usize = 108;
/// Bytes of the longest packet.
const PACKET_MAX: usize = ANSWER_BYTES + COPIES_MAX * (16 + 16 + 2 + PATH_MAX);

/// What a guest asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    /// For a row of its own, with the segment; and the picture that counts now.
    Join,
    /// For what counts now.
    Look,
    /// For the board of a file that it has open, as it is now.
    Board(u64),
    /// The same, with room behind its end.
    Grow(u64),
    /// For nothing: there is something in the ring.
    Call,
    /// For parts of a file that it has open to be overwritten together.
    Write(u64),
    /// For nothing: it needs the row no more. A connection that ends without a word may have
    /// been closed by accident, by a process that goes on.
    Leave,
    /// For another connection, by the socket that comes with it.
    Connect,
    /// For the socket of the brick of a leg of the present picture.
    Socket(u64),
    /// For the ledger of this process.
    Account,
    /// For what the mount knows of its processes.
    Status,
}

/// What a mount answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A row, and what to work by, if there is something.
    Joined(u32, Option<Picture>),
    /// The board shows the file.
    Yes,
    /// Not now: there is no row, though the segment comes; or no such thing.
    No,
    /// Guests cannot have the file as it is.
    Hidden(Hidden),
    /// It failed, with this error of the system.
    Failed(i32),
}

/// Why guests cannot have a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hidden {
    /// A program maps it, or something that was stored into a mapping is not in it yet.
    Mapped = 1,
    /// It has holes, shared pages, set-id bits or extended attributes.
    Shape = 2,
    /// As many files as there may be are on the path.
    Full = 3,
    /// The kernel caches its pages: a program without the library has it open.
    Cached = 4,
}

/// Bytes of the longest parts, with what tells of them.
pub const PARTS_BYTES_MAX: usize =
    PARTS_HEAD_BYTES + TOGETHER_PAGES_MAX as usize * (PART_BYTES + PAGE_BYTES);
const PARTS_HEAD_BYTES: usize = 8;
const PART_BYTES: usize = 16;

/// What goes with [`Question::Write`].
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

/// What came with [`Question::Write`].
///
/// # Errors
/// When it makes no sense.
pub fn decode_parts(bytes: &Bytes) -> Result<Vec<(u64, Bytes)>, Strange> {
    let mut from = Reader(bytes);
    let count = u64::from_le_bytes(from.take()?);
    if count > TOGETHER_PAGES_MAX {
        return Err(Strange("too many parts"));
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
        let len = usize::try_from(len).map_err(|_| Strange("a long part"))?;
        parts.push((offset, bytes.slice_ref(from.slice(len)?)));
    }
    from.end()?;
    Ok(parts)
}

/// A packet that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error(
    "the other side of the direct path says what makes no sense ({0}); use one version of pagemesh"
)]
pub struct Strange(&'static str);

impl Question {
    /// The packet.
    #[must_use]
    pub fn encode(self) -> [u8; QUESTION_BYTES] {
        let (what, number) = match self {
            Question::Join => (1u16, 0),
            Question::Board(file) => (2, file),
            Question::Look => (3, 0),
            Question::Call => (5, 0),
            Question::Leave => (8, 0),
            Question::Grow(file) => (6, file),
            Question::Write(file) => (7, file),
            Question::Connect => (9, 0),
            Question::Socket(leg) => (10, leg),
            Question::Account => (11, 0),
            Question::Status => (12, 0),
        };
        let mut bytes = [0; QUESTION_BYTES];
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
    pub fn decode(bytes: &[u8]) -> Result<Question, Strange> {
        let mut from = Reader(bytes);
        from.head()?;
        let what = u16::from_le_bytes(from.take()?);
        let number = u64::from_le_bytes(from.take()?);
        from.end()?;
        match (what, number) {
            (1, 0) => Ok(Question::Join),
            (2, file) => Ok(Question::Board(file)),
            (3, 0) => Ok(Question::Look),
            (5, 0) => Ok(Question::Call),
            (8, 0) => Ok(Question::Leave),
            (6, file) => Ok(Question::Grow(file)),
            (7, file) => Ok(Question::Write(file)),
            (9, 0) => Ok(Question::Connect),
            (10, leg) => Ok(Question::Socket(leg)),
            (11, 0) => Ok(Question::Account),
            (12, 0) => Ok(Question::Status),
            _ => Err(Strange("an unknown question")),
        }
    }
}

impl Answer {
    /// The packet.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (status, row, picture) = match self {
            Answer::Joined(row, picture) => (2u16, *row, picture.as_ref()),
            Answer::Yes => (0, 0, None),
            Answer::No => (1, 0, None),
            Answer::Hidden(hidden) => (4, *hidden as u32, None),
            Answer::Failed(error) => (3, *error as u32, None),
        };
        let seats = picture.map_or(&[][..], |picture| &picture.seats);
        let mut bytes = Vec::with_capacity(PACKET_MAX);
        bytes.extend(MAGIC.to_le_bytes());
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(status.to_le_bytes());
        bytes.extend(row.to_le_bytes());
        bytes.extend((seats.len() as u32).to_le_bytes());
        bytes.extend(picture.map_or(0, |it| it.generation).to_le_bytes());
        bytes.extend(picture.map_or(0, |it| it.epoch.0).to_le_bytes());
        for seat in seats {
            let path = seat.socket.as_os_str().as_bytes();
            bytes.extend(seat.brick.0.as_bytes());
            bytes.extend(seat.slice.0.as_bytes());
            bytes.extend((path.len() as u16).to_le_bytes());
            bytes.extend(path);
        }
        bytes
    }

    /// What a packet says.
    ///
    /// # Errors
    /// When it makes no sense.
    pub fn decode(bytes: &[u8]) -> Result<Answer, Strange> {
        let mut from = Reader(bytes);
        from.head()?;
        let status = u16::from_le_bytes(from.take()?);
        let row = u32::from_le_bytes(from.take()?);
        let count = u32::from_le_bytes(from.take()?) as usize;
        let generation = u64::from_le_bytes(from.take()?);
        let epoch = Epoch(u32::from_le_bytes(from.take()?));
        if count > COPIES_MAX || row as usize >= ROWS {
            return Err(Strange("too many legs or rows"));
        }
        let mut seats = Vec::with_capacity(count);
        for _ in 0..count {
            let brick = BrickId(Uuid::from_bytes(from.take()?));
            let slice = SliceId(Uuid::from_bytes(from.take()?));
            let len = u16::from_le_bytes(from.take()?) as usize;
            if len > PATH_MAX {
                return Err(Strange("a long path"));
            }
            let socket = Path::new(OsStr::from_bytes(from.slice(len)?)).to_owned();
            seats.push(Seat {
                brick,
                slice,
                socket,
            });
        }
        from.end()?;
        let has_none = seats.is_empty();
        let picture = (!has_none).then_some(Picture {
            generation,
            epoch,
            seats,
        });
        match status {
            0 if has_none => Ok(Answer::Yes),
            1 if has_none => Ok(Answer::No),
            4 if has_none => {
                let all = [Hidden::Mapped, Hidden::Shape, Hidden::Full, Hidden::Cached];
                let found = all.into_iter().find(|&hidden| hidden as u32 == row);
                found
                    .map(Answer::Hidden)
                    .ok_or(Strange("an unknown reason"))
            }
            2 => Ok(Answer::Joined(row, picture)),
            3 if has_none => Ok(Answer::Failed(row as i32)),
            _ => Err(Strange("an unknown answer")),
        }
    }
}

struct Reader<'b>(&'b [u8]);

impl<'b> Reader<'b> {
    fn slice(&mut self, len: usize) -> Result<&'b [u8], Strange> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Strange("too short"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Strange> {
        let taken = self.slice(N)?;
        taken.try_into().map_err(|_| Strange("too short"))
    }

    fn head(&mut self) -> Result<(), Strange> {
        if u32::from_le_bytes(self.take()?) != MAGIC {
            return Err(Strange("another protocol"));
        }
        match u16::from_le_bytes(self.take()?) {
            VERSION => Ok(()),
            _ => Err(Strange("another version")),
        }
    }

    fn end(&self) -> Result<(), Strange> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(Strange("too long")),
        }
    }
}

pub(crate) fn name(device: &str) -> String {
    format!("pagemesh-direct-{device}")
}

/// Where the mount with this device number (`major:minor`) listens.
///
/// # Errors
/// When it is too long.
pub fn address(device: &str) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(name(device).as_bytes())?)
}

/// A socket of the kind that both sides use.
///
/// # Errors
/// When the system has none.
pub fn socket() -> io::Result<OwnedFd> {
    let kind = SocketType::SEQPACKET;
    let flags = SocketFlags::CLOEXEC;
    Ok(aside(socket_with(AddressFamily::UNIX, kind, flags, None)?))
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

    fn picture() -> Picture {
        let seat = |number| Seat {
            brick: BrickId(Uuid::from_u128(number)),
            slice: SliceId(Uuid::from_u128(number + 9)),
            socket: format!("/run/brick-{number}.sock").into(),
        };
        Picture {
            generation: 1 << 40,
            epoch: Epoch(7),
            seats: vec![seat(1), seat(2)],
        }
    }

    #[test]
    fn what_is_said_is_understood() {
        for question in [
            Question::Join,
            Question::Look,
            Question::Board(u64::MAX),
            Question::Call,
            Question::Leave,
            Question::Grow(8),
            Question::Write(9),
            Question::Connect,
            Question::Socket(1),
            Question::Account,
            Question::Status,
        ] {
            assert_eq!(
                Question::decode(&question.encode()).expect("sense"),
                question
            );
        }
        let answers = [
            Answer::Joined(255, Some(picture())),
            Answer::Joined(3, None),
            Answer::Yes,
            Answer::No,
            Answer::Hidden(Hidden::Shape),
            Answer::Failed(28),
        ];
        for answer in answers {
            assert_eq!(Answer::decode(&answer.encode()).expect("sense"), answer);
        }
    }

    #[test]
    fn parts_come_as_they_were_sent() {
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
        let many = vec![(0, &[][..]); TOGETHER_PAGES_MAX as usize + 1];
        assert!(decode_parts(&encode_parts(&many).into()).is_err());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let whole = Answer::Joined(3, Some(picture())).encode();
        for len in 0..whole.len() {
            assert!(Answer::decode(&whole[..len]).is_err(), "{len} bytes");
        }
        for at in 0..28 {
            let mut changed = whole.clone();
            changed[at] ^= 0xff;
            // Numbers may be any; what they count may not.
            let decoded = Answer::decode(&changed);
            assert!(
                decoded.is_err() || (8..9).contains(&at) || at >= 16,
                "byte {at}"
            );
        }
        let whole = Question::Board(1).encode();
        for len in 0..whole.len() {
            assert!(Question::decode(&whole[..len]).is_err(), "{len} bytes");
        }
        assert!(Question::decode(&[whole.as_slice(), &[0]].concat()).is_err());
    }
}
