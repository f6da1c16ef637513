//! The addresses of a server: bound early, so that a wrong one is noticed before anything else happens, and open for clients
//! only when the server starts.

use crate::limits::LISTEN_BACKLOG;
use crate::server::ServerError;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, ipproto, listen, socket_with, sockopt,
};
use std::net::{SocketAddr, TcpListener};

/// An address of this process that no client can connect to yet.
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
        match listen(&self.listener, LISTEN_BACKLOG) {
            Ok(()) => Ok(self.listener),
            Err(errno) => Err(ServerError::Listen {
                address: self.address,
                cause: errno.into(),
            }),
        }
    }
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
