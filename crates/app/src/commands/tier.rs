//! `pagemesh tier`: policies of volumes in pools with disks behind memory, and the figures of such pools.

mod figures;

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output;
use clap::{Args, Subcommand, ValueEnum};
use figures::{TierStat, find, stat_text};
use pagemesh_base::brick_name::BrickLabel;
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::TierPolicy;
use pagemesh_manage::wire::{NamedVolumeTier, TierEffect, VolumeTierBrick};

/// Choose the volumes that stay in memory, in pools with disks behind memory, and show how they are used.
#[derive(Subcommand)]
pub enum TierCommand {
    /// Keep the pages of a volume in memory: `prefer VOLUME memory`. Pages on flash return with their first use.
    ///
    /// A pin reserves no memory. If pinned pages fill it, some move to flash so that writes go on.
    Pin(ChangeArgs),
    /// Let the use of the pages of a volume decide: `prefer VOLUME auto`.
    Unpin(ChangeArgs),
    Prefer(PreferArgs),
    /// Show the tiers of bricks, and the policies of volumes.
    Stat {
        /// Names of volumes; names, UUIDs or shortened UUIDs of bricks; all if none is named.
        names: Vec<String>,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// The volume of a pin.
#[derive(Args)]
pub struct ChangeArgs {
    /// Volume.
    pub volume: VolumeName,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Choose where the pages of a volume lie.
///
/// Its bricks obey within two heartbeats, and a brick that is away obeys when it returns. Copies that the volume gets
/// later obey, too.
#[derive(Args)]
pub struct PreferArgs {
    /// Volume.
    pub volume: VolumeName,
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
        TierCommand::Pin(args) => prefer(&args.volume, TierPolicy::Memory, &args.client),
        TierCommand::Unpin(args) => prefer(&args.volume, TierPolicy::Auto, &args.client),
        TierCommand::Prefer(args) => prefer(&args.volume, args.policy.into(), &args.client),
        TierCommand::Stat { names, client } => {
            let found = find(&manager_client(client)?, names)?;
            let stat = TierStat::new(&found);
            output::print(client.output, &stat, || stat_text(&stat))
        }
    }
}

fn prefer(volume: &VolumeName, policy: TierPolicy, args: &ManagerArgs) -> anyhow::Result<()> {
    let tier = manager_client(args)?.set_tier(volume, policy)?;
    let volume = volume.clone();
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
