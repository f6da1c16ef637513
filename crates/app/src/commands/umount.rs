//! `pagemesh umount`: unmounts, and waits for the messages of the mount process about its end.
//!
//! Invariant: every wait here has a limit. A mount in other mount namespaces, and open files of a
//! detached mount, may last for ever.

use crate::commands::mount::mount_table::{self, find_mount_at, resolve_parent};
use crate::commands::mount::waiters::{
    MESSAGE_COMPLETE, MESSAGE_MOUNTED, MESSAGE_UNMOUNTED, address_name,
};
use anyhow::{Context, bail};
use clap::Args;
use pagemesh_base::mounts::MountEntry;
use pagemesh_base::peer::{PeerCredentials, connect_abstract, peer_credentials};
use rustix::net::SocketType;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Limit of the wait for the first message.
const MOUNTED_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of the wait for the second message. The kernel ends an unmounted file system within
/// milliseconds, unless another mount namespace has it.
const UNMOUNTED_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of the wait for the last message: longer than the time-outs of requests to unreachable
/// bricks and an unreachable manager.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(120);

/// Unmount a file system, and wait until its mount process has exited.
#[derive(Args)]
pub struct UmountArgs {
    /// Mount point.
    pub dir: PathBuf,
    /// Detach the mount at once, even with open files. The mount ends with the last open file;
    /// the command does not wait for that.
    #[arg(long)]
    pub lazy: bool,
    /// Unmount in all mount namespaces, even with open files. Later calls of processes on these
    /// files fail.
    #[arg(long, conflicts_with = "lazy")]
    pub force: bool,
}

/// Connects to the process of a mount. The process sends its first message at once, unless it is
/// slow or an older version. The process of another mount closes the connection without a message.
fn connect_process(known: &MountEntry) -> std::io::Result<MountProcess> {
    let socket = connect_abstract(SocketType::STREAM, &address_name(&known.device))?;
    let PeerCredentials { pid, uid } = peer_credentials(&socket)?;
    if uid != 0 && Some(uid) != known.user {
        return Err(ErrorKind::PermissionDenied.into());
    }
    let mut stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(MOUNTED_TIMEOUT))?;
    let mut said = [0; MESSAGE_MOUNTED.len()];
    let heard = stream.read_exact(&mut said);
    match heard {
        Ok(()) if said == MESSAGE_MOUNTED => {}
        Ok(()) => return Err(ErrorKind::InvalidData.into()),
        Err(cause) if cause.kind() == ErrorKind::WouldBlock => {}
        Err(cause) => return Err(cause),
    }
    Ok(MountProcess {
        stream,
        pid: pid.map(|pid| pid.as_raw_nonzero().get()),
        received: Vec::new(),
    })
}

/// The process of a mount, as seen by `pagemesh umount`.
struct MountProcess {
    stream: UnixStream,
    /// `None` if the process is not visible in this PID namespace.
    pid: Option<i32>,
    received: Vec<u8>,
}

impl MountProcess {
    /// Waits until the process has sent a message or exited. Returns false at the limit.
    fn wait_for_message(&mut self, word: &[u8], limit: Duration) -> std::io::Result<bool> {
        let until = Instant::now() + limit;
        loop {
            if self.has_received(word) {
                return Ok(true);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut more = [0; 16];
            match self.stream.read(&mut more) {
                Ok(0) => return Ok(true),
                Ok(len) => self.received.extend_from_slice(&more[..len]),
                Err(cause) if is_timeout(cause.kind()) => {}
                Err(cause) => return Err(cause),
            }
        }
    }

    fn has_received(&self, word: &[u8]) -> bool {
        self.received.windows(word.len()).any(|said| said == word)
    }

    /// The name of the process for people.
    fn display_name(&self) -> String {
        match self.pid {
            Some(pid) => format!("the mounting process {pid}"),
            None => "the mounting process".into(),
        }
    }

    fn kill_command(&self) -> String {
        match self.pid {
            Some(pid) => format!("kill {pid}"),
            None => "end the mounting process".into(),
        }
    }
}

fn is_timeout(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// How to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmountMode {
    /// Only if no process uses the mount.
    IfUnused,
    /// Detach at once. The mount ends with its last open file; the command does not wait for that.
    Lazy,
    /// From all processes that use it.
    Forced,
}

/// Unmounts.
pub fn run(args: &UmountArgs) -> anyhow::Result<()> {
    let mode = if args.force {
        UnmountMode::Forced
    } else if args.lazy {
        UnmountMode::Lazy
    } else {
        UnmountMode::IfUnused
    };
    unmount(&args.dir, mode)
}

/// Unmounts, and waits until the mount process has written all data.
pub fn unmount(dir: &Path, how: UnmountMode) -> anyhow::Result<()> {
    let at = resolve_parent(dir)?;
    let Some(known) = find_mount_at(&at)? else {
        bail!("no file system of pagemesh is mounted on {}", dir.display());
    };
    let process = connect_process(&known);
    let taken = match how {
        UnmountMode::Forced => pagemesh_fuse::abort_dir(&at),
        how => pagemesh_fuse::unmount_dir(&at, how == UnmountMode::Lazy),
    };
    taken.with_context(|| {
        let shown = dir.display();
        format!(
            "cannot unmount {shown}; if something in it is in use, end that, take the mount from \
             its place with --lazy, or from everybody with --force"
        )
    })?;
    if how == UnmountMode::Lazy {
        return Ok(());
    }
    let Ok(mut process) = process else {
        tracing::warn!("its mount process has exited before, or is not visible here");
        return Ok(());
    };
    await_end(&mut process, &known, dir)
}

fn await_end(process: &mut MountProcess, known: &MountEntry, dir: &Path) -> anyhow::Result<()> {
    let shown = dir.display();
    if !process.wait_for_message(MESSAGE_UNMOUNTED, UNMOUNTED_TIMEOUT)?
        && let Some(holders) = mount_table::describe_holders(&mount_table::holders(&known.device))
    {
        bail!(
            "{shown} is unmounted here, but other mount namespaces have it still: {holders}. The \
             file system stays mounted until they end or unmount it. To take it from them: {}",
            process.kill_command()
        );
    }
    if !process.wait_for_message(MESSAGE_COMPLETE, COMPLETE_TIMEOUT)? {
        bail!(
            "{shown} is unmounted, but {} has not ended within {} s: it waits for bricks or the \
             manager, or programs have files open that are not seen from here; see its log, or \
             end it: {}",
            process.display_name(),
            COMPLETE_TIMEOUT.as_secs(),
            process.kill_command()
        );
    }
    match process.has_received(MESSAGE_COMPLETE) {
        true => Ok(()),
        false => bail!("{shown} is unmounted, but its mount process failed; see its log"),
    }
}
