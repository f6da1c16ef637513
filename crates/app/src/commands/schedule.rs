//! `pagemesh schedule`: policies by which the manager makes and deletes snapshots, and their replication.

mod policy;
mod replicate;

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output::{self, age, json_word, table};
use anyhow::ensure;
use clap::{Args, Subcommand};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::schedules::{CLASSES, Retention};
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{
    CreateSchedule, RunSchedule, ScheduleDetail, ScheduleInfo, SchedulePlan, ScheduleVolume,
    SnapshotInfo,
};
use policy::PolicyArgs;

/// Make, show, change and delete schedules of snapshots, and send their snapshots to other clusters.
#[derive(Subcommand)]
pub enum ScheduleCommand {
    /// Make a schedule. The manager makes and deletes snapshots by it from now on.
    Create(CreateArgs),
    /// List schedules and their health.
    List {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show a schedule, its volumes and their newest snapshots.
    Show(NameArgs),
    /// Change a schedule. Other settings stay.
    Update(UpdateArgs),
    /// Delete a schedule. Its snapshots stay.
    Delete(NameArgs),
    Run(RunArgs),
    /// Show the snapshots that the schedule would make and delete now.
    DryRun(NameArgs),
    Replicate(replicate::ReplicateArgs),
}

/// A new schedule.
#[derive(Args)]
pub struct CreateArgs {
    /// Name of the schedule.
    pub name: SnapshotName,
    #[command(flatten)]
    pub policy: PolicyArgs,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Changes of a schedule.
#[derive(Args)]
pub struct UpdateArgs {
    /// Name of the schedule.
    pub name: SnapshotName,
    #[command(flatten)]
    pub policy: PolicyArgs,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// A schedule.
#[derive(Args)]
pub struct NameArgs {
    /// Name of the schedule.
    pub name: SnapshotName,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Make snapshots of the volumes of a schedule now. It deletes none.
#[derive(Args)]
pub struct RunArgs {
    /// Name of the schedule.
    pub name: SnapshotName,
    /// Only this volume; may be repeated.
    #[arg(long = "volume", value_name = "VOLUME")]
    pub volumes: Vec<VolumeName>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Makes, shows, changes, deletes, runs and replicates schedules.
pub fn run(command: &ScheduleCommand) -> anyhow::Result<()> {
    match command {
        ScheduleCommand::Create(args) => create(args),
        ScheduleCommand::List { client: args } => {
            let found = manager_client(args)?.schedules()?;
            output::print(args.output, &found, || schedule_table(&found))
        }
        ScheduleCommand::Show(NameArgs { name, client: args }) => {
            let found = manager_client(args)?.schedule(name)?;
            output::print(args.output, &found, || show(&found))
        }
        ScheduleCommand::Update(args) => update(args),
        ScheduleCommand::Delete(NameArgs { name, client: args }) => {
            manager_client(args)?.delete_schedule(name)?;
            output::print(args.output, name, || format!("{name} is deleted"))
        }
        ScheduleCommand::Run(args) => make_now(args),
        ScheduleCommand::DryRun(NameArgs { name, client: args }) => {
            let plans = manager_client(args)?.plan_schedule(name)?;
            output::print(args.output, &plans, || plan_table(&plans))
        }
        ScheduleCommand::Replicate(args) => replicate::run(args),
    }
}

fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let request = CreateSchedule {
        name: args.name.clone(),
        policy: args.policy.applied_to(None)?,
    };
    let made = manager_client(&args.client)?.create_schedule(&request)?;
    output::print(args.client.output, &made, || {
        let note = match made.volumes {
            0 => "; no volume has such a name yet",
            _ => "",
        };
        format!(
            "made schedule {} for {} volumes{note}",
            made.name, made.volumes
        )
    })
}

fn update(args: &UpdateArgs) -> anyhow::Result<()> {
    let (name, manager) = (&args.name, manager_client(&args.client)?);
    let before = manager.schedule(name)?.info.policy;
    let policy = args.policy.applied_to(Some(before))?;
    let changed = manager.update_schedule(name, &policy)?;
    output::print(args.client.output, &changed, || {
        schedule_table(std::slice::from_ref(&changed))
    })
}

fn make_now(args: &RunArgs) -> anyhow::Result<()> {
    let (name, manager) = (&args.name, manager_client(&args.client)?);
    let mut volumes = args.volumes.clone();
    if volumes.is_empty() {
        let detail = manager.schedule(name)?;
        let own = detail.volumes.into_iter().filter(|it| !it.received);
        volumes = own.map(|it| it.volume).collect();
    }
    let mut made: Vec<SnapshotInfo> = Vec::new();
    let mut failed = 0;
    for volume in &volumes {
        let request = RunSchedule {
            volume: volume.clone(),
        };
        match manager.run_schedule(name, &request) {
            Ok(snapshot) => made.push(snapshot),
            Err(cause) => {
                failed += 1;
                eprintln!("{volume}: {cause}");
            }
        }
    }
    output::print(args.client.output, &made, || {
        let lines = made
            .iter()
            .map(|it| format!("made {}@{}\n", it.volume, it.name));
        lines.collect()
    })?;
    ensure!(
        failed == 0,
        "{failed} of {} volumes have no new snapshot",
        volumes.len()
    );
    Ok(())
}

/// The retention, as `24 hourly, 7 daily`.
fn retention_text(retention: &Retention) -> String {
    let kept = CLASSES.iter().filter(|class| retention.of(**class) > 0);
    let kept: Vec<String> = kept
        .map(|class| format!("{} {}", retention.of(*class), class.name()))
        .collect();
    kept.join(", ")
}

fn state_text(info: &ScheduleInfo) -> String {
    match info.policy.enabled {
        true => json_word(&info.health),
        false => "disabled".to_owned(),
    }
}

fn schedule_table(schedules: &[ScheduleInfo]) -> String {
    if schedules.is_empty() {
        return "no schedules; make one with: pagemesh schedule create NAME --volume VOLUME --hourly 24 --daily 7".into();
    }
    let rows = schedules.iter().map(|it| {
        let targets = it.policy.targets.iter().map(|it| it.name.to_string());
        let targets = targets.collect::<Vec<_>>().join(", ");
        vec![
            it.name.to_string(),
            state_text(it),
            it.policy.volumes.join(" "),
            it.volumes.to_string(),
            retention_text(&it.policy.retention),
            if targets.is_empty() {
                "-".into()
            } else {
                targets
            },
        ]
    });
    let head = ["SCHEDULE", "HEALTH", "FOR", ">VOLUMES", "KEEPS", "TARGETS"];
    table(&head, rows)
}

fn show(detail: &ScheduleDetail) -> String {
    let policy = &detail.info.policy;
    let rows = detail.volumes.iter().map(|it| {
        vec![
            it.volume.to_string(),
            json_word(&it.health),
            it.newest
                .as_ref()
                .map_or_else(|| "-".into(), ToString::to_string),
            age(it.age_s),
            it.snapshots.to_string(),
            sent_text(it),
            it.error.clone().unwrap_or_else(|| "-".into()),
        ]
    });
    let head = [
        "VOLUME",
        "HEALTH",
        "NEWEST",
        ">AGE",
        ">SNAPSHOTS",
        "SENT",
        "LAST ERROR",
    ];
    format!(
        "{}\n\nsnapshots {}-*, warning after {}, critical after {}{}{}\n\n{}",
        schedule_table(std::slice::from_ref(&detail.info)),
        policy.prefix.as_deref().unwrap_or_default(),
        age(policy.warn_after_s.unwrap_or(0)),
        age(policy.critical_after_s.unwrap_or(0)),
        if policy.prune { "" } else { ", deletes none" },
        if policy.group {
            ", all at one moment"
        } else {
            ""
        },
        table(&head, rows)
    )
}

fn sent_text(volume: &ScheduleVolume) -> String {
    let sent = volume.sent.iter();
    let sent: Vec<String> = sent
        .map(|(target, it)| format!("{target}: {}", it.snapshot))
        .collect();
    match sent.is_empty() {
        true => "-".into(),
        false => sent.join(", "),
    }
}

fn plan_table(plans: &[SchedulePlan]) -> String {
    let lines = plans.iter().flat_map(|plan| {
        let volume = &plan.volume;
        let classes: Vec<&str> = plan.create.iter().map(|it| it.name()).collect();
        let create = (!classes.is_empty())
            .then(|| format!("make a snapshot of {volume}: {}\n", classes.join(", ")));
        let prune = plan
            .prune
            .iter()
            .map(move |name| format!("delete {volume}@{name}\n"));
        let needed = plan.needed.iter().map(move |name| {
            format!("keep {volume}@{name}, which a hold, a clone or a target needs\n")
        });
        create.into_iter().chain(prune).chain(needed)
    });
    let text: String = lines.collect();
    match text.is_empty() {
        true => "nothing to do now".into(),
        false => text,
    }
}
