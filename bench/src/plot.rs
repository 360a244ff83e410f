//! Plots as SVG with logarithmic axes.

use std::path::Path;

use anyhow::anyhow;
use plotters::prelude::*;
use serde_json::Value;
use vmferry_report::bench::Row;
use vmferry_report::human;

/// A plot.
pub struct Plot {
    /// The title.
    pub title: String,
    /// The label of the x axis, with the unit.
    pub across: &'static str,
    /// The label of the y axis, with the unit.
    pub upwards: &'static str,
    /// The position of the legend.
    pub legend: SeriesLabelPosition,
    /// The lines: name and points. All coordinates are above 0.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Plot {
    /// Adds the lines of a table: one line per value of the column `by`, with the `point` of each
    /// row that is `wanted`. An x of 0 is drawn at `zero`.
    pub fn of_rows(
        mut self,
        rows: &[Row],
        by: &str,
        zero: f64,
        wanted: impl Fn(&Row) -> bool,
        point: impl Fn(&Row) -> (f64, f64),
    ) -> Self {
        for row in rows.iter().filter(|row| wanted(row)) {
            let name = row.get(by).and_then(Value::as_str).unwrap_or_default();
            let (x, y) = point(row);
            let point = (if x > 0.0 { x } else { zero }, y.max(1e-9));
            match self.lines.iter_mut().find(|(line, _)| line == name) {
                Some((_, points)) => points.push(point),
                None => self.lines.push((name.to_owned(), vec![point])),
            }
        }
        for (_, points) in &mut self.lines {
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        self
    }
}

/// Reads a number from a row. Returns 0 if the row has no such number.
pub fn number(row: &Row, name: &str) -> f64 {
    row.get(name).and_then(Value::as_f64).unwrap_or_default()
}

const WIDTH: u32 = 900;
const HEIGHT: u32 = 460;

/// Colors that color-blind people can tell apart (Okabe and Ito).
const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(0, 0, 0),
    RGBColor(150, 140, 40),
];

/// Draws plots one below the other.
pub fn draw(plots: &[Plot], path: &Path) -> anyhow::Result<()> {
    let size = (WIDTH, HEIGHT * plots.len().max(1) as u32);
    let root = SVGBackend::new(path, size).into_drawing_area();
    // The backend's errors borrow the drawing area, so they are converted to text.
    let failed = |error: &dyn std::fmt::Display| anyhow!("{error}");
    root.fill(&WHITE).map_err(|error| failed(&error))?;
    for (area, plot) in root.split_evenly((plots.len().max(1), 1)).iter().zip(plots) {
        let points = || plot.lines.iter().flat_map(|(_, points)| points);
        let bounds = |of: fn(&(f64, f64)) -> f64| {
            let (least, most) = points()
                .map(of)
                .fold((f64::INFINITY, 0.0_f64), |(least, most), x| (least.min(x), most.max(x)));
            (least * 0.8)..(most * 1.3).max(least * 2.0)
        };
        if points().next().is_none() {
            continue;
        }
        let mut chart = ChartBuilder::on(area)
            .caption(&plot.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(42)
            .y_label_area_size(84)
            .build_cartesian_2d(bounds(|p| p.0).log_scale(), bounds(|p| p.1).log_scale())
            .map_err(|error| failed(&error))?;
        chart
            .configure_mesh()
            .x_desc(plot.across)
            .y_desc(plot.upwards)
            .x_label_formatter(&|x| short(*x))
            .y_label_formatter(&|y| short(*y))
            .light_line_style(BLACK.mix(0.06))
            .draw()
            .map_err(|error| failed(&error))?;
        for (index, (name, points)) in plot.lines.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            chart
                .draw_series(LineSeries::new(points.iter().copied(), color.stroke_width(2)))
                .map_err(|error| failed(&error))?
                .label(name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 18, y)], color.stroke_width(3))
                });
            chart
                .draw_series(points.iter().map(|point| Circle::new(*point, 3, color.filled())))
                .map_err(|error| failed(&error))?;
        }
        chart
            .configure_series_labels()
            .position(plot.legend.clone())
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .draw()
            .map_err(|error| failed(&error))?;
    }
    root.present().map_err(|error| failed(&error))
}

/// Formats a number with a unit prefix.
fn short(number: f64) -> String {
    if number < 0.999e-3 {
        return format!("{number:.0e}");
    }
    let (number, unit) = human::scaled(number);
    let text = format!("{number:.3}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_uses_unit_prefixes() {
        for (number, text) in
            [(1.0, "1"), (0.01, "0.01"), (0.0001, "1e-4"), (20_000.0, "20k"), (1.5e9, "1.5G")]
        {
            assert_eq!(short(number), text);
        }
    }

    #[test]
    fn draw_writes_an_svg_with_title_and_labels() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plot.svg");
        let lines = vec![("a way".to_owned(), vec![(1.0, 2.0), (10.0, 200.0)])];
        let legend = SeriesLabelPosition::UpperLeft;
        let plot = Plot { title: "A title".into(), across: "x", upwards: "y (us)", legend, lines };
        draw(&[plot], &path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"));
        for word in ["A title", "a way", "y (us)"] {
            assert!(text.contains(word), "{word}");
        }
        let nowhere = directory.path().join("none/plot.svg");
        assert!(draw(&[], &nowhere).is_err());
    }
}
