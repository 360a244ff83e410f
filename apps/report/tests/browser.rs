//! Pages in a real browser: laid out for a desk and for a pocket, in light and in dark, and printed.

mod support;

use serde_json::{Value, json};
use vmferry_browser_lab::{Measured, Scheme, measure, print};

/// A desk's screen, and a phone.
const WIDTHS: [u32; 2] = [1280, 400];

/// What holds for every page, whatever is on it.
fn check(page: &str, width: u32, scheme: Scheme) -> Measured {
    let measured = measure(page, width, scheme);
    assert_eq!(measured.width, f64::from(width));
    assert!(
        measured.scroll_width <= measured.width,
        "wider than the window: {:?}",
        measured.too_wide
    );
    assert!(measured.too_wide.is_empty(), "{:?}", measured.too_wide);
    assert!(measured.fetched.is_empty(), "{:?}", measured.fetched);
    assert_eq!(measured.scripts, 0);
    assert!(!measured.harmed);
    for plot in &measured.plots {
        assert!(plot.marks > 0 && plot.texts >= 6, "{plot:?}");
        assert!(
            plot.height > 80.0 && plot.width > 0.8 * (f64::from(width) / 2.0 - 80.0),
            "{plot:?}"
        );
        assert_eq!((plot.texts_outside, plot.texts_overlapping), (0, 0), "{plot:?}");
        assert!(plot.letters_px >= 8.0, "too small to be read: {plot:?}");
    }
    measured
}

fn migration() -> String {
    vmferry_report::run(&support::run(&support::file(&support::record("web", 1.0)))).unwrap()
}

#[test]
fn a_migration_is_laid_out_for_desk_and_pocket() {
    let page = migration();
    for width in WIDTHS {
        let measured = check(&page, width, Scheme::Light);
        assert!(measured.headline.starts_with("web moved in "), "{}", measured.headline);
        assert_eq!(measured.plots.len(), 5, "{:?}", measured.plots);
        assert!(measured.bars.len() >= 7 && measured.bars.iter().all(|width| *width > 0.0));
        // Tiles stand side by side where there is room, two in a row where there is little.
        let first_row =
            measured.tiles.iter().filter(|tile| tile.top == measured.tiles[0].top).count();
        assert_eq!(first_row, if width == 400 { 2 } else { 6 }, "{:?}", measured.tiles);
        let facts: Value = serde_json::from_str(&measured.facts).unwrap();
        assert_eq!(facts["outcome"], "moved");
        assert_eq!(facts["numbers"]["downtime_ms"], 212.0);
    }
}

/// The red, green and blue of `rgb(1, 2, 3)`, added.
fn light_of(colour: &str) -> u32 {
    colour
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|part| part.parse::<u32>().ok())
        .take(3)
        .sum()
}

#[test]
fn a_dark_screen_has_a_dark_page() {
    let page = migration();
    for (scheme, is_dark) in [(Scheme::Light, false), (Scheme::Dark, true)] {
        let measured = check(&page, 1280, scheme);
        let (ink, paper) = (light_of(&measured.ink), light_of(&measured.paper));
        assert_eq!(ink > paper, is_dark, "{} on {}", measured.ink, measured.paper);
        assert!(ink.abs_diff(paper) > 400, "{} on {}", measured.ink, measured.paper);
    }
}

#[test]
fn two_migrations_and_benchmarks_are_laid_out_too() {
    let [a, b] =
        [1.0, 2.0].map(|speed| support::run(&support::file(&support::record("web", speed))));
    let compared = vmferry_report::compare(&a, &b).unwrap();
    let failed =
        vmferry_report::run(&support::run(&support::file(&support::failed("web")))).unwrap();
    let benchmarks = vmferry_report::benchmarks(&[support::benchmark()]).unwrap();
    for width in WIDTHS {
        assert_eq!(check(&compared, width, Scheme::Light).plots.len(), 10);
        assert_eq!(check(&failed, width, Scheme::Light).plots.len(), 5);
        assert_eq!(check(&benchmarks, width, Scheme::Light).plots.len(), 1);
    }
}

#[test]
fn a_hostile_guest_is_text() {
    let name =
        "<script>window.harmed=1;parent.harmed=1</script><img src=x onerror=parent.harmed=1>";
    let mut lines = support::record(name, 1.0);
    lines.insert(1, json!({ "event": "link-lost", "channel": name, "reason": "x".repeat(500) }));
    let page = vmferry_report::run(&support::run(&support::file(&lines))).unwrap();
    let measured = check(&page, 400, Scheme::Light);
    assert!(measured.headline.contains(name), "{}", measured.headline);
}

#[test]
fn a_page_can_be_printed() {
    let pdf = print(&migration());
    assert!(pdf.starts_with(b"%PDF-") && pdf.len() > 20_000, "{} bytes", pdf.len());
    let pages = String::from_utf8_lossy(&pdf).matches("/Type /Page\n").count();
    assert!((1..=6).contains(&pages), "{pages} pages");
}
