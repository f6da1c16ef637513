//! Connecting to a brick: the client's side of the handshake.

use crate::auth::{self, AuthError, ClientHandshake, HandshakeResult, Purpose, Versions};
use crate::brick_client::BrickClient;
use crate::limits::Timeouts;
use crate::stream::Stream;
use pagemesh_base::key::Key;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::SliceError;
use rustix::rand::{GetRandomFlags, getrandom};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fmt, io};
use uuid::Uuid;

/// The first address of a text as `host:port`.
///
/// # Errors
/// [`SliceError::Lost`] when it resolves to no address.
pub fn resolve(address: &str) -> Result<SocketAddr, SliceError> {
    let failed = |cause: &dyn std::fmt::Display| {
        SliceError::Lost(format!("the address {address} cannot be resolved: {cause}"))
    };
    let mut found = address.to_socket_addrs().map_err(|cause| failed(&cause))?;
    found.next().ok_or_else(|| failed(&"it names nothing"))
}

/// Why a connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("{action}: {cause}")]
    Socket {
        action: &'static str,
        cause: io::Error,
    },
    #[error(transparent)]
    Auth(#[from] AuthError),
}

/// A random nonce.
pub(super) fn nonce() -> io::Result<auth::Nonce> {
    let mut nonce = auth::Nonce::default();
    let mut at = 0;
    while at < nonce.len() {
        at += getrandom(&mut nonce[at..], GetRandomFlags::empty())?;
    }
    Ok(nonce)
}

/// The place where a brick listens.
#[derive(Clone, Copy, Debug)]
pub enum Endpoint<'a> {
    /// Its address.
    Tcp(SocketAddr),
    /// Its socket on this machine.
    Local(&'a Path),
}

impl From<SocketAddr> for Endpoint<'_> {
    fn from(address: SocketAddr) -> Self {
        Endpoint::Tcp(address)
    }
}

impl fmt::Display for Endpoint<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(address) => address.fmt(f),
            Endpoint::Local(path) => path.display().fmt(f),
        }
    }
}

/// Connects and authenticates. The brick's identity is proven afterwards. Each call has `limit`.
pub(super) fn connect(
    endpoint: Endpoint<'_>,
    key: &Key,
    purpose: Purpose,
    timeouts: &Timeouts,
    limit: Duration,
) -> Result<BrickClient, SliceError> {
    match try_connect(endpoint, key, purpose, timeouts) {
        Ok((stream, agreed)) => {
            let client = BrickClient::new(stream, BrickId(agreed.identity), limit);
            Ok(client
                .with_hints(agreed.knows_hints)
                .with_snapshots(agreed.knows_snapshots)
                .with_clones(agreed.knows_clones)
                .with_space(agreed.knows_space)
                .with_version_copies(agreed.knows_version_copies))
        }
        Err(ConnectError::Auth(cause)) => {
            let told = format!("the brick at {endpoint}: {cause}");
            Err(match cause {
                AuthError::Busy => SliceError::NoSession(told),
                _ => SliceError::Refused(told),
            })
        }
        Err(cause) => Err(SliceError::Lost(format!(
            "the brick at {endpoint}: {cause}"
        ))),
    }
}

fn open(endpoint: Endpoint<'_>, timeouts: &Timeouts) -> Result<Stream, ConnectError> {
    let failed = |action| move |cause| ConnectError::Socket { action, cause };
    let address = match endpoint {
        Endpoint::Tcp(address) => address,
        Endpoint::Local(path) => {
            return Stream::connect_unix(path).map_err(failed("cannot be reached"));
        }
    };
    let socket = TcpStream::connect_timeout(&address, timeouts.connect)
        .map_err(failed("cannot be reached"))?;
    Stream::tcp(socket).map_err(failed("the socket cannot be set up"))
}

fn try_connect(
    endpoint: Endpoint<'_>,
    key: &Key,
    purpose: Purpose,
    timeouts: &Timeouts,
) -> Result<(Stream, HandshakeResult), ConnectError> {
    let failed = |action| move |cause| ConnectError::Socket { action, cause };
    let stream = open(endpoint, timeouts)?;
    let nonce = nonce().map_err(failed("the system gives no random numbers"))?;
    let ours = Versions::OURS;
    let (client, hello) = ClientHandshake::new(key, purpose, ours, Uuid::nil(), nonce);
    let shaking = failed("the handshake failed");
    let until = Instant::now() + timeouts.handshake;
    stream.send_all(&hello, until).map_err(shaking)?;
    let challenge = stream.receive_exact(until).map_err(shaking)?;
    let (proof, agreed) = client.answer_challenge(&challenge)?;
    stream.send_all(&proof, until).map_err(shaking)?;
    auth::read_verdict(stream.receive_exact(until).map_err(shaking)?)?;
    Ok((stream, agreed))
}

impl BrickClient {
    /// Connects to a brick for control calls.
    ///
    /// # Errors
    /// When the brick is not reachable, has another key, or refuses.
    pub fn connect(
        address: SocketAddr,
        key: &Key,
        timeouts: Timeouts,
    ) -> Result<BrickClient, SliceError> {
        let limit = timeouts.call;
        connect(address.into(), key, Purpose::Control, &timeouts, limit)
    }
}
