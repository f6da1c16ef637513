//! The tier of files: an attribute, and the hints of requests for data.

use crate::support;
use bytes::Bytes;
use pagemesh_base::space::{Channel, Completion, Request, Space, SpaceError, Token};
use pagemesh_base::tier_hint::TierHint;
use pagemesh_fs::{CreateKind, Fs, Ino, RenameMode, SetXattrMode};
use rustix::io::Errno;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use support::memory::{MemorySpace, wait};
use support::{OWNER, clock, new_fs};

const NAME: &[u8] = b"user.pagemesh.tier";
const SIZE: u64 = 64 << 20;

fn set(fs: &Fs, ino: Ino, value: &[u8]) -> Result<(), Errno> {
    let done = fs.set_xattr(ino, NAME, value, SetXattrMode::Always);
    done.map_err(|cause| cause.errno())
}

fn create(fs: &Fs, parent: Ino, name: &[u8], kind: CreateKind<'_>) -> Ino {
    fs.create(parent, name, kind, 0o700, OWNER).unwrap().ino
}

#[test]
fn new_entries_inherit_the_tier_of_their_directory() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _channel) = new_fs(&memory);
    let old = create(&fs, Ino::ROOT, b"old", CreateKind::File);
    let directory = create(&fs, Ino::ROOT, b"d", CreateKind::Directory);
    set(&fs, directory, b"memory").unwrap();
    let below = create(&fs, directory, b"below", CreateKind::Directory);
    let file = create(&fs, below, b"file", CreateKind::File);
    assert_eq!(fs.xattr(file, NAME).unwrap(), b"memory");
    assert_eq!(fs.xattr(old, NAME).unwrap_err().errno(), Errno::NODATA);
    // A file keeps its own.
    set(&fs, file, b"flash").unwrap();
    fs.rename((below, b"file"), (directory, b"moved"), RenameMode::Replace)
        .unwrap();
    drop(fs);
    let fs = Fs::mount(Arc::new(memory.clone()), wait, clock).unwrap();
    assert_eq!(fs.xattr(file, NAME).unwrap(), b"flash");
    assert_eq!(fs.xattr_names(file).unwrap(), [NAME]);
    fs.remove_xattr(file, NAME).unwrap();
    assert_eq!(fs.xattr_names(file).unwrap().len(), 0);
    let again = fs.remove_xattr(file, NAME).unwrap_err();
    assert_eq!(again.errno(), Errno::NODATA);
}

#[test]
fn other_values_of_the_tier_are_refused() {
    let memory = MemorySpace::new(SIZE);
    let (fs, _channel) = new_fs(&memory);
    let file = create(&fs, Ino::ROOT, b"file", CreateKind::File);
    for value in [&b"auto"[..], b"", b"Memory", b"memory\0", &[1; 9000]] {
        assert_eq!(set(&fs, file, value), Err(Errno::INVAL), "{value:?}");
    }
    let link = create(&fs, Ino::ROOT, b"link", CreateKind::Symlink(b"file"));
    assert_eq!(set(&fs, link, b"memory"), Err(Errno::PERM));
    set(&fs, file, b"memory").unwrap();
    let new = fs.set_xattr(file, NAME, b"flash", SetXattrMode::Create);
    assert_eq!(new.unwrap_err().errno(), Errno::EXIST);
}

/// Notes the hints of reads, writes and transactions.
#[derive(Clone)]
struct HintedSpace {
    memory: MemorySpace,
    hints: Arc<Mutex<Vec<(&'static str, TierHint)>>>,
}

struct HintedChannel {
    channel: Box<dyn Channel>,
    hints: Arc<Mutex<Vec<(&'static str, TierHint)>>>,
}

impl Space for HintedSpace {
    fn size_bytes(&self) -> u64 {
        self.memory.size_bytes()
    }

    fn open(&self) -> Result<Box<dyn Channel>, SpaceError> {
        let (channel, hints) = (self.memory.open()?, self.hints.clone());
        Ok(Box::new(HintedChannel { channel, hints }))
    }
}

impl Channel for HintedChannel {
    fn submit(&mut self, token: Token, request: Request) {
        self.submit_hinted(token, request, TierHint::None);
    }

    fn submit_hinted(&mut self, token: Token, request: Request, hint: TierHint) {
        let kind = match request {
            Request::Read { .. } => "read",
            Request::Write { .. } => "write",
            Request::Transact { .. } => "transact",
            _ => "other",
        };
        self.hints.lock().unwrap().push((kind, hint));
        self.channel.submit_hinted(token, request, hint);
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        self.channel.reap(into);
    }

    fn poll_fds(&self, into: &mut Vec<RawFd>) {
        self.channel.poll_fds(into);
    }
}

#[test]
fn requests_for_data_carry_the_hint_of_the_file() {
    let memory = MemorySpace::new(SIZE);
    drop(new_fs(&memory));
    let hints = Arc::default();
    let space = HintedSpace { memory, hints };
    let fs = Fs::mount(Arc::new(space.clone()), wait, clock).unwrap();
    let mut channel = fs.open_channel().unwrap();
    let file = create(&fs, Ino::ROOT, b"file", CreateKind::File);
    let bytes = Bytes::from(vec![7; 8192]);
    let mut check = |first: TierHint, rest: TierHint| {
        space.hints.lock().unwrap().clear();
        let end = fs.attr(file).unwrap().size;
        fs.write(&mut channel, file, Some(end), &bytes, false)
            .unwrap();
        fs.write(&mut channel, file, Some(0), &bytes, false)
            .unwrap();
        fs.read(&mut channel, file, 0, 8192).unwrap();
        let seen = space.hints.lock().unwrap();
        for wanted in [("transact", first), ("write", rest), ("read", rest)] {
            assert!(seen.contains(&wanted), "{wanted:?} in {seen:?}");
        }
    };
    check(TierHint::None, TierHint::Automatic);
    set(&fs, file, b"memory").unwrap();
    check(TierHint::Memory, TierHint::Memory);
    set(&fs, file, b"flash").unwrap();
    check(TierHint::None, TierHint::Flash);
}
