//! `vmferry fleet declare-lost` and `readmit`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::json;
use vmferry_fleet::{Fate, Fleet, FleetError, HostName, Loss};

use super::config::FleetTable;
use super::fence::Fence;
use crate::args::LossOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Fences a host, and frees its guests if that has succeeded.
pub fn declare(
    fleet: &Fleet,
    table: &FleetTable,
    options: &LossOptions,
    output: &Output,
) -> Result<(), Failure> {
    let name = HostName::new(&options.host)?;
    let hosts = fleet.hosts()?;
    let Some(view) = hosts.iter().find(|view| view.name == name) else {
        return Err(FleetError::UnknownHost { prefix: fleet.prefix().to_string(), name }.into());
    };
    if view.presence.is_some() && !options.although_heard {
        let text = format!(
            "host {name} is heard: it is not lost. Move its guests, or fence it nevertheless \
             (`--although-heard`)"
        );
        return Err(Failure::new(Code::WrongState, text));
    }
    let labels = view.host.as_ref().map(|host| host.labels.clone()).unwrap_or_default();
    let fence = Fence::new(table.fence(), name.as_str(), &labels)?;
    output.note(format!("fencing {name}: {}", fence.line()));
    fence.run(options.fence_timeout)?;
    let fenced = json!({ "event": "fenced", "host": name, "command": fence.line() });
    output.event(&fenced, || format!("{name} is fenced"));
    let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let guests = fleet.declare_lost(&name, &Loss { at, fence: fence.line() })?;
    let undecided = guests.iter().filter(|guest| !guest.fate.is_decided()).count();
    let done = json!({ "host": name, "guests": guests, "undecided": undecided });
    output.result(&done, || {
        let mut lines = vec![format!("{name} is declared lost, with {} guests", guests.len())];
        lines.extend(guests.iter().map(|guest| format!("  {}: {}", guest.name, what(&guest.fate))));
        lines.join("\n")
    });
    if undecided > 0 {
        let text = format!(
            "{undecided} guests of {name} are not decided: start them nowhere. See the hosts that \
             are named above, then try again"
        );
        return Err(Failure::new(Code::InDoubt, text));
    }
    Ok(())
}

/// Lets a host join again.
pub fn readmit(fleet: &Fleet, host: &str, output: &Output) -> Result<(), Failure> {
    let host = HostName::new(host)?;
    let changed = fleet.readmit(&host)?;
    output.result(&json!({ "host": host, "changed": changed }), || match changed {
        true => format!("{host} may join again"),
        false => format!("{host} was not declared lost"),
    });
    Ok(())
}

/// A fate for people.
fn what(fate: &Fate) -> String {
    match fate {
        Fate::Free => "free: it may be started elsewhere from its disks".to_owned(),
        Fate::Elsewhere { host } => format!("on {host}"),
        Fate::Lacking { host } => {
            format!("on {host}, and it lacks pages that were lost: it ends when it needs one")
        }
        Fate::Claimed { host } => format!("claimed by {host}, which has not said whether it runs"),
        Fate::InDoubt { host } => format!("in doubt on {host}: start it nowhere"),
    }
}
