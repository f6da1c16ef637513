//! Peers that send arbitrary bytes: blocking sockets, and messages as bytes.

use super::{BRICK, TEST_TIMEOUT, key};
use bytes::Bytes;
use pagemesh_base::checksum::crc32c;
use pagemesh_base::key::Key;
use pagemesh_fabric::auth::{
    self, CHALLENGE_BYTES, ClientHandshake, HelloResponse, Purpose, Versions,
};
use pagemesh_fabric::message::reply::{self, Answer, AttachReply, Reply};
use pagemesh_fabric::message::request::Request;
use pagemesh_fabric::message::{Direction, HEADER_BYTES, Header, MessageKind};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::{self, JoinHandle};
use uuid::Uuid;

/// A socket, and the tag of the last request.
pub struct RawConnection(pub TcpStream, u64);

impl RawConnection {
    pub fn new(socket: TcpStream) -> RawConnection {
        socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("set");
        socket.set_write_timeout(Some(TEST_TIMEOUT)).expect("set");
        socket.set_nodelay(true).expect("set");
        RawConnection(socket, 0)
    }

    pub fn connect(address: SocketAddr) -> RawConnection {
        RawConnection::new(TcpStream::connect(address).expect("connected"))
    }

    /// An authenticated client.
    pub fn client(address: SocketAddr, purpose: Purpose) -> RawConnection {
        let mut raw = RawConnection::connect(address);
        let (key, id) = (key(), Uuid::from_u128(0xc));
        let (client, hello) = ClientHandshake::new(&key, purpose, Versions::OURS, id, [1; 32]);
        raw.send(&hello);
        let challenge: [u8; CHALLENGE_BYTES] = raw.receive();
        let (proof, _) = client.answer_challenge(&challenge).expect("the right key");
        raw.send(&proof);
        auth::read_verdict(raw.receive()).expect("let in");
        raw
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).expect("said");
    }

    /// Sends bytes to a peer that may have closed the connection.
    pub fn try_send(&mut self, bytes: &[u8]) {
        let _ = self.0.write_all(bytes);
    }

    pub fn receive<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).expect("heard");
        bytes
    }

    /// Asserts that the peer closes the connection without another byte.
    #[track_caller]
    pub fn assert_hung_up(&mut self) {
        match self.0.read(&mut [0]) {
            Ok(0) => {}
            Err(cause) if cause.kind() == io::ErrorKind::ConnectionReset => {}
            other => panic!("not hung up but {other:?}"),
        }
    }

    pub fn receive_message(&mut self, way: Direction) -> (Header, Vec<u8>) {
        let first: [u8; HEADER_BYTES] = self.receive();
        let header = Header::decode(&first, way).expect("a header");
        let mut body = vec![0; header.body_len as usize];
        self.0.read_exact(&mut body).expect("a body");
        header.check_body(&body).expect("undamaged");
        (header, body)
    }

    pub fn receive_answer(&mut self) -> (u64, Answer) {
        let (header, body) = self.receive_message(Direction::Reply);
        (header.tag, reply::decode(&header, body).expect("a reply"))
    }

    pub fn receive_request(&mut self) -> (MessageKind, u64, Request) {
        let (header, body) = self.receive_message(Direction::Request);
        let request = Request::decode(&header, Bytes::from(body)).expect("a request");
        (header.kind, header.tag, request)
    }

    pub fn ask(&mut self, request: &Request) -> Answer {
        self.1 += 1;
        self.send(&encode_request(request, self.1));
        let (tag, answer) = self.receive_answer();
        assert_eq!(tag, self.1);
        answer
    }

    pub fn answer(&mut self, kind: MessageKind, tag: u64, answer: Answer) {
        self.send(&encode_answer(kind, tag, answer));
    }

    /// Waits until the peer has ended the connection.
    pub fn wait_end(&mut self) {
        while matches!(self.0.read(&mut [0; 4096]), Ok(1..)) {}
    }
}

pub fn encode_request(request: &Request, tag: u64) -> Vec<u8> {
    let (header, body) = request.encode(tag);
    [&header.encode()[..], &body].concat()
}

pub fn encode_answer(kind: MessageKind, tag: u64, answer: Answer) -> Vec<u8> {
    let (header, body) = reply::encode(kind, tag, answer);
    [&header.encode()[..], &body].concat()
}

/// A header with one field replaced, and the checksum corrected.
pub fn forged(message: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut forged = message.to_vec();
    forged[at..at + bytes.len()].copy_from_slice(bytes);
    let crc = crc32c(&forged[..60]);
    forged[60..64].copy_from_slice(&crc.to_le_bytes());
    forged
}

/// A brick that accepts one client and then runs a script.
pub struct FakeBrick {
    pub address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl FakeBrick {
    /// A brick that runs its script from the first byte on.
    pub fn without_handshake(script: impl FnOnce(RawConnection) + Send + 'static) -> FakeBrick {
        let listener = TcpListener::bind(super::loopback()).expect("a free port");
        let address = listener.local_addr().expect("bound");
        let thread = thread::spawn(move || {
            let (socket, _) = listener.accept().expect("a client");
            script(RawConnection::new(socket));
        });
        FakeBrick {
            address,
            thread: Some(thread),
        }
    }

    /// A brick that does the handshake before the script.
    pub fn authenticated(script: impl FnOnce(RawConnection) + Send + 'static) -> FakeBrick {
        FakeBrick::without_handshake(move |mut raw| {
            admit(&mut raw, &key(), Versions::OURS);
            script(raw);
        })
    }

    /// A brick that also answers the attach before the script.
    pub fn attached(script: impl FnOnce(RawConnection) + Send + 'static) -> FakeBrick {
        FakeBrick::authenticated(move |mut raw| {
            let (kind, tag, _) = raw.receive_request();
            let (handle, size_bytes) = (3, super::SLICE_BYTES);
            let attached = Reply::Attach(AttachReply { handle, size_bytes });
            raw.answer(kind, tag, Ok(attached));
            script(raw);
        })
    }
}

impl Drop for FakeBrick {
    fn drop(&mut self) {
        // After a failure the script may wait for a client that never comes.
        if !thread::panicking() {
            let ended = self.thread.take().map(JoinHandle::join);
            assert!(matches!(ended, Some(Ok(()))), "the impostor failed");
        }
    }
}

/// A server's handshake.
pub fn admit(raw: &mut RawConnection, key: &Key, versions: Versions) {
    let hello = raw.receive();
    match auth::ServerHandshake::accept_hello(key, versions, BRICK.0, [2; 32], &hello)
        .expect("a hello")
    {
        HelloResponse::Challenge(server, challenge) => {
            raw.send(&challenge);
            let mut proof = [0; auth::PROOF_BYTES];
            // A client that does not accept the server's proof closes the connection.
            if raw.0.read_exact(&mut proof).is_ok() {
                let outcome = server.check(&proof);
                raw.send(&auth::verdict(outcome.as_ref().map(drop)));
            }
        }
        HelloResponse::Refuse(refusal, _) => raw.send(&refusal),
    }
}
