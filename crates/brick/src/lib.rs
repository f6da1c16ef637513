//! The daemon around a pool.
