//! Random reads, writes and truncations of one file, by the client, against a model: the method of
//! fsx (Apple, FreeBSD and the Linux Test Project have it).

use crate::support;
use pagemesh_nfs::Squash;
use pagemesh_nfs_client::nfs3::{
    Commit, Create, CreateHow, GetAttributes, Handle, Read, SetAttributes, SetAttributesCall,
    StableHow, Write,
};
use pagemesh_nfs_client::{Client, Credential};
use std::time::Duration;
use support::{OWNER, TestServer};

/// The largest size of the file in bytes.
const SIZE_MAX: u64 = 256 << 10;
const OPERATIONS: usize = 4000;

/// Random numbers (xorshift64*, Vigna 2014).
struct Rng(u64);

impl Rng {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % end
    }
}

struct ModelledFile {
    client: Client,
    file: Handle,
    model: Vec<u8>,
    verifier: Option<[u8; 8]>,
}

impl ModelledFile {
    fn new(server: &TestServer) -> ModelledFile {
        let owner = Credential::sys(OWNER.uid, OWNER.gid);
        let limit = Duration::from_secs(60);
        let mut client = Client::connect(server.address(), owner, limit).unwrap();
        let root = client.mount(b"/data").unwrap();
        let made = client.call(&Create {
            directory: &root,
            name: b"file",
            how: CreateHow::Guarded(SetAttributes::mode(0o644)),
        });
        ModelledFile {
            file: made.unwrap().unwrap().handle.unwrap(),
            client,
            model: Vec::new(),
            verifier: None,
        }
    }

    /// A constant verifier promises that no unstable data was lost.
    fn check_verifier(&mut self, verifier: [u8; 8]) {
        assert_eq!(*self.verifier.get_or_insert(verifier), verifier);
    }

    fn write(&mut self, rng: &mut Rng, stable: StableHow) {
        let offset = rng.below(SIZE_MAX - 1);
        let len = 1 + rng.below((SIZE_MAX - offset).min(40_000));
        let byte = rng.below(256) as u8;
        let data: Vec<u8> = (0..len).map(|at| byte.wrapping_add(at as u8)).collect();
        let written = self.client.call(&Write {
            file: &self.file,
            offset,
            stable,
            data: &data,
        });
        let written = written.unwrap().unwrap();
        assert_eq!(written.count as usize, data.len());
        assert!(written.committed >= stable);
        self.check_verifier(written.verifier);
        let end = (offset + len) as usize;
        self.model.resize(self.model.len().max(end), 0);
        self.model[offset as usize..end].copy_from_slice(&data);
    }

    fn read(&mut self, offset: u64, count: u32) {
        let read = self.client.call(&Read {
            file: &self.file,
            offset,
            count,
        });
        let read = read.unwrap().unwrap();
        let start = self.model.len().min(offset as usize);
        let end = self.model.len().min(start + count as usize);
        assert!(
            read.data == self.model[start..end],
            "{count} bytes at {offset}"
        );
        assert_eq!(
            read.is_end,
            offset + u64::from(count) >= self.model.len() as u64
        );
    }

    fn set_size(&mut self, size: u64) {
        let set = self.client.call(&SetAttributesCall {
            file: &self.file,
            attributes: SetAttributes::size(size),
            guard: None,
        });
        let after = set.unwrap().unwrap().after.unwrap();
        assert_eq!(after.size_bytes, size);
        self.model.resize(size as usize, 0);
    }

    fn commit(&mut self) {
        let committed = self.client.call(&Commit {
            file: &self.file,
            offset: 0,
            count: 0,
        });
        let verifier = committed.unwrap().unwrap().verifier;
        self.check_verifier(verifier);
    }

    fn check_size(&mut self) {
        let file = &self.file;
        let found = self.client.call(&GetAttributes { file });
        let size = found.unwrap().unwrap().size_bytes;
        assert_eq!(size, self.model.len() as u64);
    }

    fn step(&mut self, rng: &mut Rng) {
        match rng.below(10) {
            0..=2 => self.write(rng, StableHow::Unstable),
            3 => self.write(rng, StableHow::FileSync),
            4..=6 => {
                let offset = rng.below(SIZE_MAX);
                self.read(offset, 1 + rng.below(50_000) as u32);
            }
            7 => self.set_size(rng.below(SIZE_MAX)),
            8 => self.commit(),
            _ => self.check_size(),
        }
    }
}

#[track_caller]
fn check(server: &TestServer, seed: u64) {
    let mut file = ModelledFile::new(server);
    let mut rng = Rng(seed);
    for _ in 0..OPERATIONS {
        file.step(&mut rng);
    }
    file.read(0, SIZE_MAX as u32);
}

#[test]
fn random_operations_match_the_model() {
    check(&TestServer::start(Squash::Root), 0x5eed_0001);
}

#[test]
fn random_operations_with_a_cache_match_the_model() {
    check(&TestServer::with_write_cache(), 0x5eed_0002);
}
