//! No log line at any level, and no error, has a token or a hash. The test sets the log of its process,
//! which no other test of this program may do.

use crate::cluster;
use crate::http;
use cluster::Cluster;
use http::{exchange, fresh_peer, request, request_with};
use pagemesh_manage::access::{TokenRole, TokenSecret};
use pagemesh_manage::token::token;
use pagemesh_manage::wire::CreateToken;
use pagemesh_manage::{ADMIN_TOKEN_FILE, ManagerClient};
use serde_json::json;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A writer that all threads share.
#[derive(Clone, Default)]
struct SharedLog(Arc<Mutex<Vec<u8>>>);

impl Write for SharedLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl SharedLog {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("no panic")).into_owned()
    }
}

#[test]
fn logs_and_errors_contain_no_token() {
    let log = SharedLog::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    tracing::subscriber::set_global_default(subscriber).expect("the only one");
    let cluster = Cluster::new(0);
    let served = cluster.serve();
    let request_body = CreateToken {
        name: "a".parse().expect("a name"),
        role: TokenRole::Admin,
        expires_s: Some(60),
    };
    let created = served.client.create_token(&request_body).expect("made");
    let right = created.token.clone();
    let wrong = TokenSecret::random().expect("random bytes");
    let admin = std::fs::read_to_string(cluster.dir.path().join(ADMIN_TOKEN_FILE));
    let admin = admin.expect("a file").trim_end().to_owned();
    let key = token(&cluster.key);
    for secret in [&right, &admin, &wrong.expose().to_owned(), &key] {
        let host = "Host: 127.0.0.1".to_owned();
        let origin = "Origin: http://127.0.0.1".to_owned();
        let bearer = format!("Authorization: Bearer {secret}");
        let cookie = format!("Cookie: pagemesh_token={secret}");
        let login = json!({"token": secret}).to_string();
        for text in [
            request("GET", "/api/v1/whoami", &[host.clone(), bearer.clone()]),
            request("GET", "/api/v1/whoami", &[host.clone(), cookie.clone()]),
            request("POST", "/api/v1/volumes", &[host.clone(), cookie.clone()]),
            request(
                "POST",
                "/api/v1/logout",
                &[host.clone(), origin.clone(), cookie],
            ),
            request_with("POST", "/api/v1/login", std::slice::from_ref(&host), &login),
            request_with(
                "POST",
                "/api/v1/login",
                std::slice::from_ref(&host),
                &login[..20],
            ),
            request_with("POST", "/api/v1/volumes", &[host, bearer], &login),
        ] {
            exchange(served.handle.address(), fresh_peer(), &text);
        }
    }
    let client = ManagerClient::with_token(&served.handle.url(), &wrong).expect("a client");
    let refused = client.status().expect_err("refused");
    let shown = format!("{client:?} {refused:?} {refused} {created:?}");
    cluster.clock.advance(Duration::from_secs(60));
    served.handle.manager().sweep();
    served.handle.stop();
    let logged = log.text();
    assert!(
        logged.contains(ADMIN_TOKEN_FILE),
        "the log names the file: {logged}"
    );
    for secret in [&right, &admin, &wrong.expose().to_owned(), &key] {
        // A part is enough for a guess of the rest.
        assert!(!logged.contains(&secret[4..20]), "{logged}");
        assert!(!shown.contains(&secret[4..20]), "{shown}");
        if let Some(secret) = TokenSecret::parse(secret) {
            let hash = serde_json::to_string(&secret.hash()).expect("JSON");
            assert!(!logged.contains(&hash[1..17]) && !shown.contains(&hash[1..17]));
        }
    }
}
