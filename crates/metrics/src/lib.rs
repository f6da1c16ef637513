//! Metrics for Prometheus: the names, the sums behind them, the text, and a small HTTP responder.
//!
//! A program fills a [`MetricPage`] at each request, and nothing counts between two requests but the meters that
//! exist anyway ([`pagemesh_telemetry`]).
//!
//! Invariants:
//! - the [`catalogue`] is the only place with names, labels and help texts, so a page has no metric that the
//!   documents lack;
//! - a page has a bounded number of series: volumes are labelled up to a limit, and the rest is one series;
//! - counters never go back while the program runs. A volume that loses its label ends its series.

mod busiest;
pub mod catalogue;
mod op_sums;
mod page;
mod responder;

pub use busiest::BusiestSeries;
pub use catalogue::{Metric, MetricKind};
pub use op_sums::OpSums;
pub use page::{MetricPage, OpMetrics};
pub use responder::{
    BoundResponder, CONNECTION_TIMEOUT, CONNECTIONS_MAX, HEAD_BYTES_MAX, Responder, ResponderError,
};

/// The media type of a page.
pub use prometheus_client::encoding::prometheus_text::CONTENT_TYPE;
