//! The judgement of a machine's facts.
//!
//! Invariant: pure. Each check reads `HostFacts` alone, so that a test has a case for each verdict.

use super::facts::{Clock, DeviceAccess, HostFacts, KeyFacts, ManagerFacts};
use super::installed::Limits;
use super::ports::PortState;
use serde::Serialize;

/// The oldest kernel: a mount refuses a FUSE older than 7.31, which is of Linux 5.4, and a brick identifies the
/// processes of its clients by pidfd_open(2), of Linux 5.3.
const KERNEL_MIN: (u32, u32) = (5, 4);
/// The oldest kernel without a limit: pidfd_getfd(2) connects direct clients of other network namespaces from Linux
/// 5.6 on, and utimensat(2) with AT_EMPTY_PATH notifies watchers from 5.8 on.
const KERNEL_WANTED: (u32, u32) = (5, 8);
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

    /// A usual state that could be better.
    fn advice(text: impl Into<String>, fix: impl Into<String>) -> Judged {
        Judged(Finding::Ok, text.into(), Some(fix.into()))
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
            "mounts need FUSE 7.31 (Linux 5.4); direct clients in other network namespaces need pidfd_getfd (5.6), \
             and watchers of direct writes need utimensat by descriptor (5.8)",
        ),
        fuse_device(host).check(
            "fuse",
            "`pagemesh mount` opens /dev/fuse; bricks and exports do not",
        ),
        fusermount(host).check(
            "fusermount",
            "users other than root mount through fusermount3",
        ),
        io_uring(host).check(
            "io_uring",
            "bricks use it for requests to disks, and mounts for FUSE where the kernel has that",
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
    checks.extend(config(host));
    for port in &host.ports {
        let reason = "the configuration listens there, or the shipped one";
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
        Some(found) if found >= KERNEL_WANTED => Judged::ok(release),
        Some(found) if found >= KERNEL_MIN => {
            Judged::warning(older_than(release, KERNEL_WANTED), KERNEL_FIX)
        }
        Some(_) => Judged::error(older_than(release, KERNEL_MIN), KERNEL_FIX),
        None => Judged::warning(format!("'{release}' is no known version"), "uname -r"),
    }
}

/// The way to a newer kernel.
const KERNEL_FIX: &str =
    "install a kernel with long-term support: apt-get install linux-image-amd64";

fn older_than(release: &str, (major, minor): (u32, u32)) -> String {
    format!("{release} is older than {major}.{minor}")
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

/// The way to io_uring for all users.
const URING_FIX: &str = "sysctl kernel.io_uring_disabled=0; \
     echo kernel.io_uring_disabled=0 > /etc/sysctl.d/60-pagemesh.conf";

fn io_uring(host: &HostFacts) -> Judged {
    match (host.io_uring_disabled.as_deref(), &host.io_uring_refusal) {
        (Some("2"), _) => {
            return Judged::warning(
                "kernel.io_uring_disabled is 2: a disk gets one request of a connection at a time, and mounts read and \
                 write /dev/fuse",
                URING_FIX,
            );
        }
        (Some("1"), _) => {
            return Judged::warning(
                "kernel.io_uring_disabled is 1: bricks of users other than root give a disk one request of a \
                 connection at a time",
                URING_FIX,
            );
        }
        (_, Some(cause)) => {
            return Judged::warning(
                format!(
                    "the system refuses it: {cause}; a disk gets one request of a connection at a time"
                ),
                "permit io_uring_setup in the seccomp profile of the container; before Linux 5.12: ulimit -l unlimited",
            );
        }
        _ => {}
    }
    match host.fuse_uring {
        Some(true) => Judged::ok("enabled"),
        // The default of the kernel.
        Some(false) => Judged::advice(
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
        // The default of the kernel.
        Some("never") => Judged::advice("shmem_enabled is never", SHMEM_FIX),
        Some("deny") => Judged::warning("shmem_enabled is deny", SHMEM_FIX),
        Some(word) => Judged::ok(format!("shmem_enabled is {word}")),
        None => Judged::ok("the kernel has no transparent huge pages"),
    }
}

/// The way to huge pages for pools in memory.
const SHMEM_FIX: &str = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled";

fn huge_tmpfs(host: &HostFacts) -> Judged {
    if let Some(dir) = host.huge_tmpfs.first() {
        return Judged::ok(format!("{} has huge pages", dir.display()));
    }
    let fix = "mount -t tmpfs -o huge=always,size=16G tmpfs /mnt/huge";
    Judged::advice("no tmpfs has huge pages", fix)
}

fn dax(host: &HostFacts) -> Judged {
    if host.dax_devices.is_empty() {
        Judged::ok("no DAX device; pools are of class file-sync or process")
    } else {
        Judged::ok(host.dax_devices.join(", "))
    }
}

/// The place of limits, for a text.
fn place_of(limits: Limits) -> &'static str {
    match limits.is_of_units {
        true => "in the units",
        false => "in this shell; the units have their own",
    }
}

fn memlock(host: &HostFacts) -> Judged {
    let place = place_of(host.limits);
    let fix = "ulimit -l unlimited; a unit: LimitMEMLOCK=infinity";
    match host.limits.memlock_bytes {
        None => Judged::ok("no limit"),
        Some(bytes) => {
            let text = format!("{} KiB {place}", bytes >> 10);
            let is_enough = bytes >= MEMLOCK_MIN_BYTES;
            // A shell has 8 MiB by default. Without io_uring nothing is locked.
            let matters = host.limits.is_of_units || host.fuse_uring == Some(true);
            match (is_enough, matters) {
                (true, _) => Judged::ok(text),
                (false, true) => Judged::warning(text, fix),
                (false, false) => Judged::advice(text, fix),
            }
        }
    }
}

fn open_files(host: &HostFacts) -> Judged {
    let place = place_of(host.limits);
    let fix = "ulimit -n 65536; a unit: LimitNOFILE=65536";
    let Some(count) = host.limits.open_files else {
        return Judged::ok("no limit");
    };
    let text = format!("{count} descriptors {place}");
    if count >= OPEN_FILES_WANTED {
        Judged::ok(text)
    } else if count < OPEN_FILES_MIN {
        Judged::error(text, fix)
    } else if host.limits.is_of_units {
        Judged::warning(text, fix)
    } else {
        // The default of a shell.
        Judged::advice(text, fix)
    }
}

/// A check of all configuration files if they are valid, otherwise of each that is not.
fn config(host: &HostFacts) -> Vec<Check> {
    let reason =
        "a daemon refuses an invalid configuration file, and so do commands with client.toml";
    let wrong = host.config_files.iter().filter_map(|file| {
        let cause = file.content.as_ref().err()?;
        let fix = format!("edit {}", file.path.display());
        let name = file.path.file_stem().unwrap_or_default().to_string_lossy();
        Some(Judged::error(cause, fix).check(format!("config-{name}"), reason))
    });
    let wrong: Vec<Check> = wrong.collect();
    if !wrong.is_empty() {
        return wrong;
    }
    let text = match host.config_files.len() {
        0 => "no configuration in /etc/pagemesh".to_owned(),
        count => format!("{count} files in /etc/pagemesh are valid"),
    };
    vec![Judged::ok(text).check("config", reason)]
}

fn port_state(port: u16, state: &PortState) -> Judged {
    let fix =
        format!("ss -ltnp 'sport = :{port}'; end that process, or set another port with --listen");
    match state {
        PortState::Free => Judged::ok("free"),
        PortState::Ours => Judged::ok("pagemesh listens there"),
        PortState::Taken(program) => Judged::error(format!("{program} listens there"), fix),
        PortState::Unknown(cause) => {
            let fix = format!("as root: ss -ltnp 'sport = :{port}'");
            Judged::warning(format!("cannot be checked: {cause}"), fix)
        }
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
        KeyFacts::Unseen(path) => Judged::warning(
            format!(
                "{} cannot be read by this user, so it is not checked",
                path.display()
            ),
            "sudo pagemesh doctor",
        ),
        KeyFacts::Refused { path, cause } => {
            let path = path.display();
            let fix = format!("chown pagemesh {path}; chmod 600 {path}");
            Judged::error(cause, fix)
        }
    }
}

fn manager(host: &HostFacts) -> Judged {
    match &host.manager {
        ManagerFacts::Unnamed => Judged::ok("no manager is named"),
        ManagerFacts::Answers(url) => Judged::ok(format!("{url} answers")),
        ManagerFacts::NotAsked(url) => Judged::warning(
            format!("{url} was not asked, because this user may not read the key"),
            "sudo pagemesh doctor",
        ),
        ManagerFacts::Fails(cause) => {
            let fix = "systemctl start pagemesh-manager, on its machine; or name it with --manager";
            Judged::error(cause, fix)
        }
    }
}

#[cfg(test)]
mod tests;
