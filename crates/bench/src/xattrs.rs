//! The time of calls for extended attributes, by the number of attributes that the file has.
//!
//! In each round every number visits every place; the first place moves on by one. A visit fills a new file with
//! attributes, and then measures calls on it: attributes that are added, read, replaced by values of the same length, and
//! removed.

use crate::error::BenchError;
use crate::mirror::MountPlace;
use crate::report::Report;
use crate::session::check_rounds;
use crate::stats::{median, median_ratio};
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use serde::Serialize;
use serde_json::json;
use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Instant;

/// Calls of each kind in one visit.
const CALLS: u32 = 128;
/// Most attributes of a file: 31 pages hold so many with those that a visit adds.
pub const ATTRIBUTES_MAX: u32 = 3_300;
const VALUE: [u8; 10] = [b'v'; 10];
/// The distance of the attributes of two calls: a prime, so that they are spread over the list.
const STRIDE: u32 = 1_009;

/// Options of a comparison.
#[derive(Clone, Debug)]
pub struct XattrOptions {
    /// Rounds, at least [`crate::session::ROUNDS_MIN`].
    pub rounds: usize,
    /// Numbers of attributes, up to [`ATTRIBUTES_MAX`].
    pub counts: Vec<u32>,
}

/// Microseconds of a call.
#[derive(Clone, Debug, Serialize)]
struct XattrSample {
    add: f64,
    get: f64,
    replace: f64,
    remove: f64,
}

/// Runs the comparison; see the module. Ratios are to the first number of attributes.
///
/// # Errors
/// If an option is invalid, or a call fails.
pub fn run_xattrs(places: &[MountPlace], options: &XattrOptions) -> Result<Report, BenchError> {
    check_rounds(options.rounds)?;
    let counts = &options.counts;
    if places.is_empty()
        || counts.is_empty()
        || counts.iter().any(|it| !(1..=ATTRIBUTES_MAX).contains(it))
    {
        return Err(BenchError::Option(format!(
            "name at least one place, and numbers of attributes from 1 to {ATTRIBUTES_MAX}"
        )));
    }
    let mut found = vec![vec![Vec::new(); places.len()]; counts.len()];
    for round in 0..options.rounds {
        for (&count, of_count) in counts.iter().zip(&mut found) {
            for turn in 0..places.len() {
                let at = (turn + round) % places.len();
                let path = places[at].dir.join("attributes");
                let sample = measure_file(&path, count);
                let cannot = format!("set and get attributes on {}", places[at].name);
                of_count[at].push(sample.map_err(BenchError::system(cannot))?);
            }
        }
        eprintln!("round {} of {} is done", round + 1, options.rounds);
    }
    Ok(report(places, options, &found))
}

fn name(number: u32) -> String {
    format!("user.attribute-{number:06}")
}

/// Microseconds of each of [`CALLS`] calls.
fn time(mut call: impl FnMut(u32) -> rustix::io::Result<()>) -> io::Result<f64> {
    let start = Instant::now();
    for number in 0..CALLS {
        call(number)?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS))
}

fn measure_file(path: &Path, count: u32) -> io::Result<XattrSample> {
    File::create(path)?;
    let set = |number, value: &[u8]| setxattr(path, name(number), value, XattrFlags::empty());
    (0..count).try_for_each(|number| set(number, &VALUE))?;
    let any = |call: u32| name(call * STRIDE % count);
    let sample = XattrSample {
        add: time(|call| set(count + call, &VALUE))?,
        get: time(|call| getxattr(path, any(call), &mut [0; VALUE.len()]).map(drop))?,
        replace: time(|call| set(call * STRIDE % count, &[call as u8; VALUE.len()]))?,
        // Those that were added, from the first on.
        remove: time(|call| removexattr(path, name(count + call)))?,
    };
    std::fs::remove_file(path)?;
    Ok(sample)
}

fn report(
    places: &[MountPlace],
    options: &XattrOptions,
    found: &[Vec<Vec<XattrSample>>],
) -> Report {
    let columns = [
        ("attributes", ""),
        ("place", ""),
        ("add", "µs"),
        ("get", "µs"),
        ("replace", "µs"),
        ("remove", "µs"),
        ("add to first", "×"),
        ("get to first", "×"),
    ];
    let title = "calls for extended attributes of one file, all in one alternating run";
    let mut report = Report::new("xattrs", title, &places[0].class, &columns);
    for (count, of_count) in options.counts.iter().zip(found) {
        for (at, (place, rounds)) in places.iter().zip(of_count).enumerate() {
            let pick = |rounds: &[XattrSample], of: fn(&XattrSample) -> f64| -> Vec<f64> {
                rounds.iter().map(of).collect()
            };
            let middle = |of| median(&pick(rounds, of));
            let to_first = |of| median_ratio(&pick(rounds, of), &pick(&found[0][at], of));
            report.add_row(vec![
                u64::from(*count).into(),
                place.name.as_str().into(),
                middle(|it| it.add).into(),
                middle(|it| it.get).into(),
                middle(|it| it.replace).into(),
                middle(|it| it.remove).into(),
                to_first(|it| it.add).into(),
                to_first(|it| it.get).into(),
            ]);
        }
    }
    report.add_note(format!(
        "medians of {} alternating rounds, of {CALLS} calls each; names of 21 bytes, values of 10; ratios to the first number \
         are medians of the rounds' own",
        options.rounds
    ));
    report.raw = json!({
        "counts": options.counts,
        "places": places.iter().map(|place| &place.name).collect::<Vec<_>>(),
        "samples_by_count_place_round": found,
    });
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(counts: &[u32]) -> XattrOptions {
        XattrOptions {
            rounds: 5,
            counts: counts.to_vec(),
        }
    }

    #[test]
    fn attributes_are_measured_and_removed() {
        let dir = tempfile::tempdir_in("/dev/shm").expect("made");
        let place = MountPlace::unserved("memory", dir.path());
        let report =
            run_xattrs(std::slice::from_ref(&place), &options(&[4, 40])).expect("measured");
        let text = report.text();
        assert!(
            text.contains("replace") && text.contains("memory"),
            "{text}"
        );
        assert_eq!(std::fs::read_dir(dir.path()).expect("there").count(), 0);
        assert!(run_xattrs(&[place], &options(&[0])).is_err());
    }
}
