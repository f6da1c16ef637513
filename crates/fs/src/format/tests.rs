//! The bytes of version 0, as `docs/formats.md` draws them: a change of a layout must not go unnoticed.

use super::directory_page::{Node, TreeEntry};
use super::file_id::FileId;
use super::inode::{
    AppendExtent, HAS_RESERVED_PAGES, INLINE, Ino, Inode, InodeKind, NEEDS_TRIM, Time, Xattrs,
};
use super::page_map::{PageMap, Span, SpanRef};
use super::redo_log::RedoLogHead;
use super::superblock::Head;
use super::xattr_kinds::XattrKinds;
use pagemesh_base::units::PAGE_BYTES;
use uuid::Uuid;

const FILE: &str = "\
    a4811b0001020304111213142122232431323334353637384142434445464748\
    feffffffffffffff595a5b5c6162636465666768696a6b6c7172737475767778\
    797a7b7c0102030405060708090a0b0c8182838491929394a1a2a3a4a5a6a7a8\
    b1b2b3b4b5b6b7b8c1c2c3c40000000000070605040302010107060504030201\
    0207060504030201030706050403020104070605040302010507060504030201\
    0607060504030201d1d2d3d4d5d6d7d8e1e2e3e4e5e6e7e8f1f2f3f4f5f6f7f8\
    11121314151617182122232425262728";
const LINK: &str = "\
    ffa1040001020304111213142122232431323334353637384142434445464748\
    feffffffffffffff595a5b5c6162636465666768696a6b6c7172737475767778\
    797a7b7c0102030405060708090a0b0c8182838491929394a1a2a3a4a5a6a7a8\
    b1b2b3b4b5b6b7b8c1c2c3c4000000002e2e2f612f746172676574";
const HEAD: &str = "\
    706167656d6673000000000000000000000102030405060708090a0b0c0d0e0f\
    1112131415161718212223242526272831323334353637384142434445464709\
    0000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000\
    0000000000000000000000000000000000000000000000000000000000000000\
    a4811b0001020304111213142122232431323334353637384142434445464748\
    feffffffffffffff595a5b5c6162636465666768696a6b6c7172737475767778\
    797a7b7c0102030405060708090a0b0c8182838491929394a1a2a3a4a5a6a7a8\
    b1b2b3b4b5b6b7b8c1c2c3c40000000000070605040302010107060504030201\
    0207060504030201030706050403020104070605040302010507060504030201\
    0607060504030201d1d2d3d4d5d6d7d8e1e2e3e4e5e6e7e8f1f2f3f4f5f6f7f8\
    11121314151617182122232425262728";
const LOG: &str = "\
    706d6573686c6f67111213141516171821222324252627280200000000000000\
    31323334353637384142434445464748";
const LEAF: &str = "\
    0100020027000000000000000000000011121314151617182122232425262728\
    080178111213141516172831323334353637380402797a";
const INNER: &str = "\
    0200020018000000000000000000000011121314151617182122232411121314\
    1516172831323334";

/// Compares bytes with an image in hexadecimal digits; the zeroes at the end are left out.
#[track_caller]
fn check(bytes: &[u8], expected: &str) {
    let end = bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .map_or(0, |at| at + 1);
    let digits = bytes[..end].iter().map(|byte| format!("{byte:02x}"));
    assert_eq!(digits.collect::<String>(), expected);
}

fn file() -> Inode {
    Inode {
        mode: 0o100_644,
        flags: NEEDS_TRIM | HAS_RESERVED_PAGES,
        links: 0x0403_0201,
        uid: 0x1413_1211,
        gid: 0x2423_2221,
        size: 0x3837_3635_3433_3231,
        pages: 0x4847_4645_4443_4241,
        atime: Time {
            sec: -2,
            nsec: 0x5c5b_5a59,
        },
        mtime: Time {
            sec: 0x6867_6665_6463_6261,
            nsec: 0x6c6b_6a69,
        },
        ctime: Time {
            sec: 0x7877_7675_7473_7271,
            nsec: 0x7c7b_7a79,
        },
        btime: Time {
            sec: 0x0807_0605_0403_0201,
            nsec: 0x0c0b_0a09,
        },
        device: 0x8483_8281,
        generation: 0x9493_9291,
        parent: Ino(0xa8a7_a6a5_a4a3_a2a1),
        xattrs: Xattrs {
            at: 0x00b7_b6b5_b4b3_b2b1,
            order: 0xb8,
            len: 0xc4c3_c2c1,
            kinds: XattrKinds::default(),
        },
        map: PageMap {
            spans: std::array::from_fn(|index| SpanRef(0x0102_0304_0506_0700 + index as u64)),
            root: 0x00d7_d6d5_d4d3_d2d1,
            height: 0xd8,
        },
        spare_span: Some(Span {
            page: 0x00e7_e6e5_e4e3_e2e1,
            order: 0xe8,
        }),
        append_extent: Some(AppendExtent {
            nonce: 0xf8f7_f6f5_f4f3_f2f1,
            limit_page: 0x1817_1615_1413_1211,
        }),
        redo_log: Some(Ino(0x2827_2625_2423_2221)),
        create_verifier: 0,
        service_file: None,
        target: Vec::new(),
    }
}

#[test]
fn inode_has_bytes_of_version_0() {
    check(&file().encode(), FILE);
    let link = Inode {
        mode: 0o120_777,
        flags: INLINE,
        target: b"../a/target".to_vec(),
        ..file()
    };
    check(&link.encode(), LINK);
    let created = Inode {
        create_verifier: 0x3837_3635_3433_3231,
        ..file()
    };
    let verifier = format!("{FILE}{:016}3132333435363738", 0);
    check(&created.encode(), &verifier);
    let root = Inode {
        service_file: Some(FileId {
            ino: Ino(0x1817_1615_1413_1211),
            generation: 0x2423_2221,
            birth: 0x3433_3231,
        }),
        ..file()
    };
    let service_file = format!("{FILE}{:032}11121314151617182122232431323334", 0);
    check(&root.encode(), &service_file);
    let mut listed = file();
    listed.xattrs.kinds = XattrKinds::of([XattrKinds::CAPABILITIES, XattrKinds::DEFAULT_ACL]);
    let kinds = format!("{}0b{}", &FILE[..216], &FILE[218..]);
    check(&listed.encode(), &kinds);
}

#[test]
fn head_has_bytes_of_version_0() {
    let head = Head {
        uuid: Uuid::from_u128(0x0001_0203_0405_0607_0809_0a0b_0c0d_0e0f),
        hash_key: [0x1817_1615_1413_1211, 0x2827_2625_2423_2221],
        limit_bytes: 0x3837_3635_3433_3231,
        reserve: Some(Span {
            page: 0x0047_4645_4443_4241,
            order: 9,
        }),
        table: file(),
    };
    check(&head.encode(), HEAD);
}

#[test]
fn redo_log_has_bytes_of_version_0() {
    let head = RedoLogHead {
        ino: Ino(0x1817_1615_1413_1211),
        generation: 0x2827_2625_2423_2221,
        count: 2,
    };
    let pages = [0x3837_3635_3433_3231, 0x4847_4645_4443_4241];
    let bytes = head.encode(pages.into_iter());
    check(&bytes, LOG);
    assert_eq!(RedoLogHead::decode(&bytes), Some(head));
}

#[test]
fn directory_page_has_bytes_of_version_0() {
    let entry = |key, ino, kind| TreeEntry {
        key,
        ino: Ino(ino),
        kind,
    };
    let file = entry(
        0x1817_1615_1413_1211,
        0x2827_2625_2423_2221,
        InodeKind::File,
    );
    let directory = entry(
        0x2817_1615_1413_1211,
        0x3837_3635_3433_3231,
        InodeKind::Directory,
    );
    let leaf = Node::Leaf(vec![(file, b"x".to_vec()), (directory, b"yz".to_vec())]);
    let inner = Node::Inner(vec![(file.key, 0x2423_2221), (directory.key, 0x3433_3231)]);
    for (node, expected) in [(leaf, LEAF), (inner, INNER)] {
        let mut page = [0; PAGE_BYTES];
        node.encode(&mut page);
        check(&page, expected);
    }
}
