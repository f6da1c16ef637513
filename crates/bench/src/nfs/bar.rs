//! Bars: the figures that a case must reach. A report has a line for each, and the same in its JSON.

use crate::report::Report;
use serde::Serialize;
use serde_json::json;

/// The side of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BarSide {
    /// The figure must reach the limit.
    AtLeast,
    /// The figure must not exceed it.
    AtMost,
    /// The figure must be less.
    Below,
}

/// A figure and its limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    /// The figure.
    pub name: String,
    /// Its unit.
    pub unit: &'static str,
    /// The side of the limit.
    pub side: BarSide,
    /// The limit.
    pub limit: f64,
    /// The measured value; none: it was not measured.
    pub measured: Option<f64>,
}

impl Bar {
    /// A ratio that must reach a limit.
    #[must_use]
    pub fn ratio_at_least(name: impl Into<String>, limit: f64, measured: Option<f64>) -> Bar {
        Bar::new(name, "×", (BarSide::AtLeast, limit), measured)
    }

    /// A ratio that must not exceed a limit.
    #[must_use]
    pub fn ratio_at_most(name: impl Into<String>, limit: f64, measured: Option<f64>) -> Bar {
        Bar::new(name, "×", (BarSide::AtMost, limit), measured)
    }

    /// A figure with its unit.
    #[must_use]
    pub fn new(
        name: impl Into<String>,
        unit: &'static str,
        (side, limit): (BarSide, f64),
        measured: Option<f64>,
    ) -> Bar {
        Bar {
            name: name.into(),
            unit,
            side,
            limit,
            measured: measured.filter(|it| it.is_finite()),
        }
    }

    /// Whether the figure reaches its limit; none: it was not measured.
    #[must_use]
    pub fn is_met(&self) -> Option<bool> {
        self.measured.map(|measured| match self.side {
            BarSide::AtLeast => measured >= self.limit,
            BarSide::AtMost => measured <= self.limit,
            BarSide::Below => measured < self.limit,
        })
    }

    fn line(&self) -> String {
        let side = match self.side {
            BarSide::AtLeast => "at least",
            BarSide::AtMost => "at most",
            BarSide::Below => "below",
        };
        let (unit, limit) = (self.unit, self.limit);
        let measured = match self.measured {
            Some(measured) => format!("{measured:.3} {unit}"),
            None => "not measured".to_owned(),
        };
        let verdict = match self.is_met() {
            Some(true) => "met",
            Some(false) => "missed",
            None => "not decided",
        };
        format!(
            "bar: {verdict}: {} is {measured}, {side} {limit} {unit} is wanted",
            self.name
        )
    }
}

/// Adds a line for each bar to a report, and the bars to its raw figures.
pub fn add_bars(report: &mut Report, bars: &[Bar]) {
    for bar in bars {
        report.add_note(bar.line());
    }
    if let Some(raw) = report.raw.as_object_mut() {
        let of = |bar: &Bar| json!({ "bar": bar, "is_met": bar.is_met() });
        raw.insert("bars".into(), bars.iter().map(of).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_decide_on_both_sides() {
        let met = |bar: Bar| bar.is_met();
        assert_eq!(met(Bar::ratio_at_least("a", 3.0, Some(3.0))), Some(true));
        assert_eq!(met(Bar::ratio_at_least("a", 3.0, Some(2.9))), Some(false));
        assert_eq!(met(Bar::ratio_at_most("a", 1.5, Some(1.5))), Some(true));
        assert_eq!(met(Bar::ratio_at_most("a", 1.5, Some(1.6))), Some(false));
        assert_eq!(met(Bar::ratio_at_most("a", 1.5, None)), None);
        let below = Bar::new("a", "%", (BarSide::Below, 0.5), Some(0.5));
        assert_eq!(below.is_met(), Some(false));
        assert_eq!(met(Bar::ratio_at_least("a", 3.0, Some(f64::NAN))), None);
    }

    #[test]
    fn report_has_a_line_and_a_figure_for_each_bar() {
        let mut report = Report::new("t", "title", "process", &[("what", "")]);
        report.raw = json!({});
        let bars = [
            Bar::ratio_at_least("rate", 3.0, Some(3.5)),
            Bar::ratio_at_most("p99", 1.5, Some(2.0)),
            Bar::ratio_at_most("mean", 1.5, None),
        ];
        add_bars(&mut report, &bars);
        assert_eq!(
            report.notes,
            [
                "bar: met: rate is 3.500 ×, at least 3 × is wanted",
                "bar: missed: p99 is 2.000 ×, at most 1.5 × is wanted",
                "bar: not decided: mean is not measured, at most 1.5 × is wanted",
            ]
        );
        assert_eq!(report.raw["bars"][1]["is_met"], false);
        assert_eq!(report.raw["bars"][0]["bar"]["measured"], 3.5);
    }
}
