//! Wire messages, and the transports that carry them.
