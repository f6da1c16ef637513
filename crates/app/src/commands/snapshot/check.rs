//! `pagemesh snapshot check`: compares snapshots on the copies of a volume.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::commands::Verdict;
use crate::output::{self, progress, table};
use crate::snapshot_path;
use clap::Args;
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::SnapshotDifference;
use serde::Serialize;

/// Differences that are printed.
const SHOWN_MAX: usize = 1000;

/// Compare the pages that snapshots see on the copies of a volume, by their checksums. The volume may be in use.
#[derive(Args)]
pub struct CheckArgs {
    /// Snapshot, or a volume: all of its snapshots.
    #[arg(value_name = "VOLUME[@NAME]")]
    pub what: String,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The result of a check.
#[derive(Serialize)]
struct Checked {
    volume: VolumeName,
    checked_pages: u64,
    compared_bytes: u64,
    differing_pages: u64,
    /// The first [`SHOWN_MAX`] of them.
    differences: Vec<SnapshotDifference>,
}

/// Compares the copies.
pub fn run(args: &CheckArgs) -> anyhow::Result<Verdict> {
    let (volume, snapshot) = parse(&args.what)?;
    let manager = manager_client(&args.client)?;
    let bar = progress(&format!("comparing {}", args.what));
    let mut checked = Checked {
        volume,
        checked_pages: 0,
        compared_bytes: 0,
        differing_pages: 0,
        differences: vec![],
    };
    let mut from = None;
    loop {
        let reply = manager.check_snapshots(&checked.volume, snapshot.as_ref(), from)?;
        bar.set_length(reply.all_bytes);
        bar.set_position(reply.done_bytes);
        checked.checked_pages += reply.checked_pages;
        checked.compared_bytes = reply.all_bytes;
        checked.differing_pages += reply.differences.len() as u64;
        let room = SHOWN_MAX - checked.differences.len();
        checked
            .differences
            .extend(reply.differences.into_iter().take(room));
        from = reply.next;
        if from.is_none() {
            break;
        }
    }
    bar.finish_and_clear();
    output::print(args.client.output, &checked, || text(&args.what, &checked))?;
    Ok(match checked.differing_pages {
        0 => Verdict::Done,
        _ => Verdict::Damaged,
    })
}

fn parse(what: &str) -> anyhow::Result<(VolumeName, Option<SnapshotName>)> {
    if !what.contains('@') {
        return Ok((what.parse()?, None));
    }
    let path: snapshot_path::SnapshotPath = what.parse()?;
    Ok((path.volume, Some(path.name)))
}

fn text(what: &str, checked: &Checked) -> String {
    if checked.compared_bytes == 0 {
        return format!("nothing was compared: no two copies have a whole snapshot of {what}");
    }
    if checked.differing_pages == 0 {
        let pages = checked.checked_pages;
        return format!(
            "the snapshots of {what} are identical on all copies: {pages} versions of pages compared"
        );
    }
    let rows = checked.differences.iter().map(|it| {
        vec![
            it.snapshot.to_string(),
            format!("{}.{}", it.segment, it.column),
            it.offset_bytes.to_string(),
            it.copies.join(", "),
        ]
    });
    format!(
        "{} pages of snapshots differ between copies; read them from both, detach the wrong copy with `pagemesh replica detach`, \
         and attach it anew\n\n{}",
        checked.differing_pages,
        table(&["SNAPSHOT", "COLUMN", ">OFFSET IN COPY", "BRICKS"], rows)
    )
}
