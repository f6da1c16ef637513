//! The mounts that clients have told by MNT: for people. It may have mounts that ended without UMNT.
//!
//! Invariant: the list is bounded; the oldest mount makes room for a new one.

use crate::limits::MOUNTS_MAX;
use pagemesh_base::poison;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Mutex;

/// See the module.
#[derive(Default)]
pub(crate) struct MountRegister(Mutex<VecDeque<Mount>>);

#[derive(PartialEq, Eq)]
struct Mount {
    client: IpAddr,
    path: Box<[u8]>,
}

impl MountRegister {
    /// Adds a mount, as the newest.
    pub(crate) fn add(&self, client: IpAddr, path: &[u8]) {
        let path = plain(path);
        let mount = Mount { client, path };
        let mut mounts = poison::lock(&self.0);
        mounts.retain(|known| *known != mount);
        if mounts.len() >= MOUNTS_MAX {
            mounts.pop_front();
        }
        mounts.push_back(mount);
    }

    /// Removes a mount, if it is there.
    pub(crate) fn remove(&self, client: IpAddr, path: &[u8]) {
        let path = plain(path);
        poison::lock(&self.0).retain(|known| known.client != client || known.path != path);
    }

    /// Removes all mounts of a client.
    pub(crate) fn remove_all(&self, client: IpAddr) {
        poison::lock(&self.0).retain(|known| known.client != client);
    }

    /// The clients and paths, the oldest mount first.
    pub(crate) fn list(&self) -> Vec<(String, Box<[u8]>)> {
        let mounts = poison::lock(&self.0);
        let mounts = mounts.iter();
        mounts
            .map(|it| (it.client.to_string(), it.path.clone()))
            .collect()
    }
}

/// The path with one slash before each name.
fn plain(path: &[u8]) -> Box<[u8]> {
    let names = path.split(|byte| *byte == b'/');
    let names = names.filter(|name| !name.is_empty());
    names.flat_map(|name| [&b"/"[..], name].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn register_is_bounded_and_drops_the_oldest() {
        let register = MountRegister::default();
        let client = IpAddr::from([10, 0, 0, 1]);
        for number in 0..=MOUNTS_MAX {
            register.add(client, number.to_string().as_bytes());
        }
        register.add(client, b"1");
        let list = register.list();
        assert_eq!(list.len(), MOUNTS_MAX);
        assert_eq!(*list[0].1, *b"/2");
        assert_eq!(*list[MOUNTS_MAX - 1].1, *b"/1");
        register.remove(IpAddr::from([10, 0, 0, 2]), b"1");
        assert_eq!(register.list().len(), MOUNTS_MAX);
        register.remove(client, b"1");
        assert_eq!(register.list().len(), MOUNTS_MAX - 1);
        register.remove_all(client);
        assert!(register.list().is_empty());
    }
}
