//! The generated pages of the book, `docs/reference`. Tests compare them with the source; this task
//! lets the same tests write them.

use crate::cargo;
use anyhow::bail;

/// Each package with generated pages, and the options that select its tests.
const SUITES: [(&str, [&str; 3]); 2] = [
    ("pagemesh", ["--bin", "pagemesh", "reference"]),
    ("xtask", ["--test", "limits", "page_of_limits"]),
];

pub(crate) fn write() -> anyhow::Result<()> {
    for (package, tests) in SUITES {
        let mut command = cargo();
        command
            .args(["test", "--quiet", "--locked", "--package", package])
            .args(tests)
            .env("PAGEMESH_WRITE_REFERENCE", "1");
        if !command.status()?.success() {
            bail!("the pages of {package} cannot be generated; the cause is above");
        }
    }
    Ok(())
}
