//! The alert rules and the dashboard in `contrib` name metrics that exist.

use pagemesh_metrics::catalogue::PROGRAMS;
use std::path::Path;

/// The metrics that a text names.
fn named(text: &str) -> Vec<&str> {
    let starts = text.match_indices("pagemesh_");
    let names = starts.map(|(at, _)| {
        let rest = &text[at..];
        let end = rest.find(|it: char| !it.is_ascii_lowercase() && it != '_');
        &rest[..end.unwrap_or(rest.len())]
    });
    names.collect()
}

#[track_caller]
fn check(file: &str, names_min: usize) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../contrib");
    let text = std::fs::read_to_string(path.join(file)).expect("a file");
    let names = named(&text);
    assert!(names.len() >= names_min, "{names:?}");
    let known = |name: &str| {
        let mut all = PROGRAMS.iter().flat_map(|(_, metrics)| *metrics);
        all.any(|metric| metric.name == name)
    };
    for name in names {
        let base = name.strip_suffix("_bucket").or(name.strip_suffix("_count"));
        assert!(known(name) || base.is_some_and(known), "{file}: {name}");
    }
}

#[test]
fn alert_rules_name_existing_metrics() {
    check("prometheus/pagemesh.rules.yml", 12);
    check("prometheus/pagemesh.rules.test.yml", 20);
}

#[test]
fn dashboard_names_existing_metrics() {
    check("grafana/pagemesh.json", 15);
}
