//! The options of `mount -o`, mount(8).
//!
//! An option that is not known, or cannot take effect, is refused. Options for mount(8) and systemd are ignored, so that a
//! line of /etc/fstab works here, too.

use pagemesh_base::mounts::MountEntry;
use pagemesh_fuse::MountFlags;

/// The change that an option makes. Later options of a list count.
type ChangeFlags = fn(&mut MountFlags);

/// An option of a list.
#[derive(Clone, Copy, Debug)]
pub struct MountOption(ChangeFlags);

const OPTIONS: [(&str, ChangeFlags); 18] = [
    ("ro", |flags| flags.is_read_only = true),
    ("rw", |flags| flags.is_read_only = false),
    ("dev", |flags| flags.allows_devices = true),
    ("nodev", |flags| flags.allows_devices = false),
    ("suid", |flags| flags.allows_setid = true),
    ("nosuid", |flags| flags.allows_setid = false),
    ("exec", |flags| flags.forbids_programs = false),
    ("noexec", |flags| flags.forbids_programs = true),
    ("sync", |flags| flags.is_sync = true),
    ("async", |flags| {
        (flags.is_sync, flags.is_dirsync) = (false, false);
    }),
    ("dirsync", |flags| flags.is_dirsync = true),
    ("noatime", |flags| flags.is_noatime = true),
    ("atime", |flags| flags.is_noatime = false),
    ("relatime", |flags| flags.is_noatime = false),
    ("nodiratime", |flags| flags.is_nodiratime = true),
    ("diratime", |flags| flags.is_nodiratime = false),
    // Access times reach the disk later than other changes, always.
    ("lazytime", |_| {}),
    ("nolazytime", |_| {}),
];
/// Options that are meant for other programs, or that always hold.
const IGNORED: [&str; 14] = [
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "default_permissions",
    "nostrictatime",
    "silent",
    "loud",
];
const IGNORED_PREFIXES: [&str; 5] = ["x-", "X-", "comment=", "user=", "helper="];

/// Parses one option of a list.
///
/// # Errors
/// A message with the option, if it is not known or not supported.
pub fn parse_option(option: &str) -> Result<MountOption, String> {
    if let Some((_, change)) = OPTIONS.iter().find(|(name, _)| *name == option) {
        return Ok(MountOption(*change));
    }
    let starts = |start: &&str| option.starts_with(*start);
    if option.is_empty() || IGNORED.contains(&option) || IGNORED_PREFIXES.iter().any(starts) {
        return Ok(MountOption(|_| {}));
    }
    Err(match option {
        "strictatime" | "norelatime" => format!(
            "{option} is not supported: the kernel reads cached pages, and programs under exec read files, without the \
             mount; use relatime (the default) or noatime"
        ),
        "remount" => "to change the options of a mount use: mount -o remount,… DIR".into(),
        _ => format!(
            "the option {option} is not known; there are {}",
            known_options()
        ),
    })
}

/// The options with an effect, for people.
pub fn known_options() -> String {
    OPTIONS.map(|(name, _)| name).join(", ")
}

/// The options that hold after these, one after the other.
pub fn apply(mut flags: MountFlags, options: &[MountOption]) -> MountFlags {
    options
        .iter()
        .for_each(|MountOption(change)| change(&mut flags));
    flags
}

/// The options of an existing mount.
pub fn flags_of(entry: &MountEntry) -> MountFlags {
    let all_allowed = MountFlags {
        allows_devices: true,
        allows_setid: true,
        ..MountFlags::default()
    };
    // The kernel shows others, too, and `rw` of the file system beside `ro` of the mount.
    let shown = entry.options.iter().filter(|option| *option != "rw");
    let shown: Vec<_> = shown
        .filter_map(|option| parse_option(option).ok())
        .collect();
    apply(all_allowed, &shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(list: &str) -> Result<MountFlags, String> {
        let options: Result<Vec<_>, _> = list.split(',').map(parse_option).collect();
        Ok(apply(MountFlags::default(), &options?))
    }

    #[test]
    fn later_options_count() {
        let found =
            flags("ro,noatime,dev,sync,defaults,,x-systemd.automount,rw,nodev,noexec,nodiratime");
        let expected = MountFlags {
            is_noatime: true,
            is_nodiratime: true,
            is_sync: true,
            forbids_programs: true,
            ..MountFlags::default()
        };
        assert_eq!(found, Ok(expected));
        assert_eq!(flags("noatime,relatime,sync,async"), flags("defaults"));
    }

    #[test]
    fn refusals_name_the_option() {
        for option in ["strictatime", "what", "RO", "threads=4"] {
            let refused = flags(&format!("ro,{option}")).expect_err("it is refused");
            assert!(refused.contains(option), "{refused}");
        }
    }

    #[test]
    fn options_of_a_mount_are_those_that_the_kernel_shows() {
        let line =
            b"98 29 0:53 / /a ro,nosuid,nodev,relatime - fuse.pagemesh pagemesh:v rw,user_id=0\n";
        let found = pagemesh_base::mounts::parse_mountinfo(line);
        assert_eq!(flags_of(&found[0]), flags("ro").expect("known options"));
    }
}
