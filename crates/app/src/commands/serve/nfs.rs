//! A process that owns file systems, serves them over NFS, and mounts them on this machine if it is asked to.
//!
//! Invariants:
//! - A volume is detached after its file system is closed, on every way out.
//! - The end goes in one order: the NFS server stops, the mounts end, the file systems store everything, the volumes are detached.
//! - The end of a mount ends nothing else.
//! - The loss of one file system to another client ends nothing else: see [`fences`](super::fences).

use crate::args::{ManagerArgs, ScrubArgs, Transport, listen_address};
use crate::client::{DetachGuard, cluster_client};
use crate::commands::mount::free_space;
use crate::commands::mount::life_signs::LifeSigns;
use crate::commands::mount::serve::{
    FenceFlag, FileSystemArgs, MEMORY_MIN, Takeover, attach_volume, open_files,
};
use crate::commands::mount::snapshot_views::MountSnapshots;
use crate::commands::serve::exports::{self, ReloadSignal};
use crate::commands::serve::fences::Fences;
use crate::commands::serve::idmap;
use crate::commands::serve::mounts::{self, MountPoint, ServingMount};
use crate::commands::serve::nfs_reports::NfsReporter;
use crate::config::ConfigArgs;
use crate::fence_watch::FencedError;
use crate::figure_reporter::FigureReporter;
use crate::metrics_pages::{self, MetricsArgs};
use crate::nfs_metrics::{self, ShownServer};
use crate::service;
use crate::shutdown::Shutdown;
use crate::snapshot_cuts;
use crate::standby::StandbyState;
use crate::status_signals::StatusSignals;
use anyhow::{Context, anyhow};
use clap::{Args, ValueEnum};
use pagemesh_base::layout::VolumeName;
use pagemesh_brick::resource_limits;
use pagemesh_fs::{Fs, FsError, OpenSnapshots, UpkeepThread};
use pagemesh_manage::ManagerClient;
use pagemesh_nfs::exports_file::ExportsFile;
use pagemesh_nfs::handle::HandleKey;
use pagemesh_nfs::limits::{EXPORT_WORKERS_MAX, Limits};
use pagemesh_nfs::{
    BoundAddress, ErrorHook, Export, ExportOptions, Exports, FreeSpaceFn, Server, ServiceFileStore,
    Squash,
};
use pagemesh_volume::Volume;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The label from which the key of file handles follows. Clients keep handles, so it stays for ever.
const HANDLE_KEY_LABEL: &[u8] = b"pagemesh NFS file handles 1";

/// Serve file systems over NFS, versions 3 and 4.1.
///
/// Clients mount `/NAME`: `mount -t nfs -o vers=3,proto=tcp,port=PORT,mountport=PORT,mountproto=tcp,nolock HOST:/NAME DIR`. Version 3 has
/// no locks. If an rpcbind runs on this machine, the server registers there, and clients need no ports. A file system has one server or one
/// mount at a time.
///
/// SIGHUP reads the file of --exports again.
///
/// Clients name their users themselves (AUTH_SYS), and nothing is encrypted. So serve a network in which each machine is trusted.
#[derive(Args)]
pub struct NfsArgs {
    /// File systems, each under its own name.
    #[arg(required_unless_present = "check", value_name = "FS")]
    pub names: Vec<VolumeName>,
    /// Address to listen on, as host:port.
    #[arg(long, default_value = "127.0.0.1:2049")]
    pub listen: String,
    /// File with the exports and the rules for their clients, as /etc/exports: one export a line, as `/FS/DIRECTORY 10.0.0.0/8(rw) *(ro)`.
    ///
    /// Without it, each file system is exported to all clients.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["read_only", "squash", "manage_gids"])]
    pub exports: Option<PathBuf>,
    /// Check the exports file, and end.
    #[arg(long, requires = "exports")]
    pub check: bool,
    /// Refuse changes.
    #[arg(long)]
    pub read_only: bool,
    /// Mount a file system on a directory of this machine, too: programs and NFS clients see the changes of each other at once. Repeat the
    /// option for others. The mount takes changes also with --read-only.
    #[arg(long = "mount", value_name = "FS=DIR")]
    pub mounts: Vec<MountPoint>,
    /// Give all users of this machine access to the mounts, by permissions; otherwise only the mounting user has access.
    #[arg(long)]
    pub allow_other: bool,
    /// Show `.snapshot` in the listings of directories. Without it the directory is there, and listings leave it out.
    #[arg(long)]
    pub show_snapshots: bool,
    /// Callers that become the anonymous user, 65534.
    #[arg(long, value_enum, default_value = "root")]
    pub squash: SquashArg,
    /// Look up the supplementary groups of callers on this machine. Calls have at most 16.
    #[arg(long)]
    pub manage_gids: bool,
    /// A fixed number of workers of each export, for measurements alone.
    #[arg(long, hide = true, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=EXPORT_WORKERS_MAX as u64))]
    pub workers: Option<usize>,
    /// Do not register with rpcbind.
    #[arg(long)]
    pub no_rpcbind: bool,
    /// Name owners and groups NAME@DOMAIN over NFSv4.1, by the users and groups of this machine. Without it, owners are numbers.
    #[arg(long, value_name = "DOMAIN", value_parser = idmap::parse_domain)]
    pub idmap_domain: Option<String>,
    /// Take the file systems over from the process that has them, and fence that process.
    ///
    /// Data loss: stores into mapped files of that mount that were not synced are lost. Programs on that mount get errors.
    #[arg(long)]
    pub force: bool,
    /// Wait as long as another process serves the file systems, and take over when it ends or gives no sign of life for 10 s.
    ///
    /// It also waits for a manager that does not answer. The address of --listen may come to this machine later. The port is taken at once,
    /// and clients can connect after the takeover.
    #[arg(long, conflicts_with = "force")]
    pub standby: bool,
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

/// Callers that become anonymous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SquashArg {
    /// Root alone.
    Root,
    /// All.
    All,
    /// None: root of each client may do everything.
    None,
}

/// A file system that this process owns. Its parts end in their order.
pub(super) struct OwnedFs {
    pub(super) name: VolumeName,
    /// Writes times, and frees space.
    _upkeep: [UpkeepThread; 2],
    pub(super) fs: Arc<Fs>,
    pub(super) fenced: FenceFlag,
    /// It reports until the process ends.
    signs: LifeSigns,
    export: ExportParts,
    pub(super) snapshots: Arc<OpenSnapshots>,
    detach: DetachGuard,
}

/// The parts of an export that come with the volume.
struct ExportParts {
    volume: uuid::Uuid,
    attachment: u32,
    content_returns: u64,
    free_space: FreeSpaceFn,
}

/// Serves file systems until a shutdown.
pub fn run(args: &NfsArgs) -> anyhow::Result<()> {
    resource_limits::check_memory(MEMORY_MIN).context("cannot serve file systems")?;
    let file = exports::read(args)?;
    if let (true, Some(file)) = (args.check, &file) {
        exports::print_check(file);
        return Ok(());
    }
    let reload = args.exports.as_deref().map(ReloadSignal::listen);
    let reload = reload.transpose()?;
    let ending = listen_for_shutdown(args)?;
    let signals = StatusSignals::listen()?;
    let bound = bind(args)?;
    let mounts = mounts::check(args)?;
    let metrics = args.metrics.bind()?;
    let manager = cluster_client(&args.client)?;
    service::notify_status("attaching volumes and reading file systems");
    let shown = Arc::new(ShownServer::default());
    let collected = Arc::clone(&shown);
    let metrics = metrics_pages::serve(metrics, move || nfs_metrics::page(&collected))?;
    let fences = Arc::new(Fences::new(args.names.len(), ending.trigger()));
    let opening = Opening {
        args,
        manager: &manager,
        ending: &ending,
        fences: &fences,
        standby: &shown.standby,
    };
    let Some(owned) = opening.open_all()? else {
        return Ok(());
    };
    let file = exports::read_after_wait(args, file);
    let volumes: Vec<_> = owned.iter().map(OwnedFs::named_volume).collect();
    // The file systems of this process are the same until its end.
    let _ = shown.volumes.set(volumes.clone());
    signals.handle(volumes.iter().map(|(_, volume)| volume.clone()).collect())?;
    snapshot_cuts::serve(&manager, &volumes)?;
    let reporter = FigureReporter::of_volumes(manager.clone(), volumes)?;
    let serving = Serving {
        args,
        owned: &owned,
        file: file.as_ref(),
        manager: &manager,
        ending: &ending,
        fences: &fences,
    };
    let served = mounts::start(args, mounts, &owned, &fences).and_then(|mounts| {
        let served = serving.serve((bound, reload), &mounts, &shown);
        mounts.into_iter().for_each(ServingMount::end);
        served
    });
    drop(metrics);
    let closed = close_all(&owned, &fences);
    // The manager takes reports of the attached client only.
    drop(reporter);
    drop(owned);
    served?;
    closed.into_iter().collect()
}

/// SIGHUP reads the exports file again, if there is one.
fn listen_for_shutdown(args: &NfsArgs) -> anyhow::Result<Shutdown> {
    match args.exports {
        Some(_) => Shutdown::listen_without_hangup(args.until_stdin_ends),
        None => Shutdown::listen(args.until_stdin_ends),
    }
}

/// Stores everything. The loss of one of several file systems was logged when it came, and is no error of the end.
fn close_all(owned: &[OwnedFs], fences: &Fences) -> Vec<anyhow::Result<()>> {
    let is_over = fences.are_all();
    let left = owned.iter().filter(|it| is_over || !it.fenced.is_set());
    left.map(OwnedFs::close).collect()
}

/// Takes the address of the server, so that one in use fences no client. The address of a standby may come to this machine later.
fn bind(args: &NfsArgs) -> anyhow::Result<BoundAddress> {
    let listen = listen_address(&args.listen)?;
    let bound = match args.standby {
        true => BoundAddress::bind_ahead(listen),
        false => BoundAddress::bind(listen),
    };
    bound.map_err(|cause| anyhow!("{cause}; name another address with --listen"))
}

/// A server to start, with its file systems.
struct Serving<'a> {
    args: &'a NfsArgs,
    owned: &'a [OwnedFs],
    file: Option<&'a ExportsFile>,
    manager: &'a ManagerClient,
    ending: &'a Shutdown,
    fences: &'a Fences,
}

impl Serving<'_> {
    /// Serves until the shutdown, which the loss of the last file system is, too.
    fn serve(
        &self,
        (bound, reload): (BoundAddress, Option<ReloadSignal>),
        mounts: &[ServingMount],
        shown: &ShownServer,
    ) -> anyhow::Result<()> {
        let is_stopped = Arc::new(AtomicBool::new(false));
        for fs in self.owned {
            let is_stopped = Arc::clone(&is_stopped);
            fs.signs.set_end(move || is_stopped.load(Ordering::Acquire));
        }
        let exports = self.exports()?;
        let limits = Limits {
            fixed_workers: self.args.workers,
            ..Limits::default()
        };
        let nfs4 = idmap::options(self.args.idmap_domain.as_deref())?;
        let on_error = self.error_hook();
        let server = Server::start_bound(vec![bound], exports.clone(), on_error, limits, &nfs4)?;
        let server = Arc::new(server);
        self.fences.set_server(&server);
        // The one server of this process.
        let _ = shown.server.set(Arc::downgrade(&server));
        let reloader = reload.map(|reload| reload.start(exports)).transpose()?;
        let registration = exports::register(self.args, server.local_addrs());
        let volumes = self.owned.iter().map(OwnedFs::named_volume).collect();
        let reporter = NfsReporter::start(self.manager.clone(), volumes, &server)?;
        self.announce(&server, mounts);
        self.ending.wait();
        drop(registration);
        // Calls that wait for an unreachable volume fail now, so that the server can stop.
        self.owned.iter().for_each(|it| it.fs.stop_resending());
        let report = server.stop();
        is_stopped.store(true, Ordering::Release);
        drop((reloader, reporter));
        if report.cut_off > 0 {
            let (cut_off, abandoned) = (report.cut_off, report.abandoned);
            tracing::warn!(
                cut_off,
                abandoned,
                "NFS connections were cut off with calls in progress"
            );
        }
        Ok(())
    }

    fn exports(&self) -> anyhow::Result<Exports> {
        let exports = self.owned.iter().map(|it| it.export(self.args)).collect();
        let mut exports = Exports::new(exports)?;
        for fs in self.owned {
            let are_listed = self.args.show_snapshots;
            let volume = fs.export.volume;
            let store = Box::new(ServiceFileStore::new(Arc::clone(&fs.fs)));
            exports = exports
                .with_snapshots(volume, &fs.snapshots, are_listed)
                .with_client_list(volume, fs.export.content_returns, store);
        }
        self.file.map(|file| exports.apply(file)).transpose()?;
        Ok(exports)
    }

    /// Notices the loss of a file system to another client at the first call that fails for it.
    fn error_hook(&self) -> ErrorHook {
        let flags = self.owned.iter();
        let flags: Vec<_> = flags
            .map(|it| (it.name.clone(), it.fenced.clone()))
            .collect();
        Box::new(move |name: &str, error: &FsError| {
            let named = flags.iter().find(|(known, _)| known.as_str() == name);
            if let Some((_, fenced)) = named {
                fenced.check_error(error);
            }
        })
    }

    /// Tells that clients may mount.
    fn announce(&self, server: &Server, mounts: &[ServingMount]) {
        let paths = exports::paths(self.args, self.file);
        let addresses = server.local_addrs().iter();
        let urls = addresses.flat_map(|address| {
            let paths = paths.iter();
            paths.map(move |path| format!("nfs://{address}{path}"))
        });
        let urls: Vec<String> = urls.collect();
        urls.iter().for_each(|url| println!("ready {url}"));
        for mount in mounts {
            println!("ready {}", mount.dir().display());
        }
        service::notify_ready(&urls.join(" "));
    }
}

/// The file systems of the command, to be opened.
struct Opening<'a> {
    args: &'a NfsArgs,
    manager: &'a ManagerClient,
    ending: &'a Shutdown,
    fences: &'a Arc<Fences>,
    standby: &'a StandbyState,
}

impl Opening<'_> {
    /// Opens all. None: this process shall end.
    fn open_all(&self) -> anyhow::Result<Option<Vec<OwnedFs>>> {
        // All servers take several file systems in one order: two standbys never wait for each other.
        let mut names = self.args.names.clone();
        names.sort();
        self.standby.set_waiting(self.args.standby);
        let opened = names.iter().map(|name| self.open(name)).collect();
        self.standby.set_waiting(false);
        opened
    }

    /// Attaches the volume, and opens its file system. None: this process shall end.
    fn open(&self, name: &VolumeName) -> anyhow::Result<Option<OwnedFs>> {
        let Opening {
            args,
            manager,
            ending,
            ..
        } = *self;
        let wanted = FileSystemArgs {
            client: &args.client,
            transport: args.transport,
            scrubs: &args.scrubs,
            takeover: match (args.force, args.standby) {
                (true, _) => Takeover::Force,
                (false, true) => Takeover::Standby(self.standby),
                (false, false) => Takeover::Refuse,
            },
        };
        let Some((volume, detail, ())) = attach_volume(&wanted, name, ending, || Ok(()))? else {
            return Ok(None);
        };
        let detach = DetachGuard(Arc::clone(&volume));
        let signs = LifeSigns::start(manager.clone(), name, &volume)?;
        // The details from before the attachment may be older than a rollback. The client before is fenced, so that a manager that restarts
        // now must not end a standby.
        let ask = || -> anyhow::Result<u64> { Ok(manager.volume(name)?.info.content_returns) };
        let pause = |time| ending.wait_for(time);
        let Some(content_returns) = wanted.takeover.ask_manager(pause, ask)? else {
            return Ok(None);
        };
        let fs = open_files(&volume, &detail)?;
        let (fences, known) = (Arc::clone(self.fences), name.clone());
        let fenced = FenceFlag::watch(&volume, move || fences.record(&known))?;
        let export = ExportParts {
            volume: detail.info.id,
            attachment: volume.attachment().0,
            content_returns,
            free_space: Arc::from(free_space::watch(&args.client, detail, &fs)?),
        };
        let wait = pagemesh_fuse::wait;
        Ok(Some(OwnedFs {
            name: name.clone(),
            _upkeep: [
                UpkeepThread::start_maintenance(&fs, wait, |_| {})?,
                UpkeepThread::start_free_thread(&fs, wait)?,
            ],
            fs,
            fenced,
            signs,
            snapshots: MountSnapshots::of(name, args.transport, &args.client)?,
            export,
            detach,
        }))
    }
}

impl OwnedFs {
    pub(super) fn volume(&self) -> Arc<Volume> {
        Arc::clone(&self.detach.0)
    }

    /// The free bytes of the pools.
    pub(super) fn free_space(&self) -> FreeSpaceFn {
        Arc::clone(&self.export.free_space)
    }

    fn named_volume(&self) -> (VolumeName, Weak<Volume>) {
        (self.name.clone(), Arc::downgrade(&self.detach.0))
    }

    fn export(&self, args: &NfsArgs) -> Export {
        Export {
            name: self.name.to_string(),
            fs: Arc::clone(&self.fs),
            volume: self.export.volume,
            key: HandleKey::new(self.fs.derived_key(HANDLE_KEY_LABEL)),
            attachment: self.export.attachment,
            options: ExportOptions {
                is_read_only: args.read_only,
                squash: match args.squash {
                    SquashArg::Root => Squash::Root,
                    SquashArg::All => Squash::All,
                    SquashArg::None => Squash::None,
                },
                manages_groups: args.manage_gids,
                ..ExportOptions::default()
            },
            free_space: Arc::clone(&self.export.free_space),
        }
    }

    /// Stores everything. No call is in progress.
    fn close(&self) -> anyhow::Result<()> {
        let name = &self.name;
        if self.fenced.is_set() {
            return Err(FencedError(format!(
                "another client took over the file system {name}, or an operator took it away, and this server has ended; what it had confirmed \
                 is there, unless a copy that lacks it was promoted by force. Serve it again to take it back: pagemesh serve nfs {name}"
            ))
            .into());
        }
        let mut channel = self.fs.borrow_channel()?;
        let stored = self.fs.sync_all(&mut channel);
        stored.with_context(|| format!("DATA LOSS: times of files in {name} may be lost"))
    }
}
