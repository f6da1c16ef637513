//! `pagemesh export`: attached volumes behind the NBD server.

use crate::args::{ManagerArgs, ScrubArgs, Transport, listen_address};
use crate::client::{DetachGuard, attach, cluster_client, expect_content, open_snapshot};
use crate::config::ConfigArgs;
use crate::fence_watch::{self, FencedError};
use crate::figure_reporter::FigureReporter;
use crate::metrics_pages::{self, MetricsArgs};
use crate::service;
use crate::shutdown::{Shutdown, ShutdownTrigger};
use crate::snapshot_cuts;
use crate::snapshot_path::VolumeOrSnapshot;
use crate::status_signals::StatusSignals;
use anyhow::ensure;
use clap::{ArgGroup, Args, Subcommand};
use pagemesh_base::layout::VolumeName;
use pagemesh_base::poison;
use pagemesh_base::space::{Channel, Space, SpaceError};
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::VolumeContent;
use pagemesh_nbd::{ExportOptions, Exports, Limits, Listen, Server};
use pagemesh_volume::Volume;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Export volumes to applications.
#[derive(Subcommand)]
pub enum ExportCommand {
    Nbd(NbdArgs),
}

/// Export volumes over the network block device protocol (NBD).
///
/// SIGINT and SIGTERM stop the export. On SIGUSR1 it writes the status of each volume to
/// standard output, as one line of JSON: stalled writes (state `awaiting-manager` or
/// `unavailable`), the state of every leg and the error of its brick, the progress of resyncs,
/// scrub findings, and totals such as the copied bytes. SIGUSR2 starts a scrub of all volumes,
/// or stops the running scrubs.
///
/// `VOLUME@NAME` exports a snapshot, read-only. It attaches nothing: the client of the volume goes on, and
/// any number of processes may export the snapshot.
#[derive(Args)]
#[command(group = ArgGroup::new("endpoint").args(["socket", "listen"]).required(true))]
pub struct NbdArgs {
    /// Volumes to export, and snapshots as VOLUME@NAME, each under its own name.
    #[arg(required = true)]
    pub volumes: Vec<VolumeOrSnapshot>,
    /// Unix socket to listen on; this or --listen is required.
    #[arg(long)]
    pub socket: Option<PathBuf>,
    /// Address to listen on, as host:port; this or --socket is required.
    #[arg(long)]
    pub listen: Option<String>,
    /// Refuse writes.
    #[arg(long)]
    pub read_only: bool,
    /// Let idle processors sleep while clients are busy. Otherwise the processors poll, if this
    /// process may open /dev/cpu_dma_latency; that is faster, but needs more power.
    #[arg(long)]
    pub no_keep_awake: bool,
    #[command(flatten)]
    pub scrubs: ScrubArgs,
    #[command(flatten)]
    pub metrics: MetricsArgs,
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Exit when standard input ends.
    #[arg(long, hide = true)]
    pub until_stdin_ends: bool,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Limit of a new client's wait for the size from the manager; after that it gets the size known
/// here.
const REFRESH_LIMIT: Duration = Duration::from_millis(500);

/// A volume that refreshes its size when a client asks for it.
struct ExportedVolume {
    volume: Arc<Volume>,
    refresh: SyncSender<mpsc::Sender<()>>,
}

impl ExportedVolume {
    fn new(volume: Volume) -> anyhow::Result<ExportedVolume> {
        let volume = Arc::new(volume);
        let (refresh, asked) = mpsc::sync_channel(1);
        let refreshed = Arc::downgrade(&volume);
        std::thread::Builder::new()
            .name("refresh".into())
            .spawn(move || serve_refreshes(&refreshed, &asked))?;
        Ok(ExportedVolume { volume, refresh })
    }
}

fn serve_refreshes(volume: &Weak<Volume>, asked: &Receiver<mpsc::Sender<()>>) {
    while let (Ok(answer), Some(volume)) = (asked.recv(), volume.upgrade()) {
        if let Err(cause) = volume.refresh() {
            tracing::debug!(%cause, "the size may be old");
        }
        // The asking thread may have stopped waiting.
        let _ = answer.send(());
    }
}

impl Space for ExportedVolume {
    fn size_bytes(&self) -> u64 {
        let (answer, answered) = mpsc::channel();
        // A refresh in progress is not awaited.
        if self.refresh.try_send(answer).is_ok() {
            let _ = answered.recv_timeout(REFRESH_LIMIT);
        }
        self.volume.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        self.volume.open()
    }

    fn has_write_cache(&self) -> bool {
        self.volume.has_write_cache()
    }

    fn needs_flush(&self) -> bool {
        self.volume.needs_flush()
    }

    fn lost_writes(&self) -> u64 {
        self.volume.lost_writes()
    }
}

/// Serves volumes until its shutdown.
pub fn run(command: &ExportCommand) -> anyhow::Result<()> {
    let ExportCommand::Nbd(args) = command;
    let listen = match (&args.socket, &args.listen) {
        (Some(path), _) => Listen::Unix(std::path::absolute(path)?),
        (None, Some(address)) => Listen::Tcp(listen_address(address)?),
        (None, None) => anyhow::bail!("name a place: --socket PATH or --listen ADDRESS"),
    };
    let ending = Shutdown::listen(args.until_stdin_ends)?;
    let asked = StatusSignals::listen()?;
    let exports = Exports::new();
    // Check the addresses before the attach: an address in use must not fence a client.
    let server = Server::bind_with(listen, exports.clone(), limits(args.no_keep_awake))?;
    let metrics = args.metrics.bind()?;
    let manager = cluster_client(&args.client)?;
    check_contents(&manager, &args.volumes)?;
    // An unreadable snapshot must not fence a client either.
    add_snapshots(args, &exports)?;
    let attached = attach_volumes(args, &exports)?;
    let reported = attached.iter();
    let reported = reported.map(|(name, it)| (name.clone(), Arc::downgrade(&it.0)));
    let reported: Vec<_> = reported.collect();
    snapshot_cuts::serve(&manager, &reported)?;
    let _reporter = FigureReporter::of_volumes(manager, reported.clone())?;
    let watched = reported.clone();
    let _metrics = metrics_pages::serve(metrics, move || metrics_pages::client_page(&watched))?;
    let fenced = FencedVolumes::watch(&reported, args.volumes.len(), &exports, &ending.trigger())?;
    asked.handle(reported.into_iter().map(|(_, volume)| volume).collect())?;
    let uris = args.volumes.iter();
    let uris: Vec<_> = uris.map(|it| uri(server.listen_address(), it)).collect();
    uris.iter().for_each(|uri| println!("ready {uri}"));
    service::notify_ready(&uris.join(" "));
    serve(&server, &ending)?;
    for name in &args.volumes {
        exports.remove(&name.to_string());
    }
    fenced.check()
}

/// Refuses volumes with files, and snapshots of such.
fn check_contents(manager: &ManagerClient, sources: &[VolumeOrSnapshot]) -> anyhow::Result<()> {
    for source in sources {
        match source {
            VolumeOrSnapshot::Volume(name) => {
                expect_content(manager, name, VolumeContent::Blocks)?;
            }
            VolumeOrSnapshot::Snapshot(path) => {
                let content = manager.volume(&path.volume)?.info.content;
                ensure!(
                    content == VolumeContent::Blocks,
                    "the snapshot {path} holds files; use it with: pagemesh mount {path} DIR"
                );
            }
        }
    }
    Ok(())
}

fn add_snapshots(args: &NbdArgs, exports: &Exports) -> anyhow::Result<()> {
    for source in &args.volumes {
        let VolumeOrSnapshot::Snapshot(path) = source else {
            continue;
        };
        let space = open_snapshot(&args.client, args.transport, path)?;
        let options = ExportOptions {
            read_only: true,
            description: format!("pagemesh snapshot {path}"),
        };
        exports.add(&path.to_string(), Arc::new(space), options)?;
    }
    Ok(())
}

/// Attaches the volumes, and exports them. The guards detach them, also after an error.
fn attach_volumes(
    args: &NbdArgs,
    exports: &Exports,
) -> anyhow::Result<Vec<(VolumeName, DetachGuard)>> {
    let mut attached = Vec::new();
    for source in &args.volumes {
        let VolumeOrSnapshot::Volume(name) = source else {
            continue;
        };
        let exported = ExportedVolume::new(attach(&args.client, args.transport, name)?)?;
        exported.volume.plan_scrubs(args.scrubs.plan());
        attached.push((name.clone(), DetachGuard(Arc::clone(&exported.volume))));
        let options = ExportOptions {
            read_only: args.read_only,
            description: format!("pagemesh volume {name}"),
        };
        exports.add(&name.to_string(), Arc::new(exported), options)?;
    }
    Ok(attached)
}

fn limits(no_keep_awake: bool) -> Limits {
    Limits {
        may_keep_cpus_awake: !no_keep_awake,
        ..Limits::default()
    }
}

/// The exported volumes that other clients have taken over.
struct FencedVolumes {
    /// Exported volumes and snapshots. No client takes over a snapshot.
    source_count: usize,
    names: Mutex<Vec<VolumeName>>,
}

impl FencedVolumes {
    /// Disconnects the clients of each volume that another client takes over, and ends the export
    /// when nothing is left to serve.
    fn watch(
        volumes: &[(VolumeName, Weak<Volume>)],
        source_count: usize,
        exports: &Exports,
        teller: &ShutdownTrigger,
    ) -> anyhow::Result<Arc<FencedVolumes>> {
        let fenced = Arc::new(FencedVolumes {
            source_count,
            names: Mutex::default(),
        });
        for (name, volume) in volumes {
            let (fenced, name) = (Arc::clone(&fenced), name.clone());
            let (exports, teller) = (exports.clone(), teller.clone());
            fence_watch::watch(Weak::clone(volume), move || {
                tracing::warn!(volume = %name, "another client took over; clients are disconnected");
                exports.disconnect(&name.to_string());
                let mut taken = poison::lock(&fenced.names);
                taken.push(name);
                if taken.len() == fenced.source_count {
                    teller.trigger();
                }
            })?;
        }
        Ok(fenced)
    }

    /// Returns an error if no volume is left to serve.
    fn check(&self) -> anyhow::Result<()> {
        let taken = poison::lock(&self.names);
        if taken.len() < self.source_count {
            return Ok(());
        }
        let names: Vec<String> = taken.iter().map(VolumeName::to_string).collect();
        let names = names.join(" ");
        Err(FencedError(format!(
            "another client took over {names}, or an operator detached it, and this export has \
             ended; what it had confirmed is there, unless a copy that lacks it was promoted by \
             force. Export it again to take it back: pagemesh export nbd {names}"
        ))
        .into())
    }
}

fn serve(server: &Server, ending: &Shutdown) -> anyhow::Result<()> {
    let tell = ending.trigger();
    std::thread::scope(|scope| {
        let serving = scope.spawn(move || {
            let served = server.serve();
            // Wake the other side, which may wait for a signal.
            tell.trigger();
            served
        });
        ending.wait();
        let stopped = server.stop();
        if stopped.cut_off + stopped.abandoned > 0 {
            tracing::warn!(cut_off = stopped.cut_off, "clients were cut off");
        }
        match serving.join() {
            Ok(served) => Ok(served?),
            Err(_) => anyhow::bail!("the server panicked"),
        }
    })
}

fn uri(place: &Listen, name: &VolumeOrSnapshot) -> String {
    match place {
        Listen::Unix(path) => format!("nbd+unix:///{name}?socket={}", path.display()),
        Listen::Tcp(address) => format!("nbd://{address}/{name}"),
    }
}
