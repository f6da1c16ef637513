//! Where volumes find a place and where not, and the bricks that come and go.

mod cluster;

use cluster::{CAPACITY, Cluster, MIB, Mood, brick_id, name, refused, registration, wish};
use pagemesh_base::layout::SLICE_BYTES_MAX;
use pagemesh_manage::shape::FILES_BYTES_MAX;
use pagemesh_manage::wire::{BrickRegistration, Code, Content, CreateVolume};
use pagemesh_manage::{Durability, Kind};
use std::collections::BTreeSet;
use std::time::Duration;

#[test]
fn copies_lie_in_different_domains() {
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
        ..wish("v", Kind::StripeMirror, 16 * MIB)
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
fn more_copies_than_domains_are_refused_with_both_numbers() {
    let cluster = Cluster::new(3);
    let served = cluster.serve();
    let client = &served.client;
    let mirror = |copies| CreateVolume {
        copies: Some(copies),
        ..wish("v", Kind::Mirror, MIB)
    };
    refused(client.create(&mirror(2)), Code::NoRoom, &["no brick"]);
    for number in 0..3 {
        let brick = BrickRegistration {
            domain: format!("rack-{}", number / 2),
            ..registration(number)
        };
        client.heartbeat(&brick).expect("welcome");
    }
    refused(
        client.create(&mirror(3)),
        Code::NoRoom,
        &["3 copies", "in 2"],
    );
    client.create(&mirror(2)).expect("made");
    // A dead brick's domain does not count.
    cluster.clock.advance(Duration::from_secs(7));
    let alone = BrickRegistration {
        domain: "rack-1".into(),
        ..registration(2)
    };
    client.heartbeat(&alone).expect("welcome");
    refused(
        client.grow(&name("v"), 2 * MIB),
        Code::NoRoom,
        &["2 copies", "in 1"],
    );
    // Nor does one of another class.
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
    refused(
        client.create(&other),
        Code::NoRoom,
        &["2 copies", "in 1", "class"],
    );
    let pmem = CreateVolume {
        durability: Some(Durability::Pmem),
        ..other
    };
    refused(client.create(&pmem), Code::NoRoom, &["pmem"]);
}

#[test]
fn files_are_promised_their_limit_and_not_their_addresses() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let client = &served.client;
    let files = |text, bytes| CreateVolume {
        content: Content::Files,
        ..wish(text, Kind::Mirror, bytes)
    };
    let made = client.create(&files("home", MIB)).expect("made").volume;
    assert_eq!(
        (made.info.content, made.info.size_bytes),
        (Content::Files, MIB)
    );
    assert_eq!(made.layout.size_bytes(), 1 << 30);
    let brick = &client.bricks().expect("listed")[0];
    assert_eq!(brick.provisioned_bytes, MIB);
    let large = files("large", FILES_BYTES_MAX + 4096);
    refused(
        client.create(&large),
        Code::BadRequest,
        &["a file system has at most"],
    );
    let beyond = files("beyond", brick.capacity_bytes * 5);
    refused(client.create(&beyond), Code::NoRoom, &["more than 4 times"]);
    let striped = CreateVolume {
        layout: Kind::StripeMirror,
        ..files("striped", MIB)
    };
    refused(
        client.create(&striped),
        Code::BadRequest,
        &["one column, not in 2"],
    );
    // One copy does not go on where a brick has no more room.
    let chained = CreateVolume {
        layout: Kind::Concat,
        ..files("chained", brick.capacity_bytes * 5)
    };
    refused(client.create(&chained), Code::NoRoom, &["would fit"]);
}

#[test]
fn files_may_be_allowed_more() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let client = &served.client;
    let home = CreateVolume {
        content: Content::Files,
        ..wish("home", Kind::Mirror, MIB)
    };
    let made = client.create(&home).expect("made").volume;
    let capacity = client.bricks().expect("listed")[0].capacity_bytes;
    let grown = client.grow(&name("home"), 2 * MIB).expect("grown").volume;
    assert_eq!(grown.info.size_bytes, 2 * MIB);
    // Its addresses are there already.
    assert_eq!(grown.layout, made.layout);
    assert_eq!(
        client.bricks().expect("listed")[0].provisioned_bytes,
        2 * MIB
    );
    for less in [MIB, 2 * MIB] {
        refused(
            client.grow(&name("home"), less),
            Code::BadRequest,
            &["would not be more"],
        );
    }
    let most = made.layout.size_bytes() / 4;
    refused(
        client.grow(&name("home"), most + 4096),
        Code::BadRequest,
        &["was made for no more than"],
    );
    // Others were promised what is left of the bricks.
    let rest = (capacity * 4 - 2 * MIB) / 4096 * 4096;
    client
        .create(&wish("rest", Kind::Mirror, rest))
        .expect("made");
    refused(
        client.grow(&name("home"), 3 * MIB),
        Code::NoRoom,
        &["has room for"],
    );
    assert_eq!(
        client.volume(&name("home")).expect("there").info.size_bytes,
        2 * MIB
    );
}

#[test]
fn sizes_and_shapes_that_cannot_be_are_refused() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let client = &served.client;
    let sized = |kind, bytes| client.create(&wish("v", kind, bytes));
    for kind in [Kind::Concat, Kind::Stripe, Kind::Mirror, Kind::StripeMirror] {
        refused(sized(kind, 0), Code::BadRequest, &["0 bytes", "4096"]);
        refused(sized(kind, 5000), Code::BadRequest, &["4096 and 8192"]);
        refused(sized(kind, u64::MAX), Code::BadRequest, &["whole pages"]);
        refused(
            sized(kind, u64::MAX - 4095),
            Code::BadRequest,
            &["too large"],
        );
        refused(
            sized(kind, i64::MAX as u64 + 1),
            Code::BadRequest,
            &["too large"],
        );
    }
    refused(
        sized(Kind::Mirror, SLICE_BYTES_MAX + 4096),
        Code::BadRequest,
        &["too large"],
    );
    refused(
        sized(Kind::Mirror, SLICE_BYTES_MAX),
        Code::NoRoom,
        &["2 copies", "2147483648"],
    );
    let huge = i64::MAX as u64 / 4096 * 4096;
    refused(sized(Kind::Concat, huge), Code::NoRoom, &["4 times"]);
    let odd = |kind, columns, copies| {
        let wish = CreateVolume {
            columns,
            copies,
            ..wish("v", kind, MIB)
        };
        refused(client.create(&wish), Code::BadRequest, &[]);
    };
    odd(Kind::Stripe, Some(0), None);
    odd(Kind::Stripe, Some(17), None);
    odd(Kind::Stripe, Some(usize::MAX), None);
    odd(Kind::Mirror, None, Some(0));
    odd(Kind::Mirror, None, Some(4));
    odd(Kind::Concat, None, Some(2));
    odd(Kind::Mirror, Some(2), None);
    assert!(cluster.slices().is_empty());
    let striped = sized(Kind::Stripe, 4096).expect("made");
    assert_eq!(striped.volume.info.size_bytes, 128 << 10);
    assert!(striped.rounded && striped.note.is_some());
    refused(sized(Kind::Concat, MIB), Code::Exists, &["v"]);
    let v = name("v");
    refused(client.grow(&v, u64::MAX), Code::BadRequest, &[]);
    refused(client.grow(&v, huge), Code::BadRequest, &["too large"]);
    refused(
        client.grow(&v, (128 << 10) + 1),
        Code::BadRequest,
        &["whole pages"],
    );
    refused(client.grow(&name("w"), MIB), Code::NotFound, &["w"]);
}

/// Volumes are thin, but only so much may be promised.
#[test]
fn promises_have_a_limit() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_living();
    let client = &served.client;
    let make = |text: &str, bytes| client.create(&wish(text, Kind::Mirror, bytes));
    refused(make("v", 4 * CAPACITY + 4096), Code::NoRoom, &["4 times"]);
    make("v", 3 * CAPACITY).expect("made");
    refused(
        make("w", CAPACITY + 4096),
        Code::NoRoom,
        &["1073741824 bytes would fit"],
    );
    make("w", CAPACITY).expect("made");
    refused(make("x", 4096), Code::NoRoom, &["0 bytes would fit"]);
    refused(client.grow(&name("w"), CAPACITY + 4096), Code::NoRoom, &[]);
    let status = client.status().expect("status");
    assert_eq!(status.provisioned_bytes, 8 * CAPACITY);
    client.delete(&name("w"), false).expect("deleted");
    make("x", CAPACITY).expect("made");
    // A segment for each grow, up to a limit.
    client.delete(&name("x"), false).expect("deleted");
    make("s", 4096).expect("made");
    for pages in 2..=64 {
        client.grow(&name("s"), pages * 4096).expect("grown");
    }
    refused(
        client.grow(&name("s"), 65 * 4096),
        Code::InUse,
        &["64 segments"],
    );
    assert_eq!(cluster.slices().len(), 2 + 128);
}

#[test]
fn bricks_come_move_and_go() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_living();
    let client = &served.client;
    let beat = BrickRegistration::clone;
    let mut first = registration(0);
    // A copy of a pool at another address, while the first one lives.
    let mut copy = beat(&first);
    copy.address = "127.0.0.1:9".into();
    refused(
        client.heartbeat(&copy),
        Code::InUse,
        &["127.0.0.1:10000", "127.0.0.1:9"],
    );
    assert_eq!(client.bricks().expect("listed")[0].address, first.address);
    // It was restarted at another address; the old one speaks no more for it.
    first.incarnation = 2;
    first.address = "127.0.0.1:10100".into();
    client.heartbeat(&first).expect("welcome");
    refused(
        client.heartbeat(&registration(0)),
        Code::InUse,
        &["older copy"],
    );
    // An older copy of its pool is not it, even when it is dead or forgotten
    // by a restart of the manager.
    cluster.clock.advance(Duration::from_secs(60));
    refused(
        client.heartbeat(&registration(0)),
        Code::InUse,
        &["opening 1", "opening 2"],
    );
    let again = cluster.crashed_without_beats();
    assert!(again.heartbeat(registration(0)).is_err());
    // The same opening at another address, after its silence: it moved.
    first.address = "127.0.0.1:10000".into();
    client.heartbeat(&first).expect("welcome");

    client.heartbeat(&registration(1)).expect("welcome");
    client.create(&wish("v", Kind::Mirror, MIB)).expect("made");
    refused(client.forget_brick(brick_id(1), true), Code::InUse, &["v"]);
    refused(client.forget_brick(brick_id(7), true), Code::NotFound, &[]);
    cluster.fakes[1].set(Mood::Away);
    assert_eq!(
        client
            .delete(&name("v"), false)
            .expect("deleted")
            .pending_deletions,
        1
    );
    refused(
        client.forget_brick(brick_id(1), true),
        Code::InUse,
        &["alive"],
    );
    cluster.clock.advance(Duration::from_secs(7));
    refused(
        client.forget_brick(brick_id(1), false),
        Code::InUse,
        &["1 slices"],
    );
    client.forget_brick(brick_id(1), true).expect("forgotten");
    client.forget_brick(brick_id(2), false).expect("forgotten");
    let status = client.status().expect("status");
    assert_eq!((status.bricks, status.pending_deletions), (1, 0));
    assert_eq!(cluster.crashed_without_beats().bricks().len(), 1);
}

#[test]
fn registrations_are_checked() {
    let cluster = Cluster::new(1);
    let served = cluster.serve();
    let check = |change: &dyn Fn(&mut BrickRegistration)| {
        let mut brick = registration(0);
        change(&mut brick);
        refused(served.client.heartbeat(&brick), Code::BadRequest, &[]);
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
