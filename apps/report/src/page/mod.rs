//! Pages: everything that a browser needs in one file, and nothing that it must execute or fetch.

mod benchmarks;
mod compare;
pub(crate) mod metrics;
mod plots;
mod published;
mod run;
mod strip;
mod table;
mod verdict;

use maud::{DOCTYPE, Markup, PreEscaped, html};

pub use benchmarks::benchmarks;
pub use compare::compare;
pub use run::run;

const STYLE: &str = include_str!("style.css");

/// Nothing may be fetched or executed, whatever a file made of the page.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

/// A page with a title and what is in it.
fn page(title: &str, content: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                meta name="generator" content=(concat!("vmferry ", env!("CARGO_PKG_VERSION")));
                link rel="icon" href="data:,";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                (patterns())
                main { (content) }
                footer { "Made by vmferry " (env!("CARGO_PKG_VERSION")) ". This page is one file: it can be mailed and kept." }
            }
        }
    };
    page.into_string()
}

/// Hatchings, for whoever can't tell colours apart and for paper. The style sheet uses them.
fn patterns() -> Markup {
    html! {
        svg.patterns width="0" height="0" aria-hidden="true" {
            defs {
                pattern id="hatch" width="12" height="12" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" {
                    rect.paper width="12" height="12" {}
                    rect.ink width="7" height="12" {}
                }
                pattern id="back-hatch" width="12" height="12" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)" {
                    rect.paper width="12" height="12" {}
                    rect.ink width="7" height="12" {}
                }
                pattern id="dots" width="14" height="14" patternUnits="userSpaceOnUse" {
                    rect.paper width="14" height="14" {}
                    circle.ink cx="7" cy="7" r="3.5" {}
                }
            }
        }
    }
}

/// What machines read of a page: JSON, as text.
fn facts(value: &serde_json::Value) -> Markup {
    let text = serde_json::to_string_pretty(value).unwrap_or_default();
    html! {
        details {
            summary { "For machines" }
            pre #facts { (text) }
        }
    }
}
