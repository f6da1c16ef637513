//! `pagemesh bench`: scratch clusters, and what is measured on them.
//!
//! Invariants: nothing that exists is touched; scratch pools, sockets and
//! processes are gone when the command ends.

mod failover;
mod files;
mod native;
mod recovery;
mod small_files;

use crate::args::{self, Bench, Measure, Output};
use crate::cluster::{Cluster, Plan};
use crate::ending::Ending;
use crate::mount;
use crate::output;
use crate::volume::attach;
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
use pagemesh_manage::wire::{Content, CreateVolume};
use pagemesh_manage::{Client, Kind};
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
/// Bytes of a scratch pool beyond its volumes: what is not yet freed.
const ROOM_BYTES: u64 = 512 << 20;
/// Operations of one part of a round of `session`, per second asked for.
const SESSION_OPERATIONS_PER_S: u64 = 400_000;
const _: () = assert!(
    SESSION_OPERATIONS_PER_S
        .checked_mul(args::SECONDS_MAX)
        .is_some(),
    "the longest measurement can be counted"
);
/// What work left behind is over by then.
const SETTLE: Duration = Duration::from_secs(2);

/// A cluster that is gone when dropped.
struct Scratch {
    cluster: Cluster,
    dir: TempDir,
    pools: TempDir,
}

impl Scratch {
    fn start(measure: &Measure, bricks: u32, volumes: u64) -> anyhow::Result<Scratch> {
        Scratch::sized(measure, bricks, bricks, VOLUME_BYTES * volumes + ROOM_BYTES)
    }

    /// Bricks with pools of `size_bytes`; only the first `mapped` are as if they were
    /// on this machine.
    fn sized(
        measure: &Measure,
        bricks: u32,
        mapped: u32,
        size_bytes: u64,
    ) -> anyhow::Result<Scratch> {
        let ending = Ending::listen(false)?;
        let dir = tempfile::tempdir()?;
        let pools = TempDir::new_in(&measure.pools)
            .with_context(|| format!("cannot make pools in {}", measure.pools.display()))?;
        let plan = Plan {
            dir: dir.path(),
            pools: pools.path(),
            bricks,
            mapped,
            size_bytes,
            listen: "127.0.0.1:0",
        };
        let cluster = Cluster::start(&plan, &ending)?;
        remove_at_end(ending, [dir.path(), pools.path()])?;
        Ok(Scratch {
            cluster,
            dir,
            pools,
        })
    }

    /// Makes a mirrored volume; gives its durability class.
    fn create(&self, name: &VolumeName) -> anyhow::Result<String> {
        let client = self.manager()?;
        let sized = client.create(&CreateVolume {
            name: name.clone(),
            size_bytes: VOLUME_BYTES,
            layout: Kind::Mirror,
            columns: None,
            copies: None,
            durability: None,
            content: Content::Blocks,
        })?;
        Ok(sized.volume.info.durability.to_string())
    }

    fn manager(&self) -> anyhow::Result<Client> {
        Ok(Client::new(&self.cluster.url, &self.cluster.key)?)
    }

    fn client(&self) -> args::Client {
        args::Client {
            manager: self.cluster.url.clone(),
            key: Some(self.dir.path().join("key")),
            output: Output::Table,
        }
    }

    fn attach(&self, name: &VolumeName, transport: args::Transport) -> anyhow::Result<Volume> {
        attach(&self.client(), transport, name)
    }

    fn brick_cpu(&self) -> impl FnMut() -> Duration + use<> {
        let pids = self.cluster.brick_pids();
        move || pids.iter().filter_map(|pid| process_cpu(*pid)).sum()
    }

    /// Exports a volume with a process of its own; gives the export's URI.
    fn export(&self, name: &VolumeName, transport: &str) -> anyhow::Result<(Daemon, String)> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["export", "nbd", &name.to_string()])
            .args(["--transport", transport, "--manager", &self.cluster.url])
            .arg("--socket")
            .arg(self.dir.path().join(format!("{name}.nbd")))
            .arg("--key")
            .arg(self.dir.path().join("key"));
        Daemon::start(command)
    }
}

/// Ends this process when it is told to end, all scratch directories first; its
/// children end with it.
fn remove_at_end<const N: usize>(ending: Ending, directories: [&Path; N]) -> anyhow::Result<()> {
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
            // What is mounted there goes first: files need not be removed one by one.
            for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
                // Most are not mounts.
                let _ = unmount(entry.path(), UnmountFlags::DETACH);
            }
            // What cannot be removed is left: this is the end.
            let _ = std::fs::remove_dir_all(directory);
        }
        std::process::exit(130);
    })?;
    Ok(())
}

/// A child process of this program; dropping it ends it.
struct Daemon(Child);

impl Daemon {
    /// Starts it, and gives what it says when it is ready.
    fn start(mut command: Command) -> anyhow::Result<(Daemon, String)> {
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
        let daemon = Daemon(child);
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        let ready = line.trim().strip_prefix("ready ");
        let ready = ready.context("a child process did not start")?.to_owned();
        Ok((daemon, ready))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // It was started here and ends when its input does.
        let _ = self.0.wait();
    }
}

/// Measures.
pub fn run(command: &Bench) -> anyhow::Result<()> {
    match command {
        Bench::Session(measure) => finish(&session(measure)?, measure),
        Bench::Ramp { measure, transport } => finish(&ramp(measure, *transport)?, measure),
        Bench::Table { measure, transport } => finish(&table(measure, *transport)?, measure),
        Bench::Peers(measure) => finish(&peers(measure)?, measure),
        Bench::Recovery(measure) => finish(&recovery::run(measure)?, measure),
        Bench::Idle(measure) => finish(&idle(measure)?, measure),
        Bench::Mirror {
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
            let serving = files::Serving {
                threads: *threads,
                fuse: *fuse,
                direct_io: *direct_io,
            };
            finish(&files::mirror(measure, &options, serving)?, measure)
        }
        Bench::Direct {
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
                return finish(&files::followed(measure, &options)?, measure);
            }
            finish(&files::direct(measure, &options)?, measure)
        }
        Bench::Native(measure) => finish(&native::run(measure)?, measure),
        Bench::Metadata {
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
            finish(&files::metadata(measure, &options, *threads)?, measure)
        }
        Bench::SmallFiles {
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
            let serving = files::Serving {
                threads: *threads,
                fuse: *fuse,
                direct_io: false,
            };
            finish(&small_files::run(measure, &options, serving)?, measure)
        }
        Bench::Many {
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
            finish(&files::many(measure, &options, *threads)?, measure)
        }
        Bench::Failover {
            measure,
            writers,
            threads,
        } => {
            let options = pagemesh_bench::failover::FailoverOptions {
                rounds: measure.rounds,
                runtime: Duration::from_secs(measure.seconds),
                writers: *writers as usize,
            };
            finish(&failover::run(measure, &options, *threads)?, measure)
        }
        Bench::Sqlite {
            measure,
            inserts,
            row_bytes,
        } => {
            let options = sqlite::SqliteOptions {
                rounds: measure.rounds,
                inserts: *inserts,
                row_bytes: *row_bytes,
            };
            finish(&files::sqlite(measure, &options)?, measure)
        }
        Bench::Database {
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
            finish(&report, measure)
        }
        Bench::Null(wish) => mount::run_null(wish),
    }
}

fn finish(report: &Report, measure: &Measure) -> anyhow::Result<()> {
    match measure.output {
        Output::Json => output::say(&report.json())?,
        Output::Table => output::say(&report.text())?,
    }
    if let Some(dir) = &measure.save {
        for path in report.save(dir)? {
            eprintln!("wrote {}", path.display());
        }
    }
    Ok(())
}

fn session(measure: &Measure) -> anyhow::Result<Report> {
    let scratch = Scratch::start(measure, 2, 1)?;
    let name: VolumeName = "session".parse()?;
    let class = scratch.create(&name)?;
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

fn swept(measure: &Measure, class: String, transport: args::Transport) -> sweep::SweepOptions {
    // Writes of the other classes are durable when they are acknowledged.
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

fn ramp(measure: &Measure, transport: args::Transport) -> anyhow::Result<Report> {
    let scratch = Scratch::start(measure, 2, 1)?;
    let name: VolumeName = "ramp".parse()?;
    let class = scratch.create(&name)?;
    let volume = scratch.attach(&name, transport)?;
    let options = ramp::RampOptions {
        sweep_options: swept(measure, class, transport),
        ..ramp::RampOptions::default()
    };
    Ok(ramp::run_ramp(&volume, &mut scratch.brick_cpu(), &options)?)
}

fn table(measure: &Measure, transport: args::Transport) -> anyhow::Result<Report> {
    let scratch = Scratch::start(measure, 2, 1)?;
    let name: VolumeName = "table".parse()?;
    let class = scratch.create(&name)?;
    let volume = scratch.attach(&name, transport)?;
    let options = table::TableOptions {
        sweep_options: swept(measure, class, transport),
        ..table::TableOptions::default()
    };
    Ok(table::run_table(
        &volume,
        &mut scratch.brick_cpu(),
        &options,
    )?)
}

fn peers(measure: &Measure) -> anyhow::Result<Report> {
    let scratch = Scratch::start(measure, 2, 2)?;
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
        let class = scratch.create(&name)?;
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

fn idle(measure: &Measure) -> anyhow::Result<Report> {
    let scratch = Scratch::start(measure, 3, 1)?;
    let name: VolumeName = "idle".parse()?;
    let class = scratch.create(&name)?;
    let (exporter, _) = scratch.export(&name, "map")?;
    std::thread::sleep(SETTLE);
    let mut cluster = scratch.cluster.pids();
    // This process looks after the others as `up` does.
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
