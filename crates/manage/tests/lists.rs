//! Lists in pages, entity tags, and changes that depend on them.

use crate::cluster;
use cluster::{Cluster, MIB, TestServer, create_request, name, named_registration};
use pagemesh_manage::LayoutKind;
use pagemesh_manage::token::token;
use pagemesh_manage::wire::{BrickInfo, VolumeContent, VolumeInfo};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    /// The path of the next page.
    fn next(&self) -> Option<String> {
        let link = self.header("link")?;
        assert!(link.ends_with("rel=\"next\""), "{link}");
        let end = link.find('>').expect("an address");
        Some(link[1..end].to_owned())
    }
}

fn request(cluster: &Cluster, served: &TestServer, method: &str, path: &str, more: &str) -> Answer {
    let mut stream = TcpStream::connect(served.handle.address()).expect("connected");
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .expect("set");
    let token = token(&cluster.key);
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n{more}"
    );
    stream.write_all(head.as_bytes()).expect("sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|it| it.parse().ok());
    Answer {
        status: status.expect("a status"),
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

fn get(cluster: &Cluster, served: &TestServer, path: &str, more: &str) -> Answer {
    request(cluster, served, "GET", path, &format!("{more}\r\n"))
}

fn cluster_with_volumes() -> (Cluster, TestServer) {
    let cluster = Cluster::new(3);
    let served = cluster.serve();
    for (number, brick) in ["zeta", "alpha", "mid"].iter().enumerate() {
        let manager = served.handle.manager();
        manager
            .heartbeat(named_registration(number, brick))
            .expect("welcome");
    }
    for volume in ["a1", "b2", "a2", "c", "a10"] {
        let request = create_request(volume, LayoutKind::Mirror, MIB);
        served.client.create(&request).expect("made");
    }
    (cluster, served)
}

fn volume_names(body: &str) -> Vec<String> {
    let volumes: Vec<VolumeInfo> = serde_json::from_str(body).expect("a list");
    volumes.iter().map(|it| it.name.to_string()).collect()
}

fn brick_names(body: &str) -> Vec<String> {
    let bricks: Vec<BrickInfo> = serde_json::from_str(body).expect("a list");
    bricks.iter().map(|it| it.label().to_string()).collect()
}

#[test]
fn lists_are_cut_in_order_of_names() {
    let (cluster, served) = cluster_with_volumes();
    let pages = |first: &str, names: fn(&str) -> Vec<String>| {
        let mut path = Some(first.to_owned());
        let mut found = vec![];
        while let Some(next) = path {
            let answer = get(&cluster, &served, &next, "");
            assert_eq!(answer.status, 200, "{next}: {}", answer.body);
            found.push(names(&answer.body));
            path = answer.next();
        }
        found
    };
    let volumes = pages("/api/v1/volumes?limit=2", volume_names);
    assert_eq!(volumes, [vec!["a1", "a10"], vec!["a2", "b2"], vec!["c"]]);
    let searched = pages("/api/v1/volumes?limit=1&search=a1", volume_names);
    assert_eq!(searched, [["a1"], ["a10"]]);
    let healthy = pages("/api/v1/volumes?health=in-sync&after=a2", volume_names);
    assert_eq!(healthy, [["b2", "c"]]);
    assert_eq!(
        pages("/api/v1/volumes?health=degraded", volume_names),
        [[""; 0]]
    );
    let bricks = pages("/api/v1/bricks?limit=1", brick_names);
    assert_eq!(bricks, [["alpha"], ["mid"], ["zeta"]]);
    let alive = pages("/api/v1/bricks?health=alive&search=a", brick_names);
    assert_eq!(alive, [["alpha", "zeta"]]);
    assert_eq!(pages("/api/v1/bricks?health=dead", brick_names), [[""; 0]]);
    for wrong in [
        "limit=0",
        "limit=1001",
        "limit=-1",
        "limit=x",
        "after=a/b",
        "health=ill",
        "sort=up",
        "limit=1&limit=2",
    ] {
        let answer = get(&cluster, &served, &format!("/api/v1/volumes?{wrong}"), "");
        assert_eq!(answer.status, 400, "{wrong}");
    }
    assert_eq!(served.client.volumes().expect("listed").len(), 5);
    assert_eq!(served.client.bricks().expect("listed").len(), 3);
    served.handle.stop();
}

#[test]
fn volumes_are_filtered_by_content() {
    let (cluster, served) = cluster_with_volumes();
    for files in ["a3", "f"] {
        let mut request = create_request(files, LayoutKind::Mirror, MIB);
        request.content = VolumeContent::Files;
        served.client.create(&request).expect("made");
    }
    let names = |query: &str| {
        let answer = get(&cluster, &served, &format!("/api/v1/volumes?{query}"), "");
        assert_eq!(answer.status, 200, "{query}: {}", answer.body);
        (volume_names(&answer.body), answer.next())
    };
    assert_eq!(names("content=files").0, ["a3", "f"]);
    assert_eq!(
        names("content=blocks").0,
        ["a1", "a10", "a2", "b2", "c"],
        "files are not blocks"
    );
    let (first, next) = names("content=files&limit=1");
    assert_eq!(first, ["a3"]);
    let next = next.expect("a next page");
    let query = next.split_once('?').expect("a query").1;
    assert_eq!(names(query), (vec!["f".to_owned()], None), "{next}");
    let wrong = get(&cluster, &served, "/api/v1/volumes?content=x", "");
    assert_eq!(wrong.status, 400);
    served.handle.stop();
}

#[test]
fn unchanged_answer_is_not_sent_again() {
    let (cluster, served) = cluster_with_volumes();
    for path in [
        "/api/v1/volumes",
        "/api/v1/volumes/a1",
        "/api/v1/bricks",
        "/api/v1/bricks/mid",
    ] {
        let first = get(&cluster, &served, path, "");
        let tag = first.header("etag").expect("a tag").to_owned();
        cluster.clock.advance(Duration::from_secs(1));
        let has = format!("If-None-Match: \"x\", {tag}\r\n");
        let again = get(&cluster, &served, path, &has);
        assert_eq!((again.status, again.body.as_str()), (304, ""), "{path}");
        assert_eq!(again.header("etag"), Some(tag.as_str()));
        // A dead brick changes all of them.
        cluster.clock.advance(Duration::from_secs(8));
        assert_eq!(get(&cluster, &served, path, &has).status, 200, "{path}");
        for (number, brick) in ["zeta", "alpha", "mid"].iter().enumerate() {
            let manager = served.handle.manager();
            manager
                .heartbeat(named_registration(number, brick))
                .expect("welcome");
        }
    }
    served.handle.stop();
}

#[test]
fn change_of_changed_thing_is_refused() {
    let (cluster, served) = cluster_with_volumes();
    let tag = |path: &str| {
        let answer = get(&cluster, &served, path, "");
        answer.header("etag").expect("a tag").to_owned()
    };
    let grow = |tag: &str| {
        let body = format!("{{\"size_bytes\":{}}}", 2 * MIB);
        let length = body.len();
        let more = format!(
            "If-Match: {tag}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        request(&cluster, &served, "POST", "/api/v1/volumes/a1/grow", &more)
    };
    let first = tag("/api/v1/volumes/a1");
    served.client.attach(&name("a1"), "c").expect("attached");
    for stale in [first.as_str(), "\"x\"", "", "\"0000000000000000.0\""] {
        let refused = grow(stale);
        assert_eq!(refused.status, 412, "{stale}: {}", refused.body);
        assert!(
            refused.body.contains("changed-meanwhile"),
            "{}",
            refused.body
        );
    }
    let current = tag("/api/v1/volumes/a1");
    // A brick that dies is no change of the volume.
    cluster.clock.advance(Duration::from_secs(8));
    assert_ne!(tag("/api/v1/volumes/a1"), current);
    for (number, brick) in ["zeta", "alpha"].iter().enumerate() {
        let manager = served.handle.manager();
        manager
            .heartbeat(named_registration(number, brick))
            .expect("welcome");
    }
    assert_eq!(grow(&format!("\"x\", {current}")).status, 200);
    let delete = |path: &str, tag: &str| {
        request(
            &cluster,
            &served,
            "DELETE",
            path,
            &format!("If-Match: {tag}\r\n\r\n"),
        )
        .status
    };
    assert_eq!(delete("/api/v1/volumes/b2", &first), 412);
    assert_eq!(delete("/api/v1/volumes/b2", "*"), 200);
    assert_eq!(delete("/api/v1/bricks/mid", "\"x\""), 412);
    served.handle.stop();
}
