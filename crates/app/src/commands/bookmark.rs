//! `pagemesh bookmark`: the epochs of snapshots without their data.

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output::{self, table, time_text};
use crate::snapshot_path::{BookmarkPath, SnapshotPath};
use clap::{Args, Subcommand};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::snapshots::SnapshotName;
use pagemesh_manage::wire::{BookmarkInfo, CreateBookmark};

/// Make, list and delete bookmarks: starts of `snapshot send --from` that keep no data.
#[derive(Subcommand)]
pub enum BookmarkCommand {
    Create(CreateArgs),
    /// List the bookmarks of a volume.
    List {
        /// Volume.
        volume: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Delete bookmarks.
    Delete {
        /// Bookmarks, each in quotes for a shell.
        #[arg(required = true, value_name = "VOLUME#NAME")]
        bookmarks: Vec<BookmarkPath>,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// Make a bookmark of a snapshot. The changes since can be sent after the snapshot is deleted.
///
/// `VOLUME#NAME` names a bookmark.
#[derive(Args)]
pub struct CreateArgs {
    /// Snapshot.
    #[arg(value_name = "VOLUME@SNAPSHOT")]
    pub snapshot: SnapshotPath,
    /// Name of the bookmark; the name of the snapshot if missing.
    pub name: Option<SnapshotName>,
    #[command(flatten)]
    pub client: ManagerArgs,
}

/// Makes, lists and deletes bookmarks.
pub fn run(command: &BookmarkCommand) -> anyhow::Result<()> {
    match command {
        BookmarkCommand::Create(args) => {
            let request = CreateBookmark {
                snapshot: args.snapshot.name.clone(),
                name: args.name.clone(),
            };
            let manager = manager_client(&args.client)?;
            let made = manager.create_bookmark(&args.snapshot.volume, &request)?;
            output::print(args.client.output, &made, || {
                format!("made {}#{}", made.volume, made.name)
            })
        }
        BookmarkCommand::List {
            volume,
            client: args,
        } => {
            let found = manager_client(args)?.bookmarks(volume)?;
            output::print(args.output, &found, || bookmark_table(&found))
        }
        BookmarkCommand::Delete {
            bookmarks,
            client: args,
        } => {
            let manager = manager_client(args)?;
            for BookmarkPath { volume, name } in bookmarks {
                manager.delete_bookmark(volume, name)?;
            }
            output::print(args.output, bookmarks, || {
                let line = |it: &BookmarkPath| format!("{it} is deleted\n");
                bookmarks.iter().map(line).collect()
            })
        }
    }
}

fn bookmark_table(bookmarks: &[BookmarkInfo]) -> String {
    if bookmarks.is_empty() {
        return "no bookmarks; make one with: pagemesh bookmark create VOLUME@SNAPSHOT".into();
    }
    let rows = bookmarks.iter().map(|it| {
        vec![
            format!("{}#{}", it.volume, it.name),
            it.snapshot.to_string(),
            time_text(it.created_unix_ms),
            it.epoch.0.to_string(),
        ]
    });
    table(&["BOOKMARK", "SNAPSHOT", "CREATED", ">EPOCH"], rows)
}
