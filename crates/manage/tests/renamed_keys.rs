//! JSON keys that were renamed: bodies of the previous version are read, and bodies of this version have the keys that
//! the previous one requires.

use pagemesh_manage::wire::{
    BrickInfo, BrickScrub, ClusterStatus, LegChange, ReplicationStatus, ReportReplication,
    VolumeDetail,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::fmt::Debug;

const UUID: &str = "00000000-0000-0000-0000-000000000001";

/// Both forms of a document are read as the same value. It is written with the keys `written` of the second form; all
/// keys that are in one form only are renamed ones.
#[track_caller]
fn check<T: Serialize + DeserializeOwned + PartialEq + Debug>(
    old: &Value,
    new: &Value,
    written: &[&str],
) {
    let read = |form: &Value| serde_json::from_value::<T>(form.clone()).expect("it is read");
    assert_eq!(read(old), read(new));
    let value = serde_json::to_value(read(new)).expect("JSON");
    let fields = |form: &Value| form.as_object().expect("an object").clone();
    let (old, new, found) = (fields(old), fields(new), fields(&value));
    let is_renamed = |key: &&String| old.contains_key(*key) != new.contains_key(*key);
    let mut renamed: Vec<&str> = found
        .keys()
        .filter(is_renamed)
        .map(String::as_str)
        .collect();
    renamed.sort_unstable();
    assert_eq!(renamed, written, "{value}");
}

/// The object with one more key.
fn with(base: &Value, key: &str, value: impl Into<Value>) -> Value {
    let mut fields: Map<String, Value> = base.as_object().expect("an object").clone();
    fields.insert(key.into(), value.into());
    Value::Object(fields)
}

fn scrub() -> Value {
    json!({"state": "running", "passes": 1, "progress_percent": 40, "next_in_ms": null, "pass": null, "last": null,
        "ended_ms_ago": 7, "fulfilled": UUID})
}

fn resyncs() -> Value {
    json!([{"copy": 1, "bytes_todo": 9, "bytes_done": 3, "elapsed_ms": 5}])
}

#[test]
fn scrub_of_brick_is_written_with_both_keys() {
    let (old, new) = (with(&scrub(), "mended", 2), with(&scrub(), "corrected", 2));
    check::<BrickScrub>(&old, &new, &["corrected", "mended"]);
    let both = with(&old, "corrected", 2);
    let read: BrickScrub = serde_json::from_value(both).expect("both are read");
    assert_eq!(read.corrected, 2);
    assert!(serde_json::from_value::<BrickScrub>(scrub()).is_err());
}

#[test]
fn scrub_request_of_brick_is_read_under_both_keys() {
    let rest = json!({"brick": UUID, "name": "db-1", "alive": true, "heartbeat_age_ms": 1, "address": "a:1",
        "map_socket": null, "domain": "rack", "durability": "file-sync", "capacity_bytes": 9, "used_bytes": 1,
        "provisioned_bytes": 2, "slices": 1, "pending_deletions": 0, "sessions": 1, "scrub": null});
    let request = json!({"id": UUID, "stop": true});
    let old = with(&rest, "scrub_wish", request.clone());
    let new = with(&rest, "scrub_request", request);
    check::<BrickInfo>(&old, &new, &["scrub_request"]);
}

#[test]
fn corrections_of_scrubs_are_read_under_both_keys() {
    let rest = json!({"version": "0", "bricks": 1, "bricks_alive": 1, "capacity_bytes": 9, "used_bytes": 1,
        "provisioned_bytes": 2, "overprovision_factor": 4, "volumes": 1, "volumes_attached": 0,
        "volumes_degraded": 0, "pending_deletions": 0, "bricks_scrubbing": 1, "scrubs_damaged": 0});
    let (old, new) = (
        with(&rest, "scrubs_mended", 3),
        with(&rest, "scrubs_corrected", 3),
    );
    check::<ClusterStatus>(&old, &new, &["scrubs_corrected"]);
}

#[test]
fn report_of_replication_is_written_with_earlier_key() {
    let rest = json!({"attachment": 4, "lag": null});
    let (old, new) = (
        with(&rest, "returns", resyncs()),
        with(&rest, "resyncs", resyncs()),
    );
    check::<ReportReplication>(&old, &new, &["returns"]);
}

#[test]
fn status_of_replication_is_read_under_both_keys() {
    let lag = json!({"lag": {"changes": 1, "bytes": 4096, "age_us": 8}});
    let old = with(&with(&lag, "returns", resyncs()), "told_us_ago", 6);
    let new = with(&with(&lag, "resyncs", resyncs()), "reported_us_ago", 6);
    check::<ReplicationStatus>(&old, &new, &["reported_us_ago", "resyncs"]);
    let rest = json!({"info": {"name": "v", "id": UUID, "content": "blocks", "size_bytes": 4096, "layout": "mirror",
            "columns": 1, "copies": 1, "durability": "process", "epoch": 4, "health": "in-sync",
            "unreachable_legs": 0, "attached": null, "auto_promote": false, "created_unix_s": 1},
        "layout": {"volume": UUID, "name": "v", "epoch": 4, "segments": [{"bytes": 4096, "columns": [
            {"legs": [{"brick": UUID, "slice": UUID, "state": "in-sync"}], "lost_since": 0}]}]},
        "bricks": {}, "notes": []});
    let (old, new) = (with(&rest, "told", old), with(&rest, "replication", new));
    check::<VolumeDetail>(&old, &new, &["replication"]);
}

#[test]
fn change_of_leg_is_written_with_earlier_state() {
    let change = |to: &str| json!({"segment": 0, "column": 0, "leg": 1, "to": to, "note": null});
    check::<LegChange>(&change("following"), &change("async-replica"), &[]);
    let read: LegChange = serde_json::from_value(change("async-replica")).expect("it is read");
    let written = serde_json::to_value(read).expect("JSON");
    assert_eq!(written["to"], "following");
}
