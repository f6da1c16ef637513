//! The failures that a server is known for, with their reasons.

use crate::fixture::{CaseResult, Problem};
use crate::report::Verdict;
use std::collections::BTreeMap;

/// A list with one line per case: its name, blanks, and the reason. Empty lines and lines that
/// start with `#` are comments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpectedFailures(BTreeMap<String, String>);

impl ExpectedFailures {
    /// The list in a text.
    ///
    /// # Errors
    /// The number of a line without a reason.
    pub fn parse(text: &str) -> Result<Self, usize> {
        let mut reasons = BTreeMap::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (name, reason) = line.split_once(char::is_whitespace).ok_or(at + 1)?;
            reasons.insert(name.to_owned(), reason.trim().to_owned());
        }
        Ok(Self(reasons))
    }

    pub(crate) fn verdict(&self, name: &str, result: CaseResult) -> Verdict {
        match (result, self.0.get(name)) {
            (Ok(()), None) => Verdict::Pass,
            (Ok(()), Some(_)) => Verdict::UnexpectedPass,
            (Err(Problem::Skipped(reason)), _) => Verdict::Skipped(reason),
            (Err(_), Some(reason)) => Verdict::ExpectedFailure(reason.clone()),
            (Err(Problem::Wrong(reason)), None) => Verdict::Fail(reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_failure_is_expected() {
        let text = "# a comment\n\nread.end   the server rounds\n";
        let list = ExpectedFailures::parse(text).expect("a list");
        let wrong = || Err(Problem::Wrong("x".into()));
        let reason = Verdict::ExpectedFailure("the server rounds".into());
        assert_eq!(list.verdict("read.end", wrong()), reason);
        assert_eq!(list.verdict("read.end", Ok(())), Verdict::UnexpectedPass);
        assert_eq!(list.verdict("read", wrong()), Verdict::Fail("x".into()));
        assert_eq!(list.verdict("read", Ok(())), Verdict::Pass);
        assert_eq!(ExpectedFailures::parse("\nread.end"), Err(2));
    }
}
