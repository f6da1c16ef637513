use super::sample::{Details, List, Sample};
use super::screen;
use super::state::{Selected, TopState};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::json;
use std::time::{Duration, Instant};

fn kinds(writes: u64, p99_ns: u64) -> serde_json::Value {
    json!([
        {"kind": "read", "operations": 0, "bytes": 0, "p50_ns": null, "p99_ns": null},
        {"kind": "write", "operations": writes, "bytes": writes * 4096, "p50_ns": p99_ns / 2, "p99_ns": p99_ns},
        {"kind": "flush", "operations": 0, "bytes": 0, "p50_ns": null, "p99_ns": null},
    ])
}

fn volume(name: &str, content: &str, health: &str) -> serde_json::Value {
    json!({
        "name": name, "id": uuid::Uuid::nil(), "content": content, "size_bytes": 1 << 30, "layout": "mirror",
        "columns": 1, "copies": 2, "durability": "process", "epoch": 3, "health": health, "unreachable_legs": 0,
        "attached": null, "created_unix_s": 0,
    })
}

fn brick() -> serde_json::Value {
    json!({
        "brick": uuid::Uuid::nil(), "name": "one", "alive": true, "address": "127.0.0.1:1", "domain": "a",
        "durability": "process", "capacity_bytes": 1u64 << 30, "used_bytes": 1 << 29, "provisioned_bytes": 0,
        "slices": 1, "pending_deletions": 0, "sessions": 1,
    })
}

fn sample() -> Sample {
    let status = json!({
        "version": "0", "bricks": 2, "bricks_alive": 1, "capacity_bytes": 1u64 << 30, "used_bytes": 1 << 29,
        "provisioned_bytes": 0, "overprovision_factor": 10, "volumes": 3, "volumes_attached": 0,
        "volumes_degraded": 1, "pending_deletions": 0,
    });
    let figures = json!({
        "window_s": 50, "cluster": null,
        "bricks": [{
            "name": "one", "last_reported_us_ago": 1, "kinds": kinds(0, 0),
            "media": {"data_bytes": 40 << 20, "journal_bytes": 9 << 20, "table_bytes": 1 << 20},
        }],
        "media": {
            "written": {"data_bytes": 40 << 20, "journal_bytes": 9 << 20, "table_bytes": 1 << 20},
            "per_user_byte": 2.346, "metadata_per_user_byte": 0.307,
        },
        "volumes": [
            {"name": "busy", "last_reported_us_ago": 3_000_000, "kinds": kinds(50_000, 90_000)},
            {"name": "calm", "last_reported_us_ago": 4_000_000, "kinds": kinds(500, 4_000_000)},
        ],
    });
    let parse = "the documents of the manager";
    Sample {
        asked_at: Instant::now(),
        status: serde_json::from_value(status).expect(parse),
        bricks: vec![serde_json::from_value(brick()).expect(parse)],
        volumes: [
            volume("calm", "blocks", "in-sync"),
            volume("busy", "blocks", "degraded"),
            volume("home", "files", "in-sync"),
        ]
        .map(|volume| serde_json::from_value(volume).expect(parse))
        .to_vec(),
        figures: serde_json::from_value(figures).expect(parse),
        nfs: Vec::new(),
        direct_clients: Vec::new(),
    }
}

fn details(of: &str) -> Details {
    let series = json!({
        "step_s": 10, "last_reported_us_ago": 1, "is_shortened": false, "time_unix_s": [0, 10],
        "read": {"operations": [0, 0], "kib": [0, 0], "p50_ns": [null, null], "p99_ns": [null, null]},
        "write": {"operations": [10, 500], "kib": [40, 2000], "p50_ns": [1, 1], "p99_ns": [1, 1]},
        "flush": {"operations": [0, 0], "kib": [0, 0], "p50_ns": [null, null], "p99_ns": [null, null]},
    });
    let stages = json!({
        "kind": "write", "quantile": 0.99, "last_reported_us_ago": 1, "operations": 510, "timed": 510, "latency_ns": 90_000,
        "around": 5, "stages_ns": {"queue": 0, "lock": 1000, "fabric": 60_000, "brick": 9000, "media": 20_000, "finish": 0},
        "mean_stages_ns": null,
        "latency": [{"from_ns": 32768, "to_ns": 65536, "operations": 500}, {"from_ns": 65536, "to_ns": 131072, "operations": 10}],
    });
    let parse = "the documents of the manager";
    Details {
        of: Selected(of.to_owned()),
        history: serde_json::from_value(series).expect(parse),
        writes: serde_json::from_value(stages.clone()).expect(parse),
        reads: serde_json::from_value(stages).expect(parse),
    }
}

fn state() -> TopState {
    let mut state = TopState::new("http://127.0.0.1:7070");
    state.take_round(Ok((sample(), None)));
    state
}

fn press(state: &mut TopState, keys: &[KeyCode]) -> bool {
    keys.iter()
        .any(|key| state.handle_key(KeyEvent::new(*key, KeyModifiers::NONE)))
}

fn names(state: &TopState) -> Vec<String> {
    let rows = state.rows().iter();
    rows.map(|row| row[0].text.clone()).collect()
}

fn drawn(state: &TopState, width: u16, height: u16) -> String {
    let backend = TestBackend::new(width, height);
    let mut terminal = Terminal::new(backend).expect("memory");
    terminal
        .draw(|frame| screen::draw(frame, state))
        .expect("memory");
    terminal.backend().to_string()
}

#[test]
fn keys_sort_filter_and_select() {
    let mut state = state();
    assert_eq!(names(&state), ["busy", "calm"], "by name");
    // Column 5 has the writes per second: the greatest first.
    press(&mut state, &[KeyCode::Char('s'); 5]);
    assert_eq!(
        (names(&state), state.sort),
        (vec!["busy".into(), "calm".into()], (5, true))
    );
    press(&mut state, &[KeyCode::Char('r')]);
    assert_eq!(names(&state), ["calm", "busy"]);
    // The selection follows its row.
    press(&mut state, &[KeyCode::Down, KeyCode::Char('r')]);
    assert_eq!(state.selected_index(), Some(1));
    press(
        &mut state,
        &[
            KeyCode::Char('/'),
            KeyCode::Char('B'),
            KeyCode::Char('u'),
            KeyCode::Enter,
        ],
    );
    assert_eq!(names(&state), ["busy"]);
    press(&mut state, &[KeyCode::Esc]);
    assert_eq!(names(&state).len(), 2, "the filter is cleared");
    press(&mut state, &[KeyCode::Tab]);
    assert_eq!(
        (state.list, names(&state)),
        (List::FileSystems, vec!["home".into()])
    );
    press(
        &mut state,
        &[
            KeyCode::BackTab,
            KeyCode::BackTab,
            KeyCode::Up,
            KeyCode::Down,
        ],
    );
    assert_eq!((state.list, names(&state).len()), (List::Bricks, 1));
    assert!(
        !press(&mut state, &[KeyCode::Char('S'); 40]),
        "the columns go round"
    );
    assert!(press(&mut state, &[KeyCode::Char('q')]));
}

/// Every frame reads the rows several times; thousands of volumes must not be sorted for each.
#[test]
fn rows_are_made_once_per_sample_and_view() {
    let mut state = state();
    let made = state.rows().as_ptr();
    press(&mut state, &[KeyCode::Down, KeyCode::Enter, KeyCode::Up]);
    drawn(&state, 80, 24);
    assert!(state.detail_of().is_some());
    assert_eq!(state.rows().as_ptr(), made, "the view is the same");
    press(&mut state, &[KeyCode::Char('r')]);
    assert_eq!(names(&state), ["calm", "busy"], "another order");
    let mut next = sample();
    next.volumes.truncate(1);
    state.take_round(Ok((next, None)));
    assert_eq!(names(&state), ["calm"], "another sample");
}

/// Columns of numbers sort from the greatest on, also if no row is there.
#[test]
fn columns_aligned_right_have_numbers() {
    let mut sample = sample();
    let brick = json!({
        "brick": uuid::Uuid::nil(), "name": "a", "alive": true, "heartbeat_age_ms": 1, "address": "a:1",
        "map_socket": null, "domain": "a", "durability": "process", "capacity_bytes": 1, "used_bytes": 0,
        "provisioned_bytes": 0, "slices": 0, "pending_deletions": 0, "sessions": 0,
    });
    sample.bricks = vec![serde_json::from_value(brick).expect("the document of the manager")];
    for list in [List::Bricks, List::Volumes, List::FileSystems] {
        let rows = sample.rows(list);
        for (head, cell) in list.head().iter().zip(&rows[0]) {
            assert_eq!(head.starts_with('>'), cell.number.is_some(), "{head}");
        }
    }
}

#[test]
fn failed_store_is_shown() {
    let mut state = state();
    let mut failed = sample();
    failed.status.store_failed = true;
    state.take_round(Ok((failed, None)));
    let screen = drawn(&state, 100, 20);
    assert!(screen.contains("takes no changes"), "{screen}");
}

#[test]
fn details_follow_the_selection() {
    let mut state = state();
    assert_eq!(state.detail_of(), None);
    press(&mut state, &[KeyCode::Down, KeyCode::Enter]);
    assert_eq!(state.detail_of(), Some(Selected("busy".into())));
    state.take_round(Ok((sample(), Some(details("busy")))));
    let screen = drawn(&state, 120, 30);
    for shown in [
        "busy",
        "1000",
        "fabric",
        "60.0 µs",
        "latency of writes",
        "degraded",
    ] {
        assert!(screen.contains(shown), "{shown}:\n{screen}");
    }
    press(&mut state, &[KeyCode::Esc]);
    assert_eq!(state.detail_of(), None);
}

#[test]
fn screen_of_any_size_is_drawn() {
    let mut empty = TopState::new("http://127.0.0.1:7070");
    empty.take_round(Err("the manager cannot be reached".into()));
    let mut full = state();
    press(&mut full, &[KeyCode::Enter]);
    full.take_round(Ok((sample(), Some(details("busy")))));
    for (width, height) in [(1, 1), (10, 5), (40, 12), (80, 24), (300, 100)] {
        drawn(&empty, width, height);
        drawn(&full, width, height);
    }
    assert!(drawn(&empty, 80, 24).contains("cannot be reached"));
}

#[test]
fn failed_round_keeps_figures_and_says_so() {
    let mut state = state();
    state.take_round(Err("connection refused".into()));
    let screen = drawn(&state, 100, 20);
    assert!(
        screen.contains("the figures are old: connection refused"),
        "{screen}"
    );
    assert!(screen.contains("busy"), "{screen}");
}

#[test]
fn figures_of_missing_rounds_say_their_age() {
    let mut old = sample();
    let asked_at = old.asked_at.checked_sub(Duration::from_secs(16));
    old.asked_at = asked_at.expect("the machine runs for longer");
    let mut state = state();
    state.take_round(Ok((old, None)));
    let screen = drawn(&state, 100, 20);
    assert!(
        screen.contains("s old: the manager, or a mount of this machine"),
        "{screen}"
    );
}

#[test]
fn bytes_to_media_stand_in_head_and_bricks() {
    let mut state = state();
    let screen = drawn(&state, 120, 20);
    let ratio = "2.35 B to media per user byte, 0.31 of them metadata";
    assert!(screen.contains(ratio), "{screen}");
    press(&mut state, &[KeyCode::BackTab]);
    assert!(drawn(&state, 140, 20).contains("1.0 MiB/s"), "{screen}");
    let text = sample().to_text();
    assert!(text.ends_with(ratio) && text.contains("TO MEDIA"), "{text}");
    let mut unknown = sample();
    unknown.figures.media = None;
    assert!(!unknown.to_text().contains("per user byte"));
}
