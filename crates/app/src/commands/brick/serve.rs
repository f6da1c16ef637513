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
use pagemesh_brick::pool_devices::FirstDisk;
use pagemesh_brick::scrub::{ScrubState, ScrubStatus};
use pagemesh_brick::service::{BrickService, MappedFirst};
use pagemesh_fabric::{map, tcp};
use pagemesh_manage::ManagerClient;
use pagemesh_metrics::{BoundResponder, MetricPage, Responder};
use pagemesh_pmem::{DiskMedia, Media};
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
        current: Arc::default(),
        registered_name: Arc::default(),
        responder: None,
        is_ending: Arc::new(AtomicBool::new(false)),
    };
    service::notify_status("opening the pool");
    let mut opened = OpenedPool::open(pool, process.options.clone())?;
    loop {
        let next = match opened {
            OpenedPool::Disk(opened) => return process.serve_disks(opened),
            OpenedPool::Tiered(opened) => process.serve_in_memory(opened)?,
            OpenedPool::Mapped(opened) => process.serve_in_memory(opened)?,
        };
        match next {
            Some(next) => opened = next,
            None => return Ok(()),
        }
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
    current: Arc<CurrentBrick>,
    registered_name: Arc<OnceLock<BrickName>>,
    responder: Option<Responder>,
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

/// A brick of any medium, as threads of its process use it.
trait ServedView: Send + Sync {
    /// Handles a status or scrub signal.
    fn handle_signal(&self, signal: i32, name: Option<&BrickName>);
    /// Its metrics.
    fn page(&self, name: &OnceLock<BrickName>) -> MetricPage;
}

impl<M: Media + Send + Sync + 'static> ServedView for Brick<M> {
    fn handle_signal(&self, signal: i32, name: Option<&BrickName>) {
        let now = Instant::now();
        let status = self.scrub_status(now);
        match (signal, status.state) {
            (SIGUSR2, ScrubState::Running) => self.stop_scrub(now),
            (SIGUSR2, _) => self.start_scrub(now),
            _ => print_scrubs(self.id(), name, &status),
        }
    }

    fn page(&self, name: &OnceLock<BrickName>) -> MetricPage {
        metrics_pages::brick_page(self, name)
    }
}

/// The brick that the process has now. Another one takes its place when the pool is opened again.
#[derive(Default)]
struct CurrentBrick(Mutex<Option<Weak<dyn ServedView>>>);

impl CurrentBrick {
    fn set<M: Media + Send + Sync + 'static>(&self, brick: &Arc<Brick<M>>) {
        let brick: Weak<Brick<M>> = Arc::downgrade(brick);
        *lock(&self.0) = Some(brick);
    }

    fn get(&self) -> Option<Arc<dyn ServedView>> {
        lock(&self.0).as_ref()?.upgrade()
    }
}

impl BrickProcess<'_> {
    /// Starts the thread that handles signals, once.
    fn watch_signals(&mut self) -> anyhow::Result<()> {
        let Some(asked) = self.asked.take() else {
            return Ok(());
        };
        let (current, name) = (self.current.clone(), self.registered_name.clone());
        std::thread::Builder::new()
            .name("status".into())
            .spawn(move || handle_signals(asked, &current, &name))?;
        if let Err(cause) = raise_fd_limit() {
            tracing::warn!(%cause, "cannot raise the limit of descriptors (RLIMIT_NOFILE)");
        }
        Ok(())
    }

    /// Serves metrics, once.
    fn serve_metrics(&mut self) -> anyhow::Result<()> {
        if let Some(bound) = self.metrics.take() {
            let (current, name) = (self.current.clone(), self.registered_name.clone());
            let page = move || {
                current
                    .get()
                    .map_or_else(MetricPage::default, |it| it.page(&name))
            };
            self.responder = metrics_pages::serve(Some(bound), page)?;
        }
        Ok(())
    }

    /// Serves a pool on disks.
    fn serve_disks(&mut self, opened: OpenedBrick<DiskMedia>) -> anyhow::Result<()> {
        let reopening = Reopening {
            is_possible: Brick::can_reopen,
            reopen: Brick::reopen,
        };
        let retires = self.args.on_device_failure == OnDeviceFailure::Retire;
        self.serve(opened, serve_local, retires.then_some(reopening))?;
        Ok(())
    }

    /// Serves a pool in memory. Returns the pool opened again with its first disk, once that is asked for.
    fn serve_in_memory<M: MappedFirst + Send + Sync + 'static>(
        &mut self,
        opened: OpenedBrick<M>,
    ) -> anyhow::Result<Option<OpenedPool>> {
        let (pool, options) = (self.pool, self.options.clone());
        let ended = Arc::downgrade(&opened.0);
        let [claim, spare] = [opened.0.keep_away(pool)?, opened.0.keep_away(pool)?];
        let Some(first) = self.serve(opened, bind_map, None)? else {
            return Ok(None);
        };
        tracing::warn!(pool = %pool.display(), "the pool is opened again for its first disk; clients connect again");
        service::notify_status("opening the pool again for its first disk");
        match Brick::reopen_for_disk(pool, &options, &ended, claim, first.clone()) {
            Ok(opened) => Ok(Some(OpenedPool::Tiered(opened))),
            Err(cause) => {
                tracing::error!(%cause, "the pool is opened as before, without the disk");
                let opened =
                    Brick::reopen_without_disk(pool, &options, &ended, spare, first, &cause)?;
                Ok(Some(OpenedPool::Mapped(opened)))
            }
        }
    }

    /// Serves a brick until a shutdown, or until its pool must be opened again for a first disk. A failure of the pool ends
    /// the process, unless `reopening` is possible.
    fn serve<M: Media + Send + Sync + 'static>(
        &mut self,
        (mut brick, mut maintenance, recovered): OpenedBrick<M>,
        serve_socket: ServeSocket<M>,
        reopening: Option<Reopening<M>>,
    ) -> anyhow::Result<Option<FirstDisk>> {
        let pool = self.pool.display();
        tracing::info!(?recovered, %pool, "recovered");
        self.current.set(&brick);
        self.watch_signals()?;
        let mut failures = DeviceFailures::default();
        loop {
            let served = self.start(&brick, maintenance, serve_socket, &reopening)?;
            self.serve_metrics()?;
            let end = served.wait(&self.ending);
            let reopening = reopening.as_ref().filter(|it| (it.is_possible)(&brick));
            if let ServeEnd::FirstDisk(first) = end {
                // It ends in order, as at a restart.
                served.end(ServeEnd::Shutdown)?;
                if brick.has_failed() {
                    bail!("the pool {pool} has failed; its log has the cause");
                }
                return Ok(Some(first));
            }
            let (ServeEnd::Failed, Some(reopening)) = (&end, reopening) else {
                self.is_ending.store(true, Ordering::SeqCst);
                // A further device may have failed before, and then the exit was not armed.
                if brick.has_failed() {
                    exit_soon();
                }
                self.responder = None;
                return served.end(end).map(|()| None);
            };
            tracing::error!(%pool, "the pool is opened again after the failure of a device");
            service::notify_status("opening the pool after the failure of a device");
            served.abandon();
            let reopened = (reopening.reopen)(&brick, self.pool, &self.options, &mut failures);
            let (next, thread, recovered) = reopened.inspect_err(|_| exit_soon())?;
            tracing::info!(?recovered, %pool, "recovered");
            maintenance = thread;
            self.current.set(&next);
            leave_to_thread(std::mem::replace(&mut brick, next));
        }
    }

    /// Starts the servers of an open brick.
    fn start<M: Media + Send + Sync + 'static>(
        &mut self,
        brick: &Arc<Brick<M>>,
        maintenance: MaintenanceThread<M>,
        serve_socket: ServeSocket<M>,
        reopening: &Option<Reopening<M>>,
    ) -> anyhow::Result<ServedBrick<M>> {
        let args = self.args;
        self.watch_failure(brick, reopening);
        let waker = self.ending.waker();
        brick.on_first_disk(move || waker.wake());
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
            registered_name: self.registered_name.clone(),
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
    /// A disk shall join a pool in memory that has none.
    FirstDisk(FirstDisk),
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
            if let Some(first) = self.brick.take_first_disk() {
                return ServeEnd::FirstDisk(first);
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
            ServeEnd::Shutdown | ServeEnd::FirstDisk(_) => Ok(()),
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
fn handle_signals(mut asked: Signals, current: &CurrentBrick, name: &OnceLock<BrickName>) {
    for signal in asked.forever() {
        if let Some(brick) = current.get() {
            brick.handle_signal(signal, name.get());
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
