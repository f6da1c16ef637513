//! The role that each route needs: every role, and every kind of missing credential, on every route of
//! the OpenAPI document.

use crate::cluster;
use crate::http;
use cluster::{Cluster, TestServer};
use http::{HttpAnswer, exchange, fresh_peer, request};
use pagemesh_manage::Role;
use pagemesh_manage::access::{RouteRights, TokenRole, TokenSecret};
use pagemesh_manage::api::document::route_roles;
use pagemesh_manage::token::token;
use pagemesh_manage::wire::CreateToken;
use std::time::Duration;

/// Calls of bricks and clients.
const CLUSTER: &[(&str, &str)] = &[
    ("PUT", "/api/v1/bricks/{brick}"),
    ("POST", "/api/v1/volumes/{name}/attach"),
    ("POST", "/api/v1/volumes/{name}/copies"),
    ("POST", "/api/v1/volumes/{name}/legs"),
    ("POST", "/api/v1/volumes/{name}/figures"),
    ("POST", "/api/v1/volumes/{name}/nfs"),
    ("POST", "/api/v1/bricks/{brick}/figures"),
    ("POST", "/api/v1/volumes/{name}/holder"),
    ("POST", "/api/v1/volumes/{name}/rollback/attach"),
    ("POST", "/api/v1/volumes/{name}/rollback/copy"),
    ("POST", "/api/v1/volumes/{name}/rollback/finish"),
    ("GET", "/api/v1/volumes/{name}/cut"),
    ("POST", "/api/v1/volumes/{name}/cut"),
];
/// Calls of operators that change something.
const OPERATOR: &[(&str, &str)] = &[
    ("POST", "/api/v1/bricks/{brick}/scrub"),
    ("POST", "/api/v1/bricks/{brick}/devices/{device}/drain"),
    ("POST", "/api/v1/volumes"),
    ("DELETE", "/api/v1/volumes/{name}"),
    ("POST", "/api/v1/volumes/{name}/grow"),
    ("PUT", "/api/v1/volumes/{name}/tier"),
    ("PUT", "/api/v1/volumes/{name}/labels"),
    ("POST", "/api/v1/snapshots"),
    ("POST", "/api/v1/volumes/{name}/snapshots"),
    ("DELETE", "/api/v1/volumes/{name}/snapshots/{snapshot}"),
    (
        "PUT",
        "/api/v1/volumes/{name}/snapshots/{snapshot}/holds/{tag}",
    ),
    (
        "DELETE",
        "/api/v1/volumes/{name}/snapshots/{snapshot}/holds/{tag}",
    ),
    ("POST", "/api/v1/volumes/{name}/snapshots/{snapshot}/clones"),
    ("POST", "/api/v1/volumes/{name}/promote-clone"),
    ("GET", "/api/v1/volumes/{name}/snapshot-space"),
    ("GET", "/api/v1/volumes/{name}/snapshot-check"),
    ("POST", "/api/v1/volumes/{name}/promote"),
    ("POST", "/api/v1/volumes/{name}/rollback"),
    ("DELETE", "/api/v1/volumes/{name}/rollback"),
    ("POST", "/api/v1/volumes/{name}/bookmarks"),
    ("DELETE", "/api/v1/volumes/{name}/bookmarks/{bookmark}"),
    ("POST", "/api/v1/schedules"),
    ("PUT", "/api/v1/schedules/{schedule}"),
    ("DELETE", "/api/v1/schedules/{schedule}"),
    ("POST", "/api/v1/schedules/{schedule}/run"),
    ("POST", "/api/v1/schedules/{schedule}/sent"),
    ("POST", "/api/v1/volumes/{name}/detach"),
    ("POST", "/api/v1/volumes/{name}/replicas"),
    ("POST", "/api/v1/volumes/{name}/replicas/detach"),
    ("POST", "/api/v1/volumes/{name}/replicas/promote"),
    ("POST", "/api/v1/events/{seq}/acknowledge"),
    ("DELETE", "/api/v1/nfs/clients/{client}"),
];
/// Calls of administrators.
const ADMIN: &[(&str, &str)] = &[
    ("GET", "/api/v1/tokens"),
    ("POST", "/api/v1/tokens"),
    ("DELETE", "/api/v1/tokens/{id}"),
    ("DELETE", "/api/v1/bricks/{brick}"),
    ("POST", "/api/v1/bricks/{brick}/devices"),
];
/// Calls without a credential.
const OPEN: &[(&str, &str)] = &[("GET", "/healthz"), ("POST", "/api/v1/login")];

/// The rights that a route must need, by RFD 026: a second source beside the annotations.
fn wanted_rights(method: &str, path: &str) -> RouteRights {
    let is_in = |list: &[(&str, &str)]| list.contains(&(method, path));
    if is_in(OPEN) {
        return RouteRights::Open;
    }
    let role = if is_in(CLUSTER) {
        Role::Cluster
    } else if is_in(ADMIN) {
        Role::Admin
    } else if is_in(OPERATOR) {
        Role::Operator
    } else if method == "GET" || path == "/api/v1/logout" {
        Role::Viewer
    } else {
        panic!("{method} {path} is in no list of this test: put it into the one of its role")
    };
    RouteRights::Needs(role)
}

#[test]
fn every_route_states_its_role() {
    let roles = route_roles();
    let mut count = 0;
    for (method, path, stated) in roles.routes() {
        let stated = stated.unwrap_or_else(|| {
            panic!("{method} {path}: its annotation needs security((\"token\" = [\"ROLE\"]))")
        });
        assert_eq!(stated, wanted_rights(method, path), "{method} {path}");
        count += 1;
    }
    assert!(count > 20, "{count} routes");
}

/// A credential, and the role that it proves.
struct Caller {
    name: &'static str,
    authorization: String,
    role: Option<Role>,
}

fn caller(name: &'static str, credential: &str, role: Option<Role>) -> Caller {
    let authorization = if credential.is_empty() {
        String::new()
    } else {
        format!("Authorization: Bearer {credential}")
    };
    Caller {
        name,
        authorization,
        role,
    }
}

fn create(served: &TestServer, name: &str, role: TokenRole, expires_s: Option<u64>) -> String {
    let request = CreateToken {
        name: name.parse().expect("a name"),
        role,
        expires_s,
    };
    served.client.create_token(&request).expect("made").token
}

/// Every kind of caller, valid or not.
fn callers(cluster: &Cluster, served: &TestServer) -> Vec<Caller> {
    let expired = create(served, "expired", TokenRole::Admin, Some(60));
    let revoked = create(served, "revoked", TokenRole::Admin, None);
    let tokens = served.client.tokens().expect("listed");
    let id = tokens.iter().find(|it| it.name.as_str() == "revoked");
    served
        .client
        .revoke_token(id.expect("there").id)
        .expect("revoked");
    let [viewer, operator, admin] = [TokenRole::Viewer, TokenRole::Operator, TokenRole::Admin]
        .map(|role| create(served, &format!("{role:?}"), role, Some(3600)));
    cluster.clock.advance(Duration::from_secs(60));
    let random = TokenSecret::random().expect("random bytes");
    let key = token(&cluster.key);
    vec![
        caller("no token", "", None),
        caller("expired", &expired, None),
        caller("revoked", &revoked, None),
        caller("random token", random.expose(), None),
        caller("garbage", "pm_%00%", None),
        caller("short token", &viewer[..45], None),
        caller("prefix of key", &key[..63], None),
        caller("viewer", &viewer, Some(Role::Viewer)),
        caller("operator", &operator, Some(Role::Operator)),
        caller("admin", &admin, Some(Role::Admin)),
        caller("cluster key", &key, Some(Role::Cluster)),
    ]
}

/// The path of a request that changes nothing, because nothing has these names.
fn path_of(template: &str) -> String {
    let path = template
        .replace("{name}", "none")
        .replace("{brick}", "none");
    let path = path.replace("{snapshot}", "none").replace("{tag}", "none");
    let path = path.replace("{seq}", "999999");
    let path = path.replace("{device}", "00000000-0000-0000-0000-000000000001");
    path.replace("{id}", "00000000-0000-0000-0000-000000000001")
}

#[track_caller]
fn check(answer: &HttpAnswer, caller: &Caller, method: &str, template: &str) {
    let what = format!("{method} {template} by {}: {answer:?}", caller.name);
    match (wanted_rights(method, template), caller.role) {
        (RouteRights::Open, _) if template == "/api/v1/login" => {
            assert_eq!(answer.status, 401, "{what}");
        }
        (RouteRights::Open, _) => assert_eq!(answer.status, 200, "{what}"),
        (RouteRights::Needs(_), None) => {
            assert_eq!(answer.status, 401, "{what}");
            assert_eq!(answer.code(), "unauthorized", "{what}");
        }
        (RouteRights::Needs(needed), Some(role)) if role < needed => {
            assert_eq!(answer.status, 403, "{what}");
            assert_eq!(answer.code(), "forbidden", "{what}");
            let needs = format!("needs the role {needed}");
            assert!(answer.body.contains(&needs), "{what}");
        }
        (RouteRights::Needs(_), Some(_)) => {
            assert!(![401, 403, 405, 500].contains(&answer.status), "{what}");
        }
    }
}

#[test]
fn roles_hold_on_every_route() {
    let cluster = Cluster::new(1);
    let served = cluster.serve_with_bricks_alive();
    let callers = callers(&cluster, &served);
    let roles = route_roles();
    for (method, template, _) in roles.routes() {
        for caller in &callers {
            let headers = ["Host: x".to_owned(), caller.authorization.clone()];
            let headers: Vec<_> = headers.into_iter().filter(|it| !it.is_empty()).collect();
            let text = request(method, &path_of(template), &headers);
            let answer = exchange(served.handle.address(), fresh_peer(), &text);
            check(&answer, caller, method, template);
            if method == "GET" {
                let text = request("HEAD", &path_of(template), &headers);
                let head = exchange(served.handle.address(), fresh_peer(), &text);
                assert_eq!(
                    head.status, answer.status,
                    "HEAD {template} by {}",
                    caller.name
                );
            }
        }
    }
    let status = served.client.status().expect("status");
    assert_eq!((status.bricks, status.volumes), (1, 0));
    let mut names: Vec<_> = served
        .client
        .tokens()
        .expect("listed")
        .into_iter()
        .map(|it| it.name.to_string())
        .collect();
    names.sort();
    assert_eq!(names, ["Admin", "Operator", "Viewer", "admin", "expired"]);
    served.handle.stop();
}

/// Unknown paths and methods are refused to all callers alike, and without a credential even their
/// absence is hidden. The paths that need no credential are public, with the methods that they take.
#[test]
fn unknown_paths_need_any_role() {
    let cluster = Cluster::new(1);
    let served = cluster.serve();
    for caller in callers(&cluster, &served) {
        let send = |method, path| {
            let headers = ["Host: x".to_owned(), caller.authorization.clone()];
            let headers: Vec<_> = headers.into_iter().filter(|it| !it.is_empty()).collect();
            let text = request(method, path, &headers);
            exchange(served.handle.address(), fresh_peer(), &text)
        };
        for (method, path, wanted) in [
            ("GET", "/api/v1/nothing", 404),
            ("POST", "/", 404),
            ("GET", "/healthz/", 404),
            ("GET", "//api/v1/status", 404),
            ("PATCH", "/api/v1/volumes", 405),
        ] {
            let wanted = if caller.role.is_some() { wanted } else { 401 };
            let status = send(method, path).status;
            assert_eq!(status, wanted, "{method} {path} by {}", caller.name);
        }
        for (method, path, allowed) in [
            ("PUT", "/api/v1/login", "post"),
            ("TRACE", "/healthz", "get,head"),
        ] {
            let answer = send(method, path);
            assert_eq!(answer.status, 405, "{method} {path} by {}", caller.name);
            assert_eq!(answer.header("allow"), Some(allowed), "{method} {path}");
        }
    }
    served.handle.stop();
}
