//! Two runs side by side.

use maud::{Markup, html};
use serde_json::json;

use super::metrics::{self, Better, Metric};
use super::plots::{self, Named};
use super::{facts, page, table, verdict};
use crate::error::ReportError;
use crate::human;
use crate::run::Run;

/// Makes the page.
///
/// # Errors
/// A plot that can't be drawn.
pub fn compare(a: &Run, b: &Run) -> Result<String, ReportError> {
    let runs = [Named { name: "A", run: a }, Named { name: "B", run: b }];
    let metrics = [metrics::of(a), metrics::of(b)];
    let verdicts = [verdict::of(a, &metrics[0]), verdict::of(b, &metrics[1])];
    let headline = headline(&metrics);
    let content = html! {
        header {
            p.kind { "Two migrations compared" }
            h1 { (headline) }
            div.two {
                @for (named, verdict) in runs.iter().zip(&verdicts) {
                    div class=(verdict.mood.class()) {
                        p.kind { span.sign { (verdict.mood.sign()) } " " b { (named.name) } " " (named.run.file) }
                        p { b { (verdict.headline) } }
                        @for sentence in &verdict.sentences { p { (sentence) } }
                    }
                }
            }
        }
        section {
            h2 { "Key numbers" }
            (key_numbers(&metrics))
        }
        section {
            h2 { "Plots" }
            p.hint { "Both of a pair have the same axes." }
            div.plots {
                (plots::downtime(&runs))
                (plots::rates(&runs)?)
                (plots::forecasts(&runs)?)
                (plots::bytes(&runs)?)
                (plots::pages(&runs)?)
                (plots::codecs(&runs)?)
                (plots::cpu(&runs))
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

/// B over A, if both are known.
fn ratio(a: &Metric, b: &Metric) -> Option<f64> {
    let (a, b) = a.value.zip(b.value)?;
    (a > 0.0).then_some(b / a)
}

/// What differs by so little is alike.
const ALIKE: f64 = 0.02;

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
        [] => "A and B have no number in common".to_owned(),
        [one] => format!("B has {one} of A"),
        [all @ .., last] => format!("B has {} and {last} of A", all.join(", ")),
    }
}

fn key_numbers(metrics: &[Vec<Metric>; 2]) -> Markup {
    let pairs = || metrics[0].iter().zip(&metrics[1]);
    html! {
        div.scroll tabindex="0" role="region" aria-label="Key numbers" {
            table.key {
                thead { tr { th scope="col" { "" } th.n scope="col" { "A" } th.n scope="col" { "B" } th.n scope="col" { "B / A" } th scope="col" { "" } } }
                tbody {
                    @for (a, b) in pairs().filter(|(a, b)| a.value.is_some() || b.value.is_some()) {
                        @let ratio = ratio(a, b);
                        @let better = ratio.and_then(|ratio| better(a.better, ratio));
                        tr {
                            th scope="row" { (a.label) }
                            td.n { (a.text()) }
                            td.n { (b.text()) }
                            td.n { @if let Some(ratio) = ratio { (human::digits(ratio)) } }
                            td { @if let Some(is_better) = better {
                                span class=(if is_better { "better" } else { "worse" }) { (if is_better { "▲ better" } else { "▼ worse" }) }
                            } }
                        }
                    }
                }
            }
        }
    }
}

/// Whether a ratio of B over A is in B's favour; nothing if both are alike or it is no matter of favour.
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
    fn favour_goes_by_what_is_better() {
        assert_eq!(better(Better::Less, 0.5), Some(true));
        assert_eq!(better(Better::More, 0.5), Some(false));
        assert_eq!(better(Better::Less, 1.01), None);
        assert_eq!(better(Better::Neither, 9.0), None);
    }
}
