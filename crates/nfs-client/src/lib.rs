//! A small, strict client of NFSv3 and MOUNT v3 (RFC 1813) and of NFSv4.1 (RFC 8881) over ONC RPC (RFC 5531) and TCP, for
//! tests, the conformance suite and the load generator.
//!
//! ```text
//! Client ── Procedure::encode ── rpc::call_record ── Connection ══ server
//!    └───── Procedure::decode ── rpc::Reply::decode ──────┘
//! ```
//!
//! The client shares no code with the server, so that an error of one is found by the other. It is
//! strict: padding that is not zero, booleans beyond 1, unknown types and bytes after the last field
//! are errors. It takes no more memory than [`connection::REPLY_BYTES_MAX`] for a reply.
//!
//! [`Client::call`] sends one call and waits for its reply. [`Connection::send`] and
//! [`Connection::receive`] allow many calls in flight, and [`Connection::split`] gives the two sides
//! to two threads.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod connection;
pub mod mount3;
pub mod nfs3;
pub mod nfs4;
pub mod rpc;
pub mod xdr;

pub use connection::{Connection, Receiver, Sender};
pub use rpc::{Credential, Procedure};

use nfs3::{Handle, Nfs3Result};
use std::net::SocketAddr;
use std::time::Duration;

/// Why a call has no result.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket failed, or the time limit passed.
    #[error("the connection to the server failed: {0}")]
    Socket(#[from] std::io::Error),
    /// The server ended the connection.
    #[error("the server closed the connection before it replied")]
    Closed,
    /// A record is longer than the client allows.
    #[error("a reply of {0} bytes or more is too long")]
    ReplyTooLong(usize),
    /// The bytes of a reply break the RFC.
    #[error("the reply breaks the protocol: {0}")]
    Decode(#[from] xdr::DecodeError),
    /// The server did not execute the call.
    #[error("the server refused the call: {0}")]
    Refused(#[from] rpc::Refusal),
    /// The reply belongs to another call.
    #[error("the reply has the xid {found:#x} instead of {wanted:#x}")]
    OtherXid {
        /// The xid of the call.
        wanted: u32,
        /// The xid of the reply.
        found: u32,
    },
    /// MOUNT refused the path.
    #[error("the server did not mount the path: {0}")]
    Mount(mount3::MountStatus),
}

/// A blocking client: one connection, one caller, one call after the other.
pub struct Client {
    /// The connection.
    pub connection: Connection,
    /// The caller of the next calls.
    pub credential: Credential,
}

impl Client {
    /// Connects. `limit` bounds the connect and each later wait for the server.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub fn connect(
        server: SocketAddr,
        credential: Credential,
        limit: Duration,
    ) -> Result<Self, ClientError> {
        Ok(Self {
            connection: Connection::connect(server, limit)?,
            credential,
        })
    }

    /// Sends a call and waits for its result.
    ///
    /// # Errors
    /// If there is no reply, it breaks the protocol, or the server did not execute the call. A
    /// status of NFS is a result and no error.
    pub fn call<P: Procedure>(&mut self, procedure: &P) -> Result<P::Result, ClientError> {
        let result = self.call_raw(
            (P::PROGRAM, P::VERSION, P::NUMBER),
            &rpc::arguments(procedure),
        )?;
        Ok(rpc::decode_result::<P>(&result)?)
    }

    /// Sends a call of a program, version and procedure with these arguments, and waits for the
    /// bytes of its result.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_raw(
        &mut self,
        target: (u32, u32, u32),
        arguments: &[u8],
    ) -> Result<Vec<u8>, ClientError> {
        let wanted = self.connection.send(&self.credential, target, arguments)?;
        let reply = self.connection.receive()?;
        if reply.xid != wanted {
            let found = reply.xid;
            return Err(ClientError::OtherXid { wanted, found });
        }
        Ok(reply.outcome?)
    }

    /// The root of an export. The connection must lead to the port of MOUNT.
    ///
    /// # Errors
    /// As [`Client::call`], and if the server refuses the path.
    pub fn mount(&mut self, path: &[u8]) -> Result<Handle, ClientError> {
        let mounted = self.call(&mount3::Mount { path })?;
        mounted.map(|it| it.root).map_err(ClientError::Mount)
    }

    /// The handle and attributes of a name.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn lookup(
        &mut self,
        directory: &Handle,
        name: &[u8],
    ) -> Result<Nfs3Result<nfs3::LookedUp, Option<nfs3::Attributes>>, ClientError> {
        self.call(&nfs3::Lookup { directory, name })
    }
}
