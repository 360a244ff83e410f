//! The section about post-copy: the pages that the guest lacked when it started at the destination.

use maud::{Markup, html};

use super::table;
use crate::human;
use crate::run::{Fetch, Number, PAGE_BYTES, Run};

/// Makes the section, if the record is of a migration with post-copy.
pub fn section(run: &Run) -> Option<Markup> {
    run.missing_pages()?;
    let waits = run.fetch.as_ref().filter(|fetch| fetch.fault_pages.is_some_and(|it| it > 0.0));
    Some(html! {
        section {
            h2 { "Post-copy" }
            (pages(run))
            @if let Some(fetch) = waits { (table_of_waits(fetch)) }
        }
    })
}

/// How the missing pages arrived. A source's record has only their number and a time.
fn pages(run: &Run) -> Markup {
    let nothing = Fetch::default();
    let fetch = run.fetch.as_ref().unwrap_or(&nothing);
    let pages = |number: Number| {
        number
            .map(|pages| format!("{} ({})", human::count(pages), human::memory(pages * PAGE_BYTES)))
    };
    let count = |number: Number| number.map(human::count);
    let ms = |number: Number| number.map(human::ms);
    let nonzero = |number: Number| number.filter(|number| *number > 0.0);
    let rows = [
        ("Pages missing when the guest started at the destination", pages(run.missing_pages())),
        ("Pages still missing at the end of this record", pages(nonzero(run.remaining_pages))),
        ("Pages that arrived while a thread waited", pages(fetch.fault_pages)),
        ("Pages that arrived in the background", pages(fetch.background_pages)),
        ("Pages that arrived again", pages(nonzero(fetch.again_pages))),
        ("Faults", count(fetch.faults)),
        ("Faults at pages that were never populated, which are zero", count(fetch.zero_faults)),
        ("Time until the last page arrived", ms(fetch.fetch_ms)),
        ("Time during which the source served pages", ms(nonzero(run.stats.serving_ms))),
        ("All waits together", ms(fetch.waited_ms)),
        ("Lost channels that were restored meanwhile", count(nonzero(fetch.reconnections))),
        ("Time with channels missing meanwhile", ms(nonzero(fetch.link_down_ms))),
    ];
    html! {
        table.circumstances {
            tbody {
                @for (name, value) in rows {
                    @if let Some(value) = value { tr { th scope="row" { (name) } td { (value) } } }
                }
            }
        }
    }
}

/// How long the guest's threads waited for a page.
fn table_of_waits(fetch: &Fetch) -> Markup {
    let wait = |us: Number| us.map_or_else(|| "–".to_owned(), |us| human::ms(us / 1e3));
    let columns: [table::Column<'_, &Fetch>; 4] = [
        ("Mean wait for a page", true, &|fetch| wait(fetch.wait_mean_us)),
        ("Median", true, &|fetch| wait(fetch.wait_p50_us)),
        ("99 %", true, &|fetch| wait(fetch.wait_p99_us)),
        ("Longest", true, &|fetch| wait(fetch.wait_max_us)),
    ];
    table::table("Waits for missing pages", &columns, &[fetch])
}
