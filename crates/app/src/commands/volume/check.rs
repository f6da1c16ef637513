//! `pagemesh volume check`: compares the copies of a volume.

use crate::args::{ManagerArgs, Transport};
use crate::client::{attach, manager_client};
use crate::commands::Verdict;
use crate::output::{self, progress, table};
use anyhow::bail;
use clap::Args;
use pagemesh_base::layout::{LegState, VolumeName};
use pagemesh_volume::{CheckReport, LegStatus, Volume};

/// Compare the copies of a volume that no client has attached.
#[derive(Args)]
pub struct CheckArgs {
    /// Volume.
    pub name: VolumeName,
    /// Take the volume over from the client that has attached it; the client is fenced.
    #[arg(long)]
    pub force: bool,
    /// Number of the copy, from 0, that replaces differing pages on the other copies.
    #[arg(long)]
    pub repair_from: Option<usize>,
    /// Transport to the bricks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: Transport,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Compares the copies, and repairs them on request.
pub fn run(args: &CheckArgs) -> anyhow::Result<Verdict> {
    let name = &args.name;
    let detail = manager_client(&args.client)?.volume(name)?;
    if let Some(by) = &detail.info.attached
        && !args.force
    {
        bail!(
            "the volume {name} is attached by {}; end that client, or take the volume over with --force",
            by.client
        );
    }
    let volume = attach(&args.client, args.transport, name)?;
    let bar = progress(&format!("comparing {name}"));
    let report = volume.check(args.repair_from, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    for leg in uncompared_legs(&volume) {
        eprintln!(
            "warning: the copy on brick {} is {} and was not compared; check again when it is in-sync",
            detail.label(leg.brick),
            leg.state
        );
    }
    output::print(args.client.output, &report, || report_text(name, &report))?;
    Ok(if is_sound(&report) {
        Verdict::Done
    } else {
        Verdict::Damaged
    })
}

/// Legs that are not in-sync, and so are not compared.
fn uncompared_legs(volume: &Volume) -> Vec<LegStatus> {
    let columns = volume.status().map_or(Vec::new(), |status| status.columns);
    let legs = columns.into_iter().flat_map(|column| column.legs);
    legs.filter(|leg| leg.state != LegState::InSync).collect()
}

fn report_text(name: &VolumeName, report: &CheckReport) -> String {
    let compared = report.pages_compared;
    if report.pages_differing + report.pages_damaged == 0 {
        return format!("the copies of {name} are identical: {compared} pages compared");
    }
    let found = format!(
        "{} of {compared} pages of {name} differ, {} are damaged, {} were repaired",
        report.pages_differing, report.pages_damaged, report.pages_repaired,
    );
    if is_sound(report) {
        return found;
    }
    let rows = report.differences.iter().map(|run| {
        vec![
            format!("{}.{}", run.segment, run.column),
            run.page.to_string(),
            run.count.to_string(),
        ]
    });
    let rows = table(&["COLUMN", ">PAGE", ">PAGES"], rows);
    let left = report.damages.iter().filter(|damage| !damage.repaired);
    let left = left.map(|damage| {
        let (offset, bricks) = (damage.offset, damage.brick_names.join(", "));
        format!("\nbyte {offset}, damaged on {bricks}: {}", damage.cause)
    });
    let left: String = left.collect();
    if report.differences.is_empty() {
        format!("{found}\n{left}")
    } else {
        format!("{found}; repair with --repair-from\n\n{rows}\n{left}")
    }
}

/// Whether the check found no error, or repaired all of them.
fn is_sound(report: &CheckReport) -> bool {
    report.pages_differing + report.pages_damaged == report.pages_repaired
}
