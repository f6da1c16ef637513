//! Draws the state on the terminal.

use super::sample::{Details, List, Row, Sample};
use super::state::TopState;
use crate::output::{self, bytes};
use pagemesh_manage::wire::StageFigures;
use pagemesh_telemetry::Stage;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Block, Borders, Cell as TableCell, Paragraph, Row as TableRow, Sparkline, Table, TableState,
    Tabs,
};
use std::time::Duration;

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const DIM: Style = Style::new().add_modifier(Modifier::DIM);
const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
const WARN: Style = Style::new().fg(Color::Yellow);
const WRITES: Style = Style::new().fg(Color::Yellow);
const READS: Style = Style::new().fg(Color::Blue);
const GOOD: Style = Style::new().fg(Color::Green);
/// The age of a sample that is said: several rounds are missing.
const OLD_AGE: Duration = Duration::from_secs(15);
/// Lines of the details: a history, a histogram, a bar of stages.
const DETAIL_LINES: u16 = 14;
/// Blocks of a bar, from empty to full.
const EIGHTHS: [char; 9] = [' ', '▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, state: &TopState) {
    let details = state.details.as_ref().filter(|_| state.shows_details);
    let below = if details.is_some() { DETAIL_LINES } else { 0 };
    let [head, tabs, body, detail, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(below),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    frame.render_widget(Paragraph::new(summary(state)), head);
    let titles = List::ALL.iter().map(|list| list.title());
    let at = List::ALL.iter().position(|list| *list == state.list);
    let shown = Tabs::new(titles)
        .select(at)
        .highlight_style(BOLD.fg(Color::Cyan));
    frame.render_widget(shown, tabs);
    draw_list(frame, state, body);
    if let Some(details) = details {
        draw_details(frame, details, detail);
    }
    frame.render_widget(Paragraph::new(foot_line(state)).style(DIM), foot);
}

/// Two lines about the cluster, or the reason for which there are none.
fn summary(state: &TopState) -> Vec<Line<'_>> {
    let error = state.error.as_ref();
    let Some(sample) = &state.sample else {
        return vec![match error {
            Some(error) => Line::styled(error.clone(), BAD),
            None => Line::raw(format!("asking {} …", state.url)),
        }];
    };
    let status = &sample.status;
    let is_whole = status.bricks_alive == status.bricks;
    let degraded = status.volumes_degraded;
    let first = Line::from(vec![
        Span::styled("pagemesh ", BOLD),
        Span::styled(
            format!("{} of {} bricks alive", status.bricks_alive, status.bricks),
            if is_whole { GOOD } else { BAD },
        ),
        Span::raw(format!(
            ", {} of {} used, {} volumes, {} attached, ",
            bytes(status.used_bytes),
            bytes(status.capacity_bytes),
            status.volumes,
            status.volumes_attached
        )),
        Span::styled(
            format!("{degraded} degraded"),
            if degraded == 0 { GOOD } else { WARN },
        ),
    ]);
    let second = match error {
        Some(error) => Line::styled(format!("the figures are old: {error}"), BAD),
        None if status.store_failed => Line::styled(
            "the manager takes no changes, because its store failed to write one; see: pagemesh status",
            BAD,
        ),
        None => match sample.asked_at.elapsed() {
            age if age > OLD_AGE => Line::styled(
                format!(
                    "the figures are {} s old: the manager, or a mount of this machine, does not answer",
                    age.as_secs()
                ),
                BAD,
            ),
            _ => Line::styled(second_line(state.url.as_str(), sample), DIM),
        },
    };
    vec![first, second]
}

/// The manager's address, and the bytes to media.
fn second_line(url: &str, sample: &Sample) -> String {
    let media = sample.media_text();
    let media = media.map_or_else(String::new, |media| format!(": {media}"));
    format!("{url}   figures of the last minute{media}")
}

fn foot_line(state: &TopState) -> String {
    if state.is_typing_filter {
        return format!(
            "filter by name: {}▏  Enter keeps it, Esc clears it",
            state.filter
        );
    }
    let filter = match state.filter.as_str() {
        "" => String::new(),
        filter => format!("   filter: {filter}"),
    };
    format!("Tab list  ↑↓ select  s sort  r reverse  / filter  Enter details  q quit{filter}")
}

fn draw_list(frame: &mut Frame<'_>, state: &TopState, area: Rect) {
    let rows = state.rows();
    if rows.is_empty() && state.sample.is_some() {
        let text = Paragraph::new(empty_text(state)).alignment(Alignment::Center);
        return frame.render_widget(text, area);
    }
    let head = state.list.head();
    let widths = column_widths(&head, rows);
    let (column, is_descending) = state.sort;
    let heads = head.iter().enumerate().map(|(index, name)| {
        let mark = match (index == column, is_descending) {
            (false, _) => "",
            (true, true) => "▼",
            (true, false) => "▲",
        };
        aligned(format!("{}{mark}", name.trim_start_matches('>')), name).style(BOLD)
    });
    let shown = rows.iter().map(|row| {
        let cells = row.iter().zip(&head).enumerate();
        let cells = cells.map(|(index, (cell, name))| {
            let style = if index == 1 {
                state_style(&cell.text)
            } else {
                Style::new()
            };
            aligned(cell.text.clone(), name).style(style)
        });
        TableRow::new(cells)
    });
    let table = Table::new(shown, widths)
        .header(TableRow::new(heads))
        .column_spacing(2)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut selection = TableState::new().with_selected(state.selected_index());
    frame.render_stateful_widget(table, area, &mut selection);
}

fn empty_text(state: &TopState) -> String {
    if !state.filter.is_empty() {
        return format!(
            "no name here contains {:?}; Esc clears the filter",
            state.filter
        );
    }
    match state.list {
        List::Bricks => "no brick is known yet; start one with: pagemesh brick --pool FILE",
        List::Volumes => "no volumes; make one with: pagemesh volume create NAME --size 1G",
        List::FileSystems => "no file systems; make one with: pagemesh fs create NAME --size 1G",
        List::NfsExports => "no file system is served over NFS; serve one with: pagemesh serve nfs NAME",
        List::DirectClients => "no program on this host works on the direct path; start one with: pagemesh exec -- PROGRAM",
    }
    .to_owned()
}

fn aligned(text: String, head: &str) -> TableCell<'static> {
    let line = Line::raw(text);
    TableCell::from(if head.starts_with('>') {
        line.alignment(Alignment::Right)
    } else {
        line
    })
}

fn state_style(text: &str) -> Style {
    match text {
        "alive" | "in-sync" => GOOD,
        "dead" => BAD,
        "degraded" | "syncing" => WARN,
        _ => Style::new(),
    }
}

/// As wide as the widest cell. The head has room for the mark of the order.
fn column_widths(head: &[&str], rows: &[Row]) -> Vec<Constraint> {
    let width = |(index, name): (usize, &&str)| {
        let cells = rows.iter().map(|row| row[index].text.chars().count());
        let head = name.trim_start_matches('>').chars().count() + 1;
        Constraint::Length(cells.max().unwrap_or(0).max(head) as u16)
    };
    head.iter().enumerate().map(width).collect()
}

fn draw_details(frame: &mut Frame<'_>, details: &Details, area: Rect) {
    let block = Block::new()
        .borders(Borders::TOP)
        .title(format!(" {} ", details.of.0));
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)])
        .spacing(2)
        .areas(inner);
    let [rate_head, rates, stage_head, stages] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(3),
        Constraint::Length(1),
        Constraint::Fill(1),
    ])
    .areas(left);
    let history = &details.history;
    let operations = history
        .read
        .operations
        .iter()
        .zip(&history.write.operations);
    let operations: Vec<u64> = operations
        .map(|(read, write)| u64::from(*read) + u64::from(*write))
        .collect();
    let shown = operations.len().saturating_sub(usize::from(rates.width));
    let most = operations.iter().max().copied().unwrap_or(0) / history.step_s.max(1);
    frame.render_widget(
        Line::styled(
            format!("operations per second, the last hour; at most {most}"),
            BOLD,
        ),
        rate_head,
    );
    frame.render_widget(
        Sparkline::default()
            .data(&operations[shown..])
            .style(Style::new().fg(Color::Cyan)),
        rates,
    );
    frame.render_widget(
        Line::styled("stages of writes around the 99th percentile", BOLD),
        stage_head,
    );
    frame.render_widget(
        Paragraph::new(stage_lines(&details.writes, stages.width)),
        stages,
    );
    let [head, bars] = Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(right);
    frame.render_widget(histogram_title(), head);
    frame.render_widget(Paragraph::new(histogram_lines(details, bars)), bars);
}

fn stage_lines(figures: &StageFigures, width: u16) -> Vec<Line<'static>> {
    let Some(stages) = &figures.stages_ns else {
        return vec![Line::styled("no write was timed in the last minute", DIM)];
    };
    let total: u64 = stages.values().sum();
    let bar_width = usize::from(width).saturating_sub(20);
    let line = |stage: &Stage| {
        let ns = stages.get(stage.name()).copied().unwrap_or(0);
        let share = ns as f64 / total.max(1) as f64;
        Line::from(vec![
            Span::raw(format!("{:<7}{:>9}  ", stage.name(), output::nanos(ns))),
            Span::styled(bar(share, bar_width), Style::new().fg(Color::Cyan)),
        ])
    };
    Stage::ALL.iter().map(line).collect()
}

/// The words have the colours of their bars.
fn histogram_title() -> Line<'static> {
    Line::from(vec![
        Span::styled("latency of ", BOLD),
        Span::styled("writes", WRITES.add_modifier(Modifier::BOLD)),
        Span::styled(" and ", BOLD),
        Span::styled("reads", READS.add_modifier(Modifier::BOLD)),
        Span::styled(" in the last minute", BOLD),
    ])
}

/// One line for each power of two: the writes, then the reads.
fn histogram_lines(details: &Details, area: Rect) -> Vec<Line<'static>> {
    let mut bands: Vec<(u64, u64, u64)> = Vec::new();
    for (is_write, band) in [(true, &details.writes), (false, &details.reads)]
        .iter()
        .flat_map(|(is_write, of)| of.latency.iter().map(move |band| (*is_write, band)))
    {
        let at = bands.iter().position(|(to, ..)| *to == band.to_ns);
        let at = at.unwrap_or_else(|| {
            bands.push((band.to_ns, 0, 0));
            bands.len() - 1
        });
        let (_, writes, reads) = &mut bands[at];
        *(if is_write { writes } else { reads }) += band.operations;
    }
    if bands.is_empty() {
        return vec![Line::styled(
            "no operation was timed in the last minute",
            DIM,
        )];
    }
    bands.sort_unstable();
    // The slow ones count more than the fast ones if there is no room for all.
    bands.drain(..bands.len().saturating_sub(usize::from(area.height)));
    let most = bands
        .iter()
        .map(|(_, writes, reads)| writes + reads)
        .max()
        .unwrap_or(1);
    let width = usize::from(area.width).saturating_sub(20);
    let line = |(to_ns, writes, reads): &(u64, u64, u64)| {
        let share = |count: u64| count as f64 / most as f64;
        Line::from(vec![
            Span::raw(format!(
                "< {:>9} {:>7} ",
                output::nanos(*to_ns),
                writes + reads
            )),
            Span::styled(whole_bar(share(*writes), width), WRITES),
            Span::styled(bar(share(*reads), width), READS),
        ])
    };
    bands.iter().map(line).collect()
}

/// A bar of this share of the width, in eighths of a character.
fn bar(share: f64, width: usize) -> String {
    let eighths = (share.clamp(0.0, 1.0) * width as f64 * 8.0).round() as usize;
    let mut bar: String = std::iter::repeat_n(EIGHTHS[8], eighths / 8).collect();
    if !eighths.is_multiple_of(8) {
        bar.push(EIGHTHS[eighths % 8]);
    }
    bar
}

/// A bar of whole characters, which another bar follows.
fn whole_bar(share: f64, width: usize) -> String {
    let count = (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    std::iter::repeat_n(EIGHTHS[8], count).collect()
}
