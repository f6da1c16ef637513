//! The figures of volumes and bricks: operations, bytes and latencies, as clients and bricks report
//! them (RFD 025).
//!
//! Invariants: a report is checked before it is recorded. The lock of the figures is taken after the
//! manager's, never before it. The answers name the age of the last report.

use crate::fault::Fault;
use crate::figure_history::{FigureSubject, ReceivedReport};
use crate::manager::Manager;
use crate::media_figures::cluster_media;
use crate::volumes::check_attachment;
use crate::wire::{
    FigureKind, FigureSeries, FigureSpan, FigureValues, LatencyBand, RecentFigures,
    ReportBrickFigures, ReportDelivery, ReportFigures, StageFigures, SubjectFigures,
};
use pagemesh_base::brick_name::BrickRef;
use pagemesh_base::layout::VolumeName;
use pagemesh_telemetry::{
    KINDS, KindSummary, KindTotals, LONG_STEP, OpKind, Report, SHORT_STEP, Sample, Series, Stage,
    octave_of, octave_range,
};
use std::time::Duration;

impl Manager {
    /// Takes the report of the client that has attached a volume.
    ///
    /// # Errors
    /// When there is no such volume, another client has attached it, or no meter made the report.
    pub fn report_volume_figures(
        &self,
        name: &VolumeName,
        report: &ReportFigures,
    ) -> Result<(), Fault> {
        check_report(&report.report)?;
        // Held over the record: a series would otherwise come back after its volume was deleted.
        let book = self.state();
        check_attachment(name, book.volume(name)?, Some(report.attachment))?;
        let received = self.received(&report.report, report.delivery);
        self.figures.record_volume(name, received);
        Ok(())
    }

    /// Takes the report of a brick.
    ///
    /// # Errors
    /// When there is no such brick, or no meter made the report.
    pub fn report_brick_figures(
        &self,
        brick: &BrickRef,
        report: &ReportBrickFigures,
    ) -> Result<(), Fault> {
        check_report(&report.report)?;
        let book = self.state();
        let brick = book.find_brick(brick)?.record.brick;
        let received = self.received(&report.report, report.delivery);
        self.figures.record_brick(brick, received);
        Ok(())
    }

    fn received<'r>(
        &self,
        report: &'r Report,
        delivery: Option<ReportDelivery>,
    ) -> ReceivedReport<'r> {
        ReceivedReport {
            now: self.clock.elapsed(),
            report,
            delivery,
        }
    }

    /// The history of the sum of all volumes.
    #[must_use]
    pub fn cluster_figures(&self, span: FigureSpan) -> FigureSeries {
        self.figure_series(&FigureSubject::Cluster, span)
    }

    /// The history of a volume.
    ///
    /// # Errors
    /// When there is no such volume.
    pub fn volume_figures(
        &self,
        name: &VolumeName,
        span: FigureSpan,
    ) -> Result<FigureSeries, Fault> {
        self.state().volume(name)?;
        Ok(self.figure_series(&FigureSubject::Volume(name.clone()), span))
    }

    /// The history of a brick.
    ///
    /// # Errors
    /// When there is no such brick.
    pub fn brick_figures(&self, brick: &BrickRef, span: FigureSpan) -> Result<FigureSeries, Fault> {
        let brick = self.state().find_brick(brick)?.record.brick;
        Ok(self.figure_series(&FigureSubject::Brick(brick), span))
    }

    /// The last minute of every volume and brick that has reported since the manager started.
    #[must_use]
    pub fn recent_figures(&self) -> RecentFigures {
        let (volumes, bricks, reporters) = {
            let book = self.state();
            let volumes: Vec<VolumeName> = book.volumes.keys().cloned().collect();
            let bricks = book.bricks.values().map(|brick| brick.record.label());
            let bricks: Vec<_> = bricks.collect();
            (volumes, bricks, self.reporters(&book))
        };
        let now = self.clock.elapsed();
        let history = self.figures.history();
        let figures = |name: String, subject: &FigureSubject| {
            let series = history.series(subject)?;
            let recent = history.recent_summary(subject, now);
            Some(SubjectFigures {
                name,
                last_reported_us_ago: age_us(series, now),
                kinds: kinds(&recent.kinds),
                media: recent.media.map(Into::into),
            })
        };
        let media = cluster_media(&history, &reporters, now);
        RecentFigures {
            window_s: history.recent_window(now).as_secs(),
            cluster: figures("cluster".into(), &FigureSubject::Cluster),
            volumes: volumes
                .into_iter()
                .filter_map(|name| figures(name.to_string(), &FigureSubject::Volume(name)))
                .collect(),
            bricks: bricks
                .into_iter()
                .filter_map(|label| figures(label.to_string(), &FigureSubject::Brick(label.id)))
                .collect(),
            media,
        }
    }

    /// Where the time of a volume's operations went in the last minute: of all of them, and of those
    /// around a quantile of the latency.
    ///
    /// # Errors
    /// When there is no such volume, or the quantile is not between 0 and 1.
    pub fn stage_figures(
        &self,
        name: &VolumeName,
        kind: OpKind,
        quantile: f64,
    ) -> Result<StageFigures, Fault> {
        if !(0.0..=1.0).contains(&quantile) {
            return Err(Fault::invalid_field(
                "a quantile lies between 0 and 1",
                "use 0.5 for the median, 0.99 for the 99th percentile",
            ));
        }
        self.state().volume(name)?;
        let now = self.clock.elapsed();
        let subject = FigureSubject::Volume(name.clone());
        let history = self.figures.history();
        let series = history.series(&subject);
        let totals = history.recent(&subject, now);
        Ok(stage_figures(
            totals.of(kind),
            (kind, quantile),
            series.map(|series| age_us(series, now)),
        ))
    }

    fn figure_series(&self, subject: &FigureSubject, span: FigureSpan) -> FigureSeries {
        let now = self.clock.elapsed();
        let step = match span {
            FigureSpan::Hour => SHORT_STEP,
            FigureSpan::Day => LONG_STEP,
        };
        let history = self.figures.history();
        let Some(series) = history.series(subject) else {
            return FigureSeries::empty(step.as_secs());
        };
        let samples: Vec<Sample> = match span {
            FigureSpan::Hour => series.last_hour(now, Duration::ZERO).collect(),
            FigureSpan::Day => series.last_day(now, Duration::ZERO).collect(),
        };
        let present_step = now.as_secs() / step.as_secs();
        let present_unix_s = self.clock.unix_s();
        let time_of = |sample: &Sample| {
            let steps_ago = present_step.saturating_sub(u64::from(sample.step));
            let since_step_began = now.as_secs() % step.as_secs() + steps_ago * step.as_secs();
            present_unix_s.saturating_sub(since_step_began)
        };
        let values = |kind: OpKind| FigureValues {
            operations: samples.iter().map(|it| it.ops[kind as usize]).collect(),
            kib: samples.iter().map(|it| it.kib[kind as usize]).collect(),
            p50_ns: samples
                .iter()
                .map(|it| it.latency_ns(kind).map(|of| of.0))
                .collect(),
            p99_ns: samples
                .iter()
                .map(|it| it.latency_ns(kind).map(|of| of.1))
                .collect(),
        };
        FigureSeries {
            step_s: step.as_secs(),
            last_reported_us_ago: Some(age_us(series, now)),
            is_shortened: series.has_forgotten(),
            time_unix_s: samples.iter().map(time_of).collect(),
            read: values(OpKind::Read),
            write: values(OpKind::Write),
            flush: values(OpKind::Flush),
        }
    }
}

fn check_report(report: &Report) -> Result<(), Fault> {
    report.check().map_err(|error| {
        Fault::invalid_field(
            format!("no meter made this report: {error}"),
            "report the counters of the pagemesh command of this version",
        )
    })
}

fn age_us(series: &Series, now: Duration) -> u64 {
    let age = now.saturating_sub(series.heard());
    u64::try_from(age.as_micros()).unwrap_or(u64::MAX)
}

fn kinds(summary: &[KindSummary; KINDS]) -> Vec<FigureKind> {
    let kind = |kind: OpKind| {
        let of = summary[kind as usize];
        FigureKind {
            kind: kind.name().to_owned(),
            operations: of.ops,
            bytes: of.bytes,
            p50_ns: of.p50_ns,
            p99_ns: of.p99_ns,
        }
    };
    OpKind::ALL.map(kind).to_vec()
}

fn latency_bands(totals: &KindTotals) -> Vec<LatencyBand> {
    let mut bands: Vec<LatencyBand> = Vec::new();
    for (bucket, count) in totals
        .latency
        .iter()
        .enumerate()
        .filter(|(_, count)| **count > 0)
    {
        let range = octave_range(octave_of(bucket));
        match bands.last_mut() {
            Some(last) if last.from_ns == range.start => {
                last.operations = last.operations.saturating_add(*count);
            }
            _ => bands.push(LatencyBand {
                from_ns: range.start,
                to_ns: range.end,
                operations: *count,
            }),
        }
    }
    bands
}

fn stage_figures(
    totals: &KindTotals,
    (kind, quantile): (OpKind, f64),
    last_reported_us_ago: Option<u64>,
) -> StageFigures {
    let stages = |means: Option<pagemesh_telemetry::StageMeans>| {
        let of = means?.mean_ns;
        let named = Stage::ALL.map(|stage| (stage.name().to_owned(), of.0[stage as usize]));
        Some(named.into_iter().collect())
    };
    let around = totals.stages_at(quantile);
    StageFigures {
        kind: kind.name().to_owned(),
        quantile,
        last_reported_us_ago,
        operations: totals.ops,
        timed: totals.timed(),
        latency_ns: totals.quantile_ns(quantile),
        around: around.map_or(0, |means| means.count),
        stages_ns: stages(around),
        mean_stages_ns: stages(totals.mean_stages()),
        latency: latency_bands(totals),
    }
}
