//! A published table next to this machine's results.

use maud::{Markup, html};

use crate::bench::Results;
use crate::chart::{Dots, Tone, swatch};
use crate::error::ReportError;
use crate::human;
use crate::published::{Figure, Ours, Table};

/// A published figure and the measured values for it.
struct Line<'a> {
    figure: &'a Figure,
    published: Option<f64>,
    published_gain: Option<f64>,
    /// The measured value and its gain, for each column of ours.
    ours: Vec<(Option<f64>, Option<f64>)>,
}

/// Makes the table, and a plot of each method's gain over the base.
pub fn comparison(table: &Table, index: usize, results: &Results) -> Result<Markup, ReportError> {
    let lines: Vec<Line<'_>> =
        table.figures.iter().map(|figure| line(table, figure, results)).collect();
    Ok(html! {
        section.published {
            h3 { (table.title) " (" (table.year) ")" }
            p.hint { (table.setting) }
            (plot(table, index, results, &lines)?)
            (numbers(table, &lines))
        }
    })
}

fn line<'a>(table: &'a Table, figure: &'a Figure, results: &Results) -> Line<'a> {
    let base = table.base_of(figure).filter(|base| base.way != figure.way);
    let gain = |number: Option<f64>, of_base: Option<f64>| {
        number.zip(of_base).and_then(|(number, of_base)| table.gain(number, of_base))
    };
    let published = figure.median();
    let ours = |ours: &Ours| {
        let number = table.measured(figure, ours, results);
        (number, gain(number, base.and_then(|base| table.measured(base, ours, results))))
    };
    Line {
        figure,
        published,
        published_gain: gain(published, base.and_then(Figure::median)),
        ours: table.ours.iter().map(ours).collect(),
    }
}

fn plot(
    table: &Table,
    index: usize,
    results: &Results,
    lines: &[Line<'_>],
) -> Result<Markup, ReportError> {
    let shown: Vec<&Line<'_>> = lines
        .iter()
        .filter(|line| {
            line.published_gain.is_some() || line.ours.iter().any(|ours| ours.1.is_some())
        })
        .collect();
    if shown.is_empty() {
        return Ok(html! {});
    }
    let one_case = table.figures.iter().all(|figure| figure.case == table.figures[0].case);
    let names: Vec<String> = shown
        .iter()
        .map(|line| match one_case {
            true => line.figure.way.clone(),
            false => format!("{}: {}", line.figure.case, line.figure.way),
        })
        .collect();
    let points = |of: &dyn Fn(&Line<'_>) -> Option<f64>| -> Vec<(usize, f64)> {
        shown.iter().enumerate().filter_map(|(index, line)| Some((index, of(line)?))).collect()
    };
    let tones = [Tone::Orange, Tone::Green];
    let mut series = vec![(Tone::Blue, points(&|line| line.published_gain))];
    let mut legend = vec![(Tone::Blue, "● published".to_owned())];
    for (index, (ours, tone)) in table.ours.iter().zip(tones).enumerate() {
        series.push((tone, points(&|line| line.ours.get(index).and_then(|ours| ours.1))));
        legend.push((tone, format!("▲ {}", ours.name)));
    }
    let words = shown.iter().zip(&names).map(|(line, name)| {
        format!(
            "{name}: published {}, here {}",
            times(line.published_gain),
            times(line.ours.first().and_then(|ours| ours.1))
        )
    });
    let title = format!("{}: times as good as {}", table.title, table.base);
    let across = format!("times as good as {} (right of 1: better)", table.base);
    let dots = Dots {
        id: &format!(
            "published-{}-{index}",
            results.name.replace(|letter: char| !letter.is_ascii_alphanumeric(), "-")
        ),
        title: &title,
        description: words.collect::<Vec<_>>().join("; "),
        across: &across,
        names: &names,
        series: &series,
    };
    Ok(html! {
        figure.wide {
            figcaption {
                ul.legend {
                    @for (tone, name) in &legend { li { (swatch(*tone, false)) (name) } }
                }
            }
            div.scroll.bare tabindex="0" role="region" aria-label=(title) { (dots.draw()?) }
        }
    })
}

fn times(gain: Option<f64>) -> String {
    gain.map_or_else(|| "–".to_owned(), |gain| format!("{} ×", human::digits(gain)))
}

fn numbers(table: &Table, lines: &[Line<'_>]) -> Markup {
    let number = |number: Option<f64>| number.map_or_else(|| "–".to_owned(), human::digits);
    let has_idle = table.figures.iter().any(|figure| !figure.idle_percent.is_empty());
    html! {
        div.scroll tabindex="0" role="region" aria-label=(table.title) {
            table {
                thead {
                    tr {
                        th scope="col" { "Case" }
                        th scope="col" { "Method" }
                        th.n scope="col" { "Published, " (table.unit) }
                        @if has_idle { th.n scope="col" { "idle, %" } }
                        @for ours in &table.ours {
                            th.n scope="col" { "vmferry " (ours.name) ", " (ours.unit) }
                        }
                        th.n scope="col" { "Published gain" }
                        @for ours in &table.ours { th.n scope="col" { "Gain " (ours.name) } }
                    }
                }
                tbody {
                    @for line in lines {
                        tr {
                            td { (line.figure.case) }
                            td { (line.figure.way) }
                            td.n title=[all(line.figure)] { (number(line.published)) }
                            @if has_idle { td.n { (line.figure.idle_percent) } }
                            @for ours in &line.ours { td.n { (number(ours.0)) } }
                            td.n { (times(line.published_gain)) }
                            @for ours in &line.ours { td.n { (times(ours.1)) } }
                        }
                    }
                }
            }
        }
        p.hint {
            "The gain is relative to " (table.base) " in the same case on the same machine. "
            "If several figures were published, the median is shown."
        }
    }
}

/// The tooltip with all published figures, if there are several.
fn all(figure: &Figure) -> Option<String> {
    let figures: Vec<String> =
        figure.published.iter().map(|number| human::digits(*number)).collect();
    (figures.len() > 1).then(|| format!("all: {}", figures.join("; ")))
}
