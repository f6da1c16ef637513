//! A client that has cached bytes compares times, or the change attribute, to see whether they are still right: also after a crash of
//! the server.

use crate::support;
use pagemesh_nfs::ExportOptions;
use pagemesh_nfs::limits::Limits;
use pagemesh_nfs::nfs3::attributes::Attributes;
use pagemesh_nfs::nfs3::files::Durability;
use support::compounds::Client4;
use support::session::Session;
use support::world::{ServedWorld, VOLUME, export_of};

/// The number of the change attribute.
const CHANGE: u32 = 3;

/// The attributes by version 3, and the change attribute by version 4.1.
fn seen(world: &ServedWorld, reader: &str) -> (Attributes, u64) {
    let mut client = Session::new(world);
    let root = client.root();
    let file = client.lookup(&root, "file").unwrap().handle;
    let attributes = client.attributes(&file).unwrap();
    let mut client = Client4::new(Session::new(world), reader);
    let file = client.walk(&["data", "file"]).unwrap();
    let change = client.attributes(&file, &[CHANGE]).unwrap().long();
    (attributes, change)
}

fn check(durability: Durability, has_write_cache: bool) {
    let options = ExportOptions::default();
    let world = ServedWorld::with(options, Limits::default(), has_write_cache);
    let mut writer = Session::new(&world);
    let root = writer.root();
    let file = writer.create(&root, "file", 0o644).unwrap().handle;
    let mut write = |byte: u8, durability| {
        let written = writer.write_as(&file, 0, &[byte; 4096], durability);
        assert_eq!(written.unwrap().durability, Durability::FileSync as u32);
    };
    write(1, Durability::FileSync);
    world.fs.flush_all_times().unwrap();
    let (old, old_change) = seen(&world, "first");
    write(2, durability);
    let (new, new_change) = seen(&world, "second");
    let image = world.space.memory.snapshot();
    let export = export_of("data", VOLUME, options, image);
    let after = ServedWorld::of(vec![export], Limits::default(), |exports| exports);
    let (found, found_change) = seen(&after, "third");
    assert!(new.changed > old.changed && found.changed >= new.changed);
    assert!(new.modified > old.modified && found.modified >= new.modified);
    assert!(new_change > old_change && found_change >= new_change);
}

#[test]
fn crash_after_a_stable_overwrite_leaves_a_later_change() {
    // A space without a write cache answers FILE_SYNC to an UNSTABLE write.
    check(Durability::Unstable, false);
    check(Durability::FileSync, false);
    check(Durability::FileSync, true);
}
