//! Private keys between their files and the libraries that use them.
//!
//! Every buffer that holds a key is overwritten when it is dropped. None grows, because
//! reallocation leaves a copy of the key behind. Common PEM libraries do reallocate, so this module
//! has its own PEM code on a base64 library that works in the caller's buffers. The key is loaded
//! into AWS-LC, which overwrites all memory that it frees.

use std::fs::File;
use std::io::{self, Read};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs1KeyDer, PrivatePkcs8KeyDer, PrivateSec1KeyDer};
use zeroize::Zeroizing;

/// Base64 characters per line (RFC 7468).
const LINE: usize = 64;

/// A private key, overwritten when it is dropped.
pub type SecretKey = Zeroizing<PrivateKeyDer<'static>>;

/// Maximum number of bytes read from a pipe, whose length is unknown.
const MAX_PIPED_BYTES: u64 = 256 << 10;

/// Reads a key file, up to `max` bytes; up to 256 KiB from a pipe or a device.
///
/// # Errors
/// The operating system's error, or [`FileTooLarge`](io::ErrorKind::FileTooLarge) if a pipe has
/// more.
pub fn read(file: File, max: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    let found = file.metadata()?;
    if !found.is_file() {
        let max = max.min(MAX_PIPED_BYTES);
        let content = read_up_to(file, max + 1)?;
        return if content.len() as u64 > max {
            Err(io::ErrorKind::FileTooLarge.into())
        } else {
            Ok(content)
        };
    }
    read_up_to(file, found.len().min(max))
}

fn read_up_to(file: File, bytes: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    // Includes room for the read that finds the end of the file, so the buffer never grows.
    let mut content = Zeroizing::new(Vec::with_capacity(bytes as usize + 64));
    file.take(bytes).read_to_end(&mut content)?;
    Ok(content)
}

/// Whether a PEM file has a private key that is encrypted: one of PKCS#8, or with OpenSSL's older
/// header.
pub fn is_encrypted(pem: &[u8]) -> bool {
    let mut lines = pem.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    lines.any(|line| {
        line == b"-----BEGIN ENCRYPTED PRIVATE KEY-----" || line == b"Proc-Type: 4,ENCRYPTED"
    })
}

/// The first private key in a PEM file (PKCS#8, PKCS#1 or SEC 1), if any.
pub fn from_pem(pem: &[u8]) -> Option<SecretKey> {
    let mut lines = pem.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let kind = lines.find_map(|line| match line {
        b"-----BEGIN PRIVATE KEY-----" => Some(Kind::Pkcs8),
        b"-----BEGIN RSA PRIVATE KEY-----" => Some(Kind::Pkcs1),
        b"-----BEGIN EC PRIVATE KEY-----" => Some(Kind::Sec1),
        _ => None,
    })?;
    let mut text = Zeroizing::new(Vec::with_capacity(pem.len()));
    loop {
        match lines.next()? {
            line if line.starts_with(b"-----END ") => break,
            line => text.extend_from_slice(line),
        }
    }
    let mut der = Zeroizing::new(vec![0; base64::decoded_len_estimate(text.len())]);
    let bytes = STANDARD.decode_slice(&text, &mut der).ok()?;
    der.truncate(bytes);
    let der = std::mem::take(&mut *der);
    Some(Zeroizing::new(match kind {
        Kind::Pkcs8 => PrivatePkcs8KeyDer::from(der).into(),
        Kind::Pkcs1 => PrivatePkcs1KeyDer::from(der).into(),
        Kind::Sec1 => PrivateSec1KeyDer::from(der).into(),
    }))
}

enum Kind {
    Pkcs8,
    Pkcs1,
    Sec1,
}

/// Encodes a PKCS#8 key as PEM.
pub fn to_pem(der: &[u8]) -> Zeroizing<String> {
    let (begin, end) = ("-----BEGIN PRIVATE KEY-----\n", "-----END PRIVATE KEY-----\n");
    let characters = der.len().div_ceil(3) * 4;
    let mut base64 = Zeroizing::new(vec![0; characters]);
    // The buffer has exactly the required length, so this cannot fail.
    let written = STANDARD.encode_slice(der, &mut base64).unwrap_or(0);
    let bytes = begin.len() + characters + characters.div_ceil(LINE) + end.len();
    let mut pem = Zeroizing::new(String::with_capacity(bytes));
    pem.push_str(begin);
    for line in base64[..written].chunks(LINE) {
        line.iter().for_each(|character| pem.push(char::from(*character)));
        pem.push('\n');
    }
    pem.push_str(end);
    pem
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use zeroize::{Zeroize, ZeroizeOnDrop};

    use super::*;

    /// Compiles only if `T` is overwritten on drop.
    fn is_overwritten_when_dropped<T: ZeroizeOnDrop>() {}

    #[test]
    fn pem_round_trips() {
        is_overwritten_when_dropped::<SecretKey>();
        for bytes in [1, 47, 48, 49, 138, 1191] {
            let der: Vec<u8> = (0..bytes).map(|byte| byte as u8).collect();
            let pem = to_pem(&der);
            assert!(pem.lines().all(|line| line.len() <= LINE));
            let key = from_pem(pem.as_bytes()).unwrap();
            assert!(matches!(&*key, PrivateKeyDer::Pkcs8(_)));
            assert_eq!(key.secret_der(), der);
            let debug = format!("{key:?}");
            assert!(!debug.contains(char::is_numeric), "{debug}");
        }
    }

    #[test]
    fn from_pem_reads_openssl_output() {
        // OpenSSL's output: leading parameters, CRLF line ends, and other kinds of keys.
        let text = "-----BEGIN EC PARAMETERS-----\r\nBggqhkjOPQMBBw==\r\n\
                    -----END EC PARAMETERS-----\r\n\
                    -----BEGIN EC PRIVATE KEY-----\r\nAAECAw==\r\n-----END EC PRIVATE KEY-----\r\n";
        let key = from_pem(text.as_bytes()).unwrap();
        assert!(matches!(&*key, PrivateKeyDer::Sec1(_)));
        assert_eq!(key.secret_der(), [0, 1, 2, 3]);
        let rsa = text.replace("EC PRIVATE", "RSA PRIVATE");
        assert!(matches!(&*from_pem(rsa.as_bytes()).unwrap(), PrivateKeyDer::Pkcs1(_)));
        for wrong in ["", "-----BEGIN PRIVATE KEY-----\nAAECAw==\n", "no key"] {
            assert!(from_pem(wrong.as_bytes()).is_none(), "{wrong}");
        }
        let damaged = text.replace("AAECAw==", "AAE!Aw==");
        assert!(from_pem(damaged.as_bytes()).is_none());
    }

    #[test]
    fn read_accepts_a_fifo() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let through = |content: Vec<u8>, max: u64| {
            let other = path.clone();
            let writer = std::thread::spawn(move || {
                let mut fifo = File::options().write(true).open(other).unwrap();
                // Writes two pieces with a pause, so that the first read is short. The reader may
                // be gone by the second.
                let (first, rest) = content.split_at(content.len() / 2);
                let _ = fifo.write_all(first);
                std::thread::sleep(std::time::Duration::from_millis(20));
                let _ = fifo.write_all(rest);
            });
            let read = read(File::open(&path).unwrap(), max);
            writer.join().unwrap();
            read
        };
        let pem = to_pem(&[7; 100]);
        let content = through(pem.as_bytes().to_vec(), 1 << 20).unwrap();
        assert_eq!(content.as_slice(), pem.as_bytes());
        assert_eq!(from_pem(&content).unwrap().secret_der(), [7; 100]);
        assert_eq!(through(vec![b'x'; 300], 300).unwrap().len(), 300);
        for (bytes, max) in [(301, 300), (MAX_PIPED_BYTES as usize + 1, u64::MAX / 2)] {
            let error = through(vec![b'x'; bytes], max).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        }
    }

    #[test]
    fn zeroize_clears_the_key() {
        let mut key = from_pem(to_pem(&[7; 100]).as_bytes()).unwrap();
        key.zeroize();
        assert!(key.secret_der().is_empty());
    }
}
