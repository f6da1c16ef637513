//! Workloads, peers and reports.
