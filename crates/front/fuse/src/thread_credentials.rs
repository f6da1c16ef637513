//! The groups and the privilege of a thread that calls the kernel. A request carries its user and one group only.

use pagemesh_fs::{Credentials, SetIdCaller};

/// The bit of CAP_FSETID in a set of capabilities, capabilities(7).
const CAP_FSETID: u64 = 1 << 4;

/// Fields of `/proc/PID/status`, proc_pid_status(5).
#[derive(Debug, Default, PartialEq, Eq)]
struct ThreadCredentials {
    groups: Vec<u32>,
    effective_capabilities: u64,
}

impl ThreadCredentials {
    /// The credentials of a thread. None: this process cannot see it, as in another process namespace.
    fn of_thread(thread: u32) -> Option<ThreadCredentials> {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
        Some(ThreadCredentials::parse(&status.ok()?))
    }

    fn parse(status: &str) -> ThreadCredentials {
        let mut found = ThreadCredentials::default();
        for line in status.lines() {
            match line.split_once(':') {
                Some(("Groups", groups)) => {
                    let groups = groups.split_whitespace();
                    found.groups = groups.filter_map(|gid| gid.parse().ok()).collect();
                }
                Some(("CapEff", bits)) => {
                    found.effective_capabilities =
                        u64::from_str_radix(bits.trim(), 16).unwrap_or_default();
                }
                _ => {}
            }
        }
        found
    }
}

/// The caller of a write or a truncation that the kernel found to lack CAP_FSETID, for a file of this group.
pub(crate) fn unprivileged_caller(caller: Credentials, thread: u32, gid: u32) -> SetIdCaller {
    let is_member =
        || ThreadCredentials::of_thread(thread).is_some_and(|thread| thread.groups.contains(&gid));
    match caller.gid == gid || is_member() {
        true => SetIdCaller::Member,
        false => SetIdCaller::Other,
    }
}

/// The caller of another change of a file of this group. Root has CAP_FSETID unless /proc says otherwise. A capability of
/// another user may be one of a user namespace, which does not count.
pub(crate) fn caller(caller: Credentials, thread: u32, gid: u32) -> SetIdCaller {
    let is_privileged = || {
        ThreadCredentials::of_thread(thread)
            .is_none_or(|thread| thread.effective_capabilities & CAP_FSETID != 0)
    };
    match caller.uid == 0 && is_privileged() {
        true => SetIdCaller::Privileged,
        false => unprivileged_caller(caller, thread, gid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_found_among_other_fields() {
        let status = "Name:\tGroups: 7\nUid:\t1000\t1000\t1000\t1000\nGroups:\t4 24 1000 \n\
                      CapPrm:\t0000000000000000\nCapEff:\t0000000000000410\n";
        let found = ThreadCredentials::parse(status);
        assert_eq!(found.groups, [4, 24, 1000]);
        assert_eq!(found.effective_capabilities, 0x410);
        for other in ["", "Groups:\t\n", "Groups:\tx\nCapEff:\t-\n"] {
            assert_eq!(
                ThreadCredentials::parse(other),
                ThreadCredentials::default()
            );
        }
    }

    #[test]
    fn thread_that_is_not_visible_is_no_member() {
        // 0 is the number of each thread of another process namespace.
        let user = Credentials { uid: 5, gid: 6 };
        assert_eq!(unprivileged_caller(user, 0, 6), SetIdCaller::Member);
        assert_eq!(caller(user, 0, 7), SetIdCaller::Other);
    }
}
