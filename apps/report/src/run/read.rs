//! Reads a record: one JSON object per line, as the engine emits its events.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::events::sentence;
use super::{Ending, Event, Failure, Fetch, Round, Run, Sample, Stats};
use crate::error::ReportError;

/// Interval of progress events that have no time.
const PROGRESS_MS: f64 = 200.0;

/// A limit above every 64-bit count. Sums and quotients of smaller numbers are finite.
const MOST: f64 = 2e19;

/// The object of a line.
type Line = Map<String, Value>;

/// Reads a record. If it ends within a line, the lines before are read.
pub fn read(file: &str, bytes: &[u8]) -> Result<Run, ReportError> {
    let mut reader =
        Reader { run: Run { file: file.to_owned(), ..Run::default() }, ..Reader::default() };
    let mut lines = bytes.split(|byte| *byte == b'\n').enumerate().peekable();
    while let Some((index, line)) = lines.next() {
        let is_last = lines.peek().is_none();
        if line.trim_ascii().is_empty() {
            continue;
        }
        let failed =
            |reason: String| ReportError::Line { file: file.to_owned(), line: index + 1, reason };
        let object = match serde_json::from_slice(line) {
            Ok(Value::Object(object)) => object,
            // The last line has no newline, so it was not finished.
            _ if is_last && reader.lines > 0 => {
                reader.run.cut_off = true;
                break;
            }
            Ok(_) => return Err(failed("not a JSON object".to_owned())),
            Err(error) => return Err(failed(format!("not JSON: {error}"))),
        };
        reader.line(object).map_err(failed)?;
    }
    if reader.lines == 0 {
        return Err(ReportError::Unknown { file: file.to_owned() });
    }
    Ok(reader.finish())
}

/// Makes a run from the single object that `vmferry demo --json` or a failed command prints.
pub fn of_object(file: &str, object: &Line) -> Result<Run, ReportError> {
    let failed = |reason: String| ReportError::Line { file: file.to_owned(), line: 1, reason };
    let mut reader =
        Reader { run: Run { file: file.to_owned(), ..Run::default() }, ..Reader::default() };
    reader.line(object.clone()).map_err(failed)?;
    Ok(reader.finish())
}

/// The state of reading.
#[derive(Default)]
struct Reader {
    run: Run,
    lines: usize,
    ended: bool,
    /// Rounds from `round-done` events.
    rounds: Vec<Round>,
    /// The wall-clock time of each event and forecast.
    times: Vec<Option<OffsetDateTime>>,
    /// The elapsed time in each of them, in milliseconds.
    elapsed: Vec<Option<f64>>,
    /// The elapsed time of the progress before each of them.
    sampled: Vec<Option<f64>>,
    /// A moment in wall-clock time and in elapsed time.
    anchor: Option<(OffsetDateTime, f64)>,
}

impl Reader {
    fn line(&mut self, mut line: Line) -> Result<(), String> {
        self.lines += 1;
        line.iter().try_for_each(|(name, value)| check_range(name, value))?;
        let time = line.get("time").and_then(Value::as_str);
        if self.run.begun.is_none() {
            self.run.begun = time.map(str::to_owned);
        }
        let time = time.and_then(|text| OffsetDateTime::parse(text, &Rfc3339).ok());
        if let Some(id) = line.get("run").and_then(Value::as_str) {
            match &self.run.id {
                Some(known) if known != id => {
                    return Err(format!("another migration begins here: {id} after {known}"));
                }
                Some(_) => {}
                None => self.run.id = Some(id.to_owned()),
            }
        }
        let Some(name) = line.get("event").and_then(Value::as_str).map(str::to_owned) else {
            return self.end_of_output(line);
        };
        let elapsed = line.get("elapsed_ms").and_then(Value::as_f64);
        if let (None, Some(time), Some(elapsed)) = (self.anchor, time, elapsed) {
            self.anchor = Some((time, elapsed));
        }
        match name.as_str() {
            "progress" => {
                self.sample(&line, elapsed);
                return Ok(());
            }
            "fetch-progress" => {
                self.run.fetch = Some(parse(&line)?);
                self.run.remaining_pages = line.get("remaining_pages").and_then(Value::as_f64);
                return Ok(());
            }
            "started" => self.run.started = parse(&line)?,
            "accepted" => {
                let name = line.get("name").and_then(Value::as_str);
                self.run.started.guest = name.map(str::to_owned);
                self.run.started.memory_bytes = line.get("memory_bytes").and_then(Value::as_f64);
            }
            // Of the source and of the destination.
            "serving" | "fetching" if line.contains_key("pages") => {
                self.run.stats.missing_pages = line.get("pages").and_then(Value::as_f64);
            }
            "received" => {
                let name = line.get("guest").and_then(|guest| guest.get("name")?.as_str());
                let guest = &mut self.run.started.guest;
                *guest = guest.take().or_else(|| name.map(str::to_owned));
                let stats = line.get("stats").unwrap_or(&Value::Null);
                self.received(stats)?;
            }
            "connected" => {
                self.run.round_trip_ms = line.get("round_trip_ms").and_then(Value::as_f64);
            }
            "forecast" => self.run.forecasts.push(parse(&line)?),
            "round-done" => self.rounds.push(parse(&line)?),
            "committed" => self.run.committed = true,
            "done" => {
                let stats = line.remove("stats").unwrap_or_default();
                self.end(Ending::Moved, stats)?;
            }
            "failed" => {
                let stats = line.remove("stats").unwrap_or_default();
                let failure = failure(line.get("error"))?;
                self.end(Ending::Failed(failure), stats)?;
            }
            _ => {}
        }
        let text = sentence(&line);
        self.run.events.push(Event { at_ms: None, is_about: false, name, text });
        self.times.push(time);
        self.elapsed.push(elapsed);
        self.sampled.push(self.run.samples.last().map(|sample| sample.at_ms));
        Ok(())
    }

    /// Handles the statistics of a destination, whose record goes on with the guest's end.
    fn received(&mut self, stats: &Value) -> Result<(), String> {
        let fetch = stats.get("fetch").filter(|fetch| !fetch.is_null());
        if let Some(fetch) = fetch {
            let fetch = Fetch::deserialize(fetch).map_err(|error| error.to_string())?;
            (self.run.fetch, self.run.remaining_pages) = (Some(fetch), None);
        }
        self.run.destination_cpu_s = stats.get("engine_cpu_s").and_then(Value::as_f64);
        if !self.ended {
            self.run.ending = Ending::Moved;
        }
        Ok(())
    }

    /// Handles the result that a command prints at its end, which is not an event.
    fn end_of_output(&mut self, line: Line) -> Result<(), String> {
        if let (Some(false), Some(error)) =
            (line.get("ok").and_then(Value::as_bool), line.get("error"))
        {
            let failure = failure(Some(error))?;
            return self.end(Ending::Failed(failure), Value::Null);
        }
        if !line.get("rounds").is_some_and(Value::is_array) {
            return Err("neither an event nor migration statistics".to_owned());
        }
        // A demo has extra members and other names for its CPU times.
        let number = |name: &str| line.get(name).and_then(Value::as_f64);
        self.run.destination_cpu_s = number("destination_cpu_s");
        let source_cpu_s = number("source_cpu_s");
        self.end(Ending::Moved, Value::Object(line))?;
        self.run.stats.engine_cpu_s = self.run.stats.engine_cpu_s.or(source_cpu_s);
        Ok(())
    }

    fn end(&mut self, ending: Ending, stats: Value) -> Result<(), String> {
        if std::mem::replace(&mut self.ended, true) {
            return Err("the record continues after its end".to_owned());
        }
        self.run.ending = ending;
        if !stats.is_null() {
            self.run.stats = Stats::deserialize(stats).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn sample(&mut self, line: &Line, elapsed: Option<f64>) {
        let last = self.run.samples.last();
        let next = last.map_or(PROGRESS_MS, |last| last.at_ms + PROGRESS_MS);
        let sent_bytes = line.get("sent_bytes").and_then(Value::as_f64).unwrap_or_default();
        self.run.samples.push(Sample { at_ms: elapsed.unwrap_or(next), sent_bytes });
    }

    fn finish(mut self) -> Run {
        // The statistics at the end contain every round. Without them, the rounds of the events are
        // used.
        let rounds = std::mem::take(&mut self.run.stats.rounds);
        self.run.rounds = if rounds.len() >= self.rounds.len() { rounds } else { self.rounds };
        let first = self.times.iter().flatten().next().copied();
        let anchor = self.anchor.or(first.map(|time| (time, 0.0)));
        let known = self.times.iter().zip(&self.elapsed).zip(&self.sampled);
        for (event, ((time, elapsed), sampled)) in self.run.events.iter_mut().zip(known) {
            let by_clock = time
                .zip(anchor)
                .map(|(time, (anchor, at))| (time - anchor).as_seconds_f64() * 1e3 + at);
            let exact = by_clock.or(*elapsed);
            event.at_ms = exact.or(*sampled);
            event.is_about = exact.is_none();
        }
        let stats = &self.run.stats;
        self.run.round_trip_ms = self.run.round_trip_ms.or(stats.round_trip_ms);
        self.run
    }
}

/// Checks that all numbers of a member are within [`MOST`].
fn check_range(name: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number) if number.as_f64().is_none_or(|number| number.abs() > MOST) => {
            Err(format!("{name} is {number}, which is out of range"))
        }
        Value::Array(parts) => parts.iter().try_for_each(|part| check_range(name, part)),
        Value::Object(parts) => parts.iter().try_for_each(|(name, part)| check_range(name, part)),
        _ => Ok(()),
    }
}

fn failure(error: Option<&Value>) -> Result<Failure, String> {
    let Some(error) = error.filter(|error| !error.is_null()) else { return Ok(Failure::default()) };
    Failure::deserialize(error).map_err(|error| error.to_string())
}

fn parse<T: DeserializeOwned>(line: &Line) -> Result<T, String> {
    T::deserialize(line).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STARTED: &str = concat!(
        r#"{"event":"started","time":"2026-01-02T03:04:05.000Z","run":"r1","guest":"web","#,
        r#""limits":{"downtime_limit_ms":300.0,"max_bandwidth":null}}"#
    );
    const DONE: &str =
        r#"{"event":"done","stats":{"rounds":[{"round":1,"pages":3}],"total_ms":12.5}}"#;

    fn lines(lines: &[&str]) -> Result<Run, ReportError> {
        read("run.json", (lines.join("\n") + "\n").as_bytes())
    }

    #[test]
    fn read_accepts_both_forms_of_the_end() {
        let run = lines(&[STARTED, DONE]).unwrap();
        assert_eq!((run.ending, run.stats.total_ms), (Ending::Moved, Some(12.5)));
        assert_eq!(run.started.guest.as_deref(), Some("web"));
        let run = lines(&[r#"{"event":"ready"}"#, r#"{"rounds":[],"total_ms":7}"#]).unwrap();
        assert_eq!((run.ending, run.stats.total_ms), (Ending::Moved, Some(7.0)));
        let error = r#"{"ok":false,"error":{"code":"not-converging","exit":10,"message":"no"}}"#;
        let round = r#"{"event":"round-done","round":1,"pages":5}"#;
        let run = lines(&[round, error]).unwrap();
        let Ending::Failed(failure) = run.ending else { panic!("the migration failed") };
        assert_eq!((failure.code.as_str(), failure.exit), ("not-converging", Some(10.0)));
        assert_eq!(run.rounds[0].pages, Some(5.0), "rounds so far");
    }

    #[test]
    fn read_stops_at_a_cut_line_and_rejects_a_broken_one() {
        let cut = format!("{STARTED}\n{}", &DONE[..40]);
        let run = read("run.json", cut.as_bytes()).unwrap();
        assert!(run.cut_off && run.ending == Ending::Unknown);
        let error = lines(&[STARTED, "{oops", DONE]).unwrap_err().to_string();
        assert!(error.starts_with("run.json, line 2: not JSON: "), "{error}");
        let error = lines(&[STARTED, r#"{"event":"round-done","pages":"many"}"#]).unwrap_err();
        assert!(error.to_string().starts_with("run.json, line 2: "), "{error}");
        assert!(matches!(lines(&[""]), Err(ReportError::Unknown { .. })));
        assert!(lines(&[DONE, DONE]).is_err(), "a record ends once");
        let error = lines(&[r#"{"event":"round-done","encoded":{"raw":1e308}}"#]).unwrap_err();
        let words = "run.json, line 1: raw is 1e+308, which is out of range";
        assert_eq!(error.to_string(), words);
        let other = STARTED.replace("r1", "r2");
        let error = lines(&[STARTED, &other]).unwrap_err().to_string();
        assert!(error.contains("r2 after r1"), "{error}");
    }

    #[test]
    fn event_times_count_from_the_start_by_either_clock() {
        let run = lines(&[
            STARTED,
            concat!(
                r#"{"event":"progress","time":"2026-01-02T03:04:05.900Z","#,
                r#""elapsed_ms":800.0,"sent_bytes":10}"#
            ),
            r#"{"event":"paused","time":"2026-01-02T03:04:06.100Z"}"#,
        ])
        .unwrap();
        let at: Vec<_> = run.events.iter().map(|event| event.at_ms.unwrap().round()).collect();
        assert_eq!(at, [-100.0, 1000.0]);
        let progress = r#"{"event":"progress","sent_bytes":10}"#;
        let run = lines(&[progress, progress, r#"{"event":"paused"}"#]).unwrap();
        assert_eq!(run.samples[1].at_ms, 400.0, "progress comes five times a second");
        assert_eq!((run.events[0].at_ms, run.events[0].is_about), (Some(400.0), true));
    }
}
