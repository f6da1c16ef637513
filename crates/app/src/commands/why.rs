//! `pagemesh why`: where the time of a volume's operations goes, by stage.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output;
use clap::Args;
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::wire::{StageFigures, StageParams};
use pagemesh_telemetry::{OpKind, Stage};
use std::collections::BTreeMap;

/// Show where the time of a volume's operations goes: the stages of the last minute, and of the
/// operations around a percentile of the latency.
///
/// The client of the volume measures each operation from its submission until its completion, and
/// reports every 10 s. Operations that all legs make inside the call are sampled, one of 64.
#[derive(Args)]
pub struct WhyArgs {
    /// Volume or file system.
    pub name: VolumeName,
    /// Kind of operation: read, write or flush.
    #[arg(long, default_value = "write", value_parser = parse_kind)]
    pub kind: OpKind,
    /// Percentile of the latency, 0 to 100.
    #[arg(long, default_value_t = 99.0, value_parser = parse_percentile)]
    pub percentile: f64,
    #[command(flatten)]
    pub client: ManagerArgs,
}

fn parse_kind(text: &str) -> Result<OpKind, String> {
    let found = OpKind::ALL.into_iter().find(|kind| kind.name() == text);
    found.ok_or_else(|| "use read, write or flush".to_owned())
}

fn parse_percentile(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percentile) if (0.0..=100.0).contains(&percentile) => Ok(percentile),
        _ => Err("use a number from 0 to 100".to_owned()),
    }
}

/// Shows the stages.
pub fn run(args: &WhyArgs) -> anyhow::Result<()> {
    let params = StageParams {
        kind: args.kind,
        quantile: args.percentile / 100.0,
    };
    let figures = manager_client(&args.client)?.stage_figures(&args.name, params)?;
    output::print(args.client.output, &figures, || {
        describe(&args.name, args.percentile, &figures)
    })
}

fn describe(name: &VolumeName, percentile: f64, figures: &StageFigures) -> String {
    let kind = &figures.kind;
    let Some(age_us) = figures.last_reported_us_ago else {
        return format!(
            "no client has reported operations of {name} since the manager started; \
             a client reports every 10 s while it has the volume attached"
        );
    };
    let age = output::nanos(age_us.saturating_mul(1000));
    let (Some(around), Some(mean), Some(latency_ns)) = (
        &figures.stages_ns,
        &figures.mean_stages_ns,
        figures.latency_ns,
    ) else {
        return format!("no {kind} of {name} was timed in the last minute; reported {age} ago");
    };
    let largest = Stage::ALL
        .into_iter()
        .max_by_key(|stage| time_of(around, *stage))
        .unwrap_or(Stage::Media);
    format!(
        "{} {kind}s of {name} in the last minute, {} timed; reported {age} ago\n\
         {percentile} % of them took at most {}\n\n{}\n\n\
         Around that latency, {} of the time is {}: {}. {}",
        figures.operations,
        figures.timed,
        output::nanos(latency_ns),
        stage_table(percentile, mean, around),
        percent(time_of(around, largest), sum(around)),
        largest.name(),
        stage_meaning(largest),
        stage_advice(largest),
    )
}

/// Nanoseconds by the name of the stage.
type Stages = BTreeMap<String, u64>;

fn time_of(stages: &Stages, stage: Stage) -> u64 {
    stages.get(stage.name()).copied().unwrap_or(0)
}

fn sum(stages: &Stages) -> u64 {
    Stage::ALL.iter().map(|stage| time_of(stages, *stage)).sum()
}

fn stage_table(percentile: f64, mean: &Stages, around: &Stages) -> String {
    let (mean_sum, around_sum) = (sum(mean), sum(around));
    let row = |label: &str, mean_ns: u64, around_ns: u64, meaning: &str| {
        vec![
            label.to_owned(),
            output::nanos(mean_ns),
            percent(mean_ns, mean_sum),
            output::nanos(around_ns),
            percent(around_ns, around_sum),
            meaning.to_owned(),
        ]
    };
    let stages = Stage::ALL.map(|stage| {
        let (mean_ns, around_ns) = (time_of(mean, stage), time_of(around, stage));
        row(stage.name(), mean_ns, around_ns, stage_meaning(stage))
    });
    let total = row("total", mean_sum, around_sum, "");
    let around_head = format!(">AT P{percentile}");
    let head = ["STAGE", ">MEAN", ">", &around_head, ">", "THE TIME"];
    output::table(&head, stages.into_iter().chain([total]))
}

fn percent(part: u64, whole: u64) -> String {
    let share = (part as f64 * 100.0 / whole.max(1) as f64).round();
    format!("{share} %")
}

fn stage_meaning(stage: Stage) -> &'static str {
    match stage {
        Stage::Queue => "waiting in the client, behind other parts and other requests",
        Stage::Lock => "waiting for another operation on the same pages",
        Stage::Fabric => "the network and the sockets of both ends",
        Stage::Brick => "in the brick, before and after its store",
        Stage::Media => "in the store: copying, fences, or the disk",
        Stage::Finish => "waiting for the asynchronous replica, or for the client's thread",
    }
}

fn stage_advice(stage: Stage) -> &'static str {
    match stage {
        Stage::Queue => "Use more connections, or smaller requests.",
        Stage::Lock => {
            "Programs write the same pages at the same time; let them write different ones."
        }
        Stage::Fabric => {
            "A brick on the client's machine is reached without the network; otherwise look at the network."
        }
        Stage::Brick => "The brick has many requests at once; look at its processors.",
        Stage::Media => "The pool's medium sets this time; `pagemesh status` shows its class.",
        Stage::Finish => {
            "`pagemesh replica status` shows how far an asynchronous replica is behind."
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> StageFigures {
        let stages = |fabric: u64| {
            let of = |stage: &Stage| {
                if *stage == Stage::Fabric {
                    fabric
                } else {
                    1_000
                }
            };
            Some(
                Stage::ALL
                    .iter()
                    .map(|s| (s.name().to_owned(), of(s)))
                    .collect(),
            )
        };
        StageFigures {
            kind: "write".into(),
            quantile: 0.99,
            last_reported_us_ago: Some(2_500_000),
            operations: 640,
            timed: 10,
            latency_ns: Some(100_000),
            around: 2,
            stages_ns: stages(95_000),
            mean_stages_ns: stages(15_000),
            latency: Vec::new(),
        }
    }

    #[test]
    fn largest_stage_is_named() {
        let name: VolumeName = "demo".parse().expect("a name");
        let text = describe(&name, 99.0, &figures());
        assert!(text.contains("95 % of the time is fabric"), "{text}");
        assert!(text.contains("640 writes of demo"), "{text}");
        assert!(text.contains("100.0 µs"), "{text}");
    }

    #[test]
    fn silent_volume_is_explained() {
        let name: VolumeName = "demo".parse().expect("a name");
        let silent = StageFigures {
            last_reported_us_ago: None,
            stages_ns: None,
            mean_stages_ns: None,
            latency_ns: None,
            ..figures()
        };
        assert!(describe(&name, 99.0, &silent).contains("no client has reported"));
        let idle = StageFigures {
            last_reported_us_ago: Some(1),
            ..silent
        };
        assert!(describe(&name, 99.0, &idle).contains("was timed"));
    }
}
