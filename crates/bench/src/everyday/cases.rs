//! The cases and their bars.

use super::ABSENT_TEXT;
use super::steps::FileStep;
use crate::stats::median_ratio;
use serde::Serialize;

/// One kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EverydayCase {
    /// `tar x` of a tree.
    Tar,
    /// `cp -r` of the tree.
    Copy,
    /// `grep -r` over the tree, for absent text.
    Grep,
    /// `rm -rf` of the tree.
    Remove,
    /// One program creates files of 4 KiB.
    Create,
    /// One program reads the files.
    Read,
    /// One program calls lstat(2) on each file.
    Stat,
    /// One program renames each file.
    Rename,
    /// read(2) of 4 bytes in a row.
    SmallReads,
    /// dbench.
    Dbench,
}

/// All cases, in the order of a round.
pub(super) const CASES: [EverydayCase; 10] = [
    EverydayCase::Tar,
    EverydayCase::Copy,
    EverydayCase::Grep,
    EverydayCase::Remove,
    EverydayCase::Create,
    EverydayCase::Read,
    EverydayCase::Stat,
    EverydayCase::Rename,
    EverydayCase::SmallReads,
    EverydayCase::Dbench,
];

/// Cases that share files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CaseGroup {
    Tree,
    Files,
    SmallReads,
    Dbench,
}

impl CaseGroup {
    pub(super) const ALL: [CaseGroup; 4] = [
        CaseGroup::Tree,
        CaseGroup::Files,
        CaseGroup::SmallReads,
        CaseGroup::Dbench,
    ];
}

/// How a case runs.
pub(super) enum CaseWork {
    /// A program with its arguments. `tar` gets the archive.
    Program(&'static str, &'static [&'static str]),
    Step(FileStep),
    Dbench,
}

impl EverydayCase {
    /// The names of all cases.
    #[must_use]
    pub fn ids() -> Vec<&'static str> {
        CASES.iter().map(|case| case.id()).collect()
    }

    /// The case of this name.
    #[must_use]
    pub fn from_id(id: &str) -> Option<EverydayCase> {
        CASES.into_iter().find(|case| case.id() == id)
    }

    /// Its name on the command line.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            EverydayCase::Tar => "tar",
            EverydayCase::Copy => "cp",
            EverydayCase::Grep => "grep",
            EverydayCase::Remove => "rm",
            EverydayCase::Create => "create",
            EverydayCase::Read => "read",
            EverydayCase::Stat => "stat",
            EverydayCase::Rename => "rename",
            EverydayCase::SmallReads => "small-reads",
            EverydayCase::Dbench => "dbench",
        }
    }

    /// Its name in reports.
    pub(super) fn title(self) -> &'static str {
        match self {
            EverydayCase::Tar => "tar x",
            EverydayCase::Copy => "cp -r",
            EverydayCase::Grep => "grep -r",
            EverydayCase::Remove => "rm -rf",
            EverydayCase::Create => "create 4 KiB files",
            EverydayCase::Read => "read 4 KiB files",
            EverydayCase::Stat => "lstat files",
            EverydayCase::Rename => "rename files",
            EverydayCase::SmallReads => "reads of 4 bytes",
            EverydayCase::Dbench => "dbench",
        }
    }

    pub(super) fn group(self) -> CaseGroup {
        match self {
            EverydayCase::Tar | EverydayCase::Copy | EverydayCase::Grep | EverydayCase::Remove => {
                CaseGroup::Tree
            }
            EverydayCase::Create
            | EverydayCase::Read
            | EverydayCase::Stat
            | EverydayCase::Rename => CaseGroup::Files,
            EverydayCase::SmallReads => CaseGroup::SmallReads,
            EverydayCase::Dbench => CaseGroup::Dbench,
        }
    }

    /// Whether other cases of its group use its files.
    pub(super) fn makes_files(self) -> bool {
        matches!(self, EverydayCase::Tar | EverydayCase::Create)
    }

    pub(super) fn work(self) -> CaseWork {
        match self {
            EverydayCase::Tar => CaseWork::Program("tar", &[]),
            EverydayCase::Copy => CaseWork::Program("cp", &["-r", "tree", "copy"]),
            EverydayCase::Grep => CaseWork::Program("grep", &["-r", ABSENT_TEXT, "tree"]),
            EverydayCase::Remove => CaseWork::Program("rm", &["-rf", "tree"]),
            EverydayCase::Create => CaseWork::Step(FileStep::Create),
            EverydayCase::Read => CaseWork::Step(FileStep::Read),
            EverydayCase::Stat => CaseWork::Step(FileStep::Stat),
            EverydayCase::Rename => CaseWork::Step(FileStep::Rename),
            EverydayCase::SmallReads => CaseWork::Step(FileStep::SmallReads),
            EverydayCase::Dbench => CaseWork::Dbench,
        }
    }

    /// The unit of its figures.
    pub(super) fn unit(self) -> &'static str {
        match self {
            EverydayCase::Dbench => "MB/s",
            _ => "s",
        }
    }

    /// The bar of the mount: how many times slower than ext4 it may be.
    pub(super) fn mount_bar(self) -> f64 {
        match self {
            EverydayCase::SmallReads => 3.0,
            _ => 2.0,
        }
    }

    /// The bar of programs under `exec`: how many times slower than the mount they may be.
    pub(super) fn exec_bar(self) -> Option<f64> {
        (self == EverydayCase::Read).then_some(1.0)
    }

    /// How many times slower one place is than another one: the median of the rounds' ratios.
    pub(super) fn slowness(self, own: &[f64], other: &[f64]) -> Option<f64> {
        match self.unit() {
            // More is faster.
            "MB/s" => median_ratio(other, own),
            _ => median_ratio(own, other),
        }
    }
}

/// Whether a measured slowness meets its bar.
pub(super) fn verdict(measured: f64, bar: f64) -> &'static str {
    match measured <= bar {
        true => "met",
        false => "missed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_found_by_their_names() {
        for case in CASES {
            assert_eq!(EverydayCase::from_id(case.id()), Some(case));
        }
        assert_eq!(EverydayCase::from_id("nothing"), None);
        assert_eq!(EverydayCase::ids().len(), CASES.len());
    }

    #[test]
    fn cases_follow_the_maker_of_their_files() {
        for group in [CaseGroup::Tree, CaseGroup::Files] {
            let first = CASES.iter().find(|case| case.group() == group);
            assert!(first.is_some_and(|case| case.makes_files()), "{first:?}");
        }
    }

    #[test]
    fn slowness_of_rates_and_times_rises_with_slower_places() {
        let (slow_s, fast_s) = ([2.0, 40.0, 2.0], [1.0, 10.0, 1.0]);
        assert_eq!(EverydayCase::Tar.slowness(&slow_s, &fast_s), Some(2.0));
        let (slow_rate, fast_rate) = ([50.0, 10.0, 50.0], [150.0, 90.0, 150.0]);
        let slowness = EverydayCase::Dbench.slowness(&slow_rate, &fast_rate);
        assert_eq!(slowness, Some(3.0));
        assert_eq!(EverydayCase::Tar.slowness(&[], &[]), None);
    }

    #[test]
    fn bar_itself_is_met() {
        for case in CASES {
            assert_eq!(verdict(case.mount_bar(), case.mount_bar()), "met");
            assert_eq!(verdict(case.mount_bar() + 0.01, case.mount_bar()), "missed");
        }
        assert_eq!(EverydayCase::Read.exec_bar(), Some(1.0));
        assert_eq!(EverydayCase::Stat.exec_bar(), None);
    }
}
