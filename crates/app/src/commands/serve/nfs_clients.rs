//! The clients of NFSv4.1 in a report to the manager.

use pagemesh_manage::wire::{
    NFS_LIST_MAX, NFS_TEXT_BYTES_MAX, Nfs4Client, Nfs4ClientId, Nfs4Lease, NfsExportState,
};
use pagemesh_nfs::Nfs4ClientStatus;
use pagemesh_nfs::nfs4::MINOR_VERSION;
use pagemesh_nfs::nfs4::state::LeaseStatus;
use std::cmp::Reverse;

/// A text that a report may have.
pub fn shortened(text: &str) -> String {
    let fits = text.len() <= NFS_TEXT_BYTES_MAX;
    let end = text.floor_char_boundary(NFS_TEXT_BYTES_MAX - 3);
    if fits {
        text.to_owned()
    } else {
        format!("{}...", &text[..end])
    }
}

/// Adds the clients that have got state in a file system, or in none so far.
pub fn add(state: &mut NfsExportState, clients: &[Nfs4ClientStatus], file_system: &str) {
    let is_shown = |it: &&Nfs4ClientStatus| {
        let names = &it.file_systems;
        names.is_empty() || names.iter().any(|name| name == file_system)
    };
    let mut shown: Vec<_> = clients.iter().filter(is_shown).collect();
    shown.sort_by_key(|it| Reverse((it.listing.ranges, it.listing.opens)));
    state.nfs4_clients_total = shown.len() as u64;
    let most = shown.into_iter().take(NFS_LIST_MAX);
    state.nfs4_clients = most.map(shown_client).collect();
}

fn shown_client(client: &Nfs4ClientStatus) -> Nfs4Client {
    let listing = &client.listing;
    let file_systems = client.file_systems.iter().take(NFS_LIST_MAX);
    Nfs4Client {
        client: Nfs4ClientId(listing.client.0),
        address: listing.address.to_string(),
        name: shortened(&listing.owner.escape_ascii().to_string()),
        minor_version: MINOR_VERSION,
        lease: match listing.status {
            LeaseStatus::Unconfirmed => Nfs4Lease::Unconfirmed,
            LeaseStatus::Active => Nfs4Lease::Active,
            LeaseStatus::Courtesy => Nfs4Lease::Expired,
        },
        renewed_s: listing.lease_age.as_secs(),
        is_reclaiming: listing.may_reclaim,
        sessions: listing.sessions as u64,
        running: listing.running as u64,
        opens: listing.opens as u64,
        locks: listing.ranges as u64,
        file_systems: file_systems.cloned().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemesh_nfs::nfs4::state::{ClientId, ClientListing};
    use std::time::Duration;

    fn client(id: u64, owner: &[u8], ranges: usize, file_systems: &[&str]) -> Nfs4ClientStatus {
        Nfs4ClientStatus {
            listing: ClientListing {
                client: ClientId(id),
                owner: owner.into(),
                address: ([10, 0, 0, 5], 702).into(),
                status: LeaseStatus::Courtesy,
                lease_age: Duration::from_secs(95),
                has_reclaimed: true,
                may_reclaim: false,
                sessions: 1,
                running: 0,
                opens: 3,
                lock_states: 1,
                ranges,
                file_systems: Vec::new(),
            },
            file_systems: file_systems.iter().map(ToString::to_string).collect(),
        }
    }

    fn ids(clients: &[Nfs4ClientStatus]) -> Vec<u64> {
        let mut state = NfsExportState::default();
        add(&mut state, clients, "home");
        state.nfs4_clients.iter().map(|it| it.client.0).collect()
    }

    #[test]
    fn clients_with_locks_come_first() {
        let clients = [
            client(1, b"a", 0, &[]),
            client(2, b"b", 5, &["home", "other"]),
            client(3, b"c", 9, &["other"]),
        ];
        assert_eq!(ids(&clients), [2, 1]);
    }

    #[test]
    fn name_of_a_client_is_escaped_and_shortened() {
        let shown = |owner: &[u8]| shown_client(&client(0xab, owner, 0, &["home"]));
        let plain = shown(b"Linux NFSv4.1 web\x1b[0m\n");
        assert_eq!(plain.name, r"Linux NFSv4.1 web\x1b[0m\n");
        assert_eq!(plain.client.to_string(), "00000000000000ab");
        assert_eq!((plain.lease, plain.renewed_s), (Nfs4Lease::Expired, 95));
        let long = shown(&[0; 1024]).name;
        assert!(long.len() <= 1024 && long.ends_with("..."), "{long}");
    }

    #[test]
    fn long_paths_are_shortened_at_a_character() {
        let path = format!("/{}", "ü".repeat(NFS_TEXT_BYTES_MAX));
        let shown = shortened(&path);
        assert!(shown.len() <= NFS_TEXT_BYTES_MAX && shown.ends_with("..."));
        assert_eq!(shortened("/home"), "/home");
    }
}
