//! What the kernel counts, counted here, too.

use super::*;
use crate::abi::ForgetOne;
use pagemesh_fs::{MakeOptions, make};

#[path = "../../../../fs/tests/support/memory.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod memory;

const ROOT: u64 = 1;

struct Kernel(Served);

impl Kernel {
    fn new() -> Kernel {
        let memory = memory::Memory::new(1 << 30);
        let options = MakeOptions {
            uuid: uuid::Uuid::from_u128(1),
            hash_key: [2, 3],
            limit_bytes: 1 << 24,
            owner: Caller { uid: 0, gid: 0 },
            mode: 0o777,
        };
        make(&memory.shared(), memory::wait, crate::now, options).expect("there is room");
        let fs = Fs::mount(memory.shared(), memory::wait, crate::now).expect("it was made");
        let trouble = |error: &_| panic!("memory fails nothing: {error}");
        Kernel(Served::new(
            Arc::new(fs),
            Box::new(trouble),
            Box::new(|| None),
        ))
    }

    fn ask(&self, node: u64, request: Request<'_>) -> Answer {
        let header = abi::InHeader {
            node,
            ..abi::InHeader::default()
        };
        let answer = self.0.handle(&header, request);
        assert_eq!(answer.error(), 0, "{answer:?}");
        answer
    }

    /// Asks for what tells of a node, which comes first.
    fn node(&self, parent: u64, request: Request<'_>) -> u64 {
        let answer = self.ask(parent, request);
        let first = answer.bytes().first_chunk().expect("a node");
        u64::from_ne_bytes(*first)
    }

    fn inodes(&self) -> u64 {
        self.0.fs.usage().inodes
    }
}

#[test]
fn an_inode_stays_until_the_kernel_forgets_it() {
    let kernel = Kernel::new();
    let before = kernel.inodes();
    let (name, other): (&[u8], &[u8]) = (b"name", b"other");
    let mode = 0o600;
    let list = |size| Request::ReadDirPlus(Span { offset: 0, size });
    // Each of these tells of it once.
    let node = kernel.node(ROOT, Request::Create { name, mode });
    kernel.ask(ROOT, Request::Lookup(name));
    kernel.ask(ROOT, Request::Link { node, name: other });
    // It stands there twice, and does not fit in once.
    kernel.ask(ROOT, list(4096));
    let dots = 2 * (size_of::<abi::EntryOut>() + size_of::<abi::Dirent>() + 8);
    let listed = kernel.ask(ROOT, list(dots as u32 + 100));
    assert_eq!(listed.bytes().len(), dots);
    let told = 5;
    // And these do not.
    let span = Span {
        offset: 0,
        size: 4096,
    };
    kernel.ask(ROOT, Request::ReadDir(span));
    kernel.ask(node, Request::GetAttr);
    let unnamed = kernel.node(ROOT, Request::CreateUnnamed { mode });

    kernel.ask(ROOT, Request::Unlink(name));
    kernel.ask(ROOT, Request::Unlink(other));
    for node in [node, unnamed] {
        kernel.ask(node, Request::Release);
    }
    kernel.ask(node, Request::Forget(told - 2));
    assert_eq!(kernel.inodes(), before + 2);
    let forget = |node| ForgetOne { node, lookups: 1 };
    kernel.ask(0, Request::ForgetAll(vec![forget(unnamed), forget(node)]));
    assert_eq!(kernel.inodes(), before + 1);
    kernel.ask(node, Request::Forget(1));
    assert_eq!(kernel.inodes(), before);
}

#[test]
fn who_may_not_loses_set_id_bits() {
    let kernel = Kernel::new();
    let name: &[u8] = b"name";
    let node = kernel.node(ROOT, Request::Create { name, mode: 0o6755 });
    let mode = || kernel.0.fs.attr(Ino(node)).map(|attr| attr.mode).ok();
    let write = |how| Request::Write {
        offset: 0,
        data: Bytes::from_static(b"x"),
        flags: 0,
        how,
    };
    kernel.ask(node, write(0));
    assert_eq!(mode(), Some(0o6755));
    kernel.ask(node, write(abi::WRITE_KILL_SUIDGID));
    assert_eq!(mode(), Some(0o755));
}

#[test]
fn appended_is_what_did_not_come_from_a_mapping() {
    let kernel = Kernel::new();
    let (name, mode): (&[u8], u32) = (b"name", 0o600);
    let node = kernel.node(ROOT, Request::Create { name, mode });
    let size = || kernel.0.fs.attr(Ino(node)).map(|attr| attr.size).ok();
    let write = |how| Request::Write {
        offset: 0,
        data: Bytes::from_static(b"xyz"),
        flags: OFlags::APPEND.bits(),
        how,
    };
    kernel.ask(node, write(0));
    kernel.ask(node, write(0));
    assert_eq!(size(), Some(6));
    kernel.ask(node, write(abi::WRITE_CACHE));
    assert_eq!(size(), Some(6));
}
