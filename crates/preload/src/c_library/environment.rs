//! Variables of the environment. They are read only when the library is loaded, before the program
//! runs.

use libc::c_char;
use std::ffi::CStr;

/// The value of an environment variable, or null.
pub fn string(name: &CStr) -> *mut c_char {
    // SAFETY: a string; the environment is only read, before the program runs.
    unsafe { libc::getenv(name.as_ptr()) }
}

/// The value of an environment variable as a number.
pub fn number(name: &CStr) -> Option<u64> {
    text(name)?.parse().ok()
}

/// The value of an environment variable as text.
pub fn text(name: &CStr) -> Option<&'static str> {
    let text = string(name);
    if text.is_null() {
        return None;
    }
    // SAFETY: a string of the environment, read before the program runs.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}
