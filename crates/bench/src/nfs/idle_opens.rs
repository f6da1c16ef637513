//! An idle server with many files open by NFSv4.1 clients: its processor time, and the memory of an open.
//!
//! The memory before the opens is measured in a server that has made no file, and that has looked all names up. So the
//! memory of an open has no part of a new file and of the file system's cache, and memory that a make has freed does not
//! hide a part of it. While the clients are idle they renew their leases, as any client does.

use super::bar::{Bar, BarSide, add_bars};
use super::memory::{MemoryBytes, memory_bytes, server_pids};
use super::progress;
use super::setup::{NfsTarget, SetupClient};
use crate::error::BenchError;
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::process::process_cpu;
use crate::report::{Report, ReportCell};
use pagemesh_nfs_client::Credential;
use pagemesh_nfs_client::nfs4::{Nfs4Client, Nfs4Error, Open, OpenFile};
use serde_json::json;
use std::time::{Duration, Instant};

/// Limit of each wait for the server.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// Clients with a session each.
const CLIENTS: u32 = 10;
/// The pause between renewals: a third of the lease of 90 s.
const RENEWAL: Duration = Duration::from_secs(30);
/// Time for the server to drop pins: unused ones stay for 5 s after a call.
const SETTLE: Duration = Duration::from_secs(8);
/// Flags of SEQUENCE for state that is gone: SEQ4_STATUS_EXPIRED_ALL_STATE_REVOKED, EXPIRED_SOME_STATE_REVOKED,
/// ADMIN_STATE_REVOKED, RECALLABLE_STATE_REVOKED and RESTART_RECLAIM_NEEDED (RFC 8881, section 18.46.3).
const LOST_STATE: u32 = 0x178;
/// The most processor time, in % of a core.
const CPU_PERCENT_MAX: f64 = 0.5;
/// The most memory of an open.
const BYTES_PER_OPEN_MAX: f64 = 1024.0;

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct IdleOpensOptions {
    /// Files that are open.
    pub opens: u32,
    /// The idle time.
    pub idle: Duration,
}

/// The figures of a run.
#[derive(Clone, Copy, Debug, Default)]
struct IdleFigures {
    /// Before the opens, and with all files open.
    memory: [MemoryBytes; 2],
    cpu_percent_before: f64,
    cpu_percent: f64,
    wall: Duration,
}

/// A client with its session, and the directory of the files.
struct IdleClient {
    client: Nfs4Client,
    directory: Vec<u8>,
    server: String,
}

fn failed(server: &str, during: &str) -> impl FnOnce(Nfs4Error) -> BenchError {
    let during = format!("{during} of {server}");
    move |cause| BenchError::Nfs {
        during,
        cause: cause.into(),
    }
}

impl IdleClient {
    /// Connects, and makes a session. `number` distinguishes the clients of this process.
    fn connect(target: &NfsTarget, number: u32) -> Result<IdleClient, BenchError> {
        let server = format!("{} at {}", target.name, target.server);
        let owner = format!("pagemesh-bench-{}-{number}", std::process::id());
        let owner = (owner.as_bytes(), u64::from(number).to_be_bytes());
        let client = Nfs4Client::connect(target.server, Credential::sys(0, 0), owner, CALL_LIMIT);
        let mut client = client.map_err(failed(&server, "the session"))?;
        let complete = client.reclaim_complete();
        complete.map_err(failed(&server, "RECLAIM_COMPLETE"))?;
        let name = target.export.trim_start_matches('/');
        let directory = client.export(name.as_bytes());
        let directory = directory.map_err(failed(&server, "LOOKUP"))?;
        Ok(IdleClient {
            client,
            directory,
            server,
        })
    }

    fn open(&mut self, number: u32) -> Result<OpenFile, BenchError> {
        let (name, open) = (file_name(number), Open::shared(b"owner"));
        let opened = self.client.open(&self.directory, name.as_bytes(), open);
        opened.map_err(failed(&self.server, "OPEN"))
    }

    fn close(&mut self, file: &OpenFile) -> Result<(), BenchError> {
        let closed = self.client.close(file);
        closed.map_err(failed(&self.server, "CLOSE"))
    }

    /// Renews the lease. Fails if the server has lost state.
    fn renew(&mut self) -> Result<(), BenchError> {
        let flags = self.client.renew();
        let flags = flags.map_err(failed(&self.server, "SEQUENCE"))?;
        match flags & LOST_STATE {
            0 => Ok(()),
            _ => Err(BenchError::Option(format!(
                "the server has lost state: SEQUENCE has the flags {flags:#x}"
            ))),
        }
    }
}

fn file_name(number: u32) -> String {
    format!("open-{number:06}")
}

/// Makes the files. [`run_idle_opens`] needs a server that starts afterwards.
///
/// # Errors
/// If the server refuses a call.
pub fn make_files(target: &NfsTarget, files: u32) -> Result<(), BenchError> {
    progress(&format!("making {files} files"));
    let mut setup = SetupClient::connect(target)?;
    let root = setup.root()?;
    for number in 0..files {
        setup.make_file(&root, &file_name(number), 0)?;
    }
    Ok(())
}

/// Brings the pages of all names and inodes into the cache of the file system.
fn look_up_files(target: &NfsTarget, files: u32) -> Result<(), BenchError> {
    let mut setup = SetupClient::connect(target)?;
    let root = setup.root()?;
    for number in 0..files {
        setup.lookup(&root, &file_name(number))?;
    }
    Ok(())
}

/// Opens the files of [`make_files`] by clients of NFSv4.1, and measures the idle server.
///
/// # Errors
/// If the server refuses a call, or has lost an open at the end.
pub fn run_idle_opens(target: &NfsTarget, options: IdleOpensOptions) -> Result<Report, BenchError> {
    if options.opens == 0 || options.idle.is_zero() {
        let text = "no opens or no time measure nothing; give a number of each";
        return Err(BenchError::Option(text.to_owned()));
    }
    let mut clients = (0..CLIENTS)
        .map(|number| IdleClient::connect(target, number))
        .collect::<Result<Vec<_>, _>>()?;
    look_up_files(target, options.opens)?;
    let pids = server_pids(target);
    idle(&mut clients, SETTLE)?;
    let cpu_percent_before = measure_cpu(&mut clients, pids, options.idle.min(SETTLE))?.0;
    let before = memory_bytes(pids);
    progress(&format!(
        "opening {} files by {CLIENTS} clients",
        options.opens
    ));
    let mut files = Vec::new();
    for n in 0..options.opens {
        files.push(clients[(n % CLIENTS) as usize].open(n)?);
    }
    idle(&mut clients, SETTLE)?;
    progress(&format!("idle for {} s", options.idle.as_secs()));
    let (cpu_percent, wall) = measure_cpu(&mut clients, pids, options.idle)?;
    let after = memory_bytes(pids);
    // Each open must still be there, or the memory was none of opens.
    for (n, file) in (0..options.opens).zip(&files) {
        clients[(n % CLIENTS) as usize].close(file)?;
    }
    let figures = IdleFigures {
        memory: [before, after],
        cpu_percent_before,
        cpu_percent,
        wall,
    };
    Ok(report(target, options, &figures))
}

/// Waits, and renews leases meanwhile.
fn idle(clients: &mut [IdleClient], length: Duration) -> Result<(), BenchError> {
    let until = Instant::now() + length;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(RENEWAL));
        for client in &mut *clients {
            client.renew()?;
        }
    }
}

/// Processor time of processes in % of a core while clients are idle, and the length of the measurement.
fn measure_cpu(
    clients: &mut [IdleClient],
    pids: &[u32],
    length: Duration,
) -> Result<(f64, Duration), BenchError> {
    let cpu = || -> Duration { pids.iter().filter_map(|pid| process_cpu(*pid)).sum() };
    let (before, began) = (cpu(), Instant::now());
    idle(clients, length)?;
    let (used, wall) = (cpu().saturating_sub(before), began.elapsed());
    Ok((used.as_secs_f64() / wall.as_secs_f64() * 100.0, wall))
}

fn report(target: &NfsTarget, options: IdleOpensOptions, figures: &IdleFigures) -> Report {
    let title = format!(
        "idle server with {} files open by NFSv4.1 clients",
        options.opens
    );
    let columns = [
        ("state", ""),
        ("open files", ""),
        ("server CPU", "% of a core"),
        ("resident", "MiB"),
        ("anonymous", "MiB"),
        ("resident per open", "bytes"),
        ("anonymous per open", "bytes"),
    ];
    let mut report = Report::new("nfs-idle", &title, &target.class, &columns);
    let mib = |bytes: u64| ReportCell::from(bytes as f64 / f64::from(1 << 20));
    let [before, after] = figures.memory;
    let per_open = |of: fn(&MemoryBytes) -> u64| {
        (of(&after) as f64 - of(&before) as f64) / f64::from(options.opens)
    };
    let resident = per_open(|it| it.resident);
    let anonymous = per_open(|it| it.anonymous);
    report.add_row(vec![
        "no open files".into(),
        0u64.into(),
        figures.cpu_percent_before.into(),
        mib(before.resident),
        mib(before.anonymous),
        ReportCell::Missing,
        ReportCell::Missing,
    ]);
    report.add_row(vec![
        "open files".into(),
        u64::from(options.opens).into(),
        figures.cpu_percent.into(),
        mib(after.resident),
        mib(after.anonymous),
        resident.into(),
        anonymous.into(),
    ]);
    report.add_note(format!(
        "{CLIENTS} clients with a session each, idle for {:.0} s but for a renewal each {} s; the process of the server without its \
         bricks; the server was restarted after the files were made, and had looked all names up; all opens were closed at the end",
        figures.wall.as_secs_f64(),
        RENEWAL.as_secs()
    ));
    report.plots.push(plot(resident, anonymous));
    report.raw = json!({
        "opens": options.opens,
        "idle_s": figures.wall.as_secs_f64(),
        "cpu_percent": figures.cpu_percent,
        "cpu_percent_before": figures.cpu_percent_before,
        "resident_bytes": [before.resident, after.resident],
        "anonymous_bytes": [before.anonymous, after.anonymous],
    });
    add_bars(&mut report, &bars(figures.cpu_percent, resident));
    report
}

fn plot(resident: f64, anonymous: f64) -> Plot {
    Plot {
        title: "Memory of an open by NFSv4.1".to_owned(),
        kind: PlotKind::Bars,
        x: PlotAxis::linear(""),
        y: PlotAxis::linear("bytes"),
        categories: vec![
            "resident".to_owned(),
            "anonymous".to_owned(),
            "limit".to_owned(),
        ],
        series: vec![PlotSeries {
            name: "bytes per open".to_owned(),
            points: vec![(0.0, resident), (1.0, anonymous), (2.0, BYTES_PER_OPEN_MAX)],
        }],
    }
}

fn bars(cpu_percent: f64, resident: f64) -> [Bar; 2] {
    let cpu = (BarSide::Below, CPU_PERCENT_MAX);
    let bytes = (BarSide::Below, BYTES_PER_OPEN_MAX);
    [
        Bar::new("processor time", "% of a core", cpu, Some(cpu_percent)),
        Bar::new("resident memory of an open", "bytes", bytes, Some(resident)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nfs::compare::tests::target;

    #[test]
    fn memory_of_an_open_is_a_difference() {
        let of = |resident, anonymous| MemoryBytes {
            resident,
            anonymous,
        };
        let figures = IdleFigures {
            memory: [
                of(10 << 20, 5 << 20),
                of((10 << 20) + 500_000, (5 << 20) + 400_000),
            ],
            cpu_percent: 0.6,
            ..IdleFigures::default()
        };
        let options = IdleOpensOptions {
            opens: 1000,
            idle: Duration::from_secs(1),
        };
        let report = report(&target("ours"), options, &figures);
        let cell = |column| report.cell("open files", column);
        assert_eq!(cell("resident per open"), Some(&ReportCell::Number(500.0)));
        assert_eq!(cell("anonymous per open"), Some(&ReportCell::Number(400.0)));
        let text = report.text();
        assert!(text.contains("bar: missed: processor time"), "{text}");
        assert!(text.contains("bar: met: resident memory"), "{text}");
    }
}
