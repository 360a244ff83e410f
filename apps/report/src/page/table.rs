//! Tables that scroll horizontally if they are wider than the screen.

use maud::{Markup, html};
use serde_json::{Map, Value};

use crate::human;
use crate::run::{Number, Round};

/// A column: its heading, whether its cells are numbers, and the cell of a row.
pub type Column<'a, T> = (&'a str, bool, &'a dyn Fn(&T) -> String);

/// Makes a table.
pub fn table<T>(caption: &str, columns: &[Column<'_, T>], rows: &[T]) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(caption) {
            table {
                thead {
                    tr {
                        @for (head, is_number, _) in columns {
                            th scope="col" .n[*is_number] { (head) }
                        }
                    }
                }
                tbody {
                    @for row in rows {
                        tr {
                            @for (_, is_number, cell) in columns {
                                td .n[*is_number] { (cell(row)) }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Makes the table of a migration's rounds.
pub fn rounds(rounds: &[Round]) -> Markup {
    fn number(number: Number, text: impl Fn(f64) -> String) -> String {
        number.map_or_else(|| "–".to_owned(), text)
    }
    let count = |value: Number| number(value, human::count);
    let columns: [Column<'_, Round>; 12] = [
        ("Round", true, &|round| number(round.round, human::digits)),
        ("Pages", true, &|round| count(round.pages)),
        ("Zero", true, &|round| count(round.zero_pages)),
        ("Free", true, &|round| count(round.free_pages)),
        ("Sent", true, &|round| number(round.bytes, human::bytes)),
        ("Time", true, &|round| number(round.ms, human::ms)),
        ("Speed", true, &|round| number(round.bytes_per_s, human::rate)),
        ("Dirty pages/s", true, &|round| count(round.dirty_pages_per_s)),
        ("Harvest", true, &|round| number(round.harvest_ms, human::ms)),
        ("Throttle", true, &|round| {
            number(round.throttle_percent, |percent| format!("{percent} %"))
        }),
        ("Page encodings", false, &encoded),
        ("Guest", false, &|round| {
            let state = if round.paused { "paused" } else { "running" };
            if round.interrupted { format!("{state}, link lost") } else { state.to_owned() }
        }),
    ];
    table("Rounds", &columns, rounds)
}

/// Page encodings as text, such as `raw 90 %, lz4 10 %`.
fn encoded(round: &Round) -> String {
    let ways = &round.encoded;
    let mut ways = [
        ("raw", ways.raw),
        ("delta", ways.delta),
        ("lz4", ways.lz4),
        ("zstd", ways.zstd),
        ("zlib", ways.zlib),
    ]
    .map(|(name, pages)| (name, pages.unwrap_or_default().max(0.0)));
    ways.sort_by(|a, b| b.1.total_cmp(&a.1));
    let all: f64 = ways.iter().map(|(_, pages)| pages).sum();
    let shown = ways.iter().filter(|(_, pages)| *pages > 0.0);
    let words: Vec<String> = shown
        .map(|(name, pages)| match pages / all * 100.0 {
            percent if percent < 0.5 => format!("{name} < 1 %"),
            percent => format!("{name} {percent:.0} %"),
        })
        .collect();
    words.join(", ")
}

/// Makes a table with the columns of the first row.
pub fn rows(caption: &str, rows: &[Map<String, Value>]) -> Markup {
    let names: Vec<&String> = rows.first().map_or_else(Vec::new, |row| row.keys().collect());
    let is_number = |name: &str| rows.iter().any(|row| row.get(name).is_some_and(Value::is_number));
    html! {
        div.scroll tabindex="0" role="region" aria-label=(caption) {
            table {
                thead {
                    tr {
                        @for name in &names {
                            th scope="col" .n[is_number(name)] { (name.replace('_', " ")) }
                        }
                    }
                }
                tbody {
                    @for row in rows {
                        tr {
                            @for name in &names {
                                td .n[is_number(name)] { (cell(row.get(*name))) }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn cell(value: Option<&Value>) -> String {
    match value {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Number(number)) => number.as_f64().map_or_else(String::new, human::digits),
        Some(other) => other.to_string(),
    }
}
