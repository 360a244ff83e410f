//! The outcome of a migration in words.

use super::metrics::{Metric, find};
use crate::human;
use crate::run::{Ending, Run};

/// How good the outcome is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// The migration met its limits.
    Good,
    /// The migration missed a limit, or the outcome is not recorded.
    Mixed,
    /// The migration failed.
    Bad,
}

impl Mood {
    /// The class in the style sheet.
    pub fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Mixed => "mixed",
            Self::Bad => "bad",
        }
    }

    /// A sign for color-blind readers.
    pub fn sign(self) -> &'static str {
        match self {
            Self::Good => "✓",
            Self::Mixed => "!",
            Self::Bad => "✕",
        }
    }
}

/// The outcome in words.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// How good the outcome is.
    pub mood: Mood,
    /// A one-sentence summary.
    pub headline: String,
    /// More sentences.
    pub sentences: Vec<String>,
}

/// Describes the outcome of a run.
pub fn of(run: &Run, metrics: &[Metric]) -> Verdict {
    let mut verdict = match &run.ending {
        Ending::Moved => moved(run, metrics),
        Ending::Failed(failure) if failure.is_in_doubt() => Verdict {
            mood: Mood::Bad,
            headline: format!("It is in doubt which host owns {}", name(run)),
            sentences: vec![failure.message.clone()],
        },
        Ending::Failed(failure) if run.has_unknown_owner(failure) => Verdict {
            mood: Mood::Bad,
            headline: format!("The record does not say which host owns {}", name(run)),
            sentences: vec![
                failure.message.clone(),
                "The sender lost contact before the end. Run `vmferry status` on both hosts."
                    .to_owned(),
            ],
        },
        Ending::Failed(failure) if run.has_lost_pages(failure) => Verdict {
            mood: Mood::Bad,
            headline: format!(
                "{} is lost: it ran at the destination and lacked pages",
                run.guest()
            ),
            sentences: vec![failure.message.clone()],
        },
        Ending::Failed(failure) => {
            let exit = failure.exit.map(|exit| format!(", exit status {exit}")).unwrap_or_default();
            Verdict {
                mood: Mood::Bad,
                headline: format!(
                    "{} stayed at the source: {}{exit}",
                    run.guest(),
                    reason(&failure.code)
                ),
                sentences: vec![failure.message.clone()],
            }
        }
        Ending::Unknown => unknown(run),
    };
    if !matches!(run.ending, Ending::Moved) {
        verdict.sentences.extend(run.advice().map(|advice| format!("Advice: {advice}")));
        verdict.sentences.extend(so_far(run, metrics));
    }
    if run.stats.digest_match == Some(false) || run.stats.verify_match == Some(false) {
        verdict.mood = Mood::Bad;
        verdict.sentences.push(
            "The memory at the destination differs from the memory that was sent.".to_owned(),
        );
    }
    if run.cut_off {
        let text = "The record ends in the middle of a line: the writer was killed or is still \
                    writing. This page shows the part before.";
        verdict.sentences.push(text.to_owned());
    }
    verdict.sentences.retain(|sentence| !sentence.is_empty());
    verdict
}

/// The guest's name within a sentence.
fn name(run: &Run) -> &str {
    run.started.guest.as_deref().unwrap_or("the guest")
}

fn moved(run: &Run, metrics: &[Metric]) -> Verdict {
    let value = |key| find(metrics, key).and_then(|metric| metric.value);
    let text = |key| find(metrics, key).map(Metric::text).unwrap_or_default();
    let mut headline = format!("{} moved", run.guest());
    if value("total_ms").is_some() {
        headline.push_str(&format!(" in {}", text("total_ms")));
    }
    if value("downtime_ms").is_some() {
        headline.push_str(&format!(" with {} of downtime", text("downtime_ms")));
    }
    let mut sentences = Vec::new();
    let mut mood = Mood::Good;
    if let (Some(downtime), Some(limit)) = (value("downtime_ms"), value("downtime_limit_ms")) {
        if downtime <= limit {
            sentences.push(format!("The downtime is within its limit of {}.", human::ms(limit)));
        } else {
            mood = Mood::Mixed;
            let times = human::digits(downtime / limit.max(1e-9));
            sentences
                .push(format!("The downtime is {times} times its limit of {}.", human::ms(limit)));
        }
    }
    if value("sent_bytes").is_some() {
        let rounds = run.rounds.len();
        let mut sentence = format!("{} were sent", text("sent_bytes"));
        if value("memory_bytes").is_some() {
            sentence.push_str(&format!(" for {} of guest memory", text("memory_bytes")));
        }
        sentence.push_str(&match rounds {
            0 => String::new(),
            1 => " in one round".to_owned(),
            _ => format!(" in {rounds} rounds"),
        });
        if let Some(ratio) = value("compression_ratio") {
            sentence.push_str(&format!(", pages with content at {} : 1", human::digits(ratio)));
        }
        sentences.push(format!("{sentence}."));
    }
    match (run.stats.verify_match, run.stats.digest_match) {
        (Some(true), _) => {
            sentences.push(
                "The hashes of both memories, taken while the guest was paused, are equal."
                    .to_owned(),
            );
        }
        (None, Some(true)) => {
            sentences.push("The digests of the sent and the placed pages are equal.".to_owned());
        }
        _ => {}
    }
    if let Some(again) = run.stats.reconnections.filter(|again| *again > 0.0) {
        let down = text("link_down_ms");
        sentences.push(format!(
            "The link was lost: {again} reconnections; channels were missing for {down}."
        ));
    }
    Verdict { mood, headline, sentences }
}

fn unknown(run: &Run) -> Verdict {
    let (headline, sentence) = if run.committed {
        (
            format!("The record ends before it is known which host owns {}", name(run)),
            "COMMIT was journaled, so the source resumes the guest only if the destination \
             confirms that it does not own it. Run `vmferry status` on both hosts.",
        )
    } else {
        (
            format!("The record ends before {} had moved", name(run)),
            "The record has no COMMIT. Unless a COMMIT followed after its end, the guest keeps \
             running at the source.",
        )
    };
    Verdict { mood: Mood::Mixed, headline, sentences: vec![sentence.to_owned()] }
}

/// The progress before the failure.
fn so_far(run: &Run, metrics: &[Metric]) -> Option<String> {
    let sent = find(metrics, "sent_bytes").filter(|metric| metric.value.is_some())?;
    let total = find(metrics, "total_ms")?;
    let rounds = match run.rounds.len() {
        1 => "1 round".to_owned(),
        rounds => format!("{rounds} rounds"),
    };
    Some(format!(
        "Before that, {} were sent in {}, with {rounds} finished.",
        sent.text(),
        total.text()
    ))
}

/// Words for a failure's code.
fn reason(code: &str) -> String {
    match code {
        "" => "the migration failed".to_owned(),
        "not-converging" => "it writes faster than the link carries".to_owned(),
        "cancelled" => "the migration was canceled".to_owned(),
        "link-lost" => "the link was lost".to_owned(),
        "connect" => "the connection failed".to_owned(),
        "authentication" => "the two hosts do not trust each other".to_owned(),
        "incompatible" => "the destination cannot run it".to_owned(),
        "corrupt" => "the memory at the destination differs".to_owned(),
        other => format!("the migration failed ({other})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::metrics;
    use crate::run::{Event, Failure, Forecast, Round, Started, Stats};

    fn verdict(run: &Run) -> Verdict {
        of(run, &metrics::of(run))
    }

    fn web() -> Run {
        let mut run = Run {
            started: Started { guest: Some("web".into()), ..Started::default() },
            rounds: vec![Round::default(), Round::default()],
            ..Run::default()
        };
        run.started.limits.downtime_limit_ms = Some(300.0);
        run
    }

    #[test]
    fn verdict_of_a_moved_guest_compares_downtime_with_the_limit() {
        let stats = Stats {
            total_ms: Some(2310.0),
            downtime_ms: Some(22.6),
            sent_bytes: Some(1e8),
            memory_bytes: Some(f64::from(1 << 28)),
            ..Stats::default()
        };
        let mut run = Run { ending: Ending::Moved, stats, ..web() };
        let said = verdict(&run);
        assert_eq!(said.mood, Mood::Good);
        assert_eq!(said.headline, "web moved in 2.31 s with 22.6 ms of downtime");
        assert_eq!(said.sentences[0], "The downtime is within its limit of 300 ms.");
        assert_eq!(said.sentences[1], "100 MB were sent for 256 MiB of guest memory in 2 rounds.");
        run.stats.downtime_ms = Some(600.0);
        assert_eq!(verdict(&run).mood, Mood::Mixed);
        run.stats.verify_match = Some(false);
        assert_eq!(verdict(&run).mood, Mood::Bad);
    }

    #[test]
    fn verdict_of_a_failure_has_reason_and_advice() {
        let failure =
            Failure { code: "not-converging".into(), exit: Some(10.0), message: "why".into() };
        let forecast = Forecast { advice: Some("use --throttle".into()), ..Forecast::default() };
        let run = Run { ending: Ending::Failed(failure), forecasts: vec![forecast], ..web() };
        let said = verdict(&run);
        assert_eq!(said.mood, Mood::Bad);
        assert!(
            said.headline.starts_with("web stayed at the source: it writes faster"),
            "{said:?}"
        );
        assert_eq!(said.sentences[..2], ["why", "Advice: use --throttle"]);
    }

    /// The sender lost the guest's VMM and does not know whether the guest was resumed.
    #[test]
    fn verdict_without_a_resume_names_no_owner() {
        for code in ["not-answering", "internal"] {
            let failure = Failure { code: code.into(), ..Failure::default() };
            let mut run = Run { ending: Ending::Failed(failure), ..web() };
            assert_eq!(verdict(&run).headline, "The record does not say which host owns web");
            let resumed =
                Event { at_ms: None, is_about: false, name: "resumed".into(), text: String::new() };
            run.events.push(resumed);
            assert!(
                verdict(&run).headline.starts_with("web stayed at the source"),
                "it was resumed"
            );
        }
    }

    #[test]
    fn verdict_of_lost_pages_does_not_say_that_the_guest_stayed() {
        let failure = Failure { code: "corrupt".into(), ..Failure::default() };
        let mut run = Run { ending: Ending::Failed(failure), ..web() };
        assert!(verdict(&run).headline.starts_with("web stayed at the source"), "not yet served");
        let name = "serving".to_owned();
        run.events.push(Event { at_ms: None, is_about: false, name, text: String::new() });
        assert!(verdict(&run).headline.starts_with("web is lost: it ran at the destination"));
    }

    /// Advice is outdated if a later forecast converged.
    #[test]
    fn verdict_leaves_out_outdated_advice() {
        let failure = Failure { code: "link-lost".into(), ..Failure::default() };
        let advised = Forecast { advice: Some("use --throttle".into()), ..Forecast::default() };
        let forecasts = vec![advised, Forecast::default()];
        let said = verdict(&Run { ending: Ending::Failed(failure), forecasts, ..web() });
        assert!(!said.sentences.iter().any(|text| text.starts_with("Advice")), "{said:?}");
    }

    #[test]
    fn verdict_in_doubt_names_no_owner() {
        let failure = Failure { code: "in-doubt".into(), ..Failure::default() };
        let said = verdict(&Run { ending: Ending::Failed(failure), ..web() });
        assert_eq!(said.headline, "It is in doubt which host owns web");
        let said = verdict(&Run { committed: true, cut_off: true, ..web() });
        assert!(said.headline.contains("before it is known which host owns web"), "{said:?}");
        assert!(said.sentences.iter().any(|text| text.contains("middle of a line")), "{said:?}");
    }
}
