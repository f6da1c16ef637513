//! The life of the process: its copies, the programs that it executes, its signals, and its
//! withdrawal from the direct path.

pub mod exec_environment;
pub mod fork;
pub mod ownership;
mod programs;
pub mod signals;
pub mod withdraw;
