//! Times of the manager's API with 100 bricks and 4096 volumes, and the memory of the manager. The test asserts no time:
//! `make bench-api` prints the table.
//!
//! The bricks are simulated: they register and send heartbeats over REST, and keep slices only in a map. An hour of figures is
//! reported by calls of the manager. All run in this process, so its memory is an upper bound of the manager's.

use crate::cluster;
use cluster::{Cluster, MIB, TestServer, brick_id, create_request, name, registration};
use pagemesh_base::layout::EpochNumber;
use pagemesh_manage::access::TokenRole;
use pagemesh_manage::token::token;
use pagemesh_manage::wire::{AttachVolume, CreateToken, ReportBrickFigures, ReportFigures};
use pagemesh_manage::{LayoutKind, VOLUMES_MAX};
use pagemesh_telemetry::{ChannelMeter, OpKind, Report, StageTimes, Totals};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BRICKS: usize = 100;
/// Samples of a call; the third largest is the 99th percentile.
const SAMPLES: usize = 300;
/// Steps of the history that have reports: an hour.
const STEPS: usize = 360;
const STEP: Duration = Duration::from_secs(10);
/// Bricks send heartbeats at this interval while the calls are timed.
const BEAT: Duration = Duration::from_secs(2);

/// The calls of the table.
const CALLS: [&str; 14] = [
    "/api/v1/volumes",
    "/api/v1/volumes?limit=100",
    "/api/v1/volumes?limit=100&after=volume-2000",
    "/api/v1/volumes?limit=1000",
    "/api/v1/volumes?limit=100&search=99",
    "/api/v1/volumes/volume-2000",
    "/api/v1/bricks",
    "/api/v1/status",
    "/api/v1/figures",
    "/api/v1/figures/cluster?span=1h",
    "/api/v1/figures/volumes/volume-2000?span=1h",
    "/api/v1/events?last=100",
    "/api/v1/events?limit=1000",
    "/metrics",
];

fn volume(number: usize) -> String {
    format!("volume-{number:04}")
}

/// The report of some reads and writes of 4 KiB.
fn some_operations() -> Report {
    let meter = ChannelMeter::default();
    for (kind, brick_ns) in [(OpKind::Read, 3_000), (OpKind::Write, 9_000)] {
        for queue_ns in [200, 900, 40_000] {
            meter.count(kind, 4096);
            meter.record(kind, &StageTimes([queue_ns, 0, 2_000, brick_ns, 0, 0]));
        }
    }
    meter.totals().since(&Totals::default())
}

fn send_heartbeats(server: &TestServer) {
    for number in 0..BRICKS {
        let beat = server.client.heartbeat(&registration(number));
        beat.expect("welcome");
    }
}

/// Creates and attaches the volumes.
fn create_volumes(server: &TestServer) -> Vec<EpochNumber> {
    let manager = server.handle.manager();
    let client = AttachVolume {
        client: "scale".into(),
        unreachable: false,
        process: None,
        replaces: None,
        receive: false,
    };
    let create = |number| {
        let text = volume(number);
        let request = create_request(&text, LayoutKind::Mirror, MIB);
        manager.create(&request).expect("made");
        let attached = manager.attach(&name(&text), &client).expect("attached");
        attached.layout.epoch
    };
    (0..VOLUMES_MAX).map(create).collect()
}

/// Reports figures of every brick and volume in each step of an hour.
fn fill_history(cluster: &Cluster, server: &TestServer, attachments: &[EpochNumber]) {
    let manager = server.handle.manager();
    let report = some_operations();
    for _ in 0..STEPS {
        cluster.clock.advance(STEP);
        cluster.send_heartbeats(manager);
        for number in 0..BRICKS {
            let figures = ReportBrickFigures {
                report: report.clone(),
                delivery: None,
            };
            let taken = manager.report_brick_figures(&brick_id(number).into(), &figures);
            taken.expect("taken");
        }
        for (number, &attachment) in attachments.iter().enumerate() {
            let figures = ReportFigures {
                attachment,
                report: report.clone(),
                delivery: None,
            };
            let taken = manager.report_volume_figures(&name(&volume(number)), &figures);
            taken.expect("taken");
        }
    }
}

/// A connection that stays open, as a browser has it.
struct Connection {
    stream: BufReader<TcpStream>,
    credential: String,
}

impl Connection {
    fn open(cluster: &Cluster, server: &TestServer) -> Connection {
        let stream = TcpStream::connect(server.handle.address()).expect("connected");
        stream.set_nodelay(true).expect("set");
        Connection {
            stream: BufReader::new(stream),
            credential: token(&cluster.key),
        }
    }

    /// Sends a request, and returns the length of the body of its answer.
    fn get(&mut self, path: &str) -> usize {
        let credential = &self.credential;
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {credential}\r\n\r\n"
        );
        let sent = self.stream.get_mut().write_all(request.as_bytes());
        sent.expect("sent");
        let length = self.read_head(path);
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).expect("a body");
        length
    }

    /// Reads the head of an answer, and returns the length of the body.
    fn read_head(&mut self, path: &str) -> usize {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let read = self.stream.read_line(&mut head).expect("a head");
            assert!(read > 0, "{path}: the manager closed the connection");
        }
        assert!(head.starts_with("HTTP/1.1 200"), "{path}: {head}");
        let head = head.to_lowercase();
        let length = head.split("content-length: ").nth(1);
        let digits = length.and_then(|it| it.lines().next());
        digits.and_then(|it| it.parse().ok()).expect("a length")
    }
}

/// A row of the table: milliseconds at the median and at the 99th percentile, and the length.
fn time_call(connection: &mut Connection, path: &str) -> String {
    let mut bytes = 0;
    let mut sample = || {
        let start = Instant::now();
        bytes = connection.get(path);
        start.elapsed().as_secs_f64() * 1e3
    };
    sample();
    let mut samples: Vec<f64> = std::iter::repeat_with(sample).take(SAMPLES).collect();
    samples.sort_by(f64::total_cmp);
    let (p50, p99) = (samples[SAMPLES / 2], samples[SAMPLES * 99 / 100]);
    let kib = bytes.div_ceil(1024);
    format!("| `GET {path}` | {p50:.2} | {p99:.2} | {kib} |")
}

/// Prints the rows.
fn print_table(cluster: &Cluster, server: &TestServer) {
    println!("| call | p50, ms | p99, ms | KiB |\n|---|---|---|---|");
    let mut connection = Connection::open(cluster, server);
    for path in CALLS {
        println!("{}", time_call(&mut connection, path));
    }
}

/// Serves until standard input ends, if `PAGEMESH_SERVE` is set: `make console-ready` measures the console over it.
fn serve_until_stdin_ends(server: &TestServer) {
    if std::env::var_os("PAGEMESH_SERVE").is_none() {
        return;
    }
    let token = CreateToken {
        name: "ready".parse().expect("a name"),
        role: TokenRole::Viewer,
        expires_s: Some(3600),
    };
    let created = server.client.create_token(&token).expect("created");
    println!("serving {} {}", server.handle.url(), created.token);
    let read = std::io::stdin().read_to_end(&mut Vec::new());
    read.expect("standard input");
}

/// A line of `/proc/self/status`, such as `VmRSS`, in MiB.
fn memory_mib(key: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find(|line| line.starts_with(key));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<u64>().ok()).expect("KiB") / 1024
}

#[test]
#[ignore = "takes minutes: make bench-api"]
fn api_times_with_4096_volumes() {
    let cluster = Cluster::new(BRICKS);
    let server = cluster.serve();
    send_heartbeats(&server);
    let attachments = create_volumes(&server);
    fill_history(&cluster, &server, &attachments);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                send_heartbeats(&server);
                std::thread::park_timeout(BEAT);
            }
        });
        print_table(&cluster, &server);
        serve_until_stdin_ends(&server);
        is_over.store(true, Ordering::Relaxed);
    });
    let (now, most) = (memory_mib("VmRSS"), memory_mib("VmHWM"));
    println!("memory of the process: {now} MiB, at most {most} MiB");
    server.handle.stop();
}
