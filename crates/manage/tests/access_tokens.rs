//! Tokens in the store: a model, restarts, jumps of the wall clock, the first start, and the secrets
//! that no output may contain.

use crate::cluster;
use crate::http;
use cluster::{Cluster, assert_refused};
use http::{exchange, fresh_peer, request};
use pagemesh_manage::access::{EXPIRES_S_MAX, MARK_INTERVAL_S, TOKENS_MAX, TokenRole, TokenSecret};
use pagemesh_manage::fault::Fault;
use pagemesh_manage::wire::{CreateToken, ErrorCode, TokenInfo};
use pagemesh_manage::{ADMIN_TOKEN_FILE, Manager, ManagerClient, ManagerError, Role};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use uuid::Uuid;

fn create_request(name: &str, role: TokenRole, expires_s: Option<u64>) -> CreateToken {
    CreateToken {
        name: name.parse().expect("a name"),
        role,
        expires_s,
    }
}

fn secret(text: &str) -> TokenSecret {
    TokenSecret::parse(text).expect("a token")
}

#[test]
fn token_has_name_role_and_life() {
    let cluster = Cluster::new(0);
    let manager = cluster.manager();
    let request = create_request("backup", TokenRole::Viewer, Some(100));
    let created = manager.create_token(&request).expect("made");
    let identity = manager.identify(&secret(&created.token)).expect("valid");
    assert_eq!((identity.role, &*identity.name), (Role::Viewer, "backup"));
    assert_eq!(manager.tokens(), std::slice::from_ref(&created.info));
    assert_eq!(
        created.info.expires_unix_s,
        Some(created.info.created_unix_s + 100)
    );
    cluster.clock.advance(Duration::from_secs(99));
    assert!(manager.identify(&secret(&created.token)).is_some());
    assert!(manager.is_still_valid(&identity));
    cluster.clock.advance(Duration::from_secs(1));
    assert!(manager.identify(&secret(&created.token)).is_none());
    assert!(!manager.is_still_valid(&identity));
    assert!(manager.tokens()[0].expired);
}

#[test]
fn revoked_token_is_refused_at_once_and_after_crash() {
    let cluster = Cluster::new(0);
    let manager = cluster.manager();
    let request = create_request("a", TokenRole::Admin, None);
    let created = manager.create_token(&request).expect("made");
    assert!(
        cluster
            .crash_copy()
            .identify(&secret(&created.token))
            .is_some()
    );
    manager.revoke_token(created.info.id).expect("revoked");
    assert!(manager.identify(&secret(&created.token)).is_none());
    assert!(
        cluster
            .crash_copy()
            .identify(&secret(&created.token))
            .is_none()
    );
    let again = manager.revoke_token(created.info.id);
    assert!(matches!(again, Err(Fault::NoSuchToken(_))), "{again:?}");
    let reused = manager.create_token(&request).expect("the name is free");
    assert!(manager.identify(&secret(&created.token)).is_none());
    assert!(manager.identify(&secret(&reused.token)).is_some());
}

#[test]
fn invalid_tokens_are_not_created() {
    let cluster = Cluster::new(0);
    let served = cluster.serve();
    let client = &served.client;
    let request = create_request("a", TokenRole::Viewer, Some(10));
    client.create_token(&request).expect("made");
    assert_refused(
        client.create_token(&request),
        ErrorCode::Exists,
        &["token a"],
    );
    for expires_s in [0, EXPIRES_S_MAX + 1, u64::MAX] {
        let request = create_request("b", TokenRole::Viewer, Some(expires_s));
        assert_refused(
            client.create_token(&request),
            ErrorCode::BadRequest,
            &["lives"],
        );
    }
    let unknown = client.revoke_token(Uuid::from_u128(1));
    assert_refused(unknown, ErrorCode::NotFound, &["no token"]);
    // An expired token gives its name back.
    cluster.clock.advance(Duration::from_secs(10));
    client.create_token(&request).expect("made");
    let names = |tokens: Vec<TokenInfo>| -> Vec<String> {
        tokens.into_iter().map(|it| it.name.to_string()).collect()
    };
    assert_eq!(names(client.tokens().expect("listed")), ["a", "admin"]);
    served.handle.stop();
}

#[test]
fn number_of_tokens_is_bounded() {
    let cluster = Cluster::new(0);
    let manager = cluster.manager();
    for number in 0..TOKENS_MAX {
        let expires_s = (number < 3).then_some(60);
        let request = create_request(&format!("t{number}"), TokenRole::Viewer, expires_s);
        manager.create_token(&request).expect("made");
    }
    let one_more = create_request("more", TokenRole::Viewer, None);
    let refused = manager.create_token(&one_more).expect_err("refused");
    assert_eq!(refused.code(), ErrorCode::NoRoom);
    cluster.clock.advance(Duration::from_secs(60));
    manager
        .create_token(&one_more)
        .expect("expired ones make room");
    assert_eq!(manager.tokens().len(), TOKENS_MAX - 2);
}

#[test]
fn jump_of_wall_clock_resurrects_no_token() {
    let cluster = Cluster::new(0);
    let manager = cluster.manager();
    let request = create_request("a", TokenRole::Admin, Some(100));
    let token = secret(&manager.create_token(&request).expect("made").token);
    cluster.clock.jump_wall_clock(-1_000_000);
    cluster.clock.advance(Duration::from_secs(99));
    assert!(
        manager.identify(&token).is_some(),
        "a jump back changes no life"
    );
    cluster.clock.advance(Duration::from_secs(1));
    assert!(manager.identify(&token).is_none());
    manager.sweep();
    cluster.clock.jump_wall_clock(-100_000_000);
    assert!(manager.identify(&token).is_none());
    assert!(
        cluster.crash_copy().identify(&token).is_none(),
        "no clock matters any more"
    );
    drop(manager);
    assert!(cluster.manager().identify(&token).is_none());
}

#[test]
fn early_expiry_by_jump_forward_is_final() {
    let cluster = Cluster::new(0);
    let manager = cluster.manager();
    let request = create_request("a", TokenRole::Admin, Some(100));
    let token = secret(&manager.create_token(&request).expect("made").token);
    cluster.clock.jump_wall_clock(100);
    assert!(manager.identify(&token).is_none());
    cluster.clock.jump_wall_clock(-100);
    assert!(manager.identify(&token).is_none());
    // Lives that begin now are as long as ever.
    let request = create_request("b", TokenRole::Admin, Some(100));
    let token = secret(&manager.create_token(&request).expect("made").token);
    cluster.clock.advance(Duration::from_secs(99));
    assert!(manager.identify(&token).is_some());
    cluster.clock.advance(Duration::from_secs(1));
    assert!(manager.identify(&token).is_none());
}

/// A token, and the times that bound its life.
struct ModelToken {
    id: Uuid,
    secret: TokenSecret,
    name: String,
    role: TokenRole,
    life_s: Option<u64>,
    /// Seconds that the clock has counted since its creation.
    counted_s: u64,
    /// Seconds by which the wall clock has jumped forward since.
    jumped_s: u64,
    /// Restarts since, each of which may lose the time since the last mark.
    restarts: u64,
    revoked: bool,
    /// Whether the manager has refused it before.
    refused: bool,
}

impl ModelToken {
    /// Checks the manager's decision against the bounds, and that a refusal is final.
    fn check(&mut self, manager: &Manager) {
        let found = manager.identify(&self.secret);
        if let Some(identity) = &found {
            assert!(!self.refused, "a refused token is valid again");
            assert!(!self.revoked, "a revoked token is valid");
            assert_eq!(&*identity.name, self.name);
            assert_eq!(identity.role, Role::from(self.role));
            assert_eq!(identity.token, Some(self.id));
            let lost_s = self.restarts * MARK_INTERVAL_S;
            let longest = self.life_s.map(|life_s| life_s + lost_s);
            assert!(longest.is_none_or(|longest| self.counted_s < longest));
            assert!(manager.is_still_valid(identity));
        } else {
            let is_early = self
                .life_s
                .is_none_or(|life_s| self.counted_s + self.jumped_s < life_s);
            assert!(self.revoked || !is_early, "a token is refused too early");
            self.refused = true;
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Create(u8, TokenRole, Option<u64>),
    Revoke(prop::sample::Index),
    Advance(u64),
    Jump(i64),
    Restart,
}

fn role() -> impl Strategy<Value = TokenRole> {
    prop::sample::select(vec![
        TokenRole::Viewer,
        TokenRole::Operator,
        TokenRole::Admin,
    ])
}

fn step() -> impl Strategy<Value = Step> {
    let life = prop::option::of(prop_oneof![1u64..100, 1000u64..20_000]);
    prop_oneof![
        4 => (0u8..6, role(), life).prop_map(|(name, role, life)| Step::Create(name, role, life)),
        2 => any::<prop::sample::Index>().prop_map(Step::Revoke),
        4 => prop_oneof![1u64..60, 1000u64..8000].prop_map(Step::Advance),
        2 => prop_oneof![-100_000i64..0, 1i64..5000].prop_map(Step::Jump),
        1 => Just(Step::Restart),
    ]
}

/// The tokens of the model, in the order of their creation.
#[derive(Default)]
struct Model(Vec<ModelToken>);

impl Model {
    fn create(&mut self, manager: &Manager, name: u8, role: TokenRole, life_s: Option<u64>) {
        let name = format!("t{name}");
        let is_taken = |it: &ModelToken| it.name == name && !it.revoked && !it.refused;
        let is_taken = self.0.iter().any(is_taken);
        let created = manager.create_token(&create_request(&name, role, life_s));
        assert_eq!(created.is_err(), is_taken, "{created:?}");
        let Ok(created) = created else {
            return;
        };
        // It has replaced an expired one.
        for earlier in self.0.iter_mut().filter(|it| it.name == name) {
            earlier.revoked = true;
        }
        self.0.push(ModelToken {
            id: created.info.id,
            secret: secret(&created.token),
            name,
            role,
            life_s,
            counted_s: 0,
            jumped_s: 0,
            restarts: 0,
            revoked: false,
            refused: false,
        });
    }

    fn revoke(&mut self, manager: &Manager, index: &prop::sample::Index) {
        if self.0.is_empty() {
            return;
        }
        let token = index.get(&self.0);
        assert_eq!(manager.revoke_token(token.id).is_err(), token.revoked);
        let id = token.id;
        self.0
            .iter_mut()
            .filter(|it| it.id == id)
            .for_each(|it| it.revoked = true);
    }

    fn check(&mut self, manager: &Manager) {
        self.0.iter_mut().for_each(|token| token.check(manager));
        let listed = manager.tokens();
        let listed: BTreeMap<Uuid, bool> = listed.iter().map(|it| (it.id, it.expired)).collect();
        let present = self.0.iter().filter(|it| !it.revoked);
        let present: BTreeMap<Uuid, bool> = present.map(|it| (it.id, it.refused)).collect();
        assert_eq!(listed, present);
    }
}

fn run_steps(steps: &[Step]) {
    let cluster = Cluster::new(0);
    let mut manager = cluster.manager();
    let mut model = Model::default();
    for step in steps {
        match step {
            Step::Create(name, role, life_s) => model.create(&manager, *name, *role, *life_s),
            Step::Revoke(index) => model.revoke(&manager, index),
            Step::Advance(seconds) => {
                cluster.clock.advance(Duration::from_secs(*seconds));
                model.0.iter_mut().for_each(|it| it.counted_s += seconds);
            }
            Step::Jump(seconds) => {
                cluster.clock.jump_wall_clock(*seconds);
                let forward = u64::try_from(*seconds).unwrap_or(0);
                model.0.iter_mut().for_each(|it| it.jumped_s += forward);
            }
            Step::Restart => {
                drop(manager);
                manager = cluster.manager();
                model.0.iter_mut().for_each(|it| it.restarts += 1);
            }
        }
        // The server sweeps every few seconds.
        manager.sweep();
        model.check(&manager);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn tokens_follow_model_over_clocks_and_restarts(steps in prop::collection::vec(step(), 1..40)) {
        run_steps(&steps);
    }
}

#[test]
fn first_start_writes_admin_token_once() {
    let cluster = Cluster::new(0);
    let path = cluster.dir.path().join(ADMIN_TOKEN_FILE);
    // A link at its name is replaced, not followed.
    let other = cluster.dir.path().join("other");
    std::fs::write(&other, "precious").expect("written");
    std::os::unix::fs::symlink(&other, &path).expect("a link");
    let served = cluster.serve();
    let found = path.symlink_metadata().expect("a file");
    assert!(found.is_file());
    assert_eq!(found.permissions().mode() & 0o7777, 0o600);
    assert_eq!(std::fs::read(&other).expect("there"), b"precious");
    let text = std::fs::read_to_string(&path).expect("read");
    let client = ManagerClient::with_token(&served.handle.url(), &secret(text.trim_end()));
    let client = client.expect("a client");
    let who = client.whoami().expect("valid");
    assert_eq!((who.name.as_str(), who.role), ("admin", Role::Admin));
    assert_eq!(who.expires_unix_s, None);
    // Revoked and removed, it does not come back.
    let id = client.tokens().expect("listed")[0].id;
    client.revoke_token(id).expect("revoked");
    let refused = client.whoami().expect_err("refused");
    assert!(
        matches!(refused, ManagerError::TokenRefused { .. }),
        "{refused:?}"
    );
    std::fs::remove_file(&path).expect("removed");
    served.handle.stop();
    let served = cluster.serve();
    assert!(!path.exists());
    assert_eq!(served.client.tokens().expect("listed"), []);
    let names: Vec<_> = std::fs::read_dir(cluster.dir.path())
        .expect("listed")
        .flatten()
        .collect();
    assert_eq!(names.len(), 2, "no temporary file is left: {names:?}");
    served.handle.stop();
}

#[test]
fn unwritable_admin_token_is_made_by_later_start() {
    let cluster = Cluster::new(0);
    let path = cluster.dir.path().join(ADMIN_TOKEN_FILE);
    std::fs::create_dir_all(path.join("in the way")).expect("a directory");
    let served = cluster.serve();
    assert_eq!(served.client.tokens().expect("the manager runs"), []);
    served.handle.stop();
    std::fs::remove_dir_all(&path).expect("removed");
    let served = cluster.serve();
    assert!(path.is_file());
    assert_eq!(served.client.tokens().expect("listed").len(), 1);
    served.handle.stop();
}

/// No answer but that of the creation has a token or a hash, and the store has no token.
#[test]
fn answers_and_store_contain_no_token() {
    let cluster = Cluster::new(1);
    let served = cluster.serve_with_bricks_alive();
    let request_body = create_request("a", TokenRole::Admin, None);
    let token = served
        .client
        .create_token(&request_body)
        .expect("made")
        .token;
    let hash = serde_json::to_value(secret(&token).hash()).expect("JSON");
    let hash = hash.as_str().expect("text");
    let headers = [
        "Host: x".to_owned(),
        format!("Authorization: Bearer {token}"),
    ];
    for path in [
        "status",
        "tokens",
        "whoami",
        "openapi.json",
        "bricks",
        "volumes",
        "nothing",
    ] {
        let text = request("GET", &format!("/api/v1/{path}"), &headers);
        let answer = exchange(served.handle.address(), fresh_peer(), &text);
        let shown = format!("{}{}", answer.head, answer.body);
        assert!(
            !shown.contains(&token[4..20]) && !shown.contains(&hash[..16]),
            "{path}"
        );
        assert!(!answer.body.contains("\"hash\""), "{path}");
    }
    served.handle.stop();
    let bytes = std::fs::read(cluster.store()).expect("the store");
    let contains = |text: &str| bytes.windows(text.len()).any(|it| it == text.as_bytes());
    assert!(contains(hash), "the store has the hash");
    assert!(!contains(&token[3..]), "the store has the token");
}
