//! A comparison of NBD endpoints: fio's nbd engine against pagemesh and others, in one alternating
//! run.
//!
//! Every endpoint is filled once before, so that none answers from holes, and all are measured over
//! the same range. In each round every case visits every endpoint; the first endpoint moves on by
//! one. A report has medians of rounds. It also has the ratio of the first endpoint's operations to
//! each other endpoint's, as the median of the rounds' own ratios.

mod servers;

pub use crate::fio::{BlockCase, Direction, FioSample};

use crate::error::BenchError;
use crate::fio::{self, figures};
use crate::plot::{Plot, PlotAxis, PlotKind, PlotSeries};
use crate::process;
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use serde_json::json;
use servers::PeerServers;
use std::time::Duration;

/// An endpoint of the comparison.
pub struct NbdPeer {
    /// Its name in reports.
    pub name: String,
    /// A pool's durability class, or `none`.
    pub class: String,
    /// Its URI for fio, such as `nbd+unix:///volume?socket=/run/pagemesh.sock`.
    pub uri: String,
    /// The processes that serve it, for the CPU column; empty: unknown.
    pub pids: Vec<u32>,
    _servers: Option<PeerServers>,
}

impl NbdPeer {
    /// An endpoint that is served outside this run, with its durability class and the processes
    /// that serve it.
    pub fn external(name: &str, class: &str, uri: &str, pids: &[u32]) -> NbdPeer {
        NbdPeer {
            name: name.to_owned(),
            class: class.to_owned(),
            uri: uri.to_owned(),
            pids: pids.to_vec(),
            _servers: None,
        }
    }
}

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct PeerOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Time of one case on one endpoint in one round, [`RUNTIME_MIN`] to
    /// [`RUNTIME_MAX`].
    pub runtime: Duration,
    /// The part of each endpoint that is used, from its start: whole MiB.
    pub size_bytes: u64,
    /// The cases, the same for all endpoints.
    pub cases: Vec<BlockCase>,
    /// Number of endpoints, from the first, that get a column of ratios.
    pub ratio_columns: usize,
}

impl Default for PeerOptions {
    fn default() -> PeerOptions {
        let case = |direction, queue_depth| BlockCase {
            direction,
            queue_depth,
        };
        PeerOptions {
            rounds: 5,
            runtime: Duration::from_secs(2),
            size_bytes: 1 << 30,
            cases: vec![
                case(Direction::Write, 1),
                case(Direction::Read, 1),
                case(Direction::Write, 16),
                case(Direction::Read, 16),
            ],
            ratio_columns: 1,
        }
    }
}

/// The shortest cell: a shorter one would measure the connection setup.
pub const RUNTIME_MIN: Duration = Duration::from_millis(100);
/// The longest cell.
pub const RUNTIME_MAX: Duration = Duration::from_secs(3600);

/// Runs of one cell before it fails.
const CELL_TRIES_MAX: u32 = 4;

/// Samples by case, peer and round.
type PeerSamples = Vec<Vec<Vec<FioSample>>>;

/// Runs the comparison; see the module. Ratios are of the first peer.
///
/// # Errors
/// If an option is invalid, fio is missing or fails, or an endpoint fails a request.
pub fn run_peers(peers: &[NbdPeer], options: &PeerOptions) -> Result<Report, BenchError> {
    check(peers, options)?;
    process::require_program("fio", fio::PACKAGE)?;
    for peer in peers {
        fio::fill(&peer.uri, options.size_bytes)
            .map_err(|error| fio::name_failed_place(&peer_label(peer), error))?;
    }
    let mut samples: PeerSamples = vec![vec![Vec::new(); peers.len()]; options.cases.len()];
    for round in 0..options.rounds {
        for (case, of_case) in options.cases.iter().zip(&mut samples) {
            for turn in 0..peers.len() {
                let at = (turn + round) % peers.len();
                let seed = round as u64 + 1;
                of_case[at].push(measure_with_retries(&peers[at], *case, options, seed)?);
            }
        }
    }
    Ok(report(peers, options, &samples))
}

fn check(peers: &[NbdPeer], options: &PeerOptions) -> Result<(), BenchError> {
    check_rounds(options.rounds)?;
    let problem = if peers.is_empty() || options.cases.is_empty() {
        "there is nothing to compare; name at least one endpoint and one case"
    } else if options.runtime < RUNTIME_MIN {
        "a run time below 100 ms measures the connecting; use a longer one"
    } else if options.runtime > RUNTIME_MAX {
        "a run time above an hour per cell is more than anybody waits for; use a shorter one"
    } else if options.size_bytes == 0 || !options.size_bytes.is_multiple_of(1 << 20) {
        "the range is not of whole MiB; use at least 1 MiB"
    } else if options.cases.iter().any(|case| case.queue_depth == 0) {
        "a queue depth of 0 does nothing; use 1 or more"
    } else {
        return Ok(());
    };
    Err(BenchError::Option(problem.to_owned()))
}

fn peer_label(peer: &NbdPeer) -> String {
    format!("against {} at {}", peer.name, peer.uri)
}

/// Repeats a cell when fio fails: its nbd engine (3.33) sometimes waits for a reply that has
/// already arrived, with any server.
fn measure_with_retries(
    peer: &NbdPeer,
    case: BlockCase,
    options: &PeerOptions,
    seed: u64,
) -> Result<FioSample, BenchError> {
    let mut tries = 0;
    loop {
        tries += 1;
        match measure(peer, case, options, seed) {
            Err(_) if tries < CELL_TRIES_MAX => {}
            measured => return measured,
        }
    }
}

fn measure(
    peer: &NbdPeer,
    case: BlockCase,
    options: &PeerOptions,
    seed: u64,
) -> Result<FioSample, BenchError> {
    fio::with_server_cpu(&peer.pids, options.runtime, &peer_label(peer), || {
        fio::measure(&peer.uri, case, options.size_bytes, options.runtime, seed)
    })
}

fn report(peers: &[NbdPeer], options: &PeerOptions, samples: &PeerSamples) -> Report {
    let title = "fio's nbd engine, random 4 KiB, one connection, all in one alternating run";
    let own = peers.len().min(options.ratio_columns);
    let ratios: Vec<String> = peers[..own]
        .iter()
        .map(|peer| format!("{} / it", peer.name))
        .collect();
    let mut columns = vec![
        ("case", ""),
        ("endpoint", ""),
        ("class", ""),
        ("IOPS", "1/s"),
        ("mean", "µs"),
        ("p50", "µs"),
        ("p99", "µs"),
        ("p99.9", "µs"),
        ("fio CPU", "% of a core"),
        ("server CPU", "% of a core"),
    ];
    columns.extend(ratios.iter().map(|ratio| (ratio.as_str(), "× IOPS")));
    let mut report = Report::new("peers", title, &peers[0].class, &columns);
    for (case, of_case) in options.cases.iter().zip(samples) {
        for (peer, rounds) in peers.iter().zip(of_case) {
            let mut cells = row(*case, peer, rounds);
            cells.extend(of_case[..own].iter().map(|other| {
                let iops = |rounds: &[FioSample]| figures(rounds, |s| s.iops);
                ReportCell::from(median_ratio(&iops(other), &iops(rounds)))
            }));
            report.add_row(cells);
        }
    }
    report.add_note(format!(
        "medians of {} alternating rounds of {} ms per cell over {} MiB that were written once \
         before; ratios are medians of the rounds' own ratios",
        options.rounds,
        options.runtime.as_millis(),
        options.size_bytes >> 20
    ));
    report.add_note(
        "the report's durability class is that of the first endpoint; each row has its own",
    );
    report.plots.push(plot(peers, options, samples));
    report.raw = json!({
        "cases": options.cases,
        "endpoints": peers.iter().map(|peer| &peer.name).collect::<Vec<_>>(),
        "classes": peers.iter().map(|peer| &peer.class).collect::<Vec<_>>(),
        "samples_by_case_endpoint_round": samples,
    });
    report
}

fn row(case: BlockCase, peer: &NbdPeer, rounds: &[FioSample]) -> Vec<ReportCell> {
    let middle = |of| median(&figures(rounds, of));
    let us = |of| ReportCell::from(middle(of).map(|ns| ns / 1000.0));
    let server = match peer.pids.is_empty() {
        true => ReportCell::Missing,
        false => middle(|s| s.server_cpu_percent).into(),
    };
    vec![
        case.to_string().into(),
        peer.name.as_str().into(),
        peer.class.as_str().into(),
        middle(|s| s.iops).into(),
        us(|s| s.clat_mean_ns),
        us(|s| s.clat_p50_ns),
        us(|s| s.clat_p99_ns),
        us(|s| s.clat_p999_ns),
        middle(|s| s.fio_cpu_percent).into(),
        server,
    ]
}

fn plot(peers: &[NbdPeer], options: &PeerOptions, samples: &PeerSamples) -> Plot {
    let series = |(at, peer): (usize, &NbdPeer)| PlotSeries {
        name: peer.name.clone(),
        points: (0u32..)
            .zip(samples)
            .filter_map(|(case, of)| {
                Some((f64::from(case), median(&figures(&of[at], |s| s.iops))?))
            })
            .collect(),
    };
    Plot {
        title: "Random 4 KiB over NBD".to_owned(),
        kind: PlotKind::Bars,
        x: PlotAxis::linear(""),
        y: PlotAxis::linear("operations per second"),
        categories: options.cases.iter().map(BlockCase::to_string).collect(),
        series: peers.iter().enumerate().map(series).collect(),
    }
}
