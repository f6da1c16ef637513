//! `pagemesh bench`: scratch clusters and their benchmarks.
//!
//! Invariants: a benchmark changes no existing data; scratch pools, sockets and processes are gone
//! when the command ends.

mod failover;
mod files;
mod native;
mod recovery;
mod small_files;

use crate::args::{self, BenchCommand, MeasureArgs, Output};
use crate::cluster::{Cluster, ClusterPlan};
use crate::commands::mount;
use crate::commands::volume::attach;
use crate::output;
use crate::shutdown::Shutdown;
use anyhow::Context;
use pagemesh_base::layout::VolumeName;
use pagemesh_bench::mirror::Direction;
use pagemesh_bench::peers::{self, NbdPeer};
use pagemesh_bench::process_cpu;
use pagemesh_bench::report::Report;
use pagemesh_bench::session::{self, RawMemory};
use pagemesh_bench::{
    database, idle, load, many_files, metadata, mirror, ramp, sqlite, sweep, table,
};
use pagemesh_manage::wire::{CreateVolume, VolumeContent};
use pagemesh_manage::{LayoutKind, ManagerClient};
use pagemesh_volume::Volume;
use rustix::mount::{UnmountFlags, unmount};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

/// Bytes of a scratch volume.
const VOLUME_BYTES: u64 = 1 << 30;
/// Bytes of a scratch pool beyond its volumes, for frames that are not freed yet.
const SPARE_BYTES: u64 = 512 << 20;
/// Operations of one part of a `session` round, per second of the requested time.
const SESSION_OPERATIONS_PER_S: u64 = 400_000;
const _: () = assert!(
    SESSION_OPERATIONS_PER_S
        .checked_mul(args::SECONDS_MAX)
        .is_some(),
    "the longest measurement can be counted"
);
/// Wait for the background work of earlier phases.
const SETTLE_TIME: Duration = Duration::from_secs(2);

/// A cluster that is removed when dropped.
struct ScratchCluster {
    cluster: Cluster,
    dir: TempDir,
    pools: TempDir,
}

impl ScratchCluster {
    fn start(measure: &MeasureArgs, bricks: u32, volumes: u64) -> anyhow::Result<ScratchCluster> {
        ScratchCluster::with_pools(
            measure,
            bricks,
            bricks,
            VOLUME_BYTES * volumes + SPARE_BYTES,
        )
    }

    /// Starts bricks with pools of `size_bytes`. Clients may map only the first `mapped` bricks;
    /// the others act like bricks on other machines.
    fn with_pools(
        measure: &MeasureArgs,
        bricks: u32,
        mapped: u32,
        size_bytes: u64,
    ) -> anyhow::Result<ScratchCluster> {
        let ending = Shutdown::listen(false)?;
        let dir = tempfile::tempdir()?;
        let pools = TempDir::new_in(&measure.pools)
            .with_context(|| format!("cannot make pools in {}", measure.pools.display()))?;
        let plan = ClusterPlan {
            dir: dir.path(),
            pools: pools.path(),
            bricks,
            mapped,
            size_bytes,
            listen: "127.0.0.1:0",
        };
        let cluster = Cluster::start(&plan, &ending)?;
        remove_on_shutdown(ending, [dir.path(), pools.path()])?;
        Ok(ScratchCluster {
            cluster,
            dir,
            pools,
        })
    }

    /// Creates a mirrored volume, and returns its durability class.
    fn create_volume(&self, name: &VolumeName) -> anyhow::Result<String> {
        let client = self.manager_client()?;
        let sized = client.create(&CreateVolume {
            name: name.clone(),
            size_bytes: VOLUME_BYTES,
            layout: LayoutKind::Mirror,
            columns: None,
            copies: None,
            durability: None,
            content: VolumeContent::Blocks,
        })?;
        Ok(sized.volume.info.durability.to_string())
    }

    fn manager_client(&self) -> anyhow::Result<ManagerClient> {
        Ok(ManagerClient::new(&self.cluster.url, &self.cluster.key)?)
    }

    fn manager_args(&self) -> args::ManagerArgs {
        args::ManagerArgs {
            manager: self.cluster.url.clone(),
            key: Some(self.dir.path().join("key")),
            output: Output::Table,
        }
    }

    fn attach(&self, name: &VolumeName, transport: args::Transport) -> anyhow::Result<Volume> {
        attach(&self.manager_args(), transport, name)
    }

    fn brick_cpu(&self) -> impl FnMut() -> Duration + use<> {
        let pids = self.cluster.brick_pids();
        move || pids.iter().filter_map(|pid| process_cpu(*pid)).sum()
    }

    /// Exports a volume in a child process, and returns the export's URI.
    fn export(&self, name: &VolumeName, transport: &str) -> anyhow::Result<(ChildDaemon, String)> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["export", "nbd", &name.to_string()])
            .args(["--transport", transport, "--manager", &self.cluster.url])
            .arg("--socket")
            .arg(self.dir.path().join(format!("{name}.nbd")))
            .arg("--key")
            .arg(self.dir.path().join("key"));
        ChildDaemon::start(command)
    }
}

/// On a shutdown, removes all scratch directories and exits this process; its children exit with
/// it.
fn remove_on_shutdown<const N: usize>(
    ending: Shutdown,
    directories: [&Path; N],
) -> anyhow::Result<()> {
    static ALL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let all = || ALL.lock().unwrap_or_else(PoisonError::into_inner);
    let is_first = all().is_empty();
    all().extend(directories.map(Path::to_owned));
    if !is_first {
        return Ok(());
    }
    let thread = std::thread::Builder::new().name("ending".into());
    thread.spawn(move || {
        ending.wait();
        for directory in all().iter() {
            // Unmount first: files on a mount need not be removed one by one.
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                // Most entries are not mount points.
                let _ = unmount(entry.path(), UnmountFlags::DETACH);
            }
            // The process exits, so a directory that cannot be removed stays.
            let _ = std::fs::remove_dir_all(directory);
        }
        std::process::exit(130);
    })?;
    Ok(())
}

/// A child process of this program; dropping it ends the child.
struct ChildDaemon(Child);

impl ChildDaemon {
    /// Starts the child, and returns the rest of its `ready` line.
    fn start(mut command: Command) -> anyhow::Result<(ChildDaemon, String)> {
        let mut child = command
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a child process")?;
        let said = child
            .stdout
            .take()
            .context("a child process has no output")?;
        let daemon = ChildDaemon(child);
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        let ready = line.trim().strip_prefix("ready ");
        let ready = ready.context("a child process did not start")?.to_owned();
        Ok((daemon, ready))
    }
}

impl Drop for ChildDaemon {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // The child was started here, and exits when its input ends.
        let _ = self.0.wait();
    }
}

/// Runs a benchmark.
pub fn run(command: &BenchCommand) -> anyhow::Result<()> {
    match command {
        BenchCommand::Session(measure) => print_report(&session(measure)?, measure),
        BenchCommand::Ramp { measure, transport } => {
            print_report(&ramp(measure, *transport)?, measure)
        }
        BenchCommand::Table { measure, transport } => {
            print_report(&table(measure, *transport)?, measure)
        }
        BenchCommand::Peers(measure) => print_report(&peers(measure)?, measure),
        BenchCommand::Recovery(measure) => print_report(&recovery::run(measure)?, measure),
        BenchCommand::Idle(measure) => print_report(&idle(measure)?, measure),
        BenchCommand::Mirror {
            measure,
            sizes,
            jobs,
            think_us,
            plain,
            threads,
            fuse,
            direct_io,
        } => {
            let options = mirror::MirrorOptions {
                rounds: measure.rounds,
                runtime: Duration::from_secs(measure.seconds),
                sizes: sizes.clone(),
                jobs: jobs.clone(),
                think_us: think_us.clone(),
                sync: !plain,
                ..mirror::MirrorOptions::default()
            };
            let serving = files::MountServing {
                threads: *threads,
                fuse: *fuse,
                direct_io: *direct_io,
            };
            print_report(&files::mirror(measure, &options, serving)?, measure)
        }
        BenchCommand::Direct {
            measure,
            sizes,
            appends,
            jobs,
            think_us,
            followed,
        } => {
            let options = mirror::MirrorOptions {
                rounds: measure.rounds,
                runtime: Duration::from_secs(measure.seconds),
                sizes: sizes.clone(),
                appends: appends.clone(),
                jobs: jobs.clone(),
                think_us: think_us.clone(),
                directions: vec![Direction::Write, Direction::Read],
                processes: true,
                ..mirror::MirrorOptions::default()
            };
            if *followed {
                let options = mirror::MirrorOptions {
                    sizes: vec![4096],
                    jobs: vec![1],
                    directions: vec![Direction::Write],
                    sync: false,
                    ..options
                };
                return print_report(&files::async_replica(measure, &options)?, measure);
            }
            print_report(&files::direct(measure, &options)?, measure)
        }
        BenchCommand::Native(measure) => print_report(&native::run(measure)?, measure),
        BenchCommand::Metadata {
            measure,
            jobs,
            bytes,
            threads,
        } => {
            let options = metadata::MetadataOptions {
                rounds: measure.rounds,
                runtime: Duration::from_secs(measure.seconds),
                jobs: jobs.clone(),
                bytes: *bytes as usize,
            };
            print_report(&files::metadata(measure, &options, *threads)?, measure)
        }
        BenchCommand::SmallFiles {
            measure,
            files,
            entries,
            threads,
            fuse,
        } => {
            let options = pagemesh_bench::small_files::SmallFilesOptions {
                rounds: measure.rounds,
                files: *files,
                entries: *entries,
            };
            let serving = files::MountServing {
                threads: *threads,
                fuse: *fuse,
                direct_io: false,
            };
            print_report(&small_files::run(measure, &options, serving)?, measure)
        }
        BenchCommand::Many {
            measure,
            files,
            per_directory,
            threads,
        } => {
            let options = many_files::ManyFilesOptions {
                rounds: measure.rounds,
                files: *files,
                per_directory: per_directory.clone(),
                class: String::new(),
            };
            print_report(&files::many(measure, &options, *threads)?, measure)
        }
        BenchCommand::Failover {
            measure,
            writers,
            threads,
        } => {
            let options = pagemesh_bench::failover::FailoverOptions {
                rounds: measure.rounds,
                runtime: Duration::from_secs(measure.seconds),
                writers: *writers as usize,
            };
            print_report(&failover::run(measure, &options, *threads)?, measure)
        }
        BenchCommand::Sqlite {
            measure,
            inserts,
            row_bytes,
        } => {
            let options = sqlite::SqliteOptions {
                rounds: measure.rounds,
                inserts: *inserts,
                row_bytes: *row_bytes,
            };
            print_report(&files::sqlite(measure, &options)?, measure)
        }
        BenchCommand::Database {
            measure,
            direct,
            clients,
            scale,
            threads,
        } => {
            let options = database::DatabaseOptions {
                rounds: measure.rounds,
                runtime: Duration::from_secs(measure.seconds),
                scale: *scale,
                clients: *clients,
            };
            let report = match direct {
                true => files::direct_database(measure, &options)?,
                false => files::database(measure, &options, *threads)?,
            };
            print_report(&report, measure)
        }
        BenchCommand::Null(wish) => mount::run_null(wish),
    }
}

fn print_report(report: &Report, measure: &MeasureArgs) -> anyhow::Result<()> {
    match measure.output {
        Output::Json => output::print_text(&report.json())?,
        Output::Table => output::print_text(&report.text())?,
    }
    if let Some(dir) = &measure.save {
        for path in report.save(dir)? {
            eprintln!("wrote {}", path.display());
        }
    }
    Ok(())
}

fn session(measure: &MeasureArgs) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 2, 1)?;
    let name: VolumeName = "session".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = scratch.attach(&name, args::Transport::Map)?;
    load::fill(&volume, VOLUME_BYTES)?;
    let mut raw = RawMemory::create(&measure.pools, VOLUME_BYTES as usize)?;
    let options = session::SessionOptions {
        rounds: measure.rounds,
        operations: SESSION_OPERATIONS_PER_S * measure.seconds,
        class,
        space: "a volume mirrored over map".into(),
        ..session::SessionOptions::default()
    };
    let mut cpu = scratch.brick_cpu();
    Ok(session::run_session(&volume, &mut raw, &mut cpu, &options)?)
}

fn sweep_options(
    measure: &MeasureArgs,
    class: String,
    transport: args::Transport,
) -> sweep::SweepOptions {
    // In the other classes a write is durable when it is acknowledged.
    let durable = class == "file-sync";
    let over = match (transport, durable) {
        (args::Transport::Auto, false) | (args::Transport::Map, _) => "map",
        _ => "tcp",
    };
    sweep::SweepOptions {
        durable,
        rounds: measure.rounds,
        runtime: Duration::from_secs(measure.seconds),
        class,
        space: format!("a volume mirrored over {over}"),
        ..sweep::SweepOptions::default()
    }
}

fn ramp(measure: &MeasureArgs, transport: args::Transport) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 2, 1)?;
    let name: VolumeName = "ramp".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = scratch.attach(&name, transport)?;
    let options = ramp::RampOptions {
        sweep_options: sweep_options(measure, class, transport),
        ..ramp::RampOptions::default()
    };
    Ok(ramp::run_ramp(&volume, &mut scratch.brick_cpu(), &options)?)
}

fn table(measure: &MeasureArgs, transport: args::Transport) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 2, 1)?;
    let name: VolumeName = "table".parse()?;
    let class = scratch.create_volume(&name)?;
    let volume = scratch.attach(&name, transport)?;
    let options = table::TableOptions {
        sweep_options: sweep_options(measure, class, transport),
        ..table::TableOptions::default()
    };
    Ok(table::run_table(
        &volume,
        &mut scratch.brick_cpu(),
        &options,
    )?)
}

fn peers(measure: &MeasureArgs) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 2, 2)?;
    let options = peers::PeerOptions {
        rounds: measure.rounds,
        runtime: Duration::from_secs(measure.seconds),
        size_bytes: VOLUME_BYTES / 2,
        ratio_columns: 2,
        ..peers::PeerOptions::default()
    };
    let mut exporters = Vec::new();
    let mut peers = Vec::new();
    for transport in ["map", "tcp"] {
        let name: VolumeName = transport.parse()?;
        let class = scratch.create_volume(&name)?;
        let (exporter, uri) = scratch.export(&name, transport)?;
        let mut pids = scratch.cluster.brick_pids();
        pids.push(exporter.0.id());
        peers.push(NbdPeer::external(
            &format!("pagemesh {transport}"),
            &class,
            &uri,
            &pids,
        ));
        exporters.push(exporter);
    }
    peers.push(NbdPeer::nbdkit_memory(options.size_bytes)?);
    peers.push(NbdPeer::qemu_nbd(
        Path::new("/dev/shm"),
        options.size_bytes,
    )?);
    peers.push(NbdPeer::qemu_quorum(options.size_bytes)?);
    Ok(peers::run_peers(&peers, &options)?)
}

fn idle(measure: &MeasureArgs) -> anyhow::Result<Report> {
    let scratch = ScratchCluster::start(measure, 3, 1)?;
    let name: VolumeName = "idle".parse()?;
    let class = scratch.create_volume(&name)?;
    let (exporter, _) = scratch.export(&name, "map")?;
    std::thread::sleep(SETTLE_TIME);
    let mut cluster = scratch.cluster.pids();
    // This process supervises the others as `up` does.
    cluster.push(std::process::id());
    let group = |name: &str, pids| idle::ProcessGroup {
        name: name.into(),
        pids,
    };
    let groups = [
        group("3 bricks, manager, up", cluster),
        group("export", vec![exporter.0.id()]),
    ];
    let options = idle::IdleOptions {
        rounds: measure.rounds,
        runtime: Duration::from_secs(measure.seconds),
        class,
    };
    Ok(idle::run_idle(&groups, &options)?)
}
