//! `pagemesh brick list` and `pagemesh brick scrub`: bricks as the manager knows them.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::commands::brick::BrickCommand;
use crate::commands::pool::state_text;
use crate::output::{self, bytes, table};
use pagemesh_manage::ManagerClient;
use pagemesh_manage::wire::{BrickInfo, BrickScrub, ScrubState};

/// Lists bricks, or requests scrubs of them.
pub fn run(command: &BrickCommand, args: &ManagerArgs) -> anyhow::Result<()> {
    let manager = manager_client(args)?;
    match command {
        BrickCommand::List => {
            let bricks = manager.bricks()?;
            output::print(args.output, &bricks, || {
                format!("{}{}", brick_table(&bricks), draining_text(&bricks))
            })
        }
        BrickCommand::Scrub { brick, stop, .. } => {
            let stop = *stop;
            let asked = match brick {
                Some(brick) => vec![manager.scrub_brick(brick.clone(), stop)?],
                None => scrub_all(&manager, stop)?,
            };
            output::print(args.output, &asked, || match (asked.len(), stop) {
                (0, _) => "no brick is alive".into(),
                (count, true) => {
                    format!("{count} asked to end the running scrub: {}", names(&asked))
                }
                (count, false) => format!(
                    "{count} asked to scrub: {}; show the progress with: pagemesh brick list",
                    names(&asked)
                ),
            })
        }
    }
}

fn names(bricks: &[BrickInfo]) -> String {
    let names: Vec<String> = bricks.iter().map(|it| it.label().to_string()).collect();
    names.join(", ")
}

fn scrub_all(manager: &ManagerClient, stop: bool) -> anyhow::Result<Vec<BrickInfo>> {
    let bricks = manager.bricks()?;
    let alive = bricks.iter().filter(|brick| brick.alive);
    alive
        .map(|brick| Ok(manager.scrub_brick(brick.brick, stop)?))
        .collect()
}

/// A line for each device that is draining, behind the table of bricks.
pub fn draining_text(bricks: &[BrickInfo]) -> String {
    let mut text = String::new();
    for brick in bricks {
        let devices = brick.devices.iter().flatten();
        for device in devices.filter(|it| it.drain.is_some()) {
            let id = device.device.to_string();
            let name = device.path.as_ref().unwrap_or(&id);
            let state = state_text(device);
            text += &format!("\n{}: device {name} is {state}", brick.label());
        }
    }
    text
}

/// Bricks as a table, by name.
pub fn brick_table(bricks: &[BrickInfo]) -> String {
    let mut named: Vec<_> = bricks
        .iter()
        .map(|it| (it.label().to_string(), it))
        .collect();
    named.sort_by(|(name, _), (other, _)| name.cmp(other));
    let rows = named.into_iter().map(|(name, brick)| {
        vec![
            name,
            match brick.alive {
                true => "alive".to_owned(),
                false => "dead".to_owned(),
            },
            brick.domain.clone(),
            brick.durability.to_string(),
            brick.address.clone(),
            bytes(brick.used_bytes),
            bytes(brick.capacity_bytes),
            brick.slices.to_string(),
            brick.sessions.to_string(),
            scrub_text(brick),
            brick.scrub.as_ref().map_or_else(|| "-".into(), damage_text),
        ]
    });
    let head = [
        "BRICK",
        "STATE",
        "DOMAIN",
        "CLASS",
        "ADDRESS",
        ">USED",
        ">SIZE",
        ">SLICES",
        ">SESSIONS",
        "SCRUB",
        "DAMAGE",
    ];
    table(&head, rows)
}

fn scrub_text(brick: &BrickInfo) -> String {
    let Some(scrub) = brick.scrub.as_ref().filter(|_| brick.alive) else {
        return "-".into();
    };
    match (brick.scrub_request, scrub.state) {
        (Some(wish), _) if wish.stop => "to end".into(),
        (Some(_), _) => "to begin".into(),
        (None, ScrubState::Off) => "off".into(),
        (None, ScrubState::Waiting) => {
            format!("in {}", duration_text(scrub.next_in_ms.unwrap_or(0)))
        }
        (None, ScrubState::Running) => match scrub.progress_percent {
            Some(percent) => format!("{percent} % done"),
            None => "begins".into(),
        },
    }
}

fn damage_text(scrub: &BrickScrub) -> String {
    match (scrub.corrected, scrub.damaged()) {
        (0, 0) => "none".into(),
        (corrected, 0) => format!("{corrected} corrected"),
        (corrected, damaged) => format!("{corrected} corrected, {damaged} left"),
    }
}

/// A duration for people, in its largest whole unit.
fn duration_text(ms: u64) -> String {
    let seconds = ms / 1000;
    let units = [(24 * 3600, "d"), (3600, "h"), (60, "m")];
    let unit = units.into_iter().find(|(unit, _)| seconds >= *unit);
    unit.map_or_else(
        || format!("{seconds}s"),
        |(unit, name)| format!("{}{name}", seconds / unit),
    )
}
