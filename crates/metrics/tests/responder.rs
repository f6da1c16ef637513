//! The responder for metrics with scrapers, and with peers that send invalid, oversized, slow or no HTTP.

use pagemesh_metrics::catalogue::client;
use pagemesh_metrics::{
    CONNECTION_TIMEOUT, CONNECTIONS_MAX, HEAD_BYTES_MAX, MetricPage, Responder, ResponderError,
};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Longer than any answer takes; only a failing test waits for it.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const GET: &str = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn start(allow_remote: bool) -> Responder {
    let bound = Responder::bind(loopback(), allow_remote).expect("bound");
    let responder = bound.serve(|| {
        let mut page = MetricPage::default();
        page.add(&client::SIZE_BYTES, &["demo"], 4096_u64);
        page
    });
    responder.expect("started")
}

fn connect(responder: &Responder) -> TcpStream {
    let stream = TcpStream::connect(responder.address()).expect("connected");
    stream.set_read_timeout(Some(READ_TIMEOUT)).expect("set");
    stream
}

/// Reads to the end of the connection; a reset counts as the end.
fn read_all(mut stream: TcpStream) -> String {
    let mut bytes = vec![];
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
            Err(error) => panic!("the connection did not end: {error}"),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn exchange(responder: &Responder, request: &[u8]) -> String {
    let mut stream = connect(responder);
    // The responder may close the connection after it has read enough.
    let _ = stream.write_all(request);
    read_all(stream)
}

fn status(answer: &str) -> Option<u16> {
    answer.split(' ').nth(1)?.parse().ok()
}

#[track_caller]
fn assert_answers(responder: &Responder) {
    let answer = exchange(responder, GET.as_bytes());
    assert_eq!(status(&answer), Some(200), "{answer}");
    let line = "\npagemesh_client_volume_size_bytes{volume=\"demo\"} 4096\n";
    assert!(answer.contains(line), "{answer}");
    let media_type = "content-type: text/plain; version=0.0.4; charset=utf-8";
    assert!(answer.contains(media_type), "{answer}");
}

#[test]
fn only_get_of_metrics_is_answered() {
    let responder = start(false);
    assert_answers(&responder);
    let check = |line: &str, expected: u16| {
        let request = format!("{line} HTTP/1.1\r\nHost: localhost:1\r\n\r\n");
        let answer = exchange(&responder, request.as_bytes());
        assert_eq!(status(&answer), Some(expected), "{line}: {answer}");
        assert!(answer.contains("connection: close"), "{answer}");
    };
    check("GET /metrics?a=b", 200);
    check("GET /", 404);
    check("GET /metrics/", 404);
    check("GET /../metrics", 404);
    check("POST /metrics", 405);
    check("DELETE /metrics", 405);
    check("HEAD /metrics", 405);
    assert_answers(&responder);
}

#[test]
fn requests_for_named_hosts_need_allow_remote() {
    let request = |host: &str| format!("GET /metrics HTTP/1.1\r\n{host}\r\n");
    let check = |responder: &Responder, host: &str, expected: u16| {
        let answer = exchange(responder, request(host).as_bytes());
        assert_eq!(status(&answer), Some(expected), "{host}: {answer}");
    };
    let local = start(false);
    check(&local, "Host: attacker.example\r\n", 421);
    check(&local, "Host: 127.0.0.1.example:80\r\n", 421);
    check(&local, "Host: a\r\nHost: 127.0.0.1\r\n", 421);
    check(&local, "", 421);
    check(&local, "Host: [::1]:9464\r\n", 200);
    let open = start(true);
    check(&open, "Host: node1.example\r\n", 200);
}

#[test]
fn remote_address_needs_allow_remote() {
    let any = SocketAddr::from(([0, 0, 0, 0], 0));
    let refused = Responder::bind(any, false).err().expect("refused");
    assert!(matches!(refused, ResponderError::Remote(_)), "{refused}");
    assert!(refused.to_string().contains("--metrics-allow-remote"));
    Responder::bind(any, true).expect("bound");
    let taken = Responder::bind(loopback(), false).expect("bound");
    let taken = taken.serve(MetricPage::default).expect("started");
    let refused = Responder::bind(taken.address(), false).err();
    let refused = refused.expect("the address is in use");
    assert!(refused.to_string().contains("--metrics"), "{refused}");
}

#[test]
fn garbage_and_oversized_heads_are_refused() {
    let responder = start(false);
    let long = "x".repeat(HEAD_BYTES_MAX * 4);
    let many = "a: b\r\n".repeat(HEAD_BYTES_MAX);
    for request in [
        "\0\u{1}\u{2}\r\n\r\n".to_owned(),
        "\u{16}\u{3}\u{1}\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
        "GET /metrics HTTP/1.1\r\nHost 127.0.0.1\r\n\r\n".to_owned(),
        format!("GET /{long} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
        format!("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nx: {long}\r\n\r\n"),
        format!("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n{many}\r\n"),
    ] {
        let answer = exchange(&responder, request.as_bytes());
        // A reset may destroy the answer to a request that was not read to its end.
        let refused = status(&answer).is_none_or(|it| (400..500).contains(&it));
        assert!(refused, "{answer}");
    }
    let endless =
        "GET /metrics HTTP/1.1\r\nHost: ::1\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n";
    exchange(&responder, endless.as_bytes());
    let body = "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n";
    exchange(&responder, body.as_bytes());
    assert_answers(&responder);
}

#[test]
fn second_request_of_a_connection_is_not_answered() {
    let responder = start(false);
    let answer = exchange(&responder, GET.repeat(3).as_bytes());
    assert_eq!(answer.matches("HTTP/1.1 200").count(), 1, "{answer}");
}

#[test]
fn slow_and_silent_peers_only_delay_a_scrape() {
    let responder = start(false);
    let begun = Instant::now();
    let silent: Vec<TcpStream> = (0..CONNECTIONS_MAX * 2)
        .map(|_| connect(&responder))
        .collect();
    let mut slow = connect(&responder);
    slow.write_all(b"GET /metrics HTTP/1.1\r\nHost: ")
        .expect("sent");
    // It waits behind all of them, each for at most the limit of a connection.
    assert_answers(&responder);
    assert!(
        begun.elapsed() >= CONNECTION_TIMEOUT,
        "{:?}",
        begun.elapsed()
    );
    assert!(begun.elapsed() < CONNECTION_TIMEOUT * 6);
    for stream in silent {
        assert_eq!(status(&read_all(stream)), None);
    }
    drop(slow);
}

#[test]
fn stuck_page_is_collected_once_and_delays_no_other_connection() {
    let (release, blocked) = mpsc::channel::<()>();
    let blocked = std::sync::Mutex::new(blocked);
    let running = Arc::new(AtomicUsize::new(0));
    let begun = Arc::clone(&running);
    let bound = Responder::bind(loopback(), false).expect("bound");
    let responder = bound.serve(move || {
        begun.fetch_add(1, Ordering::SeqCst);
        // An error means that the test has released all pages.
        let _ = blocked.lock().expect("no panic").recv();
        MetricPage::default()
    });
    let responder = responder.expect("started");
    let scrapes: Vec<TcpStream> = (0..3)
        .map(|_| {
            let mut stream = connect(&responder);
            stream.write_all(GET.as_bytes()).expect("sent");
            stream
        })
        .collect();
    let other = exchange(&responder, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    assert_eq!(status(&other), Some(404), "{other}");
    for stream in scrapes {
        // The limit of a connection ends them; their pages are never collected.
        assert_eq!(status(&read_all(stream)), None);
    }
    assert_eq!(running.load(Ordering::SeqCst), 1);
    drop(release);
    let answer = exchange(&responder, GET.as_bytes());
    assert_eq!(status(&answer), Some(200), "{answer}");
}

#[test]
fn panic_while_collecting_ends_in_a_500() {
    let bound = Responder::bind(loopback(), false).expect("bound");
    let responder = bound.serve(|| panic!("as the test wished"));
    let responder = responder.expect("started");
    for _ in 0..2 {
        let answer = exchange(&responder, GET.as_bytes());
        assert_eq!(status(&answer), Some(500), "{answer}");
    }
}

#[test]
fn stopped_responder_frees_its_address() {
    let responder = start(false);
    let address = responder.address();
    let open = connect(&responder);
    drop(responder);
    assert_eq!(status(&read_all(open)), None);
    assert!(TcpStream::connect(address).is_err());
}
