//! Tests of layouts.

use super::*;
use proptest::prelude::*;

#[test]
fn names_are_safe_in_paths_and_exports() {
    for good in ["a", "vol-1", "A_b.c", "9"] {
        assert!(good.parse::<VolumeName>().is_ok(), "{good}");
    }
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    for bad in ["", "a/b", "a b", "a\n", ".", "-x", "é", long.as_str()] {
        assert!(bad.parse::<VolumeName>().is_err(), "{bad:?}");
    }
    assert!(serde_json::from_str::<VolumeName>("\"a/b\"").is_err());
}

#[test]
fn impossible_layout_is_refused() {
    let leg = r#"{"brick":"00000000-0000-0000-0000-000000000001",
        "slice":"00000000-0000-0000-0000-000000000002","state":"in-sync"}"#;
    let column = |legs: usize| {
        format!(
            r#"{{"legs":[{}],"lost_since":0}}"#,
            vec![leg; legs].join(",")
        )
    };
    let check = |bytes: u64, columns: usize, legs: usize, segments: usize| {
        let columns = vec![column(legs); columns].join(",");
        let segment = format!(r#"{{"bytes":{bytes},"columns":[{columns}]}}"#);
        let segments = vec![segment; segments].join(",");
        let layout = format!(
            r#"{{"volume":"00000000-0000-0000-0000-000000000003","name":"v","epoch":1,
            "segments":[{segments}]}}"#
        );
        serde_json::from_str::<Layout>(&layout).map_err(|error| error.to_string())
    };
    let layout = check(4 * STRIPE_BYTES, 2, 3, 2).expect("a layout");
    assert_eq!(layout.size_bytes(), 8 * STRIPE_BYTES);
    for (bytes, columns, legs, segments, why) in [
        (4096, 0, 1, 1, "0 columns"),
        (17 * STRIPE_BYTES, COLUMNS_MAX + 1, 1, 1, "17 columns"),
        (4096, 1, 0, 1, "0 legs"),
        (4096, 1, 4, 1, "4 legs"),
        (0, 1, 1, 1, "does not fill"),
        (4097, 1, 1, 1, "does not fill"),
        (3 * STRIPE_BYTES, 2, 1, 1, "does not fill"),
        (SLICE_BYTES_MAX + 4096, 1, 1, 1, "larger than"),
        (u64::MAX - 4095, 1, 1, 2, "larger than"),
        (4096, 1, 1, 0, "0 segments"),
        (4096, 1, 1, SEGMENTS_MAX + 1, "65 segments"),
    ] {
        let refused = check(bytes, columns, legs, segments).expect_err(why);
        assert!(refused.contains(why), "{refused}");
    }
}

const LEG: Leg = Leg {
    brick: BrickId(Uuid::nil()),
    slice: SliceId(Uuid::nil()),
    state: LegState::AsyncReplica,
    needs_full_resync: false,
    empty: false,
    asynchronous: true,
};

/// [`LEG`] with these fields, which replace its own of the same names.
fn read_leg(fields: serde_json::Value) -> Leg {
    let mut document = serde_json::to_value(LEG).expect("JSON");
    for (key, value) in fields.as_object().expect("fields") {
        document[key] = value.clone();
    }
    serde_json::from_value(document).expect("a leg")
}

#[test]
fn need_of_full_resync_has_two_keys() {
    let needed = Leg {
        needs_full_resync: true,
        ..LEG
    };
    let written = serde_json::to_value(&needed).expect("JSON");
    assert_eq!(written["needs_full_resync"], true, "{written}");
    assert_eq!(
        written["fresh"], true,
        "a program of the previous version reads only this"
    );
    for (fresh, needed) in [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(a, b)| (a == 1, b == 1)) {
        let fields = serde_json::json!({"fresh": fresh, "needs_full_resync": needed});
        let leg = read_leg(fields);
        assert_eq!(leg.needs_full_resync, fresh || needed);
        assert_eq!((leg.state, leg.asynchronous), (LEG.state, true));
    }
    for key in ["fresh", "needs_full_resync"] {
        let leg = read_leg(serde_json::json!({ key: true }));
        assert!(leg.needs_full_resync, "{key}");
    }
    assert!(!read_leg(serde_json::json!({})).needs_full_resync);
}

#[test]
fn round_of_earlier_build_is_read_as_first_epoch() {
    let read = |fields: serde_json::Value| {
        let column = serde_json::from_value::<Column>(fields);
        column.map(|column| column.lost_since.0).ok()
    };
    for (round, lost_since) in [(0, 0), (1, 1), (15, 1)] {
        let column = serde_json::json!({"legs": [], "round": round});
        assert_eq!(read(column), Some(lost_since));
    }
    let both = serde_json::json!({"legs": [], "round": 3, "lost_since": 7});
    assert_eq!(read(both), Some(7));
    assert_eq!(read(serde_json::json!({"legs": []})), None);
}

#[test]
fn state_of_replica_is_stored_under_earlier_name() {
    let written = serde_json::to_value(LEG).expect("JSON");
    assert_eq!(written["state"], "following");
    for name in ["following", "async-replica"] {
        let leg = read_leg(serde_json::json!({"state": name}));
        assert_eq!(leg, LEG, "{name}");
    }
    assert_eq!(LEG.state.to_string(), "async-replica");
}

fn layout(segments: &[(usize, u64)]) -> Layout {
    let column = Column {
        legs: vec![],
        lost_since: EpochNumber(0),
    };
    let segment = |&(columns, units): &(usize, u64)| Segment {
        bytes: units * columns as u64 * STRIPE_BYTES,
        columns: vec![column.clone(); columns],
    };
    Layout {
        volume: Uuid::nil(),
        name: "v".parse().expect("a name"),
        epoch: EpochNumber(1),
        segments: segments.iter().map(segment).collect(),
    }
}

proptest! {
    /// Each byte has one place in its slice, no two bytes share one, and a range maps to the
    /// places of its bytes.
    #[test]
    fn mapping_is_one_to_one(
        segments in prop::collection::vec((1usize..5, 1u64..5), 1..4),
        offset in 0u64..2 << 20, len in 1u64..2 << 20,
    ) {
        let layout = layout(&segments);
        let size = layout.size_bytes();
        let mut seen = std::collections::HashSet::new();
        for page in 0..size / 4096 {
            let places = layout.map(page * 4096, 4096);
            prop_assert_eq!(places.len(), 1);
            let place = places[0];
            prop_assert!(place.offset + 4096 <= layout.segments[place.segment].slice_bytes());
            prop_assert!(seen.insert((place.segment, place.column, place.offset)));
        }
        let mut at = offset;
        for extent in layout.map(offset, len) {
            let first = layout.map(at, 1)[0];
            let last = layout.map(at + extent.len - 1, 1)[0];
            prop_assert_eq!(first, LayoutExtent { len: 1, ..extent });
            prop_assert_eq!(last.offset, extent.offset + extent.len - 1);
            prop_assert_eq!((last.segment, last.column), (extent.segment, extent.column));
            at += extent.len;
        }
        prop_assert_eq!(at, (offset + len).min(size).max(offset));
    }
}
