//! `pagemesh brick`.

pub mod list;
pub mod serve;
