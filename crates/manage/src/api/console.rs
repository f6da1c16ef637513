//! The files of the console at `/`, without a token: they are the same for everyone and contain no data.
//!
//! Invariants: a path below `/api` is never answered here, so that programs get the API's errors. A path without a
//! file shows the console only to a GET that accepts HTML; other requests go on to the check of their token, which
//! keeps the existence of paths hidden. Answers come from memory and wait for nothing.

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, ETAG, IF_NONE_MATCH,
    REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use pagemesh_console::ConsoleFile;

/// First parts of paths that belong to the API.
const API_ROOTS: [&str; 3] = ["api", "healthz", "metrics"];
const POLICY: &str =
    "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'";
/// A name with a hash never gets other content.
const CACHE_FOREVER: &str = "public, max-age=31536000, immutable";
/// The page names the hashes, so a browser asks for it each time, with its ETag.
const CACHE_CHECKED: &str = "no-cache";

/// Answers requests for the console, and passes on all others.
pub(super) async fn serve_files(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    match file_for(request.method(), path, request.headers()) {
        Some(file) => answer(file, request.headers()),
        None => next.run(request).await,
    }
}

fn file_for(method: &Method, path: &str, headers: &HeaderMap) -> Option<&'static ConsoleFile> {
    let root = path.split('/').nth(1).unwrap_or_default();
    if !matches!(*method, Method::GET | Method::HEAD) || API_ROOTS.contains(&root) {
        return None;
    }
    if path == "/" {
        return pagemesh_console::index();
    }
    let named = pagemesh_console::file(path);
    named.or_else(|| accepts_html(headers).then(pagemesh_console::index)?)
}

fn accepts_html(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(ACCEPT).iter();
    accepted
        .filter_map(|value| value.to_str().ok())
        .any(|value| value.contains("text/html"))
}

fn answer(file: &'static ConsoleFile, asked: &HeaderMap) -> Response {
    let cache = if file.is_hashed() {
        CACHE_FOREVER
    } else {
        CACHE_CHECKED
    };
    let headers: [(HeaderName, &'static str); 8] = [
        (CONTENT_TYPE, file.content_type),
        (ETAG, file.etag),
        (CACHE_CONTROL, cache),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (VARY, "Accept"),
    ];
    let (status, body) = if is_known(file, asked) {
        (StatusCode::NOT_MODIFIED, Body::empty())
    } else {
        (StatusCode::OK, Body::from(file.bytes))
    };
    let mut response = (status, body).into_response();
    for (name, value) in headers {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    response
}

/// Whether the client has this content already (RFC 9110, section 13.1.2).
fn is_known(file: &ConsoleFile, asked: &HeaderMap) -> bool {
    let tags = asked.get_all(IF_NONE_MATCH).iter();
    tags.filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|tag| tag.trim().trim_start_matches("W/"))
        .any(|tag| tag == file.etag || tag == "*")
}
