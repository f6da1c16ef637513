//! `pagemesh brick`: opens a pool, serves it, and registers with the manager.

use crate::args::listen_address;
use crate::client::host_name;
use crate::commands::brick::registrar::{Registrar, RegistrarThread, scrub_report};
use crate::commands::brick::{BrickArgs, OnDeviceFailure};
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
use pagemesh_base::poison::lock;
use pagemesh_brick::brick::{Brick, DeviceFailures, MaintenanceThread, OpenedBrick, OpenedPool};
use pagemesh_brick::disk_file::OpenOptions;
use pagemesh_brick::file::FileError;
use pagemesh_brick::scrub::{ScrubState, ScrubStatus};
use pagemesh_brick::service::{BrickService, MappedFirst};
use pagemesh_fabric::{map, tcp};
use pagemesh_manage::ManagerClient;
use pagemesh_metrics::BoundResponder;
use pagemesh_pmem::Media;
use signal_hook::consts::{SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Limit of the orderly end of a brick whose pool failed.
const FAILED_EXIT_LIMIT: Duration = Duration::from_secs(5);

/// Runs a brick until its shutdown.
pub fn run(args: &BrickArgs) -> anyhow::Result<()> {
    let Some(pool) = &args.pool else {
        bail!("no pool is named; name it with --pool");
    };
    let key = key::find(args.client.key.as_deref(), &args.client.manager)?;
    let budget = args.memory_budget;
    let mut process = BrickProcess {
        args,
        pool,
        options: OpenOptions {
            is_sparse: args.sparse,
            devices: args.devices.clone(),
            failed_devices: args.failed_devices.clone(),
            memory_budget: budget.unwrap_or_else(|| MemoryBudget::of_each(1)).bytes(),
            ..OpenOptions::default()
        },
        manager: ManagerClient::new(&args.client.manager, &key)?,
        key,
        ending: Shutdown::listen(args.until_stdin_ends)?,
        listen: listen_address(&args.listen)?,
        metrics: args.metrics.bind()?,
        // Register before any slow operation: an unregistered signal would kill this process.
        asked: Some(Signals::new([SIGUSR1, SIGUSR2]).context("cannot listen for signals")?),
        is_ending: Arc::new(AtomicBool::new(false)),
    };
    service::notify_status("opening the pool");
    match OpenedPool::open(pool, process.options.clone())? {
        OpenedPool::Disk(opened) => {
            let reopening = Reopening {
                is_possible: Brick::can_reopen,
                reopen: Brick::reopen,
            };
            let reopening =
                (args.on_device_failure == OnDeviceFailure::Retire).then_some(reopening);
            process.serve(opened, serve_local, reopening)
        }
        OpenedPool::Mapped(opened) => process.serve(opened, bind_map, None),
        OpenedPool::Tiered(opened) => process.serve(opened, bind_map, None),
    }
}

/// Serves clients of this machine at a path.
type ServeSocket<M> =
    fn(&Path, Arc<BrickService<M>>, &mut tcp::TcpServer) -> anyhow::Result<Option<map::MapServer>>;

/// Starts the map transport.
fn bind_map<M: MappedFirst + Send + Sync + 'static>(
    path: &Path,
    served: Arc<BrickService<M>>,
    _server: &mut tcp::TcpServer,
) -> anyhow::Result<Option<map::MapServer>> {
    Ok(Some(map::MapServer::bind(path, served)?))
}

/// Serves requests at a unix socket: clients cannot map a pool of class `file-sync`.
fn serve_local<M>(
    path: &Path,
    _served: Arc<BrickService<M>>,
    server: &mut tcp::TcpServer,
) -> anyhow::Result<Option<map::MapServer>> {
    server.serve_local(path)?;
    Ok(None)
}

/// A brick's process.
struct BrickProcess<'a> {
    args: &'a BrickArgs,
    pool: &'a Path,
    options: OpenOptions,
    manager: ManagerClient,
    key: Key,
    ending: Shutdown,
    listen: SocketAddr,
    metrics: Option<BoundResponder>,
    asked: Option<Signals>,
    /// Whether the process ends: a failure from then on is not followed by a reopening.
    is_ending: Arc<AtomicBool>,
}

type ReopenBrick<M> =
    fn(&Brick<M>, &Path, &OpenOptions, &mut DeviceFailures) -> Result<OpenedBrick<M>, FileError>;

/// How a process goes on after a failure of its pool.
struct Reopening<M: Media> {
    is_possible: fn(&Brick<M>) -> bool,
    reopen: ReopenBrick<M>,
}

/// The brick that the process has now. Another one takes its place when the pool is opened again.
struct CurrentBrick<M>(Mutex<Weak<Brick<M>>>);

impl<M> CurrentBrick<M> {
    fn set(&self, brick: &Arc<Brick<M>>) {
        *lock(&self.0) = Arc::downgrade(brick);
    }

    fn get(&self) -> Weak<Brick<M>> {
        lock(&self.0).clone()
    }
}

impl BrickProcess<'_> {
    /// Serves a brick until a shutdown. A failure of its pool ends the process, unless `reopening` is possible.
    fn serve<M: Media + Send + Sync + 'static>(
        &mut self,
        (mut brick, mut maintenance, recovered): OpenedBrick<M>,
        serve_socket: ServeSocket<M>,
        reopening: Option<Reopening<M>>,
    ) -> anyhow::Result<()> {
        let pool = self.pool.display();
        tracing::info!(?recovered, %pool, "recovered");
        let current = Arc::new(CurrentBrick(Mutex::new(Arc::downgrade(&brick))));
        let registered_name = Arc::new(OnceLock::new());
        if let Some(asked) = self.asked.take() {
            let (obeys, name) = (current.clone(), registered_name.clone());
            std::thread::Builder::new()
                .name("status".into())
                .spawn(move || handle_signals(asked, &obeys, &name))?;
        }
        if let Err(cause) = raise_fd_limit() {
            tracing::warn!(%cause, "cannot raise the limit of descriptors (RLIMIT_NOFILE)");
        }
        let (measured, name) = (current.clone(), registered_name.clone());
        let page = move || metrics_pages::brick_page(&measured.get(), &name);
        let mut metrics = self.metrics.take();
        let mut responder = None;
        let mut failures = DeviceFailures::default();
        loop {
            let served = self.start(
                &brick,
                maintenance,
                serve_socket,
                &registered_name,
                &reopening,
            )?;
            if let Some(bound) = metrics.take() {
                responder = metrics_pages::serve(Some(bound), page.clone())?;
            }
            let end = served.wait(&self.ending);
            let reopening = reopening.as_ref().filter(|it| (it.is_possible)(&brick));
            let (ServeEnd::Failed, Some(reopening)) = (&end, reopening) else {
                self.is_ending.store(true, Ordering::SeqCst);
                // A further device may have failed before, and then the exit was not armed.
                if brick.has_failed() {
                    exit_soon();
                }
                drop(responder);
                return served.end(end);
            };
            tracing::error!(%pool, "the pool is opened again after the failure of a device");
            service::notify_status("opening the pool after the failure of a device");
            served.abandon();
            let reopened = (reopening.reopen)(&brick, self.pool, &self.options, &mut failures);
            let (next, thread, recovered) = reopened.inspect_err(|_| exit_soon())?;
            tracing::info!(?recovered, %pool, "recovered");
            maintenance = thread;
            current.set(&next);
            leave_to_thread(std::mem::replace(&mut brick, next));
        }
    }

    /// Starts the servers of an open brick.
    fn start<M: Media + Send + Sync + 'static>(
        &mut self,
        brick: &Arc<Brick<M>>,
        maintenance: MaintenanceThread<M>,
        serve_socket: ServeSocket<M>,
        registered_name: &Arc<OnceLock<BrickName>>,
        reopening: &Option<Reopening<M>>,
    ) -> anyhow::Result<ServedBrick<M>> {
        let args = self.args;
        self.watch_failure(brick, reopening);
        brick.limit_drains(args.drain_rate.0);
        brick.plan_scrubs(args.scrub_every.0, Instant::now());
        let served = Arc::new(BrickService(brick.clone()));
        let options = tcp::ServerOptions::for_sessions(brick.mapping().geometry().journals);
        let mut tcp = tcp::TcpServer::bind(self.listen, self.key.clone(), served.clone(), options)?;
        // A brick that is opened again keeps its port.
        self.listen = tcp.address();
        let socket = args.map.as_deref().map(absolute_path).transpose()?;
        let map = match &socket {
            Some(path) => serve_socket(path, served, &mut tcp)?,
            None => None,
        };
        let registrar = Registrar {
            brick: brick.clone(),
            manager: self.manager.clone(),
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
            registered_name: registered_name.clone(),
        };
        let reporter = FigureReporter::of_brick(self.manager.clone(), &Arc::downgrade(brick))?;
        let registrar = RegistrarThread::start(registrar, self.ending.waker())?;
        Ok(ServedBrick {
            brick: brick.clone(),
            registrar,
            reporter,
            map,
            tcp,
            maintenance,
        })
    }

    /// By the failure itself: a heartbeat may wait for the thread that is stuck.
    fn watch_failure<M: Media + Send + Sync + 'static>(
        &self,
        brick: &Arc<Brick<M>>,
        reopening: &Option<Reopening<M>>,
    ) {
        let is_possible = reopening.as_ref().map(|it| it.is_possible);
        let (watched, waker) = (Arc::downgrade(brick), self.ending.waker());
        let is_ending = self.is_ending.clone();
        brick.on_failure(move || {
            let brick = watched.upgrade();
            let goes_on = brick
                .zip(is_possible)
                .is_some_and(|(brick, is_it)| is_it(&brick) && !is_ending.load(Ordering::SeqCst));
            match goes_on {
                true => waker.wake(),
                false => exit_soon(),
            }
        });
    }
}

/// The servers of an open brick.
struct ServedBrick<M: Media + Send + Sync + 'static> {
    brick: Arc<Brick<M>>,
    registrar: RegistrarThread,
    reporter: FigureReporter,
    map: Option<map::MapServer>,
    tcp: tcp::TcpServer,
    maintenance: MaintenanceThread<M>,
}

/// Why a brick is served no longer.
enum ServeEnd {
    Shutdown,
    /// The pool failed.
    Failed,
    /// The brick cannot be registered.
    Registrar(anyhow::Result<()>),
}

impl<M: Media + Send + Sync + 'static> ServedBrick<M> {
    fn wait(&self, ending: &Shutdown) -> ServeEnd {
        loop {
            if ending.wait_or_notice() {
                return ServeEnd::Shutdown;
            }
            if self.brick.has_failed() {
                return ServeEnd::Failed;
            }
            if let Ok(ended) = self.registrar.ended.try_recv() {
                return ServeEnd::Registrar(ended);
            }
        }
    }

    /// Ends all in order.
    fn end(self, end: ServeEnd) -> anyhow::Result<()> {
        self.registrar.stop();
        drop(self.reporter);
        drop(self.map);
        stop_server(self.tcp);
        self.maintenance.stop();
        match end {
            ServeEnd::Shutdown => Ok(()),
            ServeEnd::Failed => {
                bail!("the pool failed; see the log, then start the brick again to recover it")
            }
            ServeEnd::Registrar(ended) => ended,
        }
    }

    /// Ends the connections, and leaves the rest to a thread: threads of the brick may be stuck at a device.
    fn abandon(self) {
        stop_server(self.tcp);
        let (registrar, reporter, map, maintenance) =
            (self.registrar, self.reporter, self.map, self.maintenance);
        leave_to_thread(self.brick);
        run_apart("failed-pool", move || {
            registrar.stop();
            drop(reporter);
            drop(map);
            maintenance.stop();
        });
    }
}

/// Drops a failed brick on a thread of its own: the drop may wait for threads that are stuck at a device.
fn leave_to_thread<M: Media + Send + Sync + 'static>(brick: Arc<Brick<M>>) {
    run_apart("failed-brick", move || drop(brick));
}

/// Runs `work` on a thread that nothing waits for.
fn run_apart(name: &str, work: impl FnOnce() + Send + 'static) {
    let thread = std::thread::Builder::new().name(name.into());
    if let Err(cause) = thread.spawn(work) {
        tracing::error!(%cause, "cannot start a thread");
    }
}

fn stop_server(tcp: tcp::TcpServer) {
    if let Err(left) = tcp.stop() {
        tracing::warn!(%left, "ending with open connections");
    }
}

/// Ends the process of a failed pool, if it does not end by itself: its threads may wait for a disk that does not answer.
fn exit_soon() {
    run_apart("exit", || {
        std::thread::sleep(FAILED_EXIT_LIMIT);
        std::process::exit(1);
    });
}

/// Handles status and scrub signals.
fn handle_signals<M: Media>(
    mut asked: Signals,
    current: &CurrentBrick<M>,
    name: &OnceLock<BrickName>,
) {
    for signal in asked.forever() {
        let Some(brick) = current.get().upgrade() else {
            continue;
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

fn absolute_path(path: &Path) -> anyhow::Result<std::path::PathBuf> {
    std::path::absolute(path).with_context(|| format!("{} is no path", path.display()))
}
