//! Callers, handles and exports: the calls that are refused.

use crate::support;
use pagemesh_fs::{Caller, Ino};
use pagemesh_nfs::handle::{FileHandle, HandleBytes, HandleKey};
use pagemesh_nfs::nfs3::Nfs3Call;
use pagemesh_nfs::nfs3::attributes::AccessArguments;
use pagemesh_nfs::nfs3::listing::CookieVerifier;
use pagemesh_nfs::nfs3::names::LinkArguments;
use pagemesh_nfs::nfs3::status::Status;
use pagemesh_nfs::{Export, ExportError, ExportOptions, Exports, Server, Squash, is_fenced};
use support::decoder::Decoder;
use support::session::{NFS, Session, at, check, mode};
use support::world::{KEY, OWNER, ServedWorld, VOLUME};
use uuid::Uuid;

fn access(session: &mut Session, file: &[u8], wanted: u32) -> u32 {
    let file = HandleBytes(file);
    let result = session.call(&Nfs3Call::Access(AccessArguments { file, wanted }));
    let mut client = Decoder(&result);
    check(&mut client).expect("granted");
    assert!(client.attributes().is_some());
    client.word()
}

#[test]
fn forged_handles_are_refused() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let root = session.root();
    for bit in 0..8 * root.len() {
        let mut forged = root.clone();
        forged[bit / 8] ^= 1 << (bit % 8);
        let is_volume = (1..17).contains(&(bit / 8));
        let wanted = match is_volume {
            true => Status::Stale,
            false => Status::BadHandle,
        };
        assert_eq!(session.attributes(&forged), Err(wanted), "{bit}");
    }
    assert_eq!(session.attributes(&[]), Err(Status::BadHandle));
    let file = FileHandle {
        volume: *VOLUME.as_bytes(),
        snapshot_epoch: 0,
        inode: 1,
        generation: 0,
        birth_fold: 0,
    };
    let encoded = |key, file: &FileHandle| HandleKey::new(key).encode(file).bytes().to_vec();
    let other_key = session.attributes(&encoded([8; 16], &file));
    assert_eq!(other_key, Err(Status::BadHandle));
    let no_such_birth = session.attributes(&encoded(KEY, &file));
    assert_eq!(no_such_birth, Err(Status::Stale));
    let id = world.fs.attr(Ino::ROOT).expect("there").file_id();
    let of_root = FileHandle {
        generation: id.generation,
        birth_fold: id.birth,
        ..file
    };
    assert_eq!(encoded(KEY, &of_root), root);
    let snapshot = FileHandle {
        snapshot_epoch: 1,
        ..of_root
    };
    let snapshot = session.attributes(&encoded(KEY, &snapshot));
    assert_eq!(snapshot, Err(Status::Stale));
}

#[test]
fn read_only_export_refuses_changes() {
    let world = ServedWorld::with_options(ExportOptions {
        is_read_only: true,
        ..ExportOptions::default()
    });
    let mut session = Session::new(&world);
    let root = session.root();
    let refused = Status::ReadOnly;
    assert_eq!(session.create(&root, "f", 0o644).unwrap_err(), refused);
    assert_eq!(
        session.make_directory(&root, "d", 0o755).unwrap_err(),
        refused
    );
    assert_eq!(session.remove(&root, "f").unwrap_err(), refused);
    assert_eq!(session.write(&root, 0, b"x").unwrap_err(), refused);
    let renamed = session.rename((&root, "a"), (&root, "b"));
    assert_eq!(renamed.unwrap_err(), refused);
    let set = session.set_attributes(&root, mode(0o700), None);
    assert_eq!(set, Err(refused));
    assert_eq!(access(&mut session, &root, 0x3f), 0x03);
    assert!(session.attributes(&root).is_ok());
}

#[test]
fn root_and_anonymous_callers_are_squashed() {
    let anonymous = 65_534;
    let root = || Some((0, 0, vec![0]));
    let user = || Some((2000, 2001, vec![2002]));
    let check = |squash, credential, wanted| {
        let world = ServedWorld::with_options(ExportOptions {
            squash,
            ..ExportOptions::default()
        });
        let attrs = pagemesh_fs::SetAttributes {
            mode: Some(0o777),
            ..pagemesh_fs::SetAttributes::default()
        };
        let top = world.fs.attr(Ino::ROOT).expect("there").file_id();
        let caller = Caller::trusted(OWNER.uid, OWNER.gid);
        let shared = world.fs.make_directory_at(top, b"shared", &attrs, &caller);
        shared.result.expect("made");
        let mut session = Session::of(&world, credential);
        let shared = session.mount("/data/shared").expect("mounted");
        let made = session.create(&shared, "f", 0o644).expect("made");
        let attributes = made.attributes;
        assert_eq!((attributes.uid, attributes.gid), wanted, "{squash:?}");
    };
    check(Squash::Root, root(), (anonymous, anonymous));
    check(Squash::Root, user(), (2000, 2001));
    check(Squash::Root, None, (anonymous, anonymous));
    check(Squash::All, root(), (anonymous, anonymous));
    check(Squash::All, user(), (anonymous, anonymous));
    check(Squash::None, root(), (0, 0));
    check(Squash::None, user(), (2000, 2001));
    check(Squash::None, None, (anonymous, anonymous));
}

#[test]
fn squashed_root_and_its_groups_have_no_rights() {
    let world = ServedWorld::new();
    let mut owner = Session::new(&world);
    let top = owner.root();
    let file = owner.create(&top, "f", 0o640).expect("made").handle;
    let mut root = Session::of(&world, Some((0, 0, vec![])));
    assert_eq!(root.read(&file, 0, 1), Err(Status::Access));
    let group = Session::of(&world, Some((2000, 2000, vec![5, OWNER.gid])));
    assert!({ group }.read(&file, 0, 1).is_ok());

    let world = ServedWorld::with_options(ExportOptions {
        squash: Squash::None,
        ..ExportOptions::default()
    });
    let mut owner = Session::new(&world);
    let top = owner.root();
    let file = owner.create(&top, "f", 0o600).expect("made").handle;
    let mut root = Session::of(&world, Some((0, 0, vec![])));
    assert!(root.read(&file, 0, 1).is_ok());
}

#[test]
fn other_users_are_refused() {
    let world = ServedWorld::new();
    let mut owner = Session::new(&world);
    let root = owner.root();
    let file = owner.create(&root, "f", 0o600).expect("made").handle;
    owner.make_directory(&root, "secret", 0o700).expect("made");
    let secret = owner.lookup(&root, "secret").expect("found").handle;

    let mut other = Session::of(&world, Some((2000, 2000, vec![])));
    let refused = Status::Access;
    assert_eq!(other.create(&root, "g", 0o644).unwrap_err(), refused);
    assert_eq!(other.remove(&root, "f").unwrap_err(), refused);
    assert_eq!(other.read(&file, 0, 1), Err(refused));
    assert_eq!(other.write(&file, 0, b"x").unwrap_err(), refused);
    assert_eq!(other.lookup(&secret, "x").unwrap_err(), refused);
    let start = (0, CookieVerifier::default());
    let listed = other.list(&secret, start, 4096, false);
    assert_eq!(listed.unwrap_err(), refused);
    let set = other.set_attributes(&file, mode(0o777), None);
    assert_eq!(set, Err(Status::Permission));
    assert_eq!(other.mount("/data/secret/x"), Err(13));
    assert_eq!(access(&mut other, &file, 0x3f), 0);
    assert_eq!(access(&mut owner, &file, 0x3f), 0x0d);
    assert_eq!(access(&mut other, &root, 0x3f), 0x03);
    // Attributes need no right.
    assert!(other.attributes(&file).is_ok());
}

#[test]
fn fenced_file_system_gets_no_reply() {
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    let mut other = Session::new(&world);
    let root = session.root();
    let file = session.create(&root, "f", 0o644).expect("made").handle;
    session.write(&file, 0, &[1; 4096]).expect("written");
    assert!(other.attributes(&file).is_ok());
    world.space.fence();
    let call = session.bytes_of(&Nfs3Call::Read(pagemesh_nfs::nfs3::files::ReadArguments {
        file: HandleBytes(&file),
        offset: 0,
        count: 4096,
    }));
    std::io::Write::write_all(&mut session.stream, &call).expect("sent");
    assert_eq!(session.receive(), None, "a reply of a fenced file system");
    let errors = world.errors.lock().unwrap().clone();
    assert!(
        errors
            .iter()
            .all(|(name, error)| name == "data" && is_fenced(error))
    );
    assert_eq!(errors.len(), 1);
    // Attributes in memory are old, too.
    let call = other.bytes_of(&Nfs3Call::GetAttributes(HandleBytes(&file)));
    std::io::Write::write_all(&mut other.stream, &call).expect("sent");
    assert_eq!(other.receive(), None);
}

#[test]
fn unusable_exports_are_refused() {
    let world = ServedWorld::new();
    let export = |name: &str, volume| Export {
        name: name.into(),
        fs: world.fs.clone(),
        volume: Uuid::from_u128(volume),
        key: HandleKey::new(KEY),
        attachment: 1,
        options: ExportOptions::default(),
        free_space: std::sync::Arc::new(|| None),
    };
    let error = |exports| Exports::new(exports).err();
    let long = "x".repeat(256);
    for name in ["", ".", "..", "a/b", "a\0", &long] {
        let wanted = ExportError::Name(name.into());
        assert_eq!(error(vec![export(name, 1)]), Some(wanted));
    }
    let same_name = ExportError::SameName("a".into());
    assert_eq!(error(vec![export("a", 1), export("a", 2)]), Some(same_name));
    let same_volume = ExportError::SameVolume("a".into(), "b".into());
    assert_eq!(
        error(vec![export("a", 1), export("b", 1)]),
        Some(same_volume)
    );
    let many = (0..1001).map(|it| export(&it.to_string(), it)).collect();
    assert_eq!(error(many), Some(ExportError::TooMany(1001)));
    assert_eq!(error(vec![export("a", 1), export("b", 2)]), None);
}

#[test]
fn rename_and_link_stay_in_their_volume() {
    let (first, second) = (ServedWorld::new(), ServedWorld::new());
    let export = |name: &str, of: &ServedWorld, volume| Export {
        name: name.into(),
        fs: of.fs.clone(),
        volume,
        key: HandleKey::new(KEY),
        attachment: 1,
        options: ExportOptions::default(),
        free_space: std::sync::Arc::new(|| None),
    };
    let other_volume = Uuid::from_u128(2);
    let exports = vec![
        export("data", &first, VOLUME),
        export("other", &second, other_volume),
    ];
    let exports = Exports::new(exports).expect("exports");
    let listen = ["127.0.0.1:0".parse().expect("an address")];
    let server = Server::start(&listen, exports, Box::new(|_, _| {}));
    let world = ServedWorld {
        server: server.expect("started"),
        ..first
    };
    let mut session = Session::new(&world);
    let root = session.root();
    let other = session.mount("/other").expect("mounted");
    let file = session.create(&root, "f", 0o644).expect("made").handle;
    let renamed = session.rename((&root, "f"), (&other, "f"));
    assert_eq!(renamed.unwrap_err(), Status::CrossDevice);
    let result = session.call(&Nfs3Call::Link(LinkArguments {
        file: HandleBytes(&file),
        at: at(&other, "f"),
    }));
    let refused = check(&mut Decoder(&result));
    assert_eq!(refused, Err(Status::CrossDevice));
    assert_eq!(session.lookup(&other, "f").unwrap_err(), Status::NoEntry);
    let of_file = session.attributes(&file).expect("there").file_system;
    let of_other = session.attributes(&other).expect("there").file_system;
    assert_ne!(of_file, of_other);
}

#[test]
fn lock_manager_and_its_monitor_are_unavailable() {
    const UNAVAILABLE: u32 = 1;
    let world = ServedWorld::new();
    let mut session = Session::new(&world);
    // NLM and NSM.
    for (program, version) in [(100_021, 4), (100_024, 1)] {
        let reply = session.exchange((program, version), 0, &[]).unwrap();
        let mut client = Decoder(&reply);
        let header: [u32; 4] = std::array::from_fn(|_| client.word());
        assert_eq!(header, [0, 0, 0, UNAVAILABLE], "{program}");
    }
    assert!(session.exchange((NFS, 3), 0, &[]).is_some());
}
