//! Peers with invalid, oversized, incomplete or missing HTTP requests.

use crate::cluster;
use cluster::{Cluster, MIB, TestServer, brick_id, create_request, name};
use pagemesh_manage::LayoutKind;
use pagemesh_manage::api::{BODY_BYTES_MAX, REQUESTS_MAX, SLOW_REQUESTS_MAX};
use pagemesh_manage::token::token;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

/// Longer than any answer takes; only a failing test waits for it.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

struct RawPeer<'a> {
    cluster: &'a Cluster,
    served: &'a TestServer,
}

struct HttpAnswer {
    status: u16,
    head: String,
    body: String,
}

impl HttpAnswer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).expect("JSON")
    }
}

/// Reads to the end of the connection; a reset counts as the end.
fn read_all(mut stream: TcpStream) -> String {
    let mut bytes = vec![];
    let mut piece = [0; 4096];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(n) => bytes.extend_from_slice(&piece[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => panic!("no answer: {error}"),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn parse_answer(text: &str) -> HttpAnswer {
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
    HttpAnswer {
        status: status.unwrap_or_else(|| panic!("no status in {text:?}")),
        head: head.to_lowercase(),
        body: body.to_owned(),
    }
}

/// Reads one answer on a connection that stays open.
fn read_answer(reader: &mut BufReader<TcpStream>) -> HttpAnswer {
    let mut text = String::new();
    while !text.ends_with("\r\n\r\n") {
        let read = reader.read_line(&mut text).expect("an answer");
        assert!(read > 0, "the connection ended after {text:?}");
    }
    let mut answer = parse_answer(&text);
    let length = answer.head.split("content-length: ").nth(1);
    let length = length.and_then(|rest| rest.lines().next()?.parse().ok());
    let mut body = vec![0; length.expect("a length")];
    reader.read_exact(&mut body).expect("a body");
    answer.body = String::from_utf8(body).expect("text");
    answer
}

impl RawPeer<'_> {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.served.handle.address()).expect("connected");
        stream.set_read_timeout(Some(READ_TIMEOUT)).expect("set");
        stream
    }

    /// The answer to a request that ends its connection.
    fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // The server may reset the connection after it has read enough.
        let _ = stream.write_all(bytes);
        read_all(stream)
    }

    /// The answer to these bytes and an end of the stream.
    fn exchange_and_end(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(Shutdown::Write);
        read_all(stream)
    }

    fn head(&self, method: &str, path: &str, more: &str) -> String {
        let token = token(&self.cluster.key);
        format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n{more}\r\n"
        )
    }

    fn request(&self, method: &str, path: &str, body: &str) -> HttpAnswer {
        let more = format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
        let request = self.head(method, path, &more) + body;
        parse_answer(&self.exchange(request.as_bytes()))
    }

    /// The head of the answer to a request without a body.
    fn request_head(&self, method: &str, path: &str) -> HttpAnswer {
        let mut stream = self.connect();
        let request = self.head(method, path, "");
        stream.write_all(request.as_bytes()).expect("sent");
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).expect("an answer") > 0);
        }
        parse_answer(&head)
    }

    /// Asserts that the refusal is JSON of the documented form.
    #[track_caller]
    fn assert_refused(&self, answer: &HttpAnswer, status: u16, code: &str) {
        let body = answer.json();
        assert_eq!(
            (answer.status, &body["code"]),
            (status, &json!(code)),
            "{body}"
        );
        for field in ["error", "hint"] {
            assert!(
                body[field].as_str().is_some_and(|text| !text.is_empty()),
                "{body}"
            );
        }
    }

    /// Asserts that the manager is unchanged and answers.
    #[track_caller]
    fn assert_manager_healthy(&self) {
        let status = self.served.client.status().expect("status");
        assert_eq!((status.bricks_alive, status.volumes), (2, 1));
    }
}

fn with_peer(test: impl FnOnce(&RawPeer<'_>)) {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    served
        .client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    let peer = RawPeer {
        cluster: &cluster,
        served: &served,
    };
    test(&peer);
    peer.assert_manager_healthy();
    cluster.assert_no_orphans(served.handle.manager());
    served.handle.stop();
}

/// Every endpoint but `/healthz`, from the reference page: a second source beside the routes of the server. Paths name
/// the first brick and the volume `v`.
fn routes() -> Vec<(&'static str, String)> {
    let page = include_str!("../../../docs/reference/rest.md");
    let endpoints = page.lines().filter_map(|line| {
        let (method, path) = line
            .strip_prefix("## `")?
            .strip_suffix('`')?
            .split_once(' ')?;
        let path = path.replace("{brick}", &brick_id(0).to_string());
        let path = path.replace("{snapshot}", "s").replace("{tag}", "t");
        let path = path.replace("{bookmark}", "b").replace("{schedule}", "c");
        // Event 1 is the start of the manager.
        Some((method, path.replace("{name}", "v").replace("{seq}", "1")))
    });
    let mut found: Vec<_> = endpoints.filter(|(_, path)| path != "/healthz").collect();
    // The other requests need the brick and the volume, and a hold needs its snapshot.
    let depth = |path: &str| path.split('/').count();
    found.sort_by_key(|(method, path)| (*method == "DELETE", Reverse(depth(path))));
    assert!(found.len() >= 18, "the page has {} endpoints", found.len());
    found
}

#[test]
fn garbage_is_refused() {
    with_peer(|peer| {
        let mut noise = vec![0u8; 70_000];
        let mut state = 1u32;
        for byte in &mut noise {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = (state >> 24) as u8;
        }
        let long_head = format!(
            "GET /healthz HTTP/1.1\r\nx: {}\r\n\r\n",
            "x".repeat(1 << 20)
        );
        let many_heads = format!("GET /healthz HTTP/1.1\r\n{}\r\n", "x: y\r\n".repeat(1000));
        for bytes in [
            &b""[..],
            b"\r\n\r\n\r\n",
            b"\0",
            b"GET",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /api/v1/status HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"GET /api/v1/status HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
            &noise,
            long_head.as_bytes(),
            many_heads.as_bytes(),
        ] {
            let said = peer.exchange_and_end(bytes);
            let harmless = said.is_empty() || said.starts_with("HTTP/1.1 4");
            assert!(harmless, "{:?}: {said}", String::from_utf8_lossy(bytes));
        }
    });
}

#[test]
fn request_without_token_is_unauthorized() {
    with_peer(|peer| {
        let right = token(&peer.cluster.key);
        let mut wrong = right.clone();
        wrong.replace_range(63.., if right.ends_with('0') { "1" } else { "0" });
        let headers = [
            String::new(),
            "Authorization: \r\n".into(),
            format!("Authorization: {right}\r\n"),
            format!("Authorization: Basic {right}\r\n"),
            format!("Authorization: Bearer {wrong}\r\n"),
            format!("Authorization: Bearer {}\r\n", &right[..62]),
            format!("Authorization: Bearer {right}00\r\n"),
            format!("Authorization: Bearer  {right}\r\n"),
            format!("Authorization: Bearer {right}\r\nAuthorization: Bearer {wrong}\r\n"),
            "Authorization: Bearer \u{e9}\r\n".into(),
            format!("Cookie: {right}\r\n"),
        ];
        let unknown = ("GET", "/api/v1/nothing".to_owned());
        let mut first = None;
        for (method, path) in routes()
            .into_iter()
            .chain([unknown, ("GET", "/nothing".into())])
        {
            for header in &headers {
                let request = format!(
                    "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n"
                );
                let answer = parse_answer(&peer.exchange(request.as_bytes()));
                peer.assert_refused(&answer, 401, "unauthorized");
                assert!(
                    answer.head.contains("www-authenticate: bearer"),
                    "{}",
                    answer.head
                );
                // The answer must not show whether the path exists.
                assert_eq!(first.get_or_insert(answer.body.clone()), &answer.body);
            }
        }
        let healthz = "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        let answer = parse_answer(&peer.exchange(healthz.as_bytes()));
        assert_eq!((answer.status, answer.body.as_str()), (200, "ok\n"));
    });
}

#[test]
fn unknown_paths_and_methods_are_refused() {
    with_peer(|peer| {
        for path in [
            "/nothing",
            "/api",
            "/api/v1",
            "/api/v2/status",
            "/api/v1/volumes/v/x",
            "/api/v1/status/",
        ] {
            peer.assert_refused(&peer.request("GET", path, ""), 404, "not-found");
        }
        for (_, path) in routes() {
            for method in ["PATCH", "OPTIONS", "BREW"] {
                peer.assert_refused(&peer.request(method, &path, ""), 405, "wrong-method");
            }
        }
        peer.assert_refused(
            &peer.request("PUT", "/api/v1/volumes/v", ""),
            405,
            "wrong-method",
        );
        peer.assert_refused(
            &peer.request("POST", "/api/v1/status", ""),
            405,
            "wrong-method",
        );
        for bad in ["%2e%2e", "a%2Fb", "%00", "-x", "a%20b", "%ff", "%C3%A9"] {
            let path = format!("/api/v1/volumes/{bad}");
            peer.assert_refused(&peer.request("GET", &path, ""), 400, "bad-request");
            peer.assert_refused(&peer.request("DELETE", &path, ""), 400, "bad-request");
            let path = format!("/api/v1/bricks/{bad}");
            peer.assert_refused(&peer.request("DELETE", &path, ""), 400, "bad-request");
        }
        let long = format!("/api/v1/volumes/{}", "x".repeat(65));
        peer.assert_refused(&peer.request("GET", &long, ""), 400, "bad-request");
        peer.assert_refused(
            &peer.request("DELETE", "/api/v1/bricks/one", ""),
            404,
            "not-found",
        );
        for query in [
            "?force=maybe",
            "?force=",
            "?farce=true",
            "?force=true&force=true",
        ] {
            let path = format!("/api/v1/volumes/v{query}");
            peer.assert_refused(&peer.request("DELETE", &path, ""), 400, "bad-request");
        }
    });
}

#[test]
fn bodies_are_checked() {
    with_peer(|peer| {
        let post = |body: &str| peer.request("POST", "/api/v1/volumes", body);
        for body in [
            "",
            "{",
            "[]",
            "null",
            "7",
            "\u{0}",
            "{\"name\":\"w\"}",
            r#"{"name":"w","size_bytes":-1}"#,
            r#"{"name":"w","size_bytes":1.5}"#,
            r#"{"name":"w","size_bytes":18446744073709551616}"#,
            r#"{"name":"w","size_bytes":1048576,"layout":"raid5"}"#,
            r#"{"name":"w","size_bytes":1048576,"copys":3}"#,
            r#"{"name":"w","size_bytes":1048576,"columns":-1}"#,
            r#"{"name":"w","name":"x","size_bytes":1048576}"#,
            r#"{"name":"w","size_bytes":1048576} and more"#,
        ] {
            peer.assert_refused(&post(body), 400, "bad-request");
        }
        let named = |name: &str| {
            let answer = post(&json!({"name": name, "size_bytes": MIB}).to_string());
            peer.assert_refused(&answer, 400, "bad-request");
            answer.json()["error"].as_str().expect("text").to_owned()
        };
        assert!(named("").contains("must not be empty"));
        assert!(named(&"x".repeat(65)).contains("at most 64"));
        assert!(named("a/b").contains("'/'"));
        assert!(named("a\nb").contains("cannot stand in a name"));
        assert!(named(".hidden").contains("starts with"));
        let deep = "[".repeat(100_000);
        peer.assert_refused(&post(&deep), 400, "bad-request");
        let typeless = peer.head("POST", "/api/v1/volumes", "Content-Length: 2\r\n") + "{}";
        peer.assert_refused(
            &parse_answer(&peer.exchange(typeless.as_bytes())),
            415,
            "not-json",
        );
        let brick = json!({"brick": brick_id(1), "address": "a:1", "domain": "d",
            "durability": "process", "capacity_bytes": 1, "used_bytes": 0, "incarnation": 1});
        let path = format!("/api/v1/bricks/{}", brick_id(0));
        peer.assert_refused(
            &peer.request("PUT", &path, &brick.to_string()),
            400,
            "bad-request",
        );
    });
}

#[test]
fn bodies_have_a_limit() {
    with_peer(|peer| {
        let path = "/api/v1/volumes/v/attach";
        let json = "Content-Type: application/json\r\n";
        // The declared length is too large: refused before the body is sent.
        let more = format!("{json}Content-Length: {}\r\n", BODY_BYTES_MAX + 1);
        let mut stream = peer.connect();
        stream
            .write_all(peer.head("POST", path, &more).as_bytes())
            .expect("sent");
        peer.assert_refused(&parse_answer(&read_all(stream)), 413, "too-large");
        let more = format!("{json}Content-Length: {}\r\n", u64::MAX);
        let said = peer.exchange(peer.head("POST", path, &more).as_bytes());
        assert!(said.starts_with("HTTP/1.1 4"), "{said}");
        // Without a declared length, in chunks.
        let mut stream = peer.connect();
        let head = peer.head(
            "POST",
            path,
            &format!("{json}Transfer-Encoding: chunked\r\n"),
        );
        stream.write_all(head.as_bytes()).expect("sent");
        let piece = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
        for _ in 0..=BODY_BYTES_MAX / 0x10000 {
            if stream.write_all(piece.as_bytes()).is_err() {
                break;
            }
        }
        let said = read_all(stream);
        // A reset may overtake the answer.
        if !said.is_empty() {
            peer.assert_refused(&parse_answer(&said), 413, "too-large");
        }
        // A body of the maximum length is read, and refused for its contents.
        let client = "x".repeat(BODY_BYTES_MAX - 13);
        let body = format!("{{\"client\":\"{client}\"}}");
        assert_eq!(body.len(), BODY_BYTES_MAX);
        peer.assert_refused(&peer.request("POST", path, &body), 400, "bad-request");
    });
}

/// A refusal before the body leaves a connection that the client can reuse, or announces its close.
#[test]
fn refusal_keeps_connection_open_or_announces_close() {
    with_peer(|peer| {
        let head = |length: usize| {
            format!(
                "POST /api/v1/volumes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\n\
                 Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
            )
        };
        let mut stream = peer.connect();
        let mut reader = BufReader::new(stream.try_clone().expect("cloned"));
        for _ in 0..3 {
            stream.write_all(head(1000).as_bytes()).expect("sent");
            // Once other requests are answered, the server has read the head.
            peer.assert_manager_healthy();
            stream.write_all(&[b' '; 1000]).expect("still open");
            let said = read_answer(&mut reader);
            peer.assert_refused(&said, 401, "unauthorized");
            assert!(!said.head.contains("connection: close"), "{}", said.head);
        }
        stream.write_all(head(100_000).as_bytes()).expect("sent");
        let said = read_answer(&mut reader);
        peer.assert_refused(&said, 401, "unauthorized");
        assert!(said.head.contains("connection: close"), "{}", said.head);
    });
}

/// Stalled peers occupy their own connection and nothing else.
#[test]
fn incomplete_requests_block_no_other_client() {
    with_peer(|peer| {
        let whole = peer.head(
            "POST",
            "/api/v1/volumes/v/attach",
            "Content-Length: 100\r\nContent-Type: application/json\r\n",
        );
        let mut held = vec![];
        for part in 0..100 {
            let mut stream = peer.connect();
            stream
                .write_all(&whole.as_bytes()[..whole.len() * part / 100])
                .expect("sent");
            held.push(stream);
        }
        peer.assert_manager_healthy();
        for stream in held.drain(..) {
            drop(stream);
        }
        // An incomplete body is no body.
        let said = peer.exchange_and_end((whole.clone() + "{\"client\":").as_bytes());
        assert!(
            said.is_empty() || said.starts_with("HTTP/1.1 400"),
            "{said}"
        );
        let detail = peer.served.client.volume(&name("v")).expect("shown");
        assert_eq!((detail.info.attached, detail.layout.epoch.0), (None, 1));
        // Incomplete bodies occupy request permits, but only until their peers disconnect.
        for _ in 0..REQUESTS_MAX {
            let mut stream = peer.connect();
            stream.write_all(whole.as_bytes()).expect("sent");
            held.push(stream);
        }
        let overloaded = loop {
            let answer = peer.request("GET", "/api/v1/status", "");
            if answer.status != 200 {
                break answer;
            }
        };
        peer.assert_refused(&overloaded, 503, "overloaded");
        drop(held);
        while peer.request("GET", "/api/v1/status", "").status != 200 {}
    });
}

/// A login without its body holds no permit.
#[test]
fn incomplete_logins_block_no_request() {
    with_peer(|peer| {
        let head = "POST /api/v1/login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n\
                    Content-Length: 10\r\n\r\n";
        let send = |_| {
            let mut stream = peer.connect();
            stream.write_all(head.as_bytes()).expect("sent");
            stream
        };
        let mut held: Vec<_> = (0..2 * REQUESTS_MAX).map(send).collect();
        for _ in 0..REQUESTS_MAX {
            assert_eq!(peer.request("GET", "/api/v1/status", "").status, 200);
        }
        let mut answer = String::new();
        let first = held.first_mut().expect("a stream");
        first
            .read_to_string(&mut answer)
            .expect("an answer and the end");
        assert!(
            answer.starts_with("HTTP/1.1 408") || answer.starts_with("HTTP/1.1 504"),
            "{answer}"
        );
    });
}

/// Several requests in one packet are answered in order.
#[test]
fn pipelined_requests_are_answered_in_order() {
    with_peer(|peer| {
        let one = peer
            .head("GET", "/api/v1/status", "")
            .replace("Connection: close\r\n", "");
        let bytes = one.repeat(20) + &peer.head("GET", "/healthz", "");
        let said = peer.exchange(bytes.as_bytes());
        assert_eq!(said.matches("HTTP/1.1 200 OK").count(), 21);
        assert!(said.ends_with("ok\n"));
    });
}

/// Requests that wait for bricks have fewer permits, and hold them after their clients have
/// disconnected.
#[test]
fn requests_waiting_for_bricks_are_limited() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let peer = RawPeer {
        cluster: &cluster,
        served: &served,
    };
    let (asks, asked) = mpsc::channel::<()>();
    let (lets, go_on) = mpsc::channel::<()>();
    let (asks, go_on) = (Mutex::new(asks), Mutex::new(Some(go_on)));
    let hook = move |_: &cluster::FakeBrick| {
        // An error means that the test has released all of them.
        let _ = asks.lock().expect("no panic").send(());
        let waits = go_on.lock().expect("no panic");
        let _ = waits.as_ref().map(mpsc::Receiver::recv);
    };
    *cluster.fakes[0].hook.lock().expect("no panic") = Some(Arc::new(Box::new(hook)));
    let mut gone = vec![];
    for number in 0..SLOW_REQUESTS_MAX {
        let body = json!({"name": format!("v{number}"), "size_bytes": MIB}).to_string();
        let more = format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
        let mut stream = peer.connect();
        let request = peer.head("POST", "/api/v1/volumes", &more) + &body;
        stream.write_all(request.as_bytes()).expect("sent");
        asked.recv().expect("a brick is asked");
        gone.push(stream);
    }
    drop(gone);
    let body = json!({"name": "w", "size_bytes": MIB}).to_string();
    let answer = peer.request("POST", "/api/v1/volumes", &body);
    peer.assert_refused(&answer, 503, "overloaded");
    assert_eq!(served.client.status().expect("status").bricks_alive, 2);
    served
        .client
        .heartbeat(&cluster::registration(0))
        .expect("welcome");
    drop((lets, asked));
    served.handle.stop();
    // The work of disconnected clients was done all the same.
    let manager = cluster.manager();
    assert_eq!(manager.volumes().len(), SLOW_REQUESTS_MAX);
    cluster.assert_no_orphans(&manager);
}

#[test]
fn openapi_document_lists_every_route() {
    with_peer(|peer| {
        let answer = peer.request("GET", "/api/v1/openapi.json", "");
        assert_eq!(answer.status, 200);
        let document = answer.json();
        assert!(
            document["openapi"]
                .as_str()
                .is_some_and(|version| version.starts_with("3."))
        );
        let paths = document["paths"].as_object().expect("paths");
        let mut documented: Vec<(String, String)> = paths
            .iter()
            .flat_map(|(path, verbs)| {
                let verbs = verbs.as_object().expect("verbs");
                verbs
                    .keys()
                    .map(move |verb| (verb.to_uppercase(), path.clone()))
            })
            .collect();
        documented.sort();
        let brick = brick_id(0).to_string();
        let pattern = |path: String| {
            let path = path.replace(&brick, "{brick}");
            let path = path.replace("/events/1/", "/events/{seq}/");
            let path = path.replace("/snapshots/s", "/snapshots/{snapshot}");
            let path = path.replace("/holds/t", "/holds/{tag}");
            let path = path.replace("/bookmarks/b", "/bookmarks/{bookmark}");
            let path = path.replace("/schedules/c", "/schedules/{schedule}");
            path.replace("/volumes/v", "/volumes/{name}")
        };
        let mut known: Vec<_> = routes()
            .into_iter()
            .map(|(method, path)| (method.to_owned(), pattern(path)))
            .chain([("GET".into(), "/healthz".into())])
            .collect();
        known.sort();
        assert_eq!(documented, known);
        let operations = paths.values().flat_map(|verbs| verbs.as_object());
        for operation in operations.flat_map(|verbs| verbs.values()) {
            let responses = operation["responses"].as_object().expect("responses");
            let is_described = |it: &Value| {
                let shared = it["$ref"].as_str().and_then(|it| it.strip_prefix('#'));
                let it = shared.and_then(|it| document.pointer(it)).unwrap_or(it);
                it["description"].as_str().is_some_and(|it| !it.is_empty())
            };
            assert!(responses.values().all(is_described), "{operation}");
        }
        let snapshot = json!({"name": "s"}).to_string();
        let answer = peer.request("POST", "/api/v1/volumes/v/snapshots", &snapshot);
        assert_eq!(answer.status, 201, "{}", answer.body);
        let bookmark = json!({"snapshot": "s", "name": "b"}).to_string();
        let answer = peer.request("POST", "/api/v1/volumes/v/bookmarks", &bookmark);
        assert_eq!(answer.status, 201, "{}", answer.body);
        let policy = json!({"volumes": ["v"], "retention": {"daily": 7}});
        let schedule = json!({"name": "c", "policy": policy}).to_string();
        let answer = peer.request("POST", "/api/v1/schedules", &schedule);
        assert_eq!(answer.status, 201, "{}", answer.body);
        // The document describes every route, and resolves all of its references.
        for (method, path) in routes() {
            let answer = if path.ends_with("/watch") {
                // A stream has no end; its head says enough.
                peer.request_head(method, &path)
            } else {
                peer.request(method, &path, "")
            };
            // Without a rollback there is none to show, to carry out or to end, and no server exports
            // the volume.
            let needs_more = path.contains("/rollback") || path.ends_with("/nfs");
            let is_missing = match needs_more {
                true => answer.body.contains("there is nothing at"),
                false => answer.status == 404,
            };
            assert!(!is_missing && answer.status != 405, "{method} {path}");
        }
        let mut references = vec![];
        collect_references(&document, &mut references);
        assert!(references.len() > 20);
        for reference in references {
            let pointer = reference.strip_prefix('#').expect("local");
            assert!(
                document.pointer(pointer).is_some(),
                "{reference} is not there"
            );
        }
        peer.served
            .client
            .create(&create_request("v", LayoutKind::Mirror, MIB))
            .expect("made");
        peer.cluster.send_heartbeats(peer.served.handle.manager());
    });
}

fn collect_references(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                into.push(reference.clone());
            }
            fields
                .values()
                .for_each(|field| collect_references(field, into));
        }
        Value::Array(items) => items.iter().for_each(|item| collect_references(item, into)),
        _ => {}
    }
}
