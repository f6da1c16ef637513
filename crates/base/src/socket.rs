//! Listening unix sockets, for every server of this project.
//!
//! Invariants: a socket has mode 0600 before its first connection. A socket file without a listener
//! is replaced. A live one, and any other file, is left alone and refused. Dropping the socket
//! removes its file, unless another file has taken the path.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FileType, Mode, RenameFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::net::{bind, connect, listen, socket_with};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Connections that the kernel queues before they are accepted.
const BACKLOG: i32 = 128;
/// Connection attempts before the owner of a socket counts as dead.
const PROBES: u32 = 3;
/// The interval of the attempts: an owner may be between `bind` and `listen`.
const PROBE_PAUSE: Duration = Duration::from_millis(20);

/// Why a unix socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another process listens there already.
    #[error("{0} is served by another process; stop it, or choose another path")]
    InUse(PathBuf),
    /// Another file exists at the path.
    #[error("{0} exists and is not a socket; remove it or choose another path")]
    NotASocket(PathBuf),
    /// The path does not fit into a socket address.
    #[error("the socket path {0} is too long; use at most 107 bytes")]
    PathTooLong(PathBuf),
    /// Anything else.
    #[error("cannot {doing} {path}: {cause}")]
    System {
        /// The failed action.
        doing: &'static str,
        /// The path.
        path: PathBuf,
        /// The cause.
        cause: std::io::Error,
    },
}

/// A listening socket that does not block. See the module.
#[derive(Debug)]
pub struct UnixSocket {
    socket: OwnedFd,
    path: PathBuf,
    file: FileIdentity,
}

/// The identity of a socket file. The kernel reuses inode numbers at once, so the identity includes
/// the creation time; neither a rename nor a change of mode changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
    created: (i64, u64),
}

impl FileIdentity {
    fn of(stat: &Stat) -> FileIdentity {
        FileIdentity {
            device: stat.st_dev,
            inode: stat.st_ino,
            created: (stat.st_mtime, stat.st_mtime_nsec),
        }
    }
}

impl UnixSocket {
    /// Listens at a path.
    ///
    /// # Errors
    /// When another process listens there, another file exists, or the system refuses.
    pub fn bind(path: &Path) -> Result<UnixSocket, SocketError> {
        let address =
            SocketAddrUnix::new(path).map_err(|_| SocketError::PathTooLong(path.into()))?;
        let socket = open().map_err(system_error("open a socket for", path))?;
        // Before it is bound, so that its file is never open to others.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)
            .map_err(system_error("set the mode of", path))?;
        match bind(&socket, &address) {
            Err(Errno::ADDRINUSE) => {
                remove_stale(path, &address)?;
                bind(&socket, &address).map_err(|errno| match errno {
                    Errno::ADDRINUSE => SocketError::InUse(path.into()),
                    errno => system_error("listen on", path)(errno),
                })?;
            }
            bound => bound.map_err(system_error("listen on", path))?,
        }
        let found = rustix::fs::lstat(path).map_err(system_error("look at", path))?;
        let bound = UnixSocket {
            socket,
            path: path.into(),
            file: FileIdentity::of(&found),
        };
        listen(&bound.socket, BACKLOG).map_err(system_error("listen on", path))?;
        Ok(bound)
    }

    /// The path that it listens on.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for UnixSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        let found = rustix::fs::lstat(&self.path);
        if found.is_ok_and(|found| FileIdentity::of(&found) == self.file) {
            // Fails only if another process removed it.
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

fn system_error(doing: &'static str, path: &Path) -> impl Fn(Errno) -> SocketError {
    move |errno| SocketError::System {
        doing,
        path: path.into(),
        cause: errno.into(),
    }
}

fn open() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes a socket file without a listener.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let found = match rustix::fs::lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        found => found.map_err(system_error("look at", path))?,
    };
    if FileType::from_raw_mode(found.st_mode) != FileType::Socket {
        return Err(SocketError::NotASocket(path.into()));
    }
    for probe in 0..PROBES {
        if probe > 0 {
            std::thread::sleep(PROBE_PAUSE);
        }
        let socket = open().map_err(system_error("open a socket for", path))?;
        match connect(&socket, address) {
            Err(Errno::CONNREFUSED) => {}
            Err(Errno::NOENT) => return Ok(()),
            Ok(()) | Err(Errno::AGAIN) => return Err(SocketError::InUse(path.into())),
            Err(errno) => return Err(system_error("find the listener of", path)(errno)),
        }
    }
    remove_dead_socket(path, &found)
}

/// Removes exactly the file that was found dead. Another server may be replacing it too: the file
/// is renamed first, and renamed back if it is another one.
fn remove_dead_socket(path: &Path, found: &Stat) -> Result<(), SocketError> {
    let mut aside: OsString = path.into();
    aside.push(format!(".stale-{}", std::process::id()));
    match rustix::fs::rename(path, &aside) {
        Err(Errno::NOENT) => return Ok(()),
        renamed => renamed.map_err(system_error("replace the dead", path))?,
    }
    let moved = rustix::fs::lstat(&aside).map_err(system_error("look at", path))?;
    if FileIdentity::of(&moved) == FileIdentity::of(found) {
        return rustix::fs::unlink(&aside).map_err(system_error("replace the dead", path));
    }
    let cwd = rustix::fs::CWD;
    let _ = rustix::fs::renameat_with(cwd, &aside, cwd, path, RenameFlags::NOREPLACE);
    Err(SocketError::InUse(path.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn dead_socket_is_replaced_and_live_one_is_in_use() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        drop(UnixListener::bind(&path).expect("a socket"));
        let live = UnixSocket::bind(&path).expect("no listener");
        let mode = path.metadata().expect("the file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        UnixStream::connect(&path).expect("it listens");
        let error = UnixSocket::bind(&path).expect_err("a listener");
        assert!(matches!(error, SocketError::InUse(_)), "{error}");
        drop(live);
        let left = directory.path().read_dir().expect("the directory").count();
        assert_eq!(left, 0, "nothing is left behind");
    }

    #[test]
    fn file_that_replaced_socket_is_kept() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let old = UnixSocket::bind(&path).expect("a free path");
        std::fs::remove_file(&path).expect("the file");
        let new = UnixSocket::bind(&path).expect("a free path");
        drop(old);
        UnixStream::connect(new.path()).expect("it listens");
        drop(new);
        std::fs::write(&path, "precious").expect("a file");
        let error = UnixSocket::bind(&path).expect_err("a file is there");
        assert!(matches!(error, SocketError::NotASocket(_)), "{error}");
        assert!(path.exists());
        let long = directory.path().join("x".repeat(120));
        let error = UnixSocket::bind(&long).expect_err("no address has it");
        assert!(matches!(error, SocketError::PathTooLong(_)), "{error}");
    }
}
