//! HTTP requests as bytes, from any loopback address, so that each can be a peer of its own.

#![allow(dead_code)]

use serde_json::Value;
use socket2::{Domain, Socket, Type};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Longer than any answer takes; only a failing test waits for it.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// The first address that `fresh_peer` gives.
const FIRST_PEER: u32 = u32::from_be_bytes([127, 1, 0, 1]);

/// An answer; of a stream only its head.
#[derive(Clone, Debug)]
pub struct HttpAnswer {
    pub status: u16,
    /// In lower case.
    pub head: String,
    pub body: String,
}

impl HttpAnswer {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    /// The value of a header, in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .into_iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }

    /// The code of a refusal.
    pub fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// A loopback address that no other call of this process returns.
pub fn fresh_peer() -> Ipv4Addr {
    static NEXT: AtomicU32 = AtomicU32::new(FIRST_PEER);
    Ipv4Addr::from_bits(NEXT.fetch_add(1, Ordering::Relaxed))
}

fn connect(peer: Ipv4Addr, server: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    let source = SocketAddr::from((peer, 0));
    socket.bind(&source.into()).expect("a loopback address");
    socket.connect(&server.into()).expect("connected");
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(READ_TIMEOUT)).expect("set");
    stream
}

/// A request without a body; `headers` are whole lines.
pub fn request(method: &str, path: &str, headers: &[String]) -> String {
    request_with(method, path, headers, "")
}

/// A request with a JSON body.
pub fn request_with(method: &str, path: &str, headers: &[String], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    for header in headers {
        text += &format!("{header}\r\n");
    }
    if !body.is_empty() {
        text += "Content-Type: application/json\r\n";
    }
    if method != "GET" && method != "HEAD" {
        text += &format!("Content-Length: {}\r\n", body.len());
    }
    format!("{text}\r\n{body}")
}

/// The answer to a request from an address. The rest of a stream is not read.
pub fn exchange(server: SocketAddr, peer: Ipv4Addr, request: &str) -> HttpAnswer {
    let mut stream = connect(peer, server);
    // The server may close the connection once it has read enough.
    let _ = stream.write_all(request.as_bytes());
    let mut bytes = vec![];
    let mut piece = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&bytes);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let head_lower = head.to_lowercase();
            let is_stream = head_lower.contains("text/event-stream");
            let length = head_lower.split("content-length: ").nth(1);
            let length = length.and_then(|it| it.lines().next()?.parse::<usize>().ok());
            let is_head_only = request.starts_with("HEAD ");
            if is_stream || is_head_only || length.is_some_and(|it| body.len() >= it) {
                return answer(head, body);
            }
        }
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => panic!("no answer to {request:?}: {error}"),
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    answer(head, body)
}

/// The lines of an answer that does not end, its head included.
pub fn stream_lines(
    server: SocketAddr,
    path: &str,
    authorization: &str,
) -> impl Iterator<Item = String> {
    let mut stream = connect(fresh_peer(), server);
    let text = request("GET", path, &["Host: x".into(), authorization.into()]);
    stream.write_all(text.as_bytes()).expect("sent");
    BufReader::new(stream).lines().map(|it| it.expect("a line"))
}

fn answer(head: &str, body: &str) -> HttpAnswer {
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    HttpAnswer {
        status: status.unwrap_or_else(|| panic!("no status in {head:?}")),
        head: head.to_lowercase(),
        body: body.to_owned(),
    }
}
