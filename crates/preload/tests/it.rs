//! The tests of the preload library are one program, because each program links the crate and its dependencies again.

mod binding;
mod data;
mod names;
mod ordinary;
mod processes;
mod support;
