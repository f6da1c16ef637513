//! `pagemesh fs`: file systems, each in its own volume.

mod restore;

use crate::args::{CLASSES, ManagerArgs, Transport};
use crate::client::{attach, expect_content, manager_client};
use crate::commands::volume::show;
use crate::output::{self, bytes, json_word, table};
use anyhow::Context;
use clap::Subcommand;
use clap::builder::RangedU64ValueParser;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::Space;
use pagemesh_base::units::Size;
use pagemesh_fs::{Credentials, MkfsOptions};
use pagemesh_manage::wire::{
    CreateVolume, DeleteVolumeParams, VolumeContent, VolumeInfo, VolumeSizeReply,
};
use pagemesh_manage::{LayoutKind, TierPolicy};
use rustix::process::{getegid, geteuid};
use rustix::rand::{GetRandomFlags, getrandom};
use std::sync::Arc;
use uuid::Uuid;

/// Create, show, grow and delete file systems, and restore their files.
#[derive(Subcommand)]
pub enum FileSystemCommand {
    /// Create a file system.
    Create {
        /// Name of the file system.
        name: VolumeName,
        /// Limit of all files together; space is allocated on write.
        #[arg(long)]
        size: Size,
        /// Number of copies, each on its own brick.
        #[arg(long, default_value_t = 2, value_parser = RangedU64ValueParser::<usize>::new().range(1..=3))]
        copies: usize,
        /// Durability class of its bricks; by default the strongest class with room.
        #[arg(long, value_parser = CLASSES)]
        class: Option<String>,
        /// Transport to the bricks.
        #[arg(long, value_enum, default_value = "auto")]
        transport: Transport,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// List file systems.
    List {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show the layout of a file system and the states of its copies.
    Show {
        /// File system.
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Raise the limit of a file system, even while it is mounted.
    Grow {
        /// File system.
        name: VolumeName,
        /// New limit of all files together: at most four times the original limit, or 256 MiB if
        /// that is more.
        #[arg(long)]
        size: Size,
        #[command(flatten)]
        client: ManagerArgs,
    },
    Restore(restore::RestoreArgs),
    /// Delete a file system and all files in it.
    Delete {
        /// File system.
        name: VolumeName,
        /// Delete it although it is mounted.
        #[arg(long)]
        force: bool,
        /// Delete its snapshots, too. Without it a file system with snapshots is refused.
        #[arg(long)]
        snapshots: bool,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// Creates, shows, grows and deletes file systems.
pub fn run(command: &FileSystemCommand) -> anyhow::Result<()> {
    match command {
        FileSystemCommand::Create {
            name,
            size,
            copies,
            class,
            transport,
            client: args,
        } => {
            let durability = class.as_deref().map(str::parse).transpose()?;
            let wish = CreateVolume {
                durability,
                ..create_request(name, size.0, *copies)
            };
            create(args, *transport, &wish)
        }
        FileSystemCommand::Restore(args) => restore::run(args),
        FileSystemCommand::List { client: args } => {
            let mut found = manager_client(args)?.volumes()?;
            found.retain(|volume| volume.content == VolumeContent::Files);
            output::print(args.output, &found, || file_system_table(&found))
        }
        FileSystemCommand::Show { name, client: args } => {
            let detail = expect_content(&manager_client(args)?, name, VolumeContent::Files)?;
            output::print(args.output, &detail, || show(&detail))
        }
        FileSystemCommand::Grow {
            name,
            size,
            client: args,
        } => {
            let detail = expect_content(&manager_client(args)?, name, VolumeContent::Files)?;
            let sized = manager_client(args)?.grow(name, size.0)?;
            output::print(args.output, &sized, || {
                let now = bytes(sized.volume.info.size_bytes);
                let when = match detail.info.attached {
                    Some(_) => "the mount applies it within ten seconds",
                    None => "the next mount applies it",
                };
                format!("the limit of {name} is {now} now; {when}")
            })
        }
        FileSystemCommand::Delete {
            name,
            force,
            snapshots,
            client: args,
        } => {
            expect_content(&manager_client(args)?, name, VolumeContent::Files)?;
            let params = DeleteVolumeParams {
                force: *force,
                snapshots: *snapshots,
            };
            let deleted = manager_client(args)?.delete_with(name, params)?;
            output::print(args.output, &deleted, || format!("{name} is deleted"))
        }
    }
}

/// The request for the volume of a file system with this number of copies.
pub fn create_request(name: &VolumeName, size_bytes: u64, copies: usize) -> CreateVolume {
    CreateVolume {
        name: name.clone(),
        size_bytes,
        layout: match copies {
            1 => LayoutKind::Concat,
            _ => LayoutKind::Mirror,
        },
        columns: None,
        copies: Some(copies),
        durability: None,
        content: VolumeContent::Files,
        tier: TierPolicy::Auto,
        received: false,
    }
}

fn create(args: &ManagerArgs, transport: Transport, wish: &CreateVolume) -> anyhow::Result<()> {
    let sized = create_with_file_system(args, transport, wish)?;
    output::print(args.output, &sized, || {
        let (name, size) = (&wish.name, bytes(sized.asked_bytes));
        format!("made file system {name} of {size}; use it with: pagemesh mount {name} DIR")
    })
}

/// Creates a volume with an empty file system in it.
pub fn create_with_file_system(
    args: &ManagerArgs,
    transport: Transport,
    wish: &CreateVolume,
) -> anyhow::Result<VolumeSizeReply> {
    let name = &wish.name;
    let sized = manager_client(args)?.create(wish)?;
    if let Err(cause) = make_file_system(args, transport, name, sized.asked_bytes) {
        // The volume is empty, and would block its name.
        manager_client(args)?
            .delete(name, true)
            .with_context(|| format!("{cause:#}; and its volume cannot be deleted"))?;
        return Err(cause.context(format!("cannot make a file system in the volume {name}")));
    }
    Ok(sized)
}

fn make_file_system(
    args: &ManagerArgs,
    transport: Transport,
    name: &VolumeName,
    limit_bytes: u64,
) -> anyhow::Result<()> {
    let mut random = [[0; 8]; 2];
    for part in &mut random {
        getrandom(part, GetRandomFlags::empty()).context("no random numbers")?;
    }
    let options = MkfsOptions {
        uuid: Uuid::new_v4(),
        hash_key: random.map(u64::from_ne_bytes),
        limit_bytes,
        owner: Credentials {
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
        },
        mode: 0o755,
    };
    let volume: Arc<dyn Space> = Arc::new(attach(args, transport, name)?);
    pagemesh_fs::mkfs(&volume, pagemesh_fuse::wait, pagemesh_fuse::now, options)?;
    Ok(())
}

fn file_system_table(found: &[VolumeInfo]) -> String {
    if found.is_empty() {
        return "no file systems; make one with: pagemesh fs create NAME --size 1G".into();
    }
    let rows = found.iter().map(|info| {
        let by = info.attached.as_ref();
        vec![
            info.name.to_string(),
            bytes(info.size_bytes),
            info.copies.to_string(),
            info.durability.to_string(),
            json_word(&info.health),
            by.map_or_else(|| "-".into(), |by| by.client.clone()),
        ]
    });
    let head = [
        "FILE SYSTEM",
        ">SIZE",
        ">COPIES",
        "CLASS",
        "HEALTH",
        "MOUNTED BY",
    ];
    table(&head, rows)
}
