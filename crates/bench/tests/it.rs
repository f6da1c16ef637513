//! The tests of the benchmarks are one program, because each program links the crate and its dependencies again.

mod idle;
mod load;
mod nfs;
mod peers;
mod recovery;
mod session;
mod support;
mod sweep;
