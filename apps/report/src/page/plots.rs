//! The plots of one run, or of two runs with the same axes.

use maud::{Markup, html};

use super::metrics;
use super::strip::{Strip, strips};
use crate::chart::{Axis, Figure, Line, Tone, swatch};
use crate::error::ReportError;
use crate::human;
use crate::run::{Number, PAGE_BYTES, Round, Run};

/// A run with its name on the page.
pub struct Named<'a> {
    /// `A` or `B`; empty if it is the only run.
    pub name: &'static str,
    /// The run.
    pub run: &'a Run,
}

/// A part of a round's bar: its tone, its name, and its size.
type Part = (Tone, &'static str, fn(&Round) -> Number);

/// The largest of the known numbers.
fn most(numbers: impl Iterator<Item = Number>) -> f64 {
    numbers.flatten().fold(0.0, f64::max)
}

/// The title of a plot, with the run's name if there are two.
fn titled(named: &Named<'_>, title: &str) -> String {
    if named.name.is_empty() { title.to_owned() } else { format!("{}: {title}", named.name) }
}

/// A plot with its title and legend.
fn framed(title: &str, legend: &[(Tone, bool, String)], plot: &Markup) -> Markup {
    html! {
        figure {
            figcaption {
                h3 { (title) }
                @if !legend.is_empty() {
                    ul.legend {
                        @for (tone, is_line, name) in legend {
                            li { (swatch(*tone, *is_line)) (name) }
                        }
                    }
                }
            }
            (plot)
        }
    }
}

/// Draws one bar plot per run with a bar per round. All plots have the same axes.
fn by_round(
    runs: &[Named<'_>],
    what: &str,
    id: &str,
    upwards: impl Fn(f64) -> Axis,
    parts: &[Part],
    text: impl Fn(f64) -> String,
) -> Result<Markup, ReportError> {
    let whole = |round: &Round| {
        parts.iter().map(|(_, _, of)| of(round)).fold(None, |sum, part| match (sum, part) {
            (Some(sum), Some(part)) => Some(sum + part),
            (sum, part) => sum.or(part),
        })
    };
    let all = || runs.iter().flat_map(|named| &named.run.rounds);
    let top = most(all().map(whole));
    let rounds = runs.iter().map(|named| named.run.rounds.len()).max().unwrap_or_default();
    // Parts that are 0 in every round are not in the legend.
    let used: Vec<_> =
        parts.iter().filter(|(_, _, of)| all().any(|round| of(round) > Some(0.0))).collect();
    let legend: Vec<(Tone, bool, String)> = match used.len() {
        0 | 1 => Vec::new(),
        _ => used.iter().map(|(tone, name, _)| (*tone, false, (*name).to_owned())).collect(),
    };
    let mut figures = Vec::new();
    for (index, named) in runs.iter().enumerate().filter(|(_, named)| !named.run.rounds.is_empty())
    {
        let words = named.run.rounds.iter().enumerate().map(|(index, round)| {
            format!("round {}: {}", index + 1, whole(round).map_or_else(|| "unknown".into(), &text))
        });
        let description = words.collect::<Vec<_>>().join("; ");
        let title = titled(named, what);
        let figure = Figure {
            id: &format!("{id}-{index}"),
            title: &title,
            description,
            x: Axis::count("round", rounds as f64),
            y: upwards(top),
        };
        let bars: Vec<Vec<(Tone, f64)>> = named
            .run
            .rounds
            .iter()
            .map(|round| {
                used.iter().map(|(tone, _, of)| (*tone, of(round).unwrap_or_default())).collect()
            })
            .collect();
        figures.push(framed(&title, &legend, &figure.bars(&bars)?));
    }
    Ok(html! { @for figure in figures { (figure) } })
}

/// All plots, the most important first.
pub fn all(runs: &[Named<'_>]) -> Result<Markup, ReportError> {
    Ok(html! {
        (downtime(runs))
        (rates(runs)?)
        (forecasts(runs)?)
        (bytes(runs)?)
        (pages(runs)?)
        (codecs(runs)?)
        (cpu(runs))
    })
}

/// The plot of bytes sent by round.
fn bytes(runs: &[Named<'_>]) -> Result<Markup, ReportError> {
    let axis = |top| Axis::bytes("sent", "B", top);
    by_round(
        runs,
        "Bytes by round",
        "bytes",
        axis,
        &[(Tone::Blue, "sent", |round| round.bytes)],
        human::bytes,
    )
}

/// The plot of dirty pages by round, split into pages with content, zero pages and free pages.
fn pages(runs: &[Named<'_>]) -> Result<Markup, ReportError> {
    fn rest(round: &Round) -> Number {
        let less = round.zero_pages.unwrap_or_default() + round.free_pages.unwrap_or_default();
        round.pages.map(|pages| (pages - less).max(0.0))
    }
    let axis = |top| Axis::count("pages", top);
    let parts: [Part; 3] = [
        (Tone::Blue, "with content", rest),
        (Tone::Grey, "zero (sent as a mark)", |round| round.zero_pages),
        (Tone::Pale, "free (not sent)", |round| round.free_pages),
    ];
    by_round(runs, "Dirty pages by round", "pages", axis, &parts, human::count)
}

/// The plot of page encodings by round.
fn codecs(runs: &[Named<'_>]) -> Result<Markup, ReportError> {
    let axis = |top| Axis::count("pages", top);
    let parts: [Part; 7] = [
        (Tone::Blue, "raw", |round| round.encoded.raw),
        (Tone::Orange, "delta", |round| round.encoded.delta),
        (Tone::Green, "lz4", |round| round.encoded.lz4),
        (Tone::Pink, "zstd", |round| round.encoded.zstd),
        (Tone::Sky, "zlib", |round| round.encoded.zlib),
        (Tone::Grey, "zero", |round| round.encoded.zero.or(round.zero_pages)),
        (Tone::Pale, "free", |round| round.free_pages),
    ];
    let known = |round: &Round| round.encoded != crate::run::Encoded::default();
    if !runs.iter().flat_map(|named| &named.run.rounds).any(known) {
        return Ok(html! {});
    }
    by_round(runs, "Page encodings by round", "codecs", axis, &parts, human::count)
}

/// Throughput of the link over time.
fn throughput(run: &Run) -> Vec<(f64, f64)> {
    let by_samples: Vec<(f64, f64)> = run
        .samples
        .windows(2)
        .filter_map(|pair| {
            let (ms, sent) =
                (pair[1].at_ms - pair[0].at_ms, pair[1].sent_bytes - pair[0].sent_bytes);
            (ms > 1.0).then(|| (pair[1].at_ms, sent.max(0.0) / ms * 1e3))
        })
        .collect();
    // A short migration has few samples; its rounds are more precise.
    if by_samples.len() >= 4 {
        return by_samples;
    }
    let spans = run.spans();
    let rounds = run.rounds.iter().zip(spans).filter_map(|(round, (begin, end))| {
        let bytes_per_s = round.bytes? / (end - begin) * 1e3;
        bytes_per_s.is_finite().then_some([(begin, bytes_per_s), (end, bytes_per_s)])
    });
    rounds.flatten().collect()
}

/// The guest's dirty rate over time.
fn dirty_rate(run: &Run) -> Vec<(f64, f64)> {
    let forecasts: Vec<(f64, f64)> =
        run.forecasts.iter().filter_map(|one| one.elapsed_ms.zip(one.dirty_bytes_per_s)).collect();
    if !forecasts.is_empty() {
        return forecasts;
    }
    let spans = run.spans();
    // The rate before the first round is not known, and while the guest is paused it is 0.
    let rounds = run.rounds.iter().zip(spans).skip(1);
    rounds
        .filter(|(round, _)| !round.paused)
        .filter_map(|(round, (begin, _))| Some((begin, round.dirty_pages_per_s? * PAGE_BYTES)))
        .collect()
}

fn paused_at(run: &Run) -> Option<f64> {
    let event = run.events.iter().rev().find(|event| event.name == "paused");
    let round = run.rounds.iter().zip(run.spans()).find(|(round, _)| round.paused);
    let exact = event.filter(|event| !event.is_about).and_then(|event| event.at_ms);
    exact.or(round.map(|(_, (begin, _))| begin)).or(event.and_then(|event| event.at_ms))
}

/// The plots of throughput and dirty rate over time.
fn rates(runs: &[Named<'_>]) -> Result<Markup, ReportError> {
    let curves: Vec<_> =
        runs.iter().map(|named| (throughput(named.run), dirty_rate(named.run))).collect();
    let points = || curves.iter().flat_map(|(carried, dirty)| carried.iter().chain(dirty));
    let (end, top) = (most(points().map(|p| Some(p.0))), most(points().map(|p| Some(p.1))));
    let mut figures = Vec::new();
    for (index, (named, (carried, dirty))) in runs.iter().zip(&curves).enumerate() {
        if carried.is_empty() && dirty.is_empty() {
            continue;
        }
        let title = titled(named, "Throughput and dirty rate over time");
        let cap = named.run.started.limits.max_bandwidth;
        let peak = |points: &[(f64, f64)]| human::rate(most(points.iter().map(|p| Some(p.1))));
        let figure = Figure {
            id: &format!("rates-{index}"),
            title: &title,
            description: format!(
                "Peak throughput of the link: {}. Peak dirty rate of the guest: {}.",
                peak(carried),
                peak(dirty)
            ),
            x: Axis::ms("time", end),
            y: Axis::bytes("rate", "B/s", top.max(cap.unwrap_or_default())),
        };
        let mut lines = vec![
            Line { tone: Tone::Blue, points: carried.clone() },
            Line { tone: Tone::Orange, points: dirty.clone() },
        ];
        let mut legend = vec![
            (Tone::Blue, true, "sent over the link".to_owned()),
            (Tone::Orange, true, "written by the guest".to_owned()),
        ];
        if let Some(cap) = cap {
            lines.push(Line { tone: Tone::Red, points: vec![(0.0, cap), (end * 1.06, cap)] });
            legend.push((Tone::Red, true, format!("cap of {}", human::rate(cap))));
        }
        let paused = paused_at(named.run);
        if paused.is_some() {
            legend.push((Tone::Grey, true, "guest paused".to_owned()));
        }
        let marks: Vec<f64> = paused.into_iter().collect();
        figures.push(framed(&title, &legend, &figure.lines(&lines, &marks)?));
    }
    Ok(html! { @for figure in figures { (figure) } })
}

/// The plots of the predicted downtime after each harvest, with the limit.
fn forecasts(runs: &[Named<'_>]) -> Result<Markup, ReportError> {
    let points = |run: &Run| -> Vec<(f64, f64)> {
        run.forecasts
            .iter()
            .filter_map(|one| one.elapsed_ms.zip(one.predicted_downtime_ms))
            .collect()
    };
    let curves: Vec<_> = runs.iter().map(|named| points(named.run)).collect();
    let all = || curves.iter().flatten();
    let limits = runs.iter().map(|named| named.run.downtime_limit_ms());
    let top = most(all().map(|p| Some(p.1)).chain(limits));
    let end = most(all().map(|p| Some(p.0)));
    let mut figures = Vec::new();
    for (index, (named, curve)) in runs.iter().zip(&curves).enumerate() {
        if curve.is_empty() {
            continue;
        }
        let title = titled(named, "Predicted downtime over time");
        let words = curve.iter().map(|(_, ms)| human::ms(*ms)).collect::<Vec<_>>().join(", then ");
        let figure = Figure {
            id: &format!("forecast-{index}"),
            title: &title,
            description: format!("Predicted after each harvest: {words}."),
            x: Axis::ms("time", end),
            y: Axis::ms("predicted", top),
        };
        let mut lines = vec![Line { tone: Tone::Blue, points: curve.clone() }];
        let mut legend = vec![(Tone::Blue, true, "predicted".to_owned())];
        if let Some(limit) = named.run.downtime_limit_ms() {
            lines.push(Line { tone: Tone::Red, points: vec![(0.0, limit), (end * 1.06, limit)] });
            legend.push((Tone::Red, true, format!("limit of {}", human::ms(limit))));
        }
        figures.push(framed(&title, &legend, &figure.lines(&lines, &[])?));
    }
    Ok(html! { @for figure in figures { (figure) } })
}

/// The plot of the parts of the downtime.
fn downtime(runs: &[Named<'_>]) -> Markup {
    let known = || runs.iter().filter(|named| metrics::was_paused(named.run));
    if known().next().is_none() {
        return html! {};
    }
    let bar = |named: &Named<'_>| {
        let parts = &named.run.stats.downtime;
        let of = Option::unwrap_or_default;
        let mut pieces = vec![
            (Tone::Blue, "pause", of(parts.pause_ms)),
            (Tone::Orange, "last harvest", of(parts.harvest_ms)),
            (Tone::Green, "last round and state", of(parts.send_ms)),
            (Tone::Pink, "destination becomes ready", of(parts.ready_ms)),
            (Tone::Sky, "commit", of(parts.commit_ms)),
        ];
        let sum: f64 = pieces.iter().map(|(_, _, ms)| ms).sum();
        let whole = of(named.run.stats.downtime_ms);
        if sum > 0.0 && whole - sum > 0.05 {
            pieces.push((Tone::Pale, "other", whole - sum));
        }
        let sent_from = of(parts.pause_ms) + of(parts.harvest_ms);
        let parallel = parts.save_ms.filter(|ms| *ms > 0.0);
        let parallel = parallel.map(|ms| ("saving the state (in parallel)", sent_from, ms));
        Strip { label: named.name.to_owned(), parts: pieces, parallel }
    };
    let bars: Vec<Strip<'_>> = known().map(bar).collect();
    let end = most(bars.iter().map(|bar| Some(bar.parts.iter().map(|(_, _, ms)| ms).sum())));
    html! {
        figure.wide {
            figcaption { h3 { "Parts of the downtime" } }
            (strips("downtime", "Parts of the downtime", &bars, end, human::ms))
        }
    }
}

/// The plot of CPU time.
fn cpu(runs: &[Named<'_>]) -> Markup {
    let known = |named: &&Named<'_>| named.run.stats.engine_cpu_s.is_some();
    if runs.iter().find(known).is_none() {
        return html! {};
    }
    let bar = |named: &Named<'_>| {
        let whole = named.run.stats.engine_cpu_s.unwrap_or_default();
        let planning = named.run.stats.planning_cpu_s.unwrap_or_default().min(whole);
        let mut parts = vec![
            (Tone::Orange, "planning", planning),
            (Tone::Blue, "reading, encoding, sending", whole - planning),
        ];
        parts.extend(named.run.destination_cpu_s.map(|cpu| (Tone::Green, "destination", cpu)));
        Strip { label: named.name.to_owned(), parts, parallel: None }
    };
    let bars: Vec<Strip<'_>> = runs.iter().filter(known).map(bar).collect();
    let end = most(bars.iter().map(|bar| Some(bar.parts.iter().map(|(_, _, s)| s).sum())));
    let seconds = |s: f64| format!("{} s", human::digits(s));
    html! {
        figure.wide {
            figcaption { h3 { "CPU time of the engine" } }
            (strips("cpu", "CPU seconds", &bars, end, seconds))
            ul.legend {
                @for named in runs {
                    @let metrics = metrics::of(named.run);
                    @let per_gb = metrics::find(&metrics, "engine_cpu_s_per_gb");
                    @if let Some(per_gb) = per_gb.filter(|metric| metric.value.is_some()) {
                        li {
                            @if !named.name.is_empty() { (named.name) ": " }
                            b { (per_gb.text()) } " of pages with content, at the source"
                        }
                    }
                }
            }
        }
    }
}
