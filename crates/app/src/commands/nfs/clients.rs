//! `pagemesh nfs clients|expire`: the clients of NFSv4.1.

use super::SILENT_MS;
use crate::args::ManagerArgs;
use crate::client::manager_client;
use crate::output::{self, age, table};
use pagemesh_base::layout::VolumeName;
use pagemesh_manage::wire::{Nfs4Client, Nfs4ClientId, Nfs4Lease, NfsExport};
use serde::Serialize;
use std::collections::BTreeMap;

/// A client in the list.
#[derive(Debug, Serialize)]
struct ListedClient {
    #[serde(flatten)]
    client: Nfs4Client,
    /// Milliseconds since the report.
    reported_ms_ago: u64,
}

/// The clients of all servers, and those that their reports leave out.
struct ClientList {
    clients: Vec<ListedClient>,
    left_out: u64,
}

impl ClientList {
    /// The clients by the newest reports. A server reports its clients for each of its file systems.
    fn new(exports: Vec<NfsExport>) -> ClientList {
        let mut newest: BTreeMap<Nfs4ClientId, ListedClient> = BTreeMap::new();
        let mut left_out = 0;
        for NfsExport {
            export,
            reported_ms_ago,
            ..
        } in exports
        {
            let shown = export.nfs4_clients.len() as u64;
            left_out = left_out.max(export.nfs4_clients_total.saturating_sub(shown));
            for client in export.nfs4_clients {
                let id = client.client;
                let known = newest.get(&id);
                if known.is_none_or(|it| it.reported_ms_ago > reported_ms_ago) {
                    let listed = ListedClient {
                        client,
                        reported_ms_ago,
                    };
                    newest.insert(id, listed);
                }
            }
        }
        let mut clients: Vec<_> = newest.into_values().collect();
        clients.sort_by(|a, b| a.client.name.cmp(&b.client.name));
        ClientList { clients, left_out }
    }

    fn text(&self) -> String {
        if self.clients.is_empty() {
            return "no client of NFSv4.1; a server reports its clients each 10 s".into();
        }
        let head = [
            "CLIENT",
            "ADDRESS",
            "VERSION",
            "STATE",
            ">RENEWED",
            ">OPENS",
            ">LOCKS",
            "FILE SYSTEMS",
            "NAME",
        ];
        let mut text = table(&head, self.clients.iter().map(ListedClient::row));
        if self.left_out > 0 {
            let left_out = self.left_out;
            text.push_str(&format!(
                "\nand {left_out} more clients of a server, with fewer locks and opens"
            ));
        }
        text
    }
}

impl ListedClient {
    fn row(&self) -> Vec<String> {
        let client = &self.client;
        let file_systems = match client.file_systems.is_empty() {
            true => "-".into(),
            false => client.file_systems.join(" "),
        };
        vec![
            client.client.to_string(),
            client.address.clone(),
            format!("4.{}", client.minor_version),
            self.state_text().into(),
            age(client.renewed_s + self.reported_ms_ago / 1000),
            client.opens.to_string(),
            client.locks.to_string(),
            file_systems,
            client.name.clone(),
        ]
    }

    fn state_text(&self) -> &'static str {
        match self.client.lease {
            _ if self.reported_ms_ago > SILENT_MS => "server silent",
            Nfs4Lease::Unconfirmed => "no session",
            Nfs4Lease::Active if self.client.is_reclaiming => "reclaims",
            Nfs4Lease::Active => "active",
            Nfs4Lease::Expired => "expired",
        }
    }
}

/// Lists the clients of all servers, or of the server of a file system.
pub fn list(name: Option<&VolumeName>, client: &ManagerArgs) -> anyhow::Result<()> {
    let manager = manager_client(client)?;
    let exports = match name {
        Some(name) => vec![manager.nfs_export(name)?],
        None => manager.nfs_exports()?,
    };
    let list = ClientList::new(exports);
    output::print(client.output, &list.clients, || list.text())
}

/// Expires a client.
pub fn expire(id: Nfs4ClientId, client: &ManagerArgs) -> anyhow::Result<()> {
    let lost = manager_client(client)?.expire_nfs_client(id)?;
    output::print(client.output, &lost, || {
        let (opens, locks) = (lost.opens, lost.locks);
        format!(
            "expired the NFS client {id}: it has lost {opens} opens and {locks} locked ranges, and cannot reclaim them"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_manage::wire::NfsExportState;

    fn client(id: u64, lease: Nfs4Lease) -> Nfs4Client {
        Nfs4Client {
            client: Nfs4ClientId(id),
            address: "10.0.0.5:702".into(),
            name: format!("Linux NFSv4.1 host{id}"),
            minor_version: 1,
            lease,
            renewed_s: 100,
            is_reclaiming: false,
            sessions: 1,
            running: 0,
            opens: 12,
            locks: 34,
            file_systems: vec!["home".into()],
        }
    }

    fn export(volume: &str, reported_ms_ago: u64, clients: Vec<Nfs4Client>) -> NfsExport {
        NfsExport {
            volume: volume.parse().unwrap(),
            reported_ms_ago,
            export: NfsExportState {
                nfs4_clients_total: clients.len() as u64 + 2,
                nfs4_clients: clients,
                ..NfsExportState::default()
            },
        }
    }

    #[test]
    fn client_of_a_silent_server_shows_it() {
        for (reported_ms_ago, shown) in [(SILENT_MS, "active"), (SILENT_MS + 1, "server silent")] {
            let clients = vec![client(1, Nfs4Lease::Active)];
            let list = ClientList::new(vec![export("home", reported_ms_ago, clients)]);
            assert_eq!(list.clients[0].row()[3], shown);
        }
    }

    #[test]
    fn client_of_two_file_systems_is_listed_once() {
        let [first, second] = [1, 2].map(|id| client(id, Nfs4Lease::Active));
        let mut reclaiming = client(3, Nfs4Lease::Active);
        reclaiming.is_reclaiming = true;
        let newer = Nfs4Client {
            lease: Nfs4Lease::Expired,
            ..first.clone()
        };
        let list = ClientList::new(vec![
            export("home", 5_000, vec![second, first]),
            export("more", 1_000, vec![newer, reclaiming]),
        ]);
        let text = list.text();
        let words: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(words.len(), 5, "{text}");
        let shown: Vec<_> = words[1..4].iter().map(|row| (row[0], row[3])).collect();
        let [one, two, three] = ["0000000000000001", "0000000000000002", "0000000000000003"];
        assert_eq!(
            shown,
            [(one, "expired"), (two, "active"), (three, "reclaims")]
        );
        assert_eq!(&words[1][1..3], ["10.0.0.5:702", "4.1"]);
        assert!(text.contains("101 s") && text.contains("105 s"), "{text}");
        assert!(text.ends_with("and 2 more clients of a server, with fewer locks and opens"));
        assert!(ClientList::new(Vec::new()).text().contains("no client"));
    }
}
