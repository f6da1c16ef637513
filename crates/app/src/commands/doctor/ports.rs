//! The listeners of TCP ports.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::net::TcpListener;

/// The name of this program in /proc.
const PROGRAM: &str = "pagemesh";
/// The user of the packaged daemons.
const USER: &str = "pagemesh";
/// The state LISTEN in /proc/net/tcp.
const LISTENING: &str = "0A";

/// A port of the configuration.
#[derive(Debug)]
pub struct PortFacts {
    /// The port.
    pub number: u16,
    /// Its state.
    pub state: PortState,
}

/// The listener of a port.
#[derive(Debug, PartialEq, Eq)]
pub enum PortState {
    /// None.
    Free,
    /// A process of pagemesh, or of its user.
    Ours,
    /// Another program, by its name.
    Taken(String),
    /// The listener belongs to another user, whose processes this user cannot see, or the system refuses the
    /// question.
    Unknown(String),
}

/// A socket that listens, in a table of /proc/net.
#[derive(Debug, PartialEq, Eq)]
struct ListeningSocket {
    uid: String,
    /// The target of its descriptors in /proc.
    link: String,
}

/// The state of a port.
pub fn state(number: u16) -> PortFacts {
    let state = match TcpListener::bind(("0.0.0.0", number)) {
        Ok(_) => PortState::Free,
        Err(cause) if cause.kind() == ErrorKind::AddrInUse => {
            let tables = ["/proc/net/tcp", "/proc/net/tcp6"];
            let tables = tables.map(|path| std::fs::read_to_string(path).unwrap_or_default());
            let found = tables.iter().flat_map(|table| listening(table, number));
            let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
            judge(&found.collect::<Vec<_>>(), listener, user_id(&users, USER))
        }
        Err(cause) => PortState::Unknown(cause.to_string()),
    };
    PortFacts { number, state }
}

/// The listener of sockets: a process that this user can see, or else their user.
fn judge(
    sockets: &[ListeningSocket],
    listener: impl FnOnce(&HashSet<&str>) -> Option<String>,
    own_user: Option<&str>,
) -> PortState {
    let links = sockets.iter().map(|it| it.link.as_str()).collect();
    match listener(&links) {
        Some(name) if name == PROGRAM => PortState::Ours,
        Some(name) => PortState::Taken(name),
        None if own_user.is_some()
            && sockets.iter().any(|it| Some(it.uid.as_str()) == own_user) =>
        {
            PortState::Ours
        }
        None => PortState::Unknown("a process of another user listens there".into()),
    }
}

/// The name of the process that has one of these sockets, if this user may see it.
fn listener(links: &HashSet<&str>) -> Option<String> {
    let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let mut targets = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let is_listener =
            targets.any(|target| target.to_str().is_some_and(|it| links.contains(it)));
        let name = is_listener.then(|| std::fs::read_to_string(format!("/proc/{pid}/comm")));
        Some(name?.ok()?.trim().to_owned())
    })
    .next()
}

/// The sockets that listen on a port, from a table of /proc/net.
fn listening(table: &str, port: u16) -> Vec<ListeningSocket> {
    let wanted = format!(":{port:04X}");
    let socket = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_listener = fields.get(1)?.ends_with(&wanted) && *fields.get(3)? == LISTENING;
        let (uid, inode) = (fields.get(7)?, fields.get(9)?);
        is_listener.then(|| ListeningSocket {
            uid: (*uid).to_owned(),
            link: format!("socket:[{inode}]"),
        })
    };
    table.lines().filter_map(socket).collect()
}

/// The number of a user, from lines of /etc/passwd.
fn user_id<'a>(users: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = users.lines().map(|line| line.split(':'));
    fields.find_map(|mut line| (line.next()? == name).then(|| line.nth(1))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listener_of_own_port_is_this_process() {
        let socket = TcpListener::bind("127.0.0.1:0").expect("bound");
        let port = socket.local_addr().expect("an address").port();
        let own = std::fs::read_to_string("/proc/self/comm").expect("a name");
        assert_eq!(state(port).state, PortState::Taken(own.trim().to_owned()));
    }

    #[test]
    fn unseen_listener_is_unknown_unless_of_own_user() {
        let line = "0: 0100007F:1B9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000   105        0 4711 1";
        let sockets = listening(line, 7070);
        let own = user_id(
            "root:x:0:0:\npagemesh:x:105:109::/:/usr/sbin/nologin\n",
            USER,
        );
        assert_eq!(own, Some("105"));
        let unseen = |user| judge(&sockets, |_| None, user);
        assert_eq!(unseen(own), PortState::Ours);
        for other in [Some("106"), None] {
            assert!(matches!(unseen(other), PortState::Unknown(_)));
        }
        let seen = judge(
            &sockets,
            |links| links.contains("socket:[4711]").then(|| "nginx".into()),
            own,
        );
        assert_eq!(seen, PortState::Taken("nginx".into()));
    }

    #[test]
    fn torn_tables_have_no_listener() {
        for table in ["", "a", "0: 0100007F:1B9E", "0: :1B9E 0 0A"] {
            assert_eq!(listening(table, 7070), []);
        }
        assert_eq!(user_id("pagemesh", USER), None);
    }
}
