//! Cases of RFC 1813, for any server of NFSv3.
//!
//! Each [`Case`] has a name of the form `procedure.rule` and a directory of its own on the server.
//! The RFC leaves several results to the server; a case accepts each of them. A case that a server
//! cannot run is skipped with a reason: special files that it does not make, or a privileged caller
//! that it squashes.
//!
//! The cases use the client of `pagemesh-nfs-client`, which shares no code with the server.

#![deny(unsafe_code)]
#![warn(missing_docs)]

mod cases;
mod expected;
mod fixture;
mod report;

pub use cases::all;
pub use expected::ExpectedFailures;
pub use fixture::{CaseResult, Fixture, Problem, ServerUnderTest};
pub use report::{CaseReport, Report, Verdict};

/// One rule, and its check.
pub struct Case {
    /// `procedure.rule`.
    pub name: String,
    check: Box<dyn Fn(&mut Fixture) -> CaseResult + Send + Sync>,
}

impl Case {
    fn new(
        name: impl Into<String>,
        check: impl Fn(&mut Fixture) -> CaseResult + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            check: Box::new(check),
        }
    }
}

/// Runs the cases with `only` in their names, one after the other.
///
/// # Errors
/// If the server cannot be reached, or the callers cannot make directories in the export.
pub fn run(
    server: &ServerUnderTest,
    only: &str,
    expected: &ExpectedFailures,
) -> Result<Report, Problem> {
    let mut cases = Vec::new();
    for case in all().iter().filter(|case| case.name.contains(only)) {
        let mut fixture = Fixture::new(server, &case.name)?;
        let result = (case.check)(&mut fixture);
        cases.push(CaseReport {
            name: case.name.clone(),
            verdict: expected.verdict(&case.name, result),
        });
    }
    Ok(Report { cases })
}
