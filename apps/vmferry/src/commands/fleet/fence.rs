//! The command by which an operator's host is fenced.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};

use crate::exit::{Code, Failure};

/// A command of the table [fleet], for one host.
#[derive(Debug, PartialEq)]
pub struct Fence {
    words: Vec<String>,
}

impl Fence {
    /// Replaces `{host}` and `{label:KEY}` in the command's words.
    pub fn new(
        words: &[String],
        host: &str,
        labels: &BTreeMap<String, String>,
    ) -> Result<Self, Failure> {
        let wrong = |text: String| Failure::new(Code::Usage, text);
        if words.is_empty() {
            let text =
                "no command fences hosts: add `fence = [\"COMMAND\", …]` to the table [fleet]";
            return Err(wrong(text.to_owned()));
        }
        let mut replaced = Vec::new();
        for word in words {
            let mut word = word.replace("{host}", host);
            while let Some((before, rest)) = word.split_once("{label:") {
                let Some((label, after)) = rest.split_once('}') else { break };
                let Some(value) = labels.get(label) else {
                    return Err(wrong(format!(
                        "the fencing command needs the label {label}, which host {host} does not \
                         have"
                    )));
                };
                word = format!("{before}{value}{after}");
            }
            replaced.push(word);
        }
        Ok(Self { words: replaced })
    }

    /// The command, for people.
    pub fn line(&self) -> String {
        self.words.join(" ")
    }

    /// Runs it. Its output goes where this process's errors go.
    pub fn run(&self, timeout: Duration) -> Result<(), Failure> {
        let line = self.line();
        let failed = |why: String| {
            let text = format!(
                "the fencing command `{line}` {why}: nothing was changed. See its output, and try \
                 again"
            );
            Failure::new(Code::Internal, text)
        };
        let mut command = Command::new(&self.words[0]);
        // Processes that it has started are killed with it.
        command.args(&self.words[1..]).stdin(Stdio::null()).process_group(0);
        command.stdout(std::io::stderr());
        let mut child =
            command.spawn().map_err(|error| failed(format!("can't be started ({error})")))?;
        let group = Pid::from_child(&child);
        let (ended, end) = channel();
        std::thread::Builder::new().name("fence".into()).spawn(move || {
            // Without a receiver it was too late.
            let _ = ended.send(child.wait());
        })?;
        match end.recv_timeout(timeout) {
            Ok(Ok(status)) if ExitStatus::success(&status) => Ok(()),
            Ok(Ok(status)) => Err(failed(format!("has failed ({status})"))),
            Ok(Err(error)) => Err(failed(format!("can't be waited for ({error})"))),
            Err(_) => {
                let _ = kill_process_group(group, Signal::KILL);
                let waited = humantime::format_duration(timeout);
                Err(failed(format!("has not ended within {waited}, and was killed")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fence(words: &[&str]) -> Result<Fence, Failure> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        let labels = BTreeMap::from([("bmc".to_owned(), "10.0.0.5".to_owned())]);
        Fence::new(&words, "host-b", &labels)
    }

    #[test]
    fn host_and_labels_are_replaced() {
        let fence = fence(&["fence", "--ip={label:bmc}", "{host}", "{other}"]).unwrap();
        assert_eq!(fence.line(), "fence --ip=10.0.0.5 host-b {other}");
    }

    #[test]
    fn commands_that_cannot_be_made_or_have_not_succeeded_say_why() {
        let minute = Duration::from_secs(60);
        let error = |fence: Result<Fence, Failure>, timeout| {
            fence.and_then(|fence| fence.run(timeout)).unwrap_err().to_string()
        };
        fence(&["true"]).unwrap().run(minute).unwrap();
        for (words, timeout, expected) in [
            (&[][..], minute, "no command fences hosts"),
            (&["fence", "{label:rack}"], minute, "needs the label rack, which host host-b does"),
            (&["/nonexistent/fence"], minute, "can't be started (No such file"),
            (&["sh", "-c", "exit 3"], minute, "has failed (exit status: 3)"),
            (&["sh", "-c", "kill -9 $$"], minute, "has failed (signal: 9"),
            (&["sleep", "1000"], Duration::from_millis(10), "has not ended within 10ms"),
        ] {
            let text = error(fence(words), timeout);
            assert!(text.contains(expected), "{words:?}: {text}");
        }
    }
}
