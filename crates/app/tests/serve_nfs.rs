//! File systems of a real cluster over NFS, beside a mount of the same process: `serve nfs` and the tools of libnfs. Tests with a
//! mount need root and /dev/fuse.

use crate::support;
use pagemesh_nfs_client::nfs3::{Create, CreateHow, SetAttributes, StableHow, Write};
use pagemesh_nfs_client::nfs4::{Lock, Nfs4Client, Nfs4Result, Open, OpenFile, status};
use pagemesh_nfs_client::{Client, Credential};
use rustix::mount::UnmountFlags;
use std::fs;
use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::daemon::Daemon;
use support::{Cluster, FENCED, MIB, Pools, mounted, own_ip, program, until};

/// A server of the file system `files`.
struct NfsServer {
    daemon: Daemon,
    /// As `127.0.0.1:2049`.
    address: String,
    mount: Option<PathBuf>,
}

impl NfsServer {
    /// Starts a server at an address, as `127.0.0.1:0`, and perhaps a mount.
    fn start(
        cluster: &Cluster,
        listen: &str,
        mount: Option<&str>,
        options: &[&str],
    ) -> Result<NfsServer, std::process::Output> {
        let mount = mount.map(|at| cluster.dir().join(at));
        let point = mount.as_ref().map(|dir| {
            fs::create_dir_all(dir).unwrap();
            format!("files={}", dir.display())
        });
        let head = [
            "serve", "nfs", "files", "--listen", listen, "--squash", "none",
        ];
        let mut args = [&head, options].concat();
        if let Some(point) = &point {
            args.extend(["--mount", point]);
        }
        let ready = 1 + usize::from(point.is_some());
        let daemon = cluster.try_daemon("serve-nfs", &args, ready)?;
        let url = daemon.ready[0].strip_prefix("ready nfs://").unwrap();
        let address = url.strip_suffix("/files").unwrap().to_owned();
        Ok(NfsServer {
            daemon,
            address,
            mount,
        })
    }

    fn url(&self, path: &str) -> String {
        let (host, port) = self.address.rsplit_once(':').unwrap();
        format!("nfs://{host}/files/{path}?nfsport={port}&mountport={port}&version=3")
    }

    fn cat(&self, path: &str) -> String {
        program::ok("nfs-cat", &[&self.url(path)])
    }

    /// Names in a directory, sorted.
    fn list(&self, path: &str) -> Vec<String> {
        let lines = program::ok("nfs-ls", &[&self.url(path)]);
        let last = |line: &str| line.rsplit(' ').next().unwrap().to_owned();
        let mut names: Vec<String> = lines.lines().map(last).collect();
        names.sort();
        names
    }

    fn put(&self, from: &Path, path: &str) {
        program::ok("nfs-cp", &[from.to_str().unwrap(), &self.url(path)]);
    }

    /// Truncates a file and writes it again, as clients do for O_TRUNC. `nfs-cp` of libnfs creates files only.
    fn replace(&self, name: &str, bytes: &[u8]) {
        let address = self.address.parse().unwrap();
        let limit = Duration::from_secs(60);
        let mut client = Client::connect(address, Credential::sys(0, 0), limit).unwrap();
        let root = client.mount(b"/files").unwrap();
        let create = Create {
            directory: &root,
            name: name.as_bytes(),
            how: CreateHow::Unchecked(SetAttributes::size(0)),
        };
        let created = client.call(&create).unwrap().unwrap();
        let write = Write {
            file: &created.handle.unwrap(),
            offset: 0,
            stable: StableHow::FileSync,
            data: bytes,
        };
        let written = client.call(&write).unwrap().unwrap();
        assert_eq!(written.count as usize, bytes.len());
    }

    fn path(&self, name: &str) -> PathBuf {
        self.mount.as_ref().unwrap().join(name)
    }

    /// Ends it by a signal.
    fn stop(mut self) {
        self.daemon.signal("TERM");
        assert!(self.daemon.await_end().success(), "{}", self.daemon.log());
    }
}

impl Drop for NfsServer {
    fn drop(&mut self) {
        if let Some(dir) = &self.mount {
            // There is no mount if it has ended normally.
            let _ = rustix::mount::unmount(dir, UnmountFlags::FORCE | UnmountFlags::DETACH);
        }
    }
}

fn cluster() -> Cluster {
    let cluster = Cluster::with_pools(Pools::Memory, &[128, 128]);
    cluster.ok(&["fs", "create", "files", "--size", "64M"]);
    cluster
}

fn any_port() -> String {
    format!("{}:0", own_ip())
}

/// A local file with bytes that follow from its length.
fn local_file(cluster: &Cluster, name: &str, len: usize) -> (PathBuf, Vec<u8>) {
    let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 4096) as u8).collect();
    let path = cluster.dir().join(name);
    fs::write(&path, &bytes).unwrap();
    (path, bytes)
}

#[test]
fn mount_and_nfs_clients_share_files() {
    if !mounted::may_mount() {
        return;
    }
    let cluster = cluster();
    let server = NfsServer::start(&cluster, &any_port(), Some("mnt"), &[]).unwrap();
    let (local, bytes) = local_file(&cluster, "local", 3_000_001);
    server.put(&local, "copied");
    assert_eq!(fs::read(server.path("copied")).unwrap(), bytes);
    fs::write(server.path("written"), "by a program").unwrap();
    assert_eq!(server.cat("written"), "by a program");
    fs::create_dir(server.path("dir")).unwrap();
    assert_eq!(server.list(""), ["copied", "dir", "written"]);
    // The pages of the mount are cached now; the copy of fewer bytes truncates the file.
    let (_, bytes) = local_file(&cluster, "short", 5001);
    server.replace("copied", &bytes);
    assert_eq!(fs::read(server.path("copied")).unwrap(), bytes);
    fs::remove_file(server.path("written")).unwrap();
    assert_eq!(server.list(""), ["copied", "dir"]);
    server.stop();
    // The next mount does not wait, and has all.
    let mount = mounted::TestMount::new(&cluster, "files", "auto");
    assert_eq!(fs::read(mount.path("copied")).unwrap(), bytes);
    mount.stop(&cluster);
}

#[test]
fn unmount_leaves_server_and_its_claim() {
    if !mounted::may_mount() {
        return;
    }
    let cluster = cluster();
    let server = NfsServer::start(&cluster, &any_port(), Some("mnt"), &[]).unwrap();
    fs::write(server.path("file"), "kept").unwrap();
    let dir = server.mount.clone().unwrap();
    mounted::unmount(&cluster, &dir);
    assert!(!server.path("file").exists());
    assert_eq!(server.cat("file"), "kept");
    // The server reports that it serves, so another mount is refused.
    let other = cluster.dir().join("other");
    fs::create_dir(&other).unwrap();
    let refused = ["mount", "files", other.to_str().unwrap()];
    cluster.refused(&refused, &["is mounted by", "--force"]);
    let (local, _) = local_file(&cluster, "local", 10);
    server.put(&local, "more");
    assert_eq!(server.list(""), ["file", "more"]);
    server.stop();
}

#[test]
fn snapshots_are_read_over_nfs() {
    let cluster = cluster();
    let shown = ["--show-snapshots"];
    let server = NfsServer::start(&cluster, &any_port(), None, &shown).unwrap();
    let (old, _) = local_file(&cluster, "old", 4000);
    let (new, _) = local_file(&cluster, "new", 70);
    server.put(&old, "file");
    cluster.ok(&["snapshot", "create", "files@one"]);
    server.replace("file", &fs::read(&new).unwrap());
    server.put(&new, "later");
    let check = |server: &NfsServer| {
        let copy = cluster.dir().join("copy");
        let url = server.url(".snapshot/one/file");
        program::ok("nfs-cp", &[&url, copy.to_str().unwrap()]);
        assert_eq!(fs::read(&copy).unwrap(), fs::read(&old).unwrap());
        fs::remove_file(&copy).unwrap();
        assert_eq!(server.list(""), [".snapshot", "file", "later"]);
        assert_eq!(server.list(".snapshot"), ["one"]);
        assert_eq!(server.list(".snapshot/one"), ["file"]);
    };
    check(&server);
    let refused = program::run(
        "nfs-cp",
        &[new.to_str().unwrap(), &server.url(".snapshot/one/x")],
    );
    assert!(!refused.status.success());
    let address = server.address.clone();
    server.stop();
    let server = NfsServer::start(&cluster, &address, None, &shown).unwrap();
    check(&server);
    cluster.ok(&["snapshot", "delete", "files@one", "--yes"]);
    assert_eq!(server.list(".snapshot"), [""; 0]);
    server.stop();
}

/// The client reads one open file over both servers: its file handle stays good.
#[test]
fn client_goes_on_after_kill_of_its_server() {
    let cluster = cluster();
    let server = NfsServer::start(&cluster, &any_port(), None, &[]).unwrap();
    let (local, bytes) = local_file(&cluster, "local", 20 * MIB as usize);
    server.put(&local, "file");
    let mut client = program::limited("nfs-cat")
        .arg(server.url("file"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The client waits for its reader after few more bytes.
    let mut stdout = client.stdout.take().unwrap();
    let mut read = vec![0; MIB as usize];
    stdout.read_exact(&mut read).unwrap();
    let NfsServer {
        address, daemon, ..
    } = &server;
    let address = address.clone();
    daemon.signal("KILL");
    drop(server);
    let server = NfsServer::start(&cluster, &address, None, &[]).unwrap();
    stdout.read_to_end(&mut read).unwrap();
    assert!(client.wait().unwrap().success());
    assert_eq!(read.len(), bytes.len());
    assert!(read == bytes, "the bytes differ");
    server.stop();
}

#[test]
fn server_ends_after_forced_takeover() {
    let cluster = cluster();
    let mut first = NfsServer::start(&cluster, &any_port(), None, &[]).unwrap();
    let (local, _) = local_file(&cluster, "local", 100);
    first.put(&local, "file");
    let mut idle = TcpStream::connect(&first.address).unwrap();
    let refused = NfsServer::start(&cluster, &any_port(), None, &[]).map(|_| ());
    let said = String::from_utf8(refused.unwrap_err().stderr).unwrap();
    assert!(said.contains("--force"), "{said}");
    let second = NfsServer::start(&cluster, &any_port(), None, &["--force"]).unwrap();
    assert_eq!(first.daemon.await_end().code(), Some(FENCED));
    // The fenced server has said nothing more.
    idle.set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    assert!(matches!(idle.read(&mut [0; 4]), Ok(0) | Err(_)));
    assert_eq!(second.list(""), ["file"]);
    second.stop();
}

/// Makes a file in an export, as `/files`. Returns the reason if that fails.
fn make_in(address: &str, path: &str) -> Result<(), String> {
    let limit = Duration::from_secs(60);
    let address = address.parse().unwrap();
    let mut client = Client::connect(address, Credential::sys(0, 0), limit).unwrap();
    let root = client
        .mount(path.as_bytes())
        .map_err(|it| format!("{it:?}"))?;
    let create = Create {
        directory: &root,
        name: b"new",
        how: CreateHow::Unchecked(SetAttributes::size(0)),
    };
    let created = client.call(&create).map_err(|it| format!("{it:?}"))?;
    created.map(drop).map_err(|it| it.status.name().to_owned())
}

#[test]
fn server_ends_with_its_last_file_system() {
    let cluster = cluster();
    cluster.ok(&["fs", "create", "more", "--size", "32M"]);
    let any = any_port();
    let serve = |names: &[&str], options: &[&str]| {
        let head = ["--listen", &any, "--squash", "none", "--no-rpcbind"];
        let args = [&["serve", "nfs"][..], names, &head, options].concat();
        let daemon = cluster.try_daemon("serve-nfs", &args, names.len());
        let daemon = daemon.map_err(|it| String::from_utf8(it.stderr)).unwrap();
        let url = daemon.ready[0].strip_prefix("ready nfs://").unwrap();
        let address = url.split_once('/').unwrap().0.to_owned();
        (daemon, address)
    };
    let (mut first, address) = serve(&["files", "more"], &[]);
    assert_eq!(make_in(&address, "/more"), Ok(()));
    let (second, taken) = serve(&["more"], &["--force"]);
    assert_eq!(make_in(&taken, "/more"), Ok(()));
    // The first server notices within seconds, also without a call.
    until("the calls are refused", || {
        make_in(&address, "/more").is_err()
    });
    assert_eq!(make_in(&address, "/files"), Ok(()));
    let (third, _) = serve(&["files"], &["--force"]);
    assert_eq!(first.await_end().code(), Some(FENCED));
    for mut last in [second, third] {
        last.signal("TERM");
        assert!(last.await_end().success(), "{}", last.log());
    }
}

/// The manager behind an address of its own, which answers one request less: the first one for the details of `files` after an attach.
struct RestartingManager {
    address: String,
    is_attached: AtomicBool,
    has_dropped: AtomicBool,
}

impl RestartingManager {
    /// Serves until the end of the test's process.
    fn start(address: &str) -> (String, Arc<RestartingManager>) {
        let listener = TcpListener::bind(any_port()).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let manager = Arc::new(RestartingManager {
            address: address.to_owned(),
            is_attached: AtomicBool::new(false),
            has_dropped: AtomicBool::new(false),
        });
        let relayed = Arc::clone(&manager);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let manager = Arc::clone(&relayed);
                // A client that ends meanwhile is no error.
                std::thread::spawn(move || manager.relay(client?));
            }
        });
        (url, manager)
    }

    /// Relays one request of a connection.
    fn relay(&self, mut client: TcpStream) -> std::io::Result<()> {
        let mut request = Vec::new();
        let mut byte = [0];
        while !request.ends_with(b"\r\n\r\n") {
            client.read_exact(&mut byte)?;
            request.push(byte[0]);
        }
        let head = String::from_utf8_lossy(&request).to_lowercase();
        if head.starts_with("post /api/v1/volumes/files/attach ") {
            self.is_attached.store(true, Ordering::SeqCst);
        }
        let is_asked = head.starts_with("get /api/v1/volumes/files ");
        if is_asked
            && self.is_attached.load(Ordering::SeqCst)
            && !self.has_dropped.swap(true, Ordering::SeqCst)
        {
            return Ok(());
        }
        let len = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length:"));
        let mut body = vec![0; len.map_or(0, |len| len.trim().parse().unwrap())];
        client.read_exact(&mut body)?;
        request.truncate(request.len() - 2);
        request.extend(b"connection: close\r\n\r\n");
        request.extend(body);
        let mut manager = TcpStream::connect(&self.address)?;
        manager.write_all(&request)?;
        std::io::copy(&mut manager, &mut client)?;
        Ok(())
    }
}

#[test]
fn standby_outlasts_a_manager_that_restarts_at_its_takeover() {
    let cluster = cluster();
    let (url, manager) = RestartingManager::start(cluster.manager_address());
    let options = ["--standby", "--manager", &url];
    let server = NfsServer::start(&cluster, &any_port(), None, &options).unwrap();
    assert!(manager.has_dropped.load(Ordering::SeqCst));
    assert_eq!(make_in(&server.address, "/files"), Ok(()));
    server.stop();
}

/// A client of version 4.1 that may open files.
fn nfs4_client(address: &str, owner: &str) -> Nfs4Client {
    let address = address.parse().unwrap();
    let limit = Duration::from_secs(60);
    let owner = (owner.as_bytes(), [7; 8]);
    let mut client = Nfs4Client::connect(address, Credential::sys(0, 0), owner, limit).unwrap();
    client.reclaim_complete().unwrap();
    client
}

/// Opens a file of the export, and locks its first bytes.
fn lock_file(client: &mut Nfs4Client) -> Nfs4Result<OpenFile> {
    let root = client.export(b"files")?;
    let open = Open {
        creates: true,
        ..Open::shared(b"opener")
    };
    let file = client.open(&root, b"locked", open)?;
    let lock = Lock {
        owner: b"locker",
        offset: 0,
        length: 100,
        is_reclaim: false,
    };
    client.lock(&file, lock)?;
    Ok(file)
}

fn error_of<T>(result: Nfs4Result<T>) -> Option<u32> {
    result.err().and_then(|it| it.status())
}

#[test]
fn operator_expires_the_holder_of_a_lock() {
    let cluster = cluster();
    let metrics = ["--metrics", "127.0.0.1:0"];
    let server = NfsServer::start(&cluster, &any_port(), None, &metrics).unwrap();
    let mut holder = nfs4_client(&server.address, "Linux NFSv4.1 holder");
    let mut other = nfs4_client(&server.address, "other");
    let file = lock_file(&mut holder).unwrap();
    assert_eq!(error_of(lock_file(&mut other)), Some(status::DENIED));
    // The server reports each 10 s.
    until("the requests are in a report", || {
        let served = cluster.json(&["nfs", "list"]);
        let operations = served[0]["export"]["operations"].as_array();
        let mut operations = operations.into_iter().flatten();
        operations.any(|it| it["name"] == "COMPOUND" && it["calls"].as_u64() > Some(0))
    });
    let id = format!("{:016x}", holder.id());
    let listed = |name: &str| {
        let clients = cluster.json(&["nfs", "clients", "files"]);
        let clients = clients.as_array().unwrap().iter();
        let mut named = clients.filter(|it| it["name"] == name);
        named.next().cloned()
    };
    until("the holder is listed with its lock", || {
        listed("Linux NFSv4.1 holder").is_some_and(|it| {
            let state = (&it["client"], &it["opens"], &it["locks"], &it["lease"]);
            assert_eq!(it["minor_version"], 1);
            state == (&id.as_str().into(), &1.into(), &1.into(), &"active".into())
        })
    });
    assert!(cluster.ok(&["nfs", "clients"]).contains(&id));
    let unknown = ["nfs", "expire", "0123456789abcdef"];
    cluster.refused(&unknown, &["no NFS server has", "pagemesh nfs clients"]);
    let said = cluster.ok(&["nfs", "expire", &id]);
    assert!(said.contains("lost 1 opens and 1 locked ranges"), "{said}");
    let written = holder.write(&file, 0, b"too late");
    assert_eq!(error_of(written), Some(status::BADSESSION));
    lock_file(&mut other).unwrap();
    // The command waits for the report after the expiry.
    assert_eq!(listed("Linux NFSv4.1 holder"), None);
    cluster.refused(&["nfs", "expire", &id], &["no NFS server has"]);
    let page = support::scrape::page(&server.daemon.metrics_line());
    let value = |sample: &str| support::scrape::value(&page, &format!("pagemesh_nfs_{sample}"));
    let of_files = "{export=\"files\",procedure=\"compound\"}";
    assert!(value(&format!("calls_total{of_files}")) > 0);
    assert!(value(&format!("errors_total{of_files}")) > 0);
    assert!(value("calls_total{export=\"\",procedure=\"compound\"}") > 0);
    assert_eq!(value("clients{lease=\"active\"}"), 1);
    assert_eq!(value("removed_clients_total{reason=\"command\"}"), 1);
    assert_eq!(value("removed_clients_total{reason=\"lease\"}"), 0);
    assert_eq!((value("sessions"), value("opens")), (1, 1));
    assert_eq!(value("locked_ranges"), 1);
    assert!(value("session_reply_bytes{state=\"reserved\"}") > 0);
    server.stop();
}
