//! NFSv4.1 (RFC 8881).

pub mod state;
