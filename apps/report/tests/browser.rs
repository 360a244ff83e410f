//! Checks pages in a real browser: layout at desktop and phone widths, light and dark themes,
//! printing.

mod support;

use serde_json::{Value, json};
use vmferry_browser_lab::{Measured, Scheme, measure, print};

/// Widths of a desktop screen and of a phone.
const WIDTHS: [u32; 2] = [1280, 400];

/// Checks what holds for every page.
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
fn migration_page_fits_desktop_and_phone() {
    let page = migration();
    for width in WIDTHS {
        let measured = check(&page, width, Scheme::Light);
        assert!(measured.headline.starts_with("web moved in "), "{}", measured.headline);
        assert_eq!(measured.plots.len(), 5, "{:?}", measured.plots);
        assert!(measured.bars.len() >= 7 && measured.bars.iter().all(|width| *width > 0.0));
        // Tiles are in one row on a wide screen, and two per row on a narrow one.
        let first_row =
            measured.tiles.iter().filter(|tile| tile.top == measured.tiles[0].top).count();
        assert_eq!(first_row, if width == 400 { 2 } else { 6 }, "{:?}", measured.tiles);
        let facts: Value = serde_json::from_str(&measured.facts).unwrap();
        assert_eq!(facts["outcome"], "moved");
        assert_eq!(facts["numbers"]["downtime_ms"], 212.0);
    }
}

#[test]
fn page_of_a_destination_fits_desktop_and_phone() {
    let run = support::run(&support::file(&support::destination("web")));
    let page = vmferry_report::run(&run).unwrap();
    for width in WIDTHS {
        let measured = check(&page, width, Scheme::Light);
        assert_eq!(measured.headline, "web moved");
        let facts: Value = serde_json::from_str(&measured.facts).unwrap();
        assert_eq!(facts["numbers"]["missing_pages"], 4096.0);
        assert_eq!(facts["numbers"]["wait_p99_ms"], 7.3);
    }
}

/// The sum of red, green and blue of `rgb(1, 2, 3)`.
fn brightness(color: &str) -> u32 {
    color
        .split(|letter: char| !letter.is_ascii_digit())
        .filter_map(|part| part.parse::<u32>().ok())
        .take(3)
        .sum()
}

#[test]
fn page_follows_the_color_scheme() {
    let page = migration();
    for (scheme, is_dark) in [(Scheme::Light, false), (Scheme::Dark, true)] {
        let measured = check(&page, 1280, scheme);
        let (ink, paper) = (brightness(&measured.ink), brightness(&measured.paper));
        assert_eq!(ink > paper, is_dark, "{} on {}", measured.ink, measured.paper);
        assert!(ink.abs_diff(paper) > 400, "{} on {}", measured.ink, measured.paper);
    }
}

#[test]
fn comparison_and_benchmark_pages_fit_desktop_and_phone() {
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
fn hostile_guest_name_is_escaped() {
    let name =
        "<script>window.harmed=1;parent.harmed=1</script><img src=x onerror=parent.harmed=1>";
    let mut lines = support::record(name, 1.0);
    lines.insert(1, json!({ "event": "link-lost", "channel": name, "reason": "x".repeat(500) }));
    let page = vmferry_report::run(&support::run(&support::file(&lines))).unwrap();
    let measured = check(&page, 400, Scheme::Light);
    assert!(measured.headline.contains(name), "{}", measured.headline);
}

#[test]
fn page_prints_on_a_few_sheets() {
    let pdf = print(&migration());
    assert!(pdf.starts_with(b"%PDF-") && pdf.len() > 20_000, "{} bytes", pdf.len());
    let pages = String::from_utf8_lossy(&pdf).matches("/Type /Page\n").count();
    assert!((1..=6).contains(&pages), "{pages} pages");
}
