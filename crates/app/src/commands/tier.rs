//! `pagemesh tier`: policies of volumes, files and directories in pools with disks behind memory, and the figures of such pools.

mod figures;
mod paths;

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output;
use anyhow::ensure;
use clap::{Args, Subcommand, ValueEnum};
use figures::{TierStat, find, stat_text};
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::TierPolicy;
use pagemesh_manage::wire::{NamedVolumeTier, TierEffect, VolumeTierBrick};
use paths::{Scope, path_of};
use std::path::Path;

/// Choose the volumes, files and directories that stay in memory, in pools with disks behind memory, and show how they are used.
#[derive(Subcommand)]
pub enum TierCommand {
    /// Keep the pages of a volume, file or directory in memory: `prefer TARGET memory`. Pages on flash return with their
    /// first use.
    ///
    /// A pin reserves no memory. If pinned pages fill it, some move to flash so that writes go on.
    Pin(ChangeArgs),
    /// Let the use of the pages decide: `prefer TARGET auto`.
    Unpin(ChangeArgs),
    Prefer(PreferArgs),
    /// Show the tiers of bricks, and the policies of volumes, or those of files and directories.
    Stat {
        /// Paths of files and directories, each with a slash, and nothing else. Or names of volumes; names, UUIDs or shortened UUIDs of bricks; all if none is named.
        names: Vec<String>,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// The target of a pin.
#[derive(Args)]
pub struct ChangeArgs {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// A volume, or a path in a mount.
#[derive(Args)]
struct TargetArgs {
    /// Name of a volume, or path of a file or directory in a mount. A path has a slash: `./db`.
    target: String,
    /// Also set it for all that is in the directory. Without it only new entries get it.
    #[arg(long)]
    recursive: bool,
    /// Do not read the data of files that are pinned, or were. Each page obeys after its next access.
    #[arg(long)]
    no_load: bool,
}

/// Choose where the pages of a volume, file or directory lie.
///
/// The bricks of a volume obey within two heartbeats, and a brick that is away obeys when it returns. Copies that the volume gets
/// later obey, too.
#[derive(Args)]
pub struct PreferArgs {
    #[command(flatten)]
    target: TargetArgs,
    /// Where its pages lie.
    #[arg(value_enum)]
    pub policy: TierArg,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Where the pages of a volume lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TierArg {
    /// Pages in use are in memory, and cold ones on flash.
    Auto,
    /// Pages stay in memory, and return to it with their first use.
    Memory,
    /// Pages leave memory first, and only writes return them.
    Flash,
}

impl From<TierArg> for TierPolicy {
    fn from(policy: TierArg) -> TierPolicy {
        match policy {
            TierArg::Auto => TierPolicy::Auto,
            TierArg::Memory => TierPolicy::Memory,
            TierArg::Flash => TierPolicy::Flash,
        }
    }
}

/// Changes policies, or shows tiers.
pub fn run(command: &TierCommand) -> anyhow::Result<()> {
    match command {
        TierCommand::Pin(args) => prefer(&args.target, TierArg::Memory, &args.client),
        TierCommand::Unpin(args) => prefer(&args.target, TierArg::Auto, &args.client),
        TierCommand::Prefer(args) => prefer(&args.target, args.policy, &args.client),
        TierCommand::Stat { names, client } => {
            let paths: Vec<&Path> = names.iter().filter_map(|it| path_of(it)).collect();
            if !paths.is_empty() {
                ensure!(
                    paths.len() == names.len(),
                    "paths and names are not shown together; name only one kind"
                );
                return paths::stat(&paths, client.output);
            }
            let found = find(&manager_client(client)?, names)?;
            let stat = TierStat::new(&found);
            output::print(client.output, &stat, || stat_text(&stat))
        }
    }
}

fn prefer(target: &TargetArgs, policy: TierArg, args: &ManagerArgs) -> anyhow::Result<()> {
    if let Some(path) = path_of(&target.target) {
        let scope = Scope {
            is_recursive: target.recursive,
            loads: !target.no_load,
        };
        return paths::change(path, policy, scope, args.output);
    }
    ensure!(
        !target.recursive && !target.no_load,
        "--recursive and --no-load are for paths; a path has a slash"
    );
    let volume: VolumeName = target.target.parse()?;
    let tier = manager_client(args)?.set_tier(&volume, policy.into())?;
    let changed = NamedVolumeTier { volume, tier };
    output::print(args.output, &changed, || change_text(&changed))
}

fn change_text(NamedVolumeTier { volume, tier }: &NamedVolumeTier) -> String {
    let rest = match tier.policy {
        TierPolicy::Auto | TierPolicy::Other => "the use of its pages decides where they lie",
        TierPolicy::Memory => "its pages stay in memory",
        TierPolicy::Flash => "its pages leave memory first",
    };
    let mut text = format!("the tier of {volume} is {} now: {rest}", tier.policy.name());
    let groups = [
        (TierEffect::Away, "are dead, and obey when they return"),
        (
            TierEffect::NoTier,
            "have no disk behind their memory, so the policy has no effect there",
        ),
    ];
    for (effect, rest) in groups {
        let labels = labels_with(&tier.bricks, effect);
        if !labels.is_empty() {
            text.push_str(&format!("\nthese bricks {rest}: {}", labels.join(", ")));
        }
    }
    text
}

fn labels_with(bricks: &[VolumeTierBrick], effect: TierEffect) -> Vec<String> {
    let with = bricks.iter().filter(|it| it.effect == effect);
    with.map(|it| brick_label(it).to_string()).collect()
}

fn brick_label(brick: &VolumeTierBrick) -> BrickLabel {
    BrickLabel {
        id: brick.brick,
        name: brick.name.clone(),
    }
}
