//! Requests that a browser may have sent for a page of another site.
//!
//! A browser adds the manager's cookie by itself, so the cookie proves less than a token in a header:
//!
//! - *CSRF*: a page of another site sends a change. The browser says so in `Origin` or
//!   `Sec-Fetch-Site`, which pages cannot set (Fetch Standard, forbidden request-headers).
//! - *DNS rebinding*: a page binds its own name to the manager's address later, and so becomes "the
//!   same site". `Host` then has that name. An IP address needs no name server, so it is safe.
//!
//! Invariant: a header that appears twice counts as wrong.

use super::secret::TOKEN_PREFIX;
use axum::http::header::{COOKIE, HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, Uri};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// The cookie with the token.
pub(crate) const COOKIE_NAME: &str = "pagemesh_token";
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// The port of an `http` origin without one.
const HTTP_PORT: u16 = 80;
/// The port of an `https` origin without one; a proxy before the manager may speak TLS.
const HTTPS_PORT: u16 = 443;

/// The token cookie of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CookieToken<'a> {
    /// No such cookie.
    None,
    /// The value of the only one.
    One(&'a str),
    /// Several, or not text. A site of a sibling domain can add a second one.
    Ambiguous,
}

/// The token cookie of a request.
pub(crate) fn cookie_token(headers: &HeaderMap) -> CookieToken<'_> {
    let mut found = CookieToken::None;
    for header in headers.get_all(COOKIE) {
        let Ok(text) = header.to_str() else {
            return CookieToken::Ambiguous;
        };
        let pairs = text.split(';').filter_map(|it| it.trim().split_once('='));
        for (_, value) in pairs.filter(|(name, _)| *name == COOKIE_NAME) {
            if found != CookieToken::None {
                return CookieToken::Ambiguous;
            }
            found = CookieToken::One(value);
        }
    }
    found
}

/// The names under which browsers may reach the manager, besides IP addresses and `localhost`.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllowedHosts(BTreeSet<String>);

impl AllowedHosts {
    pub(crate) fn new(names: impl IntoIterator<Item = String>) -> AllowedHosts {
        let names = names.into_iter().map(|name| name.to_ascii_lowercase());
        AllowedHosts(names.filter(|name| !name.is_empty()).collect())
    }

    fn allows(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        let is_address = literal.parse::<IpAddr>().is_ok();
        is_address || host == "localhost" || self.0.contains(&host)
    }
}

/// Why a request with a cookie, or a login, does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BrowserError {
    /// It has no `Host`, or several, or another one than its target.
    NoHost,
    /// Its `Host` is not among the allowed names.
    HostNotAllowed(String),
    /// A page of another site sent it.
    OtherSite,
    /// It does not say which site sent it.
    UnknownSite,
}

impl BrowserError {
    pub(crate) fn text(&self) -> String {
        match self {
            BrowserError::NoHost => "the request does not name one host".into(),
            BrowserError::HostNotAllowed(host) => {
                format!("the manager takes no cookies for the host '{host}'")
            }
            BrowserError::OtherSite => "a page of another site sent the request".into(),
            BrowserError::UnknownSite => "the request does not name the site that sent it".into(),
        }
    }

    pub(crate) fn hint(&self) -> &'static str {
        match self {
            BrowserError::NoHost => "send one Host header",
            BrowserError::HostNotAllowed(_) => {
                "use the manager's IP address, or start it with --allowed-host and this name"
            }
            BrowserError::OtherSite => "open the console itself",
            BrowserError::UnknownSite => "programs send the token as: Authorization: Bearer",
        }
    }
}

/// The facts about a request that a browser may have sent.
pub(crate) struct BrowserRequest<'a> {
    headers: &'a HeaderMap,
    host: Authority,
}

/// Checks that a request names a host that is allowed.
pub(crate) fn browser_request<'a>(
    allowed: &AllowedHosts,
    uri: &Uri,
    headers: &'a HeaderMap,
) -> Result<BrowserRequest<'a>, BrowserError> {
    let host = single(headers, &HOST).flatten();
    let host: Authority = host
        .and_then(|host| host.parse().ok())
        .ok_or(BrowserError::NoHost)?;
    // A target in absolute form takes precedence over the header (RFC 9112, section 3.2.2).
    if uri.authority().is_some_and(|it| *it != host) || host.as_str().contains('@') {
        return Err(BrowserError::NoHost);
    }
    if !allowed.allows(host.host()) {
        let shown = host.host().chars().take(SHOWN_CHARS_MAX).collect();
        return Err(BrowserError::HostNotAllowed(shown));
    }
    Ok(BrowserRequest { headers, host })
}

/// Characters of a host's name that an error repeats; the longest name has 253.
const SHOWN_CHARS_MAX: usize = 253;

impl BrowserRequest<'_> {
    /// Checks that a page of this manager sent the request.
    pub(crate) fn check_same_site(&self) -> Result<(), BrowserError> {
        if self.has_evidence()? {
            Ok(())
        } else {
            Err(BrowserError::UnknownSite)
        }
    }

    /// Checks that no page of another site sent the request. A program that is no browser may say
    /// nothing.
    pub(crate) fn check_no_other_site(&self) -> Result<(), BrowserError> {
        self.has_evidence().map(drop)
    }

    /// Whether a header says that a page of this manager sent the request. Both headers must agree.
    fn has_evidence(&self) -> Result<bool, BrowserError> {
        let origin = single(self.headers, &ORIGIN);
        if origin.is_some_and(|it| !it.is_some_and(|it| self.is_own_origin(it))) {
            return Err(BrowserError::OtherSite);
        }
        let site = single(self.headers, &SEC_FETCH_SITE);
        if site.is_some_and(|it| it != Some("same-origin")) {
            return Err(BrowserError::OtherSite);
        }
        Ok(origin.is_some() || site.is_some())
    }

    fn is_own_origin(&self, origin: &str) -> bool {
        let (rest, port) = match origin.split_once("://") {
            Some(("http", rest)) => (rest, HTTP_PORT),
            Some(("https", rest)) => (rest, HTTPS_PORT),
            _ => return false,
        };
        let Ok(authority) = rest.parse::<Authority>() else {
            return false;
        };
        let host = &self.host;
        !rest.contains('@')
            && authority.host().eq_ignore_ascii_case(host.host())
            && authority.port_u16().unwrap_or(port) == host.port_u16().unwrap_or(port)
    }
}

/// The value of a header: `None` if it is missing, `Some(None)` if it appears twice or is not text.
fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<Option<&'a str>> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    let only = values.next().is_none().then_some(first);
    Some(only.and_then(|it| it.to_str().ok()))
}

/// Whether a bearer credential is meant to be a token, right or wrong.
pub(crate) fn looks_like_token(credential: &str) -> bool {
    credential.starts_with(TOKEN_PREFIX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            let value = HeaderValue::from_str(value).expect("a value");
            headers.append(*name, value);
        }
        headers
    }

    fn check_host(host: &str, allowed: bool) {
        let hosts = AllowedHosts::new(["Store.example".to_owned(), String::new()]);
        let headers = headers(&[("host", host)]);
        let found = browser_request(&hosts, &Uri::from_static("/"), &headers);
        assert_eq!(found.is_ok(), allowed, "{host}");
    }

    #[test]
    fn hosts_are_addresses_or_allowed_names() {
        let allowed = ["127.0.0.1", "10.0.0.1:7070", "[::1]:7070", "[fe80::1]"];
        let named = [
            "localhost",
            "LOCALHOST:1",
            "store.example:7070",
            "STORE.example",
        ];
        for host in allowed.into_iter().chain(named) {
            check_host(host, true);
        }
        let wrong = [
            "evil.example",
            "store.example.evil.example",
            "xstore.example",
            "127.0.0.1.evil.example",
            "0x7f000001",
            "2130706433",
            "localhost.evil",
            "127.0.0.1@evil.example",
            "evil.example@127.0.0.1",
            "",
            "a b",
            "[::1",
        ];
        for host in wrong {
            check_host(host, false);
        }
    }

    #[test]
    fn host_must_be_single_and_agree_with_target() {
        let hosts = AllowedHosts::default();
        let twice = headers(&[("host", "127.0.0.1"), ("host", "127.0.0.1")]);
        assert!(browser_request(&hosts, &Uri::from_static("/"), &twice).is_err());
        assert!(browser_request(&hosts, &Uri::from_static("/"), &HeaderMap::new()).is_err());
        let host = headers(&[("host", "127.0.0.1")]);
        let other = Uri::from_static("http://evil.example/");
        assert!(browser_request(&hosts, &other, &host).is_err());
        let same = Uri::from_static("http://127.0.0.1/");
        assert!(browser_request(&hosts, &same, &host).is_ok());
    }

    fn check_site(pairs: &[(&'static str, &str)], wanted: Result<bool, BrowserError>) {
        let mut all = headers(pairs);
        all.append("host", HeaderValue::from_static("127.0.0.1:7070"));
        let request = browser_request(&AllowedHosts::default(), &Uri::from_static("/"), &all);
        let found = request.expect("an allowed host").has_evidence();
        assert_eq!(found, wanted, "{pairs:?}");
    }

    #[test]
    fn site_of_request_is_checked() {
        let other = || Err(BrowserError::OtherSite);
        check_site(&[], Ok(false));
        check_site(&[("origin", "http://127.0.0.1:7070")], Ok(true));
        check_site(&[("origin", "https://127.0.0.1:7070")], Ok(true));
        check_site(&[("sec-fetch-site", "same-origin")], Ok(true));
        for origin in [
            "null",
            "",
            "http://127.0.0.1",
            "http://127.0.0.1:7071",
            "http://evil.example:7070",
            "http://evil@127.0.0.1:7070",
            "http://127.0.0.1:7070.evil.example",
            "127.0.0.1:7070",
            "ftp://127.0.0.1:7070",
            "http://127.0.0.1:7070/path",
            "http://127.0.0.1:7070, http://evil.example",
        ] {
            check_site(&[("origin", origin)], other());
        }
        for site in ["cross-site", "same-site", "none", "", "Same-Origin"] {
            check_site(&[("sec-fetch-site", site)], other());
            let own = ("origin", "http://127.0.0.1:7070");
            check_site(&[own, ("sec-fetch-site", site)], other());
        }
        let own = ("origin", "http://127.0.0.1:7070");
        check_site(&[own, own], other());
    }

    #[test]
    fn default_port_of_origin_is_implied() {
        for (host, origin) in [
            ("localhost", "http://localhost"),
            ("localhost:80", "http://localhost"),
            ("localhost:443", "https://localhost"),
            ("localhost", "https://LOCALHOST"),
        ] {
            let all = headers(&[("host", host), ("origin", origin)]);
            let request = browser_request(&AllowedHosts::default(), &Uri::from_static("/"), &all);
            assert_eq!(request.expect("allowed").has_evidence(), Ok(true), "{host}");
        }
    }

    #[test]
    fn only_one_cookie_counts() {
        let check = |cookies: &[&str], wanted| {
            let pairs: Vec<_> = cookies.iter().map(|it| ("cookie", *it)).collect();
            assert_eq!(cookie_token(&headers(&pairs)), wanted, "{cookies:?}");
        };
        check(&[], CookieToken::None);
        check(&["other=1; xpagemesh_token=2"], CookieToken::None);
        check(&["a=1; pagemesh_token=x; b=2"], CookieToken::One("x"));
        check(&["pagemesh_token=x=y"], CookieToken::One("x=y"));
        check(
            &["pagemesh_token=x; pagemesh_token=x"],
            CookieToken::Ambiguous,
        );
        check(
            &["pagemesh_token=x", "pagemesh_token=y"],
            CookieToken::Ambiguous,
        );
        check(&["pagemesh_token=\u{e9}"], CookieToken::Ambiguous);
    }
}
