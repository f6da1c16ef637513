//! The state of the screen: keys and rounds of answers in, rows out. It has no clock and no I/O.

use super::Round;
use super::sample::{Cell, Details, List, Row, Sample};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::cmp::Ordering;

/// Bytes of the longest filter: longer than the longest name.
const FILTER_BYTES_MAX: usize = 64;

/// The name of the volume with shown details.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selected(pub String);

/// See the module.
pub struct TopState {
    pub url: String,
    pub list: List,
    pub sample: Option<Sample>,
    pub details: Option<Details>,
    /// The error of the last round; the figures shown are older.
    pub error: Option<String>,
    pub filter: String,
    pub is_typing_filter: bool,
    pub shows_details: bool,
    /// The column that sorts, and whether from the greatest value on.
    pub sort: (usize, bool),
    /// The selected row's name: a row keeps its selection when the order changes.
    selected: Option<String>,
    /// The rows of the present list, filtered and sorted, and the view that they belong to. Each frame
    /// reads them, so they are made only for another sample or view.
    rows: Vec<Row>,
    view: View,
}

/// The choices that decide the rows of a sample: list, filter, and order.
type View = (List, String, (usize, bool));

impl TopState {
    pub fn new(url: &str) -> TopState {
        TopState {
            url: url.to_owned(),
            list: List::Volumes,
            sample: None,
            details: None,
            error: None,
            filter: String::new(),
            is_typing_filter: false,
            shows_details: false,
            sort: (0, false),
            selected: None,
            rows: Vec::new(),
            view: (List::Volumes, String::new(), (0, false)),
        }
    }

    /// Takes a round of answers.
    pub fn take_round(&mut self, round: Round) {
        match round {
            Ok((sample, details)) => {
                self.sample = Some(sample);
                self.details = details;
                self.error = None;
                self.renew_rows();
            }
            Err(error) => self.error = Some(error),
        }
    }

    /// Handles a key; true if the user quits.
    pub fn handle_key(&mut self, key: KeyEvent) -> bool {
        let quits = self.apply_key(key);
        let (list, filter, sort) = &self.view;
        if (*list, filter, *sort) != (self.list, &self.filter, self.sort) {
            self.renew_rows();
        }
        quits
    }

    fn apply_key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return true;
        }
        if self.is_typing_filter {
            self.type_filter(key.code);
            return false;
        }
        let columns = self.list.head().len();
        match key.code {
            KeyCode::Char('q') => return true,
            KeyCode::Esc if self.shows_details => self.shows_details = false,
            KeyCode::Esc if !self.filter.is_empty() => self.filter.clear(),
            KeyCode::Esc => return true,
            KeyCode::Tab | KeyCode::Right => self.change_list(1),
            KeyCode::BackTab | KeyCode::Left => self.change_list(List::ALL.len() - 1),
            KeyCode::Down | KeyCode::Char('j') => self.move_selection(1),
            KeyCode::Up | KeyCode::Char('k') => self.move_selection(-1),
            KeyCode::Char('s') => self.sort_by((self.sort.0 + 1) % columns),
            KeyCode::Char('S') => self.sort_by((self.sort.0 + columns - 1) % columns),
            KeyCode::Char('r') => self.sort.1 = !self.sort.1,
            KeyCode::Char('/') => self.is_typing_filter = true,
            KeyCode::Enter => self.shows_details = self.list.has_details(),
            _ => {}
        }
        false
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_typing_filter = false,
            KeyCode::Esc => {
                self.is_typing_filter = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(typed) if self.filter.len() < FILTER_BYTES_MAX => self.filter.push(typed),
            _ => {}
        }
    }

    fn change_list(&mut self, by: usize) {
        let at = List::ALL.iter().position(|list| *list == self.list);
        let at = at.unwrap_or(0);
        self.list = List::ALL[(at + by) % List::ALL.len()];
        self.sort = (0, false);
        self.selected = None;
        self.shows_details = false;
    }

    /// Sorts by this column: numbers from the greatest on, texts from the first on.
    fn sort_by(&mut self, column: usize) {
        let is_number = self.list.head()[column].starts_with('>');
        self.sort = (column, is_number);
    }

    fn move_selection(&mut self, by: isize) {
        let Some(last) = self.rows.len().checked_sub(1) else {
            return;
        };
        let at = self.selected_index();
        let next = at.map_or(0, |at| at.saturating_add_signed(by).min(last));
        self.selected = Some(self.rows[next][0].text.clone());
    }

    /// The index of the selected row.
    pub fn selected_index(&self) -> Option<usize> {
        let selected = self.selected.as_ref()?;
        self.rows.iter().position(|row| row[0].text == *selected)
    }

    /// The volume with shown details.
    pub fn detail_of(&self) -> Option<Selected> {
        if !self.shows_details || !self.list.has_details() {
            return None;
        }
        let row = self.rows.get(self.selected_index().unwrap_or(0))?;
        Some(Selected(row[0].text.clone()))
    }

    /// The rows of the present list, filtered and sorted.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    fn renew_rows(&mut self) {
        self.view = (self.list, self.filter.clone(), self.sort);
        let sample = self.sample.as_ref();
        let mut rows = sample.map_or_else(Vec::new, |sample| sample.rows(self.list));
        let wanted = self.filter.to_lowercase();
        rows.retain(|row| row[0].text.to_lowercase().contains(&wanted));
        let (column, is_descending) = self.sort;
        rows.sort_by(|one, other| {
            let order = compare(&one[column], &other[column]);
            let order = if is_descending {
                order.reverse()
            } else {
                order
            };
            order.then_with(|| one[0].text.cmp(&other[0].text))
        });
        self.rows = rows;
    }
}

fn compare(one: &Cell, other: &Cell) -> Ordering {
    match (one.number, other.number) {
        (Some(one), Some(other)) => one.total_cmp(&other),
        _ => one.text.cmp(&other.text),
    }
}
