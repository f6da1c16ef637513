//! A database on files: transactions of pgbench on PostgreSQL. Its data directory lies on mounts
//! with one and two copies; the comparison is PostgreSQL's own synchronous replication with both
//! directories in memory. Or it lies on the direct path; then the comparison is one directory in
//! memory.
//!
//! There are two kinds of transactions: pgbench's own (like TPC-B), and a script of the shape of
//! TPC-C's new order. Each runs at full speed, and at half of the rate that the place with one copy
//! reached in the same round. In each round every case visits every place, after a checkpoint; the
//! first place moves on by one.

mod postgresql;

use crate::error::BenchError;
use crate::process;
use crate::report::{Report, ReportCell};
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
pub use postgresql::PgbenchSample;
use postgresql::{PACKAGE, PgbenchLoad, PostgresServer};
use serde_json::json;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

/// Creates the tables of the second kind: a warehouse for each unit of scale.
const ORDER_TABLES: &str = "
create table district (w int, d int, next_order int not null, taken numeric not null, primary key (w, d));
create table customer (w int, d int, c int, balance numeric not null, orders int not null, primary key (w, d, c));
create table item (i int primary key, price numeric not null);
create table stock (w int, i int, quantity int not null, sold int not null, primary key (w, i));
create table orders (w int, d int, o int, c int not null, at timestamptz not null, primary key (w, d, o));
create table order_line (w int, d int, o int, line int, i int not null, quantity int not null, amount numeric not null, primary key (w, d, o, line));
insert into district select w, d, 1, 0 from generate_series(1, :scale) w, generate_series(1, 10) d;
insert into customer select w, d, c, 0, 0 from generate_series(1, :scale) w, generate_series(1, 10) d, generate_series(1, 300) c;
insert into item select i, 1 + i % 100 from generate_series(1, 10000) i;
insert into stock select w, i, 100, 0 from generate_series(1, :scale) w, generate_series(1, 10000) i;
";

/// A new order of five lines. Items are taken in ascending order, so that transactions never
/// deadlock.
const NEW_ORDER_SCRIPT: &str = "\\set w random(1, :scale)
\\set d random(1, 10)
\\set c random(1, 300)
\\set first random(1, 9000)
begin;
update district set next_order = next_order + 1 where w = :w and d = :d returning next_order as o \\gset
insert into orders values (:w, :d, :o, :c, now());
update stock set quantity = case when quantity > 10 then quantity - 5 else quantity + 91 end, sold = sold + 5 where w = :w and i in (:first, :first + 200, :first + 400, :first + 600, :first + 800);
insert into order_line select :w, :d, :o, row_number() over (order by i), i, 5, 5 * price from item where i in (:first, :first + 200, :first + 400, :first + 600, :first + 800);
update customer set balance = balance + 5, orders = orders + 1 where w = :w and d = :d and c = :c;
update district set taken = taken + 5 where w = :w and d = :d;
commit;
";

/// A place for a data directory.
pub struct DatabasePlace {
    /// Its name in reports.
    pub name: String,
    /// A pool's durability class, or `none`.
    pub class: String,
    /// A directory that any user may traverse.
    pub dir: PathBuf,
    /// The data directory of a second server, which replicates the first synchronously.
    pub standby: Option<PathBuf>,
    /// The command that runs the server there; empty: it runs directly.
    pub prefix: Vec<String>,
}

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct DatabaseOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Time of one case at one place in one round, in whole seconds.
    pub runtime: Duration,
    /// Units of 100 000 accounts, and warehouses.
    pub scale: u32,
    /// Concurrent connections.
    pub clients: u32,
}

impl Default for DatabaseOptions {
    fn default() -> DatabaseOptions {
        DatabaseOptions {
            rounds: 5,
            runtime: Duration::from_secs(3),
            scale: 4,
            clients: 4,
        }
    }
}

/// The servers of a place.
struct DatabaseServers {
    primary: PostgresServer,
    _standby: Option<PostgresServer>,
}

impl DatabaseServers {
    fn start(
        place: &DatabasePlace,
        options: &DatabaseOptions,
        tables: &str,
    ) -> Result<DatabaseServers, BenchError> {
        let dir = place.dir.join("data");
        let mut primary = PostgresServer::new(&place.name, dir, &place.prefix)?;
        primary.make()?;
        primary.start(options.clients)?;
        primary.fill(options.scale)?;
        primary.query(tables)?;
        let Some(dir) = &place.standby else {
            return Ok(DatabaseServers {
                primary,
                _standby: None,
            });
        };
        let mut standby =
            PostgresServer::new(&format!("{}, second", place.name), dir.join("data"), &[])?;
        standby.replicate_from(&primary)?;
        let host = primary.socket_dir().display();
        standby.configure(&format!("primary_conninfo = 'host={host} user=bench'\n"))?;
        standby.start(options.clients)?;
        primary.query("alter system set synchronous_standby_names = '*'")?;
        primary.query("select pg_reload_conf()")?;
        let state = "select count(*) from pg_stat_replication where sync_state = 'sync'";
        for _ in 0..100 {
            if primary.query(state)? == "1" {
                return Ok(DatabaseServers {
                    primary,
                    _standby: Some(standby),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err(BenchError::Program {
            program: format!("postgres on {}", place.name),
            cause: "its second server does not follow it synchronously".into(),
        })
    }
}

const CASES: [(&str, bool); 4] = [
    ("like TPC-B", false),
    ("like TPC-B, half the rate", true),
    ("new orders", false),
    ("new orders, half the rate", true),
];

/// Runs the comparison; see the module. The first place has one copy. The last one is the peer of
/// the others: PostgreSQL's own replication, or memory.
///
/// # Errors
/// If an option is invalid, PostgreSQL is missing or fails, or a transaction fails.
pub fn run_database(
    places: &[DatabasePlace],
    options: &DatabaseOptions,
) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    if places.len() < 2 || options.clients == 0 || options.scale == 0 {
        let text = "there is nothing to compare; name at least two places and one client";
        return Err(BenchError::Option(text.into()));
    }
    process::require_program("pgbench", PACKAGE)?;
    let cannot = || BenchError::system("write a script for pgbench");
    let mut script = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile()
        .map_err(cannot())?;
    script
        .write_all(NEW_ORDER_SCRIPT.as_bytes())
        .map_err(cannot())?;
    let tables = ORDER_TABLES.replace(":scale", &options.scale.to_string());
    let servers = places
        .iter()
        .map(|place| DatabaseServers::start(place, options, &tables));
    let servers: Vec<DatabaseServers> = servers.collect::<Result<_, _>>()?;
    let mut samples = vec![vec![Vec::new(); places.len()]; CASES.len()];
    for round in 0..options.rounds {
        for (case, (_, is_half)) in CASES.into_iter().enumerate() {
            let before: Option<f64> = match is_half {
                true => samples[case - 1][0].last().map(|s: &PgbenchSample| s.tps),
                false => None,
            };
            for turn in 0..places.len() {
                let at = (turn + round) % places.len();
                servers[at].primary.query("checkpoint")?;
                let sample = servers[at].primary.measure(PgbenchLoad {
                    script: (case >= 2).then_some(script.path()),
                    clients: options.clients,
                    rate: before.map(|tps| tps / 2.0),
                    scale: options.scale,
                    runtime: options.runtime,
                })?;
                samples[case][at].push(sample);
            }
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    Ok(report(places, options, &samples))
}

fn report(
    places: &[DatabasePlace],
    options: &DatabaseOptions,
    samples: &[Vec<Vec<PgbenchSample>>],
) -> Report {
    let title = "pgbench on PostgreSQL, all in one alternating run";
    let last = places.len() - 1;
    let to_first = format!("TPS to {}", places[0].name);
    let to_last = format!("TPS to {}", places[last].name);
    let columns = [
        ("transactions", ""),
        ("place", ""),
        ("TPS", "1/s"),
        ("mean latency", "ms"),
        (to_first.as_str(), "×"),
        (to_last.as_str(), "×"),
    ];
    let mut report = Report::new("database", title, &places[0].class, &columns);
    for ((case, _), of_case) in CASES.iter().zip(samples) {
        let tps = |at: usize| of_case[at].iter().map(|s| s.tps).collect::<Vec<f64>>();
        for (at, place) in places.iter().enumerate() {
            let latencies: Vec<f64> = of_case[at].iter().map(|s| s.latency_ms).collect();
            report.add_row(vec![
                ReportCell::from(*case),
                place.name.as_str().into(),
                median(&tps(at)).into(),
                median(&latencies).into(),
                median_ratio(&tps(at), &tps(0)).into(),
                median_ratio(&tps(at), &tps(last)).into(),
            ]);
        }
    }
    report.add_note(format!(
        "medians of {} alternating rounds of {} s per cell, each after a checkpoint; {} \
         connections, scale {}; ratios are medians of the rounds' own",
        options.rounds,
        options.runtime.as_secs(),
        options.clients,
        options.scale
    ));
    report.add_note(
        "half the rate: of what the first place reached as fast as it goes, in the same \
         round; the latency is that of the schedule"
            .to_owned(),
    );
    report.raw = json!({
        "cases": CASES.map(|(name, _)| name),
        "places": places.iter().map(|place| &place.name).collect::<Vec<_>>(),
        "samples_by_case_place_round": samples,
    });
    report
}
