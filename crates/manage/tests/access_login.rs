//! Login, logout and the cookie: requests that a browser sends, for pages of this manager and of other
//! sites, and the limit of wrong tokens.

use crate::cluster;
use crate::http;
use cluster::{Cluster, TestServer};
use http::{HttpAnswer, exchange, fresh_peer, request, request_with};
use pagemesh_manage::access::{TokenRole, TokenSecret, WRONG_TOKENS_MAX};
use pagemesh_manage::token::token;
use pagemesh_manage::wire::CreateToken;
use serde_json::{Value, json};
use std::net::Ipv4Addr;
use std::time::Duration;

/// A served cluster with an operator's token.
struct LoginTest {
    cluster: Cluster,
    served: TestServer,
    token: String,
}

impl LoginTest {
    fn new() -> LoginTest {
        let cluster = Cluster::new(0);
        let served = cluster.serve();
        let request = CreateToken {
            name: "olga".parse().expect("a name"),
            role: TokenRole::Operator,
            expires_s: Some(1000),
        };
        let token = served.client.create_token(&request).expect("made").token;
        LoginTest {
            cluster,
            served,
            token,
        }
    }

    /// The host as a browser names it.
    fn host(&self) -> String {
        self.served.handle.address().to_string()
    }

    fn send_from(&self, peer: Ipv4Addr, text: &str) -> HttpAnswer {
        exchange(self.served.handle.address(), peer, text)
    }

    fn login(&self, headers: &[String], body: &str) -> HttpAnswer {
        self.send_from(
            fresh_peer(),
            &request_with("POST", "/api/v1/login", headers, body),
        )
    }

    fn login_body(&self) -> String {
        json!({"token": self.token}).to_string()
    }

    /// A change with the cookie: an empty body is refused later, with 400 or 415.
    fn change(&self, headers: &[String]) -> HttpAnswer {
        let cookie = format!("Cookie: pagemesh_token={}", self.token);
        let headers: Vec<String> = [cookie].into_iter().chain(headers.to_vec()).collect();
        self.send_from(fresh_peer(), &request("POST", "/api/v1/volumes", &headers))
    }

    fn read(&self, headers: &[String]) -> HttpAnswer {
        let cookie = format!("Cookie: pagemesh_token={}", self.token);
        let headers: Vec<String> = [cookie].into_iter().chain(headers.to_vec()).collect();
        self.send_from(fresh_peer(), &request("GET", "/api/v1/whoami", &headers))
    }
}

fn lines(lines: &[&str]) -> Vec<String> {
    lines.iter().map(|it| (*it).to_owned()).collect()
}

#[test]
fn login_sets_cookie_that_survives_restart() {
    let test = LoginTest::new();
    let host = format!("Host: {}", test.host());
    let answer = test.login(std::slice::from_ref(&host), &test.login_body());
    assert_eq!(answer.status, 200, "{answer:?}");
    let who = answer.json();
    assert_eq!(
        (&who["name"], &who["role"]),
        (&json!("olga"), &json!("operator"))
    );
    assert!(who["expires_unix_s"].is_u64());
    let cookie = answer.header("set-cookie").expect("a cookie");
    assert!(cookie.starts_with("pagemesh_token=pm_"), "{cookie}");
    for attribute in ["; httponly", "; samesite=strict", "; path=/"] {
        assert!(cookie.contains(attribute), "{cookie}");
    }
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert_eq!(test.read(std::slice::from_ref(&host)).json(), who);
    let LoginTest {
        cluster,
        served,
        token,
    } = test;
    served.handle.stop();
    let served = cluster.serve();
    let again = LoginTest {
        cluster,
        served,
        token,
    };
    let host = format!("Host: {}", again.host());
    assert_eq!(again.read(&[host]).json(), who);
}

#[test]
fn logout_clears_cookie_and_keeps_token() {
    let test = LoginTest::new();
    let own = [
        format!("Host: {}", test.host()),
        format!("Origin: http://{}", test.host()),
    ];
    let cookie = format!("Cookie: pagemesh_token={}", test.token);
    let headers = [&own[..], &[cookie]].concat();
    let answer = test.send_from(fresh_peer(), &request("POST", "/api/v1/logout", &headers));
    assert_eq!((answer.status, answer.body.as_str()), (204, ""));
    let cookie = answer.header("set-cookie").expect("a cookie");
    assert!(
        cookie.starts_with("pagemesh_token=;") && cookie.contains("max-age=0"),
        "{cookie}"
    );
    assert_eq!(test.read(&own[..1]).status, 200);
}

#[test]
fn whoami_names_caller() {
    let test = LoginTest::new();
    let who = |credential: &str| -> Value {
        let headers = [
            format!("Authorization: bearer {credential}"),
            "Host: x".into(),
        ];
        test.send_from(fresh_peer(), &request("GET", "/api/v1/whoami", &headers))
            .json()
    };
    let key = who(&token(&test.cluster.key));
    assert_eq!(
        key,
        json!({"name": "cluster key", "role": "cluster", "expires_unix_s": null})
    );
    assert_eq!(who(&test.token)["name"], json!("olga"));
}

/// A change counts only if a page of this manager sent it (CSRF).
#[test]
fn page_of_other_site_changes_nothing() {
    let test = LoginTest::new();
    let host = format!("Host: {}", test.host());
    let port = test.served.handle.address().port();
    let own = format!("Origin: http://{}", test.host());
    for evidence in [
        vec![own.clone()],
        lines(&["Sec-Fetch-Site: same-origin"]),
        vec![own.clone(), "Sec-Fetch-Site: same-origin".into()],
    ] {
        let headers = [std::slice::from_ref(&host), &evidence].concat();
        assert_eq!(test.change(&headers).status, 415, "{evidence:?}");
    }
    for evidence in [
        vec![],
        lines(&["Origin: null"]),
        lines(&["Origin: http://evil.example"]),
        vec![format!("Origin: http://evil.example:{port}")],
        vec![format!("Origin: http://127.0.0.1:{}", port ^ 1)],
        vec![own.clone(), own.clone()],
        vec![own.clone(), "Origin: http://evil.example".into()],
        vec![own.clone(), "Sec-Fetch-Site: cross-site".into()],
        lines(&["Sec-Fetch-Site: cross-site"]),
        lines(&["Sec-Fetch-Site: same-site"]),
        lines(&["Sec-Fetch-Site: none"]),
        lines(&["Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: cross-site"]),
        vec![format!("Referer: http://{}/", test.host())],
    ] {
        let headers = [std::slice::from_ref(&host), &evidence].concat();
        let answer = test.change(&headers);
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (401, "unauthorized"),
            "{evidence:?}"
        );
        assert!(answer.header("set-cookie").is_none(), "the cookie stays");
    }
    // A read needs no evidence, and a token in a header proves that no browser added it.
    assert_eq!(test.read(std::slice::from_ref(&host)).status, 200);
    let bearer = format!("Authorization: Bearer {}", test.token);
    let headers = [host, bearer, "Origin: http://evil.example".into()];
    let answer = test.send_from(fresh_peer(), &request("POST", "/api/v1/volumes", &headers));
    assert_eq!(answer.status, 415);
}

/// A name that is bound to the manager's address later reads nothing (DNS rebinding).
#[test]
fn cookie_counts_for_allowed_hosts_only() {
    let test = LoginTest::new();
    let port = test.served.handle.address().port();
    for host in [
        "127.0.0.1",
        "[::1]",
        "localhost",
        "store.example",
        "Store.Example",
    ] {
        for host in [format!("Host: {host}:{port}"), format!("Host: {host}")] {
            assert_eq!(test.read(std::slice::from_ref(&host)).status, 200, "{host}");
        }
    }
    for host in [
        format!("evil.example:{port}"),
        "store.example.evil.example".into(),
        "127.0.0.1.evil.example".into(),
        "127.0.0.1@evil.example".into(),
        "evil.example@127.0.0.1".into(),
        String::new(),
    ] {
        let host = format!("Host: {host}");
        let answer = test.read(std::slice::from_ref(&host));
        assert!([400, 401].contains(&answer.status), "{host}: {answer:?}");
        let own = format!("Origin: http://{}", &host[6..]);
        let answer = test.change(&[host.clone(), own.clone()]);
        assert!([400, 401].contains(&answer.status), "{host}: {answer:?}");
        let answer = test.login(&[host.clone(), own], &test.login_body());
        assert!([400, 403].contains(&answer.status), "{host}: {answer:?}");
        assert!(answer.header("set-cookie").is_none());
    }
    let twice = format!("Host: {}", test.host());
    let answer = test.read(&[twice.clone(), twice]);
    assert!([400, 401].contains(&answer.status), "{answer:?}");
    let host = format!("Host: {}", test.host());
    let cookie = format!("Cookie: pagemesh_token={}", test.token);
    let absolute = request("GET", "http://evil.example/api/v1/whoami", &[host, cookie]);
    assert_eq!(test.send_from(fresh_peer(), &absolute).status, 401);
}

#[test]
fn login_of_other_site_is_refused() {
    let test = LoginTest::new();
    let host = format!("Host: {}", test.host());
    let own = format!("Origin: http://{}", test.host());
    assert_eq!(
        test.login(&[host.clone(), own], &test.login_body()).status,
        200
    );
    for evidence in [
        "Origin: http://evil.example",
        "Origin: null",
        "Sec-Fetch-Site: cross-site",
    ] {
        let answer = test.login(&[host.clone(), evidence.into()], &test.login_body());
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (403, "forbidden"),
            "{evidence}"
        );
        assert!(answer.header("set-cookie").is_none());
    }
}

#[test]
fn ambiguous_credentials_are_refused() {
    let test = LoginTest::new();
    let host = format!("Host: {}", test.host());
    let cookie = format!("Cookie: pagemesh_token={}", test.token);
    let bearer = format!("Authorization: Bearer {}", test.token);
    let who = |headers: &[&String]| {
        let headers: Vec<String> = headers.iter().map(|it| (*it).clone()).collect();
        test.send_from(fresh_peer(), &request("GET", "/api/v1/whoami", &headers))
            .status
    };
    assert_eq!(who(&[&host, &cookie]), 200);
    assert_eq!(who(&[&host, &bearer]), 200);
    assert_eq!(who(&[&host, &cookie, &cookie]), 401);
    assert_eq!(who(&[&host, &bearer, &bearer]), 401);
    let both = format!("{cookie}; pagemesh_token=pm_x");
    assert_eq!(who(&[&host, &both]), 401);
    // A wrong header is not replaced by a right cookie.
    let wrong = "Authorization: Bearer pm_wrong".to_owned();
    assert_eq!(who(&[&host, &wrong, &cookie]), 401);
    // The key's HMAC is no cookie, and a token is no basic credential.
    let hmac = format!("Cookie: pagemesh_token={}", token(&test.cluster.key));
    assert_eq!(who(&[&host, &hmac]), 401);
    let basic = format!("Authorization: Basic {}", test.token);
    assert_eq!(who(&[&host, &basic]), 401);
    let long = format!("Authorization: Bearer pm_{}", "A".repeat(12_000));
    assert_eq!(who(&[&host, &long]), 401);
    let many = format!("Cookie: {}", "a=b; ".repeat(2000));
    assert_eq!(who(&[&host, &many]), 401);
}

#[test]
fn unreadable_login_is_unauthorized_and_repeats_nothing() {
    let test = LoginTest::new();
    let host = format!("Host: {}", test.host());
    let token = &test.token;
    for body in [
        String::new(),
        "{".into(),
        format!("\"{token}\""),
        format!("{{\"token\": [\"{token}\"]}}"),
        format!("{{\"tokens\": \"{token}\"}}"),
        format!("{{\"{token}\": 1}}"),
        format!("{{\"token\": \"{token}\", \"token\": \"{token}\"}}"),
        json!({"token": token.to_uppercase()}).to_string(),
        json!({"token": format!("{token} ")}).to_string(),
        json!({"token": "x".repeat(100_000)}).to_string(),
    ] {
        let answer = test.login(std::slice::from_ref(&host), &body);
        assert_eq!(answer.status, 401, "{body:.60}");
        assert!(!answer.body.contains(&token[4..30]), "{}", answer.body);
    }
    let text = request(
        "POST",
        "/api/v1/login",
        &[host, "Content-Type: text/plain".into()],
    );
    assert_eq!(test.send_from(fresh_peer(), &text).status, 401);
    let huge = format!(
        "POST /api/v1/login HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        1u64 << 40
    );
    assert_eq!(test.send_from(fresh_peer(), &huge).status, 413);
}

/// The eleventh wrong token of a minute is answered with 429, and a right one never is.
#[test]
fn wrong_tokens_are_limited_by_address() {
    let test = LoginTest::new();
    let peer = fresh_peer();
    let host = format!("Host: {}", test.host());
    let wrong = TokenSecret::random().expect("random bytes");
    let by_header = |token: &str| {
        let headers = [host.clone(), format!("Authorization: Bearer {token}")];
        test.send_from(peer, &request("GET", "/api/v1/whoami", &headers))
    };
    let by_login = |token: &str| {
        let body = json!({"token": token}).to_string();
        test.send_from(
            peer,
            &request_with("POST", "/api/v1/login", std::slice::from_ref(&host), &body),
        )
    };
    let by_cookie = |token: &str| {
        let headers = [host.clone(), format!("Cookie: pagemesh_token={token}")];
        test.send_from(peer, &request("GET", "/api/v1/whoami", &headers))
    };
    for number in 0..WRONG_TOKENS_MAX {
        let answer = match number % 3 {
            0 => by_header(wrong.expose()),
            1 => by_login(wrong.expose()),
            _ => by_cookie(wrong.expose()),
        };
        assert_eq!(answer.status, 401, "{number}: {answer:?}");
    }
    for answer in [
        by_header(wrong.expose()),
        by_login("pm_x"),
        by_cookie("garbage"),
    ] {
        assert_eq!(
            (answer.status, answer.code().as_str()),
            (429, "rate-limited"),
            "{answer:?}"
        );
        let seconds = answer
            .header("retry-after")
            .and_then(|it| it.parse::<u64>().ok());
        assert!(
            seconds.is_some_and(|it| (1..=61).contains(&it)),
            "{answer:?}"
        );
    }
    for answer in [
        by_header(&test.token),
        by_login(&test.token),
        by_cookie(&test.token),
    ] {
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    // Other addresses and the cluster key are not limited.
    let headers = [
        host.clone(),
        format!("Authorization: Bearer {}", wrong.expose()),
    ];
    let other = test.send_from(fresh_peer(), &request("GET", "/api/v1/whoami", &headers));
    assert_eq!(other.status, 401);
    assert_eq!(by_header(&token(&test.cluster.key)).status, 200);
    test.cluster.clock.advance(Duration::from_secs(60));
    assert_eq!(by_header(wrong.expose()).status, 401);
}

/// A browser with a cookie that is no longer valid forgets it.
#[test]
fn wrong_cookie_is_cleared() {
    let test = LoginTest::new();
    let host = format!("Host: {}", test.host());
    test.cluster.clock.advance(Duration::from_secs(1000));
    let answer = test.read(&[host]);
    assert_eq!(answer.status, 401);
    let cookie = answer.header("set-cookie").expect("a cookie");
    assert!(cookie.contains("max-age=0"), "{cookie}");
}

#[test]
fn errors_are_problems_with_earlier_keys() {
    let test = LoginTest::new();
    let headers = [
        "Host: x".to_owned(),
        format!("Authorization: Bearer {}", test.token),
    ];
    for (method, path, status, code) in [
        ("GET", "/api/v1/nothing", 404, "not-found"),
        ("GET", "/api/v1/volumes/none", 404, "not-found"),
        ("DELETE", "/api/v1/volumes", 405, "wrong-method"),
        ("GET", "/api/v1/tokens", 403, "forbidden"),
        ("POST", "/api/v1/volumes", 415, "not-json"),
        ("GET", "/api/v1/volumes/-x", 400, "bad-request"),
    ] {
        let answer = test.send_from(fresh_peer(), &request(method, path, &headers));
        assert_eq!(
            answer.header("content-type"),
            Some("application/problem+json")
        );
        let body = answer.json();
        assert_eq!(
            (answer.status, &body["status"]),
            (status, &json!(status)),
            "{body}"
        );
        assert_eq!(body["type"], json!(format!("urn:pagemesh:error:{code}")));
        assert_eq!(body["code"], json!(code));
        assert_eq!(body["detail"], body["error"]);
        for key in ["title", "detail", "hint"] {
            assert!(
                body[key].as_str().is_some_and(|it| !it.is_empty()),
                "{body}"
            );
        }
    }
}
