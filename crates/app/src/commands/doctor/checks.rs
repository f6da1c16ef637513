//! The judgement of a machine's facts.
//!
//! Invariant: pure. Each check reads `HostFacts` alone, so that a test has a case for each verdict.

use super::facts::{Clock, DeviceAccess, HostFacts, KeyFacts, PortState};
use serde::Serialize;

/// The oldest kernel with long-term support.
const KERNEL_MIN: (u32, u32) = (5, 10);
/// The first kernel with FUSE over io_uring.
const KERNEL_URING: (u32, u32) = (6, 14);
/// Locked memory below which buffers of io_uring may be refused, in bytes.
const MEMLOCK_MIN_BYTES: u64 = 64 << 20;
/// Descriptors below which a daemon may refuse connections: one per connection, and some files.
const OPEN_FILES_MIN: u64 = 1024;
const OPEN_FILES_WANTED: u64 = 4096;
/// Free memory in /dev/shm below which a daemon does not start, and below which it gets tight: each
/// attached pool and direct client has a shared segment there.
const SHM_MIN_BYTES: u64 = 16 << 20;
const SHM_WANTED_BYTES: u64 = 256 << 20;

/// The verdict of a check, from good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finding {
    /// Nothing to do.
    Ok,
    /// pagemesh works, with a limit.
    Warning,
    /// A part of pagemesh does not work.
    Error,
}

/// One check.
#[derive(Debug, Serialize)]
pub struct Check {
    /// The checked part.
    pub name: String,
    /// The verdict.
    pub finding: Finding,
    /// The state of the part.
    pub text: String,
    /// The reason why the part matters.
    pub reason: &'static str,
    /// The command that corrects it.
    pub fix: Option<String>,
}

/// A verdict with its text, and the correction if there is one.
struct Judged(Finding, String, Option<String>);

impl Judged {
    fn ok(text: impl Into<String>) -> Judged {
        Judged(Finding::Ok, text.into(), None)
    }

    fn warning(text: impl Into<String>, fix: impl Into<String>) -> Judged {
        Judged(Finding::Warning, text.into(), Some(fix.into()))
    }

    fn error(text: impl Into<String>, fix: impl Into<String>) -> Judged {
        Judged(Finding::Error, text.into(), Some(fix.into()))
    }

    fn check(self, name: impl Into<String>, reason: &'static str) -> Check {
        let Judged(finding, text, fix) = self;
        Check {
            name: name.into(),
            finding,
            text,
            reason,
            fix,
        }
    }
}

/// All checks.
pub fn all(host: &HostFacts) -> Vec<Check> {
    let mut checks = vec![
        kernel(host).check(
            "kernel",
            "system calls that pagemesh uses are missing in older kernels",
        ),
        fuse_device(host).check(
            "fuse",
            "`pagemesh mount` opens /dev/fuse; bricks and exports do not",
        ),
        fusermount(host).check(
            "fusermount",
            "users other than root mount through fusermount3",
        ),
        fuse_uring(host).check(
            "io_uring",
            "FUSE over io_uring saves system calls of a mount",
        ),
        shmem(host).check(
            "thp",
            "pools in memory with huge pages need fewer TLB entries",
        ),
        huge_tmpfs(host).check(
            "hugepages",
            "`up --memory=DIR` can put pools on a tmpfs with huge pages",
        ),
        dax(host).check(
            "dax",
            "durability class `pmem` needs a medium that is mapped with DAX",
        ),
        memlock(host).check("memlock", "io_uring locks its buffers in memory"),
        open_files(host).check("open-files", "each connection of a daemon has a descriptor"),
    ];
    for port in &host.ports {
        let reason = "the shipped configuration listens there";
        checks.push(
            port_state(port.number, &port.state).check(format!("port-{}", port.number), reason),
        );
    }
    checks.extend([
        clock(host).check(
            "clock",
            "file times and events of several machines are compared",
        ),
        shm(host).check(
            "shm",
            "shared segments of pools and direct clients are in /dev/shm",
        ),
        key(host).check("key", "every process of a cluster proves the cluster key"),
        manager(host).check("manager", "bricks and clients ask the manager for layouts"),
    ]);
    checks
}

/// The major and minor number of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel(host: &HostFacts) -> Judged {
    let release = &host.kernel;
    match version(release) {
        Some(found) if found >= KERNEL_MIN => Judged::ok(release),
        Some(_) => Judged::warning(
            format!("{release} is older than {}.{}", KERNEL_MIN.0, KERNEL_MIN.1),
            "install a kernel with long-term support: apt-get install linux-image-amd64",
        ),
        None => Judged::warning(format!("'{release}' is no known version"), "uname -r"),
    }
}

fn fuse_device(host: &HostFacts) -> Judged {
    match host.fuse_device {
        DeviceAccess::Usable => Judged::ok("/dev/fuse is usable"),
        DeviceAccess::Forbidden => {
            Judged::warning("/dev/fuse is not writable", "chmod 666 /dev/fuse")
        }
        DeviceAccess::Absent => Judged::warning("/dev/fuse is missing", "modprobe fuse"),
    }
}

fn fusermount(host: &HostFacts) -> Judged {
    if host.has_fusermount {
        Judged::ok("fusermount3 is installed")
    } else if host.is_root {
        Judged::ok("root needs none")
    } else {
        Judged::warning("fusermount3 is not installed", "apt-get install fuse3")
    }
}

fn fuse_uring(host: &HostFacts) -> Judged {
    match host.fuse_uring {
        Some(true) => Judged::ok("enabled"),
        Some(false) => Judged::warning(
            "the kernel has FUSE over io_uring, and it is off",
            "echo 1 > /sys/module/fuse/parameters/enable_uring; \
             echo 'options fuse enable_uring=1' > /etc/modprobe.d/pagemesh-fuse.conf",
        ),
        None if version(&host.kernel) >= Some(KERNEL_URING) => {
            Judged::ok("the module fuse is not loaded, or was built without it")
        }
        None => Judged::ok("the kernel has none; mounts read and write /dev/fuse"),
    }
}

fn shmem(host: &HostFacts) -> Judged {
    match host.shmem_huge.as_deref() {
        Some(word @ ("never" | "deny")) => Judged::warning(
            format!("shmem_enabled is {word}"),
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        ),
        Some(word) => Judged::ok(format!("shmem_enabled is {word}")),
        None => Judged::ok("the kernel has no transparent huge pages"),
    }
}

fn huge_tmpfs(host: &HostFacts) -> Judged {
    if let Some(dir) = host.huge_tmpfs.first() {
        return Judged::ok(format!("{} has huge pages", dir.display()));
    }
    let fix = "mount -t tmpfs -o huge=always,size=16G tmpfs /mnt/huge";
    Judged(
        Finding::Ok,
        "no tmpfs has huge pages".into(),
        Some(fix.into()),
    )
}

fn dax(host: &HostFacts) -> Judged {
    if host.dax_devices.is_empty() {
        Judged::ok("no DAX device; pools are of class file-sync or process")
    } else {
        Judged::ok(host.dax_devices.join(", "))
    }
}

fn memlock(host: &HostFacts) -> Judged {
    match host.memlock_bytes {
        None => Judged::ok("no limit"),
        Some(bytes) if bytes >= MEMLOCK_MIN_BYTES => Judged::ok(format!("{} MiB", bytes >> 20)),
        Some(bytes) => Judged::warning(
            format!(
                "{} KiB, less than {} MiB",
                bytes >> 10,
                MEMLOCK_MIN_BYTES >> 20
            ),
            "ulimit -l unlimited; a unit: LimitMEMLOCK=infinity",
        ),
    }
}

fn open_files(host: &HostFacts) -> Judged {
    let fix = "ulimit -n 65536; a unit: LimitNOFILE=65536";
    match host.open_files {
        None => Judged::ok("no limit"),
        Some(count) if count >= OPEN_FILES_WANTED => Judged::ok(format!("{count} descriptors")),
        Some(count) if count >= OPEN_FILES_MIN => Judged::warning(
            format!("{count} descriptors, less than {OPEN_FILES_WANTED}"),
            fix,
        ),
        Some(count) => Judged::error(
            format!("{count} descriptors, less than {OPEN_FILES_MIN}"),
            fix,
        ),
    }
}

fn port_state(port: u16, state: &PortState) -> Judged {
    let fix =
        format!("ss -ltnp 'sport = :{port}'; end that process, or set another port with --listen");
    match state {
        PortState::Free => Judged::ok("free"),
        PortState::Ours => Judged::ok("pagemesh listens there"),
        PortState::Taken(Some(program)) => Judged::error(format!("{program} listens there"), fix),
        PortState::Taken(None) => Judged::error("another program listens there", fix),
        PortState::Unknown(cause) => Judged::warning(format!("cannot be checked: {cause}"), fix),
    }
}

fn clock(host: &HostFacts) -> Judged {
    let fix = "apt-get install chrony, or: timedatectl set-ntp true";
    match host.clock {
        Clock::Synchronised => Judged::ok("synchronised"),
        Clock::Unsynchronised => Judged::warning("not synchronised", fix),
        Clock::Unknown => Judged::warning("no service reports the state of the clock", fix),
    }
}

fn shm(host: &HostFacts) -> Judged {
    let fix = "mount -o remount,size=50% /dev/shm, or: pagemesh down --dir DIR --remove";
    match host.shm_free_bytes {
        None => Judged::error("/dev/shm is missing", "mount -t tmpfs tmpfs /dev/shm"),
        Some(free) if free >= SHM_WANTED_BYTES => Judged::ok(format!("{} MiB free", free >> 20)),
        Some(free) if free >= SHM_MIN_BYTES => {
            Judged::warning(format!("{} MiB free", free >> 20), fix)
        }
        Some(free) => Judged::error(format!("{} MiB free", free >> 20), fix),
    }
}

fn key(host: &HostFacts) -> Judged {
    match &host.key {
        KeyFacts::Unnamed => Judged::ok("no key file is named"),
        KeyFacts::Usable(path) => Judged::ok(format!("{} is private", path.display())),
        KeyFacts::Refused { path, cause } => {
            let path = path.display();
            let fix = format!("chown pagemesh {path}; chmod 600 {path}");
            Judged::error(cause, fix)
        }
    }
}

fn manager(host: &HostFacts) -> Judged {
    match &host.manager {
        None => Judged::ok("no manager is named"),
        Some((url, None)) => Judged::ok(format!("{url} answers")),
        Some((_, Some(cause))) => {
            let fix = "systemctl start pagemesh-manager, on its machine; or name it with --manager";
            Judged::error(cause, fix)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::facts::PortFacts;
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
            shmem_huge: Some("advise".into()),
            huge_tmpfs: vec![PathBuf::from("/mnt/huge")],
            dax_devices: vec!["dax0.0".into()],
            memlock_bytes: None,
            open_files: Some(65536),
            ports: vec![PortFacts {
                number: 7070,
                state: PortState::Free,
            }],
            clock: Clock::Synchronised,
            shm_free_bytes: Some(1 << 30),
            key: KeyFacts::Usable("/etc/pagemesh/key".into()),
            manager: Some(("http://10.0.0.1:7070".into(), None)),
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
        judges("kernel", Ok, |host| host.kernel = "5.10".into());
        for old in ["5.4.0", "4.19.1", "plan9", ""] {
            judges("kernel", Warning, |host| host.kernel = old.into());
        }
        for state in [DeviceAccess::Absent, DeviceAccess::Forbidden] {
            judges("fuse", Warning, |host| host.fuse_device = state);
        }
        judges("fusermount", Warning, |host| host.has_fusermount = false);
        judges("fusermount", Ok, |host| {
            (host.has_fusermount, host.is_root) = (false, true);
        });
        judges("io_uring", Warning, |host| host.fuse_uring = Some(false));
        judges("io_uring", Ok, |host| host.fuse_uring = None);
    }

    #[test]
    fn memory_is_judged() {
        for word in ["never", "deny"] {
            judges("thp", Warning, |host| host.shmem_huge = Some(word.into()));
        }
        judges("thp", Ok, |host| host.shmem_huge = None);
        judges("hugepages", Ok, |host| host.huge_tmpfs = vec![]);
        judges("dax", Ok, |host| host.dax_devices = vec![]);
        judges("memlock", Ok, |host| {
            host.memlock_bytes = Some(MEMLOCK_MIN_BYTES)
        });
        judges("memlock", Warning, |host| {
            host.memlock_bytes = Some(8 << 20)
        });
        judges("shm", Warning, |host| {
            host.shm_free_bytes = Some(SHM_MIN_BYTES)
        });
        judges("shm", Error, |host| host.shm_free_bytes = Some(0));
        judges("shm", Error, |host| host.shm_free_bytes = None);
    }

    #[test]
    fn limits_ports_and_clock_are_judged() {
        judges("open-files", Ok, |host| host.open_files = None);
        judges("open-files", Warning, |host| {
            host.open_files = Some(OPEN_FILES_MIN)
        });
        judges("open-files", Error, |host| host.open_files = Some(256));
        judges("port-7070", Ok, |host| {
            host.ports[0].state = PortState::Ours
        });
        for taken in [Some("nginx".to_owned()), None] {
            judges("port-7070", Error, |host| {
                host.ports[0].state = PortState::Taken(taken)
            });
        }
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
        judges("manager", Ok, |host| host.manager = None);
        judges("manager", Error, |host| {
            host.manager = Some(("http://a:1".into(), Some("no answer".into())));
        });
    }
}
