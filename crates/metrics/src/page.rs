//! The values of one answer, and their text.

use super::catalogue::{Metric, MetricKind};
use super::op_sums::{KindSums, OpSums, seconds};
use pagemesh_telemetry::{MediaBytes, OpKind, Stage};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use std::fmt;

/// The labels of a sample, in the order of [`Metric::labels`].
type Labels = Vec<(&'static str, String)>;

/// The values of one answer. Samples of one metric stand together, in the order of their first use.
#[derive(Clone, Debug, Default)]
pub struct MetricPage {
    families: Vec<(&'static Metric, Vec<(Labels, Value)>)>,
}

/// The value of a sample.
#[derive(Clone, Debug)]
enum Value {
    Whole(u64),
    Real(f64),
    Latency(Box<KindSums>),
    Histogram(f64, Vec<(f64, u64)>),
}

/// The metrics of operations. Each has the label `kind` after the others, and the stages `stage` after it.
#[derive(Clone, Copy, Debug)]
pub struct OpMetrics {
    /// All operations.
    pub operations: &'static Metric,
    /// The bytes of all operations.
    pub bytes: &'static Metric,
    /// The latency of the timed operations.
    pub latency: Option<&'static Metric>,
    /// The time of the timed operations by stage.
    pub stages: Option<&'static Metric>,
}

impl MetricPage {
    /// Adds a sample with a whole number.
    ///
    /// # Panics
    /// In debug builds, if the number of label values differs from the metric's.
    pub fn add(&mut self, metric: &'static Metric, labels: &[&str], value: impl TryInto<u64>) {
        let value = value.try_into().unwrap_or(u64::MAX);
        self.push(metric, labels, Value::Whole(value));
    }

    /// Adds a sample with a real number, as of seconds.
    pub fn add_real(&mut self, metric: &'static Metric, labels: &[&str], value: f64) {
        self.push(metric, labels, Value::Real(value));
    }

    /// Adds a sample for each possible state: 1 for the present one, 0 for the others.
    pub fn add_state(
        &mut self,
        metric: &'static Metric,
        labels: &[&str],
        states: &[&str],
        present: &str,
    ) {
        for state in states {
            let labels: Vec<&str> = labels.iter().chain([state]).copied().collect();
            self.add(metric, &labels, u64::from(*state == present));
        }
    }

    /// Adds sums of operations.
    pub fn add_operations(&mut self, metrics: OpMetrics, labels: &[&str], sums: &OpSums) {
        for kind in OpKind::ALL {
            let of = sums.of(kind);
            let labels: Vec<&str> = labels.iter().copied().chain([kind.name()]).collect();
            self.add(metrics.operations, &labels, of.ops);
            self.add(metrics.bytes, &labels, of.bytes);
            if let Some(latency) = metrics.latency {
                self.push(latency, &labels, Value::Latency(Box::new(of.clone())));
            }
            if let Some(stages) = metrics.stages {
                for stage in Stage::ALL {
                    let labels: Vec<&str> = labels.iter().copied().chain([stage.name()]).collect();
                    self.add_real(stages, &labels, seconds(of.stages_ns[stage as usize]));
                }
            }
        }
    }

    /// Adds a histogram: the sum of all values, and upper bounds with the number of values between each and the one before.
    /// The last bound is infinite.
    pub fn add_histogram(
        &mut self,
        metric: &'static Metric,
        labels: &[&str],
        sum: f64,
        buckets: Vec<(f64, u64)>,
    ) {
        self.push(metric, labels, Value::Histogram(sum, buckets));
    }

    /// Adds the bytes written to a medium. The metric's last label is their kind.
    pub fn add_media(&mut self, metric: &'static Metric, labels: &[&str], media: MediaBytes) {
        for (kind, bytes) in media.by_kind() {
            let labels: Vec<&str> = labels.iter().copied().chain([kind]).collect();
            self.add(metric, &labels, bytes);
        }
    }

    /// The page as text (Prometheus text format, version 0.0.4).
    ///
    /// # Errors
    /// Never: a text takes every sample.
    pub fn text(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        prometheus_client::encoding::prometheus_text::encode(&mut text, &registry)?;
        Ok(text)
    }

    fn push(&mut self, metric: &'static Metric, values: &[&str], value: Value) {
        debug_assert_eq!(metric.labels.len(), values.len(), "labels of {metric:?}");
        let values = values.iter().map(|value| (*value).to_owned());
        let labels = metric.labels.iter().copied().zip(values).collect();
        let known = self
            .families
            .iter()
            .position(|(it, _)| std::ptr::eq(*it, metric));
        let at = known.unwrap_or_else(|| {
            self.families.push((metric, Vec::new()));
            self.families.len() - 1
        });
        self.families[at].1.push((labels, value));
    }
}

impl Collector for MetricPage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (metric, samples) in &self.families {
            let kind = match metric.kind {
                MetricKind::Counter => MetricType::Counter,
                MetricKind::Gauge => MetricType::Gauge,
                MetricKind::Histogram => MetricType::Histogram,
            };
            let mut family =
                encoder.encode_descriptor(metric.name_of_family(), metric.help, None, kind)?;
            for (labels, value) in samples {
                encode_value(metric.kind, value, family.encode_family(labels)?)?;
            }
        }
        Ok(())
    }
}

fn encode_value(
    kind: MetricKind,
    value: &Value,
    mut encoder: MetricEncoder<'_>,
) -> Result<(), fmt::Error> {
    match (kind, value) {
        (_, Value::Latency(sums)) => encoder.encode_histogram::<NoLabelSet>(
            seconds(sums.time_ns()),
            sums.timed(),
            &sums.buckets(),
            None,
        ),
        (_, Value::Histogram(sum, buckets)) => {
            let count = buckets.iter().map(|(_, count)| count).sum();
            let finite = buckets.iter().filter(|(bound, _)| bound.is_finite());
            let finite: Vec<_> = finite.copied().collect();
            encoder.encode_histogram::<NoLabelSet>(*sum, count, &finite, None)
        }
        (MetricKind::Counter, Value::Whole(value)) => ConstCounter::new(*value).encode(encoder),
        (MetricKind::Counter, Value::Real(value)) => ConstCounter::new(*value).encode(encoder),
        (_, Value::Whole(value)) => ConstGauge::new(*value).encode(encoder),
        (_, Value::Real(value)) => ConstGauge::new(*value).encode(encoder),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::client;
    use pagemesh_telemetry::{ChannelMeter, StageTimes};

    #[test]
    fn page_has_help_type_and_escaped_labels() {
        let mut page = MetricPage::default();
        page.add(&client::SIZE_BYTES, &["a\"b\\c\nd"], 5_u64);
        let text = page.text().expect("a text");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[0].starts_with("# HELP pagemesh_client_volume_size_bytes "));
        assert_eq!(lines[1], "# TYPE pagemesh_client_volume_size_bytes gauge");
        assert_eq!(
            lines[2],
            r#"pagemesh_client_volume_size_bytes{volume="a\"b\\c\nd"} 5"#
        );
    }

    #[test]
    fn operations_are_counters_and_histograms_in_seconds() {
        let meter = ChannelMeter::default();
        meter.count(OpKind::Write, 4096);
        meter.record(OpKind::Write, &StageTimes([0, 0, 0, 0, 1_500, 0]));
        let mut page = MetricPage::default();
        page.add_operations(client::OPERATIONS, &["v"], &OpSums::from(&meter.totals()));
        let text = page.text().expect("a text");
        for line in [
            r#"pagemesh_client_operations_total{volume="v",kind="write"} 1"#,
            r#"pagemesh_client_operation_bytes_total{volume="v",kind="write"} 4096"#,
            r#"pagemesh_client_operation_latency_seconds_count{volume="v",kind="write"} 1"#,
            r#"pagemesh_client_operation_latency_seconds_bucket{volume="v",kind="write",le="+Inf"} 1"#,
            r#"pagemesh_client_stage_seconds_total{volume="v",kind="read",stage="queue"} 0"#,
        ] {
            assert!(
                text.lines().any(|it| it.starts_with(line)),
                "{line}\n{text}"
            );
        }
        let families = text.lines().filter(|line| line.starts_with("# TYPE"));
        assert_eq!(families.count(), 4, "{text}");
    }
}
