//! The results of all cases.

use comfy_table::{Table, presets};
use serde::Serialize;

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "verdict", content = "reason", rename_all = "kebab-case")]
pub enum Verdict {
    /// The server keeps the rule.
    Pass,
    /// The server breaks the rule.
    Fail(String),
    /// The server breaks the rule, and the list of expected failures has a reason.
    ExpectedFailure(String),
    /// The server keeps the rule, although the list of expected failures has it.
    UnexpectedPass,
    /// The server cannot run the case.
    Skipped(String),
}

/// A case and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CaseReport {
    /// The name of the case.
    pub name: String,
    /// The result.
    #[serde(flatten)]
    pub verdict: Verdict,
}

/// The results of all cases, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The cases.
    pub cases: Vec<CaseReport>,
}

impl Report {
    /// The cases that the server fails without a reason in the list of expected failures.
    pub fn failures(&self) -> impl Iterator<Item = &CaseReport> {
        let is_failure = |case: &&CaseReport| matches!(case.verdict, Verdict::Fail(_));
        self.cases.iter().filter(is_failure)
    }

    /// A table with a line for each case that did not simply pass, and the counts of all.
    #[must_use]
    pub fn table(&self) -> String {
        let mut table = Table::new();
        table.load_preset(presets::NOTHING);
        table.set_header(["case", "verdict", "reason"]);
        let mut counts = [0; 5];
        for case in &self.cases {
            let (column, verdict, reason) = match &case.verdict {
                Verdict::Pass => (0, "pass", ""),
                Verdict::Fail(reason) => (1, "FAIL", reason.as_str()),
                Verdict::ExpectedFailure(reason) => (2, "expected failure", reason.as_str()),
                Verdict::UnexpectedPass => (3, "unexpected pass", ""),
                Verdict::Skipped(reason) => (4, "skipped", reason.as_str()),
            };
            counts[column] += 1;
            if column != 0 {
                table.add_row([case.name.as_str(), verdict, reason]);
            }
        }
        let [pass, fail, expected, unexpected, skipped] = counts;
        format!(
            "{table}\n{} cases: {pass} pass, {fail} fail, {expected} expected failures, \
             {unexpected} unexpected passes, {skipped} skipped\n",
            self.cases.len()
        )
    }
}
