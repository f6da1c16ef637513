//! The manager: volumes, placement, epochs, API.
