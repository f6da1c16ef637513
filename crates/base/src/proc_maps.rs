//! The mappings of processes, proc(5), and the requests to mounts about mapped files.

/// `ioctl` on a file of a mount, without an argument, before the file is mapped: from then on the
/// kernel caches its pages. The caller has the file open, so the request reaches this mount and no
/// other. It returns once no client changes the file past the kernel any more; as `_IO('P', 'M')`.
pub const WILL_MAP_IOCTL: u32 = (b'P' as u32) << 8 | b'M' as u32;

/// `O_ASYNC`. The preload library opens every file with it: the kernel passes the flag to the
/// mount, and it has no other effect on a regular file. The mount asks the kernel for a message
/// whenever a descriptor of such an open file is closed, also past the library (RFD 022). It also
/// has the kernel read and write the file past its page cache (RFD 023).
pub const PRELOAD_OPEN_FLAG: u32 = 0o20000;

/// Whether a process has this inode mapped. None: its mappings cannot be read, or it is gone. A
/// process that executed another program has lost its former mappings, and all its other threads.
#[must_use]
pub fn has_mapped(pid: u32, dev: u64, inode: u64) -> Option<bool> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let wanted = (rustix::fs::major(dev), rustix::fs::minor(dev), inode);
    // The file is empty for an ending process and for a kernel thread.
    (!maps.is_empty()).then(|| {
        maps.lines()
            .any(|line| parse_maps_line(line) == Some(wanted))
    })
}

/// Device and inode of a line of `/proc/PID/maps`.
fn parse_maps_line(line: &str) -> Option<(u32, u32, u64)> {
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let hex = |digits| u32::from_str_radix(digits, 16).ok();
    Some((hex(major)?, hex(minor)?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_read() {
        let line = "7f00-7f10 rw-s 00000000 00:1b 4711    /dev/shm/pool (deleted)";
        assert_eq!(parse_maps_line(line), Some((0, 0x1b, 4711)));
        assert_eq!(parse_maps_line("nonsense"), None);
        assert_eq!(has_mapped(std::process::id(), 0, u64::MAX), Some(false));
        assert_eq!(has_mapped(u32::MAX, 0, 1), None);
    }
}
