//! The panels of the terminal.

use super::super::runs;
use super::app::{App, Panel};
use crate::figures::{duration, short, whole};
use ironhorse::train::run::view::{Life, Quantity};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, LineGauge, Paragraph, Wrap};

/// Colours of the runs, the same order as in the pictures: blue, orange, green, purple.
const COLOURS: [Color; 4] = [Color::LightBlue, Color::Yellow, Color::LightGreen, Color::LightMagenta];
/// How lines of several runs are told apart without colour.
const MARKERS: [Marker; 4] = [Marker::Braille, Marker::Dot, Marker::HalfBlock, Marker::Block];
/// Width of the figures beside a chart.
const FIGURES: u16 = 38;
/// The least width and height of a terminal with room for several charts.
const LARGE: (u16, u16) = (120, 36);

pub fn draw(frame: &mut Frame<'_>, app: &mut App) {
    let rows = [
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(3),
        Constraint::Length(1),
    ];
    let [head, gauge, tabs, body, foot] = Layout::vertical(rows).areas(frame.area());
    draw_head(frame, head, app);
    draw_gauge(frame, gauge, app);
    draw_tabs(frame, tabs, app);
    match app.panel {
        Panel::Overview => draw_overview(frame, body, app),
        Panel::Curve(Quantity::Loss) => draw_chart(frame, body, app, &[Quantity::Loss, Quantity::ValLoss]),
        Panel::Curve(quantity) => draw_chart(frame, body, app, &[quantity]),
        Panel::Experts => draw_experts(frame, body, app),
        Panel::Samples => draw_sample(frame, body, app),
        Panel::Settings => draw_settings(frame, body, app),
    }
    let axis = if app.log_axis { "logarithmic" } else { "linear" };
    let keys = format!(
        "q end  tab panel  \u{2191}\u{2193} run  \u{2190}\u{2192} sample  s smoothing: {}  l axis: {axis}",
        app.smoothing()
    );
    frame.render_widget(Paragraph::new(keys).style(Style::new().add_modifier(Modifier::DIM)), foot);
}

/// How a run's lines are drawn.
fn look(app: &App, run: usize) -> (Style, Marker) {
    match app.colours {
        true => (Style::new().fg(COLOURS[run % COLOURS.len()]), Marker::Braille),
        false => (Style::new(), MARKERS[run % MARKERS.len()]),
    }
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let mut spans = vec![Span::styled("ironhorse watch", Style::new().add_modifier(Modifier::BOLD))];
    for (i, run) in app.runs.iter().enumerate() {
        let mut style = look(app, i).0;
        if i == app.chosen {
            style = style.add_modifier(Modifier::BOLD | Modifier::UNDERLINED);
        }
        spans.extend([Span::raw("  "), Span::styled(run.name(), style)]);
    }
    spans.push(Span::raw(format!("  {}", runs::state(app.run()))));
    frame.render_widget(Line::from(spans), area);
}

fn draw_gauge(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let run = app.run();
    let mut label = format!("step {}", runs::progress(run));
    if let Some(left) = run.eta().filter(|_| !run.is_complete()) {
        let left = duration(left);
        label += &if run.life == Life::Nobody { format!("  {left} left") } else { format!("  ETA {left}") };
    }
    let Some(steps) = run.setting("steps").filter(|steps| *steps > 0) else {
        return frame.render_widget(Line::from(label), area);
    };
    let ratio = (run.made() as f64 / steps as f64).clamp(0.0, 1.0);
    let label = format!("{label}  {:.1} %", 100.0 * ratio);
    let gauge = LineGauge::default()
        .ratio(ratio)
        .label(label)
        .filled_symbol("\u{2501}")
        .unfilled_symbol("\u{2500}")
        .filled_style(look(app, app.chosen).0);
    frame.render_widget(gauge, area);
}

fn draw_tabs(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let mut spans = Vec::new();
    for panel in app.panels() {
        let style = match panel == app.panel {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        };
        spans.extend([Span::styled(format!(" {} ", panel.name()), style)]);
    }
    frame.render_widget(Line::from(spans), area);
}

fn draw_overview(frame: &mut Frame<'_>, area: Rect, app: &mut App) {
    let loss = [Quantity::Loss, Quantity::ValLoss];
    let small = area.width < LARGE.0 || area.height < LARGE.1;
    if area.width < 2 * FIGURES - 8 {
        return draw_figures(frame, area, app);
    }
    let [left, right] = Layout::horizontal([Constraint::Min(30), Constraint::Length(FIGURES)]).areas(area);
    if small {
        draw_chart(frame, left, app, &loss);
        return draw_figures(frame, right, app);
    }
    let [top, bottom] =
        Layout::vertical([Constraint::Percentage(62), Constraint::Percentage(38)]).areas(left);
    draw_chart(frame, top, app, &loss);
    let thirds: [Rect; 3] = Layout::horizontal([Constraint::Ratio(1, 3); 3]).areas(bottom);
    for (area, quantity) in thirds.into_iter().zip([Quantity::Lr, Quantity::GradNorm, Quantity::TokensPerS]) {
        draw_chart(frame, area, app, &[quantity]);
    }
    let lines = (figures(app).len() + 2) as u16;
    let [top, bottom] = Layout::vertical([Constraint::Length(lines), Constraint::Min(0)]).areas(right);
    draw_figures(frame, top, app);
    draw_sample(frame, bottom, app);
}

fn figures(app: &App) -> Vec<(&'static str, String)> {
    let mut facts = runs::facts_with(app.run(), &app.machine_facts);
    facts.retain(|(name, _)| !["state", "step", "time left"].contains(name)); // they are in the head
    facts
}

fn draw_figures(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let lines: Vec<Line<'_>> = figures(app)
        .into_iter()
        .map(|(name, text)| {
            let name = Span::styled(format!("{name:<15} "), Style::new().add_modifier(Modifier::DIM));
            Line::from(vec![name, Span::raw(text)])
        })
        .collect();
    let block = Block::bordered().title(app.run().name());
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// One curve of a chart.
struct Curve {
    run: usize,
    points: Vec<(f64, f64)>,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// What was measured, behind the smoothed line.
    Raw,
    Line,
    Dots,
}

/// Quantities of every run over the steps.
fn draw_chart(frame: &mut Frame<'_>, area: Rect, app: &mut App, quantities: &[Quantity]) {
    let columns = usize::from(area.width.max(8)) * 2; // braille has two dots a column
    let mut curves = Vec::new();
    for run in 0..app.runs.len() {
        for &quantity in quantities {
            // what was measured behind the mean, where it is not in the way of other runs
            if app.smooths(quantity) && app.runs.len() == 1 && app.colours {
                curves.push(Curve {
                    run,
                    points: app.curve(run, quantity, false, columns).to_vec(),
                    kind: Kind::Raw,
                });
            }
            let smoothed = app.smooths(quantity);
            let kind = if quantity.is_sparse() { Kind::Dots } else { Kind::Line };
            curves.push(Curve { run, points: app.curve(run, quantity, smoothed, columns).to_vec(), kind });
        }
    }
    if app.log_axis {
        for curve in &mut curves {
            curve.points.retain(|point| point.1 > 0.0);
            curve.points.iter_mut().for_each(|point| point.1 = point.1.log10());
        }
    }
    let first = quantities.first().copied().unwrap_or(Quantity::Loss);
    let label = if quantities.len() > 1 { format!("loss ({})", first.unit()) } else { first.label() };
    let mut title = vec![Span::raw(label)];
    if app.log_axis {
        title.push(Span::raw(", log"));
    }
    if quantities.len() > 1 && curves.iter().any(|curve| curve.kind == Kind::Dots && !curve.points.is_empty())
    {
        title.push(Span::raw(", \u{2022} validation"));
    }
    let block = Block::bordered().title(Line::from(title));
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let range = |value: fn(&(f64, f64)) -> f64| {
        all().map(value).fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), v| (a.min(v), b.max(v)))
    };
    if all().next().is_none() {
        return frame.render_widget(Paragraph::new("no step yet").block(block), area);
    }
    let (x, y) = (wider(range(|point| point.0)), wider(range(|point| point.1)));
    let back = |value: f64| if app.log_axis { 10_f64.powf(value) } else { value };
    let inner = area.height.saturating_sub(4);
    let y_labels = labels(y, usize::from((inner / 4).clamp(2, 8)), |value| short(back(value)));
    let mut x_labels = labels(x, usize::from((area.width / 24).clamp(2, 8)), whole);
    x_labels.last_mut().into_iter().for_each(|last| *last = format!("step {last}"));
    let sets = curves.iter().map(|curve| {
        let (style, marker) = look(app, curve.run);
        let set = Dataset::default().data(&curve.points);
        match curve.kind {
            Kind::Raw => set
                .marker(Marker::Braille)
                .graph_type(GraphType::Line)
                .style(Style::new().fg(Color::DarkGray)),
            Kind::Line => set.marker(marker).graph_type(GraphType::Line).style(style),
            Kind::Dots => {
                set.marker(Marker::Dot).graph_type(GraphType::Scatter).style(validation(app, style))
            }
        }
    });
    let chart = Chart::new(sets.collect())
        .block(block)
        .legend_position(None)
        .x_axis(Axis::default().bounds([x.0, x.1]).labels(x_labels))
        .y_axis(Axis::default().bounds([y.0, y.1]).labels(y_labels));
    frame.render_widget(chart, area);
}

/// Dots of validation stand out from the line of one run, and have the colour of theirs where there are several.
fn validation(app: &App, style: Style) -> Style {
    if app.colours && app.runs.len() == 1 { Style::new().fg(COLOURS[1]) } else { style }
}

/// A range that is not empty.
fn wider((low, high): (f64, f64)) -> (f64, f64) {
    if high > low { (low, high) } else { (low - 0.5, high + 0.5) }
}

fn labels((low, high): (f64, f64), count: usize, text: impl Fn(f64) -> String) -> Vec<String> {
    (0..count).map(|i| text(low + (high - low) * i as f64 / (count - 1).max(1) as f64)).collect()
}

/// The share of the tokens of each expert, a row for each layer.
fn draw_experts(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let block = Block::bordered()
        .title("percent of the tokens by expert; \u{25b2} far above, \u{25bc} far below an even share");
    let router = &app.run().table.router;
    let experts = router.first().map_or(1, |layer| layer.load.len()).max(1);
    let room = usize::from(area.width.saturating_sub(12)) / experts;
    let mut lines = Vec::new();
    for (l, layer) in router.iter().enumerate() {
        let mut spans = vec![Span::raw(format!("layer {l:>2}  "))];
        let sum: f32 = layer.load.iter().sum();
        for &load in &layer.load {
            let share = if sum > 0.0 { load / sum } else { 0.0 };
            spans.push(cell(share, 1.0 / experts as f32, room, app.colours));
        }
        lines.push(Line::from(spans));
    }
    if lines.is_empty() {
        lines.push(Line::raw("this run has no experts, or has not measured them yet"));
    }
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

/// One expert, in as many characters as there are: a number and a mark, or a shade.
fn cell(share: f32, even: f32, room: usize, colours: bool) -> Span<'static> {
    let off = (share / even).max(1e-3).log2();
    let mark = match off {
        _ if off >= 0.5 => '\u{25b2}',
        _ if off <= -0.5 => '\u{25bc}',
        _ => ' ',
    };
    let text = match room {
        0 | 1 => [' ', '\u{2591}', '\u{2592}', '\u{2593}', '\u{2588}']
            [((off + 2.0).clamp(0.0, 4.0)) as usize]
            .to_string(),
        2..6 => mark.to_string(),
        _ => format!("{:>5.1}{mark}", 100.0 * share),
    };
    let colour = if off > 0.0 { COLOURS[1] } else { COLOURS[0] };
    if colours && mark != ' ' { Span::styled(text, Style::new().fg(colour)) } else { Span::raw(text) }
}

fn draw_sample(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let (title, text) = match app.sample() {
        Some((at, step, text)) => {
            let (number, all) = (at + 1, app.run().samples.len());
            (format!("sample {number} of {all}, after {} steps", whole(step as f64)), harmless(&text))
        }
        None => ("samples".into(), "no sample yet".into()),
    };
    let sample = Paragraph::new(text).wrap(Wrap { trim: false }).block(Block::bordered().title(title));
    frame.render_widget(sample, area);
}

/// A text without what a terminal would obey.
fn harmless(text: &str) -> String {
    let plain = |c: char| match c {
        '\n' => '\n',
        '\t' => ' ',
        c if c.is_control() => '\u{b7}',
        c => c,
    };
    text.chars().map(plain).collect()
}

fn draw_settings(frame: &mut Frame<'_>, area: Rect, app: &App) {
    let lines: Vec<Line<'_>> = runs::settings(app.run())
        .into_iter()
        .map(|(name, text)| {
            let name = Span::styled(format!("{name:<16} "), Style::new().add_modifier(Modifier::DIM));
            Line::from(vec![name, Span::raw(harmless(&text))])
        })
        .collect();
    let block = Block::bordered().title(app.run().path().display().to_string());
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

#[cfg(test)]
mod tests {
    use super::super::app::Then;
    use super::*;
    use ironhorse::train::run::RunFolder;
    use ironhorse::train::run::metrics::Metrics;
    use ironhorse::train::run::view::RunView;
    use ironhorse::train::session::LayerRouting;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
    use std::path::{Path, PathBuf};

    /// A run of 40 steps with validation, a sample and experts.
    fn run(at: &Path, name: &str, more: f32) -> PathBuf {
        let path = at.join(name);
        let mut folder = RunFolder::create(&path, "steps = 100\nlr = 0.001\n", false).unwrap();
        for step in 0..40 {
            let load = vec![0.25, 0.25, 0.4, 0.1];
            folder
                .log(&Metrics {
                    step,
                    loss: more + 4.0 / (step as f32 + 1.0),
                    val_loss: (step % 10 == 0).then_some(more + 5.0),
                    lr: 1e-3,
                    grad_norm: Some(0.5),
                    ms: 60_000.0,
                    tokens: Some(512),
                    tokens_per_s: 8.5,
                    router: vec![LayerRouting { load, entropy: 1.0, aux: 0.1 }],
                    ..Metrics::default()
                })
                .unwrap();
        }
        folder.sample(20, "once\u{1b}[31m there was").unwrap();
        folder.sample(40, "the end").unwrap();
        path
    }

    fn app_of(paths: &[PathBuf]) -> App {
        App::new(paths.iter().map(|path| RunView::open(path).unwrap()).collect(), true)
    }

    fn screen(app: &mut App, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, app)).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>() + "\n";
        (0..height).map(row).collect()
    }

    fn press(app: &mut App, code: KeyCode) -> Then {
        app.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn small_and_large_terminals_show_the_run() {
        let top = tempfile::tempdir().unwrap();
        let mut app = app_of(&[run(top.path(), "0001", 1.0)]);
        let small = screen(&mut app, 80, 24);
        for text in [
            "0001",
            "step 40 of 100",
            "1h00m left",
            "40.0 %",
            "loss (nats per token)",
            "8.5 tokens/s",
            "gradient norm   0.5",
            "1.60 × an even share",
            "q end",
            "s smoothing: medium",
            "l axis: linear",
            "\u{2022} validation",
        ] {
            assert!(small.contains(text), "{text} is not in\n{small}");
        }
        assert!(small.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "a curve\n{small}");
        let large = screen(&mut app, 200, 50);
        for text in ["learning rate", "speed (tokens/s)", "sample 2 of 2, after 40 steps", "the end"] {
            assert!(large.contains(text), "{text} is not in\n{large}");
        }
        // nothing panics where there is no room
        for (width, height) in [(1, 1), (10, 3), (30, 8), (61, 12), (300, 4)] {
            screen(&mut app, width, height);
        }
    }

    #[test]
    fn keys_do_what_the_last_line_says() {
        let top = tempfile::tempdir().unwrap();
        let mut app = app_of(&[run(top.path(), "a", 1.0), run(top.path(), "b", 2.0)]);
        assert_eq!(press(&mut app, KeyCode::Char('q')), Then::End);
        assert_eq!(press(&mut app, KeyCode::Char('x')), Then::Nothing);
        assert_eq!(press(&mut app, KeyCode::Char('l')), Then::Draw);
        press(&mut app, KeyCode::Char('s'));
        press(&mut app, KeyCode::Down);
        let text = screen(&mut app, 100, 24);
        assert!(text.contains("l axis: logarithmic") && text.contains("s smoothing: strong"), "{text}");
        assert!(text.contains("training loss   2.1000"), "the second run\n{text}");
        let mut seen = Vec::new();
        for _ in 0..app.panels().len() {
            press(&mut app, KeyCode::Tab);
            seen.push((app.panel, screen(&mut app, 100, 24)));
        }
        assert_eq!(app.panel, Panel::Overview, "around");
        let of = |panel| &seen.iter().find(|(at, _)| *at == panel).unwrap().1;
        assert!(of(Panel::Experts).contains("40.0\u{25b2}") && of(Panel::Experts).contains("10.0\u{25bc}"));
        assert!(of(Panel::Settings).contains("steps            100"));
        press(&mut app, KeyCode::BackTab);
        press(&mut app, KeyCode::BackTab);
        press(&mut app, KeyCode::Left);
        let sample = screen(&mut app, 80, 24);
        assert!(
            sample.contains("sample 1 of 2, after 20 steps") && sample.contains("once\u{b7}[31m there"),
            "{sample}"
        );
        press(&mut app, KeyCode::Right);
        assert!(screen(&mut app, 80, 24).contains("sample 2 of 2"));
    }

    #[test]
    fn a_run_without_steps_and_one_that_grows() {
        let top = tempfile::tempdir().unwrap();
        let path = top.path().join("new");
        let mut folder = RunFolder::create(&path, "steps = 10\n", false).unwrap();
        let mut app = app_of(std::slice::from_ref(&path));
        assert!(screen(&mut app, 80, 24).contains("no step yet"));
        folder.log(&Metrics { loss: f32::NAN, bad: true, ..Metrics::default() }).unwrap();
        folder.log(&Metrics { step: 1, loss: 3.5, ms: 10.0, ..Metrics::default() }).unwrap();
        app.look().unwrap();
        let text = screen(&mut app, 80, 24);
        assert!(text.contains("step 2 of 10") && text.contains("1, NaN or infinite"), "{text}");
        assert!(!text.contains("no step yet"));
    }
}
