//! A volume against models of everything else: the engine, the controller and the channels are
//! the product's, while bricks, manager and network are models in memory ([`world`]).
//!
//! Scenarios are written by hand. Histories are random, with a check of all that was read and
//! acknowledged; each failure names its seed.

mod histories;
mod scenarios;
mod world;
