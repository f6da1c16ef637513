//! The server's side: a listener, and a thread for each connection.
//!
//! Invariants: connections are counted; strangers, who have not proven the
//! key, are counted apart and have a time limit. A stop closes the listener,
//! ends all connections and waits, for a limited time, until their handlers
//! are dropped.

use super::connect::nonce;
use crate::auth::{self, Agreed, AuthError, Purpose, Versions, Welcome};
use crate::limits::{
    ACCEPT_PAUSE, CONNECTIONS_MAX, HANDSHAKE_LIMIT, SPIN_US_MAX, STOP_LIMIT, STRANGERS_MAX,
};
use crate::serve::Connection;
use crate::service::{PeerInfo, Service};
use crate::stop::Stop;
use crate::stream::{Stream, wait_any};
use pagemesh_base::key::Key;
use pagemesh_base::slice::SliceError;
use rustix::event::{PollFd, PollFlags};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// What may differ between servers.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Authenticated connections at once.
    pub connections_max: usize,
    /// Microseconds a thread looks for the next request before it sleeps, if
    /// that has paid lately; none for never.
    pub spin_us_max: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            connections_max: CONNECTIONS_MAX,
            spin_us_max: SPIN_US_MAX,
        }
    }
}

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {cause}; choose another address with --listen")]
pub struct BindError {
    /// Where.
    pub address: SocketAddr,
    /// What the system said.
    pub cause: io::Error,
}

/// A stop that did not end everything in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} connections did not end within {limit} s; they end with the process",
    limit = STOP_LIMIT.as_secs())]
pub struct StillRunning(
    /// Connections.
    pub usize,
);

/// A brick's listener; stopped when dropped.
pub struct Server {
    address: SocketAddr,
    house: Arc<House>,
    acceptor: Option<JoinHandle<()>>,
}

/// What all threads of a server share.
struct House {
    key: Key,
    service: Arc<dyn Service>,
    options: Options,
    stop: Stop,
    guests: Mutex<Guests>,
    left: Condvar,
}

#[derive(Default)]
struct Guests {
    strangers: usize,
    known: usize,
}

/// A place among the guests, given back when dropped.
struct Place<'a> {
    house: &'a House,
    known: bool,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut guests = self.house.guests();
        match self.known {
            true => guests.known -= 1,
            false => guests.strangers -= 1,
        }
        self.house.left.notify_all();
    }
}

/// Why a stranger was not let in.
#[derive(Debug, thiserror::Error)]
enum TurnedAway {
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Auth(#[from] AuthError),
}

impl Server {
    /// Listens on an address; port 0 takes a free one.
    ///
    /// # Errors
    /// When the address is in use or not of this machine.
    pub fn bind(
        address: SocketAddr,
        key: Key,
        service: Arc<dyn Service>,
        options: Options,
    ) -> Result<Server, BindError> {
        let failed = |cause| BindError { address, cause };
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let local = listener.local_addr().map_err(failed)?;
        let house = Arc::new(House {
            key,
            service,
            options,
            stop: Stop::new().map_err(failed)?,
            guests: Mutex::default(),
            left: Condvar::new(),
        });
        let shared = house.clone();
        let acceptor = thread::Builder::new()
            .name("accept".into())
            .spawn(move || shared.accept_all(&listener))
            .map_err(failed)?;
        Ok(Server {
            address: local,
            house,
            acceptor: Some(acceptor),
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Authenticated connections.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.house.guests().known
    }

    /// Ends all connections. Requests in flight are lost to their clients.
    ///
    /// # Errors
    /// When some did not end in time.
    pub fn stop(mut self) -> Result<(), StillRunning> {
        self.end()
    }

    fn end(&mut self) -> Result<(), StillRunning> {
        let Some(acceptor) = self.acceptor.take() else {
            return Ok(());
        };
        self.house.stop.say();
        if acceptor.join().is_err() {
            tracing::error!("the accepting thread panicked");
        }
        let guests = self.house.guests();
        let all = |guests: &Guests| guests.strangers + guests.known;
        let waited = self
            .house
            .left
            .wait_timeout_while(guests, STOP_LIMIT, |guests| all(guests) > 0);
        let (guests, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match all(&guests) {
            0 => Ok(()),
            left => Err(StillRunning(left)),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(cause) = self.end() {
            tracing::warn!(%cause, "a server was dropped");
        }
    }
}

impl House {
    fn guests(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept_all(self: &Arc<House>, listener: &TcpListener) {
        while !self.stop.is_said() {
            let mut fds = [
                PollFd::new(listener, PollFlags::IN),
                PollFd::new(&self.stop, PollFlags::IN),
            ];
            if let Err(cause) = wait_any(&mut fds, None) {
                tracing::error!(%cause, "cannot wait for connections");
                return;
            }
            match listener.accept() {
                Ok((socket, address)) => self.admit(socket, address),
                Err(cause) if is_passing(&cause) => {}
                Err(cause) => {
                    tracing::warn!(%cause, "cannot accept connections; trying again");
                    let mut fds = [PollFd::new(&self.stop, PollFlags::IN)];
                    let _ = wait_any(&mut fds, Some(Instant::now() + ACCEPT_PAUSE));
                }
            }
        }
    }

    fn admit(self: &Arc<House>, socket: TcpStream, address: SocketAddr) {
        let mut guests = self.guests();
        if guests.strangers == STRANGERS_MAX {
            tracing::warn!(%address, "too many connections that did not say who they are");
            return;
        }
        guests.strangers += 1;
        drop(guests);
        let house = self.clone();
        let thread = thread::Builder::new().name(format!("tcp {address}"));
        let started = thread.spawn(move || {
            let mut place = Place {
                house: &house,
                known: false,
            };
            match house.receive_guest(socket, &mut place) {
                Ok((stream, agreed)) => house.serve(&stream, agreed, address),
                Err(cause) => tracing::debug!(%address, %cause, "turned away"),
            }
        });
        if let Err(cause) = started {
            tracing::warn!(%address, %cause, "no thread for a connection");
            self.guests().strangers -= 1;
        }
    }

    /// The server's side of the handshake.
    fn receive_guest(
        &self,
        socket: TcpStream,
        place: &mut Place<'_>,
    ) -> Result<(Stream, Agreed), TurnedAway> {
        let until = Instant::now() + HANDSHAKE_LIMIT;
        let stream = Stream::tcp(socket)?;
        let hello = stream.receive_exact(until)?;
        let identity = self.service.brick().0;
        let welcome = auth::Server::welcome(&self.key, Versions::OURS, identity, nonce()?, &hello)?;
        let server = match welcome {
            Welcome::Challenge(server, challenge) => {
                stream.send_all(&challenge, until)?;
                server
            }
            Welcome::Refuse(refusal, cause) => {
                stream.send_all(&refusal, until)?;
                return Err(cause.into());
            }
        };
        let proof = stream.receive_exact(until)?;
        let admitted = server.check(&proof).and_then(|agreed| {
            self.promote(place)?;
            Ok(agreed)
        });
        let verdict = auth::verdict(admitted.as_ref().map(drop));
        stream.send_all(&verdict, until)?;
        Ok((stream, admitted?))
    }

    /// Makes a stranger a known guest, if there is a place.
    fn promote(&self, place: &mut Place<'_>) -> Result<(), AuthError> {
        let mut guests = self.guests();
        if guests.known >= self.options.connections_max {
            return Err(AuthError::Busy);
        }
        guests.strangers -= 1;
        guests.known += 1;
        place.known = true;
        Ok(())
    }

    fn serve(&self, stream: &Stream, agreed: Agreed, address: SocketAddr) {
        let peer = PeerInfo {
            address,
            identity: agreed.identity,
        };
        let mut open = || match agreed.purpose {
            Purpose::Session => self.service.open(peer),
            Purpose::Control => Err(SliceError::Refused(
                "a control connection has no session; connect a leg".into(),
            )),
        };
        let control = self.service.control();
        let spin_us_max = self.options.spin_us_max;
        let connection = Connection::new(stream, control, &self.stop, &mut open, spin_us_max);
        if let Err(cause) = connection.run() {
            tracing::warn!(%address, %cause, "a connection broke");
        }
    }
}

/// Errors of accept that concern one connection only.
fn is_passing(cause: &io::Error) -> bool {
    matches!(
        cause.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
    )
}
