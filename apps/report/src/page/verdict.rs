//! How a migration ended, in words.

use super::metrics::{Metric, find};
use crate::human;
use crate::run::{Ending, Run};

/// How it is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mood {
    /// As it was wanted.
    Good,
    /// Not quite.
    Mixed,
    /// Not at all.
    Bad,
}

impl Mood {
    /// The class of the style sheet.
    pub fn class(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Mixed => "mixed",
            Self::Bad => "bad",
        }
    }

    /// For whoever sees no colours.
    pub fn sign(self) -> &'static str {
        match self {
            Self::Good => "✓",
            Self::Mixed => "!",
            Self::Bad => "✕",
        }
    }
}

/// A verdict.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// How it is to be taken.
    pub mood: Mood,
    /// In one sentence.
    pub headline: String,
    /// More of them.
    pub sentences: Vec<String>,
}

/// The verdict on a run.
pub fn of(run: &Run, metrics: &[Metric]) -> Verdict {
    let mut verdict = match &run.ending {
        Ending::Moved => moved(run, metrics),
        Ending::Failed(failure) if failure.is_in_doubt() => Verdict {
            mood: Mood::Bad,
            headline: format!("It is in doubt which host has {}", name(run)),
            sentences: vec![failure.message.clone()],
        },
        Ending::Failed(failure) if run.is_unheard(failure) => Verdict {
            mood: Mood::Bad,
            headline: format!("The record does not say who has {}", name(run)),
            sentences: vec![
                failure.message.clone(),
                "Whoever wrote it did not hear how it ended. `vmferry status` on both hosts says more.".to_owned(),
            ],
        },
        Ending::Failed(failure) => {
            let exit = failure.exit.map(|exit| format!(", exit status {exit}")).unwrap_or_default();
            Verdict {
                mood: Mood::Bad,
                headline: format!(
                    "{} stayed where it was: {}{exit}",
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
        verdict
            .sentences
            .push("The memory that arrived is not the memory that was sent.".to_owned());
    }
    if run.cut_off {
        let text = "The record ends in the middle of a line: whoever wrote it was killed or is still writing. What \
                    is there is shown.";
        verdict.sentences.push(text.to_owned());
    }
    verdict.sentences.retain(|sentence| !sentence.is_empty());
    verdict
}

/// The guest within a sentence.
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
        headline.push_str(&format!(" and stood still for {}", text("downtime_ms")));
    }
    let mut sentences = Vec::new();
    let mut mood = Mood::Good;
    if let (Some(downtime), Some(limit)) = (value("downtime_ms"), value("downtime_limit_ms")) {
        if downtime <= limit {
            sentences.push(format!("That is within its limit of {}.", human::ms(limit)));
        } else {
            mood = Mood::Mixed;
            let times = human::digits(downtime / limit.max(1e-9));
            sentences.push(format!("That is {times} times its limit of {}.", human::ms(limit)));
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
                "Both memories, hashed whole while the guest was paused, are equal.".to_owned(),
            );
        }
        (None, Some(true)) => {
            sentences
                .push("The digests of what was sent and of what arrived are equal.".to_owned());
        }
        _ => {}
    }
    if let Some(again) = run.stats.reconnections.filter(|again| *again > 0.0) {
        let down = text("link_down_ms");
        sentences.push(format!(
            "The link was lost: {again} channels were made again, {down} without all of them."
        ));
    }
    Verdict { mood, headline, sentences }
}

fn unknown(run: &Run) -> Verdict {
    let (headline, sentence) = if run.committed {
        (
            format!("The record ends before it is known who has {}", name(run)),
            "COMMIT was journalled: the guest is never resumed at the source without the destination's word. \
             `vmferry status` says more.",
        )
    } else {
        (
            format!("The record ends before {} had moved", name(run)),
            "There is no COMMIT in it. Unless one came after its end, the guest runs on at the source.",
        )
    };
    Verdict { mood: Mood::Mixed, headline, sentences: vec![sentence.to_owned()] }
}

/// What was done until it failed.
fn so_far(run: &Run, metrics: &[Metric]) -> Option<String> {
    let sent = find(metrics, "sent_bytes").filter(|metric| metric.value.is_some())?;
    let total = find(metrics, "total_ms")?;
    let rounds = match run.rounds.len() {
        1 => "1 round".to_owned(),
        rounds => format!("{rounds} rounds"),
    };
    Some(format!(
        "Until then {} were sent in {}, with {rounds} finished.",
        sent.text(),
        total.text()
    ))
}

/// A failure's code in words.
fn reason(code: &str) -> String {
    match code {
        "" => "the migration failed".to_owned(),
        "not-converging" => "it writes faster than the link carries".to_owned(),
        "cancelled" => "the migration was cancelled".to_owned(),
        "link-lost" => "the link was lost".to_owned(),
        "connect" => "no connection could be made".to_owned(),
        "authentication" => "the two sides do not trust each other".to_owned(),
        "incompatible" => "the destination can't take it".to_owned(),
        "corrupt" => "the memory that arrived differs".to_owned(),
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
    fn a_guest_that_moved_is_held_against_its_limit() {
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
        assert_eq!(said.headline, "web moved in 2.31 s and stood still for 22.6 ms");
        assert_eq!(said.sentences[0], "That is within its limit of 300 ms.");
        assert_eq!(said.sentences[1], "100 MB were sent for 256 MiB of guest memory in 2 rounds.");
        run.stats.downtime_ms = Some(600.0);
        assert_eq!(verdict(&run).mood, Mood::Mixed);
        run.stats.verify_match = Some(false);
        assert_eq!(verdict(&run).mood, Mood::Bad);
    }

    #[test]
    fn one_that_stayed_says_why_and_what_to_do() {
        let failure =
            Failure { code: "not-converging".into(), exit: Some(10.0), message: "why".into() };
        let forecast = Forecast { advice: Some("use --throttle".into()), ..Forecast::default() };
        let run = Run { ending: Ending::Failed(failure), forecasts: vec![forecast], ..web() };
        let said = verdict(&run);
        assert_eq!(said.mood, Mood::Bad);
        assert!(said.headline.starts_with("web stayed where it was: it writes faster"), "{said:?}");
        assert_eq!(said.sentences[..2], ["why", "Advice: use --throttle"]);
    }

    /// A sender that has lost the guest's VMM knows nothing of what that did since.
    #[test]
    fn nobody_is_said_to_have_a_guest_of_which_nothing_was_heard() {
        for code in ["not-answering", "internal"] {
            let failure = Failure { code: code.into(), ..Failure::default() };
            let mut run = Run { ending: Ending::Failed(failure), ..web() };
            assert_eq!(verdict(&run).headline, "The record does not say who has web");
            let resumed =
                Event { at_ms: None, is_about: false, name: "resumed".into(), text: String::new() };
            run.events.push(resumed);
            assert!(verdict(&run).headline.starts_with("web stayed where it was"), "it was heard");
        }
    }

    /// What was advised on the way is no advice any more once it converged.
    #[test]
    fn advice_of_the_past_is_not_given() {
        let failure = Failure { code: "link-lost".into(), ..Failure::default() };
        let advised = Forecast { advice: Some("use --throttle".into()), ..Forecast::default() };
        let forecasts = vec![advised, Forecast::default()];
        let said = verdict(&Run { ending: Ending::Failed(failure), forecasts, ..web() });
        assert!(!said.sentences.iter().any(|text| text.starts_with("Advice")), "{said:?}");
    }

    #[test]
    fn nobody_is_said_to_have_a_guest_that_is_in_doubt() {
        let failure = Failure { code: "in-doubt".into(), ..Failure::default() };
        let said = verdict(&Run { ending: Ending::Failed(failure), ..web() });
        assert_eq!(said.headline, "It is in doubt which host has web");
        let said = verdict(&Run { committed: true, cut_off: true, ..web() });
        assert!(said.headline.contains("before it is known who has web"), "{said:?}");
        assert!(said.sentences.iter().any(|text| text.contains("middle of a line")), "{said:?}");
    }
}
