//! Rules of an exports file: access by address, directories, and changes while clients are connected.

use crate::support;
use pagemesh_fs::{Caller, FsError, Ino, SetAttributes as FsAttributes};
use pagemesh_nfs::exports_file::{ExportsFile, ExportsFileCause};
use pagemesh_nfs::handle::{HandleBytes, HandleKey};
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::{AccessArguments, SetAttributes};
use pagemesh_nfs::nfs3::listing::CookieVerifier;
use pagemesh_nfs::nfs3::names::{
    CreateMode, LinkArguments, MakeNodeArguments, SpecialFile, SymlinkArguments, SymlinkTarget,
};
use pagemesh_nfs::nfs3::status::Status;
use pagemesh_nfs::{Export, ExportOptions, Exports, GroupLookup, Server, system_groups};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use support::client::Encoder;
use support::decoder::Decoder;
use support::session::{MOUNT, NFS, Session, at, check, mode};
use support::world::{ATTACHMENT, FREE_BYTES, KEY, OWNER, ServedWorld, VOLUME};

/// The status MNT3ERR_NOENT.
const NO_ENTRY: u32 = 2;
/// The status MNT3ERR_ACCES.
const NO_ACCESS: u32 = 13;
const HOST: &str = "127.0.0.2";

/// A server of `/data` with the rules of a text.
struct RuledWorld {
    world: ServedWorld,
    exports: Exports,
}

impl RuledWorld {
    fn new(text: &str) -> Self {
        Self::with_groups(text, Box::new(system_groups))
    }

    fn with_groups(text: &str, lookup: GroupLookup) -> Self {
        Self::with(text, lookup, Limits::default())
    }

    fn with(text: &str, lookup: GroupLookup, limits: Limits) -> Self {
        let world = ServedWorld::new();
        // Clients make files below the root, and `home` has a directory for all.
        let owner = Caller::trusted(OWNER.uid, OWNER.gid);
        let root = world.fs.attr(Ino::ROOT).unwrap().file_id();
        let attrs = FsAttributes {
            mode: Some(0o777),
            ..FsAttributes::default()
        };
        let fs = &world.fs;
        let home = fs.make_directory_at(root, b"home", &attrs, &owner);
        let home = home.result.unwrap().file_id();
        let inner = fs.make_directory_at(home, b"inner", &attrs, &owner);
        inner.result.unwrap();
        let export = Export {
            name: "data".into(),
            fs: Arc::clone(fs),
            volume: VOLUME,
            key: HandleKey::new(KEY),
            attachment: ATTACHMENT,
            options: ExportOptions::default(),
            free_space: Arc::new(|| Some(FREE_BYTES)),
        };
        let exports = Exports::with_groups(vec![export], lookup).unwrap();
        exports.apply(&file(text)).unwrap();
        let listen = ["127.0.0.1:0".parse().unwrap()];
        let hook = Box::new(|_: &str, _: &FsError| {});
        let server = Server::start_with(&listen, exports.clone(), hook, limits);
        let world = ServedWorld {
            server: server.unwrap(),
            ..world
        };
        Self { world, exports }
    }

    /// A session of the owner of the root at an address.
    fn at(&self, address: &str) -> Session {
        let user = Some((OWNER.uid, OWNER.gid, vec![]));
        self.user_at(address, user)
    }

    fn user_at(&self, address: &str, user: Option<(u32, u32, Vec<u32>)>) -> Session {
        let from = format!("{address}:0").parse().unwrap();
        Session::from_address(&self.world, from, user)
    }

    fn apply(&self, text: &str) {
        self.exports.apply(&file(text)).unwrap();
    }
}

fn file(text: &str) -> ExportsFile {
    ExportsFile::parse("exports", text.as_bytes()).unwrap()
}

#[test]
fn most_specific_rule_decides() {
    let world = RuledWorld::new(
        "/data *(ro,insecure) 127.0.0.0/29(rw,insecure) 127.0.0.2(ro,insecure) 127.0.0.4/30(rw,insecure,all_squash,anonuid=9,anongid=9)",
    );
    let root = world.at("127.0.0.1").root();
    let create = |address| {
        let made = world.at(address).create(&root, address, 0o644);
        made.map(|made| made.attributes.uid)
    };
    assert_eq!(create("127.0.0.1"), Ok(OWNER.uid));
    assert_eq!(create("127.0.0.2"), Err(Status::ReadOnly));
    assert_eq!(create("127.0.0.5"), Err(Status::Access));
    assert_eq!(create("127.0.0.9"), Err(Status::ReadOnly));
    let home = world.at(HOST).mount("/data/home").unwrap();
    let made = world.at("127.0.0.5").create(&home, "f", 0o644).unwrap();
    assert_eq!((made.attributes.uid, made.attributes.gid), (9, 9));
}

#[test]
fn client_without_a_rule_has_no_access() {
    let world = RuledWorld::new("/data 127.0.0.1(rw,insecure)");
    let root = world.at("127.0.0.1").root();
    let mut other = world.at(HOST);
    assert_eq!(other.mount("/data"), Err(NO_ACCESS));
    assert_eq!(other.mount("/none"), Err(NO_ENTRY));
    assert_eq!(other.attributes(&root), Err(Status::Access));
    assert_eq!(other.lookup(&root, "home").unwrap_err(), Status::Access);
}

#[test]
fn withdrawn_access_ends_at_the_next_call() {
    let world = RuledWorld::new("/data *(rw,insecure)");
    let mut session = world.at(HOST);
    let root = session.root();
    session.create(&root, "f", 0o644).unwrap();
    world.apply("/data *(ro,insecure)");
    let refused = session.create(&root, "g", 0o644);
    assert_eq!(refused.unwrap_err(), Status::ReadOnly);
    world.apply("/data 127.0.0.1(rw,insecure)");
    assert_eq!(session.attributes(&root), Err(Status::Access));
    world.apply("");
    assert_eq!(session.attributes(&root), Err(Status::Stale));
    assert_eq!(session.mount("/data"), Err(NO_ENTRY));
    world.apply("/data *(rw,insecure)");
    assert!(session.create(&root, "g", 0o644).is_ok());
}

#[test]
fn unusable_file_keeps_the_earlier_rules() {
    let world = RuledWorld::new("/data *(rw,insecure)");
    let mut session = world.at(HOST);
    let root = session.root();
    let refused = |text| world.exports.apply(&file(text)).unwrap_err();
    let error = refused("/data *(ro)\n/other *");
    let unknown = ExportsFileCause::UnknownFileSystem("other".into());
    assert_eq!((error.line, error.cause), (2, unknown));
    assert!(session.create(&root, "f", 0o644).is_ok());
}

/// A user may rename a directory. That must stop no other export, also at a start or takeover.
#[test]
fn line_without_its_directory_is_left_out() {
    let world = RuledWorld::new("/data *(rw,insecure)");
    let mut session = world.at(HOST);
    let root = session.root();
    session.create(&root, "file", 0o644).unwrap();
    let lines = "/data *(ro,insecure)\n/data/none *(insecure)\n/data/file *(insecure)";
    world.exports.apply(&file(lines)).unwrap();
    let refused = session.create(&root, "f", 0o644);
    assert_eq!(refused.unwrap_err(), Status::ReadOnly);
    assert_eq!(session.mount("/data"), Ok(root));
    let exports = session.mount_call(5);
    let has = |path: &[u8]| exports.windows(path.len()).any(|it| it == path);
    assert!(has(b"/data") && !has(b"/data/none") && !has(b"/data/file"));
}

#[test]
fn reserved_port_is_needed_with_secure() {
    let world = RuledWorld::new("/data *(rw)");
    let mut session = world.at(HOST);
    assert_eq!(session.mount("/data"), Err(NO_ACCESS));
    let user = Some((OWNER.uid, OWNER.gid, vec![]));
    let ports = (600..1024).rev();
    let mut reserved = ports.filter_map(|port| {
        let from = format!("{HOST}:{port}").parse().ok()?;
        Session::try_from_address(&world.world, from, user.clone()).ok()
    });
    // Only root may use such a port.
    if let Some(mut session) = reserved.next() {
        let root = session.root();
        assert!(session.create(&root, "f", 0o644).is_ok());
        assert_eq!(world.at(HOST).attributes(&root), Err(Status::Access));
    }
}

#[test]
fn directory_export_has_no_way_out() {
    let world = RuledWorld::new("/data 127.0.0.1(rw,insecure)\n/data/home *(rw,insecure)");
    let mut session = world.at(HOST);
    let root = session.mount("/data/home").unwrap();
    assert_eq!(session.mount("/data"), Err(NO_ACCESS));
    assert_eq!(session.mount("/data/none"), Err(NO_ACCESS));
    assert_eq!(session.mount("/data/home/none"), Err(NO_ENTRY));
    let inner = session.mount("/data/home/inner").unwrap();
    assert_eq!(session.mount("/data/home/../.."), Ok(root.clone()));

    assert_eq!(session.lookup(&root, "..").unwrap().handle, root);
    assert_eq!(session.lookup(&root, "inner").unwrap().handle, inner);
    assert_eq!(session.lookup(&inner, "..").unwrap().handle, root);
    let number = session.attributes(&root).unwrap().inode;
    let list = |session: &mut Session, directory: &[u8], is_plus| {
        let start = (0, CookieVerifier::default());
        let listed = session.list(directory, start, 4096, is_plus).unwrap();
        let parent = listed.entries.into_iter().find(|it| it.name == "..");
        parent.unwrap()
    };
    for is_plus in [false, true] {
        for directory in [&root, &inner] {
            let parent = list(&mut session, directory, is_plus);
            assert_eq!(parent.inode, number);
            assert_eq!((parent.handle, parent.attributes), (None, None));
        }
    }
}

#[test]
fn moved_directory_does_not_lead_out_of_its_export() {
    let world = RuledWorld::new("/data 127.0.0.1(rw,insecure)\n/data/home *(rw,insecure)");
    let mut session = world.at(HOST);
    let root = session.mount("/data/home").unwrap();
    let inner = session.mount("/data/home/inner").unwrap();
    let mut owner = world.at("127.0.0.1");
    let top = owner.root();
    let home = owner.lookup(&top, "home").unwrap().handle;
    owner.rename((&home, "inner"), (&top, "moved")).unwrap();
    // A handle names its file wherever it moves.
    assert!(session.attributes(&inner).is_ok());
    assert_eq!(session.lookup(&inner, "..").unwrap_err(), Status::Stale);
    assert_eq!(session.lookup(&root, "..").unwrap().handle, root);
    assert_eq!(session.lookup(&root, "inner").unwrap_err(), Status::NoEntry);
}

#[test]
fn handle_has_the_rules_of_its_own_export() {
    let world = RuledWorld::new(
        "/data 127.0.0.1(rw,insecure)\n/data/home 127.0.0.1(ro,insecure) 127.0.0.2(rw,insecure)",
    );
    let mut first = world.at("127.0.0.1");
    let mut second = world.at(HOST);
    let top = first.root();
    let through_top = first.lookup(&top, "home").unwrap().handle;
    let home = first.mount("/data/home").unwrap();
    assert_ne!(through_top, home);
    assert!(first.create(&through_top, "f", 0o644).is_ok());
    let refused = first.create(&home, "g", 0o644).unwrap_err();
    assert_eq!(refused, Status::ReadOnly);
    // The same directory, by the export that the second client may not use.
    assert!(second.create(&home, "g", 0o644).is_ok());
    assert_eq!(second.attributes(&through_top), Err(Status::Access));
    // Another id in the handle breaks its checksum.
    let mut forged = through_top.clone();
    forged[1..17].copy_from_slice(&home[1..17]);
    assert_eq!(second.attributes(&forged), Err(Status::BadHandle));
    let moved = first.rename((&through_top, "f"), (&home, "h"));
    assert_eq!(moved.unwrap_err(), Status::ReadOnly);
    world.apply("/data *(rw,insecure)\n/data/home *(rw,insecure)");
    let moved = first.rename((&through_top, "f"), (&home, "h"));
    assert_eq!(moved.unwrap_err(), Status::CrossDevice);
}

#[test]
fn another_directory_of_the_name_makes_handles_stale() {
    let text = "/data/home *(rw,insecure)";
    let world = RuledWorld::new(text);
    let mut session = world.at(HOST);
    let root = session.mount("/data/home").unwrap();
    let owner = Caller::trusted(OWNER.uid, OWNER.gid);
    let top = world.world.fs.attr(Ino::ROOT).unwrap().file_id();
    let fs = &world.world.fs;
    let renamed = fs.rename_at((top, b"home"), (top, b"old"), &owner);
    renamed.result.unwrap();
    assert!(session.attributes(&root).is_ok());
    let attrs = FsAttributes::default();
    let made = fs.make_directory_at(top, b"home", &attrs, &owner);
    made.result.unwrap();
    world.apply(text);
    assert_eq!(session.attributes(&root), Err(Status::Stale));
    assert!(session.mount("/data/home").is_ok());
}

#[test]
fn read_only_rule_refuses_every_change() {
    let world = RuledWorld::new("/data *(rw,insecure)");
    let mut session = world.at(HOST);
    let root = session.root();
    let file = session.create(&root, "f", 0o666).unwrap().handle;
    world.apply("/data *(ro,insecure,no_root_squash)");
    let mut session = world.user_at(HOST, Some((0, 0, vec![])));
    let before = session.attributes(&root).unwrap();
    let at = |name| at(&root, name);
    let attributes = SetAttributes::default();
    let node = SpecialFile::Fifo(attributes);
    let calls = [
        Nfs3Call::MakeSymlink(SymlinkArguments {
            at: at("s"),
            attributes,
            target: SymlinkTarget(b"x"),
        }),
        Nfs3Call::MakeNode(MakeNodeArguments {
            at: at("n"),
            file: node,
        }),
    ];
    for call in &calls {
        assert_eq!(session.make(call).unwrap_err(), Status::ReadOnly);
    }
    for mode in [
        CreateMode::Unchecked(attributes),
        CreateMode::Guarded(attributes),
        CreateMode::Exclusive(&[1; 8]),
    ] {
        let made = session.create_as(&root, "c", mode);
        assert_eq!(made.unwrap_err(), Status::ReadOnly);
    }
    let refused = Some(Status::ReadOnly);
    assert_eq!(session.make_directory(&root, "d", 0o755).err(), refused);
    assert_eq!(session.remove(&root, "f").err(), refused);
    let removed = Nfs3Call::RemoveDirectory(at("home"));
    assert_eq!(session.change(&removed).err(), refused);
    let renamed = session.rename((&root, "f"), (&root, "g"));
    assert_eq!(renamed.err(), refused);
    let linked = session.call(&Nfs3Call::Link(LinkArguments {
        file: HandleBytes(&file),
        at: at("l"),
    }));
    assert_eq!(check(&mut Decoder(&linked)).err(), refused);
    assert_eq!(session.write(&file, 0, b"x").err(), refused);
    let set = session.set_attributes(&file, mode(0o600), None);
    assert_eq!(set.err(), refused);
    assert_eq!(session.attributes(&root), Ok(before));
}

#[test]
fn squashed_root_has_no_rights_of_root_or_its_groups() {
    let world = RuledWorld::new("/data *(rw,insecure)");
    let mut owner = world.at(HOST);
    let top = owner.root();
    let secret = owner.create(&top, "secret", 0o660).unwrap().handle;
    let set_id = owner.create(&top, "program", 0o4755).unwrap().handle;
    // Root with the group of the owner, in all places.
    let mut root = world.user_at(HOST, Some((0, OWNER.gid, vec![0, OWNER.gid])));
    assert_eq!(root.read(&secret, 0, 1), Err(Status::Access));
    assert_eq!(root.write(&secret, 0, b"x").unwrap_err(), Status::Access);
    assert_eq!(root.create(&top, "f", 0o644).unwrap_err(), Status::Access);
    assert_eq!(root.remove(&top, "secret").unwrap_err(), Status::Access);
    let set = root.set_attributes(&set_id, mode(0o777), None);
    assert_eq!(set, Err(Status::Permission));
    let to_root = SetAttributes {
        uid: Some(0),
        ..SetAttributes::default()
    };
    let set = root.set_attributes(&set_id, to_root, None);
    assert_eq!(set, Err(Status::Permission));
    let wanted = AccessArguments {
        file: HandleBytes(&secret),
        wanted: 0x3f,
    };
    let granted = root.call(&Nfs3Call::Access(wanted));
    let mut client = Decoder(&granted);
    check(&mut client).unwrap();
    client.attributes();
    assert_eq!(client.word(), 0);
    let home = root.lookup(&top, "home").unwrap().handle;
    let made = root.create(&home, "f", 0o4755).unwrap().attributes;
    assert_eq!((made.uid, made.gid), (65_534, 65_534));
    let device = pagemesh_nfs::nfs3::attributes::DeviceNumber { major: 1, minor: 1 };
    let node = Nfs3Call::MakeNode(MakeNodeArguments {
        at: at(&home, "device"),
        file: SpecialFile::BlockDevice(SetAttributes::default(), device),
    });
    assert_eq!(root.make(&node).unwrap_err(), Status::Permission);
    // A user keeps its groups, except for the group of root.
    let mut member = world.user_at(HOST, Some((7, 0, vec![0, OWNER.gid])));
    assert!(member.read(&secret, 0, 1).is_ok());
    let made = member.create(&home, "g", 0o644).unwrap().attributes;
    assert_eq!((made.uid, made.gid), (7, 65_534));
}

#[test]
fn server_looks_up_groups_beyond_sixteen() {
    let count = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&count);
    let lookup = move |uid| {
        counter.fetch_add(1, Ordering::SeqCst);
        Ok((uid == 7).then(|| (1000..1100).collect()))
    };
    let text = "/data *(rw,insecure,manage_gids)";
    let world = RuledWorld::with_groups(text, Box::new(lookup));
    let mut owner = world.at(HOST);
    let top = owner.root();
    let file = owner.create(&top, "f", 0o640).unwrap().handle;
    let group = SetAttributes {
        gid: Some(1099),
        ..SetAttributes::default()
    };
    let mut root = world.user_at(HOST, Some((0, 0, vec![1099])));
    let caller = Caller::trusted(0, 0);
    let id = world.world.fs.lookup(Ino::ROOT, b"f").unwrap().file_id();
    let fs_group = FsAttributes {
        gid: group.gid,
        ..FsAttributes::default()
    };
    let set = world.world.fs.set_attributes(id, &fs_group, None, &caller);
    set.result.unwrap();
    let read = |session: &mut Session| session.read(&file, 0, 1).map(drop);
    let mut member = world.user_at(HOST, Some((7, 7, vec![])));
    let before = count.load(Ordering::SeqCst);
    assert_eq!(read(&mut member), Ok(()));
    assert_eq!(read(&mut member), Ok(()));
    assert_eq!(count.load(Ordering::SeqCst), before + 1);
    // The groups of the call do not count for a known user, and do for an unknown one.
    let mut liar = world.user_at(HOST, Some((7, 7, vec![OWNER.gid])));
    let other = owner.create(&top, "other", 0o640).unwrap().handle;
    assert_eq!(liar.read(&other, 0, 1), Err(Status::Access));
    let mut unknown = world.user_at(HOST, Some((8, 8, vec![1099])));
    assert_eq!(read(&mut unknown), Ok(()));
    // Root is anonymous, and is not looked up.
    let before = count.load(Ordering::SeqCst);
    assert_eq!(read(&mut root), Err(Status::Access));
    assert_eq!(count.load(Ordering::SeqCst), before);
    world.apply("/data *(rw,insecure)");
    assert_eq!(read(&mut member), Err(Status::Access));
}

#[test]
fn slow_group_lookup_delays_only_its_user() {
    let (begun, wait_begun) = mpsc::channel();
    let (end, wait_end) = mpsc::channel::<()>();
    let wait_end = std::sync::Mutex::new(wait_end);
    let lookup = move |uid| {
        if uid == 7 {
            begun.send(()).unwrap();
            wait_end.lock().unwrap().recv().unwrap();
        }
        Ok(None)
    };
    let text = "/data *(rw,insecure,manage_gids)";
    let world = RuledWorld::with_groups(text, Box::new(lookup));
    let root = world.at(HOST).root();
    let mut slow = world.user_at(HOST, Some((7, 7, vec![])));
    let found = slow.lookup(&root, "home").map(drop);
    assert_eq!(found, Err(Status::Jukebox), "the worker is free again");
    wait_begun.recv().unwrap();
    assert!(world.at(HOST).lookup(&root, "home").is_ok());
    end.send(()).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while slow.lookup(&root, "home").is_err() {
        assert!(Instant::now() < until, "the answer is there");
    }
    assert!(wait_begun.try_recv().is_err(), "one lookup");
}

/// A server of `/data` for one host, with few connections, and the requests of hosts without a rule.
fn crowded(limits: Limits) -> (RuledWorld, Vec<Session>) {
    let text = format!("/data {HOST}(rw,insecure)");
    let world = RuledWorld::with(&text, Box::new(system_groups), limits);
    let others = (3..6).map(|host| {
        let mut other = world.at(&format!("127.0.0.{host}"));
        assert_eq!(other.mount("/data"), Err(NO_ACCESS));
        other
    });
    let others = others.collect();
    (world, others)
}

#[test]
fn hosts_without_a_rule_have_few_connections() {
    let (world, mut others) = crowded(Limits {
        without_rule_max: 2,
        ..Limits::default()
    });
    assert_eq!(others[0].receive(), None, "the oldest one is closed");
    assert_eq!(others[2].mount("/data"), Err(NO_ACCESS));
    let mut client = world.at(HOST);
    assert!(client.mount("/data").is_ok());
    assert_eq!(others[1].mount("/data"), Err(NO_ACCESS));
}

#[test]
fn hosts_without_a_rule_make_room_for_one_with_a_rule() {
    let (world, mut others) = crowded(Limits {
        connections_max: 3,
        ..Limits::default()
    });
    let mut clients: Vec<_> = (0..3).map(|_| world.at(HOST)).collect();
    for (client, other) in clients.iter_mut().zip(&mut others) {
        assert!(client.mount("/data").is_ok());
        assert_eq!(other.receive(), None);
    }
    let mut late = world.at("127.0.0.7");
    assert!(
        late.exchange((NFS, 3), 0, &[]).is_none(),
        "there is no room"
    );
    assert!(clients[0].mount("/data").is_ok());
}

#[test]
fn connections_that_lose_their_rule_make_room() {
    let (world, _) = crowded(Limits {
        connections_max: 4,
        sweep: Duration::from_millis(1),
        ..Limits::default()
    });
    let mut client = world.at(HOST);
    assert!(client.mount("/data").is_ok());
    world.apply("/data 127.0.0.8(rw,insecure)");
    let until = Instant::now() + Duration::from_secs(30);
    // The server notices the new rules at a sweep.
    let mut news: Vec<Session> = Vec::new();
    while news.len() < 4 {
        let mut new = world.at("127.0.0.8");
        if new.exchange((NFS, 3), 0, &[]).is_some() {
            news.push(new);
        }
        assert!(Instant::now() < until, "{} connections", news.len());
    }
    assert_eq!(client.receive(), None);
}

/// The strings of a list of EXPORT.
fn export_list(session: &mut Session) -> Vec<(String, Vec<String>)> {
    let result = session.mount_call(5);
    let mut client = Decoder(&result);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut exports = Vec::new();
    while client.word() == 1 {
        let path = text(client.opaque());
        let mut clients = Vec::new();
        while client.word() == 1 {
            clients.push(text(client.opaque()));
        }
        exports.push((path, clients));
    }
    client.end();
    exports
}

/// The clients and paths of a list of DUMP.
fn mounts(session: &mut Session) -> Vec<(String, String)> {
    let result = session.mount_call(2);
    let mut client = Decoder(&result);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut mounts = Vec::new();
    while client.word() == 1 {
        mounts.push((text(client.opaque()), text(client.opaque())));
    }
    client.end();
    mounts
}

#[test]
fn exports_and_mounts_are_listed() {
    let world =
        RuledWorld::new("/data 10.0.0.0/8 127.0.0.0/8(insecure) fd00::1\n/data/home *(insecure)");
    let mut session = world.at(HOST);
    let clients = ["fd00::1", "10.0.0.0/8", "127.0.0.0/8"];
    let wanted = [
        ("/data".into(), clients.map(String::from).to_vec()),
        ("/data/home".into(), vec![]),
    ];
    assert_eq!(export_list(&mut session), wanted);

    assert_eq!(mounts(&mut session), []);
    session.mount("/data").unwrap();
    session.mount("/data/home/inner").unwrap();
    session.mount("data//").unwrap();
    world.at("127.0.0.3").mount("/data").unwrap();
    session.mount("/none").unwrap_err();
    let pair = |client: &str, path: &str| (client.into(), path.into());
    let inner = pair(HOST, "/data/home/inner");
    let other = pair("127.0.0.3", "/data");
    let wanted = [inner.clone(), pair(HOST, "/data"), other.clone()];
    assert_eq!(mounts(&mut session), wanted);
    let mut path = Encoder::default();
    path.opaque(b"/data");
    session.exchange((MOUNT, 3), 3, &path.0).unwrap();
    assert_eq!(mounts(&mut session), [inner, other.clone()]);
    session.mount_call(4);
    assert_eq!(mounts(&mut session), [other]);
}
