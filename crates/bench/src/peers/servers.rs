//! The other NBD servers. Each is started in a directory of its own, with its sockets there. It
//! ends when it is dropped, or when the thread that started it ends. So start servers from a thread
//! that lives as long as the comparison.

use super::NbdPeer;
use crate::error::BenchError;
use crate::process::{ChildProcess, command_killed_with_thread, require_program};
use std::fs::File;
use std::io::Read as _;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest time of a server until its greeting.
const READY_MAX: Duration = Duration::from_secs(10);
/// Pause between two attempts to connect. A server that dies ends the attempts.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// The first bytes of an NBD server (the protocol's "newstyle").
const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";

/// Servers of one peer. They end in the order of the fields.
pub(crate) struct PeerServers {
    children: Vec<ChildProcess>,
    dir: TempDir,
}

impl PeerServers {
    fn new() -> Result<PeerServers, BenchError> {
        PeerServers::new_in(&std::env::temp_dir())
    }

    /// `parent` is the directory of the directory for sockets.
    fn new_in(parent: &Path) -> Result<PeerServers, BenchError> {
        let dir = tempfile::Builder::new()
            .prefix("pagemesh-peer-")
            .tempdir_in(parent);
        Ok(PeerServers {
            children: Vec::new(),
            dir: dir.map_err(BenchError::system("make a directory for sockets"))?,
        })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("nbd.sock")
    }

    fn start(&mut self, program: &str, command: Command) -> Result<(), BenchError> {
        self.children.push(ChildProcess::start(program, command)?);
        Ok(())
    }

    /// Waits for the last server's greeting on the socket.
    fn wait_for_last(&mut self, socket: &Path) -> Result<(), BenchError> {
        match self.children.last_mut() {
            Some(child) => wait_for_greeting(child, socket),
            None => Ok(()),
        }
    }

    /// The last server, once it greets.
    fn into_peer(mut self, name: &str, export: &str, class: &str) -> Result<NbdPeer, BenchError> {
        let socket = self.socket();
        self.wait_for_last(&socket)?;
        Ok(NbdPeer {
            name: name.to_owned(),
            class: class.to_owned(),
            uri: format!("nbd+unix:///{export}?socket={}", socket.display()),
            pids: self.children.iter().map(ChildProcess::pid).collect(),
            _servers: Some(self),
        })
    }
}

fn wait_for_greeting(child: &mut ChildProcess, socket: &Path) -> Result<(), BenchError> {
    let give_up = Instant::now() + READY_MAX;
    loop {
        let cause = match read_greeting(socket) {
            Ok(()) => return Ok(()),
            Err(cause) => cause,
        };
        if child.wait_for_end(CONNECT_RETRY_INTERVAL)? {
            return Err(child.program_error("it ended before it served"));
        }
        if Instant::now() >= give_up {
            return Err(
                child.program_error(&format!("no greeting at {}: {cause}", socket.display()))
            );
        }
    }
}

fn read_greeting(socket: &Path) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(READY_MAX))?;
    let mut bytes = [0; GREETING.len()];
    stream.read_exact(&mut bytes)?;
    match &bytes == GREETING {
        true => Ok(()),
        false => Err(std::io::Error::other("this is no NBD greeting")),
    }
}

impl NbdPeer {
    /// `nbdkit memory`: neither mirrored nor persistent. Its class is `none`.
    ///
    /// # Errors
    /// If it is not installed or does not start.
    pub fn nbdkit_memory(size_bytes: u64) -> Result<NbdPeer, BenchError> {
        require_program("nbdkit", "nbdkit")?;
        let mut servers = PeerServers::new()?;
        let mut command = command_killed_with_thread("nbdkit");
        command
            .args(["--foreground", "-U"])
            .arg(servers.socket())
            .args(["memory", &size_bytes.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        servers.start("nbdkit", command)?;
        servers.into_peer("nbdkit memory", "", "none")
    }

    /// `qemu-nbd` of a raw file in `dir`, which should be on tmpfs. Its class is `process`: the
    /// file's pages would outlive the server.
    ///
    /// # Errors
    /// If it is not installed or does not start, or the file cannot be created.
    pub fn qemu_nbd(dir: &Path, size_bytes: u64) -> Result<NbdPeer, BenchError> {
        require_program("qemu-nbd", "qemu-utils")?;
        let mut servers = PeerServers::new()?;
        let file = unnamed_file(dir, size_bytes)?;
        let mut command = command_killed_with_thread("qemu-nbd");
        command
            .args(["--persistent", "--format=raw", "--shared=0", "--socket"])
            .arg(servers.socket())
            .arg("/dev/stdin")
            .stdin(OwnedFd::from(file))
            .stdout(Stdio::null());
        servers.start("qemu-nbd", command)?;
        servers.into_peer("qemu-nbd", "", "process")
    }

    /// `qemu-storage-daemon` with a quorum of two `qemu-nbd --cache=none` of files in `dir`, over
    /// Unix sockets in `sockets`. It writes to both and reads from one. Its class is `none`.
    ///
    /// # Errors
    /// If a program is not installed or does not start, or a file cannot be created.
    pub fn qemu_quorum_on_disk(
        dir: &Path,
        sockets: &Path,
        size_bytes: u64,
    ) -> Result<NbdPeer, BenchError> {
        require_program("qemu-nbd", "qemu-utils")?;
        require_program("qemu-storage-daemon", "qemu-system-common")?;
        let mut servers = PeerServers::new_in(sockets)?;
        let mut daemon = command_killed_with_thread("qemu-storage-daemon");
        for node in ["left", "right"] {
            let socket = servers.dir.path().join(node);
            let file = unnamed_file(dir, size_bytes)?;
            let mut command = command_killed_with_thread("qemu-nbd");
            command
                .args(["--persistent", "--format=raw", "--shared=0"])
                .args(["--cache=none", "--aio=native", "--socket"])
                .arg(&socket)
                .arg("/dev/stdin")
                .stdin(OwnedFd::from(file))
                .stdout(Stdio::null());
            servers.start("qemu-nbd", command)?;
            servers.wait_for_last(&socket)?;
            daemon.arg("--blockdev").arg(format!(
                "driver=nbd,node-name={node},server.type=unix,server.path={}",
                socket.display()
            ));
        }
        let quorum = "driver=quorum,node-name=quorum,vote-threshold=2,read-pattern=fifo,\
                      children.0=left,children.1=right";
        serve_quorum(&mut daemon, quorum, &servers.socket());
        servers.start("qemu-storage-daemon", daemon)?;
        servers.into_peer("QEMU quorum", "quorum", "none")
    }

    /// `qemu-storage-daemon` with a quorum of two: it writes to two `nbdkit memory` over TCP on the
    /// loopback, and reads and compares both, as a mirror on the client's side. Its class is
    /// `none`.
    ///
    /// # Errors
    /// If a program is not installed or does not start.
    pub fn qemu_quorum(size_bytes: u64) -> Result<NbdPeer, BenchError> {
        require_program("nbdkit", "nbdkit")?;
        require_program("qemu-storage-daemon", "qemu-system-common")?;
        let mut servers = PeerServers::new()?;
        let mut daemon = command_killed_with_thread("qemu-storage-daemon");
        for node in ["left", "right"] {
            let port = start_nbdkit_tcp(&mut servers, size_bytes)?;
            daemon.arg("--blockdev").arg(format!(
                "driver=nbd,node-name={node},server.type=inet,server.host=127.0.0.1,server.port={port}"
            ));
        }
        let quorum =
            "driver=quorum,node-name=quorum,vote-threshold=2,children.0=left,children.1=right";
        serve_quorum(&mut daemon, quorum, &servers.socket());
        servers.start("qemu-storage-daemon", daemon)?;
        servers.into_peer("qemu quorum (TCP)", "quorum", "none")
    }
}

/// Completes the command of a `qemu-storage-daemon` that serves a quorum.
fn serve_quorum(daemon: &mut Command, quorum: &str, socket: &Path) {
    let server = format!(
        "addr.type=unix,addr.path={},max-connections=0",
        socket.display()
    );
    daemon
        .args(["--blockdev", quorum, "--nbd-server", &server])
        .args([
            "--export",
            "type=nbd,id=export,node-name=quorum,name=quorum,writable=on",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
}

/// A file without a name, so that none is left behind. Servers open it by its path under /proc.
fn unnamed_file(dir: &Path, size_bytes: u64) -> Result<File, BenchError> {
    let cannot = || BenchError::system(format!("make a file in {}", dir.display()));
    let file = tempfile::tempfile_in(dir).map_err(cannot())?;
    file.set_len(size_bytes).map_err(cannot())?;
    Ok(file)
}

/// Starts `nbdkit memory` on a listening socket of this process, passed as descriptor 3 (systemd's
/// socket activation). So the port is known, and clients may connect at once. The shell only moves
/// the descriptor and sets the process id in the environment.
fn start_nbdkit_tcp(servers: &mut PeerServers, size_bytes: u64) -> Result<u16, BenchError> {
    let cannot = || BenchError::system("listen on a port of the loopback");
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(cannot())?;
    let port = listener.local_addr().map_err(cannot())?.port();
    let activate = "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\" 3<&0 0</dev/null";
    let mut command = command_killed_with_thread("sh");
    command
        .args(["-c", activate, "sh", "nbdkit", "--foreground", "memory"])
        .arg(size_bytes.to_string())
        .stdin(OwnedFd::from(listener))
        .stdout(Stdio::null());
    servers.start("nbdkit", command)?;
    Ok(port)
}
