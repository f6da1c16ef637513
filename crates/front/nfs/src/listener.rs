//! The addresses of a server: bound early, so that a wrong one is noticed before anything else happens, and open for clients
//! only when the server starts.

use crate::limits::LISTEN_BACKLOG;
use crate::server::ServerError;
use rustix::net::{
    AddressFamily, Shutdown, SocketFlags, SocketType, bind, ipproto, listen, shutdown, socket_with,
    sockopt,
};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

/// An address of this process that no client can connect to yet. No other process can bind it meanwhile.
#[derive(Debug)]
pub struct BoundAddress {
    listener: TcpListener,
    address: SocketAddr,
}

impl BoundAddress {
    /// Binds an address of this machine. Port 0 lets the system choose one.
    ///
    /// # Errors
    /// If the address is in use, or this machine does not have it.
    pub fn bind(address: SocketAddr) -> Result<Self, ServerError> {
        Self::bind_with(address, false)
    }

    /// Binds an address that may come to this machine later, as the address of a service does (`IP_FREEBIND`, ip(7)).
    ///
    /// # Errors
    /// If the port is in use at this address.
    pub fn bind_ahead(address: SocketAddr) -> Result<Self, ServerError> {
        Self::bind_with(address, true)
    }

    fn bind_with(wanted: SocketAddr, is_ahead: bool) -> Result<Self, ServerError> {
        let bound = || -> std::io::Result<Self> {
            let family = match wanted {
                SocketAddr::V4(_) => AddressFamily::INET,
                SocketAddr::V6(_) => AddressFamily::INET6,
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
            // Connections of an earlier server may still end.
            sockopt::set_socket_reuseaddr(&socket, true)?;
            match (is_ahead, wanted) {
                (false, _) => {}
                (true, SocketAddr::V4(_)) => sockopt::set_ip_freebind(&socket, true)?,
                (true, SocketAddr::V6(_)) => sockopt::set_ipv6_freebind(&socket, true)?,
            }
            bind(&socket, &wanted)?;
            if wanted.port() != 0 {
                exclude_others(&socket)?;
            }
            let listener = TcpListener::from(socket);
            let address = listener.local_addr()?;
            Ok(Self { listener, address })
        };
        bound().map_err(|cause| ServerError::Listen {
            address: wanted,
            cause,
        })
    }

    /// The address, with the port in use.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets clients connect.
    pub(crate) fn open(self) -> Result<TcpListener, ServerError> {
        // Connections of an earlier server may still end, and connections of this one must not stop the bind of a later server.
        let opened = sockopt::set_socket_reuseaddr(&self.listener, true)
            .and_then(|()| listen(&self.listener, LISTEN_BACKLOG));
        match opened {
            Ok(()) => Ok(self.listener),
            Err(errno) => Err(ServerError::Listen {
                address: self.address,
                cause: errno.into(),
            }),
        }
    }
}

/// Makes a bound socket the only one of its port. Linux lets several sockets with SO_REUSEADDR bind one port while none of them
/// listens, and without SO_REUSEADDR a bind fails as long as connections of an earlier server end. One listen(2) ends the sharing
/// for later binds, and fails if another socket listens or has excluded others. Without SO_REUSEADDR on this socket, the port stays
/// its own after shutdown(2), which ends the listening and keeps the port.
fn exclude_others(socket: &OwnedFd) -> std::io::Result<()> {
    listen(socket, 1)?;
    sockopt::set_socket_reuseaddr(socket, false)?;
    shutdown(socket, Shutdown::Read)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpStream;

    fn loopback() -> SocketAddr {
        "127.0.0.1:0".parse().expect("an address")
    }

    #[test]
    fn bound_address_refuses_clients_until_it_is_open() {
        let bound = BoundAddress::bind(loopback()).expect("bound");
        let address = bound.address();
        assert!(TcpStream::connect(address).is_err());
        let listener = bound.open().expect("open");
        let client = TcpStream::connect(address).expect("connected");
        assert_eq!(
            listener.accept().expect("a client").1,
            client.local_addr().expect("its address")
        );
    }

    #[test]
    fn address_in_use_is_refused_when_it_is_bound() {
        let open = BoundAddress::bind(loopback()).expect("bound");
        let address = open.address();
        let _listener = open.open().expect("open");
        for bind in [BoundAddress::bind, BoundAddress::bind_ahead] {
            let second = bind(address).map(|it| it.address());
            assert!(
                matches!(second, Err(ServerError::Listen { .. })),
                "{second:?}"
            );
        }
    }

    /// A port that no process uses, and an address with it.
    fn free_address() -> SocketAddr {
        let bound = BoundAddress::bind(loopback()).expect("bound");
        bound.address()
    }

    #[test]
    fn bound_address_excludes_others_before_it_is_open() {
        let address = free_address();
        let any = SocketAddr::from(([0, 0, 0, 0], address.port()));
        for bind in [BoundAddress::bind, BoundAddress::bind_ahead] {
            let bound = bind(address).expect("bound");
            for other in [address, any] {
                let second = BoundAddress::bind_ahead(other).map(|it| it.address());
                assert!(
                    matches!(second, Err(ServerError::Listen { .. })),
                    "{second:?}"
                );
            }
            assert!(TcpStream::connect(address).is_err());
            bound.open().expect("open");
        }
    }

    #[test]
    fn address_is_bound_beside_ending_connections() {
        let address = free_address();
        for _ in 0..3 {
            let listener = BoundAddress::bind(address).expect("bound").open();
            let listener = listener.expect("open");
            listener.set_nonblocking(false).expect("blocking");
            let client = TcpStream::connect(address).expect("connected");
            // The server ends the connection first, so that its end waits in TIME_WAIT.
            drop(listener.accept().expect("a client"));
            drop(client);
        }
    }

    #[test]
    fn address_of_no_interface_is_bound_ahead_only() {
        // An address for documentation (RFC 5737 and RFC 3849), which no interface has.
        for text in ["192.0.2.1:0", "[2001:db8::1]:0"] {
            let address: SocketAddr = text.parse().expect("an address");
            assert!(BoundAddress::bind(address).is_err(), "{address}");
            match BoundAddress::bind_ahead(address) {
                Ok(bound) => assert_eq!(bound.address().ip(), address.ip()),
                // A machine may be without IPv6.
                Err(error) => assert!(address.is_ipv6(), "{error}"),
            }
        }
    }
}
