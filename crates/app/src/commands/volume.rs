//! `pagemesh volume`.

use crate::Verdict;
use crate::args::{self, VolumeCommand as Command};
use crate::authority::ManagerAuthority;
use crate::commands::brick::serve::host_name;
use crate::commands::status::{json_word, volume_table};
use crate::key;
use crate::output::{self, bytes, table};
use anyhow::bail;
use indicatif::{ProgressBar, ProgressStyle};
use pagemesh_base::layout::{LegState, VolumeName};
use pagemesh_fabric::limits::Timeouts;
use pagemesh_manage::wire::{CreateVolume, VolumeContent, VolumeDetail};
use pagemesh_manage::{LayoutKind, ManagerClient};
use pagemesh_volume::{AttachError, CheckReport, LegStatus, Transport, Transports, Volume};
use std::sync::Arc;

/// A client of the manager that the arguments name.
pub fn manager_client(args: &args::ManagerArgs) -> anyhow::Result<ManagerClient> {
    let key = key::find(args.key.as_deref(), &args.manager)?;
    Ok(ManagerClient::new(&args.manager, &key)?)
}

/// Refuses a volume with another kind of content.
pub fn expect_content(
    args: &args::ManagerArgs,
    name: &VolumeName,
    content: VolumeContent,
) -> anyhow::Result<VolumeDetail> {
    let detail = manager_client(args)?.volume(name)?;
    if detail.info.content == content {
        return Ok(detail);
    }
    match content {
        VolumeContent::Blocks => {
            bail!("the volume {name} holds files; use it with: pagemesh mount {name} DIR")
        }
        VolumeContent::Files => bail!(
            "the volume {name} holds blocks, and no file system of pagemesh; use it with: \
             pagemesh export nbd {name}, or make a file system: pagemesh fs create"
        ),
    }
}

/// Detaches the volume when dropped, before the process ends.
pub struct DetachGuard(pub Arc<Volume>);

impl Drop for DetachGuard {
    fn drop(&mut self) {
        self.0.detach();
    }
}

/// Attaches a volume in this process. If no in-sync copy is reachable, it asks the manager a second
/// time; the manager may then promote an asynchronous copy.
pub fn attach(
    args: &args::ManagerArgs,
    transport: args::Transport,
    name: &VolumeName,
) -> anyhow::Result<Volume> {
    let key = key::find(args.key.as_deref(), &args.manager)?;
    let transport = match transport {
        args::Transport::Auto => Transport::Auto,
        args::Transport::Map => Transport::Map,
        args::Transport::Tcp => Transport::Tcp,
    };
    let client = ManagerClient::new(&args.manager, &key)?;
    let connector = Arc::new(Transports::new(key, transport, Timeouts::default()));
    let host = host_name();
    let who = format!("{host}:{}", std::process::id());
    let attach = |unreachable| {
        let client = client.clone();
        let authority = Arc::new(ManagerAuthority {
            client,
            unreachable,
        });
        Volume::attach(authority, connector.clone(), name.clone(), &who)
    };
    match attach(false) {
        Err(AttachError::Unreachable { .. }) if client.volume(name)?.info.auto_promote => {
            Ok(attach(true)?)
        }
        attached => Ok(attached?),
    }
}

/// Creates, shows, grows, checks and deletes volumes.
pub fn run(command: &Command) -> anyhow::Result<Verdict> {
    match command {
        Command::Create {
            name,
            size,
            layout,
            copies,
            columns,
            class,
            client: args,
        } => {
            let wish = CreateVolume {
                name: name.clone(),
                size_bytes: size.0,
                layout: kind(*layout),
                columns: *columns,
                copies: *copies,
                durability: class.as_deref().map(str::parse).transpose()?,
                content: VolumeContent::Blocks,
            };
            create(args, &wish)?;
        }
        Command::List { client: args } => {
            let found = manager_client(args)?.volumes()?;
            output::print(args.output, &found, || volume_table(&found))?;
        }
        Command::Show { name, client: args } => {
            let found = manager_client(args)?.volume(name)?;
            output::print(args.output, &found, || show(&found))?;
        }
        Command::Grow {
            name,
            size,
            client: args,
        } => {
            if manager_client(args)?.volume(name)?.info.content == VolumeContent::Files {
                bail!(
                    "the volume {name} holds files; let them take more with: \
                     pagemesh fs grow {name} --size SIZE"
                );
            }
            let sized = manager_client(args)?.grow(name, size.0)?;
            output::print(args.output, &sized, || {
                format!("{name} has {} now", bytes(sized.volume.info.size_bytes))
            })?;
        }
        Command::Delete {
            name,
            force,
            client: args,
        } => {
            let deleted = manager_client(args)?.delete(name, *force)?;
            output::print(args.output, &deleted, || match deleted.pending_deletions {
                0 => format!("{name} is deleted"),
                count => format!(
                    "{name} is deleted; {count} of its slices are freed when their bricks return"
                ),
            })?;
        }
        Command::Detach { name, client: args } => {
            let detached = manager_client(args)?.detach(name, None)?;
            output::print(args.output, &detached, || match detached.detached {
                true => format!("{name} is detached"),
                false => format!("{name} was not attached"),
            })?;
        }
        Command::Check {
            name,
            force,
            repair_from,
            transport,
            client: args,
        } => return check(args, *transport, name, *force, *repair_from),
    }
    Ok(Verdict::Done)
}

fn kind(layout: args::LayoutArg) -> LayoutKind {
    match layout {
        args::LayoutArg::Concat => LayoutKind::Concat,
        args::LayoutArg::Stripe => LayoutKind::Stripe,
        args::LayoutArg::Mirror => LayoutKind::Mirror,
        args::LayoutArg::StripeMirror => LayoutKind::StripeMirror,
    }
}

fn create(args: &args::ManagerArgs, wish: &CreateVolume) -> anyhow::Result<()> {
    let sized = manager_client(args)?.create(wish)?;
    output::print(args.output, &sized, || {
        format!(
            "made volume {} of {}; use it with: pagemesh export nbd {} --socket /tmp/{}.sock",
            wish.name,
            bytes(sized.volume.info.size_bytes),
            wish.name,
            wish.name
        )
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
                    leg.brick.to_string(),
                    address.map_or_else(|| "-".into(), |address| address.tcp.clone()),
                    json_word(&leg.state),
                ]);
            }
        }
    }
    let notes = detail
        .notes
        .iter()
        .map(|note| format!("\n{}", json_word(note)));
    format!(
        "{}\n\n{}{}",
        volume_table(std::slice::from_ref(info)),
        table(&["COLUMN", "BRICK", "ADDRESS", "LEG"], rows),
        notes.collect::<String>()
    )
}

fn check(
    args: &args::ManagerArgs,
    transport: args::Transport,
    name: &VolumeName,
    force: bool,
    repair_from: Option<usize>,
) -> anyhow::Result<Verdict> {
    let detail = manager_client(args)?.volume(name)?;
    if let Some(by) = &detail.info.attached
        && !force
    {
        bail!(
            "the volume {name} is attached by {}; end that client, or take the volume over with --force",
            by.client
        );
    }
    let volume = attach(args, transport, name)?;
    let bar = progress(&format!("comparing {name}"));
    let report = volume.check(repair_from, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    for leg in uncompared_legs(&volume) {
        eprintln!(
            "warning: the copy on brick {} is {} and was not compared; check again when it is in-sync",
            leg.brick,
            json_word(&leg.state)
        );
    }
    output::print(args.output, &report, || report_text(name, &report))?;
    Ok(match is_sound(&report) {
        true => Verdict::Done,
        false => Verdict::Damaged,
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
        let bricks: Vec<String> = damage.bricks.iter().map(ToString::to_string).collect();
        let (offset, bricks) = (damage.offset, bricks.join(", "));
        format!("\nbyte {offset}, damaged on {bricks}: {}", damage.cause)
    });
    let left: String = left.collect();
    match report.differences.is_empty() {
        true => format!("{found}\n{left}"),
        false => format!("{found}; repair with --repair-from\n\n{rows}\n{left}"),
    }
}

/// Whether the check found no error, or repaired all of them.
fn is_sound(report: &CheckReport) -> bool {
    report.pages_differing + report.pages_damaged == report.pages_repaired
}

/// A progress bar in bytes on standard error; hidden unless that is a terminal.
pub fn progress(what: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}
