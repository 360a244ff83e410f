//! Chooses the host that a guest moves to.

use std::collections::BTreeMap;

use crate::guest::Guest;
use crate::host::{HostName, HostView};
use crate::migration::Migration;

/// Memory that stays available at a destination, in bytes: a host that swaps serves no guest.
pub const HEADROOM_BYTES: u64 = 256 << 20;

/// What a guest needs of the host that it moves to.
#[derive(Clone, Debug, Default)]
pub struct Needs<'a> {
    /// The only host that the operator wants; cordoned hosts are allowed then.
    pub host: Option<&'a HostName>,
    /// Labels that the host must have.
    pub labels: BTreeMap<String, String>,
    /// The template that receives it.
    pub template: &'a str,
}

/// A host that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The host.
    pub host: HostName,
    /// Why it was chosen.
    pub why: String,
}

/// No host fits: why not, for each one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no host can take the guest: {}", .0.iter().map(|(host, why)| format!("{host} {why}"))
    .collect::<Vec<_>>().join("; "))]
pub struct NoPlace(pub Vec<(HostName, String)>);

/// Chooses a host for a guest of `source`. Of those that fit, the one with the largest part of its
/// memory available after the guest has arrived.
///
/// # Errors
/// [`NoPlace`].
pub fn choose(
    hosts: &[HostView],
    migrations: &[Migration],
    source: &HostView,
    guest: &Guest,
    needs: &Needs<'_>,
) -> Result<Choice, NoPlace> {
    let (mut fitting, mut refused) = (Vec::new(), Vec::new());
    for view in hosts {
        if needs.host.is_some_and(|host| *host != view.name) {
            continue;
        }
        match look(view, migrations, source, guest, needs) {
            Ok(left) => fitting.push((left, view)),
            Err(why) => refused.push((view.name.clone(), why)),
        }
    }
    let part = |(left, view): &(u64, &HostView)| {
        let total = view.host.as_ref().map_or(1, |host| host.memory_bytes.max(1));
        (u128::from(*left) << 32) / u128::from(total)
    };
    // The first one by name if several are equal.
    let best = fitting.iter().max_by_key(|one| (part(one), std::cmp::Reverse(&one.1.name)));
    let Some((left, view)) = best else { return Err(NoPlace(refused)) };
    let why = match needs.host {
        Some(_) => "the operator has chosen it".to_owned(),
        None => format!(
            "it has the largest part of its memory available, {} MiB after the guest has arrived, \
             of {} hosts that fit",
            left >> 20,
            fitting.len()
        ),
    };
    Ok(Choice { host: view.name.clone(), why })
}

/// The memory that is left after the guest has arrived, or why the host does not fit.
fn look(
    view: &HostView,
    migrations: &[Migration],
    source: &HostView,
    guest: &Guest,
    needs: &Needs<'_>,
) -> Result<u64, String> {
    if view.name == source.name {
        return Err("has it already".to_owned());
    }
    let host = view.host.as_ref().map_err(|error| format!("can't be read: {error}"))?;
    let Some(presence) = &view.presence else { return Err("is not heard".to_owned()) };
    if view.orders.lost.is_some() {
        return Err("was declared lost".to_owned());
    }
    if view.orders.cordoned && needs.host.is_none() {
        return Err("is cordoned".to_owned());
    }
    if let Some((key, value)) =
        needs.labels.iter().find(|(key, value)| host.labels.get(*key) != Some(value))
    {
        return Err(format!("lacks the label {key}={value}"));
    }
    if !host.templates.iter().any(|template| template == needs.template) {
        return Err(format!("has no template {}", needs.template));
    }
    if let Ok(from) = &source.host {
        let missing = from.facts.cpu_flags_missing_at(&host.facts);
        if !missing.is_empty() {
            return Err(format!("has processors without {}", missing.join(", ")));
        }
    }
    let available = presence.memory_available_bytes.unwrap_or_default();
    let arriving = arriving(&view.name, migrations, guest);
    let needed = guest.memory_bytes.unwrap_or_default() + arriving + HEADROOM_BYTES;
    available.checked_sub(needed).ok_or_else(|| {
        format!(
            "has {} MiB available, and needs {} MiB with the guests that are arriving",
            available >> 20,
            needed >> 20
        )
    })
}

/// Memory of guests that were ordered to go there and have not arrived.
fn arriving(name: &HostName, migrations: &[Migration], guest: &Guest) -> u64 {
    let to_it = migrations.iter().filter(|migration| {
        migration.destination == *name
            && !migration.phase.is_over()
            && migration.guest.uuid != guest.uuid
    });
    to_it.map(|migration| migration.memory_bytes).sum()
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use vmferry::probe::HostFacts;
    use vmferry_handover::GuestIdentity;

    use super::*;
    use crate::guest::{GuestPhase, GuestVmm};
    use crate::host::{Host, HostOrders, Presence};
    use crate::migration::MigrationPhase;

    const GIB: u64 = 1 << 30;

    fn name(name: &str) -> HostName {
        HostName::new(name).unwrap()
    }

    /// A host of 64 GiB with this much available.
    fn view(host: &str, available: u64) -> HostView {
        let facts = HostFacts { cpu_flags: vec!["avx2".into()], ..HostFacts::default() };
        let host_object = Host {
            instance: Uuid::nil(),
            address: String::new(),
            identity: None,
            cpus: 4,
            memory_bytes: 64 * GIB,
            labels: BTreeMap::from([("rack".to_owned(), "r1".to_owned())]),
            networks: Vec::new(),
            templates: vec!["default".into()],
            facts,
        };
        HostView {
            name: name(host),
            host: Ok(host_object),
            presence: Some(Presence {
                instance: Uuid::nil(),
                memory_available_bytes: Some(available),
            }),
            orders: HostOrders::default(),
            guests: Vec::new(),
        }
    }

    fn guest(gib: u64) -> Guest {
        Guest {
            uuid: Uuid::from_bytes([1; 16]),
            name: "web".into(),
            vmm: GuestVmm::Qemu,
            phase: GuestPhase::Running,
            memory_bytes: Some(gib * GIB),
            vcpus: None,
            socket: None,
        }
    }

    fn migration(destination: &str, gib: u64, phase: MigrationPhase) -> Migration {
        Migration {
            id: Uuid::nil(),
            guest: GuestIdentity { uuid: Uuid::from_bytes([2; 16]), name: "other".into() },
            source: name("a"),
            destination: name(destination),
            why: String::new(),
            template: "default".into(),
            memory_bytes: gib * GIB,
            max_bandwidth: None,
            ordered_at: 0,
            cancel: false,
            phase,
        }
    }

    fn needs() -> Needs<'static> {
        Needs { template: "default", ..Needs::default() }
    }

    #[test]
    fn host_with_the_largest_part_of_its_memory_available_is_chosen() {
        let mut hosts = vec![view("a", 60 * GIB), view("b", 20 * GIB), view("c", 30 * GIB)];
        let choice = choose(&hosts, &[], &hosts[0], &guest(8), &needs()).unwrap();
        assert_eq!(choice.host, name("c"));
        assert!(choice.why.contains("of 2 hosts that fit"), "{}", choice.why);
        // A smaller host with less available may have the larger part.
        hosts.push(view("d", 28 * GIB));
        hosts[3].host.as_mut().unwrap().memory_bytes = 32 * GIB;
        let choice = choose(&hosts, &[], &hosts[0], &guest(8), &needs()).unwrap();
        assert_eq!(choice.host, name("d"));
    }

    #[test]
    fn memory_of_guests_that_are_arriving_is_kept_for_them() {
        let hosts = [view("a", 60 * GIB), view("b", 30 * GIB), view("c", 20 * GIB)];
        let under_way = [migration("b", 16, MigrationPhase::Ordered)];
        let choice = choose(&hosts, &under_way, &hosts[0], &guest(8), &needs()).unwrap();
        assert_eq!(choice.host, name("c"));
        let over = [migration("b", 16, MigrationPhase::Cancelled)];
        let choice = choose(&hosts, &over, &hosts[0], &guest(8), &needs()).unwrap();
        assert_eq!(choice.host, name("b"));
    }

    #[test]
    fn each_host_that_does_not_fit_says_why() {
        let mut hosts: Vec<HostView> =
            "abcdefg".chars().map(|c| view(&c.to_string(), 9 * GIB)).collect();
        hosts[1].presence = None;
        hosts[2].orders.cordoned = true;
        hosts[3].host.as_mut().unwrap().labels.clear();
        hosts[4].host.as_mut().unwrap().templates.clear();
        hosts[5].host.as_mut().unwrap().facts.cpu_flags.clear();
        hosts[6].presence.as_mut().unwrap().memory_available_bytes = Some(8 * GIB);
        let labels = BTreeMap::from([("rack".to_owned(), "r1".to_owned())]);
        let needs = Needs { labels, ..needs() };
        let NoPlace(refused) = choose(&hosts, &[], &hosts[0], &guest(8), &needs).unwrap_err();
        let why: Vec<&str> = refused.iter().map(|(_, why)| why.as_str()).collect();
        let expected = [
            "has it already",
            "is not heard",
            "is cordoned",
            "lacks the label rack=r1",
            "has no template default",
            "has processors without avx2",
            "has 8192 MiB available, and needs 8448 MiB with the guests that are arriving",
        ];
        assert_eq!(why, expected);
        // The operator may name a cordoned host, and nothing else is overruled.
        let cordoned = name("c");
        let named = Needs { host: Some(&cordoned), ..needs.clone() };
        assert_eq!(choose(&hosts, &[], &hosts[0], &guest(8), &named).unwrap().host, cordoned);
        let absent = name("b");
        let named = Needs { host: Some(&absent), ..needs };
        let error = choose(&hosts, &[], &hosts[0], &guest(8), &named).unwrap_err();
        assert_eq!(error.to_string(), "no host can take the guest: b is not heard");
    }
}
