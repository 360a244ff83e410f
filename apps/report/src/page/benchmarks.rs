//! The page of benchmark results: the published tables next to the measured values, then all rows.

use maud::{Markup, html};
use serde_json::{Value, json};

use super::{facts, page, published, table};
use crate::bench::{Results, Row};
use crate::error::ReportError;
use crate::human;
use crate::published::of_benchmark;

/// Makes the page.
///
/// # Errors
/// A plot cannot be drawn.
pub fn benchmarks(all: &[Results]) -> Result<String, ReportError> {
    let names: Vec<&str> = all.iter().map(|results| results.name.as_str()).collect();
    let headline = match names.as_slice() {
        [name] => format!("Benchmark {name}"),
        names => format!("{} benchmarks", names.len()),
    };
    let mut sections = Vec::new();
    for (index, results) in all.iter().enumerate() {
        sections.push(section(index, results)?);
    }
    let content = html! {
        header {
            p.kind { "Benchmark report" }
            h1 { (headline) }
            @if let Some(results) = all.first() { p { (machine(results)) } }
            @if all.len() > 1 {
                nav {
                    ul {
                        @for (index, name) in names.iter().enumerate() {
                            li { a href=(format!("#b{index}")) { (name) } }
                        }
                    }
                }
            }
        }
        (aims(all))
        @for section in sections { (section) }
        section { (facts(&json!({ "kind": "benchmarks", "benchmarks": all }))) }
    };
    Ok(page(&format!("{headline} – vmferry report"), &content))
}

fn machine(results: &Results) -> String {
    let machine = &results.machine;
    format!(
        "{}, {} cores, Linux {}, KVM {}, TCP {}",
        machine.cpu, machine.cores, machine.kernel, machine.kvm, machine.tcp
    )
}

/// The table of targets of all benchmarks.
fn aims(all: &[Results]) -> Markup {
    let aims = all.iter().flat_map(|results| {
        let aims = results.more.get("aims").into_iter().flatten();
        aims.map(|aim| (results.name.as_str(), aim))
    });
    let aims: Vec<(&str, &Row)> = aims.collect();
    let text = |row: &Row, name: &str| match row.get(name) {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.as_f64().map(human::digits).unwrap_or_default(),
        None => String::new(),
    };
    if aims.is_empty() {
        return html! {};
    }
    let met = aims.iter().filter(|(_, aim)| text(aim, "met") == "yes").count();
    html! {
        section {
            h2 { "Targets: " (met) " of " (aims.len()) " met" }
            div.scroll tabindex="0" role="region" aria-label="Targets" {
                table {
                    thead {
                        tr {
                            th scope="col" { "Benchmark" }
                            th scope="col" { "Ratio" }
                            th.n scope="col" { "Value" }
                            th.n scope="col" { "Target" }
                            th scope="col" { "" }
                            th scope="col" { "Meaning" }
                        }
                    }
                    tbody {
                        @for (name, aim) in &aims {
                            @let is_met = text(aim, "met") == "yes";
                            tr {
                                td { (name) }
                                td { (text(aim, "ratio").replace('_', " ")) }
                                td.n { (text(aim, "value")) }
                                @let target = text(aim, "aim");
                                td.n { (target.replace(">=", "≥").replace("<=", "≤")) }
                                td {
                                    @if is_met { span.better { "✓ met" } }
                                    @else { span.worse { "✕ missed" } }
                                }
                                td.words { (text(aim, "meaning")) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn section(index: usize, results: &Results) -> Result<Markup, ReportError> {
    let mut tables = Vec::new();
    for (number, table) in of_benchmark(&results.name).enumerate() {
        tables.push(published::comparison(table, number, results)?);
    }
    let lists = results.more.iter().filter(|(name, _)| name.as_str() != "aims");
    let numbers = |numbers: &std::collections::BTreeMap<String, f64>| {
        html! {
            table { tbody {
                @for (name, number) in numbers {
                    tr {
                        th scope="row" { (name.replace('_', " ")) }
                        td.n { (human::digits(*number)) }
                    }
                }
            } }
        }
    };
    Ok(html! {
        section id=(format!("b{index}")) {
            h2 { (results.name) }
            p.hint { (machine(results)) }
            @for table in tables { (table) }
            details open[index == 0 && results.rows.len() <= 24] {
                summary { "All " (results.rows.len()) " rows" }
                (table::rows(&results.name, &results.rows))
            }
            @for (name, rows) in lists {
                details {
                    summary { (name.replace('_', " ")) ": " (rows.len()) " rows" }
                    (table::rows(name, rows))
                }
            }
            @if !results.ratios.is_empty() {
                details { summary { "Ratios" } (numbers(&results.ratios)) }
            }
            @if !results.yardsticks.is_empty() {
                details {
                    summary { "Physical limits, measured in the same run" }
                    (numbers(&results.yardsticks))
                }
            }
        }
    })
}
