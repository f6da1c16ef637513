//! Registration of the server with rpcbind (RFC 1833, version 3), so that clients find its port.
//!
//! Clients that name both ports need no rpcbind, so its absence is no error. Only registrations that
//! rpcbind has accepted are removed at the end. An entry of another server, such as the
//! kernel's, stays as it is.
//!
//! rpcbind accepts changes from this machine and from a port below 1024, which root may use. All
//! calls of a registration together have [`RPCBIND_LIMIT`].
//!
//! An rpcbind that restarts forgets its entries. So [`RpcbindUpkeep`] registers again from time to time;
//! rpcbind answers a repeated registration of the same address with success.

use crate::limits::{RPCBIND_LIMIT, RPCBIND_PAUSE};
use crate::record::MARK_BYTES;
use crate::rpc::RPC_VERSION;
use crate::xdr::{Reader, Writer, XdrError};
use crate::{mount3, nfs3};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, ipproto, socket_with};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The address of rpcbind on this machine.
pub const RPCBIND_ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 111);
/// The RPC program, and the version with addresses of IPv6.
const PROGRAM: u32 = 100_000;
const VERSION: u32 = 3;
/// RPCBPROC_SET and RPCBPROC_UNSET.
const SET: u32 = 1;
const UNSET: u32 = 2;
/// Bytes of a reply; one with an error has fewer than 60.
const REPLY_BYTES_MAX: usize = 1024;
/// The owner in calls. rpcbind replaces it by its own knowledge of the caller.
const OWNER: &[u8] = b"pagemesh";
/// Reserved ports that no service has by convention, from the highest.
const SOURCE_PORTS: std::ops::RangeInclusive<u16> = 665..=1023;

/// Why rpcbind has no registration of this server.
#[derive(Debug, thiserror::Error)]
pub enum RpcbindError {
    /// There is no rpcbind.
    #[error("no rpcbind answers at {0}: {1}; clients must name the port with port= and mountport=")]
    Absent(SocketAddr, io::Error),
    /// The connection failed.
    #[error("rpcbind does not answer: {0}; restart it, or use --no-rpcbind")]
    Connection(#[from] io::Error),
    /// The call is refused.
    #[error(
        "rpcbind refuses registrations (RPC status {0}); run the server as root, or use --no-rpcbind"
    )]
    Refused(u32),
    /// The reply is no reply.
    #[error("rpcbind sends an unusable reply: {0}; use --no-rpcbind")]
    Malformed(#[from] XdrError),
}

/// A program at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    program: u32,
    version: u32,
    /// The transport: `tcp` or `tcp6`.
    network: &'static str,
    /// The address as RFC 5665 writes it.
    address: String,
}

/// The entries of this server with rpcbind. The drop removes them.
#[derive(Debug)]
pub struct RpcbindRegistration {
    rpcbind: SocketAddr,
    wanted: Vec<Entry>,
    /// The entries that rpcbind has taken.
    entries: Vec<Entry>,
}

impl RpcbindRegistration {
    /// Registers NFS and MOUNT at the addresses of a server with an rpcbind, as
    /// [`RPCBIND_ADDRESS`]. It takes at most [`RPCBIND_LIMIT`].
    ///
    /// # Errors
    /// If no rpcbind answers, or it refuses.
    pub fn register(rpcbind: SocketAddr, addresses: &[SocketAddr]) -> Result<Self, RpcbindError> {
        let mut registration = Self::new(rpcbind, addresses);
        registration.renew()?;
        Ok(registration)
    }

    /// No entry is registered yet.
    fn new(rpcbind: SocketAddr, addresses: &[SocketAddr]) -> Self {
        let wanted = addresses.iter().flat_map(|address| entries(*address));
        Self {
            rpcbind,
            wanted: wanted.collect(),
            entries: Vec::new(),
        }
    }

    /// Registers all entries, also those that rpcbind has.
    fn renew(&mut self) -> Result<(), RpcbindError> {
        let mut client = Client::connect(self.rpcbind)?;
        for entry in &self.wanted {
            let is_taken = client.call(SET, entry)?;
            self.entries.retain(|it| it != entry);
            if is_taken {
                self.entries.push(entry.clone());
            }
        }
        Ok(())
    }

    /// The number of entries that rpcbind has not taken, because other servers have their places.
    #[must_use]
    pub fn refused(&self) -> usize {
        self.wanted.len() - self.entries.len()
    }
}

impl Drop for RpcbindRegistration {
    fn drop(&mut self) {
        let entries = std::mem::take(&mut self.entries);
        if entries.is_empty() {
            return;
        }
        let remove = || -> Result<(), RpcbindError> {
            let mut client = Client::connect(self.rpcbind)?;
            for entry in &entries {
                client.call(UNSET, entry)?;
            }
            Ok(())
        };
        match remove() {
            Ok(()) | Err(RpcbindError::Absent(..)) => {}
            Err(error) => {
                tracing::warn!(%error, "rpcbind still has entries of this server; rpcinfo -d removes them");
            }
        }
    }
}

/// A thread that keeps a server registered, also after rpcbind has started late or again. The drop ends it, and
/// removes the entries.
#[derive(Debug)]
pub struct RpcbindUpkeep {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RpcbindUpkeep {
    /// Registers at once, and then each [`RPCBIND_PAUSE`]. The result of the first registration is logged when this returns.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(rpcbind: SocketAddr, addresses: &[SocketAddr]) -> io::Result<Self> {
        Self::start_with(rpcbind, addresses, RPCBIND_PAUSE)
    }

    fn start_with(
        rpcbind: SocketAddr,
        addresses: &[SocketAddr],
        pause: Duration,
    ) -> io::Result<Self> {
        let mut registration = RpcbindRegistration::new(rpcbind, addresses);
        let mut state = None;
        let mut renew = move || {
            let renewed = registration.renew();
            log_change(&mut state, &registration, renewed);
        };
        renew();
        let (stop, stopped) = mpsc::channel();
        let run = move || {
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                renew();
            }
        };
        let thread = std::thread::Builder::new().name("nfs-rpcbind".into());
        Ok(Self {
            thread: Some(thread.spawn(run)?),
            stop: Some(stop),
        })
    }
}

impl Drop for RpcbindUpkeep {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported where it happened.
            let _ = thread.join();
        }
    }
}

/// The result of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RegistrationState {
    Registered { refused: usize },
    Absent,
    Failed,
}

/// Logs a result that differs from the one before.
fn log_change(
    state: &mut Option<RegistrationState>,
    registration: &RpcbindRegistration,
    renewed: Result<(), RpcbindError>,
) {
    let refused = registration.refused();
    let now = match &renewed {
        Ok(()) => RegistrationState::Registered { refused },
        Err(RpcbindError::Absent(..)) => RegistrationState::Absent,
        Err(_) => RegistrationState::Failed,
    };
    if state.replace(now) == Some(now) {
        return;
    }
    match renewed {
        Ok(()) if refused > 0 => tracing::warn!(
            "rpcbind has NFS or MOUNT at the port of another server; clients must name the port with port= and mountport="
        ),
        Ok(()) => tracing::info!("the server is registered with rpcbind"),
        Err(error @ RpcbindError::Absent(..)) => {
            tracing::info!(%error, "the server is not registered with rpcbind");
        }
        Err(error) => tracing::warn!(%error, "the server is not registered with rpcbind"),
    }
}

/// The entries of a server that listens at this address. A socket of the IPv6 wildcard takes clients of
/// IPv4, too.
fn entries(address: SocketAddr) -> Vec<Entry> {
    let ip = address.ip().to_canonical();
    let networks = match ip {
        IpAddr::V4(_) => vec![("tcp", ip)],
        IpAddr::V6(it) if it.is_unspecified() => {
            vec![("tcp6", ip), ("tcp", Ipv4Addr::UNSPECIFIED.into())]
        }
        IpAddr::V6(_) => vec![("tcp6", ip)],
    };
    let programs = [
        (nfs3::PROGRAM, nfs3::VERSION),
        (mount3::PROGRAM, mount3::VERSION),
    ];
    let programs = programs.into_iter();
    let all = programs.flat_map(|program| networks.iter().map(move |network| (program, *network)));
    all.map(|((program, version), (network, ip))| Entry {
        program,
        version,
        network,
        address: universal_address(ip, address.port()),
    })
    .collect()
}

/// The address with its port as two decimal bytes (RFC 5665, section 5.2.3).
fn universal_address(ip: IpAddr, port: u16) -> String {
    let [high, low] = port.to_be_bytes();
    format!("{ip}.{high}.{low}")
}

/// The record of a call.
fn encode_call(xid: u32, procedure: u32, entry: &Entry) -> Vec<u8> {
    let mut writer = Writer::new();
    writer.fixed(&[0; MARK_BYTES]);
    let header = [xid, 0, RPC_VERSION, PROGRAM, VERSION, procedure];
    // AUTH_NONE, as credential and as verifier.
    for word in header.into_iter().chain([0; 4]) {
        writer.u32(word);
    }
    writer.u32(entry.program);
    writer.u32(entry.version);
    writer.opaque(entry.network.as_bytes());
    writer.opaque(entry.address.as_bytes());
    writer.opaque(OWNER);
    let mut record = writer.into_bytes();
    let len = (record.len() - MARK_BYTES) as u32;
    record[..MARK_BYTES].copy_from_slice(&(len | 1 << 31).to_be_bytes());
    record
}

/// The result in the record of a reply: whether the entry was changed.
fn decode_reply(reply: &[u8], xid: u32) -> Result<bool, RpcbindError> {
    let mut reader = Reader::new(reply);
    let (found, kind, is_denied) = (reader.u32()?, reader.u32()?, reader.u32()?);
    if (found, kind) != (xid, 1) {
        let what = "a reply of another call";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what).into());
    }
    if is_denied != 0 {
        return Err(RpcbindError::Refused(is_denied));
    }
    reader.u32()?;
    reader.opaque("verifier", REPLY_BYTES_MAX)?;
    match reader.u32()? {
        0 => Ok(reader.bool()?),
        status => Err(RpcbindError::Refused(status)),
    }
}

/// A connection to rpcbind.
struct Client {
    stream: TcpStream,
    until: Instant,
    xid: u32,
}

impl Client {
    fn connect(rpcbind: SocketAddr) -> Result<Self, RpcbindError> {
        let until = Instant::now() + RPCBIND_LIMIT;
        let stream = connect_reserved(rpcbind);
        Ok(Self {
            stream: stream.map_err(|error| RpcbindError::Absent(rpcbind, error))?,
            until,
            xid: std::process::id(),
        })
    }

    fn call(&mut self, procedure: u32, entry: &Entry) -> Result<bool, RpcbindError> {
        self.xid = self.xid.wrapping_add(1);
        let record = encode_call(self.xid, procedure, entry);
        self.stream.set_write_timeout(Some(self.time_left()?))?;
        self.stream.write_all(&record)?;
        let mut mark = [0; MARK_BYTES];
        self.read(&mut mark)?;
        let mark = u32::from_be_bytes(mark);
        let len = (mark & !(1 << 31)) as usize;
        if mark >> 31 == 0 || len > REPLY_BYTES_MAX {
            let what = "a reply that is too long";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what).into());
        }
        let mut reply = vec![0; len];
        self.read(&mut reply)?;
        decode_reply(&reply, self.xid)
    }

    /// Fills a buffer, in the time that is left.
    fn read(&mut self, mut rest: &mut [u8]) -> io::Result<()> {
        while !rest.is_empty() {
            self.stream.set_read_timeout(Some(self.time_left()?))?;
            match self.stream.read(rest) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => rest = &mut rest[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn time_left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(left),
        }
    }
}

/// A connection from a reserved port, or from any if this process may not use those.
fn connect_reserved(rpcbind: SocketAddr) -> io::Result<TcpStream> {
    let family = match rpcbind {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let kind = (SocketType::STREAM, SocketFlags::CLOEXEC);
    let socket = socket_with(family, kind.0, kind.1, Some(ipproto::TCP))?;
    // connect(2) obeys it, too.
    set_socket_timeout(&socket, Timeout::Send, Some(RPCBIND_LIMIT))?;
    if rpcbind.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST) {
        for port in SOURCE_PORTS.rev() {
            match bind(&socket, &SocketAddr::new(rpcbind.ip(), port)) {
                Err(rustix::io::Errno::ADDRINUSE) => {}
                Ok(()) | Err(_) => break,
            }
        }
    }
    connect(&socket, &rpcbind)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn entries_follow_the_addresses_of_the_server() {
        let check = |listen, wanted: &[(&str, &str)]| {
            let found = entries(address(listen));
            let of = |program| -> Vec<_> {
                let found = found.iter().filter(|it| it.program == program);
                found.map(|it| (it.network, it.address.as_str())).collect()
            };
            assert_eq!(of(100_003), wanted);
            assert_eq!(of(100_005), wanted);
            assert!(found.iter().all(|it| it.version == 3));
        };
        check("10.0.0.1:2049", &[("tcp", "10.0.0.1.8.1")]);
        check("[fd00::1]:2049", &[("tcp6", "fd00::1.8.1")]);
        let both = [("tcp6", "::.255.254"), ("tcp", "0.0.0.0.255.254")];
        check("[::]:65534", &both);
    }

    #[test]
    fn call_has_the_layout_of_the_rfc() {
        let entry = Entry {
            program: 100_003,
            version: 3,
            network: "tcp",
            address: "0.0.0.0.8.1".into(),
        };
        let record = encode_call(7, SET, &entry);
        let words = [7, 0, 2, 100_000, 3, 1, 0, 0, 0, 0, 100_003, 3u32];
        let words: Vec<u8> = words.iter().flat_map(|it| it.to_be_bytes()).collect();
        let strings = b"\0\0\0\x03tcp\0\0\0\0\x0b0.0.0.0.8.1\0\0\0\0\x08pagemesh";
        assert_eq!(record[..4], (0x8000_0000 + 84u32).to_be_bytes());
        assert_eq!(record[4..], [&words, &strings[..]].concat());
    }

    /// Answers calls until the end of a connection, with one result. Returns procedures and programs.
    fn serve_one(listener: &TcpListener, result: u32) -> Vec<(u32, u32)> {
        let (mut stream, _) = listener.accept().expect("a client");
        let mut calls = Vec::new();
        let mut mark = [0; 4];
        while stream.read_exact(&mut mark).is_ok() {
            let len = u32::from_be_bytes(mark) & !(1 << 31);
            let mut call = vec![0; len as usize];
            stream.read_exact(&mut call).expect("a call");
            let word = |at: usize| u32::from_be_bytes(call[at..at + 4].try_into().expect("4"));
            calls.push((word(20), word(40)));
            let reply = [1 << 31 | 28, word(0), 1, 0, 0, 0, 0, result];
            let bytes: Vec<u8> = reply.iter().flat_map(|it| it.to_be_bytes()).collect();
            stream.write_all(&bytes).expect("sent");
        }
        calls
    }

    #[test]
    fn only_accepted_entries_are_removed() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let at = listener.local_addr().expect("an address");
        let server = [address("127.0.0.1:2049")];
        std::thread::scope(|scope| {
            let set = scope.spawn(|| serve_one(&listener, 1));
            let registration = RpcbindRegistration::register(at, &server).expect("registered");
            let wanted = [(SET, 100_003), (SET, 100_005)];
            assert_eq!(set.join().expect("a thread"), wanted);
            assert_eq!(registration.refused(), 0);
            let unset = scope.spawn(|| serve_one(&listener, 1));
            drop(registration);
            let wanted = [(UNSET, 100_003), (UNSET, 100_005)];
            assert_eq!(unset.join().expect("a thread"), wanted);

            let set = scope.spawn(|| serve_one(&listener, 0));
            let registration = RpcbindRegistration::register(at, &server).expect("an answer");
            assert_eq!(registration.refused(), 2);
            set.join().expect("a thread");
            drop(registration);
        });
        listener.set_nonblocking(true).expect("set");
        let more = listener.accept().map(drop).map_err(|error| error.kind());
        assert_eq!(more, Err(io::ErrorKind::WouldBlock));
    }

    #[test]
    fn restarted_rpcbind_gets_the_entries_again() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let at = listener.local_addr().expect("an address");
        let server = [address("127.0.0.1:2049")];
        let wanted = |procedure| [(procedure, 100_003), (procedure, 100_005)];
        std::thread::scope(|scope| {
            let first = scope.spawn(|| serve_one(&listener, 1));
            let pause = Duration::from_millis(1);
            let upkeep = RpcbindUpkeep::start_with(at, &server, pause).expect("a thread");
            assert_eq!(first.join().expect("a thread"), wanted(SET));
            // Nothing is known of the first registration now.
            assert_eq!(serve_one(&listener, 1), wanted(SET));
            let rest = scope.spawn(|| {
                // Registrations go on until the end.
                loop {
                    let calls = serve_one(&listener, 1);
                    if calls != wanted(SET) {
                        return calls;
                    }
                }
            });
            drop(upkeep);
            assert_eq!(rest.join().expect("a thread"), wanted(UNSET));
        });
    }

    #[test]
    fn absent_and_silent_rpcbind_are_errors() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let at = listener.local_addr().expect("an address");
        let server = [address("127.0.0.1:2049")];
        // The kernel connects, and no call is answered.
        let silent = RpcbindRegistration::register(at, &server).expect_err("silent");
        assert!(matches!(silent, RpcbindError::Connection(_)), "{silent}");
        drop(listener);
        let absent = RpcbindRegistration::register(at, &server).expect_err("absent");
        assert!(matches!(absent, RpcbindError::Absent(..)), "{absent}");
    }

    #[test]
    fn refusals_and_broken_replies_are_told_apart() {
        let reply =
            |words: &[u32]| -> Vec<u8> { words.iter().flat_map(|it| it.to_be_bytes()).collect() };
        let decode = |words: &[u32]| decode_reply(&reply(words), 7);
        assert!(matches!(decode(&[7, 1, 0, 0, 0, 0, 1]), Ok(true)));
        assert!(matches!(decode(&[7, 1, 0, 0, 0, 0, 0]), Ok(false)));
        let denied = decode(&[7, 1, 1, 1, 5]);
        assert!(matches!(denied, Err(RpcbindError::Refused(1))));
        let refused = decode(&[7, 1, 0, 0, 0, 2, 2, 4]);
        assert!(matches!(refused, Err(RpcbindError::Refused(2))));
        assert!(matches!(decode(&[7, 1]), Err(RpcbindError::Malformed(_))));
        let other = decode(&[8, 1, 0, 0, 0, 0, 1]);
        assert!(matches!(other, Err(RpcbindError::Connection(_))));
    }
}
