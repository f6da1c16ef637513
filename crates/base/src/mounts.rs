//! Mounts of pagemesh, from the kernel's list, proc(5).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// The file system type that the kernel shows.
pub const FS_TYPE: &str = "fuse.pagemesh";
/// Octal digits of an escaped byte in mountinfo.
const ESCAPE_DIGITS: usize = 3;

/// A mount of pagemesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// `major:minor`.
    pub device: String,
    /// Where it is mounted.
    pub dir: PathBuf,
    /// The user of the mounting process. The kernel vouches for it.
    pub user: Option<u32>,
    /// Options of the mount, and then of its file system. One of both may be `rw` and the other `ro`.
    pub options: Vec<String>,
}

impl MountEntry {
    /// Whether the kernel shows an option.
    #[must_use]
    pub fn has_option(&self, name: &str) -> bool {
        self.options.iter().any(|option| option == name)
    }
}

/// All mounts of pagemesh in this process's mount namespace, in the order of mounting.
///
/// # Errors
/// When the kernel's list cannot be read.
pub fn list_mounts() -> io::Result<Vec<MountEntry>> {
    Ok(parse_mountinfo(&std::fs::read("/proc/self/mountinfo")?))
}

/// The same from the text of a mountinfo, possibly another process's.
#[must_use]
pub fn parse_mountinfo(mountinfo: &[u8]) -> Vec<MountEntry> {
    let lines = mountinfo.split(|&byte| byte == b'\n');
    lines.filter_map(parse_mountinfo_line).collect()
}

/// A line of mountinfo.
fn parse_mountinfo_line(line: &[u8]) -> Option<MountEntry> {
    let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let dash = words.iter().position(|word| *word == b"-")?;
    if *words.get(dash + 1)? != FS_TYPE.as_bytes() {
        return None;
    }
    let of_file_system = words.last().filter(|_| words.len() > dash + 3);
    let options = [words.get(5), of_file_system].into_iter().flatten();
    let options: Vec<_> = options
        .flat_map(|options| options.split(|&byte| byte == b','))
        .map(|option| String::from_utf8_lossy(option).into_owned())
        .collect();
    Some(MountEntry {
        device: String::from_utf8(words.get(2)?.to_vec()).ok()?,
        dir: OsString::from_vec(unescape(words.get(4)?)).into(),
        user: user_of_options(&options),
        options,
    })
}

/// The user in the options of a FUSE file system.
fn user_of_options(options: &[String]) -> Option<u32> {
    let mut users = options
        .iter()
        .filter_map(|option| option.strip_prefix("user_id="));
    users.next()?.parse().ok()
}

fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&byte, after)) = rest.split_first() {
        let digits = after
            .get(..ESCAPE_DIGITS)
            .and_then(|it| std::str::from_utf8(it).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) if byte == b'\\' => {
                bytes.push(code);
                rest = &after[ESCAPE_DIGITS..];
            }
            _ => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn mounts_of_other_file_systems_are_skipped() {
        let line = b"98 29 0:53 / /a\\040b\\134 rw,nosuid - fuse.pagemesh pagemesh:v rw,user_id=7,group_id=0";
        let found = parse_mountinfo_line(line).expect("one of ours");
        assert_eq!((found.device.as_str(), found.user), ("0:53", Some(7)));
        assert_eq!(found.dir.as_os_str().as_bytes(), b"/a b\\");
        assert!(found.has_option("nosuid") && !found.has_option("nodev"));
        assert!(parse_mountinfo_line(b"98 29 0:53 / /a rw - fuse.sshfs x rw").is_none());
        assert!(parse_mountinfo_line(b"").is_none());
        assert!(parse_mountinfo_line(b"98 - fuse.pagemesh").is_none());
    }
}
