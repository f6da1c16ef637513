//! The commands: one module for each, with a folder where it has parts.

pub mod bench;
pub mod brick;
pub mod down;
pub mod exec;
pub mod export;
pub mod fs;
pub mod manager;
pub mod mount;
pub mod pool;
pub mod replica;
pub mod status;
pub mod umount;
pub mod up;
pub mod volume;
