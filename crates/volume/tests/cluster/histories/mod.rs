//! Random histories of a volume, each from a seed.

mod direct_clients;
mod replication;
mod requests;
