//! Templates of receivers: `[[receive]]` in the daemon's configuration.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::Deserialize;
use vmferry_proxy::is_plain_name;

use super::messages::Order;
use crate::args::{SandboxOption, parse_duration};
use crate::exit::{Code, Failure};

/// How long a receiver waits for its source, which connects at once.
const WAIT: &str = "60s";

/// A table `[[receive]]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateTable {
    /// What sources ask for.
    pub name: String,
    /// QEMU's command line, as of `vmferry receive --exec`.
    exec: String,
    hook: Option<PathBuf>,
    hook_timeout: Option<String>,
    sandbox: Option<String>,
}

/// What a receiver is started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To receive a guest.
    Receive,
    /// To answer for the guest that an earlier receiver has left, if there is one.
    Recover,
}

impl TemplateTable {
    /// Checks what can be checked without starting it.
    pub fn check(&self) -> Result<(), Failure> {
        let name = &self.name;
        let wrong = |text: String| Err(Failure::new(Code::Usage, text));
        if !is_plain_name(name) {
            return wrong(format!(
                "{name:?} can't be a template's name: use up to 64 letters, digits, `-`, `_` and \
                 `.`"
            ));
        }
        if self.exec.trim().is_empty() {
            return wrong(format!("template {name} has no command in `exec`"));
        }
        if let Some(text) = &self.hook_timeout
            && let Err(error) = parse_duration(text)
        {
            return wrong(format!("`hook_timeout` of template {name} is wrong: {error}"));
        }
        match self.sandbox.as_deref().map(|text| SandboxOption::from_str(text, false)) {
            Some(Err(_)) => {
                wrong(format!("`sandbox` of template {name} must be auto, require or off"))
            }
            _ => Ok(()),
        }
    }
}

/// The arguments of `vmferry` that start a receiver at `socket`. `link` are the options of its
/// certificates and policy. A template that is gone leaves nothing that a recovery needs, except
/// its hook.
pub fn arguments(
    template: Option<&TemplateTable>,
    order: &Order,
    socket: &std::path::Path,
    link: Vec<OsString>,
    purpose: Purpose,
) -> Vec<OsString> {
    let mut listen = OsString::from("passed:");
    listen.push(socket);
    let mut all: Vec<OsString> =
        ["--json", "receive", "--once", "--wait", WAIT, "--listen"].map(OsString::from).into();
    all.push(listen);
    all.extend(link);
    let mut option = |name: &str, value: OsString| all.extend([OsString::from(name), value]);
    option("--expect-name", order.guest.name.clone().into());
    option("--expect-uuid", order.guest.uuid.to_string().into());
    if let Some(source) = &order.source {
        option("--expect-source", source.into());
    }
    // Long commands have several lines. A recovery starts no QEMU.
    let exec = template.map_or_else(|| "false".into(), |one| one.exec.trim().replace('\n', " "));
    option("--exec", exec.into());
    if let Some(TemplateTable { hook, hook_timeout, sandbox, .. }) = template {
        if let Some(hook) = hook {
            option("--hook", hook.into());
        }
        if let Some(timeout) = hook_timeout {
            option("--hook-timeout", timeout.into());
        }
        if let Some(sandbox) = sandbox {
            option("--sandbox", sandbox.into());
        }
    }
    if purpose == Purpose::Recover {
        all.push("--found-only".into());
    }
    all
}
