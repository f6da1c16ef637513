//! A TCP connection: records of calls out, records of replies in.

use crate::ClientError;
use crate::rpc::{Credential, LAST_FRAGMENT, Reply, call_record};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Bytes of one reply: the data of the largest READ of any server that the client meets, and the
/// fields around it.
pub const REPLY_BYTES_MAX: usize = (8 << 20) + (64 << 10);

/// The side of a connection that sends calls.
pub struct Sender {
    stream: TcpStream,
    next_xid: u32,
}

/// The side of a connection that receives replies.
pub struct Receiver {
    stream: TcpStream,
}

/// Both sides of a connection.
pub struct Connection {
    sender: Sender,
    receiver: Receiver,
}

impl Sender {
    /// Sends a call of a program, version and procedure with the next xid, and returns the xid.
    ///
    /// # Errors
    /// If the socket fails, or does not take the bytes within the time limit.
    pub fn send(
        &mut self,
        credential: &Credential,
        target: (u32, u32, u32),
        arguments: &[u8],
    ) -> Result<u32, ClientError> {
        let xid = self.next_xid;
        self.next_xid = xid.wrapping_add(1);
        self.send_bytes(&call_record(xid, credential, target, arguments))?;
        Ok(xid)
    }

    /// Sends bytes as they are: records of [`call_record`] with a chosen xid, or broken ones.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<(), ClientError> {
        self.stream.write_all(bytes).map_err(closed)
    }

    /// The xid of the next call.
    pub fn set_next_xid(&mut self, xid: u32) {
        self.next_xid = xid;
    }

    /// The socket.
    #[must_use]
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }
}

impl Receiver {
    /// The next reply, of any call in flight.
    ///
    /// # Errors
    /// If the server closed the connection, the time limit passed, or the record is no reply.
    pub fn receive(&mut self) -> Result<Reply, ClientError> {
        let record = self.receive_record()?;
        Ok(Reply::decode(&record)?)
    }

    /// The bytes of the next record.
    ///
    /// # Errors
    /// If the server closed the connection, the time limit passed, or the record is too long.
    pub fn receive_record(&mut self) -> Result<Vec<u8>, ClientError> {
        let mut record = Vec::new();
        loop {
            let mut mark = [0; 4];
            self.stream.read_exact(&mut mark).map_err(closed)?;
            let mark = u32::from_be_bytes(mark);
            let start = record.len();
            let len = start + (mark & !LAST_FRAGMENT) as usize;
            if len > REPLY_BYTES_MAX {
                return Err(ClientError::ReplyTooLong(len));
            }
            record.resize(len, 0);
            let fragment = record.get_mut(start..).unwrap_or_default();
            self.stream.read_exact(fragment).map_err(closed)?;
            if mark & LAST_FRAGMENT != 0 {
                return Ok(record);
            }
        }
    }
}

impl Connection {
    /// Connects. `limit` bounds the connect and each later wait for the server.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub fn connect(server: SocketAddr, limit: Duration) -> Result<Self, ClientError> {
        let stream = TcpStream::connect_timeout(&server, limit)?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(limit))?;
        stream.set_nodelay(true)?;
        // A server knows repeated calls by address and xid, so two connections start apart.
        let next_xid = u32::from(stream.local_addr()?.port()) << 16;
        Ok(Self {
            receiver: Receiver {
                stream: stream.try_clone()?,
            },
            sender: Sender { stream, next_xid },
        })
    }

    /// See [`Sender::send`].
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn send(
        &mut self,
        credential: &Credential,
        target: (u32, u32, u32),
        arguments: &[u8],
    ) -> Result<u32, ClientError> {
        self.sender.send(credential, target, arguments)
    }

    /// See [`Receiver::receive`].
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub fn receive(&mut self) -> Result<Reply, ClientError> {
        self.receiver.receive()
    }

    /// The side that sends.
    pub fn sender(&mut self) -> &mut Sender {
        &mut self.sender
    }

    /// The side that receives.
    pub fn receiver(&mut self) -> &mut Receiver {
        &mut self.receiver
    }

    /// The two sides, for two threads.
    #[must_use]
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }
}

fn closed(error: std::io::Error) -> ClientError {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
            ClientError::Closed
        }
        _ => ClientError::Socket(error),
    }
}
