//! The server's lookup counts agree with the kernel's.

use super::*;
use crate::abi::ForgetOne;
use crate::request::ReadRange;
use bytes::Bytes;
use pagemesh_fs::{MkfsOptions, mkfs};

#[path = "../../../../fs/tests/support/lossy.rs"]
#[allow(dead_code)]
mod lossy;
#[path = "../../../../fs/tests/support/memory.rs"]
#[allow(dead_code, clippy::unwrap_used)]
mod memory;

const ROOT: u64 = 1;

struct KernelModel(FsHandler, lossy::LossySpace);

fn mount_options() -> MountOptions {
    MountOptions {
        source: "pagemesh:test".into(),
        threads: 1,
        allow_other: false,
        flags: crate::MountFlags::default(),
        transport: crate::Transport::Classic,
        may_keep_cpus_awake: false,
        caching: Caching::PageCache,
        shows_snapshots: false,
        is_shared: false,
    }
}

impl KernelModel {
    fn new() -> KernelModel {
        let memory = memory::MemorySpace::new(1 << 30);
        let options = MkfsOptions {
            uuid: uuid::Uuid::from_u128(1),
            hash_key: [2, 3],
            limit_bytes: 1 << 24,
            owner: Credentials { uid: 0, gid: 0 },
            mode: 0o777,
        };
        mkfs(&memory.shared(), memory::wait, crate::now, options).expect("there is room");
        let space = lossy::LossySpace::new(&memory);
        let shared = Arc::new(space.clone());
        let fs = Fs::mount(shared, memory::wait, crate::now).expect("it was made");
        let served = FsHandler::new(
            Arc::new(fs),
            Box::new(|_| {}),
            Box::new(|| None),
            Arc::default(),
            &mount_options(),
            Arc::default(),
            Arc::default(),
        );
        KernelModel(served, space)
    }

    fn answer(&self, node: u64, request: Request<'_>) -> FuseReply {
        let header = abi::InHeader {
            node,
            ..abi::InHeader::default()
        };
        self.0.handle(&header, request)
    }

    fn ask(&self, node: u64, request: Request<'_>) -> FuseReply {
        let answer = self.answer(node, request);
        assert_eq!(answer.error(), 0, "{answer:?}");
        answer
    }

    /// Opens a file: its number.
    fn open(&self, node: u64, flags: OFlags) -> u64 {
        let flags = flags.bits();
        let answer = self.ask(node, Request::Open { flags });
        u64::from_ne_bytes(*answer.bytes().first_chunk().expect("a file"))
    }

    /// Sends a request that counts as a lookup of a node; the answer begins with its number.
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
fn inode_stays_until_the_kernel_forgets_it() {
    let kernel = KernelModel::new();
    let before = kernel.inodes();
    let (name, other): (&[u8], &[u8]) = (b"name", b"other");
    let mode = 0o600;
    let list = |size| Request::ReadDirPlus(ReadRange { offset: 0, size });
    // Each of these counts as a lookup once.
    let node = kernel.node(
        ROOT,
        Request::Create {
            name,
            mode,
            umask: 0,
            flags: 0,
        },
    );
    kernel.ask(ROOT, Request::Lookup(name));
    kernel.ask(ROOT, Request::Link { node, name: other });
    // It is listed twice, and does not fit in once.
    kernel.ask(ROOT, list(4096));
    let dots = 2 * (size_of::<abi::EntryOut>() + size_of::<abi::Dirent>() + 8);
    let listed = kernel.ask(ROOT, list(dots as u32 + 100));
    assert_eq!(listed.bytes().len(), dots);
    let told = 5;
    // These are not lookups.
    let span = ReadRange {
        offset: 0,
        size: 4096,
    };
    kernel.ask(ROOT, Request::ReadDir(span));
    kernel.ask(node, Request::GetAttr);
    let unnamed = kernel.node(
        ROOT,
        Request::CreateUnnamed {
            mode,
            umask: 0,
            flags: 0,
        },
    );

    kernel.ask(ROOT, Request::Unlink(name));
    kernel.ask(ROOT, Request::Unlink(other));
    for node in [node, unnamed] {
        kernel.ask(node, Request::Release { file: 0 });
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
fn unprivileged_write_clears_setid_bits() {
    let kernel = KernelModel::new();
    let name: &[u8] = b"name";
    let node = kernel.node(
        ROOT,
        Request::Create {
            name,
            mode: 0o6755,
            umask: 0,
            flags: 0,
        },
    );
    let mode = || kernel.0.fs.attr(Ino(node)).map(|attr| attr.mode).ok();
    let write = |how| Request::Write {
        file: 0,
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
fn mmap_writeback_is_not_appended() {
    let kernel = KernelModel::new();
    let (name, mode): (&[u8], u32) = (b"name", 0o600);
    let node = kernel.node(
        ROOT,
        Request::Create {
            name,
            mode,
            umask: 0,
            flags: 0,
        },
    );
    let size = || kernel.0.fs.attr(Ino(node)).map(|attr| attr.size).ok();
    let write = |how| Request::Write {
        file: 0,
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

#[test]
fn lost_write_is_reported_once_per_open_file() {
    let kernel = KernelModel::new();
    let (name, mode, flags): (&[u8], _, _) = (b"name", 0o600, 0);
    let node = kernel.node(
        ROOT,
        Request::Create {
            name,
            mode,
            umask: 0,
            flags,
        },
    );
    let open = || kernel.open(node, OFlags::RDWR);
    let sync = |file| {
        kernel
            .answer(
                node,
                Request::Fsync {
                    file,
                    is_data_only: false,
                },
            )
            .error()
    };
    let [one, other, closed] = [open(), open(), open()];
    kernel.ask(node, Request::Release { file: closed });
    kernel.1.lose_writes();
    let told = -Errno::IO.raw_os_error();
    assert_eq!([one, other, one, other].map(sync), [told, told, 0, 0]);
    assert_eq!(sync(open()), 0);
}

#[test]
fn changes_of_file_opened_o_sync_are_flushed() {
    let kernel = KernelModel::new();
    let (name, mode, flags): (&[u8], _, _) = (b"name", 0o600, 0);
    let node = kernel.node(
        ROOT,
        Request::Create {
            name,
            mode,
            umask: 0,
            flags,
        },
    );
    let (mode, offset) = (0, 0);
    for (number, (how, flushes)) in [(OFlags::RDWR, 0), (OFlags::DSYNC, 1), (OFlags::SYNC, 1)]
        .into_iter()
        .enumerate()
    {
        // Each round changes the file: without a change there is nothing to flush.
        let length = (number as u64 + 1) << 20;
        let file = kernel.open(node, how);
        let before = kernel.1.flushes();
        kernel.ask(
            node,
            Request::Allocate {
                file,
                offset,
                length,
                mode,
            },
        );
        assert_eq!(kernel.1.flushes() - before, flushes, "{how:?}");
        let copy = Request::Copy {
            from: 0,
            to_file: file,
            to_node: node,
            to: 1 << 19,
            len: 4096,
        };
        kernel.ask(node, copy);
        assert_eq!(kernel.1.flushes() - before, 2 * flushes, "{how:?}");
    }
}

/// A data sync asks the volume for a flush only if something was written since the last one.
#[test]
fn data_sync_flushes_only_after_writes() {
    let kernel = KernelModel::new();
    let (name, mode, flags): (&[u8], _, _) = (b"name", 0o600, 0);
    let node = kernel.node(
        ROOT,
        Request::Create {
            name,
            mode,
            umask: 0,
            flags,
        },
    );
    let file = kernel.open(node, OFlags::RDWR);
    let write = |offset| {
        let data = Bytes::from_static(b"record");
        kernel.ask(
            node,
            Request::Write {
                file,
                offset,
                data,
                flags: 0,
                how: 0,
            },
        );
    };
    let sync = || {
        let before = kernel.1.flushes();
        let is_data_only = true;
        kernel.ask(node, Request::Fsync { file, is_data_only });
        kernel.1.flushes() - before
    };
    write(0);
    assert_eq!([sync(), sync()], [1, 0]);
    write(0);
    write(6);
    assert_eq!([sync(), sync()], [1, 0]);
}
