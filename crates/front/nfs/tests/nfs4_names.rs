//! Names of owners over NFSv4.1.

use crate::support;
use pagemesh_nfs::handle::HandleKey;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs4::identity::{Identities, NameAnswer};
use pagemesh_nfs::{Export, ExportOptions, Exports, Nfs4Options, Server, Squash};
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use support::client::Encoder;
use support::compounds::{Client4, set_attributes};
use support::decoder::Decoder;
use support::session::Session;
use support::world::{ATTACHMENT, FREE_BYTES, KEY, ServedWorld, VOLUME};

const DELAY: u32 = 10_008;
const BAD_OWNER: u32 = 10_039;
const MODE: u32 = 33;
const OWNER_NAME: u32 = 36;
const GROUP_NAME: u32 = 37;

/// Users are `uN@x`, and groups are numbers. The first question for each user gets no answer yet.
#[derive(Default)]
struct SlowNames(Mutex<HashSet<String>>);

impl SlowNames {
    fn answer<T>(&self, question: String, known: Option<T>) -> NameAnswer<T> {
        match (self.0.lock().unwrap().insert(question), known) {
            (true, _) => NameAnswer::Pending,
            (false, Some(known)) => NameAnswer::Known(known),
            (false, None) => NameAnswer::Unknown,
        }
    }
}

impl Identities for SlowNames {
    fn user_name(&self, uid: u32) -> NameAnswer<Arc<str>> {
        let name = format!("u{uid}@x");
        self.answer(uid.to_string(), Some(name.into()))
    }

    fn group_name(&self, _: u32) -> NameAnswer<Arc<str>> {
        NameAnswer::Unknown
    }

    fn user_id(&self, name: &str) -> NameAnswer<u32> {
        let number = name.strip_prefix('u').and_then(|it| it.strip_suffix("@x"));
        self.answer(name.into(), number.and_then(|it| it.parse().ok()))
    }

    fn group_id(&self, _: &str) -> NameAnswer<u32> {
        NameAnswer::Unknown
    }
}

/// A server with names, and a client of its root.
fn named() -> (ServedWorld, Client4) {
    let world = ServedWorld::new();
    let export = Export {
        name: "data".into(),
        fs: Arc::clone(&world.fs),
        volume: VOLUME,
        key: HandleKey::new(KEY),
        attachment: ATTACHMENT,
        options: ExportOptions {
            squash: Squash::None,
            ..ExportOptions::default()
        },
        free_space: Arc::new(|| Some(FREE_BYTES)),
    };
    let exports = Exports::new(vec![export]).unwrap();
    let listen = ["127.0.0.1:0".parse().unwrap()];
    let options = Nfs4Options {
        identities: Arc::new(SlowNames::default()),
        ..Nfs4Options::default()
    };
    let hook = Box::new(|_: &str, _: &_| {});
    let server = Server::start_nfs4(&listen, exports, hook, Limits::default(), &options);
    let world = ServedWorld {
        server: server.unwrap(),
        ..world
    };
    let session = Session::of(&world, Some((0, 0, vec![])));
    let client = Client4::new(session, "root");
    (world, client)
}

fn name(text: &str) -> Vec<u8> {
    let mut out = Encoder::default();
    out.opaque(text.as_bytes());
    out.0
}

#[test]
fn owner_has_a_name_after_its_lookup() {
    let (_world, mut client) = named();
    let root = client.walk(&["data"]).unwrap();
    let numbers = [OWNER_NAME, GROUP_NAME];
    assert_eq!(client.attributes(&root, &numbers), Err(DELAY));
    let values = client.attributes(&root, &numbers).unwrap().bytes;
    let mut decoder = Decoder(&values);
    assert_eq!(decoder.opaque(), b"u1000@x");
    assert_eq!(decoder.opaque(), b"100", "a group without a name");
}

#[test]
fn owner_is_set_by_name_or_number() {
    let (_world, mut client) = named();
    let root = client.walk(&["data"]).unwrap();
    let mut set = |text: &str| {
        let set = set_attributes(&[OWNER_NAME], &name(text));
        client.on(&root, set).map(|_| ())
    };
    assert_eq!(set("u2000@x"), Err(DELAY));
    assert_eq!(set("u2000@x"), Ok(()));
    assert_eq!(set("3000"), Ok(()), "numbers are always known");
    assert_eq!(set("anna@x"), Err(DELAY));
    assert_eq!(set("anna@x"), Err(BAD_OWNER));
    let _ = client.attributes(&root, &[OWNER_NAME]);
    let values = client.attributes(&root, &[OWNER_NAME]).unwrap().bytes;
    assert_eq!(values, name("u3000@x"));
}

/// The first request asks for all names at once.
#[test]
fn listing_waits_once_for_the_names_of_its_files() {
    let (_world, mut client) = named();
    let root = client.walk(&["data"]).unwrap();
    for uid in 1..=3 {
        let create: (&[u32], &[u8]) = (&[MODE], &0o644_u32.to_be_bytes());
        let file = format!("f{uid}");
        client.open(&root, &file, (1, 0), Some(create)).unwrap();
        let handle = client.lookup(&root, &file).unwrap();
        let set = set_attributes(&[OWNER_NAME], &name(&uid.to_string()));
        client.on(&handle, set).unwrap();
    }
    assert_eq!(client.list(&root, &[OWNER_NAME]), Err(DELAY));
    let listed = client.list(&root, &[OWNER_NAME]).unwrap();
    let mut names: Vec<_> = listed.into_iter().map(|it| it.values.bytes).collect();
    names.sort_unstable();
    assert_eq!(names, [name("u1@x"), name("u2@x"), name("u3@x")]);
}
