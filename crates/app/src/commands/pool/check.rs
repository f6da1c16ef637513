//! `pagemesh pool check`.

use crate::args::Output;
use crate::commands::Verdict;
use crate::output;
use crate::output::progress;
use pagemesh_base::units::PAGE_BYTES;
use pagemesh_brick::offline::{self, OfflinePool};
use pagemesh_store::check::{Finding, PoolReport, Remedy, RepairPlan};
use serde::Serialize;
use std::path::Path;

/// The extent and the findings of a check.
#[derive(Serialize)]
struct CheckOutput {
    path: String,
    /// No damage was found, or all of it was repaired.
    sound: bool,
    /// Journal records that the next opening replays.
    records: u64,
    slices: u64,
    nodes: u64,
    pages: u64,
    pages_read: u64,
    /// Whether every page table could be read to its end.
    tables_whole: bool,
    findings: Vec<FindingOutput>,
    /// Number of findings that are not listed.
    more: u64,
}

/// One finding.
#[derive(Serialize)]
struct FindingOutput {
    what: String,
    slice: Option<String>,
    object: Option<u32>,
    /// The first page in the slice, and the number of pages.
    page: Option<u64>,
    pages: Option<u64>,
    frame: Option<u64>,
    /// Byte offset in the pool.
    byte: Option<u64>,
    /// The repairer: `pool`, `copy` or `replace_client`.
    remedy: &'static str,
    repaired: bool,
}

/// Checks a pool, and repairs it on request.
pub fn run(path: &Path, repair: bool, reads_data: bool, out: Output) -> anyhow::Result<Verdict> {
    let pool = offline::open_offline(path, &[])?;
    let (report, plan) = run_check(&pool, path, reads_data)?;
    let mends = |it: &Finding| it.remedy == Remedy::Pool;
    // A pool that cannot be recovered cannot be written.
    let mendable = plan.is_possible() && report.findings.iter().any(mends);
    let left = match repair && mendable {
        true => {
            pool.repair(&plan)?;
            run_check(&pool, path, reads_data)?.0
        }
        false => report.clone(),
    };
    let checked = check_output(path, &report, &left);
    output::print(out, &checked, || output_text(&checked, repair))?;
    Ok(match checked.sound {
        true => Verdict::Done,
        false => Verdict::Damaged,
    })
}

fn run_check(
    pool: &OfflinePool,
    path: &Path,
    reads_data: bool,
) -> anyhow::Result<(PoolReport, RepairPlan)> {
    let bar = progress(&format!("checking {}", path.display()));
    let found = pool.check(reads_data, &mut |done, total| {
        bar.set_length(total * PAGE_BYTES as u64);
        bar.set_position(done * PAGE_BYTES as u64);
    });
    bar.finish_and_clear();
    Ok(found?)
}

/// Combines the report before a repair with the report after it. Damage that only the second report
/// has was hidden by damage that is repaired now.
fn check_output(path: &Path, report: &PoolReport, left: &PoolReport) -> CheckOutput {
    let gone = report
        .findings
        .iter()
        .filter(|it| !left.findings.contains(it));
    let gone = gone.map(|it| finding_output(it, true));
    let stays = left.findings.iter().map(|it| finding_output(it, false));
    CheckOutput {
        path: path.display().to_string(),
        sound: left.is_sound(),
        records: report.records,
        slices: left.objects,
        nodes: left.nodes,
        pages: left.pages,
        pages_read: left.pages_summed,
        tables_whole: left.is_complete,
        findings: gone.chain(stays).collect(),
        more: left.unlisted_findings,
    }
}

fn finding_output(finding: &Finding, repaired: bool) -> FindingOutput {
    let place = &finding.location;
    FindingOutput {
        what: finding.kind.to_string(),
        slice: place.slice.map(|slice| slice.to_string()),
        object: place.object.map(|object| object.0),
        page: place.pages.as_ref().map(|pages| pages.start),
        pages: place.pages.as_ref().map(|pages| pages.end - pages.start),
        frame: place.frame,
        byte: place.byte,
        remedy: match finding.remedy {
            Remedy::Pool => "pool",
            Remedy::Leg => "copy",
            Remedy::Replace => "replace",
        },
        repaired,
    }
}

fn output_text(checked: &CheckOutput, repair: bool) -> String {
    let read = match checked.pages_read {
        0 => String::new(),
        count => format!(", {count} of them read"),
    };
    let seen = format!(
        "{}: {} slices, {} page-table nodes, {} pages{read}, {} records to replay",
        checked.path, checked.slices, checked.nodes, checked.pages, checked.records
    );
    if checked.findings.is_empty() {
        return format!("{seen}\nnothing is damaged");
    }
    let lines = checked
        .findings
        .iter()
        .map(finding_line)
        .collect::<String>();
    let more = match checked.more {
        0 => String::new(),
        more => format!("\nand {more} more that are not listed"),
    };
    format!("{seen}\n{lines}{more}{}", advice(checked, repair))
}

fn finding_line(found: &FindingOutput) -> String {
    let mut line = match found.repaired {
        true => "\nrepaired: ".to_owned(),
        false => "\ndamaged: ".to_owned(),
    };
    let mut say = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            line.push_str(&format!("{name} {value}, "));
        }
    };
    let object = found.object.map(|object| object.to_string());
    let pages = match (found.page, found.pages) {
        (Some(page), Some(count)) if count > 1 => Some(format!("{page}..{}", page + count)),
        (page, _) => page.map(|page| page.to_string()),
    };
    say("slice", found.slice.clone());
    say("object", object);
    say("page", pages);
    say("frame", found.frame.map(|frame| frame.to_string()));
    say("byte", found.byte.map(|byte| byte.to_string()));
    let end = line.trim_end_matches(", ").len();
    line.truncate(end);
    format!("{line}: {}", found.what)
}

/// The way out for the remaining damage.
fn advice(checked: &CheckOutput, repair: bool) -> String {
    let left = |remedy: &str| {
        let mut findings = checked.findings.iter();
        findings.any(|it| !it.repaired && it.remedy == remedy)
    };
    let mut advice = String::new();
    if left("pool") && !repair {
        advice.push_str("\n\nthe pool can repair some of this: run the check again with --repair");
    }
    if left("copy") {
        advice.push_str(
            "\n\nanother copy of the volume has the damaged pages: start the brick; each is repaired when it is read, all of them by pagemesh volume check --repair-from COPY",
        );
    }
    if left("replace") {
        advice.push_str(
            "\n\nsome of it cannot be repaired here: copy the volumes out, or replace the pool by a new brick: attach copies there and detach the lost ones with `pagemesh replica`",
        );
    }
    advice
}
