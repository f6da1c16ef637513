//! A small HTTP server for `GET /metrics`, for programs that have no other server.
//!
//! It has no authentication, so its limits are strict. Invariants:
//! - one request per connection, at most [`CONNECTIONS_MAX`] at once, and none longer than [`CONNECTION_TIMEOUT`]. More
//!   connections wait in the kernel's queue;
//! - a head has at most [`HEAD_BYTES_MAX`] bytes; a body is never read;
//! - one page is collected at a time, on a thread of its own; a slow page delays no thread of the program;
//! - without `allow_remote` it listens on loopback addresses only, and answers only requests for an IP address or
//!   `localhost`: a web page that binds its own name to the address (DNS rebinding) reads nothing.

use super::CONTENT_TYPE;
use super::page::MetricPage;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE as CONTENT_TYPE_HEADER, HOST, HeaderValue};
use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Most connections at once: several scrapers, and one that an operator opens.
pub const CONNECTIONS_MAX: usize = 8;
/// Time limit of a connection from its accept to the end of its answer. It is below the default time-out of a scrape (10 s),
/// so that stuck peers delay a scrape and do not lose it.
pub const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the largest request head, and of the read buffer; the smallest that hyper permits.
pub const HEAD_BYTES_MAX: usize = 8 << 10;
/// Pause after a failed accept, as when file descriptors are used up.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time that stopping waits for a page that is being collected.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// The only path.
const PATH: &str = "/metrics";

/// The reason why a responder does not start.
#[derive(Debug, thiserror::Error)]
pub enum ResponderError {
    /// The address is reachable from other machines.
    #[error(
        "metrics at {0} would be readable from other machines without a token; use a loopback \
         address such as 127.0.0.1:9464, or add --metrics-allow-remote"
    )]
    Remote(SocketAddr),
    /// The address is in use, not allowed, or belongs to another machine.
    #[error(
        "cannot listen on {address} for metrics: {cause}; choose another address with --metrics"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The error of the system.
        cause: io::Error,
    },
    /// The system gives no thread or no event queue.
    #[error("cannot start the responder for metrics: {0}")]
    Start(io::Error),
}

/// Collects a page.
type Collect = Arc<dyn Fn() -> MetricPage + Send + Sync>;

/// A running responder; dropping it stops it.
pub struct Responder {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A bound address, before the program has something to show.
pub struct BoundResponder {
    listener: TcpListener,
    address: SocketAddr,
    allow_remote: bool,
}

/// The parts that all connections share.
#[derive(Clone)]
struct Shared {
    collect: Collect,
    /// The permit of the page that is being collected.
    collecting: Arc<Semaphore>,
    allow_remote: bool,
}

impl Responder {
    /// Binds an address; port 0 takes a free one. Connections wait until the responder starts.
    ///
    /// # Errors
    /// When the address cannot be used, or is remote without `allow_remote`.
    pub fn bind(address: SocketAddr, allow_remote: bool) -> Result<BoundResponder, ResponderError> {
        if !allow_remote && !address.ip().is_loopback() {
            return Err(ResponderError::Remote(address));
        }
        let bind = |cause| ResponderError::Bind { address, cause };
        let listener = TcpListener::bind(address).map_err(bind)?;
        listener
            .set_nonblocking(true)
            .map_err(ResponderError::Start)?;
        let address = listener.local_addr().map_err(ResponderError::Start)?;
        Ok(BoundResponder {
            listener,
            address,
            allow_remote,
        })
    }

    /// The URL of the page.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}{PATH}", self.address)
    }

    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl BoundResponder {
    /// Serves pages from now on. `collect` may block for a short time.
    ///
    /// # Errors
    /// When the system gives no thread or no event queue.
    pub fn serve(
        self,
        collect: impl Fn() -> MetricPage + Send + Sync + 'static,
    ) -> Result<Responder, ResponderError> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(1)
            .thread_name("metrics-page")
            .build()
            .map_err(ResponderError::Start)?;
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(self.listener).map_err(ResponderError::Start)?
        };
        let shared = Shared {
            collect: Arc::new(collect),
            collecting: Arc::new(Semaphore::new(1)),
            allow_remote: self.allow_remote,
        };
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("metrics".into())
            .spawn(move || {
                runtime.block_on(accept_connections(listener, shared, stopped));
                runtime.shutdown_timeout(STOP_TIMEOUT);
            })
            .map_err(ResponderError::Start)?;
        Ok(Responder {
            address: self.address,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // An error means that the thread has already ended.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the responder for metrics panicked");
        }
    }
}

async fn accept_connections(
    listener: tokio::net::TcpListener,
    shared: Shared,
    mut stopped: oneshot::Receiver<()>,
) {
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let permit = connections.clone().acquire_owned();
        let next = async { (permit.await, listener.accept().await) };
        let (permit, accepted) = tokio::select! {
            _ = &mut stopped => return,
            next = next => next,
        };
        match (permit, accepted) {
            (Ok(permit), Ok((stream, _))) => {
                tokio::spawn(serve_connection(stream, shared.clone(), permit));
            }
            (_, Err(error)) => {
                tracing::warn!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
            (Err(_), _) => return,
        }
    }
}

async fn serve_connection(stream: TcpStream, shared: Shared, permit: OwnedSemaphorePermit) {
    let limit = SockRef::from(&stream).set_tcp_user_timeout(Some(CONNECTION_TIMEOUT));
    if let Err(error) = limit {
        tracing::debug!(%error, "cannot limit how long answers wait");
    }
    let service = service_fn(|request| answer(request, &shared));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(CONNECTION_TIMEOUT)
        .max_buf_size(HEAD_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection for metrics ended"),
        Err(_) => tracing::debug!("a connection for metrics took too long"),
    }
    drop(permit);
}

async fn answer(
    request: Request<Incoming>,
    shared: &Shared,
) -> Result<Response<String>, Infallible> {
    if !shared.allow_remote && !names_an_address(&request) {
        let text = "this address serves no named hosts; use the IP address, or localhost\n";
        return Ok(plain(StatusCode::MISDIRECTED_REQUEST, text.to_owned()));
    }
    if request.uri().path() != PATH {
        let text = format!("there is only {PATH}\n");
        return Ok(plain(StatusCode::NOT_FOUND, text));
    }
    if request.method() != Method::GET {
        let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "use GET\n".to_owned());
        let get = HeaderValue::from_static("GET");
        refusal.headers_mut().insert(ALLOW, get);
        return Ok(refusal);
    }
    Ok(page(shared).await)
}

/// Whether the request is for an IP address or `localhost`.
fn names_an_address(request: &Request<Incoming>) -> bool {
    let mut hosts = request.headers().get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let host = host.to_str().ok();
    let Some(host) = host.and_then(|host| host.parse::<Authority>().ok()) else {
        return false;
    };
    let literal = host.host().trim_start_matches('[').trim_end_matches(']');
    literal.eq_ignore_ascii_case("localhost") || literal.parse::<IpAddr>().is_ok()
}

async fn page(shared: &Shared) -> Response<String> {
    let failed = || {
        let text = "the metrics could not be collected; see the log\n";
        plain(StatusCode::INTERNAL_SERVER_ERROR, text.to_owned())
    };
    let Ok(permit) = shared.collecting.clone().acquire_owned().await else {
        return failed();
    };
    let collect = Arc::clone(&shared.collect);
    // The permit belongs to the work: a peer that goes away starts no second page beside the first.
    let collected = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        collect().text()
    });
    match collected.await {
        Ok(Ok(text)) => {
            let mut response = Response::new(text);
            let media_type = HeaderValue::from_static(CONTENT_TYPE);
            response
                .headers_mut()
                .insert(CONTENT_TYPE_HEADER, media_type);
            response
        }
        Ok(Err(error)) => {
            tracing::error!(%error, "the metrics have no text");
            failed()
        }
        Err(error) => {
            tracing::error!(%error, "the metrics were not collected");
            failed()
        }
    }
}

fn plain(status: StatusCode, text: String) -> Response<String> {
    let mut response = Response::new(text);
    *response.status_mut() = status;
    let media_type = HeaderValue::from_static("text/plain; charset=utf-8");
    response
        .headers_mut()
        .insert(CONTENT_TYPE_HEADER, media_type);
    response
}
