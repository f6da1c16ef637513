//! Policies of volumes in pools with disks behind memory: kept in the store, and sent to bricks until they obey.

use crate::cluster;
use crate::http;
use cluster::{Cluster, assert_refused, brick_id, create_request, legs, name, registration};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::SliceId;
use pagemesh_manage::access::TokenRole;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::wire::{
    AttachReplica, BrickRegistration, BrickTier, CreateToken, CreateVolume, ErrorCode, EventFilter,
    EventKind, GrowVolume, SetTier, SlicePages, SliceTier, TierBytes, TierEffect,
};
use pagemesh_manage::{LayoutKind, Manager, TierPolicy, digest_policies};
use serde_json::json;
use std::collections::BTreeMap;

const PIN: SetTier = SetTier {
    policy: TierPolicy::Memory,
};

/// A brick with a disk behind the memory of its pool.
#[derive(Default)]
struct TieredBrick {
    number: usize,
    policies: BTreeMap<SliceId, TierPolicy>,
}

impl TieredBrick {
    fn new(number: usize) -> TieredBrick {
        TieredBrick {
            number,
            ..TieredBrick::default()
        }
    }

    /// A heartbeat; returns the policies in its answer.
    fn beat(&self, manager: &Manager) -> Option<Vec<SliceTier>> {
        let policies = self
            .policies
            .iter()
            .map(|(slice, policy)| (*slice, *policy));
        let tier = BrickTier {
            policies: digest_policies(policies),
            ..BrickTier::default()
        };
        let beat = BrickRegistration {
            tier: Some(tier),
            ..registration(self.number)
        };
        manager.heartbeat(beat).expect("welcome").tiers
    }

    /// A heartbeat. The brick obeys its answer. True if the answer had policies.
    fn obey(&mut self, manager: &Manager) -> bool {
        let sent = self.beat(manager);
        let pairs = |list: &Vec<SliceTier>| list.iter().map(|it| (it.slice, it.policy)).collect();
        if let Some(list) = &sent {
            self.policies = pairs(list);
        }
        sent.is_some()
    }
}

fn slices_on(manager: &Manager, volume: &str, number: usize) -> Vec<SliceId> {
    let detail = manager.show(&name(volume)).expect("the volume");
    let on_it = legs(&detail.layout).filter(|leg| leg.brick == brick_id(number));
    on_it.map(|leg| leg.slice).collect()
}

fn effects(manager: &Manager, volume: &str) -> Vec<TierEffect> {
    let tier = manager.volume_tier(&name(volume)).expect("the volume");
    tier.bricks.iter().map(|it| it.effect).collect()
}

fn pinned(slices: Vec<SliceId>) -> BTreeMap<SliceId, TierPolicy> {
    let pinned = slices.into_iter().map(|slice| (slice, TierPolicy::Memory));
    pinned.collect()
}

#[test]
fn policy_is_sent_until_the_brick_obeys() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let mut brick = TieredBrick::new(0);
    assert_eq!(brick.beat(&manager), None);
    let mirror = create_request("v", LayoutKind::Mirror, 1 << 20);
    manager.create(&mirror).expect("room");
    assert_eq!(brick.beat(&manager), None, "it is automatic");
    manager.set_tier(&name("v"), PIN).expect("the volume");
    let wanted = [TierEffect::Pending, TierEffect::NoTier];
    assert_eq!(effects(&manager, "v"), wanted);
    for _ in 0..3 {
        let sent = brick.beat(&manager).expect("answers may be lost");
        assert_eq!(sent.len(), 1);
    }
    // A restarted manager has it from its store.
    let manager = cluster.crash_copy();
    assert!(brick.obey(&manager));
    assert_eq!(brick.policies, pinned(slices_on(&manager, "v", 0)));
    assert!(!brick.obey(&manager));
    let wanted = [TierEffect::Applied, TierEffect::NoTier];
    assert_eq!(effects(&manager, "v"), wanted);
    // A pool without a disk behind memory gets none.
    let reply = manager.heartbeat(registration(1)).expect("welcome");
    assert_eq!(reply.tiers, None);
    let auto = SetTier {
        policy: TierPolicy::Auto,
    };
    manager.set_tier(&name("v"), auto).expect("the volume");
    assert!(brick.obey(&manager));
    assert_eq!(brick.policies, BTreeMap::new());
}

#[test]
fn brick_that_was_away_gets_the_policy() {
    let cluster = Cluster::new(1);
    let manager = cluster.manager_with_bricks_alive();
    let mut brick = TieredBrick::new(0);
    brick.beat(&manager);
    let concat = create_request("v", LayoutKind::Concat, 1 << 20);
    manager.create(&concat).expect("room");
    cluster.clock.advance(std::time::Duration::from_secs(60));
    let tier = manager.set_tier(&name("v"), PIN).expect("the volume");
    assert_eq!(tier.bricks[0].effect, TierEffect::Away);
    assert!(brick.obey(&manager));
    assert_eq!(brick.policies, pinned(slices_on(&manager, "v", 0)));
}

#[test]
fn new_legs_get_the_policy_and_deleted_lose_it() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let mut bricks = [0, 1].map(TieredBrick::new);
    bricks.iter().for_each(|it| drop(it.beat(&manager)));
    let request = CreateVolume {
        tier: TierPolicy::Memory,
        ..create_request("v", LayoutKind::Concat, 1 << 20)
    };
    let created = manager.create(&request).expect("room").volume;
    assert_eq!(created.info.tier, TierPolicy::Memory);
    let grow = GrowVolume {
        size_bytes: 2 << 20,
    };
    manager.grow(&name("v"), grow).expect("room");
    let copy = AttachReplica {
        brick: None::<BrickRef>,
        asynchronous: false,
        auto_promote: false,
    };
    manager.attach_replica(&name("v"), copy).expect("room");
    for (number, brick) in bricks.iter_mut().enumerate() {
        assert!(brick.obey(&manager));
        let wanted = pinned(slices_on(&manager, "v", number));
        assert_eq!((wanted.len(), &brick.policies), (2, &wanted));
    }
    manager.delete(&name("v"), false).expect("deleted");
    for brick in &mut bricks {
        assert!(brick.obey(&manager));
        assert_eq!(brick.policies, BTreeMap::new());
    }
}

#[test]
fn change_of_policy_is_an_event_with_its_actor() {
    let cluster = Cluster::new(1);
    let served = cluster.serve_with_bricks_alive();
    let client = &served.client;
    let concat = create_request("v", LayoutKind::Concat, 1 << 20);
    client.create(&concat).expect("room");
    let token = |role: TokenRole| {
        let request = CreateToken {
            name: format!("{role:?}").parse().expect("a name"),
            role,
            expires_s: None,
        };
        client.create_token(&request).expect("made").token
    };
    let put = |token: &str, path: &str, body: &str| {
        let headers = [
            "Host: x".to_owned(),
            format!("Authorization: Bearer {token}"),
        ];
        let text = http::request_with("PUT", path, &headers, body);
        http::exchange(served.handle.address(), http::fresh_peer(), &text)
    };
    let (path, body) = ("/api/v1/volumes/v/tier", r#"{"policy":"flash"}"#);
    let viewer = put(&token(TokenRole::Viewer), path, body);
    assert_eq!((viewer.status, viewer.code()), (403, "forbidden".into()));
    let operator = token(TokenRole::Operator);
    for _ in 0..2 {
        let answer = put(&operator, path, body);
        assert_eq!(answer.status, 200, "{answer:?}");
        let brick = json!({"brick": brick_id(0), "name": null, "effect": "no-tier"});
        let wanted = json!({"policy": "flash", "bricks": [brick], "held": null});
        assert_eq!(answer.json(), wanted);
    }
    let wrong = put(&operator, path, r#"{"policy":"disk"}"#);
    assert_eq!(wrong.status, 400, "{wrong:?}");
    assert!(wrong.body.contains("flash"), "it names values: {wrong:?}");
    let manager = served.handle.manager();
    let (events, _) = manager.list_events(&EventFilter::default(), 100);
    let changed = events.iter().filter(|it| it.kind == EventKind::TierChanged);
    let changed: Vec<_> = changed.collect();
    assert_eq!(changed.len(), 1, "the second call has changed nothing");
    let event = changed[0];
    assert_eq!((event.actor.as_str(), event.count), ("Operator", 1));
    assert_eq!(event.subject.name, "v");
    assert!(event.text.contains("flash"), "{}", event.text);
    let unknown = client.set_tier(&name("none"), TierPolicy::Memory);
    assert_refused(unknown, ErrorCode::NotFound, &["none"]);
}

#[test]
fn counts_of_slices_add_up_to_their_volume() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let mirror = create_request("v", LayoutKind::Mirror, 1 << 20);
    manager.create(&mirror).expect("room");
    let beat = |number: usize, pages: Option<u64>| {
        let slice = slices_on(&manager, "v", number)[0];
        let count = |memory| SlicePages {
            slice,
            memory,
            flash: 1,
        };
        let beat = BrickRegistration {
            tier: Some(BrickTier::default()),
            tier_pages: pages.map(|memory| vec![count(memory)]),
            ..registration(number)
        };
        manager.heartbeat(beat).expect("welcome");
    };
    let held = || manager.volume_tier(&name("v")).expect("the volume").held;
    let bytes = |memory_bytes, flash_bytes| {
        Some(TierBytes {
            memory_bytes,
            flash_bytes,
        })
    };
    assert_eq!(held(), None);
    beat(0, Some(3));
    beat(1, Some(2));
    assert_eq!(held(), bytes(5 * 4096, 2 * 4096));
    // A heartbeat without counts keeps the last ones.
    beat(0, None);
    assert_eq!(held(), bytes(5 * 4096, 2 * 4096));
    manager.heartbeat(registration(1)).expect("welcome");
    assert_eq!(held(), bytes(3 * 4096, 4096));
}

#[test]
fn list_of_tiers_has_volumes_that_have_one() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    for (text, policy) in [("plain", TierPolicy::Auto), ("wished", TierPolicy::Flash)] {
        let request = CreateVolume {
            tier: policy,
            ..create_request(text, LayoutKind::Concat, 1 << 20)
        };
        manager.create(&request).expect("room");
    }
    let names = |manager: &Manager| {
        let tiers = manager.volume_tiers().into_iter();
        tiers.map(|it| it.volume.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(&manager), ["wished"]);
    for number in 0..2 {
        TieredBrick::new(number).beat(&manager);
    }
    assert_eq!(names(&manager), ["plain", "wished"]);
    let missing = manager.volume_tier(&name("none"));
    assert!(matches!(missing, Err(Fault::NoSuchVolume(_))));
}
