//! The content of pages, and robustness against hostile files.

mod support;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Text that would be part of the page's structure if it were not escaped.
const HOSTILE: &str = "<script>harmed=1</script>\"'&<img src=x onerror=harmed=1>";

#[test]
fn run_page_is_complete_and_self_contained() {
    let page =
        vmferry_report::run(&support::run(&support::file(&support::record("web", 1.0)))).unwrap();
    for part in [
        "web moved in ",
        "within its limit of 300 ms",
        "Throughput and dirty rate over time",
        "Predicted downtime over time",
        "Parts of the downtime",
        "saving the state (in parallel)",
        "Bytes by round",
        "Dirty pages by round",
        "Page encodings by round",
        "CPU time of the engine",
        "round 1: 60,000 pages",
        "cap of 64",
        "committed: the source cannot resume",
        "05050505",
        "hashes of both memories",
        "2026-09-21T14:",
        "prefers-color-scheme: dark",
        "@media print",
    ] {
        assert!(page.contains(part), "{part}");
    }
    for fetched in ["src=", "<script", "@import", "<link rel=\"stylesheet", "url(http", "onload="] {
        assert!(!page.contains(fetched), "{fetched}");
    }
    // Links stay within the page.
    assert!(
        page.split("href=\"")
            .skip(1)
            .all(|href| href.starts_with('#') || href.starts_with("data:,"))
    );
    let plots = page.matches("class=\"plot\"").count();
    assert!(plots >= 5, "{plots}");
    assert_eq!(
        page.matches("role=\"img\"").count(),
        page.matches("<title id=").count(),
        "an image has no title"
    );
}

#[test]
fn run_page_of_a_failure_has_rounds_and_advice() {
    let page = vmferry_report::run(&support::run(&support::file(&support::failed("web")))).unwrap();
    for part in [
        "web stayed at the source",
        "exit status 10",
        "410 MB/s",
        "Advice: give it --throttle 80",
        "Bytes by round",
        "with 6 rounds finished",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("Parts of the downtime"), "the guest was not paused");
}

#[test]
fn run_page_of_a_cut_record_shows_the_part_before() {
    let bytes = support::file(&support::record("web", 1.0));
    let cut = &bytes[..bytes.len() / 2];
    assert_ne!(cut.last(), Some(&b'\n'));
    let page = vmferry_report::run(&support::run(cut)).unwrap();
    assert!(page.contains("ends in the middle of a line") && page.contains("before web had moved"));
}

#[test]
fn run_page_of_a_destination_shows_its_fetch() {
    let lines = support::destination("web");
    let page = vmferry_report::run(&support::run(&support::file(&lines))).unwrap();
    for part in [
        "<h1>web moved</h1>",
        "Post-copy",
        "4,096 (16 MiB)",
        "512 (2 MiB)",
        "3,584 (14 MiB)",
        "Waits for missing pages",
        "1.3 ms",
        "0.95 ms",
        "7.3 ms",
        "45.7 ms",
        "654 ms",
        "2.35 s",
        "the destination has the guest",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<h2>Plots"), "there is nothing to plot");
    assert!(!page.contains("still missing at"), "every page has arrived");
    // The process was killed while its guest lacked pages.
    let page = vmferry_report::run(&support::run(&support::file(&lines[..5]))).unwrap();
    assert!(page.contains("still missing at the end of this record") && page.contains("1,000 ("));
}

#[test]
fn run_page_of_a_source_shows_the_pages_that_it_served() {
    let mut lines = support::record("web", 1.0);
    let plain = vmferry_report::run(&support::run(&support::file(&lines))).unwrap();
    assert!(!plain.contains("Post-copy") && !plain.contains("missing_pages"));
    let stats = &mut lines.last_mut().unwrap()["stats"];
    (stats["missing_pages"], stats["serving_ms"]) = (json!(0), json!(0.0));
    let without = vmferry_report::run(&support::run(&support::file(&lines))).unwrap();
    assert_eq!(without, plain, "nothing was missing");
    let stats = &mut lines.last_mut().unwrap()["stats"];
    (stats["missing_pages"], stats["serving_ms"]) = (json!(2048), json!(1500.0));
    let page = vmferry_report::run(&support::run(&support::file(&lines))).unwrap();
    assert!(page.contains("2,048 (8 MiB)") && page.contains("source served pages"));
    assert!(!page.contains("Waits for missing pages"), "the source does not know them");
}

#[test]
fn compare_page_has_ratios_and_equal_axes() {
    let [a, b] =
        [1.0, 2.0].map(|speed| support::run(&support::file(&support::record("web", speed))));
    let page = vmferry_report::compare(&a, &b).unwrap();
    for part in [
        "B has 0.50 times the downtime",
        "B / A",
        "▲ better",
        "A: Bytes by round",
        "B: Bytes by round",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // The axes are equal: both have the labels of the slower run.
    let axis = |name: &str| {
        let plot = page.split(name).nth(1).unwrap().split("</svg>").next().unwrap();
        let labels = plot.split("<text").skip(1).map(|text| text.split('>').nth(1).unwrap().trim());
        let labels: Vec<String> =
            labels.map(|label| label.split('<').next().unwrap().trim().to_owned()).collect();
        labels
    };
    let title = |name| format!("-t\">{name}: Throughput and dirty rate over time</title>");
    assert!(axis(&title("A")).len() > 6);
    assert_eq!(axis(&title("A")), axis(&title("B")));
}

#[test]
fn compare_page_does_not_judge_a_failed_run() {
    let moved = support::run(&support::file(&support::record("web", 1.0)));
    let stayed = support::run(&support::file(&support::failed("web")));
    let page = vmferry_report::compare(&moved, &stayed).unwrap();
    assert!(page.contains("<h1>A moved, and B stayed at the source</h1>"));
    assert!(!page.contains("▲ better"));
}

#[test]
fn benchmark_page_has_published_figures() {
    let page = vmferry_report::benchmarks(&[support::benchmark()]).unwrap();
    for part in [
        "Free-page hints of a balloon (2018)",
        "41,651",
        "3,774",
        "34 ×",
        "4.79 ×",
        "1 of 1 met",
        "A processor",
    ] {
        assert!(page.contains(part), "{part}");
    }
}

/// Appends the hostile text to every string in a value.
fn poison(value: &mut Value) {
    match value {
        Value::String(text) => *text = format!("{text}{HOSTILE}"),
        Value::Array(all) => all.iter_mut().for_each(poison),
        Value::Object(members) => members.values_mut().for_each(poison),
        _ => {}
    }
}

#[test]
fn pages_escape_text_from_files() {
    let mut lines = support::record(HOSTILE, 1.0);
    lines.extend([
        json!({ "event": HOSTILE, HOSTILE: HOSTILE }),
        json!({ "event": "link-lost", "channel": HOSTILE, "reason": HOSTILE }),
    ]);
    let lines_before_end = lines.len() - 3;
    lines.swap(lines_before_end, lines_before_end + 2);
    for line in
        lines.iter_mut().filter(|line| line["event"] == "done" || line["event"] == "started")
    {
        let event = line["event"].take();
        poison(line);
        line["event"] = event;
    }
    let id = lines[0]["run"].clone();
    lines.iter_mut().for_each(|line| line["run"] = id.clone());
    let run = support::run(&support::file(&lines));
    let mut results = serde_json::to_value(support::benchmark()).unwrap();
    poison(&mut results["machine"]);
    poison(&mut results["rows"]);
    poison(&mut results["aims"]);
    results[HOSTILE] = results["rows"].clone();
    results["ratios"][HOSTILE] = json!(1.0);
    let results = serde_json::from_value(results).unwrap();
    for page in [
        vmferry_report::run(&run).unwrap(),
        vmferry_report::compare(&run, &run).unwrap(),
        vmferry_report::benchmarks(&[results]).unwrap(),
    ] {
        assert!(page.contains("&lt;script&gt;"), "the text is shown");
        assert!(!page.contains("<script") && !page.contains("<img"), "the text is escaped");
    }
}

/// Lines that are similar to those of a record, and lines that are not.
fn line() -> impl Strategy<Value = String> {
    let names = prop::sample::select(vec![
        "started",
        "connected",
        "progress",
        "forecast",
        "round-started",
        "round-done",
        "paused",
        "committed",
        "done",
        "failed",
        "throttled",
        "link-lost",
        "resent",
        "accepted",
        "fetch-progress",
        "fetching",
        "received",
        "unheard-of",
    ]);
    let members = prop::sample::select(vec![
        "round",
        "pages",
        "bytes",
        "ms",
        "elapsed_ms",
        "sent_bytes",
        "predicted_downtime_ms",
        "dirty_bytes_per_s",
        "time",
        "run",
        "guest",
        "limits",
        "stats",
        "error",
        "rounds",
        "downtime_ms",
        "paused",
        "encoded",
        "downtime",
        "ok",
        "dirty_pages_per_s",
        "harvest_ms",
        "downtime_limit_ms",
        "total_ms",
        "fetch",
        "fault_pages",
        "wait_p99_us",
    ]);
    let number = prop_oneof![
        1 => any::<f64>().prop_filter("JSON has only finite numbers", |it| it.is_finite()),
        8 => prop::sample::select(vec![0.0, -0.0, 1e-308, 1e-9, 1e18, -1e18, 2e19, -2e19]),
        16 => 0.0..1e6
    ];
    let leaf = prop_oneof![
        4 => number.prop_map(|it| json!(it)),
        1 => any::<u64>().prop_map(|it| json!(it)),
        1 => any::<bool>().prop_map(|it| json!(it)),
        1 => Just(Value::Null),
        1 => ".{0,8}".prop_map(|it| json!(it)),
    ];
    let value = leaf.prop_recursive(3, 24, 5, {
        let members = members.clone();
        move |inner| {
            prop_oneof![
                vec(inner.clone(), 0..4).prop_map(Value::Array),
                vec((members.clone(), inner), 0..5).prop_map(|all| {
                    Value::Object(
                        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                    )
                }),
            ]
        }
    });
    let event = (names, vec((members, value), 0..8)).prop_map(|(name, members)| {
        let mut line: serde_json::Map<String, Value> =
            members.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        line.insert("event".into(), name.into());
        Value::Object(line).to_string()
    });
    prop_oneof![20 => event, 1 => ".{0,30}", 1 => Just(r#"{"ok":false,"error":{}}"#.to_owned())]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 300 } else { 2000 }))]

    #[test]
    fn read_of_any_lines_gives_a_page_or_an_error(lines in vec(line(), 0..12)) {
        let bytes = lines.join("\n").into_bytes();
        if let Ok(vmferry_report::Document::Run(run)) = vmferry_report::read("any.json", &bytes) {
            let page = vmferry_report::run(&run).unwrap();
            prop_assert!(page.ends_with("</html>"));
            let page = vmferry_report::compare(&run, &run).unwrap();
            prop_assert!(!page.contains("NaN") && !page.contains("inf "), "numbers are finite");
        }
    }

    #[test]
    fn read_of_any_bytes_gives_a_page_or_an_error(bytes in vec(any::<u8>(), 0..200)) {
        let read = vmferry_report::read("any.json", &bytes);
        let object = bytes.contains(&b'{');
        prop_assert!(read.is_err() || object, "a page without an object");
    }

    /// A record may end anywhere.
    #[test]
    fn read_accepts_a_record_cut_anywhere(part in 0.0..1.0_f64) {
        let bytes = support::file(&support::record("web", 1.0));
        let length = (bytes.len() as f64 * part) as usize;
        let first_line = bytes.iter().position(|byte| *byte == b'\n').unwrap();
        let document = vmferry_report::read("cut.json", &bytes[..length]);
        if let Ok(vmferry_report::Document::Run(run)) = document {
            prop_assert!(vmferry_report::run(&run).unwrap().ends_with("</html>"));
        } else {
            prop_assert!(length < first_line, "{length}");
        }
    }
}
