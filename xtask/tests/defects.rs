//! Every injected defect has a test that must detect it.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The names of all variants, in order.
fn defect_variants(text: &str) -> Vec<String> {
    let (_, body) = text.split_once("pub enum Defect {").expect("the list");
    let (body, _) = body.split_once("\n}").expect("its end");
    let lines = body.lines().map(str::trim);
    let names = lines.filter_map(|line| line.strip_suffix(','));
    names
        .filter(|name| name.chars().all(char::is_alphanumeric))
        .map(str::to_owned)
        .collect()
}

/// The defects that a file references, apart from the places that inject them.
fn referenced_defects(text: &str) -> Vec<String> {
    let lines = text.lines().filter(|line| !line.trim().starts_with("//"));
    let text: String = lines.collect();
    let mut names = vec![];
    let mut parts = text.split("Defect::");
    let mut before = parts.next().unwrap_or_default();
    for part in parts {
        let end = part.find(|c: char| !c.is_alphanumeric());
        let name = &part[..end.unwrap_or(part.len())];
        let before = std::mem::replace(&mut before, part).trim_end();
        if !before.ends_with("is(") && !before.ends_with("without(") {
            names.push(name.to_owned());
        }
    }
    names
}

fn count_references(dir: &Path, found: &mut BTreeMap<String, usize>) {
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            count_references(&path, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            for name in referenced_defects(&fs::read_to_string(&path).expect("text")) {
                *found.entry(name).or_default() += 1;
            }
        }
    }
}

#[test]
fn every_defect_is_referenced_by_a_test() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let list = crates.join("base/src/defect.rs");
    let variants = defect_variants(&fs::read_to_string(list).expect("the list"));
    assert!(variants.len() > 50, "{variants:?}");
    let mut found = BTreeMap::new();
    count_references(&crates, &mut found);
    let is_missed = |name: &&String| !found.contains_key(*name);
    let missed: Vec<_> = variants.iter().filter(is_missed).collect();
    assert!(missed.is_empty(), "no test looks for {missed:?}");
}

#[test]
fn defect_site_is_not_a_reference() {
    let text = "/// [`Defect::E`]\nif defect::is(Defect::A) { } let all = [Defect::B, Defect::C]; \
                defect::without(\n    Defect::D, || ())";
    assert_eq!(referenced_defects(text), ["B", "C"]);
}
