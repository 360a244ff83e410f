//! QEMU's waits for pages, from the log of its trace events.
//!
//! The lines look like `12@1700000000.123456:postcopy_ram_fault_thread_request Request for
//! HVA=0x7f0000001000 rb=ram offset=0x1000 pid=13` and `12@1700000000.123999:postcopy_place_page
//! host=0x7f0000001000`. Source: QEMU 10.0, `migration/trace-events`.

use std::collections::HashMap;

use vmferry_memory::PAGE_SIZE;

/// The events that the destination's QEMU logs.
pub const EVENTS: [&str; 3] =
    ["postcopy_ram_fault_thread_request", "postcopy_place_page", "postcopy_place_page_zero"];

/// The waits of one migration.
#[derive(Debug, Default)]
pub struct Waits {
    /// Pages placed.
    pub placed: u64,
    /// Waits in microseconds, in ascending order.
    pub us: Vec<f64>,
}

impl Waits {
    /// Reads a log. A fault at a page that was placed meanwhile has not waited, and is left out.
    pub fn read(log: &str) -> Self {
        let mut waits = Self::default();
        let mut asked: HashMap<u64, f64> = HashMap::new();
        for line in log.lines() {
            let Some((us, event, arguments)) = split(line) else { continue };
            let Some(page) = address(arguments) else { continue };
            if event == EVENTS[0] {
                asked.entry(page).or_insert(us);
            } else if EVENTS.contains(&event) {
                waits.placed += 1;
                waits.us.extend(asked.remove(&page).map(|asked_us| us - asked_us));
            }
        }
        waits.us.sort_by(f64::total_cmp);
        waits
    }

    /// The wait that this share of all waits did not exceed; 0 if there were none.
    pub fn percentile(&self, share: f64) -> f64 {
        let last = self.us.len().saturating_sub(1);
        self.us.get((last as f64 * share) as usize).copied().unwrap_or_default()
    }

    /// The mean; 0 if there were none.
    pub fn mean(&self) -> f64 {
        self.us.iter().sum::<f64>() / (self.us.len().max(1)) as f64
    }
}

/// The time in microseconds, the event, and its arguments.
fn split(line: &str) -> Option<(f64, &str, &str)> {
    let (time, rest) = line.split_once('@')?.1.split_once(':')?;
    let (seconds, us) = time.split_once('.')?;
    let (event, arguments) = rest.split_once(' ')?;
    Some((seconds.parse::<f64>().ok()? * 1e6 + us.parse::<f64>().ok()?, event, arguments))
}

/// The address of the page in the first hexadecimal number.
fn address(arguments: &str) -> Option<u64> {
    let digits = arguments.split_once("0x")?.1;
    let end = digits.find(|digit: char| !digit.is_ascii_hexdigit()).unwrap_or(digits.len());
    let address = u64::from_str_radix(&digits[..end], 16).ok()?;
    Some(address - address % PAGE_SIZE as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_is_the_time_from_the_first_request_to_the_placement() {
        let log = "\
            1@10.999900:postcopy_ram_fault_thread_request Request for HVA=0x5008 rb=ram \
             offset=0x5000 pid=2\n\
            1@11.000000:postcopy_ram_fault_thread_request Request for HVA=0x5000 rb=ram \
             offset=0x5000 pid=3\n\
            1@11.000100:postcopy_place_page host=0x5000\n\
            1@11.000200:postcopy_place_page_zero host=0x6000\n\
            1@11.000300:postcopy_ram_fault_thread_request Request for HVA=0x6000 rb=ram \
             offset=0x6000 pid=2\n\
            another line\n";
        let waits = Waits::read(log);
        assert_eq!(waits.placed, 2);
        assert_eq!(waits.us.len(), 1);
        assert!((waits.us[0] - 200.0).abs() < 0.01, "{:?}", waits.us);
    }
}
