//! Connections of a load: non-blocking, watched by one epoll.

use super::record_scanner::{RecordScanner, ScannedReply};
use crate::error::BenchError;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;
use std::io::{ErrorKind, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// Most connections of a load.
pub const CONNECTIONS_MAX: usize = 4096;
/// Limit of a connect.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of one read from a socket.
const READ_BYTES: usize = 256 << 10;
/// Reads from one socket before the next one.
const READS_MAX: usize = 4;
/// Events of one wait.
const EVENTS_MAX: usize = 256;
struct LoadConnection {
    stream: TcpStream,
    scanner: RecordScanner,
    out: Vec<u8>,
    out_at: usize,
    waits_for_room: bool,
}

/// Connections to one server.
pub struct LoadConnections {
    all: Vec<LoadConnection>,
    epoll: OwnedFd,
    server: SocketAddr,
    buffer: Vec<u8>,
}

fn cannot(action: &str) -> impl FnOnce(std::io::Error) -> BenchError + use<> {
    BenchError::system(action.to_owned())
}

impl LoadConnections {
    /// Connects.
    ///
    /// # Errors
    /// If the number is 0 or above [`CONNECTIONS_MAX`], or the server refuses.
    pub fn open(server: SocketAddr, count: usize) -> Result<LoadConnections, BenchError> {
        if !(1..=CONNECTIONS_MAX).contains(&count) {
            let text = format!("{count} connections are not 1 to {CONNECTIONS_MAX}");
            return Err(BenchError::Option(text));
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = epoll.map_err(|errno| cannot("make an epoll")(errno.into()))?;
        let mut connections = LoadConnections {
            all: Vec::with_capacity(count),
            epoll,
            server,
            buffer: vec![0; READ_BYTES],
        };
        for at in 0..count {
            let connection = LoadConnection::open(server).map_err(connections.cannot_reach())?;
            let data = epoll::EventData::new_u64(at as u64);
            epoll::add(
                &connections.epoll,
                &connection.stream,
                data,
                epoll::EventFlags::IN,
            )
            .map_err(|errno| cannot("watch a connection")(errno.into()))?;
            connections.all.push(connection);
        }
        Ok(connections)
    }

    /// The number of connections.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    /// Adds a record to the bytes that wait for room.
    pub(super) fn push(&mut self, at: usize, record: &[u8]) {
        self.all[at].push(record);
    }

    /// Closes all connections, and opens as many new ones.
    pub(super) fn reopen(&mut self) -> Result<(), BenchError> {
        self.reopen_at(self.server)
    }

    /// Closes all connections, and opens as many to another server.
    pub(super) fn reopen_at(&mut self, server: SocketAddr) -> Result<(), BenchError> {
        let count = self.all.len();
        self.all.clear();
        *self = LoadConnections::open(server, count)?;
        Ok(())
    }

    fn cannot_reach(&self) -> impl FnOnce(std::io::Error) -> BenchError + use<> {
        cannot(&format!("speak with the NFS server at {}", self.server))
    }

    /// Waits for answers or room, at most for this time. The limit is precise to nanoseconds, as in ppoll(2): the limit of
    /// epoll_wait(2) is in milliseconds, rounded up.
    pub(super) fn wait(&self, limit: Duration) -> Result<Vec<(usize, bool)>, BenchError> {
        let limit = Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
        match poll(&mut fds, Some(&limit)) {
            // A signal has ended the wait early.
            Ok(0) | Err(Errno::INTR) => Ok(Vec::new()),
            Ok(_) => self.ready(),
            Err(errno) => Err(cannot("wait for answers")(errno.into())),
        }
    }

    /// Connections with answers or room now.
    pub(super) fn ready(&self) -> Result<Vec<(usize, bool)>, BenchError> {
        let mut events = [MaybeUninit::uninit(); EVENTS_MAX];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let (ready, _) = match epoll::wait(&self.epoll, &mut events, Some(&now)) {
            Err(Errno::INTR) => return Ok(Vec::new()),
            ready => ready.map_err(|errno| cannot("wait for answers")(errno.into()))?,
        };
        let of = |event: &epoll::Event| {
            let (flags, data) = (event.flags, event.data);
            let has_room = flags.contains(epoll::EventFlags::OUT);
            (data.u64() as usize, has_room)
        };
        Ok(ready.iter().map(of).collect())
    }

    /// Sends the bytes that wait for room, and asks for a wake-up if some are left.
    pub(super) fn flush(&mut self, at: usize) -> Result<(), BenchError> {
        let unreachable = self.cannot_reach();
        let connection = &mut self.all[at];
        let is_done = connection.flush().map_err(unreachable)?;
        if is_done == connection.waits_for_room {
            connection.waits_for_room = !is_done;
            let mut flags = epoll::EventFlags::IN;
            flags.set(epoll::EventFlags::OUT, !is_done);
            let data = epoll::EventData::new_u64(at as u64);
            epoll::modify(&self.epoll, &connection.stream, data, flags)
                .map_err(|errno| cannot("watch a connection")(errno.into()))?;
        }
        Ok(())
    }

    /// Reads the bytes of a connection that have arrived. `on_reply` gets each answer.
    pub(super) fn read(
        &mut self,
        at: usize,
        mut on_reply: impl FnMut(ScannedReply),
    ) -> Result<(), BenchError> {
        let unreachable = self.cannot_reach();
        let (connection, buffer) = (&mut self.all[at], &mut self.buffer);
        connection.read(buffer, &mut on_reply).map_err(unreachable)
    }
}

impl LoadConnection {
    fn open(server: SocketAddr) -> std::io::Result<LoadConnection> {
        let stream = TcpStream::connect_timeout(&server, CONNECT_LIMIT)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(LoadConnection {
            stream,
            scanner: RecordScanner::default(),
            out: Vec::new(),
            out_at: 0,
            waits_for_room: false,
        })
    }

    /// Returns whether all bytes are sent.
    fn flush(&mut self) -> std::io::Result<bool> {
        while self.out_at < self.out.len() {
            match self.stream.write(&self.out[self.out_at..]) {
                Ok(sent) => self.out_at += sent,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.out.clear();
        self.out_at = 0;
        Ok(true)
    }

    fn push(&mut self, record: &[u8]) {
        if self.out_at > self.out.len() / 2 {
            self.out.drain(..self.out_at);
            self.out_at = 0;
        }
        self.out.extend_from_slice(record);
    }

    fn read(
        &mut self,
        buffer: &mut [u8],
        on_reply: &mut impl FnMut(ScannedReply),
    ) -> std::io::Result<()> {
        for _ in 0..READS_MAX {
            match self.stream.read(buffer) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    let scanned = self.scanner.scan(&buffer[..count], &mut *on_reply);
                    scanned.map_err(std::io::Error::other)?;
                    if count < buffer.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Instant;

    #[test]
    fn short_wait_is_no_whole_millisecond() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let server = listener.local_addr().expect("bound");
        let connections = LoadConnections::open(server, 1).expect("connected");
        let waits = (0..100).map(|_| {
            let start = Instant::now();
            let ready = connections.wait(Duration::from_micros(100));
            assert!(ready.expect("it waits").is_empty());
            start.elapsed()
        });
        let shortest = waits.min().expect("waits");
        assert!(shortest < Duration::from_micros(900), "{shortest:?}");
    }
}
