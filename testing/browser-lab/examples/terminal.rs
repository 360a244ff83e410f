//! Draws a command's terminal output: `terminal COLUMNS PICTURE.png [AT_SECONDS] -- COMMAND`. The
//! command runs on a pseudo-terminal of that width. With AT_SECONDS the picture shows that moment,
//! otherwise the end.

use std::fmt::Write;
use std::io::Read;
use std::num::NonZero;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use vmferry_browser_lab::{Scheme, draw};

const ROWS: NonZero<u16> = NonZero::new(60).unwrap();
/// Size of a cell, and of the margin around the text, in pixels.
const CELL: (f64, u32) = (8.4, 19);
const MARGIN: u32 = 16;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let options: Vec<String> = arguments.by_ref().take_while(|word| word != "--").collect();
    let command: Vec<String> = arguments.collect();
    let (Some(columns), Some(picture)) =
        (options.first().and_then(|text| text.parse::<NonZero<u16>>().ok()), options.get(1))
    else {
        eprintln!("usage: terminal COLUMNS PICTURE.png [AT_SECONDS] -- COMMAND");
        return ExitCode::from(2);
    };
    let at = options.get(2).and_then(|text| text.parse().ok()).map(Duration::from_secs_f64);
    let screen = screen(columns, at, &command.join(" "));
    let lines: Vec<String> =
        screen.rows(0, columns.get()).map(|line| line.trim_end().to_owned()).collect();
    let used = lines.iter().rposition(|line| !line.is_empty()).map_or(1, |last| last + 1);
    let page = page(&screen, used as u16, columns.get());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("terminal.html");
    std::fs::write(&file, page).unwrap();
    let width = (f64::from(columns.get()) * CELL.0).ceil() as u32 + 2 * MARGIN;
    let height = used as u32 * CELL.1 + 2 * MARGIN;
    draw(&file, (width, height), Scheme::Light, Path::new(picture));
    ExitCode::SUCCESS
}

/// Runs the command on a terminal. Returns its screen at the moment, or at the end.
fn screen(columns: NonZero<u16>, at: Option<Duration>, command: &str) -> vt100::Screen {
    let line = format!("stty cols {columns} rows {ROWS}; exec {command}");
    let mut child = Command::new("script")
        .args(["--quiet", "--return", "--flush", "--command", &line, "/dev/null"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script(1) runs");
    let mut output = child.stdout.take().expect("its output is piped");
    let (begun, mut parser) = (Instant::now(), vt100::Parser::new(ROWS, columns, 0));
    let (mut seen, mut bytes) = (None, [0; 4096]);
    while let Ok(read @ 1..) = output.read(&mut bytes) {
        // Between two redraws.
        if seen.is_none() && at.is_some_and(|at| begun.elapsed() >= at) {
            seen = Some(parser.screen().clone());
        }
        parser.process(&bytes[..read]);
    }
    child.wait().expect("script(1) ends");
    seen.unwrap_or_else(|| parser.screen().clone())
}

/// A page that shows the rows of a screen, with all spaces preserved.
fn page(screen: &vt100::Screen, rows: u16, columns: u16) -> String {
    let mut text = String::new();
    for row in 0..rows {
        for column in 0..columns {
            let Some(cell) = screen.cell(row, column) else { continue };
            let shown = if cell.has_contents() { cell.contents() } else { " " };
            let shown = shown.replace('&', "&amp;").replace('<', "&lt;");
            match cell.fgcolor() {
                vt100::Color::Default => text += &shown,
                _ => write!(text, "<b>{shown}</b>").expect("a string takes everything"),
            }
        }
        text.push('\n');
    }
    let (_, line) = CELL;
    format!(
        "<!doctype html><meta charset=utf-8><style>\
         html {{ background: #f8fafc; color: #0f172a; }} \
         body {{ margin: {MARGIN}px; }} \
         pre {{ margin: 0; white-space: pre; font: 14px/{line}px 'DejaVu Sans Mono', monospace; }} \
         b {{ color: #0e7490; font-weight: normal; }}\
         </style><pre>{text}</pre>"
    )
}
