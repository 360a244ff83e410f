//! Sizes, rates and times as people write them.

use std::time::Duration;

/// A size in bytes: `4096`, `256M`, `8G`, `350MiB`, `1GB`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    // People who write 256M of memory mean MiB, so a unit without `B` is binary.
    let binary = match text.strip_suffix(['K', 'M', 'G', 'T', 'k', 'm', 'g', 't']) {
        Some(number) => format!("{number}{}iB", text[number.len()..].to_uppercase()),
        None => text.to_owned(),
    };
    binary.parse::<bytesize::ByteSize>().map(|size| size.as_u64()).map_err(|_| {
        format!("`{text}` is not a size: use bytes, or a unit such as 64M, 8G or 350MiB")
    })
}

/// The units of network rates, in bits, in lower case. They are decimal.
const BIT_UNITS: [(&str, f64); 8] = [
    ("gbit", 1e9),
    ("mbit", 1e6),
    ("kbit", 1e3),
    ("bit", 1.0),
    ("gbps", 1e9),
    ("mbps", 1e6),
    ("kbps", 1e3),
    ("bps", 1.0),
];

/// A rate in bytes per second: a size with or without `/s`, or bits in either case: `1Gbit/s`,
/// `350mbit`, `350Mbps`. A capital B in `Bps` means bytes.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!(
            "`{text}` is not a rate: use bytes per second such as 100M, 350MiB/s or 350MB/s, or \
             bits such as 1Gbit/s or 1Gbps"
        )
    };
    let amount = text.strip_suffix("/s").unwrap_or(text);
    if let Some(bytes) = amount.strip_suffix("Bps") {
        return parse_bytes(&format!("{bytes}B")).map_err(|_| wrong());
    }
    let lower = amount.to_ascii_lowercase();
    for (unit, bits) in BIT_UNITS {
        if let Some(number) = lower.strip_suffix(unit) {
            let number: f64 = number.trim().parse().map_err(|_| wrong())?;
            let bytes = number * bits / 8.0;
            return if bytes.is_finite() && bytes >= 0.0 { Ok(bytes as u64) } else { Err(wrong()) };
        }
    }
    parse_bytes(amount).map_err(|_| wrong())
}

/// A cap in bytes per second, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap(pub Option<u64>);

/// A rate, or `none`.
pub fn parse_cap(text: &str) -> Result<Cap, String> {
    if text == "none" { Ok(Cap(None)) } else { parse_rate(text).map(|cap| Cap(Some(cap))) }
}

/// A time: `300ms`, `10s`, `1.5s`, `2min 30s`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, f64); 5] =
        [("ms", 1e-3), ("us", 1e-6), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];
    if let Ok(time) = humantime::parse_duration(text) {
        return Ok(time);
    }
    let fraction = UNITS.iter().find_map(|(unit, seconds)| {
        let number: f64 = text.strip_suffix(unit)?.trim().parse().ok()?;
        Duration::try_from_secs_f64(number * seconds).ok()
    });
    fraction.ok_or_else(|| format!("`{text}` is not a time: use a unit such as 50ms, 1.5s or 2min"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_without_a_b_is_binary() {
        assert_eq!(parse_bytes("256M"), Ok(256 << 20));
        assert_eq!(parse_bytes("8g"), Ok(8 << 30));
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("1MiB"), Ok(1 << 20));
        assert_eq!(parse_bytes("1GB"), Ok(1_000_000_000));
        assert!(parse_bytes("lots").unwrap_err().contains("64M"));
    }

    #[test]
    fn rate_is_in_bytes_or_bits_per_second() {
        assert_eq!(parse_rate("100M"), Ok(100 << 20));
        assert_eq!(parse_rate("350MiB/s"), Ok(350 << 20));
        assert_eq!(parse_rate("350MB/s"), Ok(350_000_000));
        assert_eq!(parse_rate("1Gbit/s"), Ok(125_000_000));
        assert_eq!(parse_rate("2.5Gbit"), Ok(312_500_000));
        assert_eq!(parse_rate("800 kbit/s"), Ok(100_000));
        for hundred_mbit in ["100mbit", "100Mbps", "100mbps", "100MBIT/s", "12.5MB/s", "12.5MBps"] {
            assert_eq!(parse_rate(hundred_mbit), Ok(12_500_000), "{hundred_mbit}");
        }
        assert_eq!(parse_rate("8bps"), Ok(1));
        for wrong in ["fast", "Gbit/s", "-1Gbit/s", "1Gbit/h", "nanbit/s", ""] {
            assert!(parse_rate(wrong).unwrap_err().contains("1Gbit/s"), "{wrong}");
        }
        assert_eq!(parse_cap("none"), Ok(Cap(None)));
        assert_eq!(parse_cap("1M"), Ok(Cap(Some(1 << 20))));
    }

    #[test]
    fn time_has_a_unit_and_may_have_a_fraction() {
        assert_eq!(parse_duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("0.5ms"), Ok(Duration::from_micros(500)));
        assert_eq!(parse_duration("2min 30s"), Ok(Duration::from_secs(150)));
        for wrong in ["300", "-1s", "soon", "1.5parsecs", ""] {
            assert!(parse_duration(wrong).unwrap_err().contains("50ms"), "{wrong}");
        }
    }
}
