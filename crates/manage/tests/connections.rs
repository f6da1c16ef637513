//! Connections that send nothing.

use crate::cluster;
use crate::http;
use cluster::Cluster;
use pagemesh_manage::token::token;
use pagemesh_manage::{ConnectionLimits, ManagerSettings};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longer than any answer takes; only a failing test waits for it.
const READ_TIMEOUT: Duration = Duration::from_secs(20);
/// Longer than the test runs, so that no time limit ends a connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(3600);

/// Reads until the text ends so, or the connection ends.
fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    let mut byte = [0];
    while !text.ends_with(end) {
        match stream.read(&mut byte) {
            Ok(1) => text.push(byte[0].into()),
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("no answer after {text:?}: {error}"),
        }
    }
    text
}

#[test]
fn silent_connections_lock_out_no_other_peer() {
    let cluster = Cluster::new(0);
    let limits = ConnectionLimits {
        connections_max: 2,
        head_timeout: HEAD_TIMEOUT,
    };
    let served = cluster.serve_limited(ManagerSettings::default(), limits);
    let server = served.handle.address();
    let connect = || {
        let stream = TcpStream::connect(server).expect("connected");
        stream.set_read_timeout(Some(READ_TIMEOUT)).expect("set");
        stream
    };
    let body = r#"{"client":"c"}"#;
    let head = format!(
        "POST /api/v1/volumes/v/attach HTTP/1.1\r\nAuthorization: Bearer {}\r\nExpect: 100-continue\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        token(&cluster.key),
        body.len()
    );
    let mut authenticated = connect();
    authenticated.write_all(head.as_bytes()).expect("sent");
    let proceed = read_until(&mut authenticated, "\r\n\r\n");
    assert!(proceed.starts_with("HTTP/1.1 100 "), "{proceed}");
    // Both slots are in use now. The server accepts connections in the order of their arrival.
    let mut silent = connect();
    let healthz = http::request("GET", "/healthz", &[]);
    for _ in 0..3 {
        let answer = http::exchange(server, http::fresh_peer(), &healthz);
        assert_eq!((answer.status, answer.body.as_str()), (200, "ok\n"));
    }
    assert_eq!(read_until(&mut silent, "\n"), "");
    authenticated
        .write_all(body.as_bytes())
        .expect("still open");
    let answer = read_until(&mut authenticated, "}");
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
}
