//! Private keys leave no copies in this process's memory after they were issued, loaded and
//! dropped.
//!
//! A separate test binary, because other tests may hold keys.

use std::fs::File;
use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmferry_transport::pki::{self, IssueRequest, Validity};
use vmferry_transport::{IdentityFiles, TlsIdentity};
use zeroize::Zeroize;

/// The search patterns are stored masked, so that the search does not find them.
const MASK: u8 = 0x5a;

/// Offset and length of the private scalar in a P-256 key as PKCS#8 (RFC 5958, RFC 5915).
const SECRET_AT: usize = 36;
const SECRET_BYTES: usize = 32;

/// The secret of a key file in DER, and the start of it in base64; both masked.
fn secrets(path: &Path) -> Vec<Vec<u8>> {
    let mut pem = std::fs::read(path).unwrap();
    let begin = pem.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    // The first line holds 48 bytes. The last twelve belong to the secret.
    let mut text: Vec<u8> = pem[begin + 48..begin + 64].to_vec();
    let mut der = decoded(&pem);
    assert_eq!(der[SECRET_AT - 2..SECRET_AT], [0x04, 0x20], "it is such a key");
    let mut secret = der[SECRET_AT..SECRET_AT + SECRET_BYTES].to_vec();
    let masked = [&secret, &text].map(|bytes| bytes.iter().map(|byte| byte ^ MASK).collect());
    for buffer in [&mut pem, &mut text, &mut der, &mut secret] {
        buffer.zeroize();
    }
    masked.into()
}

/// The DER of a key file. All other buffers are overwritten.
fn decoded(pem: &[u8]) -> Vec<u8> {
    let mut body: Vec<u8> = Vec::with_capacity(pem.len());
    let lines = pem.split(|byte| *byte == b'\n').filter(|line| !line.starts_with(b"-----"));
    lines.for_each(|line| body.extend_from_slice(line));
    let mut der = vec![0; body.len()];
    STANDARD.decode_slice(&body, &mut der).unwrap();
    body.zeroize();
    der
}

/// Number of copies of the secrets in this process's writable memory.
fn copies(secrets: &[Vec<u8>]) -> usize {
    const CHUNK: usize = 1 << 20;
    let mut buffer = vec![0; CHUNK + SECRET_BYTES];
    let own = buffer.as_ptr() as u64..buffer.as_ptr() as u64 + buffer.len() as u64;
    let memory = File::open("/proc/self/mem").unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut found = 0;
    for line in maps.lines() {
        let mut words = line.split(' ');
        let (from, to) = words.next().unwrap().split_once('-').unwrap();
        if !words.next().unwrap().starts_with("rw") {
            continue;
        }
        let [from, to] = [from, to].map(|text| u64::from_str_radix(text, 16).unwrap());
        for start in (from..to).step_by(CHUNK) {
            let bytes = (to - start).min(buffer.len() as u64) as usize;
            let Ok(read) = memory.read_at(&mut buffer[..bytes], start) else { continue };
            for secret in secrets {
                let first = secret[0] ^ MASK;
                let is_at = |at: &usize| {
                    *at < CHUNK
                        && buffer[*at] == first
                        && !own.contains(&(start + *at as u64))
                        && buffer[*at..].iter().zip(secret).all(|(byte, kept)| *byte == kept ^ MASK)
                };
                found += (0..read.saturating_sub(secret.len() - 1)).filter(is_at).count();
            }
            buffer.as_mut_slice().zeroize();
        }
    }
    found
}

#[test]
fn private_keys_leave_no_copy() {
    let directory = tempfile::tempdir().unwrap();
    let (authority, host) = (directory.path().join("ca"), directory.path().join("host"));
    let validity = Validity::days(10);
    pki::init(&authority, "test", validity).unwrap();
    pki::issue(&authority, &host, &IssueRequest::new("host-a", validity)).unwrap();
    let mut secrets_of_both = secrets(&authority.join("ca.key"));
    secrets_of_both.extend(secrets(&host.join("host.key")));
    let identity = TlsIdentity::new(IdentityFiles::in_directory(&host)).unwrap();
    drop((identity.server_config(b"vmferry/1"), identity.client_config(b"vmferry/1", None)));
    drop(identity);
    assert_eq!(copies(&secrets_of_both), 0);

    // Negative control: a deliberate copy is found, as PEM text and after decoding.
    let mut text = std::fs::read(host.join("host.key")).unwrap();
    assert_eq!(copies(&secrets_of_both), 1);
    let number = decoded(&text);
    assert_eq!(copies(&secrets_of_both), 2);
    text.zeroize();
    assert_eq!(copies(&secrets_of_both), 1);
    black_box((text, number));
}
