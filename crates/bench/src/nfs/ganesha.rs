//! nfs-ganesha with its VFS module on an ext4 of its own in a loop-mounted image, as a peer.
//!
//! Invariants: the server runs in a process and mount namespace of its own, so that rpcbind and its sockets end with it; the
//! image, its mount and the server are gone when the value is dropped. It serves NFSv3 on loopback, without NLM and RQUOTA.
//!
//! Ganesha 4.3 ends if it cannot register with rpcbind. So rpcbind runs in a network namespace without any interface, and
//! its socket lies in a `/run` of the mount namespace.

use super::setup::NfsTarget;
use crate::error::BenchError;
use crate::process::{ChildProcess, command_killed_with_thread, require_program};
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Limit of the start.
const START_LIMIT: Duration = Duration::from_secs(30);
const START_POLL: Duration = Duration::from_millis(50);
const MODULES: &str = "/usr/lib/x86_64-linux-gnu/ganesha";

/// Mounts the namespace's `/run`, starts rpcbind, and becomes the server. `$1` is the directory.
const START_SCRIPT: &str = r#"
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir -p /run/rpcbind
unshare --net rpcbind -f -w &
tries=0
while [ ! -S /run/rpcbind.sock ]; do
    tries=$((tries + 1))
    [ $tries -lt 200 ] || { echo "rpcbind did not start" >&2; exit 1; }
    sleep 0.05
done
exec ganesha.nfsd -F -f "$1/ganesha.conf" -L "$1/ganesha.log" -p "$1/ganesha.pid"
"#;

/// An ext4 in an image, mounted by a loop device, which the kernel frees at the unmount.
struct LoopMount {
    image: PathBuf,
    dir: PathBuf,
}

impl LoopMount {
    fn make(image: PathBuf, dir: PathBuf, size_bytes: u64) -> Result<LoopMount, BenchError> {
        let cannot = |path: &Path| BenchError::system(format!("make {}", path.display()));
        let file = fs::File::create_new(&image).map_err(cannot(&image))?;
        // The value removes the image from now on.
        let mount = LoopMount { image, dir };
        file.set_len(size_bytes).map_err(cannot(&mount.image))?;
        fs::create_dir(&mount.dir).map_err(cannot(&mount.dir))?;
        // Its tables are written at once, and not in the background of a measurement.
        let options = "lazy_itable_init=0,lazy_journal_init=0";
        let mut made = Command::new("mkfs.ext4");
        made.args(["-q", "-F", "-E", options]).arg(&mount.image);
        run("mkfs.ext4", &mut made)?;
        let mut mounted = Command::new("mount");
        mounted.args(["-o", "loop"]).arg(&mount.image);
        run("mount", mounted.arg(&mount.dir))?;
        Ok(mount)
    }
}

impl Drop for LoopMount {
    fn drop(&mut self) {
        // It fails only if the mount failed.
        let _ = rustix::mount::unmount(&self.dir, rustix::mount::UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.dir);
        let _ = fs::remove_file(&self.image);
    }
}

fn run(program: &str, command: &mut Command) -> Result<(), BenchError> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(BenchError::system(format!("start {program}")))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(BenchError::Program {
            program: program.to_owned(),
            cause: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        }),
    }
}

/// The place and size of a peer.
#[derive(Clone, Debug)]
pub struct GaneshaOptions {
    /// Its name in reports.
    pub name: String,
    /// The medium in reports.
    pub class: String,
    /// An existing directory for the mount point, the configuration and the log.
    pub dir: PathBuf,
    /// An existing directory for the image.
    pub image_dir: PathBuf,
    /// Bytes of the image.
    pub size_bytes: u64,
}

/// A running server.
pub struct GaneshaServer {
    /// The address and the export.
    pub target: NfsTarget,
    // In drop order.
    child: ChildProcess,
    _mount: LoopMount,
}

impl GaneshaServer {
    /// Makes the file system and starts the server.
    ///
    /// # Errors
    /// If a program is missing, this process is not root, or the server does not start.
    pub fn start(options: &GaneshaOptions) -> Result<GaneshaServer, BenchError> {
        check_programs()?;
        let dir = options.dir.join(format!("{}-config", options.name));
        let cannot = |path: &Path| BenchError::system(format!("make {}", path.display()));
        fs::create_dir(&dir).map_err(cannot(&dir))?;
        let image = options.image_dir.join(format!("{}.ext4", options.name));
        let mount_dir = options.dir.join(format!("{}-files", options.name));
        let mount = LoopMount::make(image, mount_dir, options.size_bytes)?;
        let (server, mount_server) = free_addresses()?;
        let config = dir.join("ganesha.conf");
        let text = configuration(&mount.dir, server.port(), mount_server.port());
        fs::write(&config, text).map_err(cannot(&config))?;
        let mut command = command_killed_with_thread("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "--"]);
        command
            .args(["sh", "-c", START_SCRIPT, "ganesha"])
            .arg(&dir);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = ChildProcess::start("ganesha.nfsd", command)?;
        let mut server = GaneshaServer {
            target: NfsTarget {
                name: options.name.clone(),
                class: options.class.clone(),
                server,
                mount_server,
                export: mount.dir.to_string_lossy().into_owned(),
                pids: Vec::new(),
            },
            child,
            _mount: mount,
        };
        server.await_start(&dir.join("ganesha.log"))?;
        server.target.pids = child_pids(server.child.pid());
        Ok(server)
    }

    /// Its parent process, which ends the server when it is killed.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    fn await_start(&mut self, log: &Path) -> Result<(), BenchError> {
        let until = Instant::now() + START_LIMIT;
        let is_open = |address| TcpStream::connect_timeout(&address, START_POLL).is_ok();
        while !(is_open(self.target.server) && is_open(self.target.mount_server)) {
            if self.child.wait_for_end(START_POLL)? || Instant::now() > until {
                let text = fs::read_to_string(log).unwrap_or_default();
                let last = text.lines().next_back().unwrap_or("its log is empty");
                let what = format!("it does not serve; its last line is: {last}");
                return Err(self.child.program_error(&what));
            }
        }
        Ok(())
    }
}

fn check_programs() -> Result<(), BenchError> {
    require_program("mkfs.ext4", "e2fsprogs").or_else(|error| match error {
        // It knows no --version, but it exists.
        BenchError::Program { .. } => Ok(()),
        missing => Err(missing),
    })?;
    for (program, package) in [
        ("/usr/bin/ganesha.nfsd", "nfs-ganesha"),
        ("/usr/sbin/rpcbind", "rpcbind"),
        (
            "/usr/lib/x86_64-linux-gnu/ganesha/libfsalvfs.so",
            "nfs-ganesha-vfs",
        ),
    ] {
        if !Path::new(program).exists() {
            let program = program.to_owned();
            return Err(BenchError::Missing { program, package });
        }
    }
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(BenchError::Option(
            "nfs-ganesha needs file handles, a mount and namespaces; run the benchmark as root"
                .into(),
        )),
    }
}

/// Two free addresses of loopback. The server binds them a moment later.
fn free_addresses() -> Result<(SocketAddr, SocketAddr), BenchError> {
    let free = || TcpListener::bind("127.0.0.1:0");
    let pair = free().and_then(|one| Ok((one, free()?)));
    let pair = pair.and_then(|(one, other)| Ok((one.local_addr()?, other.local_addr()?)));
    pair.map_err(BenchError::system("find free ports"))
}

fn configuration(export: &Path, port: u16, mount_port: u16) -> String {
    let export = export.display();
    format!(
        "NFS_CORE_PARAM {{
    Protocols = 3;
    NFS_Port = {port};
    MNT_Port = {mount_port};
    Bind_addr = 127.0.0.1;
    Enable_NLM = false;
    Enable_RQUOTA = false;
    Enable_UDP = false;
    Plugins_Dir = \"{MODULES}\";
}}
EXPORT {{
    Export_Id = 1;
    Path = \"{export}\";
    Pseudo = /bench;
    Protocols = 3;
    Transports = TCP;
    Access_Type = RW;
    Squash = No_Root_Squash;
    SecType = sys;
    FSAL {{ Name = VFS; }}
}}
LOG {{ Default_Log_Level = EVENT; }}
"
    )
}

/// The processes below `unshare`: the server, and its rpcbind.
fn child_pids(pid: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let text = text.unwrap_or_default();
    text.split_whitespace()
        .filter_map(|it| it.parse().ok())
        .collect()
}
