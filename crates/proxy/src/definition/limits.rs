//! The sizes of a guest.

use roxmltree::Node;
use vmferry::config::policy::DefinitionRules;

use super::objection::Objection;

/// Objections to the guest's memory and its number of vCPUs, in the `<domain>` at `shown`.
pub(super) fn objections(
    shown: &str,
    domain: Node<'_, '_>,
    rules: &DefinitionRules,
) -> Vec<Objection> {
    let mut found = Vec::new();
    let mut limit = |path: String, value: Option<u64>, most: Option<u64>, unit, key| {
        let Some(most) = most else { return };
        let reason = match value {
            None => "this can't be read as a size".to_owned(),
            Some(value) if value > most => {
                format!("{value}{unit} are more than the limit of {most}{unit}")
            }
            Some(_) => return,
        };
        let mut objection = Objection::new(&path, None, reason);
        objection.permit = value.map(|value| format!("{key} = {value}"));
        found.push(objection);
    };
    let most = rules.max_memory_mib();
    for name in ["memory", "maxMemory"] {
        for element in children(domain, name) {
            let mib = mib(element.text().unwrap_or_default(), element.attribute("unit"));
            limit(format!("{shown}/{name}"), mib, most, " MiB", "max_memory_mib");
        }
    }
    // libvirt replaces `<memory>` by the sum of the NUMA nodes' (`virDomainDefPostParseMemory`).
    let cells = children(domain, "cpu").flat_map(|cpu| children(cpu, "numa"));
    let cells = cells.flat_map(|numa| children(numa, "cell"));
    let nodes = cells.map(|cell| mib(cell.attribute("memory")?, cell.attribute("unit")));
    let sum = nodes.reduce(|sum, one| sum?.checked_add(one?));
    if let Some(sum) = sum {
        limit(format!("{shown}/cpu/numa/cell"), sum, most, " MiB", "max_memory_mib");
    }
    for element in children(domain, "vcpu") {
        let text = element.text().unwrap_or_default().trim();
        let count = if text.is_empty() { Some(1) } else { text.parse().ok() };
        let most = rules.max_vcpus().map(u64::from);
        limit(format!("{shown}/vcpu"), count, most, " vCPUs", "max_vcpus");
    }
    found
}

fn children<'a, 'input>(
    node: Node<'a, 'input>,
    name: &'static str,
) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children().filter(move |child| child.has_tag_name(name))
}

/// A size in MiB, rounded up. The units are those of `virScaleInteger` in `src/util/virutil.c`; the
/// default is KiB.
fn mib(number: &str, unit: Option<&str>) -> Option<u64> {
    let number: u64 = number.trim().parse().ok()?;
    let scale: u64 = match unit.unwrap_or("KiB").to_ascii_lowercase().as_str() {
        "b" | "byte" | "bytes" => 1,
        "kb" => 1_000,
        "k" | "kib" => 1 << 10,
        "mb" => 1_000_000,
        "m" | "mib" => 1 << 20,
        "gb" => 1_000_000_000,
        "g" | "gib" => 1 << 30,
        "tb" => 1_000_000_000_000,
        "t" | "tib" => 1 << 40,
        _ => return None,
    };
    Some(number.checked_mul(scale)?.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mib_knows_the_units_of_libvirt() {
        for (number, unit, expected) in [
            ("1048576", None, Some(1024)),
            ("1", Some("KiB"), Some(1)),
            (" 2 ", Some("GiB"), Some(2048)),
            ("1", Some("GB"), Some(954)),
            ("1", Some("T"), Some(1 << 20)),
            ("1048577", Some("bytes"), Some(2)),
            ("-1", None, None),
            ("0x10", None, None),
            ("18446744073709551615", Some("TiB"), None),
            ("1", Some("parsec"), None),
        ] {
            assert_eq!(mib(number, unit), expected, "{number} {unit:?}");
        }
    }
}
