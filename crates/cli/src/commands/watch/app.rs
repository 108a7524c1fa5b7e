//! What the terminal shows of which run, and what keys change.

use super::gpu::Machine;
use anyhow::Result;
use ironhorse::train::run::view::{Drawn, Quantity, RunView, SMOOTHING};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::collections::HashMap;

/// What is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panel {
    /// The loss, other curves where there is room, and the figures.
    Overview,
    /// One quantity, as large as it can be.
    Curve(Quantity),
    /// The loads of the experts.
    Experts,
    /// What the model wrote.
    Samples,
    /// Settings and where the run comes from.
    Settings,
}

impl Panel {
    pub fn name(self) -> &'static str {
        match self {
            Self::Overview => "overview",
            Self::Curve(Quantity::Loss) => "loss",
            Self::Curve(Quantity::Lr) => "rate",
            Self::Curve(Quantity::GradNorm) => "norm",
            Self::Curve(Quantity::RewardAccuracy) => "rewards",
            Self::Curve(Quantity::Busiest) => "balance",
            Self::Curve(quantity) => quantity.name(),
            Self::Experts => "experts",
            Self::Samples => "samples",
            Self::Settings => "settings",
        }
    }
}

/// What a key asks for.
#[derive(Debug, PartialEq, Eq)]
pub enum Then {
    End,
    Draw,
    Nothing,
}

/// What a curve was made from: the run, the quantity, whether it is smoothed, the columns.
type CurveKey = (usize, Quantity, bool, usize);

/// Everything that is shown.
pub struct App {
    pub runs: Vec<RunView>,
    /// The run whose figures, samples and settings are shown.
    pub chosen: usize,
    pub panel: Panel,
    pub log_axis: bool,
    pub colours: bool,
    smoothing: usize,
    /// How many samples before the newest.
    back: usize,
    machine: Machine,
    /// What is known of the machine that the chosen run's process is on.
    pub machine_facts: Vec<(&'static str, String)>,
    curves: HashMap<CurveKey, Vec<(f64, f64)>>,
}

impl App {
    pub fn new(runs: Vec<RunView>, colours: bool) -> Self {
        Self {
            runs,
            chosen: 0,
            panel: Panel::Overview,
            log_axis: false,
            colours,
            smoothing: 0,
            back: 0,
            machine: Machine::open(),
            machine_facts: Vec::new(),
            curves: HashMap::new(),
        }
    }

    /// Reads what is new.
    pub fn look(&mut self) -> Result<()> {
        for (i, run) in self.runs.iter_mut().enumerate() {
            if run.refresh()? {
                self.curves.retain(|key, _| key.0 != i);
            }
        }
        self.machine_facts = self.machine.facts(self.run());
        Ok(())
    }

    /// The chosen run.
    pub fn run(&self) -> &RunView {
        &self.runs[self.chosen]
    }

    /// The panels that have something to show.
    pub fn panels(&self) -> Vec<Panel> {
        let has = |quantity| self.runs.iter().any(|run| run.table.last(quantity).is_some());
        let curves = [
            Quantity::Loss,
            Quantity::Lr,
            Quantity::GradNorm,
            Quantity::TokensPerS,
            Quantity::RewardAccuracy,
        ];
        let mut panels = vec![Panel::Overview];
        panels.extend(curves.into_iter().filter(|&quantity| has(quantity)).map(Panel::Curve));
        if has(Quantity::Busiest) {
            panels.extend([Panel::Experts, Panel::Curve(Quantity::Busiest)]);
        }
        panels.extend([Panel::Samples, Panel::Settings]);
        panels
    }

    /// How curves are smoothed, in words.
    pub fn smoothing(&self) -> &'static str {
        SMOOTHING[self.smoothing].0
    }

    /// A curve of at most about four points for each column.
    pub fn curve(&mut self, run: usize, quantity: Quantity, smoothed: bool, columns: usize) -> &[(f64, f64)] {
        let share = if smoothed { SMOOTHING[self.smoothing].1 } else { 0 };
        let table = &self.runs[run].table;
        let drawn = Drawn::whole(share, columns);
        self.curves.entry((run, quantity, smoothed, columns)).or_insert_with(|| table.curve(quantity, &drawn))
    }

    /// Whether the smoothed curve of a quantity is another than its points.
    pub fn smooths(&self, quantity: Quantity) -> bool {
        SMOOTHING[self.smoothing].1 > 0 && quantity.is_noisy()
    }

    /// The sample that is shown: its number from 0, its step and its text.
    pub fn sample(&self) -> Option<(usize, u64, String)> {
        let index = self.run().samples.len().checked_sub(1)?.saturating_sub(self.back);
        self.run().sample(index).map(|(step, text)| (index, step, text))
    }

    /// Obeys a key.
    pub fn key(&mut self, key: KeyEvent) -> Then {
        if key.kind == KeyEventKind::Release {
            return Then::Nothing;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Then::End,
            KeyCode::Char('c') if control => return Then::End,
            KeyCode::Tab => self.move_panel(1),
            KeyCode::BackTab => self.move_panel(-1),
            KeyCode::Char('s') => {
                self.smoothing = (self.smoothing + 1) % SMOOTHING.len();
                self.curves.clear();
            }
            KeyCode::Char('l') => self.log_axis = !self.log_axis,
            KeyCode::Down => self.choose(1),
            KeyCode::Up => self.choose(self.runs.len() - 1),
            KeyCode::Left => self.back = (self.back + 1).min(self.run().samples.len().saturating_sub(1)),
            KeyCode::Right => self.back = self.back.saturating_sub(1),
            _ => return Then::Nothing,
        }
        Then::Draw
    }

    fn move_panel(&mut self, by: isize) {
        let panels = self.panels();
        let at = panels.iter().position(|&panel| panel == self.panel).unwrap_or(0) as isize;
        self.panel = panels[(at + by).rem_euclid(panels.len() as isize) as usize];
    }

    fn choose(&mut self, by: usize) {
        (self.chosen, self.back) = ((self.chosen + by) % self.runs.len(), 0);
        self.machine_facts = self.machine.facts(self.run());
    }
}
