//! Messages to the service manager, as sd_notify(3) defines them: lines in a datagram to the unix
//! socket that `NOTIFY_SOCKET` names. Without that variable nothing is sent.
//!
//! A daemon works without its service manager, so a message that cannot be sent is only logged.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable with the address of the service manager's socket.
pub const SOCKET_ENV: &str = "NOTIFY_SOCKET";

/// The daemon serves; `status` says at which place.
pub fn notify_ready(status: &str) {
    notify(&format!("READY=1\n{}", status_line(status)));
}

/// The state of a daemon that is not ready yet.
pub fn notify_status(status: &str) {
    notify(&status_line(status));
}

/// The daemon ends.
pub fn notify_stopping() {
    notify("STOPPING=1\nSTATUS=ending\n");
}

/// One line, because a line break would begin another message.
fn status_line(status: &str) -> String {
    format!("STATUS={}\n", status.replace('\n', " "))
}

fn notify(message: &str) {
    let Some(socket) = std::env::var_os(SOCKET_ENV).filter(|it| !it.is_empty()) else {
        return;
    };
    if let Err(cause) = send(&socket, message) {
        tracing::warn!(%cause, "the service manager gets no message");
    }
}

/// Sends a message to a path, or to an abstract address, which begins with `@`.
fn send(socket: &OsStr, message: &str) -> io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    // A service manager that does not read must not stop a daemon.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(message.as_bytes(), &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let length = socket.recv(&mut bytes).expect("a message");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    #[test]
    fn message_reaches_path_and_abstract_address() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path).expect("bound");
        send(path.as_os_str(), "READY=1\n").expect("sent");
        assert_eq!(received(&socket), "READY=1\n");
        let name = format!("pagemesh-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("an address");
        let socket = UnixDatagram::bind_addr(&address).expect("bound");
        send(OsStr::new(&format!("@{name}")), "STOPPING=1\n").expect("sent");
        assert_eq!(received(&socket), "STOPPING=1\n");
    }

    #[test]
    fn absent_socket_is_an_error() {
        assert!(send(OsStr::new("/nowhere/notify"), "READY=1\n").is_err());
    }

    #[test]
    fn status_stays_one_line() {
        assert_eq!(status_line("a\nREADY=1"), "STATUS=a READY=1\n");
    }
}
