//! The process that serves a file system dies, and a standby on another machine takes it over with its address: NFS clients go on.

use crate::support;
use pagemesh_nfs_client::nfs3::{
    Commit, Create, CreateHow, Handle, Read, SetAttributes, StableHow, Write, Written,
};
use pagemesh_nfs_client::nfs4::{Lock, Nfs4Client, Nfs4Error, Nfs4Result, Open, OpenFile, status};
use pagemesh_nfs_client::{Client, ClientError, Credential, Procedure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use support::net::{Host, Net};
use support::{Cluster, LIMIT, Pools, until};

/// The address of the service. It moves between the machines.
const ADDRESS: &str = "10.77.0.200";
const SERVER: Host = Host::Client(0);
const STANDBY: Host = Host::Client(1);
const PAGE: usize = 4096;
/// Writes of the test, and the number of them before the server dies.
const WRITES: u64 = 200;
const WRITES_BEFORE: u64 = 50;

/// A client as the kernel's with `hard`: it connects again and repeats its call with the same xid until it has a reply.
struct HardClient {
    server: SocketAddr,
    client: Option<Client>,
    next_xid: u32,
}

impl HardClient {
    fn new() -> HardClient {
        HardClient {
            server: format!("{ADDRESS}:2049").parse().unwrap(),
            client: None,
            next_xid: 1,
        }
    }

    fn call<P: Procedure>(&mut self, procedure: &P) -> P::Result {
        let end = Instant::now() + LIMIT;
        loop {
            match self.try_call(procedure) {
                Ok(result) => {
                    self.next_xid += 1;
                    return result;
                }
                Err(ClientError::Socket(_) | ClientError::Closed) if Instant::now() < end => {
                    self.client = None;
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(error) => panic!("call {}: {error}", P::NUMBER),
            }
        }
    }

    fn try_call<P: Procedure>(&mut self, procedure: &P) -> Result<P::Result, ClientError> {
        let client = match &mut self.client {
            Some(client) => client,
            none => {
                let limit = Duration::from_secs(3);
                none.insert(Client::connect(self.server, Credential::sys(0, 0), limit)?)
            }
        };
        client.connection.sender().set_next_xid(self.next_xid);
        client.call(procedure)
    }

    fn write(&mut self, file: &Handle, page: u64) -> Written {
        let data = contents(page);
        let stable = match page % 2 {
            0 => StableHow::FileSync,
            _ => StableHow::Unstable,
        };
        let write = Write {
            file,
            offset: page * PAGE as u64,
            stable,
            data: &data,
        };
        let written = self.call(&write).expect("written");
        assert_eq!(written.count as usize, PAGE);
        written
    }

    fn assert_page(&mut self, file: &Handle, page: u64) {
        let read = Read {
            file,
            offset: page * PAGE as u64,
            count: PAGE as u32,
        };
        let read = self.call(&read).expect("read");
        assert!(read.data == contents(page), "page {page} differs");
    }
}

fn contents(page: u64) -> Vec<u8> {
    let words = (0..PAGE as u64 / 8).map(|word| page << 32 | word);
    words.flat_map(u64::to_le_bytes).collect()
}

/// Runs a client on the hub, which reaches all machines.
fn run_on_hub<T: Send>(net: &Net, client: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(net.namespace_file(Host::Hub)).unwrap();
    let enter = || {
        let of = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(namespace.as_fd(), of).unwrap();
        client()
    };
    std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

/// Creates a file and writes it. Sends a message after some writes, and goes on.
fn write_through_takeover(message: &mpsc::Sender<()>) {
    let mut client = HardClient::new();
    let root = client.call(&pagemesh_nfs_client::mount3::Mount { path: b"/files" });
    let root = root.expect("mounted").root;
    let create = Create {
        directory: &root,
        name: b"log",
        how: CreateHow::Guarded(SetAttributes::mode(0o644)),
    };
    let file = client
        .call(&create)
        .expect("created")
        .handle
        .expect("a handle");
    let mut written: Vec<Written> = Vec::new();
    for page in 0..WRITES {
        written.push(client.write(&file, page));
        if page + 1 == WRITES_BEFORE {
            message.send(()).unwrap();
        }
    }
    for (page, _) in (0..)
        .zip(&written)
        .filter(|(_, it)| it.committed == StableHow::FileSync)
    {
        client.assert_page(&file, page);
    }
    // The server may have lost the others only if its verifier has changed.
    let commit = Commit {
        file: &file,
        offset: 0,
        count: 0,
    };
    let verifier = client.call(&commit).expect("committed").verifier;
    for (page, written) in (0..).zip(&written) {
        let is_stable = written.committed == StableHow::FileSync;
        if is_stable || written.verifier == verifier {
            client.assert_page(&file, page);
        }
    }
    assert_ne!(written[0].verifier, verifier, "another process serves now");
    // The repetition of a call that a dead server answered is a new call.
    let again = client.call(&create);
    assert_eq!(again.expect_err("it exists").status.name(), "EXIST");
}

const CREATE: Open<'_> = Open {
    owner: b"opener",
    access: 3,
    deny: 0,
    creates: true,
};
const SHARED: Open<'_> = Open {
    creates: false,
    ..CREATE
};

fn whole_file(is_reclaim: bool) -> Lock<'static> {
    Lock {
        owner: b"locker",
        offset: 0,
        length: WRITES * PAGE as u64,
        is_reclaim,
    }
}

/// A session of a client of NFSv4.1. The verifier stays, because the client does not restart.
fn session_of(owner: &str) -> Nfs4Result<Nfs4Client> {
    let server = format!("{ADDRESS}:2049").parse().unwrap();
    let owner = (owner.as_bytes(), [7; 8]);
    Nfs4Client::connect(server, Credential::sys(0, 0), owner, Duration::from_secs(3))
}

/// A client with the lock, and a client that wants it.
struct Lockers {
    holder: Nfs4Client,
    file: OpenFile,
    other: Nfs4Client,
}

impl Lockers {
    fn new() -> Lockers {
        let mut holder = session_of("holder").expect("a session");
        holder.reclaim_complete().expect("nothing to reclaim");
        let root = holder.export(b"files").expect("exported");
        let file = holder.open(&root, b"locked", CREATE).expect("made");
        holder.lock(&file, whole_file(false)).expect("free");
        let mut other = session_of("other").expect("a session");
        other.reclaim_complete().expect("nothing to reclaim");
        Lockers {
            holder,
            file,
            other,
        }
    }

    /// The clients with new sessions at the new server. The holder reclaims its open and its lock, which the other one
    /// does not get before or after.
    fn reclaimed(handle: &[u8]) -> Nfs4Result<Lockers> {
        let mut other = session_of("other")?;
        match other.reclaim_complete() {
            Err(error) if error.status() != Some(status::COMPLETE_ALREADY) => return Err(error),
            _ => {}
        }
        let root = other.export(b"files")?;
        let opened = other.open(&root, b"locked", SHARED);
        assert_eq!(opened.err().and_then(|it| it.status()), Some(status::GRACE));
        let mut holder = session_of("holder")?;
        let file = holder.reclaim_open(handle, SHARED)?;
        holder.lock(&file, whole_file(true))?;
        holder.reclaim_complete()?;
        Ok(Lockers {
            holder,
            file,
            other,
        })
    }

    fn after_loss(handle: &[u8]) -> Lockers {
        let end = Instant::now() + LIMIT;
        loop {
            match Lockers::reclaimed(handle) {
                Ok(lockers) => return lockers,
                Err(Nfs4Error::Client(_)) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(error) => panic!("not reclaimed: {error}"),
            }
        }
    }

    fn assert_other_is_locked_out(&mut self) {
        let root = self.other.export(b"files").expect("exported");
        let file = self.other.open(&root, b"locked", SHARED).expect("opened");
        let locked = self.other.lock(&file, whole_file(false));
        assert_eq!(
            locked.err().and_then(|it| it.status()),
            Some(status::DENIED)
        );
        self.other.close(&file).expect("closed");
    }
}

/// Writes a locked file. Sends a message after some writes, and goes on at the next server.
fn lock_through_takeover(message: &mpsc::Sender<()>) {
    let mut lockers = Lockers::new();
    let (mut number, mut losses) = (0, 0);
    while number < WRITES || losses == 0 {
        let page = number % WRITES;
        let data = contents(page);
        let offset = page * PAGE as u64;
        let written = lockers.holder.write(&lockers.file, offset, &data);
        match written.map_err(|error| (error.status(), error)) {
            Ok(count) => assert_eq!(count as usize, PAGE),
            Err((None | Some(status::BADSESSION), _)) => {
                lockers = Lockers::after_loss(&lockers.file.handle);
                lockers.assert_other_is_locked_out();
                losses += 1;
                continue;
            }
            Err((_, error)) => panic!("page {page}: {error}"),
        }
        number += 1;
        if number == WRITES_BEFORE {
            message.send(()).unwrap();
        }
    }
    assert_eq!(losses, 1, "another process serves now");
    for page in 0..WRITES {
        let read = lockers
            .holder
            .read(&lockers.file, page * PAGE as u64, PAGE as u32);
        assert!(read.expect("read") == contents(page), "page {page} differs");
    }
}

#[test]
fn standby_takes_over_and_clients_go_on() {
    take_over(write_through_takeover);
}

#[test]
fn client_reclaims_its_lock_from_the_standby() {
    take_over(lock_through_takeover);
}

/// Runs a client. After its message the server dies, and a standby takes over.
fn take_over(client: impl FnOnce(&mpsc::Sender<()>) + Send) {
    let Some(net) = Net::new(2, 2) else {
        return;
    };
    let cluster = Cluster::on_separate_hosts(Pools::Memory, &[64, 64], net);
    let net = cluster.net();
    cluster.ok(&["fs", "create", "files", "--size", "32M"]);
    net.assign(SERVER, ADDRESS);
    let listen = ["--listen", "0.0.0.0:2049", "--squash", "none"];
    let serve = [&["serve", "nfs", "files"][..], &listen].concat();
    let server = cluster.daemon_on(SERVER, "nfs-server", &serve, 1);
    let standby = [&serve[..], &["--standby"]].concat();
    let standby = cluster.daemon_on(STANDBY, "nfs-standby", &standby, 0);
    until("the standby waits", || {
        standby.log().contains("waits until it ends")
    });
    std::thread::scope(|scope| {
        let (send, some_written) = mpsc::channel();
        let client = scope.spawn(move || run_on_hub(net, move || client(&send)));
        some_written.recv().expect("some writes");
        server.kill();
        net.withdraw(SERVER, ADDRESS);
        net.assign(STANDBY, ADDRESS);
        client.join().unwrap();
    });
    standby.stop();
    cluster.check_identical("files");
}
