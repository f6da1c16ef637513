//! Wrong input from users and from unauthenticated connections: the program refuses each case with
//! an error that names it, and no data is lost.

use crate::support;
use pagemesh_base::checksum::crc32c_append;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::{Cluster, Export, Pools, own_ip, program, until, write_key};

const PAGE: usize = 4096;

/// Checks that a wrong command line ends with code 2 before any request is sent.
fn check_usage(cluster: &Cluster, args: &[&str], parts: &[&str]) {
    let output = cluster.run(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {text}");
    parts
        .iter()
        .for_each(|part| assert!(text.contains(part), "{args:?}: no '{part}' in {text}"));
}

/// Checks that a daemon refuses to start.
fn check_no_start(cluster: &Cluster, args: &[&str], parts: &[&str]) {
    match cluster.try_daemon("refused", args, 1) {
        Ok(_) => panic!("{args:?} started"),
        Err(ended) => drop(program::refused(&format!("{args:?}"), &ended, parts)),
    }
}

#[test]
fn invalid_pool_sizes_are_refused_and_leave_no_file() {
    let cluster = Cluster::new(Pools::Memory, 0);
    let path = cluster.dir().join("new.pool");
    let name = path.to_str().unwrap();
    let create = |size| ["pool", "create", name, "--size", size];
    cluster.refused(&create("0"), &[name, "0 bytes", "at least"]);
    cluster.refused(&create("4095"), &[name, "4095 bytes", "multiple of 4096"]);
    cluster.refused(&create("4K"), &[name, "at least"]);
    cluster.refused(&create("65T"), &[name, "at most 64T"]);
    cluster.refused(&create("63T"), &[name]);
    check_usage(
        &cluster,
        &create("99999999999T"),
        &["99999999999T", "--size"],
    );
    check_usage(&cluster, &create("-4"), &["-4"]);
    check_usage(&cluster, &create("4X"), &["4X", "use K, M, G or T"]);
    check_usage(&cluster, &create("much"), &["much", "as in 64M"]);
    assert!(!path.exists());
    std::fs::write(&path, "precious").unwrap();
    cluster.refused(&create("32M"), &[name, "exists"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    let nowhere = ["pool", "create", "/nowhere/new.pool", "--size", "32M"];
    let parts = [
        "/nowhere/new.pool",
        "No such file",
        "a directory that is there",
    ];
    cluster.refused(&nowhere, &parts);
    cluster.refused(
        &create("18446744073709551615"),
        &["too large", "at most 64T"],
    );
    cluster.refused(
        &["pool", "show", "/nowhere/old.pool"],
        &["/nowhere/old.pool", "No such file", "pool create"],
    );
    let null = ["pool", "create", "/dev/null", "--size", "32M"];
    let refused = cluster.refused(&null, &["/dev/null", "No such device", "name a plain file"]);
    assert_eq!(refused.matches("cannot map").count(), 1, "{refused}");
}

#[test]
fn impossible_volumes_are_refused() {
    let cluster = Cluster::new(Pools::Memory, 2);
    let create = |name: &str, size: &str, more: &[&str], parts: &[&str]| {
        cluster.refused(
            &[&["volume", "create", name, "--size", size], more].concat(),
            parts,
        );
    };
    create("x", "0", &[], &["0 bytes", "smallest"]);
    create("x", "4097", &[], &["4097", "4096", "8192"]);
    create("x", "16000000T", &[], &["too large", "at most"]);
    create(
        "x",
        "100G",
        &[],
        &["107374182400 bytes", "4 times", "add a brick"],
    );
    create(
        "x",
        "8M",
        &["--copies", "3"],
        &["3 copies", "failure domains", "2"],
    );
    create("x", "8M", &["--copies", "4"], &["2 to 3 copies", "4"]);
    create("x", "8M", &["--copies", "0"], &["2 to 3 copies", "0"]);
    create(
        "x",
        "8M",
        &["--layout", "concat", "--copies", "2"],
        &["concat", "copies"],
    );
    create("x", "8M", &["--columns", "2"], &["mirror", "columns"]);
    create(
        "x",
        "8M",
        &["--layout", "stripe", "--columns", "1"],
        &["columns", "1"],
    );
    create(
        "x",
        "8M",
        &["--layout", "stripe", "--columns", "9999"],
        &["columns", "9999"],
    );
    create("x", "8M", &["--class", "pmem"], &["pmem"]);
    let usage = |name: &str, size: &str, more: &[&str], parts: &[&str]| {
        check_usage(
            &cluster,
            &[&["volume", "create", name, "--size", size], more].concat(),
            parts,
        );
    };
    usage("x", "99999999999T", &[], &["99999999999T"]);
    usage(
        "x",
        "8M",
        &["--layout", "raid6"],
        &["raid6", "stripe+mirror"],
    );
    usage("x", "8M", &["--class", "gold"], &["gold", "file-sync"]);
    usage("", "8M", &[], &["must not be empty"]);
    usage(&"n".repeat(300), "8M", &[], &["at most", "300"]);
    usage("a/b", "8M", &[], &["'/'", "letters"]);
    usage("a\nb", "8M", &[], &["'\\n'", "letters"]);
    usage("../up", "8M", &[], &["starts with", "'.'"]);
    usage("\u{1b}[31m", "8M", &[], &["u{1b}"]);
    assert_eq!(cluster.json(&["volume", "list"]), serde_json::json!([]));

    cluster.create("taken", "8M", &[]);
    create("taken", "8M", &[], &["already", "taken"]);
    for verb in ["show", "delete", "detach", "check"] {
        cluster.refused(&["volume", verb, "ghost"], &["no volume ghost"]);
    }
    cluster.refused(
        &["volume", "grow", "ghost", "--size", "16M"],
        &["no volume ghost"],
    );
    cluster.refused(
        &["volume", "grow", "taken", "--size", "8193K"],
        &["whole pages"],
    );
    check_no_start(
        &cluster,
        &["export", "nbd", "ghost", "--socket", "g.sock"],
        &["no volume ghost"],
    );
    assert!(
        !cluster.dir().join("g.sock").exists(),
        "a refused export leaves no socket"
    );
}

/// Changes the first pages of the pool of a stopped brick, checks whether the brick starts, and
/// restores the pool.
fn check_superblocks(cluster: &mut Cluster, change: impl Fn(&mut [u8]), refusal: &[&str]) {
    let pool = cluster.pool(0).to_owned();
    let good = std::fs::read(&pool).unwrap();
    let mut bad = good.clone();
    change(&mut bad[..2 * PAGE]);
    std::fs::write(&pool, &bad).unwrap();
    let name = pool.to_str().unwrap();
    let parts = [&[name], refusal].concat();
    check_no_start(cluster, &["brick", "--pool", name], &parts);
    cluster.refused(&["pool", "show", name], &parts);
    assert!(
        std::fs::read(&pool).unwrap() == bad,
        "a refused pool is not changed"
    );
    std::fs::write(&pool, &good).unwrap();
}

/// Writes a valid superblock of another version.
fn set_version(page: &mut [u8], version: u32) {
    page[8..12].copy_from_slice(&version.to_le_bytes());
    let crc = crc32c_append(crc32c_append(0, &page[..12]), &page[16..]);
    page[12..16].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn damaged_or_foreign_pools_are_refused_unchanged() {
    let mut cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("disk", "8M", &[]);
    let export = cluster.export(&["disk"], "auto");
    export.io(&["write -P 0x5a 0 8M", "flush"]);
    export.stop();
    cluster.stop_brick(0);
    let no_pool = ["not a pagemesh pool"];
    check_superblocks(&mut cluster, |pages| pages.fill(0), &no_pool);
    check_superblocks(&mut cluster, |pages| pages.fill(0xff), &no_pool);
    let newer = ["version 7", "use the program that wrote it"];
    let all_newer = |pages: &mut [u8]| pages.chunks_mut(PAGE).for_each(|page| set_version(page, 7));
    check_superblocks(&mut cluster, all_newer, &newer);
    for page in [0, PAGE] {
        check_superblocks(
            &mut cluster,
            |pages| set_version(&mut pages[page..][..PAGE], 7),
            &newer,
        );
    }
    let both = |pages: &mut [u8]| pages.chunks_mut(PAGE).for_each(|page| page[60] ^= 1);
    check_superblocks(&mut cluster, both, &["superblock", "damaged", "replace"]);

    // Truncated with its contents, and truncated to nothing.
    let pool = cluster.pool(0).to_owned();
    let good = std::fs::read(&pool).unwrap();
    let name = pool.to_str().unwrap().to_owned();
    std::fs::write(&pool, &good[..good.len() - PAGE]).unwrap();
    check_no_start(&cluster, &["brick", "--pool", &name], &[&name, "truncated"]);
    std::fs::write(&pool, b"").unwrap();
    check_no_start(
        &cluster,
        &["brick", "--pool", &name],
        &[&name, "not a pagemesh pool"],
    );
    std::fs::write(&pool, &good).unwrap();
    check_no_start(
        &cluster,
        &["brick", "--pool", "/nowhere"],
        &["/nowhere", "No such file"],
    );

    // One of the two superblocks is enough, either one.
    for page in [0, PAGE] {
        let mut one = std::fs::read(&pool).unwrap();
        one[page..page + PAGE].fill(0xee);
        std::fs::write(&pool, one).unwrap();
        cluster.restart_brick(0);
        cluster.await_bricks(2);
        cluster.check_identical("disk");
        cluster.stop_brick(0);
    }
    cluster.restart_brick(0);
    cluster.await_bricks(2);
    cluster.export(&["disk"], "tcp").io(&["read -P 0x5a 0 8M"]);
}

#[test]
fn resources_in_use_are_refused() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("disk", "8M", &[]);
    cluster.create("other", "8M", &[]);
    let export = cluster.export(&["disk"], "auto");
    export.io(&["write -P 3 0 1M"]);

    let pool = cluster.pool(0).to_str().unwrap();
    check_no_start(
        &cluster,
        &["brick", "--pool", pool],
        &[pool, "in use by a running brick"],
    );

    let listener = TcpListener::bind((own_ip(), 0)).unwrap();
    let taken = listener.local_addr().unwrap().to_string();
    let fresh = cluster.dir().join("fresh.pool");
    let fresh = fresh.to_str().unwrap();
    cluster.ok(&[
        "pool", "create", fresh, "--size", "16M", "--class", "process",
    ]);
    let brick = ["brick", "--pool", fresh];
    check_no_start(
        &cluster,
        &[&brick[..], &["--listen", &taken]].concat(),
        &[&taken, "in use"],
    );
    let map = cluster.brick_socket(1);
    let map = map.to_str().unwrap();
    check_no_start(
        &cluster,
        &[&brick[..], &["--map", map]].concat(),
        &[map, "served by another process", "--map"],
    );
    let key = cluster.key();
    let manager = [
        "manager",
        "--store",
        "new.redb",
        "--key",
        key.to_str().unwrap(),
    ];
    check_no_start(
        &cluster,
        &[&manager[..], &["--listen", &taken]].concat(),
        &[&taken, "in use"],
    );
    let nbd = ["export", "nbd", "other"];
    check_no_start(
        &cluster,
        &[&nbd[..], &["--listen", &taken]].concat(),
        &[&taken, "in use"],
    );
    let socket = export.uri.split_once("?socket=").unwrap().1.to_owned();
    let socket = socket.as_str();
    check_no_start(
        &cluster,
        &[&nbd[..], &["--socket", socket]].concat(),
        &[socket, "in use"],
    );
    // A refused listen address does not fence the client that holds the volume.
    let again = ["export", "nbd", "disk", "--socket", socket];
    check_no_start(&cluster, &again, &[socket, "in use"]);
    let file = cluster.dir().join("file");
    std::fs::write(&file, "precious").unwrap();
    let file = file.to_str().unwrap();
    check_no_start(
        &cluster,
        &[&nbd[..], &["--socket", file]].concat(),
        &[file, "not a socket"],
    );
    assert_eq!(std::fs::read(file).unwrap(), b"precious");
    let long = format!("/tmp/{}", "s".repeat(120));
    check_no_start(
        &cluster,
        &[&nbd[..], &["--socket", &long]].concat(),
        &["too long"],
    );

    export.io(&["read -P 3 0 1M", "write -P 4 1M 1M"]);
    // The next server may replace the socket of a killed server.
    export.kill();
    let export = cluster.export_at(&["disk"], "auto", &["--socket", socket]);
    export.io(&["read -P 3 0 1M", "read -P 4 1M 1M"]);
}

#[test]
fn wrong_key_is_refused_everywhere() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("disk", "8M", &[]);
    let wrong = cluster.dir().join("wrong");
    write_key(&wrong, &"9".repeat(64));
    let wrong = wrong.to_str().unwrap();
    let parts = [cluster.manager_address(), "cluster key", "--key"];
    cluster.refused(&["status", "--key", wrong], &parts);
    cluster.refused(&["volume", "delete", "disk", "--key", wrong], &parts);
    let export = [
        "export", "nbd", "disk", "--socket", "w.sock", "--key", wrong,
    ];
    check_no_start(&cluster, &export, &parts);
    let pool = cluster.dir().join("stranger.pool");
    let pool = pool.to_str().unwrap();
    cluster.ok(&["pool", "create", pool, "--size", "16M"]);
    let brick = ["brick", "--pool", pool, "--key", wrong];
    let stranger = cluster.try_daemon("stranger", &brick, 1).unwrap();
    until("the stranger hears that its key is wrong", || {
        stranger.log().contains("does not accept the cluster key")
    });
    let status = cluster.json(&["status"]);
    assert_eq!(status["status"]["bricks"], 2, "{status}");
    stranger.stop();

    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(wrong, std::fs::Permissions::from_mode(0o644)).unwrap();
    cluster.refused(&["status", "--key", wrong], &[wrong, "chmod 600"]);
    cluster.refused(&["status", "--key", "/nowhere/key"], &["/nowhere/key"]);
    cluster.refused(&["status", "--manager", "no url"], &["no url"]);
}

#[test]
fn older_client_is_fenced_and_logs_it() {
    let cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("disk", "8M", &[]);
    let older = cluster.export(&["disk"], "tcp");
    older.io(&["write -P 1 0 1M", "flush"]);
    let newer = cluster.export(&["disk"], "map");
    newer.io(&["read -P 1 0 1M", "write -P 2 0 1M", "flush"]);
    for command in ["write -P 9 0 1M", "write -f -P 9 4M 4k"] {
        let refused = program::run("qemu-io", &["-f", "raw", "-c", command, &older.uri]);
        let text = format!("{refused:?}");
        assert!(
            text.contains("failed") || !refused.status.success(),
            "{text}"
        );
    }
    newer.io(&["read -P 2 0 1M", "read -P 0 4M 4k"]);
    until("it says why", || {
        let log = older.daemon.log();
        log.contains("fenced") || log.contains("another client")
    });
    drop(older);
    // The end of this client does not detach the volume from the client that holds it.
    newer.io(&["read -P 2 0 1M", "write -P 3 0 1M", "flush"]);
    newer.stop();
    cluster.check_identical("disk");
}

#[test]
fn full_pool_reports_no_space_and_accepts_deletes() {
    let cluster = Cluster::with_pools(Pools::Memory, &[16, 16]);
    cluster.create("large", "24M", &[]);
    cluster.create("small", "4M", &[]);
    let export = cluster.export(&["large"], "auto");
    export.io(&["write -P 1 0 8M"]);
    let full = program::run(
        "qemu-io",
        &["-f", "raw", "-c", "write -P 2 8M 16M", &export.uri],
    );
    assert!(
        format!("{full:?}").contains("No space left on device"),
        "{full:?}"
    );
    // Acknowledged data is readable, and it can be overwritten and discarded.
    export.io(&[
        "read -P 1 0 8M",
        "discard 0 24M",
        "flush",
        "read -P 0 0 24M",
    ]);
    export.io(&["write -P 3 16M 8M", "read -P 3 16M 8M"]);
    let full = program::run(
        "qemu-io",
        &["-f", "raw", "-c", "write -P 2 0 16M", &export.uri],
    );
    assert!(
        format!("{full:?}").contains("No space left on device"),
        "{full:?}"
    );
    export.io(&["read -P 3 16M 8M"]);
    export.stop();
    cluster.check_identical("large");
    cluster.ok(&["volume", "delete", "large"]);
    let export = cluster.export(&["small"], "auto");
    export.io(&["write -P 4 0 4M", "flush", "read -P 4 0 4M"]);
    export.stop();
    cluster.check_identical("small");
}

/// Stops the loops also when the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

trait RawSocket: Read + Write + Send {}
impl<T: Read + Write + Send> RawSocket for T {}

fn connect_tcp(address: &str) -> Option<Box<dyn RawSocket>> {
    let stream = TcpStream::connect(address).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    stream
        .set_write_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    Some(Box::new(stream))
}

fn connect_unix(path: &Path) -> Option<Box<dyn RawSocket>> {
    let stream = UnixStream::connect(path).ok()?;
    stream
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    stream
        .set_write_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    Some(Box::new(stream))
}

/// Random bytes, half messages and oversized messages.
fn garbage() -> Vec<Vec<u8>> {
    let noise = (0..200_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8);
    let noise: Vec<u8> = noise.collect();
    let option = |len: u32| {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        bytes.extend(b"IHAVEOPT");
        bytes.extend(7u32.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes
    };
    let http = |head: &str| format!("{head}\r\nHost: x\r\n").into_bytes();
    let mut hello = b"PMHI\x00\xff\x01\x02\x00".to_vec();
    hello.resize(64, 0);
    vec![
        noise.clone(),
        noise[77..99].to_vec(),
        vec![0; 70_000],
        vec![0xff; 70_000],
        b"\r\n\r\n".to_vec(),
        // NBD: an option of 4 GiB, half an option, and a transmission phase without an option.
        option(u32::MAX),
        [option(4000), vec![b'x'; 10]].concat(),
        [option(8), vec![0; 8], noise[..500].to_vec()].concat(),
        // HTTP: half a head, an endless head, and a body with a huge declared length.
        http("GET /api/v1/status HTTP/1.1"),
        [http("GET / HTTP/1.1"), vec![b'h'; 100_000]].concat(),
        http("POST /api/v1/volumes HTTP/1.1\r\nContent-Length: 99999999999999\r\n"),
        [
            http("PUT /api/v1/bricks/%00%ff HTTP/1.1\r\nContent-Length: 5\r\n"),
            b"\r\n{{{{{".to_vec(),
        ]
        .concat(),
        // Fabric: a hello and a half, and an invalid proof.
        hello[..33].to_vec(),
        [&hello[..], &noise[..32]].concat(),
        [b"PMHI\x09\x01\x07\x09".to_vec(), noise[..200].to_vec()].concat(),
        [b"PMMP".to_vec(), noise[..200].to_vec()].concat(),
    ]
}

/// Sends each of these messages to a server, then opens as many silent connections as the limit for
/// unauthenticated connections allows. Returns the silent connections.
fn send_garbage(connect: impl Fn() -> Option<Box<dyn RawSocket>>) -> Vec<Box<dyn RawSocket>> {
    for bytes in garbage() {
        let Some(mut stream) = connect() else {
            continue;
        };
        // The server may hang up before it has read everything.
        let _ = stream.write_all(&bytes);
        let _ = stream.read(&mut [0; 4096]);
    }
    (0..80).filter_map(|_| connect()).collect()
}

#[test]
fn garbage_on_every_socket_is_harmless() {
    let mut cluster = Cluster::new(Pools::Memory, 2);
    cluster.create("tcp", "16M", &[]);
    cluster.create("map", "16M", &[]);
    let exports = [
        cluster.export(&["tcp"], "tcp"),
        cluster.export(&["map"], "map"),
    ];
    let is_over = AtomicBool::new(false);
    let socket = |export: &Export| export.uri.split_once("?socket=").unwrap().1.to_owned();
    let silent = std::thread::scope(|scope| {
        let over = StopOnDrop(&is_over);
        let workers: Vec<_> = exports
            .iter()
            .map(|export| {
                scope.spawn(|| {
                    let mut rounds = 0;
                    while !is_over.load(Ordering::Relaxed) || rounds < 3 {
                        let pattern = rounds % 250 + 1;
                        let (write, read) = (
                            format!("write -P {pattern} 0 4M"),
                            format!("read -P {pattern} 0 4M"),
                        );
                        export.io(&[&write, &read, "write -P 7 8M 1M", "flush"]);
                        rounds += 1;
                    }
                })
            })
            .collect();
        let strangers: Vec<_> = [0, 1]
            .into_iter()
            .flat_map(|n| {
                let (tcp, map, nbd) = (
                    cluster.brick_address(n),
                    cluster.brick_socket(n),
                    socket(&exports[n]),
                );
                [
                    scope.spawn(move || send_garbage(|| connect_tcp(&tcp))),
                    scope.spawn(move || send_garbage(|| connect_unix(&map))),
                    scope.spawn(move || send_garbage(|| connect_unix(Path::new(&nbd)))),
                ]
            })
            .collect();
        let manager = cluster.manager_address();
        let manager = scope.spawn(move || send_garbage(|| connect_tcp(manager)));
        let mut silent: Vec<_> = strangers
            .into_iter()
            .flat_map(|it| it.join().unwrap())
            .collect();
        silent.extend(manager.join().unwrap());
        // Silent connections block other clients for one handshake time-out at most.
        until("a volume can be made", || {
            let create = ["volume", "create", "new", "--size", "8M"];
            cluster.run(&create).status.success()
        });
        cluster
            .export(&["new"], "tcp")
            .io(&["write -P 1 0 1M", "read -P 1 0 1M"]);
        drop(over);
        workers
            .into_iter()
            .for_each(|worker| worker.join().unwrap());
        silent
    });
    drop(silent);
    cluster.await_bricks(2);
    let mut logs: Vec<String> = exports.iter().map(|export| export.daemon.log()).collect();
    logs.extend([
        cluster.manager().log(),
        cluster.brick(0).log(),
        cluster.brick(1).log(),
    ]);
    assert!(!logs.iter().any(|log| log.contains("panicked")), "{logs:?}");
    exports.into_iter().for_each(Export::stop);
    ["tcp", "map", "new"]
        .iter()
        .for_each(|name| cluster.check_identical(name));
    (0..2).for_each(|n| cluster.stop_brick(n));
    cluster.stop_manager();
}
