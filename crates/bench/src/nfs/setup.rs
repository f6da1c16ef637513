//! Makes the files of a set by NFS calls, one after the other.

use super::file_set::{FILES_PER_DIRECTORY, FileSet, SetFile};
use super::sizes::BLOCK_BYTES;
use crate::error::BenchError;
use crate::load::{Rng, random_bytes};
use pagemesh_nfs_client::nfs3::{
    Commit, Create, CreateHow, Created, Failure, Handle, MakeDirectory, Nfs3Result, Remove,
    SetAttributes, StableHow, Status, Symlink, WccData, Write,
};
use pagemesh_nfs_client::{Client, ClientError, Credential};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Limit of each wait for the server.
const CALL_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of a WRITE.
const WRITE_BYTES: usize = 64 << 10;
/// Files that are ready for REMOVE.
const SPARES: u64 = 64;

/// A server and an export.
#[derive(Clone, Debug)]
pub struct NfsTarget {
    /// Its name in reports.
    pub name: String,
    /// The durability class, or the medium of a peer.
    pub class: String,
    /// The address of NFS.
    pub server: SocketAddr,
    /// The address of MOUNT.
    pub mount_server: SocketAddr,
    /// The path for MOUNT.
    pub export: String,
    /// The processes that serve it.
    pub pids: Vec<u32>,
}

/// Removes a file of the root, if there is one.
///
/// # Errors
/// If the server cannot be reached, or refuses.
pub(super) fn remove_file(target: &NfsTarget, name: &str) -> Result<(), BenchError> {
    let mut setup = SetupClient::connect(target)?;
    let directory = &setup.root()?;
    let name = name.as_bytes();
    let removed = setup.client.call(&Remove { directory, name });
    match removed.map_err(failed(target, "REMOVE"))? {
        Ok(_) => Ok(()),
        Err(refused) if refused.status == Status::NOENT => Ok(()),
        Err(refused) => Err(BenchError::Option(format!(
            "{} does not remove a file: {:?}",
            target.name, refused.status
        ))),
    }
}

fn failed(target: &NfsTarget, during: &str) -> impl FnOnce(ClientError) -> BenchError {
    let during = format!("{during} of {} at {}", target.name, target.server);
    move |cause| BenchError::Nfs {
        during,
        cause: cause.into(),
    }
}

/// A status of NFS as an error.
fn refused<T>(target: &NfsTarget, during: &str, failure: &Failure<T>) -> BenchError {
    BenchError::Nfs {
        during: format!("{during} of {} at {}", target.name, target.server),
        cause: format!("the status is {}", failure.status).into(),
    }
}

/// Calls for the setup of one export.
pub struct SetupClient<'t> {
    target: &'t NfsTarget,
    client: Client,
    payload: Vec<u8>,
}

impl<'t> SetupClient<'t> {
    /// Connects.
    ///
    /// # Errors
    /// If the server cannot be reached.
    pub fn connect(target: &'t NfsTarget) -> Result<SetupClient<'t>, BenchError> {
        let client = Client::connect(target.server, Credential::sys(0, 0), CALL_LIMIT);
        Ok(SetupClient {
            target,
            client: client.map_err(failed(target, "the connect"))?,
            payload: random_bytes(&mut Rng::new(97), 1 << 20),
        })
    }

    /// An empty set on the export.
    ///
    /// # Errors
    /// If the server does not give its root.
    pub fn mount(&mut self) -> Result<FileSet, BenchError> {
        let target = self.target;
        let caller = Credential::sys(0, 0);
        let mounted = Client::connect(target.mount_server, caller, CALL_LIMIT)
            .and_then(|mut client| client.mount(target.export.as_bytes()));
        Ok(FileSet {
            root: Some(mounted.map_err(failed(target, "MOUNT"))?),
            ..FileSet::default()
        })
    }

    /// The root of the export.
    ///
    /// # Errors
    /// If the server does not give it.
    pub(super) fn root(&mut self) -> Result<Handle, BenchError> {
        self.mount()?.root.ok_or_else(|| {
            let text = format!("{} has no root", self.target.name);
            BenchError::Option(text)
        })
    }

    /// Makes files up to this number, but none after this time. Returns whether the set has all.
    ///
    /// # Errors
    /// If a call fails.
    pub fn grow(
        &mut self,
        set: &mut FileSet,
        files: u32,
        until: Instant,
    ) -> Result<bool, BenchError> {
        let Some(root) = set.root.clone() else {
            let text = "a set without a root cannot grow; mount the export first".into();
            return Err(BenchError::Option(text));
        };
        for n in set.files.len() as u32..files {
            if Instant::now() > until && !set.files.is_empty() {
                break;
            }
            if n.is_multiple_of(FILES_PER_DIRECTORY) {
                let name = format!("d{:05}", n / FILES_PER_DIRECTORY);
                set.directories.push(self.make_directory(&root, &name)?);
            }
            let directory = &set.directories[(n / FILES_PER_DIRECTORY) as usize];
            let planned_bytes = FileSet::planned_bytes(n);
            let handle = self.make_file(directory, &FileSet::file_name(n), planned_bytes)?;
            if FileSet::has_link(n) {
                let link = self.make_link(directory, &format!("l{n:07}"))?;
                set.links.push(link);
            }
            set.files.push(SetFile {
                handle,
                planned_bytes,
                length_bytes: planned_bytes,
            });
        }
        while set.next_spare < SPARES && !set.directories.is_empty() {
            let at = set.next_spare % set.directories.len() as u64;
            let name = FileSet::spare_name(set.next_spare);
            self.make_file(&set.directories[at as usize], &name, 0)?;
            set.spares.push_back((at as u32, set.next_spare));
            set.next_spare += 1;
        }
        Ok(set.files.len() as u32 >= files)
    }

    fn made(
        &self,
        during: &str,
        made: Result<Nfs3Result<Created, WccData>, ClientError>,
    ) -> Result<Handle, BenchError> {
        let made = made.map_err(failed(self.target, during))?;
        let made = made.map_err(|failure| refused(self.target, during, &failure))?;
        made.handle.ok_or_else(|| BenchError::Nfs {
            during: during.to_owned(),
            cause: "the server gave no handle".into(),
        })
    }

    fn make_directory(&mut self, directory: &Handle, name: &str) -> Result<Handle, BenchError> {
        let made = self.client.call(&MakeDirectory {
            directory,
            name: name.as_bytes(),
            attributes: SetAttributes::mode(0o755),
        });
        self.made("MKDIR", made)
    }

    fn make_link(&mut self, directory: &Handle, name: &str) -> Result<Handle, BenchError> {
        let made = self.client.call(&Symlink {
            directory,
            name: name.as_bytes(),
            attributes: SetAttributes::mode(0o777),
            target: b"../target/of/a/link",
        });
        self.made("SYMLINK", made)
    }

    /// Makes a file of these bytes in a directory.
    pub(super) fn make_file(
        &mut self,
        directory: &Handle,
        name: &str,
        bytes: u32,
    ) -> Result<Handle, BenchError> {
        let made = self.client.call(&Create {
            directory,
            name: name.as_bytes(),
            how: CreateHow::Guarded(SetAttributes::mode(0o644)),
        });
        let file = self.made("CREATE", made)?;
        let mut offset = 0;
        while offset < bytes as usize {
            let end = (offset + WRITE_BYTES).min(bytes as usize);
            let written = self.client.call(&Write {
                file: &file,
                offset: offset as u64,
                stable: StableHow::Unstable,
                data: &self.payload[offset..end],
            });
            let written = written.map_err(failed(self.target, "WRITE"))?;
            let written = written.map_err(|it| refused(self.target, "WRITE", &it))?;
            // A server may take a part.
            offset += (written.count as usize).clamp(1, end - offset);
        }
        Ok(file)
    }

    /// Looks a name up in a directory.
    pub(super) fn lookup(&mut self, directory: &Handle, name: &str) -> Result<(), BenchError> {
        let found = self.client.lookup(directory, name.as_bytes());
        let found = found.map_err(failed(self.target, "LOOKUP"))?;
        let found = found.map_err(|it| refused(self.target, "LOOKUP", &it));
        found.map(drop)
    }

    /// Flushes a part of the set, by a COMMIT of every file.
    ///
    /// # Errors
    /// If a call fails.
    pub fn commit(&mut self, set: &FileSet, from: usize) -> Result<(), BenchError> {
        for file in set.files.iter().skip(from) {
            let done = self.client.call(&Commit {
                file: &file.handle,
                offset: 0,
                count: 0,
            });
            let done = done.map_err(failed(self.target, "COMMIT"))?;
            done.map_err(|failure| refused(self.target, "COMMIT", &failure))?;
        }
        Ok(())
    }
}

const _: () = assert!(WRITE_BYTES >= BLOCK_BYTES as usize);
