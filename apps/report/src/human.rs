//! Formats numbers for people.

/// Formats a whole number with thousands separators.
#[must_use]
pub fn count(number: f64) -> String {
    let text = format!("{:.0}", number.abs());
    let mut grouped = String::with_capacity(text.len() * 4 / 3);
    for (index, digit) in text.chars().enumerate() {
        if index > 0 && (text.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if number <= -0.5 { format!("-{grouped}") } else { grouped }
}

/// Formats a number with about three significant digits.
#[must_use]
pub fn digits(number: f64) -> String {
    let size = number.abs();
    if number.fract() == 0.0 || size >= 1000.0 {
        count(number)
    } else if size >= 100.0 {
        format!("{number:.0}")
    } else if size >= 10.0 {
        format!("{number:.1}")
    } else if size >= 0.01 {
        format!("{number:.2}")
    } else {
        format!("{number:.2e}")
    }
}

/// Formats a duration given in milliseconds.
#[must_use]
pub fn ms(ms: f64) -> String {
    match ms.abs() {
        0.0 => "0 ms".to_owned(),
        size if size < 1.0 => format!("{ms:.2} ms"),
        size if size < 99.95 => format!("{ms:.1} ms"),
        size if size < 999.5 => format!("{ms:.0} ms"),
        size if size < 59_995.0 => format!("{:.2} s", ms / 1e3),
        size if size < 3_600_000.0 => {
            let seconds = (ms / 1e3).round();
            format!("{:.0} min {:02.0} s", (seconds / 60.0).trunc(), seconds.abs() % 60.0)
        }
        _ => format!("{} h", digits(ms / 3.6e6)),
    }
}

/// Formats bytes on a link or disk with units of 1000.
#[must_use]
pub fn bytes(bytes: f64) -> String {
    let (number, unit) = scaled(bytes);
    if unit.is_empty() {
        format!("{} B", count(number))
    } else {
        format!("{} {unit}B", digits(number))
    }
}

/// Formats bytes of memory with units of 1024.
#[must_use]
pub fn memory(bytes: f64) -> String {
    let units = [(f64::from(1 << 30), "GiB"), (f64::from(1 << 20), "MiB"), (1024.0, "KiB")];
    match units.into_iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{} {unit}", digits(bytes / size)),
        None => format!("{} B", count(bytes)),
    }
}

/// Formats a rate in bytes per second.
#[must_use]
pub fn rate(bytes_per_s: f64) -> String {
    format!("{}/s", bytes(bytes_per_s))
}

/// Scales a number to the best unit of 1000. Returns the scaled number and the unit's letter.
#[must_use]
pub fn scaled(number: f64) -> (f64, &'static str) {
    let (divisor, letter) = scale_of(number);
    (number / divisor, letter)
}

/// The best unit of 1000 for a number: its size and its letter.
#[must_use]
pub fn scale_of(number: f64) -> (f64, &'static str) {
    let units = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")];
    units.into_iter().find(|(size, _)| number.abs() >= size * 0.9995).unwrap_or((1.0, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_separates_thousands() {
        for (number, text) in [
            (0.0, "0"),
            (999.0, "999"),
            (1000.0, "1,000"),
            (24_612.0, "24,612"),
            (1e9, "1,000,000,000"),
            (-1234.0, "-1,234"),
        ] {
            assert_eq!(count(number), text);
        }
    }

    #[test]
    fn units_fit_the_magnitude() {
        assert_eq!(ms(0.0), "0 ms");
        assert_eq!(ms(0.25), "0.25 ms");
        assert_eq!(ms(22.64), "22.6 ms");
        assert_eq!(ms(811.6), "812 ms");
        assert_eq!(ms(2310.0), "2.31 s");
        assert_eq!(ms(64_000.0), "1 min 04 s");
        assert_eq!(bytes(812.0), "812 B");
        assert_eq!(bytes(106_332_448.0), "106 MB");
        assert_eq!(rate(4.1e8), "410 MB/s");
        assert_eq!(memory(f64::from(1 << 28)), "256 MiB");
        assert_eq!(memory(1.5 * f64::from(1 << 30)), "1.50 GiB");
        assert_eq!(digits(3.456), "3.46");
        assert_eq!(digits(0.001_234), "1.23e-3");
        assert_eq!(digits(7.0), "7");
    }
}
