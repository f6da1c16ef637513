//! A client of the server: one connection and one user.

use super::client::{self, Encoder};
use super::decoder::Decoder;
use super::world::{OWNER, ServedWorld};
use pagemesh_nfs::handle::HandleBytes;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::{
    Attributes, ChangeAttributes, SetAttributes, SetAttributesArguments, Time,
};
use pagemesh_nfs::nfs3::files::{Durability, ReadArguments, WriteArguments};
use pagemesh_nfs::nfs3::listing::{
    CookieVerifier, ListArguments, ListPlusArguments, ListingBudget,
};
use pagemesh_nfs::nfs3::names::{
    CreateArguments, CreateMode, DirectoryName, FileName, MakeDirectoryArguments, RenameArguments,
};
use pagemesh_nfs::nfs3::status::Status;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

pub const NFS: u32 = 100_003;
pub const MOUNT: u32 = 100_005;

/// The procedure number of a call.
fn procedure(call: &Nfs3Call<'_>) -> u32 {
    match call {
        Nfs3Call::Null => 0,
        Nfs3Call::GetAttributes(_) => 1,
        Nfs3Call::SetAttributes(_) => 2,
        Nfs3Call::Lookup(_) => 3,
        Nfs3Call::Access(_) => 4,
        Nfs3Call::ReadSymlink(_) => 5,
        Nfs3Call::Read(_) => 6,
        Nfs3Call::Write(_) => 7,
        Nfs3Call::Create(_) => 8,
        Nfs3Call::MakeDirectory(_) => 9,
        Nfs3Call::MakeSymlink(_) => 10,
        Nfs3Call::MakeNode(_) => 11,
        Nfs3Call::Remove(_) => 12,
        Nfs3Call::RemoveDirectory(_) => 13,
        Nfs3Call::Rename(_) => 14,
        Nfs3Call::Link(_) => 15,
        Nfs3Call::List(_) => 16,
        Nfs3Call::ListPlus(_) => 17,
        Nfs3Call::SpaceUsage(_) => 18,
        Nfs3Call::ServerLimits(_) => 19,
        Nfs3Call::NameRules(_) => 20,
        Nfs3Call::Commit(_) => 21,
    }
}

/// A name in a directory.
pub fn at<'a>(directory: &'a [u8], name: &'a str) -> DirectoryName<'a> {
    DirectoryName {
        directory: HandleBytes(directory),
        name: FileName(name.as_bytes()),
    }
}

/// Attributes of a new file.
pub fn mode(mode: u32) -> SetAttributes {
    SetAttributes {
        mode: Some(mode),
        ..SetAttributes::default()
    }
}

/// A new or found file.
#[derive(Debug)]
pub struct Made {
    pub handle: Vec<u8>,
    pub attributes: Attributes,
    pub directory: ChangeAttributes,
}

/// The result of a WRITE.
#[derive(Debug)]
pub struct Written {
    pub change: ChangeAttributes,
    pub count: u32,
    pub durability: u32,
    pub verifier: u64,
}

/// An entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub inode: u64,
    pub name: String,
    pub cookie: u64,
    pub attributes: Option<Attributes>,
    pub handle: Option<Vec<u8>>,
}

/// A part of a listing.
#[derive(Debug)]
pub struct ListedPart {
    pub entries: Vec<Listed>,
    pub is_end: bool,
    pub verifier: CookieVerifier,
}

/// See the module.
pub struct Session {
    pub stream: TcpStream,
    xid: u32,
    /// User, group and further groups; none: AUTH_NONE.
    pub user: Option<(u32, u32, Vec<u32>)>,
}

impl Session {
    /// A session of the owner of the root.
    pub fn new(world: &ServedWorld) -> Session {
        Session::of(world, Some((OWNER.uid, OWNER.gid, Vec::new())))
    }

    pub fn of(world: &ServedWorld, user: Option<(u32, u32, Vec<u32>)>) -> Session {
        let stream = TcpStream::connect(world.server.local_addrs()[0]).expect("connected");
        Session::on(stream, user)
    }

    /// A session from an address of this machine.
    pub fn from_address(
        world: &ServedWorld,
        from: SocketAddr,
        user: Option<(u32, u32, Vec<u32>)>,
    ) -> Session {
        Session::try_from_address(world, from, user).expect("connected")
    }

    /// As [`Session::from_address`], if this process may use the address.
    pub fn try_from_address(
        world: &ServedWorld,
        from: SocketAddr,
        user: Option<(u32, u32, Vec<u32>)>,
    ) -> std::io::Result<Session> {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
        bind(&socket, &from)?;
        connect(&socket, &world.server.local_addrs()[0])?;
        Ok(Session::on(TcpStream::from(socket), user))
    }

    fn on(stream: TcpStream, user: Option<(u32, u32, Vec<u32>)>) -> Session {
        let limit = Some(Duration::from_secs(30));
        stream.set_read_timeout(limit).expect("a limit");
        stream.set_write_timeout(limit).expect("a limit");
        Session {
            stream,
            xid: 1,
            user,
        }
    }

    /// The record of a call with the next xid, and its mark.
    pub fn framed(&mut self, (program, version): (u32, u32), number: u32, rest: &[u8]) -> Vec<u8> {
        self.xid += 1;
        let mut out = Encoder::default();
        out.word(0).word(self.xid).word(0).word(2);
        out.word(program).word(version).word(number);
        match &self.user {
            None => out.word(0).word(0),
            Some((uid, gid, groups)) => {
                let mut body = Encoder::default();
                body.word(0).opaque(b"host").word(*uid).word(*gid);
                body.word(groups.len() as u32);
                for group in groups {
                    body.word(*group);
                }
                out.word(1).opaque(&body.0)
            }
        };
        out.word(0).word(0);
        out.0.extend(rest);
        let mark = (out.0.len() - 4) as u32 | 1 << 31;
        out.0[..4].copy_from_slice(&mark.to_be_bytes());
        out.0
    }

    /// The next reply; none at the end of the stream.
    pub fn receive(&mut self) -> Option<Vec<u8>> {
        let mut mark = [0; 4];
        match self.stream.read(&mut mark[..1]) {
            Ok(0) => return None,
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("no reply in time"),
            Err(_) => return None,
        }
        self.stream.read_exact(&mut mark[1..]).ok()?;
        let mark = u32::from_be_bytes(mark);
        assert!(mark & 1 << 31 != 0, "one fragment");
        let mut reply = vec![0; (mark & !(1 << 31)) as usize];
        self.stream.read_exact(&mut reply).ok()?;
        Some(reply)
    }

    /// The reply to a call, after its xid and type.
    pub fn exchange(&mut self, program: (u32, u32), number: u32, rest: &[u8]) -> Option<Vec<u8>> {
        let record = self.framed(program, number, rest);
        self.stream.write_all(&record).ok()?;
        let reply = self.receive()?;
        let mut client = Decoder(&reply);
        assert_eq!((client.word(), client.word()), (self.xid, 1));
        Some(client.0.to_vec())
    }

    /// The result of a call that is executed.
    #[track_caller]
    fn executed(&mut self, program: u32, number: u32, rest: &[u8]) -> Vec<u8> {
        let reply = self.exchange((program, 3), number, rest).expect("a reply");
        let mut client = Decoder(&reply);
        let header: [u32; 4] = std::array::from_fn(|_| client.word());
        assert_eq!(header, [0; 4], "not executed");
        client.0.to_vec()
    }

    /// The result of a call.
    #[track_caller]
    pub fn call(&mut self, call: &Nfs3Call<'_>) -> Vec<u8> {
        self.executed(NFS, procedure(call), &client::arguments(call))
    }

    /// The bytes of a call on the stream.
    pub fn bytes_of(&mut self, call: &Nfs3Call<'_>) -> Vec<u8> {
        self.framed((NFS, 3), procedure(call), &client::arguments(call))
    }

    #[track_caller]
    pub fn mount(&mut self, path: &str) -> Result<Vec<u8>, u32> {
        let mut rest = Encoder::default();
        rest.opaque(path.as_bytes());
        let result = self.executed(MOUNT, 1, &rest.0);
        let mut client = Decoder(&result);
        match client.word() {
            0 => Ok(client.opaque().to_vec()),
            status => Err(status),
        }
    }

    #[track_caller]
    pub fn mount_call(&mut self, number: u32) -> Vec<u8> {
        self.executed(MOUNT, number, &[])
    }

    /// The root of the export.
    #[track_caller]
    pub fn root(&mut self) -> Vec<u8> {
        self.mount("/data").expect("mounted")
    }

    #[track_caller]
    pub fn attributes(&mut self, file: &[u8]) -> Result<Attributes, Status> {
        let result = self.call(&Nfs3Call::GetAttributes(HandleBytes(file)));
        let mut client = Decoder(&result);
        check(&mut client)?;
        // The attributes of GETATTR are not optional.
        let some = [&[0, 0, 0, 1][..], client.0].concat();
        let mut client = Decoder(&some);
        let attributes = client.attributes().expect("attributes");
        client.end();
        Ok(attributes)
    }

    #[track_caller]
    pub fn lookup(&mut self, directory: &[u8], name: &str) -> Result<Made, Status> {
        let result = self.call(&Nfs3Call::Lookup(at(directory, name)));
        let mut client = Decoder(&result);
        check(&mut client)?;
        let handle = client.opaque().to_vec();
        let attributes = client.attributes().expect("attributes");
        let after = client.attributes();
        client.end();
        Ok(Made {
            handle,
            attributes,
            directory: ChangeAttributes {
                before: None,
                after,
            },
        })
    }

    /// The result of a call that makes a file.
    #[track_caller]
    pub fn make(&mut self, call: &Nfs3Call<'_>) -> Result<Made, Status> {
        let result = self.call(call);
        let mut client = Decoder(&result);
        check(&mut client)?;
        let handle = client.optional(|it| it.opaque().to_vec());
        let attributes = client.attributes();
        let directory = client.change();
        client.end();
        Ok(Made {
            handle: handle.expect("a handle"),
            attributes: attributes.expect("attributes"),
            directory,
        })
    }

    #[track_caller]
    pub fn create_as(
        &mut self,
        directory: &[u8],
        name: &str,
        mode: CreateMode<'_>,
    ) -> Result<Made, Status> {
        let at = at(directory, name);
        self.make(&Nfs3Call::Create(CreateArguments { at, mode }))
    }

    #[track_caller]
    pub fn create(&mut self, directory: &[u8], name: &str, bits: u32) -> Result<Made, Status> {
        self.create_as(directory, name, CreateMode::Guarded(mode(bits)))
    }

    #[track_caller]
    pub fn make_directory(&mut self, parent: &[u8], name: &str, bits: u32) -> Result<Made, Status> {
        let call = MakeDirectoryArguments {
            at: at(parent, name),
            attributes: mode(bits),
        };
        self.make(&Nfs3Call::MakeDirectory(call))
    }

    /// The result of a call that has the attributes of one change.
    #[track_caller]
    pub fn change(&mut self, call: &Nfs3Call<'_>) -> Result<ChangeAttributes, Status> {
        let result = self.call(call);
        let mut client = Decoder(&result);
        check(&mut client)?;
        let change = client.change();
        client.end();
        Ok(change)
    }

    #[track_caller]
    pub fn remove(&mut self, directory: &[u8], name: &str) -> Result<ChangeAttributes, Status> {
        self.change(&Nfs3Call::Remove(at(directory, name)))
    }

    #[track_caller]
    pub fn rename(
        &mut self,
        from: (&[u8], &str),
        to: (&[u8], &str),
    ) -> Result<(ChangeAttributes, ChangeAttributes), Status> {
        let result = self.call(&Nfs3Call::Rename(RenameArguments {
            from: at(from.0, from.1),
            to: at(to.0, to.1),
        }));
        let mut client = Decoder(&result);
        check(&mut client)?;
        let changes = (client.change(), client.change());
        client.end();
        Ok(changes)
    }

    #[track_caller]
    pub fn set_attributes(
        &mut self,
        file: &[u8],
        change: SetAttributes,
        guard: Option<Time>,
    ) -> Result<ChangeAttributes, Status> {
        self.change(&Nfs3Call::SetAttributes(SetAttributesArguments {
            file: HandleBytes(file),
            change,
            guard,
        }))
    }

    #[track_caller]
    pub fn write(&mut self, file: &[u8], offset: u64, data: &[u8]) -> Result<Written, Status> {
        self.write_as(file, offset, data, Durability::Unstable)
    }

    #[track_caller]
    pub fn write_as(
        &mut self,
        file: &[u8],
        offset: u64,
        data: &[u8],
        durability: Durability,
    ) -> Result<Written, Status> {
        let result = self.call(&Nfs3Call::Write(WriteArguments {
            file: HandleBytes(file),
            offset,
            durability,
            data,
        }));
        let mut client = Decoder(&result);
        check(&mut client)?;
        let written = Written {
            change: client.change(),
            count: client.word(),
            durability: client.word(),
            verifier: client.long(),
        };
        client.end();
        Ok(written)
    }

    /// Data, and whether the file ends behind it.
    #[track_caller]
    pub fn read(
        &mut self,
        file: &[u8],
        offset: u64,
        count: u32,
    ) -> Result<(Vec<u8>, bool), Status> {
        let result = self.call(&Nfs3Call::Read(ReadArguments {
            file: HandleBytes(file),
            offset,
            count,
        }));
        let mut client = Decoder(&result);
        check(&mut client)?;
        assert!(client.attributes().is_some());
        let (count, is_end) = (client.word(), client.word() == 1);
        let data = client.opaque().to_vec();
        client.end();
        assert_eq!(data.len(), count as usize);
        Ok((data, is_end))
    }

    /// Lists from a cookie, with attributes and handles if `is_plus`.
    #[track_caller]
    pub fn list(
        &mut self,
        directory: &[u8],
        from: (u64, CookieVerifier),
        bytes: u32,
        is_plus: bool,
    ) -> Result<ListedPart, Status> {
        let list = ListArguments {
            directory: HandleBytes(directory),
            cookie: from.0,
            verifier: from.1,
            budget: ListingBudget {
                result_bytes: bytes,
                name_bytes: bytes,
            },
        };
        let result = match is_plus {
            true => self.call(&Nfs3Call::ListPlus(ListPlusArguments(list))),
            false => self.call(&Nfs3Call::List(list)),
        };
        assert!(result.len() <= bytes as usize + 4, "beyond the budget");
        let mut client = Decoder(&result);
        check(&mut client)?;
        assert!(client.attributes().is_some());
        let verifier = CookieVerifier(client.long().to_be_bytes());
        let mut entries = Vec::new();
        while client.word() == 1 {
            entries.push(Listed {
                inode: client.long(),
                name: String::from_utf8(client.opaque().to_vec()).expect("a name"),
                cookie: client.long(),
                attributes: is_plus.then(|| client.attributes()).flatten(),
                handle: is_plus
                    .then(|| client.optional(|it| it.opaque().to_vec()))
                    .flatten(),
            });
        }
        let is_end = client.word() == 1;
        client.end();
        Ok(ListedPart {
            entries,
            is_end,
            verifier,
        })
    }
}

/// Takes the status of a result.
pub fn check(client: &mut Decoder<'_>) -> Result<(), Status> {
    match client.word() {
        0 => Ok(()),
        number => Err(Status::from_number(number).expect("a status")),
    }
}
