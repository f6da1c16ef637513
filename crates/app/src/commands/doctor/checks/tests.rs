//! A case for each verdict.

use super::super::installed::ConfigFile;
use super::super::ports::PortFacts;
use super::*;
use std::path::PathBuf;

/// A machine without a finding.
fn good() -> HostFacts {
    HostFacts {
        kernel: "6.14.0-2-amd64".into(),
        fuse_device: DeviceAccess::Usable,
        is_root: false,
        has_fusermount: true,
        fuse_uring: Some(true),
        io_uring_disabled: Some("0".into()),
        io_uring_refusal: None,
        shmem_huge: Some("advise".into()),
        huge_tmpfs: vec![PathBuf::from("/mnt/huge")],
        dax_devices: vec!["dax0.0".into()],
        limits: Limits {
            is_of_units: true,
            memlock_bytes: None,
            open_files: Some(65536),
        },
        config_files: vec![],
        ports: vec![PortFacts {
            number: 7070,
            state: PortState::Free,
        }],
        clock: Clock::Synchronised,
        shm_free_bytes: Some(1 << 30),
        key: KeyFacts::Usable("/etc/pagemesh/key".into()),
        manager: ManagerFacts::Answers("http://10.0.0.1:7070".into()),
    }
}

/// Asserts that the changed machine has this finding in one check, and no other finding.
#[track_caller]
fn judges(name: &str, wanted: Finding, change: impl FnOnce(&mut HostFacts)) {
    let mut host = good();
    change(&mut host);
    for check in all(&host) {
        let expected = if check.name == name {
            wanted
        } else {
            Finding::Ok
        };
        assert_eq!(check.finding, expected, "{check:?}");
        let has_way_out = check.fix.is_some() && !check.reason.is_empty();
        assert!(check.finding == Finding::Ok || has_way_out, "{check:?}");
    }
}

use Finding::{Error, Ok, Warning};

#[test]
fn kernel_and_fuse_are_judged() {
    judges("kernel", Ok, |_| {});
    judges("kernel", Ok, |host| host.kernel = "5.8".into());
    for old in ["5.4.0", "5.7.1", "plan9", ""] {
        judges("kernel", Warning, |host| host.kernel = old.into());
    }
    for old in ["5.3.0", "4.19.1"] {
        judges("kernel", Error, |host| host.kernel = old.into());
    }
    for state in [DeviceAccess::Absent, DeviceAccess::Forbidden] {
        judges("fuse", Warning, |host| host.fuse_device = state);
    }
    judges("fusermount", Warning, |host| host.has_fusermount = false);
    judges("fusermount", Ok, |host| {
        (host.has_fusermount, host.is_root) = (false, true);
    });
    judges("io_uring", Ok, |host| host.fuse_uring = Some(false));
    judges("io_uring", Ok, |host| host.fuse_uring = None);
    for (disabled, wanted) in [(None, Ok), (Some("1"), Warning), (Some("2"), Warning)] {
        judges("io_uring", wanted, |host| {
            host.io_uring_disabled = disabled.map(str::to_owned);
        });
    }
    judges("io_uring", Warning, |host| {
        host.io_uring_refusal = Some("Operation not permitted".into());
    });
}

#[test]
fn memory_is_judged() {
    judges("thp", Ok, |host| host.shmem_huge = Some("never".into()));
    judges("thp", Warning, |host| host.shmem_huge = Some("deny".into()));
    judges("thp", Ok, |host| host.shmem_huge = None);
    judges("hugepages", Ok, |host| host.huge_tmpfs = vec![]);
    judges("dax", Ok, |host| host.dax_devices = vec![]);
    judges("memlock", Ok, |host| {
        host.limits.memlock_bytes = Some(MEMLOCK_MIN_BYTES)
    });
    judges("memlock", Warning, |host| {
        host.limits.memlock_bytes = Some(8 << 20)
    });
    judges("shm", Warning, |host| {
        host.shm_free_bytes = Some(SHM_MIN_BYTES)
    });
    judges("shm", Error, |host| host.shm_free_bytes = Some(0));
    judges("shm", Error, |host| host.shm_free_bytes = None);
}

#[test]
fn limits_ports_and_clock_are_judged() {
    let files = |count| move |host: &mut HostFacts| host.limits.open_files = count;
    judges("open-files", Ok, files(None));
    judges("open-files", Warning, files(Some(OPEN_FILES_MIN)));
    judges("open-files", Error, files(Some(256)));
    judges("port-7070", Ok, |host| {
        host.ports[0].state = PortState::Ours
    });
    judges("port-7070", Error, |host| {
        host.ports[0].state = PortState::Taken("nginx".into())
    });
    judges("port-7070", Warning, |host| {
        host.ports[0].state = PortState::Unknown("x".into())
    });
    for clock in [Clock::Unsynchronised, Clock::Unknown] {
        judges("clock", Warning, |host| host.clock = clock);
    }
}

#[test]
fn key_and_manager_are_judged() {
    judges("key", Ok, |host| host.key = KeyFacts::Unnamed);
    judges("key", Error, |host| {
        host.key = KeyFacts::Refused {
            path: "/k".into(),
            cause: "open to others".into(),
        };
    });
    judges("key", Warning, |host| {
        host.key = KeyFacts::Unseen("/etc/pagemesh/key".into());
    });
    judges("manager", Ok, |host| host.manager = ManagerFacts::Unnamed);
    judges("manager", Warning, |host| {
        host.manager = ManagerFacts::NotAsked("http://a:1".into());
    });
    judges("manager", Error, |host| {
        host.manager = ManagerFacts::Fails("no answer".into());
    });
}

#[test]
fn common_defaults_of_shell_are_no_finding() {
    let mut host = good();
    host.fuse_uring = Some(false);
    host.shmem_huge = Some("never".into());
    host.limits = Limits {
        is_of_units: false,
        memlock_bytes: Some(8 << 20),
        open_files: Some(1024),
    };
    for check in all(&host) {
        assert_eq!(check.finding, Ok, "{check:?}");
        let is_advice = ["io_uring", "thp", "memlock", "open-files"].contains(&check.name.as_str());
        assert_eq!(check.fix.is_some(), is_advice, "{check:?}");
    }
}

#[test]
fn invalid_configuration_file_is_named() {
    let file = |name: &str, content| ConfigFile {
        path: PathBuf::from(format!("/etc/pagemesh/{name}.toml")),
        content,
    };
    judges("config", Ok, |host| {
        host.config_files = vec![file("client", Result::Ok(vec![]))]
    });
    judges("config-brick-a", Error, |host| {
        let valid = file("client", Result::Ok(vec![]));
        host.config_files = vec![valid, file("brick-a", Err("no key".into()))];
    });
}
