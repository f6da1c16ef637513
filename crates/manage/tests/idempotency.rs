//! Calls with an `Idempotency-Key`: repetitions, restarts, expiry, and the client's own key.

use crate::cluster;
use crate::http;
use cluster::{Cluster, MIB, assert_refused, create_request, name};
use http::{HttpAnswer, fresh_peer};
use pagemesh_manage::access::TokenRole;
use pagemesh_manage::fault::Fault;
use pagemesh_manage::idempotency::{CreateAnswer, KEPT_FOR_S, ScopedKey};
use pagemesh_manage::token::token;
use pagemesh_manage::wire::{AttachReplica, CreateToken, ErrorCode, VolumeDetail, VolumeSizeReply};
use pagemesh_manage::{CallContext, LayoutKind, Manager, ManagerClient};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn scoped(text: &str) -> ScopedKey {
    ScopedKey {
        token: None,
        text: text.parse().expect("a key"),
    }
}

fn with_key(manager: &Manager, text: &str) -> Manager {
    manager.acting_for(CallContext {
        key: Some(scoped(text)),
        ..CallContext::default()
    })
}

fn create(
    manager: &Manager,
    key: &str,
    volume: &str,
) -> Result<CreateAnswer<VolumeSizeReply>, Fault> {
    let request = create_request(volume, LayoutKind::Mirror, MIB);
    with_key(manager, key).create_keyed(&request)
}

fn attach(manager: &Manager, key: &str) -> Result<CreateAnswer<VolumeDetail>, Fault> {
    with_key(manager, key).attach_replica_keyed(&name("v"), AttachReplica::default())
}

fn post(server: SocketAddr, credential: &str, keys: &[&str], path: &str, body: &str) -> HttpAnswer {
    let keys: String = keys
        .iter()
        .map(|key| format!("Idempotency-Key: {key}\r\n"))
        .collect();
    let text = format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {credential}\r\n{keys}\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    http::exchange(server, fresh_peer(), &text)
}

#[test]
fn repetition_gets_first_answer_again() {
    let cluster = Cluster::new(4);
    let served = cluster.serve_with_bricks_alive();
    let (server, key) = (served.handle.address(), token(&cluster.key));
    let volume = r#"{"name":"v","size_bytes":1048576,"layout":"mirror"}"#;
    let first = post(server, &key, &["k"], "/api/v1/volumes", volume);
    assert_eq!(first.status, 201, "{first:?}");
    let spaced = volume.replace(',', ", ");
    for body in [volume, &spaced] {
        let again = post(server, &key, &["k"], "/api/v1/volumes", body);
        assert_eq!((again.status, &again.body), (201, &first.body));
        assert!(again.header("etag").is_some());
        assert_eq!(again.header("etag"), first.header("etag"));
    }
    let copies = "/api/v1/volumes/v/replicas";
    let first = post(server, &key, &["c"], copies, "{}");
    assert_eq!(first.status, 201, "{first:?}");
    let again = post(server, &key, &["c"], copies, "{}");
    assert_eq!((again.status, again.body), (201, first.body));
    let detail = served.client.volume(&name("v")).expect("shown");
    assert_eq!(detail.info.copies, 3, "a repetition adds no copy");
    // The key belongs to that call, whatever another one asks for.
    for (path, body) in [
        ("/api/v1/volumes", volume.replace("\"v\"", "\"w\"")),
        (copies, "{}".to_owned()),
    ] {
        let refused = post(server, &key, &["k"], path, &body);
        assert_eq!((refused.status, refused.code()), (422, "key-reused".into()));
    }
    // The tag is the one of the volume, so that it serves a change that follows.
    let answer = post(
        server,
        &key,
        &["w"],
        "/api/v1/volumes",
        &volume.replace("\"v\"", "\"w\""),
    );
    let (_, tag) = served
        .handle
        .manager()
        .show_tagged(&name("w"))
        .expect("shown");
    let etag = answer.header("etag").expect("a tag");
    assert!(etag.starts_with(&format!("\"{tag}.")), "{etag}");
    served.handle.stop();
}

#[test]
fn bad_key_is_refused() {
    let cluster = Cluster::new(2);
    let served = cluster.serve_with_bricks_alive();
    let (server, key) = (served.handle.address(), token(&cluster.key));
    let volume = r#"{"name":"v","size_bytes":1048576,"layout":"mirror"}"#;
    let (longest, longer) = ("k".repeat(64), "k".repeat(65));
    for keys in [
        &[""][..],
        &["a b"],
        &["\u{e9}"],
        &["a\tb"],
        &[&longer],
        &["a", "a"],
    ] {
        let refused = post(server, &key, keys, "/api/v1/volumes", volume);
        assert_eq!(
            (refused.status, refused.code()),
            (400, "bad-request".into()),
            "{keys:?}"
        );
    }
    let made = post(server, &key, &[&longest], "/api/v1/volumes", volume);
    assert_eq!(made.status, 201);
    served.handle.stop();
}

#[test]
fn key_counts_for_its_token_only() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let server = served.handle.address();
    let volume = r#"{"name":"v","size_bytes":1048576,"layout":"mirror"}"#;
    let made = post(
        server,
        &token(&cluster.key),
        &["k"],
        "/api/v1/volumes",
        volume,
    );
    assert_eq!(made.status, 201);
    let manager = served.handle.manager();
    let answers = ["one", "two"].map(|token| {
        let request = CreateToken {
            name: token.parse().expect("a name"),
            role: TokenRole::Operator,
            expires_s: None,
        };
        let token = manager.create_token(&request).expect("made").token;
        let path = "/api/v1/volumes/v/replicas";
        [0, 1].map(|_| post(server, &token, &["k"], path, "{}").status)
    });
    // The call of the second token is a new one, and there is no fourth copy.
    assert_eq!(answers, [[201, 201], [409, 409]]);
    served.handle.stop();
}

#[test]
fn repetition_of_running_call_is_refused() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager_with_bricks_alive();
    let seen = Arc::new(Mutex::new(vec![]));
    let (inner, found) = (manager.clone(), seen.clone());
    *cluster.fakes[0].hook.lock().expect("no panic") = Some(Arc::new(Box::new(move |_| {
        let codes =
            ["v", "w"].map(|volume| create(&inner, "k", volume).expect_err("refused").code());
        found.lock().expect("no panic").push(codes);
    })));
    create(&manager, "k", "v").expect("made");
    let seen = seen.lock().expect("no panic").clone();
    assert!(!seen.is_empty());
    assert!(
        seen.iter()
            .all(|it| *it == [ErrorCode::StillRunning, ErrorCode::KeyReused]),
        "{seen:?}"
    );
}

#[test]
fn refused_call_may_be_repeated() {
    let cluster = Cluster::new(2);
    let manager = cluster.manager();
    let refused = create(&manager, "k", "v").expect_err("no brick lives");
    assert_eq!(refused.code(), ErrorCode::NoRoom);
    cluster.send_heartbeats(&manager);
    create(&manager, "k", "v").expect("made");
}

/// The manager stops at each request to a brick, and after the commit whose answer is lost. The
/// repetition then creates the volume and the copy once.
#[test]
fn repetition_after_crash_changes_nothing_twice() {
    let cluster = Cluster::new(3);
    let manager = cluster.manager_with_bricks_alive();
    let images = Arc::new(Mutex::new(vec![]));
    let (store, dir) = (cluster.store(), cluster.dir.path().to_owned());
    for fake in &cluster.fakes {
        let (store, dir, list) = (store.clone(), dir.clone(), images.clone());
        *fake.hook.lock().expect("no panic") = Some(Arc::new(Box::new(move |_| {
            let mut list = list.lock().expect("no panic");
            let image = dir.join(format!("crash-{}.redb", list.len()));
            std::fs::copy(&store, &image).expect("a copy");
            list.push(image);
        })));
    }
    let made = create(&manager, "a", "v").expect("made");
    let copied = attach(&manager, "b").expect("made");
    let last = dir.join("crash-last.redb");
    std::fs::copy(&store, &last).expect("a copy");
    for fake in &cluster.fakes {
        *fake.hook.lock().expect("no panic") = None;
    }
    let mut crashes = images.lock().expect("no panic").clone();
    assert!(crashes.len() >= 6, "several requests to each brick");
    crashes.push(last.clone());
    for image in crashes {
        let crashed = cluster.manager_on(&image);
        cluster.send_heartbeats(&crashed);
        let has_volume = crashed.show(&name("v")).ok();
        let again = create(&crashed, "a", "v").expect("made or known");
        assert_eq!(has_volume.is_some(), again == made, "{image:?}");
        let copy = attach(&crashed, "b").expect("made or known");
        assert_eq!(crashed.show(&name("v")).expect("shown").info.copies, 3);
        assert_eq!(image == last, copy == copied, "{image:?}");
        assert_eq!(attach(&crashed, "b").expect("known"), copy);
    }
}

#[test]
fn keys_expire_whatever_clock_does() {
    let day = Duration::from_secs(KEPT_FOR_S);
    let hour = Duration::from_secs(3600);
    for jump_s in [0, -10 * 365 * 86_400, -3600] {
        let cluster = Cluster::new(2);
        let manager = cluster.manager_with_bricks_alive();
        let made = create(&manager, "k", "v").expect("made");
        cluster.clock.jump_wall_clock(jump_s);
        cluster.clock.advance(day - hour * 2);
        manager.sweep();
        assert_eq!(create(&manager, "k", "v").expect("known"), made, "{jump_s}");
        // A restart with a clock that is behind continues from the stored mark.
        drop(manager);
        let manager = cluster.manager_with_bricks_alive();
        assert_eq!(create(&manager, "k", "v").expect("known"), made, "{jump_s}");
        cluster.clock.advance(hour * 2);
        cluster.send_heartbeats(&manager);
        let refused = create(&manager, "k", "v").expect_err("the key is forgotten");
        assert_eq!(refused.code(), ErrorCode::Exists, "{jump_s}");
        manager.sweep();
        drop(manager);
        let store = pagemesh_manage::store::Store::open(&cluster.store()).expect("a store");
        assert_eq!(store.load().expect("read").answers, [], "{jump_s}");
    }
}

/// Passes connections on to the manager, but loses the answer of the first.
fn lossy_proxy(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().take(8).enumerate() {
            let mut client = client.expect("a client");
            let mut upstream = TcpStream::connect(server).expect("connected");
            let mut requests = client.try_clone().expect("cloned");
            let mut sink = upstream.try_clone().expect("cloned");
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut requests, &mut sink);
                let _ = sink.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = upstream.read(&mut bytes) {
                    if number == 0 || client.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

#[test]
fn client_repeats_call_whose_answer_was_lost() {
    let cluster = Cluster::new(3);
    let served = cluster.serve_with_bricks_alive();
    let lossy = |server| {
        let url = format!("http://{}", lossy_proxy(server));
        ManagerClient::new(&url, &cluster.key).expect("a client")
    };
    let server = served.handle.address();
    let request = create_request("v", LayoutKind::Mirror, MIB);
    let made = lossy(server).create(&request).expect("made");
    assert_eq!(made.volume.info.copies, 2);
    let copied = lossy(server).attach_replica(&name("v"), AttachReplica::default());
    assert_eq!(copied.expect("made").info.copies, 3);
    assert_eq!(served.client.volumes().expect("listed").len(), 1);
    // Another call is another key.
    assert_refused(
        served.client.create(&request),
        ErrorCode::Exists,
        &["already is"],
    );
    served.handle.stop();
}
