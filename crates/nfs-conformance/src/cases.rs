//! The cases, by subject.

mod access;
mod attributes;
mod bad_input;
mod commit;
mod create;
mod filesystem;
mod handles;
mod link;
mod listing;
mod lookup;
mod mount;
mod name_rules;
mod nodes;
mod permissions;
mod read;
mod remove;
mod rename;
mod rpc;
mod wcc;
mod write;

use crate::Case;
use crate::fixture::{CaseResult, Fixture};

/// The check of a case.
type Check = fn(&mut Fixture) -> CaseResult;

/// A subject: the first part of the names of its cases, the second parts, and the checks.
type Subject = (&'static str, &'static [(&'static str, Check)]);

const SUBJECTS: &[Subject] = &[
    ("mount", mount::CASES),
    ("rpc", rpc::CASES),
    ("getattr", attributes::GETATTR),
    ("setattr", attributes::SETATTR),
    ("lookup", lookup::LOOKUP),
    ("readlink", lookup::READLINK),
    ("access", access::CASES),
    ("read", read::CASES),
    ("write", write::CASES),
    ("commit", commit::CASES),
    ("create", create::CREATE),
    ("mkdir", create::MKDIR),
    ("symlink", nodes::SYMLINK),
    ("mknod", nodes::MKNOD),
    ("remove", remove::REMOVE),
    ("rmdir", remove::RMDIR),
    ("rename", rename::CASES),
    ("link", link::CASES),
    ("readdir", listing::READDIR),
    ("readdirplus", listing::READDIRPLUS),
    ("fsstat", filesystem::FSSTAT),
    ("fsinfo", filesystem::FSINFO),
    ("pathconf", filesystem::PATHCONF),
    ("wcc", wcc::CASES),
    ("permissions", permissions::CASES),
    ("bad_input", bad_input::CASES),
];

/// All cases.
#[must_use]
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    for (subject, checks) in SUBJECTS {
        for (rule, check) in *checks {
            cases.push(Case::new(format!("{subject}.{rule}"), *check));
        }
    }
    handles::add(&mut cases);
    name_rules::add(&mut cases);
    cases
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_of_cases_are_unique() {
        let mut names: Vec<_> = super::all().into_iter().map(|case| case.name).collect();
        let count = names.len();
        assert!(count > 250, "{count}");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
