//! Exceptions to the rules. A size may shrink and may not grow.

/// Files of more than 600 lines.
pub const FILES: &[(&str, usize)] = &[];

/// Functions of more than 60 lines.
pub const FUNCTIONS: &[(&str, usize)] = &[];

/// Test names of more than 60 characters.
pub const TEST_NAMES: &[(&str, usize)] = &[];

/// Test names that start with an article or a pronoun.
pub const TEST_SUBJECTS: &[(&str, usize)] = &[];

/// Crates and folders with a circle of more than three modules.
pub const CIRCLES: &[(&str, usize)] = &[];
