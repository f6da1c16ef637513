//! `pagemesh brick`: opens a pool, serves it, and registers with the manager.

use crate::args::listen_address;
use crate::client::host_name;
use crate::commands::brick::tier_reports::{self, SentCounts};
use crate::commands::brick::{BrickArgs, device_reports};
use crate::figure_reporter::FigureReporter;
use crate::key;
use crate::memory_budget::MemoryBudget;
use crate::metrics_pages;
use crate::service;
use crate::shutdown::Shutdown;
use anyhow::{Context, bail};
use pagemesh_base::brick_name::BrickName;
use pagemesh_base::fd_limit::raise_fd_limit;
use pagemesh_base::key::Key;
use pagemesh_base::layout::BrickId;
use pagemesh_base::slice::BrickControl;
use pagemesh_brick::brick::{Brick, OpenedBrick, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::scrub::{ScrubState, ScrubStatus};
use pagemesh_brick::service::{BrickService, MappedFirst};
use pagemesh_brick::tier::SlicePages;
use pagemesh_fabric::{map, tcp};
use pagemesh_manage::wire::{
    self, BrickDevices, BrickRegistration, BrickScrub, ErrorCode, ScrubRequest,
};
use pagemesh_manage::{ManagerClient, ManagerError};
use pagemesh_metrics::BoundResponder;
use pagemesh_pmem::Media;
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Interval of heartbeats to a manager that did not answer.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of heartbeats while a change of the pool's devices is being carried out.
const CHANGE_INTERVAL: Duration = Duration::from_millis(200);

/// Limit of the orderly end of a brick whose pool failed.
const FAILED_EXIT_LIMIT: Duration = Duration::from_secs(5);

/// Runs a brick until its shutdown.
pub fn run(args: &BrickArgs) -> anyhow::Result<()> {
    let Some(pool) = &args.pool else {
        bail!("no pool is named; name it with --pool");
    };
    let key = key::find(args.client.key.as_deref(), &args.client.manager)?;
    let process = BrickProcess {
        args,
        manager: ManagerClient::new(&args.client.manager, &key)?,
        key,
        ending: Shutdown::listen(args.until_stdin_ends)?,
        listen: listen_address(&args.listen)?,
        metrics: args.metrics.bind()?,
        // Register before any slow operation: an unregistered signal would kill this process.
        asked: Signals::new([SIGUSR1, SIGUSR2]).context("cannot listen for signals")?,
    };
    service::notify_status("opening the pool");
    let budget = args.memory_budget;
    let options = OpenOptions {
        is_sparse: args.sparse,
        devices: args.devices.clone(),
        failed_devices: args.failed_devices.clone(),
        memory_budget: budget.unwrap_or_else(|| MemoryBudget::of_each(1)).bytes(),
        ..OpenOptions::default()
    };
    match OpenedPool::open(pool, options)? {
        // Clients cannot map a pool of class file-sync.
        OpenedPool::Disk(opened) => process.serve(opened, |path, _, server| {
            server.serve_local(path)?;
            Ok(None)
        }),
        OpenedPool::Mapped(opened) => process.serve(opened, bind_map),
        OpenedPool::Tiered(opened) => process.serve(opened, bind_map),
    }
}

/// Starts the map transport.
fn bind_map<M: MappedFirst + Send + Sync + 'static>(
    path: &Path,
    served: Arc<BrickService<M>>,
    _server: &mut tcp::TcpServer,
) -> anyhow::Result<Option<map::MapServer>> {
    Ok(Some(map::MapServer::bind(path, served)?))
}

/// A brick's process, before its pool is open.
struct BrickProcess<'a> {
    args: &'a BrickArgs,
    manager: ManagerClient,
    key: Key,
    ending: Shutdown,
    listen: SocketAddr,
    metrics: Option<BoundResponder>,
    asked: Signals,
}

impl BrickProcess<'_> {
    /// Serves a brick until a shutdown. `serve_socket` serves clients of this machine at a path.
    fn serve<M: Media + Send + Sync + 'static>(
        self,
        (brick, keeper, recovered): OpenedBrick<M>,
        serve_socket: impl FnOnce(
            &Path,
            Arc<BrickService<M>>,
            &mut tcp::TcpServer,
        ) -> anyhow::Result<Option<map::MapServer>>,
    ) -> anyhow::Result<()> {
        let args = self.args;
        // By the failure itself: a heartbeat may wait for the thread that is stuck.
        brick.on_failure(exit_soon);
        brick.limit_drains(args.drain_rate.0);
        brick.plan_scrubs(args.scrub_every.0, Instant::now());
        let obeys = Arc::downgrade(&brick);
        let registered_name = Arc::new(OnceLock::new());
        let name = registered_name.clone();
        let asked = self.asked;
        std::thread::Builder::new()
            .name("status".into())
            .spawn(move || handle_signals(asked, &obeys, &name))?;
        let pool = args.pool.as_deref().unwrap_or(Path::new("")).display();
        tracing::info!(?recovered, %pool, "recovered");
        let served = Arc::new(BrickService(brick.clone()));
        let sessions = brick.mapping().geometry().journals;
        if let Err(cause) = raise_fd_limit() {
            tracing::warn!(%cause, "cannot raise the limit of descriptors (RLIMIT_NOFILE)");
        }
        let options = tcp::ServerOptions::for_sessions(sessions);
        let mut tcp = tcp::TcpServer::bind(self.listen, self.key, served.clone(), options)?;
        let socket = args.map.as_deref().map(absolute_path).transpose()?;
        let map = match &socket {
            Some(path) => serve_socket(path, served, &mut tcp)?,
            None => None,
        };
        let registrar = Registrar {
            brick: &brick,
            manager: self.manager,
            address: args
                .advertise
                .clone()
                .unwrap_or_else(|| tcp.address().to_string()),
            map_socket: socket.as_ref().map(|path| path.display().to_string()),
            domain: args.domain.clone().unwrap_or_else(host_name),
            name: args.name.clone(),
            default_name: match &args.default_name {
                Some(name) => name.clone(),
                None => BrickName::from_host_name(&host_name()),
            },
            registered_name,
        };
        let reporter =
            FigureReporter::of_brick(registrar.manager.clone(), &Arc::downgrade(&brick))?;
        let (measured, name) = (Arc::downgrade(&brick), registrar.registered_name.clone());
        let page = move || metrics_pages::brick_page(&measured, &name);
        let metrics = metrics_pages::serve(self.metrics, page)?;
        let ended = registrar.serve(&self.ending);
        drop(metrics);
        drop(reporter);
        drop(map);
        if let Err(left) = tcp.stop() {
            tracing::warn!(%left, "ending with open connections");
        }
        keeper.stop();
        ended
    }
}

/// Ends the process of a failed pool, if it does not end by itself: its threads may wait for a disk that does not answer.
fn exit_soon() {
    let exit = || {
        std::thread::sleep(FAILED_EXIT_LIMIT);
        std::process::exit(1);
    };
    let thread = std::thread::Builder::new().name("exit".into());
    if let Err(cause) = thread.spawn(exit) {
        tracing::error!(%cause, "cannot start a thread");
    }
}

/// Handles status and scrub signals.
fn handle_signals<M: Media>(
    mut asked: Signals,
    brick: &Weak<Brick<M>>,
    name: &OnceLock<BrickName>,
) {
    for signal in asked.forever() {
        let Some(brick) = brick.upgrade() else {
            return;
        };
        let now = Instant::now();
        let status = brick.scrub_status(now);
        match (signal, status.state) {
            (SIGUSR2, ScrubState::Running) => brick.stop_scrub(now),
            (SIGUSR2, _) => brick.start_scrub(now),
            _ => print_scrubs(brick.id(), name.get(), &status),
        }
    }
}

/// Writes the state of scrubs to standard output.
fn print_scrubs(brick: BrickId, name: Option<&BrickName>, status: &ScrubStatus) {
    let scrub = scrub_report(status, None);
    let line = serde_json::json!({"brick": brick, "name": name, "scrub": scrub});
    if let Err(cause) = writeln!(std::io::stdout().lock(), "{line}") {
        tracing::warn!(%cause, "the status was not written");
    }
}

/// The state of scrubs, as reported to people and to the manager.
fn scrub_report(status: &ScrubStatus, fulfilled: Option<Uuid>) -> BrickScrub {
    BrickScrub {
        state: match status.state {
            ScrubState::Off => wire::ScrubState::Off,
            ScrubState::Waiting => wire::ScrubState::Waiting,
            ScrubState::Running => wire::ScrubState::Running,
        },
        passes: status.passes,
        progress_percent: status.percent,
        next_in_ms: status.next_in.map(|time| time.as_millis() as u64),
        pass: status.pass,
        last: status.last.map(|(last, _)| last),
        ended_ms_ago: status.last.map(|(_, ago)| ago.as_millis() as u64),
        corrected: status.corrected,
        fulfilled,
    }
}

fn absolute_path(path: &Path) -> anyhow::Result<std::path::PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is no path", path.display()))
}

/// Whether the manager refuses a heartbeat because another brick has the name.
fn is_name_taken(cause: &ManagerError) -> bool {
    matches!(cause, ManagerError::Refused { code, .. } if *code == ErrorCode::Exists)
}

/// Keeps a brick registered with the manager.
struct Registrar<'a, M> {
    brick: &'a Arc<Brick<M>>,
    manager: ManagerClient,
    address: String,
    map_socket: Option<String>,
    domain: String,
    /// The name that the user chose.
    name: Option<BrickName>,
    /// The name for a brick that has none.
    default_name: BrickName,
    /// The name in the manager's first answer. It does not change while the brick runs.
    registered_name: Arc<OnceLock<BrickName>>,
}

impl<M: Media + Send + Sync + 'static> Registrar<'_, M> {
    fn registration(
        &self,
        fulfilled: Option<Uuid>,
        devices: BrickDevices,
        counts: Option<&[SlicePages]>,
    ) -> anyhow::Result<BrickRegistration> {
        let status = self.brick.status()?;
        let scrubs = self.brick.scrub_status(Instant::now());
        Ok(BrickRegistration {
            brick: status.brick,
            name: Some(self.name.as_ref().unwrap_or(&self.default_name).clone()),
            name_is_default: self.name.is_none(),
            address: self.address.clone(),
            map_socket: self.map_socket.clone(),
            domain: self.domain.clone(),
            durability: status.durability.parse()?,
            capacity_bytes: status.capacity_bytes,
            used_bytes: status.used_bytes,
            incarnation: status.incarnation,
            sessions: status.sessions,
            scrub: Some(scrub_report(&scrubs, fulfilled)),
            devices: Some(devices),
            tier: tier_reports::report(self.brick),
            tier_pages: counts.map(tier_reports::wire_counts),
        })
    }

    /// Registers the brick, reports that it is ready, and keeps it registered until a shutdown or a pool failure.
    fn serve(&self, ending: &Shutdown) -> anyhow::Result<()> {
        let mut past = PastHeartbeats {
            was_answered: true,
            fulfilled: None,
            counts: SentCounts::default(),
        };
        // The manager may refuse the name of a new brick: before users and scripts take it for ready.
        let mut interval = self.send_heartbeat(&mut past)?;
        println!("ready brick {} {}", self.brick.id(), self.address);
        service::notify_ready(&format!("brick {} at {}", self.brick.id(), self.address));
        while !ending.wait_for(interval) {
            interval = self.send_heartbeat(&mut past)?;
        }
        Ok(())
    }

    /// Sends one heartbeat, and carries out the request in its answer. Returns the time to the next.
    fn send_heartbeat(&self, past: &mut PastHeartbeats) -> anyhow::Result<Duration> {
        if self.brick.has_failed() {
            bail!("the pool failed; see the log, then start the brick again to recover it");
        }
        let (devices, is_changing) = device_reports::report(self.brick);
        let counts = past.counts.due(self.brick, Instant::now());
        let sent = counts.as_ref().map(|it| it.as_slice());
        let registration = self.registration(past.fulfilled, devices, sent)?;
        let answer = self.manager.heartbeat(&registration);
        let was_answered = std::mem::replace(&mut past.was_answered, answer.is_ok());
        let reply = match answer {
            Ok(reply) => reply,
            // The user chose a wrong name for a new brick. Once registered, a brick goes on
            // serving.
            Err(cause) if is_name_taken(&cause) && self.registered_name.get().is_none() => {
                bail!("{cause}")
            }
            Err(cause) => {
                if was_answered {
                    tracing::warn!(%cause, "cannot send a heartbeat");
                }
                return Ok(RETRY_INTERVAL);
            }
        };
        past.counts.note(counts, Instant::now());
        if !was_answered {
            tracing::info!("the manager answers heartbeats again");
        }
        if let Some(name) = &reply.name {
            self.note_name(name);
        }
        if let Some(request) = reply.scrub.filter(|it| past.fulfilled != Some(it.id)) {
            self.apply_scrub_request(request);
            past.fulfilled = Some(request.id);
        }
        let is_asked = !reply.devices.is_empty();
        device_reports::apply(self.brick, reply.devices);
        if let Some(tiers) = reply.tiers {
            tier_reports::apply(self.brick, tiers);
        }
        let interval = Duration::from_millis(reply.interval_ms.max(10));
        Ok(match is_changing || is_asked {
            true => interval.min(CHANGE_INTERVAL),
            false => interval,
        })
    }

    /// Takes the name in the first answer.
    fn note_name(&self, name: &BrickName) {
        if self.registered_name.set(name.clone()).is_err() {
            return;
        }
        tracing::info!(%name, "registered");
        if let Some(asked) = self.name.as_ref().filter(|asked| *asked != name) {
            tracing::warn!(%name, %asked, "this brick keeps its name: another brick has the one of --name");
        }
    }

    fn apply_scrub_request(&self, request: ScrubRequest) {
        let now = Instant::now();
        if request.stop {
            self.brick.stop_scrub(now);
        } else {
            self.brick.start_scrub(now);
        }
    }
}

/// The state that heartbeats leave to the next.
struct PastHeartbeats {
    /// Whether the manager answered the last one; true before the first.
    was_answered: bool,
    /// The scrub request carried out last. The manager repeats a request until the brick reports it.
    fulfilled: Option<Uuid>,
    /// The counts of pages by slice that it has got.
    counts: SentCounts,
}
