//! Release names from the wire.

use vmferry_api::MAX_RELEASE_BYTES;

/// Checks a name from the wire.
pub(crate) fn checked_name(content: &[u8]) -> Result<String, String> {
    let text = std::str::from_utf8(content).map_err(|_| "it is not text".to_owned())?;
    // An unknown name is omitted. Accepting an empty one would give the same message two encodings.
    if text.is_empty() {
        return Err("the name of a release is empty".into());
    }
    if text.len() > MAX_RELEASE_BYTES || text.chars().any(char::is_control) {
        return Err("the name of a release is too long or not printable".into());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use vmferry_api::Release;

    use super::*;

    #[test]
    fn release_name_is_sanitized_and_checked() {
        let release = Release::of_this(&format!("QEMU\n 10.0{}", "é".repeat(99)));
        assert!(release.to_string().contains(", QEMU 10.0é"), "{release}");
        assert_eq!(checked_name(release.vmm.as_bytes()), Ok(release.vmm));
        for bad in [&b""[..], b"a\x1b[2J", b"\xff", &[b'a'; 65]] {
            assert!(checked_name(bad).is_err());
        }
        assert_eq!(
            Release::of_this("").to_string(),
            concat!("vmferry ", env!("CARGO_PKG_VERSION"))
        );
    }
}
