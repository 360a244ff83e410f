//! SVG plots whose colors come from the page's style sheet, for light and dark themes.
//!
//! Plotters writes colors as attributes. Rules in `style.css` match these attributes and override
//! them, so each [`Tone`] has its own color in each theme, and some tones have hatching or dashes.
//! Plots are drawn at twice the displayed size, because plotters uses whole pixels.

mod curves;
mod dots;

use maud::{Markup, PreEscaped, html};
use plotters::chart::MeshStyle;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;

use crate::error::ReportError;
use crate::human;

pub use curves::{Curves, Legend, svg_of};
pub use dots::Dots;

/// A color with its meaning. The colors are from Okabe and Ito; color-blind people can tell them
/// apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// The first series.
    Blue,
    /// The second series; lines are dashed.
    Orange,
    /// The third series.
    Green,
    /// The fourth series; areas are hatched.
    Pink,
    /// The fifth series; areas are hatched the other way.
    Sky,
    /// Limits; lines are dotted.
    Red,
    /// Pages that cost almost nothing.
    Grey,
    /// Pages that were skipped; areas are dotted.
    Pale,
}

impl Tone {
    /// The color that plotters writes.
    pub fn color(self) -> RGBColor {
        match self {
            Self::Blue => RGBColor(0x00, 0x72, 0xB2),
            Self::Orange => RGBColor(0xE6, 0x9F, 0x00),
            Self::Green => RGBColor(0x00, 0x9E, 0x73),
            Self::Pink => RGBColor(0xCC, 0x79, 0xA7),
            Self::Sky => RGBColor(0x56, 0xB4, 0xE9),
            Self::Red => RGBColor(0xD5, 0x5E, 0x00),
            Self::Grey => RGBColor(0x8A, 0x8A, 0x8A),
            Self::Pale => RGBColor(0xD0, 0xD0, 0xD2),
        }
    }

    /// The color as an attribute value.
    pub fn hex(self) -> String {
        let RGBColor(red, green, blue) = self.color();
        format!("#{red:02X}{green:02X}{blue:02X}")
    }
}

/// The color of the grid lines.
const GRID: RGBColor = RGBColor(0xDD, 0xDD, 0xDE);

/// Twice the displayed size in pixels of a plot on a desktop screen, and of its font.
const SIZE: (u32, u32) = (880, 450);
const LETTERS: u32 = 28;

/// Maximum number of points per line; more are not visible at this width.
const POINTS: usize = 600;

/// Larger numbers are errors, and would make plotters loop for a very long time.
const MOST: f64 = 1e15;

/// An axis that begins at 0.
#[derive(Clone, Debug)]
pub struct Axis {
    /// The label, with the unit.
    title: String,
    /// The end of the axis, in units of the data.
    max: f64,
    /// Units of the data per unit of the axis.
    divisor: f64,
}

impl Axis {
    /// An axis for numbers without a unit.
    pub fn count(title: &str, max: f64) -> Self {
        let max = finite(max);
        let (divisor, letter) = human::scale_of(max);
        let unit = match letter {
            "k" => " (thousands)",
            "M" => " (millions)",
            "G" => " (billions)",
            "T" => " (trillions)",
            _ => "",
        };
        Self { title: format!("{title}{unit}"), max, divisor }
    }

    /// An axis for bytes, or for bytes per second if `unit` is `B/s`.
    pub fn bytes(title: &str, unit: &str, max: f64) -> Self {
        let max = finite(max);
        let (divisor, letter) = human::scale_of(max);
        Self { title: format!("{title} ({letter}{unit})"), max, divisor }
    }

    /// An axis for milliseconds.
    pub fn ms(title: &str, max: f64) -> Self {
        let max = finite(max);
        let (divisor, unit) = if max >= 2000.0 { (1000.0, "s") } else { (1.0, "ms") };
        Self { title: format!("{title} ({unit})"), max, divisor }
    }

    fn range(&self) -> std::ops::Range<f64> {
        0.0..if self.max > 0.0 { self.max * 1.06 } else { 1.0 }
    }

    fn label(&self, number: f64) -> String {
        human::digits((number / self.divisor * 1e6).round() / 1e6)
    }
}

fn finite(number: f64) -> f64 {
    if number.is_finite() { number.clamp(0.0, MOST) } else { 0.0 }
}

/// The properties of a plot.
pub struct Figure<'a> {
    /// An ID that is unique in the page.
    pub id: &'a str,
    /// The title.
    pub title: &'a str,
    /// A description for screen readers.
    pub description: String,
    /// The x axis.
    pub x: Axis,
    /// The y axis.
    pub y: Axis,
}

/// A line of a plot.
pub struct Line {
    /// The line's color.
    pub tone: Tone,
    /// The line's points.
    pub points: Vec<(f64, f64)>,
}

impl Figure<'_> {
    /// Draws lines over time, and vertical marks at events.
    pub fn lines(&self, lines: &[Line], marks: &[f64]) -> Result<Markup, ReportError> {
        self.draw(|area| {
            let mut chart = builder(area).build_cartesian_2d(self.x.range(), self.y.range())?;
            draw_mesh(
                chart
                    .configure_mesh()
                    .x_labels(6)
                    .y_labels(5)
                    .x_desc(&self.x.title)
                    .y_desc(&self.y.title)
                    .x_label_formatter(&|x| self.x.label(*x))
                    .y_label_formatter(&|y| self.y.label(*y)),
            )?;
            let end = self.y.range().end;
            for mark in
                marks.iter().map(|mark| finite(*mark)).filter(|at| self.x.range().contains(at))
            {
                let upright =
                    LineSeries::new([(mark, 0.0), (mark, end)], Tone::Grey.color().stroke_width(3));
                chart.draw_series(upright)?;
            }
            for line in lines {
                let points = thinned(&line.points, end, self.x.range().end);
                let color = line.tone.color();
                let alone = points.len() == 1;
                let dots = points.iter().filter(|_| alone || line.points.len() <= 40);
                let dots: Vec<_> =
                    dots.map(|point| Circle::new(*point, 6, color.filled())).collect();
                chart.draw_series(LineSeries::new(points, color.stroke_width(4)))?;
                chart.draw_series(dots)?;
            }
            Ok(())
        })
    }

    /// Draws stacked bars, numbered from 1.
    pub fn bars(&self, bars: &[Vec<(Tone, f64)>]) -> Result<Markup, ReportError> {
        let across = 0.4..self.x.max.max(1.0) + 0.6;
        self.draw(|area| {
            let mut chart = builder(area).build_cartesian_2d(across, self.y.range())?;
            // Round numbers are whole, so other labels are left empty.
            let whole =
                |x: &f64| if x.fract().abs() < 1e-6 { human::count(*x) } else { String::new() };
            draw_mesh(
                chart
                    .configure_mesh()
                    .disable_x_mesh()
                    .x_labels(12)
                    .y_labels(5)
                    .x_desc(&self.x.title)
                    .y_desc(&self.y.title)
                    .x_label_formatter(&whole)
                    .y_label_formatter(&|y| self.y.label(*y)),
            )?;
            for (index, parts) in bars.iter().enumerate() {
                let x = index as f64 + 1.0;
                let mut y = 0.0;
                for (tone, part) in parts.iter().map(|(tone, part)| (tone, finite(*part))) {
                    if part > 0.0 {
                        let corners = [(x - 0.36, y), (x + 0.36, y + part)];
                        let bar = Rectangle::new(corners, tone.color().filled());
                        chart.draw_series([bar])?;
                    }
                    y += part;
                }
            }
            Ok(())
        })
    }

    /// Draws the plot and adds its title and description.
    fn draw(
        &self,
        with: impl FnOnce(
            &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
        ) -> Result<(), ReportError>,
    ) -> Result<Markup, ReportError> {
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            with(&area)?;
            area.present()?;
        }
        Ok(with_title(self.id, self.title, &self.description, &svg))
    }
}

/// Adds a title and a description to an SVG.
fn with_title(id: &str, title: &str, description: &str, svg: &str) -> Markup {
    let (head, body) = svg.split_once('>').unwrap_or((svg, ""));
    let head = head.replacen("<svg", "", 1);
    let names =
        format!(r#"class="plot" role="img" aria-labelledby="{id}-t" aria-describedby="{id}-d""#);
    html! {
        (PreEscaped(format!("<svg {names}{head}>")))
        title id=(format!("{id}-t")) { (title) }
        desc id=(format!("{id}-d")) { (description) }
        (PreEscaped(body))
    }
}

/// Starts a plot with room for its axes.
fn builder<'a, 'b: 'a>(
    area: &'a DrawingArea<SVGBackend<'b>, plotters::coord::Shift>,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin_top(14).margin_left(10).margin_right(24);
    builder.x_label_area_size(86).y_label_area_size(116);
    builder
}

/// Draws the axes and the grid with the page's font and colors.
fn draw_mesh<X, Y, DB>(mesh: &mut MeshStyle<'_, '_, X, Y, DB>) -> Result<(), ReportError>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    DB: DrawingBackend<ErrorType = std::io::Error>,
{
    mesh.label_style(("sans-serif", LETTERS))
        .axis_desc_style(("sans-serif", LETTERS))
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(Tone::Grey.color())
        .draw()?;
    Ok(())
}

/// Averages neighboring points so that at most [`POINTS`] remain. All of them are within the plot
/// and ordered by time.
fn thinned(points: &[(f64, f64)], top: f64, end: f64) -> Vec<(f64, f64)> {
    let each = points.len().div_ceil(POINTS).max(1);
    let mut kept: Vec<(f64, f64)> = points
        .chunks(each)
        .map(|some| {
            let length = some.len() as f64;
            let sum = some
                .iter()
                .fold((0.0, 0.0), |sum, point| (sum.0 + finite(point.0), sum.1 + finite(point.1)));
            ((sum.0 / length).min(end), (sum.1 / length).min(top))
        })
        .collect();
    kept.sort_by(|a, b| a.0.total_cmp(&b.0));
    kept
}

/// Draws a sample of a tone for a legend.
pub fn swatch(tone: Tone, is_line: bool) -> Markup {
    html! {
        svg.swatch aria-hidden="true" viewBox="0 0 36 20" {
            @if is_line {
                polyline points="0,10 36,10" fill="none" stroke=(tone.hex()) stroke-width="5" {}
            } @else {
                rect width="36" height="20" fill=(tone.hex()) {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(max: f64) -> Figure<'static> {
        let (x, y) = (Axis::ms("time", max), Axis::bytes("sent", "B", max));
        Figure { id: "a", title: "A title & more", description: "What is <seen>".into(), x, y }
    }

    #[test]
    fn figure_has_title_labels_and_colors() {
        let lines = [Line { tone: Tone::Blue, points: vec![(0.0, 1e6), (3000.0, 2e6)] }];
        let svg = figure(3e6).lines(&lines, &[100.0]).unwrap().into_string();
        for word in [
            "role=\"img\"",
            "A title &amp; more",
            "What is &lt;seen&gt;",
            "sent (MB)",
            "time (s)",
            "#0072B2",
        ] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
        assert_eq!(svg.matches("<svg").count(), 1);
        let svg =
            figure(3.0).bars(&[vec![(Tone::Green, 2.0), (Tone::Pale, 0.0)]]).unwrap().into_string();
        assert!(
            svg.contains("#009E73") && !svg.contains("#D0D0D2"),
            "a part of size 0 is not drawn"
        );
    }

    #[test]
    fn figure_accepts_invalid_numbers() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300, 1e-300] {
            let lines = [Line { tone: Tone::Red, points: vec![(bad, bad), (1.0, bad)] }];
            figure(bad).lines(&lines, &[bad]).unwrap();
            figure(bad).bars(&[vec![(Tone::Blue, bad)]]).unwrap();
        }
    }

    #[test]
    fn thinned_limits_the_number_of_points() {
        let points: Vec<(f64, f64)> = (0..10_000).map(|i| (f64::from(i), 1.0)).collect();
        assert!(thinned(&points, 9.0, 1e9).len() <= POINTS);
        assert_eq!(thinned(&[(5.0, 20.0)], 9.0, 3.0), [(3.0, 9.0)]);
    }
}
