//! `pagemesh nfs`: the file systems that are served over NFS, and the clients of their servers.

mod clients;

use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output::{self, age, nanos, table};
use clap::Subcommand;
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::wire::{Nfs4ClientId, NfsExport, NfsExportState};

/// A server reports each 10 s. After three reports that did not come, its numbers are old.
const SILENT_MS: u64 = 30_000;

/// List and show file systems that are served over NFS, and the clients of their servers.
#[derive(Subcommand)]
pub enum NfsCommand {
    /// List the file systems that are served, with clients, rates and workers.
    List {
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Show the exported paths, operations and clients of a file system.
    Show {
        /// File system.
        #[arg(value_name = "FS")]
        name: VolumeName,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// List the clients of version 4.1 with their opens and locks.
    ///
    /// A client of version 3 has neither: see the clients of `pagemesh nfs show`. The opens and locks of a client are of all file systems of
    /// its server. An expired client keeps them until another client needs them.
    Clients {
        /// File system: only clients that have used opens or locks there, or nowhere so far.
        #[arg(value_name = "FS")]
        name: Option<VolumeName>,
        #[command(flatten)]
        client: ManagerArgs,
    },
    /// Expire a client of version 4.1, so that others get its files and locks.
    ///
    /// The client loses its sessions at once, and its opens and locks after its last request in progress. It cannot reclaim them. The command
    /// waits until a crash of the server cannot bring them back, up to 25 s.
    ///
    /// Data loss: data that programs of the client have not synced is lost, and its programs get errors for locked files.
    Expire {
        /// Client, as `pagemesh nfs clients` shows it.
        #[arg(value_name = "CLIENT")]
        id: Nfs4ClientId,
        #[command(flatten)]
        client: ManagerArgs,
    },
}

/// Lists or shows exports, or lists or expires clients.
pub fn run(command: &NfsCommand) -> anyhow::Result<()> {
    match command {
        NfsCommand::List { client } => {
            let exports = manager_client(client)?.nfs_exports()?;
            output::print(client.output, &exports, || list_text(&exports))
        }
        NfsCommand::Show { name, client } => {
            let export = manager_client(client)?.nfs_export(name)?;
            output::print(client.output, &export, || show_text(&export))
        }
        NfsCommand::Clients { name, client } => clients::list(name.as_ref(), client),
        NfsCommand::Expire { id, client } => clients::expire(*id, client),
    }
}

fn list_text(exports: &[NfsExport]) -> String {
    if exports.is_empty() {
        return "no file system is served over NFS; serve one with: pagemesh serve nfs NAME".into();
    }
    let head = [
        "FILE SYSTEM",
        "STATE",
        "ADDRESSES",
        ">CLIENTS",
        ">CALLS/S",
        ">MEAN",
        ">WORKERS",
        ">QUEUED",
    ];
    let row = |it: &NfsExport| {
        let state = &it.export;
        let workers = &state.workers;
        vec![
            it.volume.to_string(),
            state_text(it),
            state.addresses.join(" "),
            state.clients_total.to_string(),
            calls_per_second(state).to_string(),
            mean_ns(state).map_or_else(|| "-".into(), nanos),
            format!("{}/{}", workers.threads, workers.threads_max),
            workers.queued.to_string(),
        ]
    };
    table(&head, exports.iter().map(row))
}

fn show_text(shown: &NfsExport) -> String {
    let state = &shown.export;
    let workers = &state.workers;
    let addresses = state.addresses.join(" ");
    let mut text = format!(
        "{}: {} at {addresses}\nworkers: {} of {}, {} blocked; {} calls wait, the mean wait was {}",
        shown.volume,
        state_text(shown),
        workers.threads,
        workers.threads_max,
        workers.blocked,
        workers.queued,
        nanos(workers.mean_wait_ns),
    );
    if !workers.last_change.is_empty() {
        text.push_str(&format!("; {}", workers.last_change));
    }
    text.push_str(&format!("\n{}", nfs4_text(state)));
    let paths = state.paths.iter();
    let paths = paths.map(|it| vec![it.path.clone(), it.rules.join(" ")]);
    text.push_str(&format!("\n\n{}\n", table(&["PATH", "RULES"], paths)));
    let head = ["OPERATION", ">CALLS", ">ERRORS", ">MEAN", ">P50", ">P99"];
    let operations = state.operations.iter().map(|it| {
        vec![
            it.name.clone(),
            it.calls.to_string(),
            it.errors.to_string(),
            nanos(it.mean_ns),
            nanos(it.p50_ns),
            nanos(it.p99_ns),
        ]
    });
    text.push_str(&format!("\n{}\n", table(&head, operations)));
    let clients = state.clients.iter().map(|it| {
        vec![
            it.address.clone(),
            it.connections.to_string(),
            it.calls.to_string(),
            age(it.idle_s),
        ]
    });
    let head = ["CLIENT", ">CONNECTIONS", ">CALLS", ">LAST CALL"];
    text.push_str(&format!("\n{}", table(&head, clients)));
    let left_out = state
        .clients_total
        .saturating_sub(state.clients.len() as u64);
    if left_out > 0 {
        text.push_str(&format!("\nand {left_out} more clients"));
    }
    text
}

/// The grace period and the stable list of NFSv4.1.
fn nfs4_text(state: &NfsExportState) -> String {
    let mut text = format!(
        "NFSv4.1: {} clients may reclaim their state after a restart",
        state.listed_clients
    );
    if state.unwritten_records > 0 {
        text.push_str(&format!(
            "; {} records of them are not durable yet",
            state.unwritten_records
        ));
    }
    if let Some(grace) = &state.grace {
        let (left, clients) = (age(grace.left_s), grace.clients);
        text.push_str(&format!(
            "; grace period for {left} more, while {clients} clients may reclaim, and others wait"
        ));
    }
    text
}

/// The state in words.
pub fn state_text(shown: &NfsExport) -> String {
    match shown.reported_ms_ago {
        0..=SILENT_MS if shown.export.workers.stalled => "stalled".into(),
        0..=SILENT_MS if shown.export.grace.is_some() => "in grace".into(),
        0..=SILENT_MS => "serves".into(),
        silent => format!("silent for {}", age(silent / 1000)),
    }
}

/// Calls of each second of the step.
pub fn calls_per_second(state: &NfsExportState) -> u64 {
    let calls: u64 = state.operations.iter().map(|it| it.calls).sum();
    calls.saturating_mul(1000) / state.step_ms.max(1)
}

/// The mean latency of all calls of the step.
pub fn mean_ns(state: &NfsExportState) -> Option<u64> {
    let operations = state.operations.iter();
    let (calls, total) = operations.fold((0_u128, 0_u128), |(calls, total), it| {
        let of = u128::from(it.calls);
        (calls + of, total + of * u128::from(it.mean_ns))
    });
    let mean = total.checked_div(calls)?;
    Some(u64::try_from(mean).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_manage::wire::{NfsClient, NfsGrace, NfsOperation};

    fn served(reported_ms_ago: u64) -> NfsExport {
        let operation = |name: &str, calls, mean_ns| NfsOperation {
            name: name.into(),
            calls,
            mean_ns,
            ..NfsOperation::default()
        };
        NfsExport {
            volume: "home".parse().unwrap(),
            reported_ms_ago,
            export: NfsExportState {
                operations: vec![
                    operation("READ", 300, 1_000),
                    operation("WRITE", 100, 5_000),
                ],
                clients: vec![NfsClient::default()],
                clients_total: 9,
                step_ms: 10_000,
                ..NfsExportState::default()
            },
        }
    }

    #[test]
    fn rates_are_of_all_operations() {
        let state = served(0).export;
        assert_eq!(
            (calls_per_second(&state), mean_ns(&state)),
            (40, Some(2_000))
        );
        let idle = NfsExportState::default();
        assert_eq!((calls_per_second(&idle), mean_ns(&idle)), (0, None));
    }

    #[test]
    fn grace_period_is_shown() {
        let mut shown = served(10);
        assert!(!show_text(&shown).contains("grace"));
        shown.export.grace = Some(NfsGrace {
            left_s: 42,
            clients: 3,
        });
        let text = show_text(&shown);
        assert!(
            text.contains("in grace") && text.contains("grace period for 42 s"),
            "{text}"
        );
    }

    #[test]
    fn server_without_reports_is_silent() {
        assert!(list_text(&[served(65_000)]).contains("silent for 65 s"));
        let text = show_text(&served(10));
        assert!(
            text.contains("serves") && text.ends_with("and 8 more clients"),
            "{text}"
        );
    }
}
