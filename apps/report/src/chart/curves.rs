//! Named lines with logarithmic axes, as an SVG of its own: the plots of the benchmarks.

use plotters::prelude::*;

use super::{LETTERS, SIZE, Tone, builder, draw_mesh};
use crate::error::ReportError;
use crate::human;

/// A plot of named lines.
pub struct Curves {
    /// The title.
    pub title: String,
    /// The label of the x axis, with the unit.
    pub across: &'static str,
    /// The label of the y axis, with the unit.
    pub upwards: &'static str,
    /// Where the names of the lines are.
    pub legend: Legend,
    /// The lines: name and points. All coordinates are above 0.
    pub lines: Vec<(String, Vec<(f64, f64)>)>,
}

/// The corner of a plot that has the names of its lines.
#[derive(Clone, Copy)]
pub enum Legend {
    /// For lines that rise to the right.
    UpperLeft,
    /// For lines that begin high.
    LowerRight,
}

/// The tones of the lines, in their order. The eighth line is black.
const TONES: [Tone; 7] =
    [Tone::Blue, Tone::Orange, Tone::Green, Tone::Pink, Tone::Sky, Tone::Red, Tone::Grey];

/// Draws plots one below the other.
///
/// # Errors
/// Plotters refuses a range or a font.
pub fn svg_of(plots: &[Curves]) -> Result<String, ReportError> {
    let mut svg = String::new();
    let rows = plots.len().max(1);
    {
        // A legend needs more room than a plot of the reports has.
        let size = (SIZE.0 * 2, SIZE.1 * 2 * rows as u32);
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        root.fill(&WHITE)?;
        for (area, plot) in root.split_evenly((rows, 1)).iter().zip(plots) {
            plot.draw(area)?;
        }
        root.present()?;
    }
    Ok(svg)
}

impl Curves {
    fn draw(
        &self,
        area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    ) -> Result<(), ReportError> {
        let points = || self.lines.iter().flat_map(|(_, points)| points);
        if points().next().is_none() {
            return Ok(());
        }
        let bounds = |of: fn(&(f64, f64)) -> f64| {
            let (least, most) = points()
                .map(of)
                .fold((f64::INFINITY, 0.0_f64), |(least, most), x| (least.min(x), most.max(x)));
            (least * 0.8)..(most * 1.3).max(least * 2.0)
        };
        let mut chart = builder(area)
            .caption(&self.title, ("sans-serif", LETTERS + 8))
            .build_cartesian_2d(bounds(|p| p.0).log_scale(), bounds(|p| p.1).log_scale())?;
        draw_mesh(
            chart
                .configure_mesh()
                .x_desc(self.across)
                .y_desc(self.upwards)
                .x_label_formatter(&|x| label(*x))
                .y_label_formatter(&|y| label(*y)),
        )?;
        for (index, (name, points)) in self.lines.iter().enumerate() {
            let color = TONES.get(index % (TONES.len() + 1)).map_or(BLACK, |tone| tone.color());
            let line = LineSeries::new(points.iter().copied(), color.stroke_width(4));
            chart.draw_series(line)?.label(name).legend(move |(x, y)| {
                PathElement::new([(x, y), (x + 24, y)], color.stroke_width(6))
            });
            let dots = points.iter().map(|point| Circle::new(*point, 6, color.filled()));
            chart.draw_series(dots)?;
        }
        chart
            .configure_series_labels()
            .position(match self.legend {
                Legend::UpperLeft => SeriesLabelPosition::UpperLeft,
                Legend::LowerRight => SeriesLabelPosition::LowerRight,
            })
            .label_font(("sans-serif", LETTERS))
            .background_style(WHITE.mix(0.85))
            .border_style(Tone::Grey.color())
            .draw()?;
        Ok(())
    }
}

/// Formats a number with the letter of its unit of 1000.
fn label(number: f64) -> String {
    let (number, unit) = human::scaled(number);
    format!("{}{unit}", human::digits(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn svg_has_titles_labels_and_names() {
        let lines = vec![("a way".to_owned(), vec![(1.0, 2.0), (10.0, 20_000.0)])];
        let (across, upwards, legend) = ("x", "y (us)", Legend::UpperLeft);
        let plot = Curves { title: "A title".into(), across, upwards, legend, lines };
        let svg = svg_of(&[plot]).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for word in ["A title", "a way", "y (us)", "10k", "<polyline"] {
            assert!(svg.contains(word), "{word}");
        }
    }
}
