//! Calls on the files of one directory, for NFSv3 and NFSv4.1 alike.

use pagemesh_nfs_client::nfs3::StableHow;
use std::net::SocketAddr;

pub const OK: u32 = 0;
pub const NOENT: u32 = 2;
pub const EXIST: u32 = 17;

/// Random numbers (xorshift64*, Vigna 2014).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
}

/// A call. All names are names in the root of the export.
#[derive(Clone, Debug)]
pub enum FileCall {
    /// Creates a file; an existing name is an error.
    Create(Vec<u8>),
    /// Creates a file with a verifier; an existing name with another verifier is an error.
    CreateExclusive(Vec<u8>, [u8; 8]),
    Remove(Vec<u8>),
    Rename(Vec<u8>, Vec<u8>),
    /// Adds the second name to the file of the first one.
    Link(Vec<u8>, Vec<u8>),
    Write {
        name: Vec<u8>,
        offset: u64,
        data: Vec<u8>,
        stable: StableHow,
    },
    Read {
        name: Vec<u8>,
        offset: u64,
        count: u32,
    },
    SetSize(Vec<u8>, u64),
    /// Commits a whole file.
    Commit(Vec<u8>),
    /// Lists the directory, which must fit in one reply.
    List,
}

/// The fields of a reply that the model knows. Fields that a call does not have are zero or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub status: u32,
    pub count: u32,
    /// As stable_how: 0 is UNSTABLE.
    pub committed: u32,
    pub verifier: [u8; 8],
    pub data: Vec<u8>,
    pub is_end: bool,
    pub names: Vec<Vec<u8>>,
}

/// A client of one version of the protocol.
pub trait FileClient {
    /// Sends a new call.
    fn send(&mut self, call: &FileCall) -> Outcome;

    /// Sends the last call of [`FileClient::send`] again, as a client without a reply does.
    fn send_again(&mut self, call: &FileCall) -> Outcome;

    /// Drops the connection and makes a new one to the same life of the server.
    fn break_connection(&mut self);

    /// Connects to the next life of the server.
    fn reconnect(&mut self, server: SocketAddr);
}
