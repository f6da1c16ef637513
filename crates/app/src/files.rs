//! `pagemesh fs`: file systems, each in a volume of its own.

use crate::args::{self, FileSystem};
use crate::output::{self, bytes, table};
use crate::status::word;
use crate::volume::{attach, client, expect, show};
use anyhow::Context;
use pagemesh_base::layout::VolumeName;
use pagemesh_base::space::Space;
use pagemesh_fs::{Credentials, MkfsOptions};
use pagemesh_manage::Kind;
use pagemesh_manage::wire::{Content, CreateVolume, Sized, VolumeInfo};
use rustix::process::{getegid, geteuid};
use rustix::rand::{GetRandomFlags, getrandom};
use std::sync::Arc;
use uuid::Uuid;

/// Makes, shows, grows and deletes file systems.
pub fn run(command: &FileSystem) -> anyhow::Result<()> {
    match command {
        FileSystem::Create {
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
                ..wish(name, size.0, *copies)
            };
            create(args, *transport, &wish)
        }
        FileSystem::List { client: args } => {
            let mut found = client(args)?.volumes()?;
            found.retain(|volume| volume.content == Content::Files);
            output::print(args.output, &found, || list(&found))
        }
        FileSystem::Show { name, client: args } => {
            let detail = expect(args, name, Content::Files)?;
            output::print(args.output, &detail, || show(&detail))
        }
        FileSystem::Grow {
            name,
            size,
            client: args,
        } => {
            let detail = expect(args, name, Content::Files)?;
            let sized = client(args)?.grow(name, size.0)?;
            output::print(args.output, &sized, || {
                let now = bytes(sized.volume.info.size_bytes);
                let when = match detail.info.attached {
                    Some(_) => "the mount takes it over within ten seconds",
                    None => "the next mount takes it over",
                };
                format!("the files of {name} may take {now} now; {when}")
            })
        }
        FileSystem::Delete {
            name,
            force,
            client: args,
        } => {
            expect(args, name, Content::Files)?;
            let deleted = client(args)?.delete(name, *force)?;
            output::print(args.output, &deleted, || format!("{name} is deleted"))
        }
    }
}

/// The volume of a file system of so many copies.
pub fn wish(name: &VolumeName, size_bytes: u64, copies: usize) -> CreateVolume {
    CreateVolume {
        name: name.clone(),
        size_bytes,
        layout: match copies {
            1 => Kind::Concat,
            _ => Kind::Mirror,
        },
        columns: None,
        copies: Some(copies),
        durability: None,
        content: Content::Files,
    }
}

fn create(
    args: &args::Client,
    transport: args::Transport,
    wish: &CreateVolume,
) -> anyhow::Result<()> {
    let sized = make(args, transport, wish)?;
    output::print(args.output, &sized, || {
        let (name, size) = (&wish.name, bytes(sized.asked_bytes));
        format!("made file system {name} of {size}; use it with: pagemesh mount {name} DIR")
    })
}

/// Makes a volume with an empty file system in it.
pub fn make(
    args: &args::Client,
    transport: args::Transport,
    wish: &CreateVolume,
) -> anyhow::Result<Sized> {
    let name = &wish.name;
    let sized = client(args)?.create(wish)?;
    if let Err(cause) = format(args, transport, name, sized.asked_bytes) {
        // Nothing is in it, and under its name nothing else can be made.
        client(args)?
            .delete(name, true)
            .with_context(|| format!("{cause:#}; and its volume cannot be deleted"))?;
        return Err(cause.context(format!("cannot make a file system in the volume {name}")));
    }
    Ok(sized)
}

fn format(
    args: &args::Client,
    transport: args::Transport,
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

fn list(found: &[VolumeInfo]) -> String {
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
            word(&info.health),
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
