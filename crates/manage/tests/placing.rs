//! Placement of volumes, and bricks that register, move and leave.

use crate::cluster;
use cluster::{
    BrickBehavior, CAPACITY, Cluster, MIB, assert_refused, brick_id, create_request, name,
    registration,
};
use pagemesh_base::layout::SLICE_BYTES_MAX;
use pagemesh_manage::shape::FILES_BYTES_MAX;
use pagemesh_manage::wire::{BrickRegistration, CreateVolume, ErrorCode, VolumeContent};
use pagemesh_manage::{Durability, LayoutKind};
use std::collections::BTreeSet;
use std::time::Duration;

#[test]
fn copies_are_placed_in_different_domains() {
    let cluster = Cluster::new(6);
    let served = cluster.serve();
    let client = &served.client;
    let domain = |number: usize| format!("rack-{}", number % 3);
    for number in 0..6 {
        let brick = BrickRegistration {
            domain: domain(number),
            ..registration(number)
        };
        client.heartbeat(&brick).expect("welcome");
    }
    let shaped = CreateVolume {
        columns: Some(16),
        copies: Some(3),
        ..create_request("v", LayoutKind::StripeMirror, 16 * MIB)
    };
    let made = client.create(&shaped).expect("made").volume;
    let grown = client.grow(&name("v"), 32 * MIB).expect("grown").volume;
    assert_eq!(grown.layout.segments[0], made.layout.segments[0]);
    let mut used = BTreeSet::new();
    for column in grown.layout.segments.iter().flat_map(|s| &s.columns) {
        let numbers = (0..6).filter(|&n| column.legs.iter().any(|leg| leg.brick == brick_id(n)));
        let domains: BTreeSet<_> = numbers.map(domain).collect();
        assert_eq!(domains.len(), 3, "{column:?}");
        used.extend(column.legs.iter().map(|leg| leg.brick));
    }
    assert_eq!(used.len(), 6, "all bricks share the load");
}

#[test]
fn more_copies_than_domains_is_refused_with_numbers() {
    let cluster = Cluster::new(3);
    let served = cluster.serve();
    let client = &served.client;
    let mirror = |copies| CreateVolume {
        copies: Some(copies),
        ..create_request("v", LayoutKind::Mirror, MIB)
    };
    assert_refused(client.create(&mirror(2)), ErrorCode::NoRoom, &["no brick"]);
    for number in 0..3 {
        let brick = BrickRegistration {
            domain: format!("rack-{}", number / 2),
            ..registration(number)
        };
        client.heartbeat(&brick).expect("welcome");
    }
    assert_refused(
        client.create(&mirror(3)),
        ErrorCode::NoRoom,
        &["3 copies", "in 2"],
    );
    client.create(&mirror(2)).expect("made");
    // The domain of a dead brick does not count.
    cluster.clock.advance(Duration::from_secs(7));
    let alone = BrickRegistration {
        domain: "rack-1".into(),
        ..registration(2)
    };
    client.heartbeat(&alone).expect("welcome");
    assert_refused(
        client.grow(&name("v"), 2 * MIB),
        ErrorCode::NoRoom,
        &["2 copies", "in 1"],
    );
    // The domain of a brick of another class does not count.
    let strong = BrickRegistration {
        domain: "rack-0".into(),
        durability: Durability::FileSync,
        ..registration(0)
    };
    client.heartbeat(&strong).expect("welcome");
    let other = CreateVolume {
        name: name("w"),
        ..mirror(2)
    };
    assert_refused(
        client.create(&other),
        ErrorCode::NoRoom,
        &["2 copies", "in 1", "class"],
    );
    let pmem = CreateVolume {
        durability: Some(Durability::Pmem),
        ..other
    };
    assert_refused(client.create(&pmem), ErrorCode::NoRoom, &["pmem"]);
}

#[test]
fn file_system_reserves_limit_not_address_space() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let files = |text, bytes| CreateVolume {
        content: VolumeContent::Files,
        ..create_request(text, LayoutKind::Mirror, bytes)
    };
    let made = client.create(&files("home", MIB)).expect("made").volume;
    assert_eq!(
        (made.info.content, made.info.size_bytes),
        (VolumeContent::Files, MIB)
    );
    assert_eq!(made.layout.size_bytes(), 1 << 30);
    let brick = &client.bricks().expect("listed")[0];
    assert_eq!(brick.provisioned_bytes, MIB);
    let large = files("large", FILES_BYTES_MAX + 4096);
    assert_refused(
        client.create(&large),
        ErrorCode::BadRequest,
        &["a file system has at most"],
    );
    let beyond = files("beyond", brick.capacity_bytes * 5);
    assert_refused(
        client.create(&beyond),
        ErrorCode::NoRoom,
        &["more than 4 times"],
    );
    let striped = CreateVolume {
        layout: LayoutKind::StripeMirror,
        ..files("striped", MIB)
    };
    assert_refused(
        client.create(&striped),
        ErrorCode::BadRequest,
        &["one column, not in 2"],
    );
    // Refused if the present brick of a copy has no more room.
    let chained = CreateVolume {
        layout: LayoutKind::Concat,
        ..files("chained", brick.capacity_bytes * 5)
    };
    assert_refused(client.create(&chained), ErrorCode::NoRoom, &["would fit"]);
}

#[test]
fn file_system_limit_can_be_raised() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let home = CreateVolume {
        content: VolumeContent::Files,
        ..create_request("home", LayoutKind::Mirror, MIB)
    };
    let made = client.create(&home).expect("made").volume;
    let capacity = client.bricks().expect("listed")[0].capacity_bytes;
    let grown = client.grow(&name("home"), 2 * MIB).expect("grown").volume;
    assert_eq!(grown.info.size_bytes, 2 * MIB);
    // The address space exists already.
    assert_eq!(grown.layout, made.layout);
    assert_eq!(
        client.bricks().expect("listed")[0].provisioned_bytes,
        2 * MIB
    );
    for less in [MIB, 2 * MIB] {
        assert_refused(
            client.grow(&name("home"), less),
            ErrorCode::BadRequest,
            &["would not be more"],
        );
    }
    let most = made.layout.size_bytes() / 4;
    assert_refused(
        client.grow(&name("home"), most + 4096),
        ErrorCode::BadRequest,
        &["was made for no more than"],
    );
    // The other bytes of the bricks are promised to another volume.
    let rest = (capacity * 4 - 2 * MIB) / 4096 * 4096;
    client
        .create(&create_request("rest", LayoutKind::Mirror, rest))
        .expect("made");
    assert_refused(
        client.grow(&name("home"), 3 * MIB),
        ErrorCode::NoRoom,
        &["has room for"],
    );
    assert_eq!(
        client.volume(&name("home")).expect("there").info.size_bytes,
        2 * MIB
    );
}

#[test]
fn invalid_sizes_and_shapes_are_refused() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let sized = |kind, bytes| client.create(&create_request("v", kind, bytes));
    for kind in [
        LayoutKind::Concat,
        LayoutKind::Stripe,
        LayoutKind::Mirror,
        LayoutKind::StripeMirror,
    ] {
        assert_refused(sized(kind, 0), ErrorCode::BadRequest, &["0 bytes", "4096"]);
        assert_refused(sized(kind, 5000), ErrorCode::BadRequest, &["4096 and 8192"]);
        assert_refused(
            sized(kind, u64::MAX),
            ErrorCode::BadRequest,
            &["whole pages"],
        );
        assert_refused(
            sized(kind, u64::MAX - 4095),
            ErrorCode::BadRequest,
            &["too large"],
        );
        assert_refused(
            sized(kind, i64::MAX as u64 + 1),
            ErrorCode::BadRequest,
            &["too large"],
        );
    }
    assert_refused(
        sized(LayoutKind::Mirror, SLICE_BYTES_MAX + 4096),
        ErrorCode::BadRequest,
        &["too large"],
    );
    assert_refused(
        sized(LayoutKind::Mirror, SLICE_BYTES_MAX),
        ErrorCode::NoRoom,
        &["2 copies", "2147483648"],
    );
    let huge = i64::MAX as u64 / 4096 * 4096;
    assert_refused(
        sized(LayoutKind::Concat, huge),
        ErrorCode::NoRoom,
        &["4 times"],
    );
    let odd = |kind, columns, copies| {
        let request = CreateVolume {
            columns,
            copies,
            ..create_request("v", kind, MIB)
        };
        assert_refused(client.create(&request), ErrorCode::BadRequest, &[]);
    };
    odd(LayoutKind::Stripe, Some(0), None);
    odd(LayoutKind::Stripe, Some(17), None);
    odd(LayoutKind::Stripe, Some(usize::MAX), None);
    odd(LayoutKind::Mirror, None, Some(0));
    odd(LayoutKind::Mirror, None, Some(4));
    odd(LayoutKind::Concat, None, Some(2));
    odd(LayoutKind::Mirror, Some(2), None);
    assert!(cluster.slices().is_empty());
    let striped = sized(LayoutKind::Stripe, 4096).expect("made");
    assert_eq!(striped.volume.info.size_bytes, 128 << 10);
    assert!(striped.rounded && striped.note.is_some());
    assert_refused(sized(LayoutKind::Concat, MIB), ErrorCode::Exists, &["v"]);
    let v = name("v");
    assert_refused(client.grow(&v, u64::MAX), ErrorCode::BadRequest, &[]);
    assert_refused(client.grow(&v, huge), ErrorCode::BadRequest, &["too large"]);
    assert_refused(
        client.grow(&v, (128 << 10) + 1),
        ErrorCode::BadRequest,
        &["whole pages"],
    );
    assert_refused(client.grow(&name("w"), MIB), ErrorCode::NotFound, &["w"]);
}

/// Volumes are thin, but the promised bytes have a limit.
#[test]
fn overprovisioning_is_limited() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let make = |text: &str, bytes| client.create(&create_request(text, LayoutKind::Mirror, bytes));
    assert_refused(
        make("v", 4 * CAPACITY + 4096),
        ErrorCode::NoRoom,
        &["4 times"],
    );
    make("v", 3 * CAPACITY).expect("made");
    assert_refused(
        make("w", CAPACITY + 4096),
        ErrorCode::NoRoom,
        &["1073741824 bytes would fit"],
    );
    make("w", CAPACITY).expect("made");
    assert_refused(make("x", 4096), ErrorCode::NoRoom, &["0 bytes would fit"]);
    assert_refused(
        client.grow(&name("w"), CAPACITY + 4096),
        ErrorCode::NoRoom,
        &[],
    );
    let status = client.status().expect("status");
    assert_eq!(status.provisioned_bytes, 8 * CAPACITY);
    client.delete(&name("w"), false).expect("deleted");
    make("x", CAPACITY).expect("made");
    // Each grow adds a segment, up to a limit.
    client.delete(&name("x"), false).expect("deleted");
    make("s", 4096).expect("made");
    for pages in 2..=64 {
        client.grow(&name("s"), pages * 4096).expect("grown");
    }
    assert_refused(
        client.grow(&name("s"), 65 * 4096),
        ErrorCode::InUse,
        &["64 segments"],
    );
    assert_eq!(cluster.slices().len(), 2 + 128);
}

#[test]
fn bricks_register_move_and_are_forgotten() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let beat = BrickRegistration::clone;
    let mut first = registration(0);
    // A copy of a pool at another address, while the first brick is alive.
    let mut copy = beat(&first);
    copy.address = "127.0.0.1:9".into();
    assert_refused(
        client.heartbeat(&copy),
        ErrorCode::InUse,
        &["127.0.0.1:10000", "127.0.0.1:9"],
    );
    assert_eq!(client.bricks().expect("listed")[0].address, first.address);
    // The brick restarted at another address; the old address is no longer valid.
    first.incarnation = 2;
    first.address = "127.0.0.1:10100".into();
    client.heartbeat(&first).expect("welcome");
    assert_refused(
        client.heartbeat(&registration(0)),
        ErrorCode::InUse,
        &["older copy"],
    );
    // An older copy of its pool is refused, even when the brick is dead, or when a restarted
    // manager has no heartbeat of it.
    cluster.clock.advance(Duration::from_secs(60));
    assert_refused(
        client.heartbeat(&registration(0)),
        ErrorCode::InUse,
        &["opening 1", "opening 2"],
    );
    let again = cluster.crash_copy_without_heartbeats();
    assert!(again.heartbeat(registration(0)).is_err());
    // The same incarnation at another address, after the brick is dead: it moved.
    first.address = "127.0.0.1:10000".into();
    client.heartbeat(&first).expect("welcome");

    client.heartbeat(&registration(1)).expect("welcome");
    client
        .create(&create_request("v", LayoutKind::Mirror, MIB))
        .expect("made");
    assert_refused(
        client.forget_brick(brick_id(1), true),
        ErrorCode::InUse,
        &["v"],
    );
    assert_refused(
        client.forget_brick(brick_id(7), true),
        ErrorCode::NotFound,
        &[],
    );
    cluster.fakes[1].set(BrickBehavior::Unreachable);
    assert_eq!(
        client
            .delete(&name("v"), false)
            .expect("deleted")
            .pending_deletions,
        1
    );
    assert_refused(
        client.forget_brick(brick_id(1), true),
        ErrorCode::InUse,
        &["alive"],
    );
    cluster.clock.advance(Duration::from_secs(7));
    assert_refused(
        client.forget_brick(brick_id(1), false),
        ErrorCode::InUse,
        &["1 slices"],
    );
    client.forget_brick(brick_id(1), true).expect("forgotten");
    client.forget_brick(brick_id(2), false).expect("forgotten");
    let status = client.status().expect("status");
    assert_eq!((status.bricks, status.pending_deletions), (1, 0));
    assert_eq!(cluster.crash_copy_without_heartbeats().bricks().len(), 1);
}

#[test]
fn registrations_are_checked() {
    let cluster = Cluster::new(1);
    let served = cluster.serve();
    let check = |change: &dyn Fn(&mut BrickRegistration)| {
        let mut brick = registration(0);
        change(&mut brick);
        assert_refused(served.client.heartbeat(&brick), ErrorCode::BadRequest, &[]);
    };
    check(&|brick| brick.address = "nowhere".into());
    check(&|brick| brick.address = "a:0".into());
    check(&|brick| brick.map_socket = Some("relative".into()));
    check(&|brick| brick.map_socket = Some(format!("/{}", "x".repeat(107))));
    check(&|brick| brick.domain = String::new());
    check(&|brick| brick.domain = "x".repeat(65));
    check(&|brick| brick.domain = "a\u{7}".into());
    check(&|brick| brick.capacity_bytes = 0);
    assert!(served.client.bricks().expect("listed").is_empty());
}
