//! Plots as SVG that a page's style sheet colours, for light and for dark paper.
//!
//! Plotters writes colours as attributes, and rules for these attributes in `style.css` have the last word: so each
//! [`Tone`] has a colour of its own in each scheme, and some have a hatching or dashes as well. What is drawn twice as
//! large as it is shown stands where it should: plotters has whole pixels only.

mod dots;

use maud::{Markup, PreEscaped, html};
use plotters::chart::MeshStyle;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;

use crate::error::ReportError;
use crate::human;

pub use dots::Dots;

/// A colour with its meaning. Those of Okabe and Ito, which people who see few colours can tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// The first series.
    Blue,
    /// The second; its lines are dashed.
    Orange,
    /// The third.
    Green,
    /// The fourth; its areas are hatched.
    Pink,
    /// The fifth; its areas are hatched the other way.
    Sky,
    /// Limits; its lines are dotted.
    Red,
    /// What costs nothing.
    Grey,
    /// What was left out; its areas are dotted.
    Pale,
}

impl Tone {
    /// As the attribute has it.
    pub fn colour(self) -> RGBColor {
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

    /// The attribute.
    pub fn hex(self) -> String {
        let RGBColor(red, green, blue) = self.colour();
        format!("#{red:02X}{green:02X}{blue:02X}")
    }
}

/// Lines of the grid.
const GRID: RGBColor = RGBColor(0xDD, 0xDD, 0xDE);

/// Twice the size in pixels of a plot on a desk's screen, and of its letters with the space between their lines.
const SIZE: (u32, u32) = (880, 450);
const LETTERS: u32 = 28;

/// More points than this are not seen on a plot of that width.
const POINTS: usize = 600;

/// Beyond this a number is a mistake, and would have plotters count for ever.
const MOST: f64 = 1e15;

/// An axis that begins at 0.
#[derive(Clone, Debug)]
pub struct Axis {
    /// What it means, with its unit.
    title: String,
    /// Its end, in units of the data.
    max: f64,
    /// Units of the data in one of the axis.
    divisor: f64,
}

impl Axis {
    /// Numbers without a unit.
    pub fn count(title: &str, max: f64) -> Self {
        let max = tame(max);
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

    /// Bytes, or with `unit` `B/s` bytes per second.
    pub fn bytes(title: &str, unit: &str, max: f64) -> Self {
        let max = tame(max);
        let (divisor, letter) = human::scale_of(max);
        Self { title: format!("{title} ({letter}{unit})"), max, divisor }
    }

    /// Milliseconds.
    pub fn ms(title: &str, max: f64) -> Self {
        let max = tame(max);
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

fn tame(number: f64) -> f64 {
    if number.is_finite() { number.clamp(0.0, MOST) } else { 0.0 }
}

/// What every plot has.
pub struct Figure<'a> {
    /// Unique in the page.
    pub id: &'a str,
    /// What is shown.
    pub title: &'a str,
    /// What is to be seen in it, for whoever does not see it.
    pub description: String,
    /// Across.
    pub x: Axis,
    /// Upwards.
    pub y: Axis,
}

/// A line.
pub struct Line {
    /// Its colour.
    pub tone: Tone,
    /// Its points.
    pub points: Vec<(f64, f64)>,
}

impl Figure<'_> {
    /// Lines over time, and upright marks where something happened.
    pub fn lines(&self, lines: &[Line], marks: &[f64]) -> Result<Markup, ReportError> {
        self.draw(|area| {
            let mut chart = builder(area)
                .build_cartesian_2d(self.x.range(), self.y.range())
                .map_err(|error| failed(&error))?;
            dressed(
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
                marks.iter().map(|mark| tame(*mark)).filter(|at| self.x.range().contains(at))
            {
                let upright = LineSeries::new(
                    [(mark, 0.0), (mark, end)],
                    Tone::Grey.colour().stroke_width(3),
                );
                chart.draw_series(upright).map_err(|error| failed(&error))?;
            }
            for line in lines {
                let points = thinned(&line.points, end, self.x.range().end);
                let colour = line.tone.colour();
                let alone = points.len() == 1;
                let dots = points.iter().filter(|_| alone || line.points.len() <= 40);
                let dots: Vec<_> =
                    dots.map(|point| Circle::new(*point, 6, colour.filled())).collect();
                chart
                    .draw_series(LineSeries::new(points, colour.stroke_width(4)))
                    .map_err(|error| failed(&error))?;
                chart.draw_series(dots).map_err(|error| failed(&error))?;
            }
            Ok(())
        })
    }

    /// Bars for numbers from 1, each of parts that stand on one another.
    pub fn bars(&self, bars: &[Vec<(Tone, f64)>]) -> Result<Markup, ReportError> {
        let across = 0.4..self.x.max.max(1.0) + 0.6;
        self.draw(|area| {
            let mut chart = builder(area)
                .build_cartesian_2d(across, self.y.range())
                .map_err(|error| failed(&error))?;
            // A round has no half.
            let whole =
                |x: &f64| if x.fract().abs() < 1e-6 { human::count(*x) } else { String::new() };
            dressed(
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
                for (tone, part) in parts.iter().map(|(tone, part)| (tone, tame(*part))) {
                    if part > 0.0 {
                        let corners = [(x - 0.36, y), (x + 0.36, y + part)];
                        let bar = Rectangle::new(corners, tone.colour().filled());
                        chart.draw_series([bar]).map_err(|error| failed(&error))?;
                    }
                    y += part;
                }
            }
            Ok(())
        })
    }

    /// Draws, and says in words what was drawn.
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
            area.present().map_err(|error| failed(&error))?;
        }
        Ok(named(self.id, self.title, &self.description, &svg))
    }
}

/// A plot with its title and description.
fn named(id: &str, title: &str, description: &str, svg: &str) -> Markup {
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

/// A plot with room for its axes.
fn builder<'a, 'b: 'a>(
    area: &'a DrawingArea<SVGBackend<'b>, plotters::coord::Shift>,
) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin_top(14).margin_left(10).margin_right(24);
    builder.x_label_area_size(86).y_label_area_size(116);
    builder
}

/// Draws axes and grid in letters and colours of the page.
fn dressed<X, Y, DB>(mesh: &mut MeshStyle<'_, '_, X, Y, DB>) -> Result<(), ReportError>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    DB: DrawingBackend,
{
    mesh.label_style(("sans-serif", LETTERS))
        .axis_desc_style(("sans-serif", LETTERS))
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(Tone::Grey.colour())
        .draw()
        .map_err(|error| failed(&error))
}

fn failed(error: &dyn std::fmt::Display) -> ReportError {
    ReportError::Plot(error.to_string())
}

/// No more points than are seen, all of them within the plot, in the order of time.
fn thinned(points: &[(f64, f64)], top: f64, end: f64) -> Vec<(f64, f64)> {
    let each = points.len().div_ceil(POINTS).max(1);
    let mut kept: Vec<(f64, f64)> = points
        .chunks(each)
        .map(|some| {
            let length = some.len() as f64;
            let sum = some
                .iter()
                .fold((0.0, 0.0), |sum, point| (sum.0 + tame(point.0), sum.1 + tame(point.1)));
            ((sum.0 / length).min(end), (sum.1 / length).min(top))
        })
        .collect();
    kept.sort_by(|a, b| a.0.total_cmp(&b.0));
    kept
}

/// A sample of a tone, for a legend.
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
    fn a_plot_has_its_words_and_tones() {
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
        assert!(svg.contains("#009E73") && !svg.contains("#D0D0D2"), "nothing is drawn of nothing");
    }

    #[test]
    fn numbers_that_can_not_be_do_no_harm() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e300, 1e-300] {
            let lines = [Line { tone: Tone::Red, points: vec![(bad, bad), (1.0, bad)] }];
            figure(bad).lines(&lines, &[bad]).unwrap();
            figure(bad).bars(&[vec![(Tone::Blue, bad)]]).unwrap();
        }
    }

    #[test]
    fn many_points_are_thinned() {
        let points: Vec<(f64, f64)> = (0..10_000).map(|i| (f64::from(i), 1.0)).collect();
        assert!(thinned(&points, 9.0, 1e9).len() <= POINTS);
        assert_eq!(thinned(&[(5.0, 20.0)], 9.0, 3.0), [(3.0, 9.0)]);
    }
}
