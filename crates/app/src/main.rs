//! The pagemesh command.

fn main() {}
