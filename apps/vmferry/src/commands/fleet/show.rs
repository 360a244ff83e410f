//! `vmferry fleet status`, `hosts` and `guests`.

use std::collections::BTreeMap;

use bytesize::ByteSize;
use comfy_table::{Table, presets};
use serde_json::{Value, json};
use uuid::Uuid;
use vmferry_fleet::{Fleet, Guest, HostView};

use super::moving::in_words;
use crate::exit::Failure;
use crate::output::Output;

/// Shows the hosts.
pub fn hosts(fleet: &Fleet, output: &Output) -> Result<(), Failure> {
    let hosts = fleet.hosts()?;
    let shown: Vec<Value> = hosts.iter().map(host).collect();
    output.result(&json!({ "hosts": shown }), || {
        let mut table =
            table(&["host", "state", "cpus", "memory", "available", "guests", "labels"]);
        for view in &hosts {
            let host = view.host.as_ref().ok();
            let size = |bytes: Option<u64>| bytes.map_or_else(String::new, human);
            let available = view.presence.as_ref().and_then(|it| it.memory_available_bytes);
            let labels =
                host.map(|host| host.labels.iter().map(|(key, value)| format!("{key}={value}")));
            table.add_row([
                view.name.to_string(),
                state(view),
                host.map_or_else(String::new, |host| host.cpus.to_string()),
                size(host.map(|host| host.memory_bytes)),
                size(available),
                view.guests.len().to_string(),
                labels.into_iter().flatten().collect::<Vec<_>>().join(" "),
            ]);
        }
        let problems = hosts.iter().filter_map(|view| view.host.as_ref().err());
        with_problems(&table, problems.map(ToString::to_string))
    });
    Ok(())
}

/// Shows the guests.
pub fn guests(fleet: &Fleet, output: &Output) -> Result<(), Failure> {
    let hosts = fleet.hosts()?;
    let twice = on_two_hosts(&hosts);
    let all = || hosts.iter().flat_map(|view| view.guests.iter().map(move |guest| (view, guest)));
    let shown: Vec<Value> = all()
        .map(|(view, guest)| match guest {
            Ok(guest) => {
                let mut shown = json!(guest);
                shown["host"] = view.name.to_string().into();
                shown["phase"] = phase(view, guest);
                shown["on_two_hosts"] = twice.contains_key(&guest.uuid).into();
                shown
            }
            Err(error) => json!({ "host": view.name.to_string(), "error": error.to_string() }),
        })
        .collect();
    output.result(&json!({ "guests": shown }), || {
        let mut table = table(&["guest", "host", "phase", "VMM", "memory", "vCPUs", "UUID"]);
        for (view, guest) in all() {
            let Ok(guest) = guest else { continue };
            table.add_row([
                guest.name.clone(),
                view.name.to_string(),
                word(&phase(view, guest)),
                word(&json!(guest.vmm)),
                guest.memory_bytes.map_or_else(String::new, human),
                guest.vcpus.map_or_else(String::new, |vcpus| vcpus.to_string()),
                guest.uuid.to_string(),
            ]);
        }
        let unreadable = all().filter_map(|(_, guest)| guest.as_ref().err());
        let problems = unreadable.map(ToString::to_string);
        with_problems(&table, problems.chain(twice.values().cloned()))
    });
    Ok(())
}

/// Shows the fleet in a few lines.
pub fn status(fleet: &Fleet, output: &Output) -> Result<(), Failure> {
    let hosts = fleet.hosts()?;
    let present = hosts.iter().filter(|view| view.presence.is_some()).count();
    let guests: usize = hosts.iter().map(|view| view.guests.len()).sum();
    let silent: Vec<String> = hosts
        .iter()
        .filter(|view| view.presence.is_none() && view.orders.lost.is_none())
        .map(|view| view.name.to_string())
        .collect();
    let lost = hosts.iter().filter(|view| view.orders.lost.is_some());
    let lost: Vec<String> = lost.map(|view| view.name.to_string()).collect();
    let unreadable = hosts.iter().filter_map(|view| view.host.as_ref().err());
    let of_guests = hosts.iter().flat_map(|view| &view.guests).filter_map(|it| it.as_ref().err());
    let mut problems: Vec<String> = unreadable.chain(of_guests).map(ToString::to_string).collect();
    problems.extend(on_two_hosts(&hosts).into_values());
    let mut moves = Vec::new();
    for view in fleet.migrations()? {
        match view.migration {
            Ok(migration) if !migration.phase.is_over() => moves.push(migration),
            Ok(_) => {}
            Err(error) => problems.push(error.to_string()),
        }
    }
    let cluster = format!("{:016x}", fleet.cluster());
    let shown = json!({
        "prefix": fleet.prefix().to_string(), "cluster": cluster,
        "incarnation": fleet.incarnation(), "hosts": hosts.len(), "hosts_present": present,
        "silent": silent, "lost": lost, "guests": guests, "moves": moves, "problems": problems,
    });
    output.result(&shown, || {
        let mut lines = vec![
            format!("fleet {} in etcd cluster {cluster}", fleet.prefix()),
            format!("  {present} of {} hosts present, {guests} guests", hosts.len()),
        ];
        if !silent.is_empty() {
            lines.push(format!("  not heard: {}; their guests may run", silent.join(", ")));
        }
        if !lost.is_empty() {
            lines.push(format!("  declared lost: {}", lost.join(", ")));
        }
        lines.extend(moves.iter().map(|one| {
            let (guest, from, to) = (&one.guest.name, &one.source, &one.destination);
            format!("  {guest} moves from {from} to {to}: {}", in_words(&one.phase))
        }));
        lines.extend(problems.iter().map(|problem| format!("  {problem}")));
        lines.join("\n")
    });
    Ok(())
}

fn host(view: &HostView) -> Value {
    let mut shown = match &view.host {
        Ok(host) => json!(host),
        Err(error) => json!({ "error": error.to_string() }),
    };
    shown["name"] = view.name.to_string().into();
    shown["present"] = view.presence.is_some().into();
    let available = view.presence.as_ref().and_then(|presence| presence.memory_available_bytes);
    shown["memory_available_bytes"] = json!(available);
    shown["cordoned"] = view.orders.cordoned.into();
    shown["lost"] = json!(view.orders.lost);
    shown["guests"] = view.guests.len().into();
    shown
}

pub fn state(view: &HostView) -> String {
    let heard = if view.presence.is_some() { "present" } else { "not heard" };
    let cordoned = if view.orders.cordoned { ", cordoned" } else { "" };
    let lost = if view.orders.lost.is_some() { ", declared lost" } else { "" };
    format!("{heard}{cordoned}{lost}")
}

/// What a guest does; nothing any more if its host was fenced.
pub fn phase(view: &HostView, guest: &Guest) -> Value {
    if view.orders.lost.is_some() { json!("lost") } else { json!(guest.phase) }
}

/// Guests that two hosts say they have, with a sentence about each.
fn on_two_hosts(hosts: &[HostView]) -> BTreeMap<Uuid, String> {
    let mut by_uuid: BTreeMap<Uuid, Vec<(&HostView, &Guest)>> = BTreeMap::new();
    for view in hosts.iter().filter(|view| view.orders.lost.is_none()) {
        for guest in view.guests.iter().flatten().filter(|guest| guest.phase.is_here()) {
            by_uuid.entry(guest.uuid).or_default().push((view, guest));
        }
    }
    by_uuid.retain(|_, on| on.len() > 1);
    let sentence = |(uuid, on): (Uuid, Vec<(&HostView, &Guest)>)| {
        let names: Vec<String> = on.iter().map(|(view, _)| view.name.to_string()).collect();
        let text = format!(
            "guest {} ({uuid}) is on {}: if it is not just arriving, two guests have one UUID, or \
             one of the hosts is not heard and its entry is old",
            on[0].1.name,
            names.join(" and on ")
        );
        (uuid, text)
    };
    by_uuid.into_iter().map(sentence).collect()
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header.to_vec());
    table
}

fn with_problems(table: &Table, problems: impl Iterator<Item = String>) -> String {
    let mut text = table.to_string();
    for problem in problems {
        text.push('\n');
        text.push_str(&problem);
    }
    text
}

fn human(bytes: u64) -> String {
    ByteSize(bytes).to_string()
}

pub fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
