//! The calls of [`FileCall`] over NFSv3.

use super::OWNER;
use super::file_calls::{FileCall, FileClient, Outcome};
use pagemesh_nfs_client::nfs3::{
    Commit, Create, CreateHow, Failure, Handle, Link, Nfs3Result, Read, ReadDir, Remove, Rename,
    SetAttributes, SetAttributesCall, Write,
};
use pagemesh_nfs_client::rpc::{arguments, call_record, decode_result};
use pagemesh_nfs_client::{Client, Credential, Procedure};
use std::net::SocketAddr;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

/// See the module.
pub struct Nfs3Files {
    server: SocketAddr,
    client: Client,
    root: Handle,
    xid: u32,
    /// The file of the last call; it stays the same when the call is sent again.
    file: Option<Handle>,
}

fn connect(server: SocketAddr) -> Client {
    let owner = Credential::sys(OWNER.uid, OWNER.gid);
    Client::connect(server, owner, LIMIT).expect("connected")
}

fn status<T, F>(result: Nfs3Result<T, F>) -> (Outcome, Option<T>) {
    match result {
        Ok(done) => (Outcome::default(), Some(done)),
        Err(Failure { status, .. }) => {
            let status = status.number();
            let outcome = Outcome::default();
            (Outcome { status, ..outcome }, None)
        }
    }
}

impl Nfs3Files {
    pub fn new(server: SocketAddr) -> Nfs3Files {
        let mut client = connect(server);
        let root = client.mount(b"/data").expect("mounted");
        Nfs3Files {
            server,
            client,
            root,
            xid: 100,
            file: None,
        }
    }

    fn exchange<P: Procedure>(&mut self, call: &P) -> P::Result {
        let target = (P::PROGRAM, P::VERSION, P::NUMBER);
        let record = call_record(self.xid, &self.client.credential, target, &arguments(call));
        let connection = &mut self.client.connection;
        connection.sender().send_bytes(&record).expect("sent");
        let reply = connection.receive().expect("a reply");
        assert_eq!(reply.xid, self.xid);
        decode_result::<P>(&reply.outcome.expect("executed")).expect("a result")
    }

    fn find(&mut self, call: &FileCall) -> Option<Handle> {
        let name = match call {
            FileCall::Link(name, _) | FileCall::SetSize(name, _) | FileCall::Commit(name) => name,
            FileCall::Write { name, .. } | FileCall::Read { name, .. } => name,
            _ => return None,
        };
        let found = self.client.lookup(&self.root, name).expect("a reply");
        Some(found.expect("the file exists").handle)
    }

    fn change_names(&mut self, call: &FileCall) -> Outcome {
        let root = self.root.clone();
        let directory = &root;
        let create = |name, how| Create {
            directory,
            name,
            how,
        };
        match call {
            FileCall::Create(name) => {
                let how = CreateHow::Guarded(SetAttributes::mode(0o644));
                status(self.exchange(&create(name, how))).0
            }
            FileCall::CreateExclusive(name, verifier) => {
                let how = CreateHow::Exclusive(*verifier);
                status(self.exchange(&create(name, how))).0
            }
            FileCall::Remove(name) => status(self.exchange(&Remove { directory, name })).0,
            FileCall::Rename(from, to) => {
                let (from, to) = ((directory, &from[..]), (directory, &to[..]));
                status(self.exchange(&Rename { from, to })).0
            }
            FileCall::List => self.list(),
            _ => panic!("a call on a file"),
        }
    }

    fn list(&mut self) -> Outcome {
        let directory = &self.root.clone();
        let (outcome, listing) = status(self.exchange(&ReadDir {
            directory,
            cookie: 0,
            verifier: [0; 8],
            count: 8192,
        }));
        let listing = listing.expect("listed");
        assert!(listing.is_end);
        let mut names: Vec<_> = listing.entries.into_iter().map(|it| it.name).collect();
        names.retain(|name| name.first() != Some(&b'.'));
        Outcome { names, ..outcome }
    }

    fn call_file(&mut self, file: &Handle, call: &FileCall) -> Outcome {
        let directory = &self.root.clone();
        match call {
            FileCall::Link(_, name) => {
                status(self.exchange(&Link {
                    file,
                    directory,
                    name,
                }))
                .0
            }
            FileCall::SetSize(_, size) => {
                status(self.exchange(&SetAttributesCall {
                    file,
                    attributes: SetAttributes::size(*size),
                    guard: None,
                }))
                .0
            }
            FileCall::Commit(_) => {
                let (outcome, done) = status(self.exchange(&Commit {
                    file,
                    offset: 0,
                    count: 0,
                }));
                let verifier = done.map_or([0; 8], |it| it.verifier);
                Outcome {
                    verifier,
                    ..outcome
                }
            }
            FileCall::Write { .. } | FileCall::Read { .. } => self.transfer(file, call),
            _ => panic!("a call on names"),
        }
    }

    fn transfer(&mut self, file: &Handle, call: &FileCall) -> Outcome {
        match call {
            FileCall::Write {
                offset,
                data,
                stable,
                ..
            } => {
                let (outcome, done) = status(self.exchange(&Write {
                    file,
                    offset: *offset,
                    stable: *stable,
                    data,
                }));
                done.map_or(outcome, |it| Outcome {
                    count: it.count,
                    committed: it.committed as u32,
                    verifier: it.verifier,
                    ..Outcome::default()
                })
            }
            FileCall::Read { offset, count, .. } => {
                let (outcome, done) = status(self.exchange(&Read {
                    file,
                    offset: *offset,
                    count: *count,
                }));
                done.map_or(outcome, |it| Outcome {
                    data: it.data,
                    is_end: it.is_end,
                    ..Outcome::default()
                })
            }
            _ => panic!("no transfer"),
        }
    }
}

impl FileClient for Nfs3Files {
    fn send(&mut self, call: &FileCall) -> Outcome {
        self.xid += 1;
        self.file = self.find(call);
        self.send_again(call)
    }

    fn send_again(&mut self, call: &FileCall) -> Outcome {
        match self.file.clone() {
            Some(file) => self.call_file(&file, call),
            None => self.change_names(call),
        }
    }

    fn break_connection(&mut self) {
        self.client = connect(self.server);
    }

    fn reconnect(&mut self, server: SocketAddr) {
        self.server = server;
        self.client = connect(server);
        let root = self.client.mount(b"/data").expect("mounted");
        assert_eq!(root, self.root, "handles survive a crash");
    }
}
