//! The sizing of workers beside fixed numbers of them, on memory and on pools of a disk.

use super::NfsArgs;
use super::servers::{MeasuredServers, ServeOptions, ServerDaemon};
use anyhow::Context;
use pagemesh_bench::BenchError;
use pagemesh_bench::nfs::compare::{Candidate, CompareOptions, LoadedServer};
use pagemesh_bench::nfs::file_set::FileSetScale;
use pagemesh_bench::nfs::mix::OperationMix;
use pagemesh_bench::nfs::setup::NfsTarget;
use pagemesh_bench::nfs::worker_numbers::{
    NUMBERS, WorkerServers, WorkerShape, run_worker_numbers,
};
use pagemesh_bench::report::Report;

const SIZED: &str = "sized";
const FIXED: &str = "fixed";
/// Bytes of each file system on the disk at most: their files are far more than the memory of their bricks.
const DISK_SIZE_MAX: u64 = 512 << 20;
/// Files of each file system in memory.
const FILES: u32 = 3000;

/// The load shapes of pools in memory.
const MEMORY_SHAPES: [WorkerShape; 3] = [
    WorkerShape {
        name: "cached metadata",
        mix: OperationMix::CACHED_METADATA,
    },
    WorkerShape {
        name: "synchronous writes",
        mix: OperationMix::SYNCHRONOUS_WRITES,
    },
    WorkerShape {
        name: "SFS97",
        mix: OperationMix::SFS97,
    },
];
/// The load shape of pools on a disk.
const DISK_SHAPES: [WorkerShape; 1] = [WorkerShape {
    name: "4 KiB reads",
    mix: OperationMix::PAGE_READS,
}];

/// The two servers of one cluster. The one that sizes itself ends with it.
struct ServerPair<'s> {
    servers: &'s MeasuredServers,
    class: String,
    fixed: Option<ServerDaemon>,
}

impl ServerPair<'_> {
    /// Starts the server with a fixed number of workers, after the end of the one before.
    fn restart(&mut self, workers: usize) -> anyhow::Result<NfsTarget> {
        if let Some(daemon) = self.fixed.take() {
            daemon.end();
        }
        let options = ServeOptions {
            workers: Some(workers),
            ..ServeOptions::default()
        };
        let names = [(FIXED, self.class.as_str())];
        let (mut targets, daemon) = self.servers.start_server(&names, options)?;
        self.fixed = Some(daemon);
        targets.pop().context("the server has no export")
    }
}

pub(super) fn run(args: &NfsArgs) -> anyhow::Result<Report> {
    let options = args.options();
    let in_memory = MeasuredServers::start(args, 2)?;
    let disk_size = args.size.0.min(DISK_SIZE_MAX);
    let on_disk = MeasuredServers::start_on_disk(args, (disk_size, 2))?;
    let disk_files = FileSetScale::with_room(args.files_per_op, disk_size).files_max;
    let memory_files = options.scale.files_max.min(FILES);
    let (memory, _memory_daemon) = open(
        (&in_memory, (args.copies, args.size.0)),
        (&MEMORY_SHAPES, memory_files),
        &options,
    )?;
    let (disk, _disk_daemon) = open(
        (&on_disk, (args.copies, disk_size)),
        (&DISK_SHAPES, disk_files),
        &options,
    )?;
    Ok(run_worker_numbers(&mut [memory, disk], &options)?)
}

/// Makes two file systems, and serves them.
fn open<'s>(
    (servers, of_each): (&'s MeasuredServers, (u32, u64)),
    (shapes, files): (&[WorkerShape], u32),
    options: &CompareOptions,
) -> anyhow::Result<(WorkerServers<'s>, ServerDaemon)> {
    let class = servers.create(SIZED, of_each)?;
    servers.create(FIXED, of_each)?;
    let names = [(SIZED, class.as_str())];
    let (mut targets, daemon) = servers.start_server(&names, ServeOptions::default())?;
    let sized = targets.pop().context("the server has no export")?;
    let mut pair = ServerPair {
        servers,
        class,
        fixed: None,
    };
    let fixed = pair.restart(NUMBERS[0])?;
    let opened = WorkerServers {
        shapes: shapes.to_vec(),
        files,
        sized: LoadedServer::open(Candidate::new(sized), options)?,
        fixed: LoadedServer::open(Candidate::new(fixed), options)?,
        restart: Box::new(move |workers| {
            let started = pair.restart(workers);
            started.map_err(|cause| BenchError::Mount(cause.into_boxed_dyn_error()))
        }),
    };
    Ok((opened, daemon))
}
