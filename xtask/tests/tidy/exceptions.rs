//! Exceptions to the rules. A size may shrink and may not grow.

/// Files of more than 600 lines.
pub const FILES: &[(&str, usize)] = &[
    ("crates/fs/src/txn/core.rs", 806),
    ("crates/fs/src/file/write.rs", 842),
    ("crates/fs/src/format/inode.rs", 678),
    ("crates/fs/src/names/namespace.rs", 912),
];

/// Functions of more than 60 lines.
pub const FUNCTIONS: &[(&str, usize)] = &[
    ("crates/fs/src/format/inode.rs::Inode::check", 72),
    ("crates/fs/src/recovery/scan.rs::InodeScan::add_spans", 92),
];

/// Test names of more than 60 characters.
pub const TEST_NAMES: &[(&str, usize)] = &[];

/// Test names that start with an article or a pronoun.
pub const TEST_SUBJECTS: &[(&str, usize)] = &[];

/// Crates and folders with a circle of more than three modules.
pub const CIRCLES: &[(&str, usize)] = &[("crates/fs", 21)];
