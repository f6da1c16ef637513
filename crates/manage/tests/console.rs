//! The console's files over HTTP: without a token, with their headers, and never in place of the API.

use crate::cluster;
use cluster::{Cluster, TestServer};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longer than any answer takes; only a failing test waits for it.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().skip(1);
        let found = lines.find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        });
        found.map(str::trim)
    }
}

fn send(served: &TestServer, method: &str, path: &str, headers: &str) -> Answer {
    let mut stream = TcpStream::connect(served.handle.address()).expect("connected");
    stream.set_read_timeout(Some(READ_TIMEOUT)).expect("set");
    let request =
        format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("an answer");
    let end = bytes.windows(4).position(|it| it == b"\r\n\r\n");
    let end = end.expect("the end of the head");
    let head = String::from_utf8(bytes[..end].to_vec()).expect("text");
    let status = head.split(' ').nth(1).and_then(|it| it.parse().ok());
    Answer {
        status: status.expect("a status"),
        body: bytes[end + 4..].to_vec(),
        head,
    }
}

fn with_server(test: impl FnOnce(&TestServer)) {
    let cluster = Cluster::new(0);
    let served = cluster.serve();
    test(&served);
    served.handle.stop();
}

const HTML: &str = "Accept: text/html,application/xhtml+xml\r\n";

#[test]
fn every_file_needs_no_token_and_has_its_headers() {
    with_server(|served| {
        for file in pagemesh_console::all() {
            let answer = send(served, "GET", file.path, "");
            assert_eq!((answer.status, &answer.body[..]), (200, file.bytes));
            assert_eq!(answer.header("content-type"), Some(file.content_type));
            assert_eq!(answer.header("x-content-type-options"), Some("nosniff"));
            assert_eq!(answer.header("referrer-policy"), Some("no-referrer"));
            let policy = answer.header("content-security-policy").expect("a policy");
            assert!(policy.starts_with("default-src 'self'; frame-ancestors 'none'"));
            assert!(!policy.contains("unsafe"), "{policy}");
            let cache = answer.header("cache-control").expect("a rule");
            assert_eq!(cache.contains("immutable"), file.is_hashed(), "{cache}");
        }
    });
}

#[test]
fn known_file_is_not_sent_again() {
    with_server(|served| {
        for file in pagemesh_console::all() {
            for tags in [file.etag.to_owned(), format!("\"x\", W/{}", file.etag)] {
                let known = format!("If-None-Match: {tags}\r\n");
                let answer = send(served, "GET", file.path, &known);
                assert_eq!((answer.status, answer.body.len()), (304, 0));
                assert_eq!(answer.header("etag"), Some(file.etag));
            }
            let answer = send(served, "GET", file.path, "If-None-Match: \"other\"\r\n");
            assert_eq!(answer.status, 200);
        }
    });
}

#[test]
fn addresses_of_pages_show_the_console_to_browsers_only() {
    let index = pagemesh_console::index().expect("the page");
    with_server(|served| {
        let pages = ["/bricks", "/volumes/data?span=24h", "/nothing/at/all"];
        let pages = pages.map(|path| (path, HTML));
        for (path, headers) in pages.into_iter().chain([("/", ""), ("/", HTML)]) {
            let answer = send(served, "GET", path, headers);
            assert_eq!((answer.status, &answer.body[..]), (200, index.bytes));
        }
        let answer = send(served, "HEAD", "/", "");
        assert_eq!((answer.status, answer.body.len()), (200, 0));
        for (method, path, headers) in [
            ("GET", "/bricks", "Accept: application/json\r\n"),
            ("GET", "/assets/../index.html", ""),
            ("GET", "/assets/none.js", "Accept: */*\r\n"),
            ("POST", "/", HTML),
            ("DELETE", "/bricks", HTML),
        ] {
            let answer = send(served, method, path, headers);
            assert_eq!(answer.status, 401, "{method} {path}");
        }
    });
}

#[test]
fn paths_of_the_api_never_show_the_console() {
    with_server(|served| {
        for path in [
            "/api",
            "/api/v1/status",
            "/api/v1/nothing",
            "/api/",
            "/metrics",
        ] {
            let answer = send(served, "GET", path, HTML);
            assert_eq!(answer.status, 401, "{path}");
            assert_eq!(answer.header("content-security-policy"), None, "{path}");
        }
        assert_eq!(send(served, "GET", "/healthz", HTML).body, b"ok\n");
    });
}
