//! Plots points next to their names on a logarithmic axis, for ratios from a tenth to thousands.

use maud::Markup;
use plotters::prelude::*;

use super::{LETTERS, Tone, draw_mesh, finite, with_title};
use crate::error::ReportError;
use crate::human;

/// A plot of points.
pub struct Dots<'a> {
    /// An ID that is unique in the page.
    pub id: &'a str,
    /// The title.
    pub title: &'a str,
    /// A description for screen readers.
    pub description: String,
    /// The label of the x axis.
    pub across: &'a str,
    /// The names of the lines, from the top.
    pub names: &'a [String],
    /// The series. Each point has the index of its line and its value.
    pub series: &'a [(Tone, Vec<(usize, f64)>)],
}

const WIDTH: u32 = 1500;
const LINE: u32 = 42;

impl Dots<'_> {
    /// Draws the plot.
    pub fn draw(&self) -> Result<Markup, ReportError> {
        let points =
            || self.series.iter().flat_map(|(_, points)| points).map(|point| finite(point.1));
        let (least, most) = points()
            .filter(|number| *number > 0.0)
            .fold((1.0_f64, 1.0_f64), |(least, most), number| {
                (least.min(number), most.max(number))
            });
        let range = (least * 0.6).max(1e-6)..(most * 1.6).min(1e12);
        let lines = self.names.len();
        let size = (WIDTH, LINE * lines as u32 + 124);
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            let mut chart = ChartBuilder::on(&area)
                .margin_top(14)
                .margin_right(30)
                .x_label_area_size(88)
                .y_label_area_size(640)
                .build_cartesian_2d(range.log_scale(), 0.0..lines as f64)?;
            draw_mesh(
                chart
                    .configure_mesh()
                    .disable_y_mesh()
                    .y_labels(0)
                    .x_labels(8)
                    .x_desc(self.across)
                    .x_label_formatter(&|x| human::digits(*x)),
            )?;
            let height = |line: usize| lines as f64 - line as f64 - 0.5;
            // The names are drawn next to the lines of their points.
            let place = |line: usize| chart.backend_coord(&(1.0, height(line))).1;
            let places: Vec<i32> = (0..lines).map(place).collect();
            let unit = LineSeries::new(
                [(1.0, 0.0), (1.0, lines as f64)],
                Tone::Grey.color().stroke_width(3),
            );
            chart.draw_series(unit)?;
            for (index, (tone, points)) in self.series.iter().enumerate() {
                let color = tone.color().filled();
                for (line, number) in points.iter().filter(|(line, _)| *line < lines) {
                    let at = (finite(*number).max(1e-6), height(*line));
                    // The series differ by shape as well as by color.
                    if index == 0 {
                        chart.draw_series([Circle::new(at, 10, color)])?;
                    } else {
                        chart.draw_series([TriangleMarker::new(at, 13, color)])?;
                    }
                }
            }
            drop(chart);
            use plotters::style::text_anchor::{HPos, Pos, VPos};
            let style = ("sans-serif", LETTERS)
                .into_text_style(&area)
                .pos(Pos::new(HPos::Right, VPos::Center));
            for (name, place) in self.names.iter().zip(places) {
                area.draw_text(name, &style, (626, place))?;
            }
            area.present()?;
        }
        Ok(with_title(self.id, self.title, &self.description, &svg))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draw_has_names_and_points() {
        let names = ["slot 7".to_owned(), "a < b".to_owned()];
        let series = [
            (Tone::Blue, vec![(0, 600.0), (1, 0.3)]),
            (Tone::Orange, vec![(0, f64::NAN), (9, 1.0)]),
        ];
        let dots = Dots {
            id: "d",
            title: "Gain",
            description: String::new(),
            across: "times",
            names: &names,
            series: &series,
        };
        let svg = dots.draw().unwrap().into_string();
        for word in ["slot 7", "a &lt; b", "times", "<circle", "<polygon"] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
    }
}
