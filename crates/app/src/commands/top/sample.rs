//! One round of answers: of the manager, and of the mounts of this host.

use super::state::Selected;
use crate::commands::mount::status::{DirectClientRow, direct_clients};
use crate::commands::nfs;
use crate::output::{self, bytes};
use pagemesh_manage::wire::{
    BrickInfo, ClusterStatus, ErrorCode, FigureKind, FigureSeries, FigureSpan, NfsExport,
    RecentFigures, StageFigures, StageParams, SubjectFigures, VolumeContent, VolumeInfo,
};
use pagemesh_manage::{ManagerClient, ManagerError};
use pagemesh_telemetry::OpKind;
use serde::Serialize;
use std::collections::HashMap;
use std::time::Instant;

/// Everything that the lists show.
#[derive(Clone, Serialize)]
pub struct Sample {
    pub status: ClusterStatus,
    pub bricks: Vec<BrickInfo>,
    pub volumes: Vec<VolumeInfo>,
    pub figures: RecentFigures,
    pub nfs: Vec<NfsExport>,
    /// Of the mounts on this host.
    pub direct_clients: Vec<DirectClientRow>,
    #[serde(skip)]
    pub asked_at: Instant,
}

/// The selected volume.
#[derive(Clone)]
pub struct Details {
    pub of: Selected,
    pub history: FigureSeries,
    pub writes: StageFigures,
    pub reads: StageFigures,
}

/// A list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum List {
    Bricks,
    Volumes,
    FileSystems,
    NfsExports,
    DirectClients,
}

/// A value of a column: it sorts by its number or text, and shows its text.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    pub text: String,
    /// None sorts by the text.
    pub number: Option<f64>,
}

/// A row of a list; the first cell is the name.
pub type Row = Vec<Cell>;

impl Cell {
    fn text(text: impl Into<String>) -> Cell {
        Cell {
            text: text.into(),
            number: None,
        }
    }

    fn number(text: String, number: f64) -> Cell {
        Cell {
            text,
            number: Some(number),
        }
    }
}

type FiguresByName<'f> = HashMap<&'f str, &'f SubjectFigures>;

/// The figures by name. Thousands of volumes look up theirs.
fn by_name(figures: &[SubjectFigures]) -> FiguresByName<'_> {
    figures.iter().map(|of| (of.name.as_str(), of)).collect()
}

impl Sample {
    /// Asks the manager.
    pub fn ask(manager: &ManagerClient) -> Result<Sample, ManagerError> {
        Ok(Sample {
            asked_at: Instant::now(),
            status: manager.status()?,
            bricks: manager.bricks()?,
            volumes: manager.volumes()?,
            figures: manager.recent_figures()?,
            nfs: nfs_exports(manager)?,
            direct_clients: direct_clients(),
        })
    }

    /// All lists as tables.
    pub fn to_text(&self) -> String {
        let tables = List::ALL.iter().filter_map(|list| {
            let rows = self.rows(*list);
            let texts = rows
                .into_iter()
                .map(|row| row.into_iter().map(|cell| cell.text).collect());
            let texts: Vec<Vec<String>> = texts.collect();
            let head = list.head();
            (!texts.is_empty())
                .then(|| format!("{}\n{}", list.title(), output::table(&head, texts)))
        });
        let mut tables: Vec<String> = tables.collect();
        let media = self.media_text().filter(|_| !tables.is_empty());
        tables.extend(media);
        match tables.is_empty() {
            true => "no brick is known yet; start one with: pagemesh brick --pool FILE".into(),
            false => tables.join("\n\n"),
        }
    }

    /// The bytes written to media for each byte of users, if the manager has all reports.
    pub fn media_text(&self) -> Option<String> {
        let media = self.figures.media?;
        let (all, metadata) = (media.per_user_byte?, media.metadata_per_user_byte?);
        Some(format!(
            "{all:.2} B to media per user byte, {metadata:.2} of them metadata"
        ))
    }

    /// The rows of a list, as the manager orders them.
    pub fn rows(&self, list: List) -> Vec<Row> {
        let of_content = |content: VolumeContent| {
            let figures = by_name(&self.figures.volumes);
            let volumes = self.volumes.iter();
            volumes
                .filter(move |volume| volume.content == content)
                .map(|volume| self.volume_row(volume, &figures))
                .collect()
        };
        match list {
            List::Bricks => {
                let figures = by_name(&self.figures.bricks);
                let bricks = self.bricks.iter();
                bricks
                    .map(|brick| self.brick_row(brick, &figures))
                    .collect()
            }
            List::Volumes => of_content(VolumeContent::Blocks),
            List::FileSystems => of_content(VolumeContent::Files),
            List::NfsExports => self.nfs.iter().map(export_row).collect(),
            List::DirectClients => self.direct_clients.iter().map(client_row).collect(),
        }
    }

    fn brick_row(&self, brick: &BrickInfo, figures: &FiguresByName<'_>) -> Row {
        let name = brick.label().to_string();
        let figures = figures.get(name.as_str()).copied();
        let state = if brick.alive { "alive" } else { "dead" };
        let used = 100.0 * brick.used_bytes as f64 / brick.capacity_bytes.max(1) as f64;
        let mut row = vec![
            Cell::text(name),
            Cell::text(state),
            Cell::number(format!("{used:.0} %"), used),
            Cell::number(brick.sessions.to_string(), f64::from(brick.sessions)),
            self.media_cell(figures),
        ];
        row.extend(self.figure_cells(figures));
        row
    }

    /// The bytes per second that were written to a brick's medium.
    fn media_cell(&self, figures: Option<&SubjectFigures>) -> Cell {
        let window_s = self.figures.window_s.max(1) as f64;
        match figures.and_then(|figures| figures.media) {
            Some(media) => {
                let rate = media.total_bytes() as f64 / window_s;
                Cell::number(format!("{}/s", bytes(rate as u64)), rate)
            }
            None => Cell::number("-".into(), -1.0),
        }
    }

    fn volume_row(&self, volume: &VolumeInfo, figures: &FiguresByName<'_>) -> Row {
        let name = volume.name.to_string();
        let figures = figures.get(name.as_str()).copied();
        let attached = volume
            .attached
            .as_ref()
            .map_or("-", |by| by.client.as_str());
        let mut row = vec![
            Cell::text(name),
            Cell::text(output::json_word(&volume.health)),
            Cell::number(bytes(volume.size_bytes), volume.size_bytes as f64),
            Cell::text(attached),
        ];
        row.extend(self.figure_cells(figures));
        row
    }

    /// Reads and writes per second, bytes per second, latencies, and the age of the report.
    fn figure_cells(&self, figures: Option<&SubjectFigures>) -> [Cell; 7] {
        let window_s = self.figures.window_s.max(1) as f64;
        let of =
            |kind: OpKind| figures.and_then(|of| of.kinds.iter().find(|it| it.kind == kind.name()));
        let rate = |kind: OpKind| {
            let rate = of(kind).map_or(0.0, |of| of.operations as f64 / window_s);
            Cell::number(shown_rate(rate), rate)
        };
        let moved = |kind: OpKind| of(kind).map_or(0, |of| of.bytes) as f64 / window_s;
        let bandwidth = moved(OpKind::Read) + moved(OpKind::Write);
        let latency = |kind: OpKind, ns: fn(&FigureKind) -> Option<u64>| {
            let ns = of(kind).and_then(ns);
            let shown = ns.map_or_else(|| "-".into(), output::nanos);
            Cell::number(shown, ns.unwrap_or(0) as f64)
        };
        let age_us = figures.map(|figures| figures.last_reported_us_ago);
        [
            rate(OpKind::Read),
            rate(OpKind::Write),
            Cell::number(format!("{}/s", bytes(bandwidth as u64)), bandwidth),
            latency(OpKind::Read, |of| of.p99_ns),
            latency(OpKind::Write, |of| of.p50_ns),
            latency(OpKind::Write, |of| of.p99_ns),
            Cell::number(
                age_us.map_or_else(|| "never".into(), |us| format!("{} s ago", us / 1_000_000)),
                age_us.map_or(f64::MAX, |us| us as f64),
            ),
        ]
    }
}

/// The exports. A manager of an earlier version knows none.
fn nfs_exports(manager: &ManagerClient) -> Result<Vec<NfsExport>, ManagerError> {
    match manager.nfs_exports() {
        Err(ManagerError::Refused {
            code: ErrorCode::NotFound,
            ..
        }) => Ok(Vec::new()),
        exports => exports,
    }
}

fn export_row(export: &NfsExport) -> Row {
    let state = &export.export;
    let workers = &state.workers;
    let number = |value: u64| Cell::number(value.to_string(), value as f64);
    let rate = nfs::calls_per_second(state) as f64;
    let mean = nfs::mean_ns(state);
    let wait = workers.mean_wait_ns;
    vec![
        Cell::text(export.volume.to_string()),
        Cell::text(nfs::state_text(export)),
        number(state.clients_total),
        Cell::number(shown_rate(rate), rate),
        Cell::number(
            mean.map_or_else(|| "-".into(), output::nanos),
            mean.unwrap_or(0) as f64,
        ),
        number(workers.threads),
        number(workers.blocked),
        number(workers.queued),
        Cell::number(output::nanos(wait), wait as f64),
        Cell::text(match workers.last_change.as_str() {
            "" => "-",
            change => change,
        }),
    ]
}

fn client_row(client: &DirectClientRow) -> Row {
    vec![
        Cell::text(client.name.clone()),
        Cell::number(client.pid.to_string(), f64::from(client.pid)),
        Cell::text(client.mount.clone()),
        Cell::number(client.direct.to_string(), client.direct as f64),
        Cell::number(client.kernel.to_string(), client.kernel as f64),
        Cell::text(client.main_reason.clone().unwrap_or_else(|| "-".into())),
    ]
}

/// A rate for people.
fn shown_rate(rate: f64) -> String {
    match rate {
        _ if rate >= 1e6 => format!("{:.2} M", rate / 1e6),
        _ if rate >= 1e4 => format!("{:.1} k", rate / 1e3),
        _ if rate >= 10.0 || rate == 0.0 => format!("{rate:.0}"),
        _ => format!("{rate:.1}"),
    }
}

impl List {
    pub const ALL: [List; 5] = [
        List::Bricks,
        List::Volumes,
        List::FileSystems,
        List::NfsExports,
        List::DirectClients,
    ];

    pub fn title(self) -> &'static str {
        match self {
            List::Bricks => "Bricks",
            List::Volumes => "Volumes",
            List::FileSystems => "File systems",
            List::NfsExports => "NFS exports",
            List::DirectClients => "Direct clients here",
        }
    }

    /// The column heads; a `>` aligns to the right.
    pub fn head(self) -> Vec<&'static str> {
        let figures = [
            ">READ/S",
            ">WRITE/S",
            ">BANDWIDTH",
            ">READ P99",
            ">WRITE P50",
            ">WRITE P99",
            ">REPORTED",
        ];
        let first: &[&str] = match self {
            List::Bricks => &["BRICK", "STATE", ">USED", ">SESSIONS", ">TO MEDIA"],
            List::Volumes => &["VOLUME", "HEALTH", ">SIZE", "ATTACHED BY"],
            List::FileSystems => &["FILE SYSTEM", "HEALTH", ">SIZE", "ATTACHED BY"],
            List::NfsExports => {
                return vec![
                    "FILE SYSTEM",
                    "STATE",
                    ">CLIENTS",
                    ">CALLS/S",
                    ">MEAN",
                    ">WORKERS",
                    ">BLOCKED",
                    ">QUEUED",
                    ">MEAN WAIT",
                    "LAST CHANGE OF WORKERS",
                ];
            }
            List::DirectClients => {
                return vec![
                    "PROGRAM",
                    ">PID",
                    "MOUNT",
                    ">DIRECT",
                    ">KERNEL",
                    "MOST OFTEN KERNEL FOR",
                ];
            }
        };
        first.iter().copied().chain(figures).collect()
    }

    /// Whether its rows have details.
    pub fn has_details(self) -> bool {
        matches!(self, List::Volumes | List::FileSystems)
    }
}

impl Details {
    /// Asks for the details of a volume; none if the manager has none.
    pub fn ask(manager: &ManagerClient, of: &Selected) -> Option<Details> {
        let name = of.0.parse().ok()?;
        let stages = |kind| {
            let params = StageParams {
                kind,
                quantile: 0.99,
            };
            manager.stage_figures(&name, params).ok()
        };
        Some(Details {
            of: of.clone(),
            history: manager.volume_figures(&name, FigureSpan::Hour).ok()?,
            writes: stages(OpKind::Write)?,
            reads: stages(OpKind::Read)?,
        })
    }
}
