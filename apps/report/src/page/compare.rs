//! The page that compares two migrations.

use maud::{Markup, html};
use serde_json::json;

use super::metrics::{self, Better, Metric};
use super::plots::{self, Named};
use super::{facts, page, table, verdict};
use crate::error::ReportError;
use crate::human;
use crate::run::{Ending, Run};

/// Makes the page.
///
/// # Errors
/// A plot cannot be drawn.
pub fn compare(a: &Run, b: &Run) -> Result<String, ReportError> {
    let runs = [Named { name: "A", run: a }, Named { name: "B", run: b }];
    let metrics = [metrics::of(a), metrics::of(b)];
    let verdicts = [verdict::of(a, &metrics[0]), verdict::of(b, &metrics[1])];
    let both_moved = [a, b].iter().all(|run| run.ending == Ending::Moved);
    let headline = if both_moved { headline(&metrics) } else { outcomes([a, b]) };
    let content = html! {
        header {
            p.kind { "Two migrations compared" }
            h1 { (headline) }
            div.two {
                @for (named, verdict) in runs.iter().zip(&verdicts) {
                    div class=(verdict.mood.class()) {
                        p.kind {
                            span.sign { (verdict.mood.sign()) } " "
                            b { (named.name) } " " (named.run.file)
                        }
                        p { b { (verdict.headline) } }
                        @for sentence in &verdict.sentences { p { (sentence) } }
                    }
                }
            }
        }
        section {
            h2 { "Key numbers" }
            (key_numbers(&metrics, both_moved))
        }
        section {
            h2 { "Plots" }
            p.hint { "The plots of a pair have the same axes." }
            div.plots {
                (plots::all(&runs)?)
            }
        }
        section {
            h2 { "Rounds" }
            @for named in &runs {
                @if !named.run.rounds.is_empty() {
                    h3 { (named.name) }
                    (table::rounds(&named.run.rounds))
                }
            }
        }
        section {
            (facts(&machine_readable([a, b], &metrics)))
        }
    };
    Ok(page(&format!("{headline} – vmferry report"), &content))
}

/// The ratio of B to A, if both are known.
fn ratio(a: &Metric, b: &Metric) -> Option<f64> {
    let (a, b) = a.value.zip(b.value)?;
    Some(b / a).filter(|ratio| a > 0.0 && ratio.is_finite())
}

/// Differences up to this part count as equal.
const ALIKE: f64 = 0.02;

/// The headline if a migration failed. The numbers are not comparable then.
fn outcomes(runs: [&Run; 2]) -> String {
    let words = runs.map(|run| match &run.ending {
        Ending::Moved => "moved",
        Ending::Failed(failure) if failure.is_in_doubt() => "is in doubt",
        Ending::Failed(failure) if run.has_unknown_owner(failure) => "is not known to have moved",
        Ending::Failed(failure) if run.has_lost_pages(failure) => "lost pages at the destination",
        Ending::Failed(_) => "stayed at the source",
        Ending::Unknown => "is not known to have moved",
    });
    format!("A {}, and B {}", words[0], words[1])
}

fn headline(metrics: &[Vec<Metric>; 2]) -> String {
    let word = |key, label: &str| {
        let pair = metrics.each_ref().map(|metrics| metrics::find(metrics, key));
        let ratio = ratio(pair[0]?, pair[1]?)?;
        Some(if (ratio - 1.0).abs() < ALIKE {
            format!("the same {label}")
        } else {
            format!("{} times the {label}", human::digits(ratio))
        })
    };
    let words = [
        word("downtime_ms", "downtime"),
        word("total_ms", "total time"),
        word("sent_bytes", "bytes"),
    ];
    let words: Vec<String> = words.into_iter().flatten().collect();
    match words.as_slice() {
        [] => "A and B have no numbers in common".to_owned(),
        [one] => format!("B has {one} of A"),
        [all @ .., last] => format!("B has {} and {last} of A", all.join(", ")),
    }
}

fn key_numbers(metrics: &[Vec<Metric>; 2], both_moved: bool) -> Markup {
    // Numbers that are 0 or unknown in both runs are left out.
    let has_value = |metric: &Metric| metric.value.is_some_and(|value| value != 0.0);
    let pairs = metrics[0].iter().zip(&metrics[1]).filter(|(a, b)| has_value(a) || has_value(b));
    html! {
        div.scroll tabindex="0" role="region" aria-label="Key numbers" {
            table.key {
                thead {
                    tr {
                        th scope="col" { "" }
                        th.n scope="col" { "A" }
                        th.n scope="col" { "B" }
                        th.n scope="col" { "B / A" }
                        th scope="col" { "" }
                    }
                }
                tbody {
                    @for (a, b) in pairs {
                        @let ratio = ratio(a, b);
                        @let judged = ratio.filter(|_| both_moved);
                        @let better = judged.and_then(|ratio| better(a.better, ratio));
                        tr {
                            th scope="row" { (a.label) }
                            td.n { (a.text()) }
                            td.n { (b.text()) }
                            td.n { @if let Some(ratio) = ratio { (human::digits(ratio)) } }
                            td {
                                @match better {
                                    Some(true) => span.better { "▲ better" },
                                    Some(false) => span.worse { "▼ worse" },
                                    None => {}
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Whether B is better than A. `None` if they are equal or the number is neither good nor bad.
fn better(better: Better, ratio: f64) -> Option<bool> {
    if (ratio - 1.0).abs() < ALIKE {
        return None;
    }
    match better {
        Better::Less => Some(ratio < 1.0),
        Better::More => Some(ratio > 1.0),
        Better::Neither => None,
    }
}

fn machine_readable(runs: [&Run; 2], metrics: &[Vec<Metric>; 2]) -> serde_json::Value {
    let numbers: serde_json::Map<_, _> = metrics[0]
        .iter()
        .zip(&metrics[1])
        .filter(|(a, b)| a.value.is_some() || b.value.is_some())
        .map(|(a, b)| {
            (a.key.to_owned(), json!({ "a": a.value, "b": b.value, "b_over_a": ratio(a, b) }))
        })
        .collect();
    json!({ "kind": "compare", "a": runs[0].file, "b": runs[1].file, "numbers": numbers })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_follows_the_direction_of_the_metric() {
        assert_eq!(better(Better::Less, 0.5), Some(true));
        assert_eq!(better(Better::More, 0.5), Some(false));
        assert_eq!(better(Better::Less, 1.01), None);
        assert_eq!(better(Better::Neither, 9.0), None);
    }
}
