//! `pagemesh volume`.

mod check;

use crate::args::{CLASSES, ManagerArgs};
use crate::client::manager_client;
use crate::commands::Verdict;
use crate::commands::tier::TierArg;
use crate::output::{self, bytes, json_word, table};
use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum};
use pagemesh_base::layout::VolumeName;
use pagemesh_base::units::Size;
use pagemesh_manage::wire::{
    CreateVolume, DeleteVolumeParams, SetLabels, VolumeContent, VolumeDetail, VolumeInfo,
};
use pagemesh_manage::{LayoutKind, TierPolicy, parse_label};
use std::str::FromStr;

/// Create, show, grow, check and delete volumes.
#[derive(Subcommand)]
pub enum VolumeCommand {
    Create(CreateArgs),
    /// List volumes.
    List {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show the layout of a volume and the states of its legs.
    Show {
        /// Volume.
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    Grow(GrowArgs),
    Delete(DeleteArgs),
    /// End the attachment of a volume, as after the loss of the client's machine. A client that
    /// still runs is fenced at its next request to the manager, within ten seconds.
    Detach {
        /// Volume.
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Let clients write to a volume that received snapshots. It receives no more, and its snapshots stay.
    Promote {
        /// Volume.
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    SetLabel(SetLabelArgs),
    Check(check::CheckArgs),
}

/// Create a volume.
#[derive(Args)]
pub struct CreateArgs {
    /// Name of the volume.
    pub name: VolumeName,
    /// Size; the volume is thin, so space is allocated on write.
    #[arg(long)]
    pub size: Size,
    /// Layout.
    #[arg(long, value_enum, default_value = "mirror")]
    pub layout: LayoutArg,
    /// Copies of a mirror, 2 or 3; 2 by default.
    #[arg(long)]
    pub copies: Option<usize>,
    /// Columns of a stripe; 2 by default.
    #[arg(long)]
    pub columns: Option<usize>,
    /// Durability class of its bricks; by default the strongest class with room.
    #[arg(long, value_parser = CLASSES)]
    pub class: Option<String>,
    /// Where its pages lie in pools with disks behind memory; `pagemesh tier` changes it later.
    #[arg(long, value_enum, default_value = "auto")]
    pub tier: TierArg,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// The layout of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    /// One copy, on one brick or, if it does not fit, on several.
    Concat,
    /// One copy, striped over columns.
    Stripe,
    /// Two or three copies.
    Mirror,
    /// Two or three copies of each column of a stripe.
    #[value(name = "stripe+mirror", alias = "stripe-mirror")]
    StripeMirror,
}

impl From<LayoutArg> for LayoutKind {
    fn from(layout: LayoutArg) -> LayoutKind {
        match layout {
            LayoutArg::Concat => LayoutKind::Concat,
            LayoutArg::Stripe => LayoutKind::Stripe,
            LayoutArg::Mirror => LayoutKind::Mirror,
            LayoutArg::StripeMirror => LayoutKind::StripeMirror,
        }
    }
}

/// Grow a volume, even while it is in use.
#[derive(Args)]
pub struct GrowArgs {
    /// Volume.
    pub name: VolumeName,
    /// New size.
    #[arg(long)]
    pub size: Size,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Set or remove labels of a volume. Schedules select volumes by them.
#[derive(Args)]
pub struct SetLabelArgs {
    /// Volume.
    pub name: VolumeName,
    /// Labels to set.
    #[arg(value_name = "KEY=VALUE", required_unless_present = "remove")]
    pub labels: Vec<LabelArg>,
    /// Key of a label to remove; may be repeated.
    #[arg(long, value_name = "KEY")]
    pub remove: Vec<String>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// A label.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelArg(String, String);

impl FromStr for LabelArg {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<LabelArg> {
        let Some((key, value)) = parse_label(text) else {
            bail!(
                "'{text}' is no label; write KEY=VALUE, each of 1 to 32 letters, digits, points, dashes and underscores"
            );
        };
        Ok(LabelArg(key.to_owned(), value.to_owned()))
    }
}

/// Delete a volume and all data on it.
#[derive(Args)]
pub struct DeleteArgs {
    /// Volume.
    pub name: VolumeName,
    /// Delete it although a client has attached it.
    #[arg(long)]
    pub force: bool,
    /// Delete its snapshots, too. Without it a volume with snapshots is refused.
    #[arg(long)]
    pub snapshots: bool,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Creates, shows, grows, checks and deletes volumes.
pub fn run(command: &VolumeCommand) -> anyhow::Result<Verdict> {
    match command {
        VolumeCommand::Create(args) => create(args)?,
        VolumeCommand::List { client: args } => {
            let found = manager_client(args)?.volumes()?;
            output::print(args.output, &found, || volume_table(&found))?;
        }
        VolumeCommand::Show { name, client: args } => {
            let found = manager_client(args)?.volume(name)?;
            output::print(args.output, &found, || show(&found))?;
        }
        VolumeCommand::Grow(args) => grow(args)?,
        VolumeCommand::Delete(args) => delete(args)?,
        VolumeCommand::Detach { name, client: args } => {
            let detached = manager_client(args)?.detach(name, None)?;
            output::print(args.output, &detached, || {
                if detached.detached {
                    format!("{name} is detached")
                } else {
                    format!("{name} was not attached")
                }
            })?;
        }
        VolumeCommand::Promote { name, client: args } => {
            let promoted = manager_client(args)?.promote_volume(name)?;
            output::print(args.output, &promoted, || {
                format!("{name} receives no more snapshots, and may be written")
            })?;
        }
        VolumeCommand::SetLabel(args) => set_label(args)?,
        VolumeCommand::Check(args) => return check::run(args),
    }
    Ok(Verdict::Done)
}

fn create(args: &CreateArgs) -> anyhow::Result<()> {
    let name = &args.name;
    let request = CreateVolume {
        name: name.clone(),
        size_bytes: args.size.0,
        layout: args.layout.into(),
        columns: args.columns,
        copies: args.copies,
        durability: args.class.as_deref().map(str::parse).transpose()?,
        content: VolumeContent::Blocks,
        tier: args.tier.into(),
        received: false,
    };
    let sized = manager_client(&args.client)?.create(&request)?;
    output::print(args.client.output, &sized, || {
        let size = bytes(sized.volume.info.size_bytes);
        format!(
            "made volume {name} of {size}; use it with: pagemesh export nbd {name} --socket /tmp/{name}.sock"
        )
    })
}

fn grow(args: &GrowArgs) -> anyhow::Result<()> {
    let (name, manager) = (&args.name, manager_client(&args.client)?);
    if manager.volume(name)?.info.content == VolumeContent::Files {
        bail!(
            "the volume {name} holds files; let them take more with: \
             pagemesh fs grow {name} --size SIZE"
        );
    }
    let sized = manager.grow(name, args.size.0)?;
    output::print(args.client.output, &sized, || {
        format!("{name} has {} now", bytes(sized.volume.info.size_bytes))
    })
}

fn set_label(args: &SetLabelArgs) -> anyhow::Result<()> {
    let labels = args.labels.iter();
    let request = SetLabels {
        set: labels
            .map(|LabelArg(key, value)| (key.clone(), value.clone()))
            .collect(),
        remove: args.remove.clone(),
    };
    let changed = manager_client(&args.client)?.set_labels(&args.name, &request)?;
    output::print(args.client.output, &changed, || {
        match changed.labels.is_empty() {
            true => format!("{} has no labels", args.name),
            false => format!("{} has the labels {}", args.name, label_words(&changed)),
        }
    })
}

fn label_words(volume: &VolumeInfo) -> String {
    let labels = volume.labels.iter();
    let labels: Vec<String> = labels
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    labels.join(", ")
}

fn delete(args: &DeleteArgs) -> anyhow::Result<()> {
    let name = &args.name;
    let params = DeleteVolumeParams {
        force: args.force,
        snapshots: args.snapshots,
    };
    let deleted = manager_client(&args.client)?.delete_with(name, params)?;
    output::print(args.client.output, &deleted, || {
        match deleted.pending_deletions {
            0 => format!("{name} is deleted"),
            count => format!(
                "{name} is deleted; {count} of its slices are freed when their bricks return"
            ),
        }
    })
}

/// A volume and its legs.
pub fn show(detail: &VolumeDetail) -> String {
    let info = &detail.info;
    let mut rows = Vec::new();
    for (at, segment) in detail.layout.segments.iter().enumerate() {
        for (column, legs) in segment.columns.iter().enumerate() {
            for leg in &legs.legs {
                let address = detail.bricks.get(&leg.brick);
                rows.push(vec![
                    format!("{at}.{column}"),
                    detail.label(leg.brick).to_string(),
                    address.map_or_else(|| "-".into(), |address| address.tcp.clone()),
                    leg.state.to_string(),
                ]);
            }
        }
    }
    let notes = detail
        .notes
        .iter()
        .map(|note| format!("\n{}", json_word(note)));
    let tier = match info.tier {
        TierPolicy::Auto | TierPolicy::Other => String::new(),
        chosen => format!("\ntier: {}", chosen.name()),
    };
    let labels = match info.labels.is_empty() {
        true => String::new(),
        false => format!("\nlabels: {}", label_words(info)),
    };
    let received = match info.received {
        Some(_) => format!(
            "\nreceives snapshots, and is read-only until: pagemesh volume promote {}",
            info.name
        ),
        None => String::new(),
    };
    format!(
        "{}{tier}{labels}{received}\n\n{}{}",
        volume_table(std::slice::from_ref(info)),
        table(&["COLUMN", "BRICK", "ADDRESS", "LEG"], rows),
        notes.collect::<String>()
    )
}

/// Volumes as a table.
pub fn volume_table(volumes: &[VolumeInfo]) -> String {
    if volumes.is_empty() {
        return "no volumes; make one with: pagemesh volume create NAME --size 1G".into();
    }
    let rows = volumes.iter().map(|volume| {
        let shape = match (volume.columns, volume.copies) {
            (1, 1) => String::new(),
            (1, copies) => format!(" {copies} copies"),
            (columns, 1) => format!(" {columns} columns"),
            (columns, copies) => format!(" {columns} columns of {copies}"),
        };
        vec![
            volume.name.to_string(),
            bytes(volume.size_bytes),
            format!("{}{shape}", json_word(&volume.layout)),
            volume.durability.to_string(),
            json_word(&volume.health),
            volume.epoch.0.to_string(),
            volume
                .attached
                .as_ref()
                .map_or_else(|| "-".into(), |by| by.client.clone()),
        ]
    });
    let head = [
        "VOLUME",
        ">SIZE",
        "LAYOUT",
        "CLASS",
        "HEALTH",
        ">EPOCH",
        "ATTACHED BY",
    ];
    table(&head, rows)
}
