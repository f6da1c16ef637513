//! Descriptors in messages.
//!
//! The kernel has not checked a message that is to be sent: each pointer or length may be invalid.
//! So these functions ignore messages until a descriptor was in the table. Afterwards they read
//! only memory that is surely mapped, and no more than the kernel reads; the kernel reports errors.

use super::close::fd_created;
use super::duplicate::share;
use crate::descriptors::table;
use crate::kernel::buffer;
use libc::{c_int, c_uint, cmsghdr, mmsghdr, msghdr};

/// The kernel refuses more messages in one call (UIO_MAXIOV).
const MESSAGES_MAX: usize = 1024;

/// The kernel refuses more control bytes per message, unless an administrator raised the limit
/// (`net.core.optmem_max`, 128 KiB at most by default).
const CONTROL_BYTES_MAX: usize = 1 << 20;

/// Handles a message that may pass descriptors to another process.
#[inline(never)]
pub extern "C" fn before_sendmsg(message: *const msghdr) {
    if !table::is_untouched() {
        for_each_fd(message, |fd| {
            if table::is_ours(fd) {
                share(fd);
            }
        });
    }
}

#[inline(never)]
pub extern "C" fn before_sendmmsg(messages: *const mmsghdr, count: c_uint) {
    for at in 0..(count as usize).min(MESSAGES_MAX) {
        before_sendmsg(messages.wrapping_add(at).cast());
    }
}

/// Handles a message that may have brought descriptors, if it was received.
#[inline(never)]
pub extern "C" fn after_recvmsg(message: *const msghdr, result: isize) {
    if result >= 0 && !table::is_untouched() {
        for_each_fd(message, |fd| {
            fd_created(fd);
        });
    }
}

#[inline(never)]
pub extern "C" fn after_recvmmsg(messages: *const mmsghdr, count: isize) {
    for at in 0..usize::try_from(count).unwrap_or(0).min(MESSAGES_MAX) {
        after_recvmsg(messages.wrapping_add(at).cast(), 0);
    }
}

/// Calls `tell` with the descriptors in a message, up to the first incomplete part.
fn for_each_fd(message: *const msghdr, tell: impl Fn(c_int)) {
    const HEAD: usize = size_of::<cmsghdr>();
    let Some(header) = buffer::read_checked(message) else {
        return;
    };
    let mut part = header.msg_control.cast::<u8>().cast_const();
    let mut left = header.msg_controllen.min(CONTROL_BYTES_MAX);
    while left >= HEAD
        && let Some(found) = buffer::read_checked(part.cast::<cmsghdr>())
        && (HEAD..=left).contains(&found.cmsg_len)
    {
        if found.cmsg_level == libc::SOL_SOCKET && found.cmsg_type == libc::SCM_RIGHTS {
            let fds = part.wrapping_add(HEAD).cast::<c_int>();
            for at in 0..(found.cmsg_len - HEAD) / size_of::<c_int>() {
                let Some(fd) = buffer::read_checked(fds.wrapping_add(at)) else {
                    return;
                };
                tell(fd);
            }
        }
        // Parts are aligned as words are (CMSG_ALIGN).
        let step = found
            .cmsg_len
            .next_multiple_of(size_of::<usize>())
            .min(left);
        part = part.wrapping_add(step);
        left -= step;
    }
}
