//! Charts as SVG, without a library: lines or grouped bars, axes, a legend,
//! linear or logarithmic scales.
//!
//! The file has no dependencies: no scripts, no fonts, no external data. Points that a scale cannot
//! show (not finite; zero or less on a logarithmic scale) are omitted, never drawn elsewhere.

use serde::{Deserialize, Serialize};
use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 96.0;
/// Colours that most people with colour blindness can distinguish (Okabe and Ito, 2008).
const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000",
];
/// Most positions on the x axis with a label each.
const LABELLED_MAX: usize = 16;
/// The least distance of two labels on the x axis.
const LABEL_WIDTH: f64 = 30.0;

/// The kind of chart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlotKind {
    /// Points joined in order of x.
    #[default]
    Lines,
    /// A group of bars per category; x is the category's number.
    Bars,
}

/// An axis.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlotAxis {
    /// The quantity and its unit.
    pub label: String,
    /// Logarithmic.
    pub log: bool,
}

impl PlotAxis {
    /// A linear axis.
    pub fn linear(label: &str) -> PlotAxis {
        let label = label.to_owned();
        PlotAxis { label, log: false }
    }

    /// A logarithmic axis.
    pub fn log(label: &str) -> PlotAxis {
        let label = label.to_owned();
        PlotAxis { label, log: true }
    }
}

/// One line, or the bars of one colour.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlotSeries {
    /// Its name in the legend.
    pub name: String,
    /// x and y.
    pub points: Vec<(f64, f64)>,
}

/// A chart.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plot {
    /// Its title.
    pub title: String,
    /// Its kind.
    pub kind: PlotKind,
    /// The horizontal axis.
    pub x: PlotAxis,
    /// The vertical axis.
    pub y: PlotAxis,
    /// Names of the groups of bars.
    pub categories: Vec<String>,
    /// The lines or bars.
    pub series: Vec<PlotSeries>,
}

/// A range of values on a range of pixels.
struct AxisScale {
    log: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl AxisScale {
    fn new(log: bool, values: &[f64], from: f64, to: f64, from_zero: bool) -> AxisScale {
        let shown = values.iter().copied().filter(|v| is_drawable(log, *v));
        let (mut low, mut high) = shown.fold((f64::MAX, f64::MIN), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        if low > high {
            (low, high) = (1.0, 10.0);
        }
        if from_zero && log {
            low = 10f64.powf(low.log10().floor());
            high = 10f64.powf(high.log10().ceil());
        } else if from_zero {
            low = low.min(0.0);
            let step = nice_step(high - low);
            high = (high / step).ceil() * step;
        }
        if low >= high {
            high = if log { low * 10.0 } else { low + 1.0 };
        }
        AxisScale {
            log,
            low,
            high,
            from,
            to,
        }
    }

    fn pixel_of(&self, value: f64) -> f64 {
        let of = |v: f64| if self.log { v.log10() } else { v };
        let part = (of(value) - of(self.low)) / (of(self.high) - of(self.low));
        self.from + part * (self.to - self.from)
    }

    fn ticks(&self) -> Vec<f64> {
        let margin = 1e-9 * (self.high - self.low);
        let inside = |v: &f64| *v >= self.low - margin && *v <= self.high + margin;
        if self.log {
            let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
            let parts: &[f64] = match decades.clone().count() {
                ..=3 => &[1.0, 2.0, 5.0],
                _ => &[1.0],
            };
            let tick = |decade| parts.iter().map(move |part| part * 10f64.powi(decade));
            return decades.flat_map(tick).filter(inside).collect();
        }
        let step = nice_step(self.high - self.low);
        let first = (self.low / step).ceil();
        (0..=12)
            .map(|n| (first + f64::from(n)) * step)
            .filter(inside)
            .collect()
    }
}

fn is_drawable(log: bool, value: f64) -> bool {
    value.is_finite() && (!log || value > 0.0)
}

/// A step of 1, 2 or 5 times a power of ten that divides the range into four to ten.
fn nice_step(range: f64) -> f64 {
    if range <= 0.0 || !range.is_finite() {
        return 1.0;
    }
    let power = 10f64.powf((range / 5.0).log10().floor());
    match range / 5.0 / power {
        small if small < 1.5 => power,
        middle if middle < 3.5 => 2.0 * power,
        large if large < 7.5 => 5.0 * power,
        _ => 10.0 * power,
    }
}

/// A number as an axis shows it: 1200000 is 1.2M.
fn short_number(value: f64) -> String {
    let (scaled, suffix) = match value.abs() {
        v if v >= 1e9 => (value / 1e9, "G"),
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e3 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let text = format!("{scaled:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    format!("{text}{suffix}")
}

fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            // Control characters are not allowed in XML.
            control if control.is_control() => safe.push(' '),
            other => safe.push(other),
        }
    }
    safe
}

/// SVG text under construction.
struct SvgCanvas(String);

impl SvgCanvas {
    fn put(&mut self, line: std::fmt::Arguments) {
        writeln!(self.0, "{line}").expect("a string takes everything");
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, class: &str, text: &str) {
        let text = escape(text);
        self.put(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" class="{class}">{text}</text>"#
        ));
    }
}

impl Plot {
    /// Draws the chart. `facts` is printed below it: class and machine.
    pub fn svg(&self, facts: &str) -> String {
        let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
        let values = |pick: fn(&(f64, f64)) -> f64| -> Vec<f64> {
            let points = self.series.iter().flat_map(|series| &series.points);
            points.map(pick).collect()
        };
        let y = AxisScale::new(self.y.log, &values(|p| p.1), bottom, TOP, true);
        let mut canvas = SvgCanvas(String::new());
        canvas.put(format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">"#
        ));
        canvas.put(format_args!(
            "<style>.t{{font-size:15px;font-weight:bold}}.s{{fill:#555;font-size:11px}}.g{{stroke:#ddd}}.a{{stroke:#333}}</style>"
        ));
        canvas.put(format_args!(
            r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#
        ));
        canvas.text(LEFT, 22.0, "start", "t", &self.title);
        self.draw_y(&mut canvas, &y);
        match self.kind {
            PlotKind::Lines => self.draw_lines(&mut canvas, &y, &values(|p| p.0)),
            PlotKind::Bars => self.draw_bars(&mut canvas, &y),
        }
        canvas.put(format_args!(
            r#"<path class="a" fill="none" d="M{LEFT} {TOP}V{bottom}H{right}"/>"#
        ));
        canvas.text(
            (LEFT + right) / 2.0,
            bottom + 38.0,
            "middle",
            "l",
            &self.x.label,
        );
        self.draw_legend(&mut canvas);
        canvas.text(LEFT, HEIGHT - 10.0, "start", "s", facts);
        canvas.put(format_args!("</svg>"));
        canvas.0
    }

    fn draw_y(&self, canvas: &mut SvgCanvas, scale: &AxisScale) {
        let right = WIDTH - RIGHT;
        for tick in scale.ticks() {
            let at = scale.pixel_of(tick);
            canvas.put(format_args!(
                r#"<path class="g" d="M{LEFT} {at:.1}H{right}"/>"#
            ));
            canvas.text(LEFT - 8.0, at + 4.0, "end", "l", &short_number(tick));
        }
        let label = match self.y.log {
            true => format!("{} (logarithmic)", self.y.label),
            false => self.y.label.clone(),
        };
        canvas.text(LEFT, TOP - 12.0, "start", "s", &label);
    }

    fn draw_lines(&self, canvas: &mut SvgCanvas, y: &AxisScale, values: &[f64]) {
        let bottom = HEIGHT - BOTTOM;
        let x = AxisScale::new(self.x.log, values, LEFT + 16.0, WIDTH - RIGHT - 16.0, false);
        let mut places: Vec<f64> = values
            .iter()
            .copied()
            .filter(|v| is_drawable(self.x.log, *v))
            .collect();
        places.sort_by(f64::total_cmp);
        places.dedup();
        let are_close = |pair: &[f64]| x.pixel_of(pair[1]) - x.pixel_of(pair[0]) < LABEL_WIDTH;
        if places.len() > LABELLED_MAX || places.windows(2).any(are_close) {
            places = x.ticks();
        }
        for place in places {
            let at = x.pixel_of(place);
            canvas.put(format_args!(r#"<path class="a" d="M{at:.1} {bottom}v4"/>"#));
            canvas.text(at, bottom + 18.0, "middle", "l", &short_number(place));
        }
        for (series, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
            let mut points = series.points.clone();
            points.retain(|(px, py)| is_drawable(self.x.log, *px) && is_drawable(self.y.log, *py));
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            let mut line = String::new();
            for (px, py) in &points {
                let (at, up) = (x.pixel_of(*px), y.pixel_of(*py));
                write!(line, "{at:.1},{up:.1} ").expect("a string takes everything");
                canvas.put(format_args!(
                    r#"<circle cx="{at:.1}" cy="{up:.1}" r="3" fill="{colour}"/>"#
                ));
            }
            canvas.put(format_args!(
                r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
                line.trim_end()
            ));
        }
    }

    fn draw_bars(&self, canvas: &mut SvgCanvas, y: &AxisScale) {
        let bottom = HEIGHT - BOTTOM;
        let group = (WIDTH - RIGHT - LEFT) / self.categories.len().max(1) as f64;
        let bar = group * 0.8 / self.series.len().max(1) as f64;
        for (at, name) in self.categories.iter().enumerate() {
            let middle = LEFT + (at as f64 + 0.5) * group;
            canvas.text(middle, bottom + 18.0, "middle", "l", name);
        }
        for (nth, (series, colour)) in self.series.iter().zip(COLOURS.iter().cycle()).enumerate() {
            for (category, value) in &series.points {
                if !is_drawable(self.y.log, *value) {
                    continue;
                }
                let left = LEFT + (category + 0.1) * group + nth as f64 * bar;
                let top = y.pixel_of(*value);
                let height = bottom - top;
                canvas.put(format_args!(
                    r#"<rect x="{left:.1}" y="{top:.1}" width="{:.1}" height="{height:.1}" fill="{colour}"/>"#,
                    bar * 0.92
                ));
                canvas.text(
                    left + bar / 2.0,
                    top - 3.0,
                    "middle",
                    "s",
                    &bar_label(*value),
                );
            }
        }
    }

    fn draw_legend(&self, canvas: &mut SvgCanvas) {
        let y = HEIGHT - 34.0;
        let mut x = LEFT;
        for (series, colour) in self.series.iter().zip(COLOURS.iter().cycle()) {
            let top = y - 10.0;
            canvas.put(format_args!(
                r#"<rect x="{x:.1}" y="{top}" width="12" height="12" fill="{colour}"/>"#
            ));
            canvas.text(x + 17.0, y, "start", "l", &series.name);
            x += 36.0 + 7.0 * series.name.chars().count() as f64;
        }
    }
}

/// The value on top of a bar: two or three digits.
fn bar_label(value: f64) -> String {
    match value.abs() {
        v if v >= 1e6 => format!("{:.1}M", value / 1e6),
        v if v >= 1e4 => format!("{:.0}k", value / 1e3),
        v if v >= 1e3 => format!("{:.1}k", value / 1e3),
        v if v >= 10.0 => format!("{value:.0}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line_plot(log: bool) -> Plot {
        Plot {
            title: "a < b & \"c\"".to_owned(),
            kind: PlotKind::Lines,
            x: PlotAxis::log("readers"),
            y: if log {
                PlotAxis::log("µs")
            } else {
                PlotAxis::linear("µs")
            },
            categories: Vec::new(),
            series: vec![PlotSeries {
                name: "p50".to_owned(),
                points: vec![(1.0, 10.0), (10.0, 100.0), (100.0, 0.0), (50.0, f64::NAN)],
            }],
        }
    }

    #[test]
    fn line_chart_draws_points_within_scales() {
        let svg = line_plot(false).svg("facts");
        assert_eq!(svg.matches("<circle").count(), 3, "{svg}");
        assert!(svg.contains(r#"<polyline points="100.0,"#), "{svg}");
        assert!(svg.contains("a &lt; b &amp; &quot;c&quot;"));
        assert!(svg.contains(">facts</text>"));
        // A logarithmic axis has no place for zero.
        assert_eq!(line_plot(true).svg("").matches("<circle").count(), 2);
    }

    #[test]
    fn close_positions_have_labels_at_round_numbers() {
        let labels = |points: Vec<(f64, f64)>| {
            let mut plot = line_plot(false);
            plot.x = PlotAxis::linear("rate");
            plot.series[0].points = points;
            plot.svg("facts")
        };
        let svg = labels(vec![(997.0, 1.0), (1003.0, 1.0), (2001.0, 1.0)]);
        assert!(!svg.contains(">997<") && svg.contains(">1.2k<"), "{svg}");
        let svg = labels(vec![(997.0, 1.0), (2001.0, 1.0)]);
        assert!(svg.contains(">997<"), "{svg}");
    }

    #[test]
    fn bars_are_drawn_in_groups() {
        let series = |name: &str, points| PlotSeries {
            name: name.to_owned(),
            points,
        };
        let svg = Plot {
            kind: PlotKind::Bars,
            y: PlotAxis::linear("IOPS"),
            categories: vec!["QD1".to_owned(), "QD16".to_owned()],
            series: vec![
                series("x", vec![(0.0, 50.0), (1.0, 100.0)]),
                series("y", vec![(0.0, 100.0), (1.0, 100.0)]),
            ],
            ..Plot::default()
        }
        .svg("");
        // Background, two legend boxes and four bars.
        assert_eq!(svg.matches("<rect").count(), 7, "{svg}");
        let plot_height = HEIGHT - TOP - BOTTOM;
        let full = format!(r#"height="{plot_height:.1}" fill="{}""#, COLOURS[1]);
        assert_eq!(svg.matches(&full).count(), 2, "{svg}");
        let half = format!(r#"height="{:.1}" fill="{}""#, plot_height / 2.0, COLOURS[0]);
        assert_eq!(svg.matches(&half).count(), 1, "{svg}");
    }

    #[test]
    fn empty_chart_is_drawn() {
        let svg = Plot::default().svg("");
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn ticks_are_round_numbers() {
        let scale = |log, values: &[f64]| AxisScale::new(log, values, 0.0, 1.0, true).ticks();
        assert_eq!(scale(false, &[95.0]), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(
            scale(true, &[3.0, 4000.0]),
            [1.0, 10.0, 100.0, 1000.0, 10_000.0]
        );
        assert_eq!(short_number(1_200_000.0), "1.2M");
        assert_eq!(short_number(20.0), "20");
    }
}
