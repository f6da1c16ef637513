//! Tests that cannot run here report it, or fail where they must run.

use std::io::Write;

/// Reports on standard error, past the capture of its output, that the calling test does not run,
/// so that it does not count as run. If PAGEMESH_NO_SKIP is set, it fails instead.
pub fn skip(why: &str) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    let must_run = std::env::var_os("PAGEMESH_NO_SKIP").is_some();
    assert!(!must_run, "{test} has to run, and cannot: {why}");
    // The test continues if the message cannot be written.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {test}: {why}");
}
