//! A blocking client of the manager: connections, time-outs and errors. Its calls are in `api::endpoints`, each beside the
//! handler that answers it.
//!
//! Invariants: every call ends within its time-out. The client repeats only calls with an
//! `Idempotency-Key`, because of others only the caller knows whether they may be repeated. It never follows redirects or proxies, which would
//! show the token to others.

use crate::access::TokenSecret;
use crate::call_key::KEY_HEADER;
use crate::token::token;
use crate::wire::{ErrorBody, ErrorCode};
use pagemesh_base::key::Key;
use pagemesh_base::layout::EpochNumber;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;
use ureq::config::Config;
use ureq::http::{Method, Request, Response, Uri};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Body};
use uuid::Uuid;

/// Limit of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit of a call that waits only for the manager.
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of a heartbeat or sign of life: after one that hangs, another must fit in before the sender counts as dead.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit of a call for which the manager waits for bricks: longer than the manager's own time-out,
/// so that its answer arrives.
pub(crate) const LONG_CALL_TIMEOUT: Duration = Duration::from_secs(35);
/// Limit of an idle connection, shorter than the manager's.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Bytes of the longest answer: a list of all volumes, with a margin.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Entries of one page of a list.
const PAGE_ENTRIES: usize = 1000;
/// Pages of the longest list, with a margin.
const PAGES_MAX: usize = 16;

/// Pauses before the repetitions of a call whose answer was lost: long enough for a manager that
/// restarts.
const REPEAT_PAUSES: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(2),
];

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManagerError {
    /// The text is not the URL of a manager.
    #[error("'{url}' is not the URL of a manager; write it as http://127.0.0.1:7070 ({cause})")]
    BadUrl {
        /// The text.
        url: String,
        /// The error in it.
        cause: String,
    },
    /// No answer, or an incomplete one: the call may or may not be done.
    #[error(
        "no answer from the manager at {url}: {cause}; is it running? Name another with --manager or PAGEMESH_MANAGER"
    )]
    Unreachable {
        /// The manager.
        url: String,
        /// The error of the system.
        cause: String,
    },
    /// The manager does not accept this cluster key.
    #[error(
        "the manager at {url} does not accept the cluster key; name the right one with --key or PAGEMESH_KEY"
    )]
    Unauthorized {
        /// The manager.
        url: String,
    },
    /// The manager does not accept this token.
    #[error(
        "the manager at {url} does not accept the token: it is wrong, revoked or expired; name another with --token-file or PAGEMESH_TOKEN"
    )]
    TokenRefused {
        /// The manager.
        url: String,
    },
    /// The layout has another epoch than the expected one.
    #[error("{error}; {hint}")]
    Conflict {
        /// The layout's epoch.
        current: EpochNumber,
        /// The manager's error.
        error: String,
        /// The way out.
        hint: String,
    },
    /// The attachment is over.
    #[error("{error}; {hint}")]
    Fenced {
        /// The manager's error.
        error: String,
        /// The way out.
        hint: String,
    },
    /// The call was not done, and a repetition would fail in the same way.
    #[error("{error}; {hint}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// The kind of the error.
        code: ErrorCode,
        /// The manager's error.
        error: String,
        /// The way out.
        hint: String,
    },
    /// The server does not answer like a manager.
    #[error(
        "the server at {url} is no pagemesh manager of this version: {cause}; check the URL and the version"
    )]
    Malformed {
        /// The URL.
        url: String,
        /// The error in the answer.
        cause: String,
    },
}

impl ManagerError {
    /// The error in an answer of the manager at this URL.
    #[must_use]
    pub fn from_answer(url: &str, answer: ErrorBody) -> ManagerError {
        let ErrorBody {
            error,
            hint,
            code,
            epoch,
        } = answer;
        match (code, epoch) {
            (ErrorCode::Unauthorized, _) => ManagerError::Unauthorized { url: url.into() },
            (ErrorCode::EpochConflict, Some(epoch)) => ManagerError::Conflict {
                current: EpochNumber(epoch),
                error,
                hint,
            },
            (ErrorCode::Fenced, _) => ManagerError::Fenced { error, hint },
            // The same as no answer: the call may or may not be done, or the next try may succeed.
            (ErrorCode::Overloaded | ErrorCode::TimedOut, _) => ManagerError::Unreachable {
                url: url.into(),
                cause: error,
            },
            _ => ManagerError::Refused {
                status: code.status(),
                code,
                error,
                hint,
            },
        }
    }
}

/// Resolves host names. For an address it skips the library's resolver, which starts a thread for
/// each look-up; that thread was most of the work of a heartbeat.
#[derive(Debug, Default)]
struct LiteralAddressResolver(DefaultResolver);

impl Resolver for LiteralAddressResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        match uri.authority().map(|at| at.as_str().parse()) {
            Some(Ok(address)) => {
                let mut found = self.empty();
                found.push(address);
                Ok(found)
            }
            _ => self.0.resolve(uri, config, timeout),
        }
    }
}

/// A client of one manager. Clones share connections.
#[derive(Clone)]
pub struct ManagerClient {
    agent: Agent,
    url: String,
    authorization: String,
    /// Whether a token is sent instead of the key's HMAC.
    has_token: bool,
}

impl std::fmt::Debug for ManagerClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.url)
    }
}

impl ManagerClient {
    /// A client of the manager at `http://host:port`. It sends nothing yet.
    ///
    /// # Errors
    /// When the URL is invalid.
    pub fn new(url: &str, key: &Key) -> Result<ManagerClient, ManagerError> {
        let authorization = format!("Bearer {}", token(key));
        ManagerClient::with_authorization(url, authorization, false)
    }

    /// A client that sends a token instead of the key's HMAC.
    ///
    /// # Errors
    /// When the URL is invalid.
    pub fn with_token(url: &str, token: &TokenSecret) -> Result<ManagerClient, ManagerError> {
        let authorization = format!("Bearer {}", token.expose());
        ManagerClient::with_authorization(url, authorization, true)
    }

    fn with_authorization(
        url: &str,
        authorization: String,
        has_token: bool,
    ) -> Result<ManagerClient, ManagerError> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_global(Some(CALL_TIMEOUT))
            .max_idle_age(IDLE_MAX)
            .user_agent(concat!("pagemesh/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(ManagerClient {
            agent: Agent::with_parts(
                config,
                DefaultConnector::new(),
                LiteralAddressResolver::default(),
            ),
            url: parse_base_url(url)?,
            authorization,
            has_token,
        })
    }

    /// The manager's URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ManagerError> {
        let answer = self.send(Method::GET, path, CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// Reads a whole list, in pages. An earlier manager knows no pages: it answers with all, again
    /// and again.
    pub(crate) fn all_pages<T: DeserializeOwned>(
        &self,
        path: &str,
        key: impl Fn(&T) -> String,
    ) -> Result<Vec<T>, ManagerError> {
        let mut all: Vec<T> = vec![];
        for _ in 0..PAGES_MAX {
            let after = all.last().map(&key);
            let limit = Some(PAGE_ENTRIES.to_string());
            let page: Vec<T> =
                self.get_with_query(path, &[("limit", limit), ("after", after.clone())])?;
            let is_later = |first: &T| after.as_ref().is_none_or(|after| key(first) > *after);
            if !page.first().is_some_and(is_later) {
                return Ok(all);
            }
            let is_last = page.len() != PAGE_ENTRIES;
            all.extend(page);
            if is_last {
                break;
            }
        }
        Ok(all)
    }

    /// Reads a list with the given of these parameters.
    pub(crate) fn get_with_query<T: DeserializeOwned>(
        &self,
        path: &str,
        parameters: &[(&str, Option<String>)],
    ) -> Result<T, ManagerError> {
        let query = query_text(parameters);
        self.get(&format!("{path}?{query}"))
    }

    pub(crate) fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        timeout: Duration,
        body: &impl Serialize,
    ) -> Result<T, ManagerError> {
        let body = serde_json::to_string(body).map_err(|error| self.malformed(&error))?;
        let answer = self.send(method, path, timeout, body)?;
        self.read(answer)
    }

    /// A call that creates something, once. If the answer is lost, the client repeats the call with
    /// the same key, and the manager answers the first one again.
    pub(crate) fn create_with_key<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &impl Serialize,
    ) -> Result<T, ManagerError> {
        let body = serde_json::to_string(body).map_err(|error| self.malformed(&error))?;
        let key = Uuid::new_v4().to_string();
        let attempt = || {
            let answer = self.send_with_key(path, body.clone(), &key)?;
            self.read(answer)
        };
        let mut last = attempt();
        let mut takes_keys = false;
        for pause in REPEAT_PAUSES {
            if !may_repeat(&last) {
                break;
            }
            std::thread::sleep(pause);
            match self.takes_keys() {
                _ if takes_keys => {}
                Ok(true) => takes_keys = true,
                // A manager of an earlier version would create a second thing.
                Ok(false) => break,
                Err(_) => continue,
            }
            last = attempt();
        }
        last
    }

    /// Whether the manager knows keys: its OpenAPI document names their header.
    fn takes_keys(&self) -> Result<bool, ManagerError> {
        let document: serde_json::Value = self.get("openapi.json")?;
        let parameters = &document["paths"]["/api/v1/volumes"]["post"]["parameters"];
        let mut parameters = parameters.as_array().into_iter().flatten();
        Ok(parameters.any(|it| it["name"] == KEY_HEADER))
    }

    fn send_with_key(
        &self,
        path: &str,
        body: String,
        key: &str,
    ) -> Result<Response<Body>, ManagerError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}/api/v1/{path}", self.url))
            .header("authorization", &self.authorization)
            .header("content-type", "application/json")
            .header(KEY_HEADER, key);
        let request = request.body(body).map_err(|error| ManagerError::BadUrl {
            url: self.url.clone(),
            cause: error.to_string(),
        })?;
        let request = self.agent.configure_request(request);
        let request = request.timeout_global(Some(LONG_CALL_TIMEOUT)).build();
        self.agent
            .run(request)
            .map_err(|error| self.unreachable(&error))
    }

    /// A call with an answer without a body.
    pub(crate) fn call_without_answer(
        &self,
        method: Method,
        path: &str,
        timeout: Duration,
        body: &impl Serialize,
    ) -> Result<(), ManagerError> {
        let body = serde_json::to_string(body).map_err(|error| self.malformed(&error))?;
        let answer = self.send(method, path, timeout, body)?;
        self.check_status(answer).map(drop)
    }

    /// Opens an answer that the caller reads as it arrives, for at most `timeout`.
    pub(crate) fn open(
        &self,
        path: &str,
        timeout: Duration,
        header: Option<(&str, String)>,
    ) -> Result<Response<Body>, ManagerError> {
        let mut request = Request::builder()
            .uri(format!("{}/api/v1/{path}", self.url))
            .header("authorization", &self.authorization);
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let request = request.body(()).map_err(|error| ManagerError::BadUrl {
            url: self.url.clone(),
            cause: error.to_string(),
        })?;
        let request = self.agent.configure_request(request);
        let request = request.timeout_global(Some(timeout)).build();
        self.agent
            .run(request)
            .map_err(|error| self.unreachable(&error))
    }

    /// The text of the answer to a GET of this path, which begins with `/`, as the manager writes it.
    ///
    /// # Errors
    /// When there is no answer within the time, the answer is longer than the limit, or a refusal.
    pub fn text_at(
        &self,
        path: &str,
        timeout: Duration,
        bytes_max: u64,
    ) -> Result<String, ManagerError> {
        let request = Request::builder()
            .uri(format!("{}{path}", self.url))
            .header("authorization", &self.authorization);
        let request = request.body(()).map_err(|error| ManagerError::BadUrl {
            url: self.url.clone(),
            cause: error.to_string(),
        })?;
        let request = self.agent.configure_request(request);
        let request = request.timeout_global(Some(timeout)).build();
        let sent = self.agent.run(request);
        let mut answer = self.check_status(sent.map_err(|error| self.unreachable(&error))?)?;
        let body = answer.body_mut().with_config().limit(bytes_max);
        body.read_to_string()
            .map_err(|error| self.unreachable(&error))
    }

    pub(crate) fn send(
        &self,
        method: Method,
        path: &str,
        timeout: Duration,
        body: String,
    ) -> Result<Response<Body>, ManagerError> {
        let request = Request::builder()
            .method(&method)
            .uri(format!("{}/api/v1/{path}", self.url))
            .header("authorization", &self.authorization);
        let bad = |error: ureq::http::Error| ManagerError::BadUrl {
            url: self.url.clone(),
            cause: error.to_string(),
        };
        // Without a body, a POST would be sent in chunks. The manager closes a connection on which the last chunk
        // arrives after its answer, and the next call would fail.
        let needs_length = method == Method::POST;
        let sent = if body.is_empty() && !needs_length {
            let request = request.body(()).map_err(bad)?;
            let request = self.agent.configure_request(request);
            self.agent
                .run(request.timeout_global(Some(timeout)).build())
        } else {
            let request = request.header("content-type", "application/json");
            let request = self
                .agent
                .configure_request(request.body(body).map_err(bad)?);
            self.agent
                .run(request.timeout_global(Some(timeout)).build())
        };
        sent.map_err(|error| self.unreachable(&error))
    }

    pub(crate) fn read<T: DeserializeOwned>(
        &self,
        answer: Response<Body>,
    ) -> Result<T, ManagerError> {
        let text = self.text(self.check_status(answer)?)?;
        serde_json::from_str(&text).map_err(|error| self.malformed(&error))
    }

    fn text(&self, mut answer: Response<Body>) -> Result<String, ManagerError> {
        let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        body.read_to_string()
            .map_err(|error| self.unreachable(&error))
    }

    /// Turns an answer that reports a failure into an error.
    pub(crate) fn check_status(
        &self,
        answer: Response<Body>,
    ) -> Result<Response<Body>, ManagerError> {
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let text = self.text(answer)?;
        let body: ErrorBody = serde_json::from_str(&text)
            .map_err(|_| self.malformed(&format!("it says {status} without a reason")))?;
        if self.has_token && body.code == ErrorCode::Unauthorized {
            let url = self.url.clone();
            return Err(ManagerError::TokenRefused { url });
        }
        Err(ManagerError::from_answer(&self.url, body))
    }

    fn unreachable(&self, error: &ureq::Error) -> ManagerError {
        ManagerError::Unreachable {
            url: self.url.clone(),
            cause: error.to_string(),
        }
    }

    fn malformed(&self, cause: &impl ToString) -> ManagerError {
        ManagerError::Malformed {
            url: self.url.clone(),
            cause: cause.to_string(),
        }
    }
}

/// Whether a call with a key may succeed when it is repeated: its answer was lost, or its first
/// attempt still runs.
fn may_repeat<T>(last: &Result<T, ManagerError>) -> bool {
    match last {
        Err(ManagerError::Unreachable { .. }) => true,
        Err(ManagerError::Refused { code, .. }) => *code == ErrorCode::StillRunning,
        _ => false,
    }
}

/// The query part of a URL with the given of these parameters.
pub(crate) fn query_text(parameters: &[(&str, Option<String>)]) -> String {
    let given = parameters.iter().filter_map(|(key, value)| {
        let value = value.as_ref()?;
        Some(format!("{key}={}", escape(value)))
    });
    given.collect::<Vec<String>>().join("&")
}

/// Escapes every byte but letters, digits and `-._~` (RFC 3986).
fn escape(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
            char::from(byte).to_string()
        }
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

/// Checks a URL and removes a trailing slash.
fn parse_base_url(url: &str) -> Result<String, ManagerError> {
    let bad = |cause: &str| ManagerError::BadUrl {
        url: url.to_owned(),
        cause: cause.to_owned(),
    };
    let trimmed = url.trim_end_matches('/');
    let uri: ureq::http::Uri = trimmed.parse().map_err(|_| bad("it cannot be read"))?;
    match uri.scheme_str() {
        Some("http") => {}
        Some("https") => return Err(bad("encrypted connections are not there yet")),
        _ => return Err(bad("it must start with http://")),
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err(bad("it names no host"));
    }
    if uri
        .path_and_query()
        .is_some_and(|path| path.as_str() != "/")
    {
        return Err(bad("remove the part after the port"));
    }
    Ok(trimmed.to_owned())
}
