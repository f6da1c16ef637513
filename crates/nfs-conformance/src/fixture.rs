//! The server under test, and the clients and directory of one case.

use pagemesh_nfs_client::nfs3::{
    Attributes, Create, CreateHow, Created, Failure, GetAttributes, Handle, MakeDirectory,
    Nfs3Result, Remove, RemoveDirectory, SetAttributes, StableHow, Status, Symlink, WccData, Write,
    Written,
};
use pagemesh_nfs_client::{Client, ClientError, Credential, Procedure};
use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The server under test.
#[derive(Clone, Debug)]
pub struct ServerUnderTest {
    /// The address of NFS.
    pub nfs: SocketAddr,
    /// The address of MOUNT.
    pub mount: SocketAddr,
    /// The path of an export that `uid` may change.
    pub path: String,
    /// The owner of all files of the cases; not 0.
    pub uid: u32,
    /// The group of all files of the cases; not 0.
    pub gid: u32,
    /// Whether user 0 is privileged: the export does not squash it.
    pub trusts_root: bool,
    /// The number of connections that send half a call at once.
    pub half_open: usize,
    /// The time limit of each reply.
    pub limit: Duration,
}

/// Why a case did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The server breaks the rule.
    Wrong(String),
    /// The server cannot run the case.
    Skipped(String),
}

impl From<ClientError> for Problem {
    fn from(error: ClientError) -> Self {
        Self::Wrong(error.to_string())
    }
}

/// The result of a case.
pub type CaseResult = Result<(), Problem>;

/// Fails the case unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)*) => {
        if !$condition {
            return Err($crate::fixture::Problem::Wrong(format!($($text)*)));
        }
    };
}
pub(crate) use ensure;

/// Fails the case unless two values are equal.
pub(crate) fn equal<T: PartialEq + Debug>(what: &str, found: T, wanted: T) -> CaseResult {
    ensure!(found == wanted, "{what}: {found:?} instead of {wanted:?}");
    Ok(())
}

/// Fails the case unless the status is one of these.
pub(crate) fn one_of(what: &str, found: Status, wanted: &[Status]) -> CaseResult {
    ensure!(
        wanted.contains(&found),
        "{what}: {found} instead of {wanted:?}"
    );
    Ok(())
}

/// The value of an optional field.
pub(crate) fn present<T>(what: &str, value: Option<T>) -> Result<T, Problem> {
    value.ok_or_else(|| Problem::Wrong(format!("{what} is absent")))
}

/// A user that owns nothing, in no group of the owner.
pub(crate) const OTHER: u32 = 23_456;

/// The connection, caller and directory of a case.
pub struct Fixture {
    /// The server.
    pub server: ServerUnderTest,
    /// A connection of the owner.
    pub client: Client,
    /// The root of the export.
    pub root: Handle,
    /// The directory of the case.
    pub dir: Handle,
}

impl Fixture {
    /// Mounts the export and makes a directory for a case.
    ///
    /// # Errors
    /// If the server cannot be reached, or the owner cannot make a directory.
    pub fn new(server: &ServerUnderTest, case: &str) -> Result<Self, Problem> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let owner = Credential::sys(server.uid, server.gid);
        let mut mount = Client::connect(server.mount, owner.clone(), server.limit)?;
        let root = mount.mount(server.path.as_bytes())?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{case}-{}-{number}", std::process::id());
        let mut fixture = Self {
            server: server.clone(),
            client: Client::connect(server.nfs, owner, server.limit)?,
            dir: root.clone(),
            root,
        };
        fixture.dir = fixture.directory(name.as_bytes())?;
        Ok(fixture)
    }

    /// Another connection, of another caller.
    pub(crate) fn client_of(&self, caller: Credential) -> Result<Client, Problem> {
        let client = Client::connect(self.server.nfs, caller, self.server.limit);
        client.map_err(Problem::from)
    }

    /// The result of a call of the owner.
    pub(crate) fn call<P: Procedure>(&mut self, call: &P) -> Result<P::Result, Problem> {
        self.client.call(call).map_err(Problem::from)
    }

    /// The result of a call of another caller.
    pub(crate) fn call_as<P: Procedure>(
        &mut self,
        caller: Credential,
        call: &P,
    ) -> Result<P::Result, Problem> {
        let owner = std::mem::replace(&mut self.client.credential, caller);
        let result = self.call(call);
        self.client.credential = owner;
        result
    }

    /// The success of a call of the owner.
    pub(crate) fn ok<P, T, F>(&mut self, call: &P) -> Result<T, Problem>
    where
        P: Procedure<Result = Nfs3Result<T, F>>,
    {
        success(P::NUMBER, self.call(call)?)
    }

    /// The success of a call of another caller.
    pub(crate) fn ok_as<P, T, F>(&mut self, caller: Credential, call: &P) -> Result<T, Problem>
    where
        P: Procedure<Result = Nfs3Result<T, F>>,
    {
        success(P::NUMBER, self.call_as(caller, call)?)
    }

    /// The attributes of a failure of the owner's call, with one of these statuses.
    pub(crate) fn fails<P, T, F>(&mut self, call: &P, wanted: &[Status]) -> Result<F, Problem>
    where
        P: Procedure<Result = Nfs3Result<T, F>>,
    {
        failure(P::NUMBER, self.call(call)?, wanted)
    }

    /// The attributes of a failure of another caller's call, with one of these statuses.
    pub(crate) fn fails_as<P, T, F>(
        &mut self,
        caller: Credential,
        call: &P,
        wanted: &[Status],
    ) -> Result<F, Problem>
    where
        P: Procedure<Result = Nfs3Result<T, F>>,
    {
        failure(P::NUMBER, self.call_as(caller, call)?, wanted)
    }

    /// A caller without any rights on the files of the case.
    pub(crate) fn other(&self) -> Credential {
        Credential::sys(OTHER, OTHER)
    }

    /// User 0, or a skipped case if the server squashes it.
    pub(crate) fn trusted_root(&self) -> Result<Credential, Problem> {
        match self.server.trusts_root {
            true => Ok(Credential::sys(0, 0)),
            false => Err(Problem::Skipped("the server squashes user 0".into())),
        }
    }

    /// A new directory in the directory of the case, mode 755.
    pub(crate) fn directory(&mut self, name: &[u8]) -> Result<Handle, Problem> {
        let dir = self.dir.clone();
        self.directory_in(&dir, name, 0o755)
    }

    /// A new directory.
    pub(crate) fn directory_in(
        &mut self,
        directory: &Handle,
        name: &[u8],
        mode: u32,
    ) -> Result<Handle, Problem> {
        let attributes = SetAttributes::mode(mode);
        let made = self.ok(&MakeDirectory {
            directory,
            name,
            attributes,
        })?;
        self.handle_of(made, directory, name)
    }

    /// A new file in the directory of the case, mode 644.
    pub(crate) fn file(&mut self, name: &[u8]) -> Result<Handle, Problem> {
        let dir = self.dir.clone();
        self.file_in(&dir, name, 0o644)
    }

    /// A new file.
    pub(crate) fn file_in(
        &mut self,
        directory: &Handle,
        name: &[u8],
        mode: u32,
    ) -> Result<Handle, Problem> {
        let how = CreateHow::Guarded(SetAttributes::mode(mode));
        let made = self.ok(&Create {
            directory,
            name,
            how,
        })?;
        self.handle_of(made, directory, name)
    }

    /// A new file with data.
    pub(crate) fn file_with(&mut self, name: &[u8], data: &[u8]) -> Result<Handle, Problem> {
        let file = self.file(name)?;
        self.write(&file, 0, data)?;
        Ok(file)
    }

    /// A new symbolic link in the directory of the case.
    pub(crate) fn symlink(&mut self, name: &[u8], target: &[u8]) -> Result<Handle, Problem> {
        let directory = self.dir.clone();
        let made = self.ok(&Symlink {
            directory: &directory,
            name,
            attributes: SetAttributes::mode(0o777),
            target,
        })?;
        self.handle_of(made, &directory, name)
    }

    /// The handle of a new file; a server may leave it out.
    fn handle_of(
        &mut self,
        made: Created,
        directory: &Handle,
        name: &[u8],
    ) -> Result<Handle, Problem> {
        match made.handle {
            Some(handle) => Ok(handle),
            None => self.lookup(directory, name),
        }
    }

    /// The handle of a name.
    pub(crate) fn lookup(&mut self, directory: &Handle, name: &[u8]) -> Result<Handle, Problem> {
        let found = self.client.lookup(directory, name)?;
        success(3, found).map(|found| found.handle)
    }

    /// Writes all of the data, durably.
    pub(crate) fn write(
        &mut self,
        file: &Handle,
        offset: u64,
        data: &[u8],
    ) -> Result<Written, Problem> {
        let written = self.ok(&Write {
            file,
            offset,
            stable: StableHow::FileSync,
            data,
        })?;
        equal("the count of WRITE", written.count as usize, data.len())?;
        Ok(written)
    }

    pub(crate) fn attributes(&mut self, file: &Handle) -> Result<Attributes, Problem> {
        self.ok(&GetAttributes { file })
    }

    /// Removes a name of a file in the directory of the case.
    pub(crate) fn remove(&mut self, name: &[u8]) -> CaseResult {
        let directory = self.dir.clone();
        self.ok(&Remove {
            directory: &directory,
            name,
        })?;
        Ok(())
    }

    /// Removes a directory in the directory of the case.
    pub(crate) fn remove_directory(&mut self, name: &[u8]) -> CaseResult {
        let directory = self.dir.clone();
        self.ok(&RemoveDirectory {
            directory: &directory,
            name,
        })?;
        Ok(())
    }

    /// The handle of a file that exists no more.
    pub(crate) fn stale_file(&mut self) -> Result<Handle, Problem> {
        let file = self.file(b"stale file")?;
        self.remove(b"stale file")?;
        Ok(file)
    }

    /// The handle of a directory that exists no more.
    pub(crate) fn stale_directory(&mut self) -> Result<Handle, Problem> {
        let directory = self.directory(b"stale directory")?;
        self.remove_directory(b"stale directory")?;
        Ok(directory)
    }

    /// Fails the case unless both attributes around a change are there and right.
    pub(crate) fn check_wcc(
        &mut self,
        what: &str,
        file: &Handle,
        before: &Attributes,
        wcc: &WccData,
    ) -> CaseResult {
        let claimed = present(&format!("{what}: the attributes before"), wcc.before)?;
        equal(
            &format!("{what}: the attributes before"),
            claimed,
            before.as_before(),
        )?;
        self.check_after(what, file, wcc.after)
    }

    /// Fails the case unless the attributes after an operation are there and right. Access times are
    /// left out: GETATTR may see a later one.
    pub(crate) fn check_after(
        &mut self,
        what: &str,
        file: &Handle,
        after: Option<Attributes>,
    ) -> CaseResult {
        let mut claimed = present(&format!("{what}: the attributes after"), after)?;
        let found = self.attributes(file)?;
        claimed.accessed = found.accessed;
        equal(&format!("{what}: the attributes after"), claimed, found)
    }
}

/// The success of a result.
pub(crate) fn success<T, F>(procedure: u32, result: Nfs3Result<T, F>) -> Result<T, Problem> {
    result.map_err(|failure| {
        Problem::Wrong(format!("procedure {procedure} failed: {}", failure.status))
    })
}

/// The attributes of a failure with one of these statuses.
pub(crate) fn failure<T, F>(
    procedure: u32,
    result: Nfs3Result<T, F>,
    wanted: &[Status],
) -> Result<F, Problem> {
    match result {
        Ok(_) => Err(Problem::Wrong(format!(
            "procedure {procedure} succeeded instead of {wanted:?}"
        ))),
        Err(Failure { status, attributes }) => {
            one_of(&format!("procedure {procedure}"), status, wanted)?;
            Ok(attributes)
        }
    }
}

/// The status of a result.
pub(crate) fn status_of<T, F>(result: &Nfs3Result<T, F>) -> Status {
    match result {
        Ok(_) => Status::OK,
        Err(failure) => failure.status,
    }
}
