//! A blocking client of the manager.
//!
//! Invariants: every call ends within `CALL_TIMEOUT`; nothing is retried
//! here, because the caller knows whether a call may be made twice. It never
//! follows redirects or proxies, which would show the token to others.

use crate::token::token;
use crate::wire::{
    AttachReplica, AttachVolume, Attached, BrickInfo, BrickRegistration, ChangeLegs, ChooseReplica,
    Code, CreateVolume, Deleted, DetachVolume, Detached, ErrorBody, GrowVolume, HeartbeatReply,
    LegChange, ScrubBrick, Sized, Status, TellCopies, VolumeDetail, VolumeInfo,
};
use pagemesh_base::key::Key;
use pagemesh_base::layout::{BrickId, EpochNumber, Layout, VolumeName};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;
use ureq::config::Config;
use ureq::http::{Method, Request, Response, Uri};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Body};

/// A connection must be there in this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A call that only waits for the manager.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A heartbeat: after one that hangs there must be time for another before the brick is
/// taken for dead.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);
/// A call for which the manager waits for bricks: longer than it takes to give
/// up by itself, so that its answer is heard.
const LONG_CALL_TIMEOUT: Duration = Duration::from_secs(35);
/// Idle connections are closed before the manager closes them.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Bytes of the longest answer: lists of all volumes, with room.
const ANSWER_BYTES_MAX: u64 = 16 << 20;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManagerError {
    /// Not a URL of a manager.
    #[error("'{url}' is not the URL of a manager; write it as http://127.0.0.1:7070 ({cause})")]
    BadUrl {
        /// What was given.
        url: String,
        /// What is wrong with it.
        cause: String,
    },
    /// No answer, or half of one: it may or may not have been done.
    #[error(
        "no answer from the manager at {url}: {cause}; is it running? Name another with --manager or PAGEMESH_MANAGER"
    )]
    Unreachable {
        /// The manager.
        url: String,
        /// What the system said.
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
    /// The layout has another epoch than the expected one.
    #[error("{error}; {hint}")]
    Conflict {
        /// The layout's epoch.
        current: EpochNumber,
        /// What the manager said.
        error: String,
        /// What to do.
        hint: String,
    },
    /// The attachment is over.
    #[error("{error}; {hint}")]
    Fenced {
        /// What the manager said.
        error: String,
        /// What to do.
        hint: String,
    },
    /// It was not done, and will not be unless something changes.
    #[error("{error}; {hint}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What kind of refusal.
        code: Code,
        /// What the manager said.
        error: String,
        /// What to do.
        hint: String,
    },
    /// Something answers, but not like a manager.
    #[error("what answers at {url} is no pagemesh manager of this version: {cause}")]
    Malformed {
        /// Where.
        url: String,
        /// What is wrong with the answer.
        cause: String,
    },
}

/// Looks up names of hosts. An address needs no look-up, so it does without
/// the thread that the library starts for each, which was most of the work of
/// a heartbeat.
#[derive(Debug, Default)]
struct Addresses(DefaultResolver);

impl Resolver for Addresses {
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
pub struct Client {
    agent: Agent,
    url: String,
    authorization: String,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.url)
    }
}

impl Client {
    /// A client of the manager at `http://host:port`. Nothing is sent yet.
    ///
    /// # Errors
    /// When the URL is not one.
    pub fn new(url: &str, key: &Key) -> Result<Client, ManagerError> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_global(Some(CALL_TIMEOUT))
            .max_idle_age(IDLE_MAX)
            .user_agent(concat!("pagemesh/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Client {
            agent: Agent::with_parts(config, DefaultConnector::new(), Addresses::default()),
            url: base(url)?,
            authorization: format!("Bearer {}", token(key)),
        })
    }

    /// The manager's URL.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The cluster at a glance.
    ///
    /// # Errors
    /// See [`ManagerError`]; so for every call.
    pub fn status(&self) -> Result<Status, ManagerError> {
        self.get("status")
    }

    /// Registers a brick, or says that it is still there.
    #[allow(clippy::missing_errors_doc)]
    pub fn heartbeat(
        &self,
        registration: &BrickRegistration,
    ) -> Result<HeartbeatReply, ManagerError> {
        let path = format!("bricks/{}", registration.brick);
        self.call(Method::PUT, &path, HEARTBEAT_TIMEOUT, registration)
    }

    /// Every brick.
    #[allow(clippy::missing_errors_doc)]
    pub fn bricks(&self) -> Result<Vec<BrickInfo>, ManagerError> {
        self.get("bricks")
    }

    /// Asks a brick to begin a scrub of its pool, or to end the one under way.
    #[allow(clippy::missing_errors_doc)]
    pub fn scrub_brick(&self, brick: BrickId, stop: bool) -> Result<BrickInfo, ManagerError> {
        let path = format!("bricks/{brick}/scrub");
        self.call(Method::POST, &path, CALL_TIMEOUT, &ScrubBrick { stop })
    }

    /// Forgets a dead brick that holds no slices of volumes; with `force` also
    /// one that holds slices of deleted ones.
    #[allow(clippy::missing_errors_doc)]
    pub fn forget_brick(&self, brick: BrickId, force: bool) -> Result<(), ManagerError> {
        let path = format!("bricks/{brick}?force={force}");
        let answer = self.send(Method::DELETE, &path, CALL_TIMEOUT, String::new())?;
        self.refuse(answer).map(drop)
    }

    /// Creates a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn create(&self, wish: &CreateVolume) -> Result<Sized, ManagerError> {
        self.call(Method::POST, "volumes", LONG_CALL_TIMEOUT, wish)
    }

    /// Every volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn volumes(&self) -> Result<Vec<VolumeInfo>, ManagerError> {
        self.get("volumes")
    }

    /// All about a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn volume(&self, name: &VolumeName) -> Result<VolumeDetail, ManagerError> {
        self.get(&format!("volumes/{name}"))
    }

    /// Makes a volume larger, to this size.
    #[allow(clippy::missing_errors_doc)]
    pub fn grow(&self, name: &VolumeName, size_bytes: u64) -> Result<Sized, ManagerError> {
        let path = format!("volumes/{name}/grow");
        self.call(
            Method::POST,
            &path,
            LONG_CALL_TIMEOUT,
            &GrowVolume { size_bytes },
        )
    }

    /// Adds a copy to every column of a volume, on a brick or where there is room.
    #[allow(clippy::missing_errors_doc)]
    pub fn attach_replica(
        &self,
        name: &VolumeName,
        wish: AttachReplica,
    ) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/replicas");
        self.call(Method::POST, &path, LONG_CALL_TIMEOUT, &wish)
    }

    /// Removes a copy of a volume.
    #[allow(clippy::missing_errors_doc)]
    pub fn detach_replica(
        &self,
        name: &VolumeName,
        choice: ChooseReplica,
    ) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/replicas/detach");
        self.call(Method::POST, &path, LONG_CALL_TIMEOUT, &choice)
    }

    /// Has a volume go on with one copy alone.
    #[allow(clippy::missing_errors_doc)]
    pub fn promote_replica(
        &self,
        name: &VolumeName,
        choice: ChooseReplica,
    ) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/replicas/promote");
        self.call(Method::POST, &path, CALL_TIMEOUT, &choice)
    }

    /// Deletes a volume; with `force` also while a client has it.
    #[allow(clippy::missing_errors_doc)]
    pub fn delete(&self, name: &VolumeName, force: bool) -> Result<Deleted, ManagerError> {
        let path = format!("volumes/{name}?force={force}");
        let answer = self.send(Method::DELETE, &path, LONG_CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    /// Takes a volume; the layout's epoch in the answer names the attachment.
    #[allow(clippy::missing_errors_doc)]
    pub fn attach(&self, name: &VolumeName, client: &str) -> Result<Attached, ManagerError> {
        self.attach_as(name, client, false)
    }

    /// The same for a client that could just not reach any in-sync copy, if so.
    #[allow(clippy::missing_errors_doc)]
    pub fn attach_as(
        &self,
        name: &VolumeName,
        client: &str,
        unreachable: bool,
    ) -> Result<Attached, ManagerError> {
        let wish = AttachVolume {
            client: client.to_owned(),
            unreachable,
        };
        self.call(
            Method::POST,
            &format!("volumes/{name}/attach"),
            CALL_TIMEOUT,
            &wish,
        )
    }

    /// All about a volume, for who has it and tells how copies are that follow or
    /// return.
    #[allow(clippy::missing_errors_doc)]
    pub fn tell_copies(
        &self,
        name: &VolumeName,
        told: &TellCopies,
    ) -> Result<VolumeDetail, ManagerError> {
        let path = format!("volumes/{name}/copies");
        self.call(Method::POST, &path, CALL_TIMEOUT, told)
    }

    /// Gives a volume back. An attachment that is not the present one is left
    /// alone; none ends whichever there is.
    #[allow(clippy::missing_errors_doc)]
    pub fn detach(
        &self,
        name: &VolumeName,
        attachment: Option<EpochNumber>,
    ) -> Result<Detached, ManagerError> {
        let wish = DetachVolume { attachment };
        self.call(
            Method::POST,
            &format!("volumes/{name}/detach"),
            CALL_TIMEOUT,
            &wish,
        )
    }

    /// Compare-and-swap of leg states.
    #[allow(clippy::missing_errors_doc)]
    pub fn change_legs(
        &self,
        name: &VolumeName,
        attachment: Option<EpochNumber>,
        expected: EpochNumber,
        changes: &[LegChange],
    ) -> Result<Layout, ManagerError> {
        let wish = ChangeLegs {
            expected,
            attachment,
            changes: changes.to_vec(),
        };
        self.call(
            Method::POST,
            &format!("volumes/{name}/legs"),
            CALL_TIMEOUT,
            &wish,
        )
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, ManagerError> {
        let answer = self.send(Method::GET, path, CALL_TIMEOUT, String::new())?;
        self.read(answer)
    }

    fn call<T: DeserializeOwned>(
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

    fn send(
        &self,
        method: Method,
        path: &str,
        timeout: Duration,
        body: String,
    ) -> Result<Response<Body>, ManagerError> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}/api/v1/{path}", self.url))
            .header("authorization", &self.authorization);
        let bad = |error: ureq::http::Error| ManagerError::BadUrl {
            url: self.url.clone(),
            cause: error.to_string(),
        };
        let sent = if body.is_empty() {
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

    fn read<T: DeserializeOwned>(&self, answer: Response<Body>) -> Result<T, ManagerError> {
        let text = self.text(self.refuse(answer)?)?;
        serde_json::from_str(&text).map_err(|error| self.malformed(&error))
    }

    fn text(&self, mut answer: Response<Body>) -> Result<String, ManagerError> {
        let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX);
        body.read_to_string()
            .map_err(|error| self.unreachable(&error))
    }

    /// Turns an answer that is none into an error.
    fn refuse(&self, answer: Response<Body>) -> Result<Response<Body>, ManagerError> {
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let text = self.text(answer)?;
        let body: ErrorBody = serde_json::from_str(&text)
            .map_err(|_| self.malformed(&format!("it says {status} without a reason")))?;
        let ErrorBody {
            error,
            hint,
            code,
            epoch,
        } = body;
        Err(match (code, epoch) {
            (Code::Unauthorized, _) => ManagerError::Unauthorized {
                url: self.url.clone(),
            },
            (Code::EpochConflict, Some(epoch)) => ManagerError::Conflict {
                current: EpochNumber(epoch),
                error,
                hint,
            },
            (Code::Fenced, _) => ManagerError::Fenced { error, hint },
            // As if there were no answer: it may or may not have been done, or
            // the next try may succeed.
            (Code::Overloaded | Code::TimedOut, _) => ManagerError::Unreachable {
                url: self.url.clone(),
                cause: error,
            },
            _ => ManagerError::Refused {
                status: status.as_u16(),
                code,
                error,
                hint,
            },
        })
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

/// Checks a URL and takes a slash off its end.
fn base(url: &str) -> Result<String, ManagerError> {
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
        return Err(bad("nothing may follow the port"));
    }
    Ok(trimmed.to_owned())
}
