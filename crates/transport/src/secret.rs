//! Private keys on their way between files and the libraries that use them.
//!
//! Whatever holds a key here is overwritten when it is dropped, and nothing grows while it holds one: what grows leaves
//! a copy behind. The usual PEM readers and writers do, so this is one of its own, on a base64 that takes the caller's
//! buffers. What the key is loaded into is AWS-LC's, which overwrites all memory that it frees.

use std::fs::File;
use std::io::{self, Read};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs1KeyDer, PrivatePkcs8KeyDer, PrivateSec1KeyDer};
use zeroize::Zeroizing;

/// Characters of base64 in a line (RFC 7468).
const LINE: usize = 64;

/// A private key, overwritten when it is dropped.
pub type SecretKey = Zeroizing<PrivateKeyDer<'static>>;

/// Most bytes of a key that come through a pipe, which does not say how many will.
const MOST_PIPED_BYTES: u64 = 256 << 10;

/// Reads a file with a key, up to `most` bytes; from a pipe or a device up to 256 KiB.
///
/// # Errors
/// What the system says, and [`FileTooLarge`](io::ErrorKind::FileTooLarge) where a pipe has more.
pub fn read(file: File, most: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    let found = file.metadata()?;
    if !found.is_file() {
        let most = most.min(MOST_PIPED_BYTES);
        let content = read_up_to(file, most + 1)?;
        return if content.len() as u64 > most {
            Err(io::ErrorKind::FileTooLarge.into())
        } else {
            Ok(content)
        };
    }
    read_up_to(file, found.len().min(most))
}

fn read_up_to(file: File, bytes: u64) -> io::Result<Zeroizing<Vec<u8>>> {
    // With room behind the end, where the end of the file is looked for: nothing grows.
    let mut content = Zeroizing::new(Vec::with_capacity(bytes as usize + 64));
    file.take(bytes).read_to_end(&mut content)?;
    Ok(content)
}

/// The first private key in a PEM file (PKCS#8, PKCS#1 or SEC 1); none if there is none.
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

/// A PKCS#8 key as PEM.
pub fn to_pem(der: &[u8]) -> Zeroizing<String> {
    let (begin, end) = ("-----BEGIN PRIVATE KEY-----\n", "-----END PRIVATE KEY-----\n");
    let characters = der.len().div_ceil(3) * 4;
    let mut base64 = Zeroizing::new(vec![0; characters]);
    // The buffer has exactly the length that is needed, so this can't fail.
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

    /// Compiles only if it is.
    fn is_overwritten_when_dropped<T: ZeroizeOnDrop>() {}

    #[test]
    fn keys_come_back_as_they_were_written() {
        is_overwritten_when_dropped::<SecretKey>();
        for bytes in [1, 47, 48, 49, 138, 1191] {
            let der: Vec<u8> = (0..bytes).map(|byte| byte as u8).collect();
            let pem = to_pem(&der);
            assert!(pem.lines().all(|line| line.len() <= LINE));
            let key = from_pem(pem.as_bytes()).unwrap();
            assert!(matches!(&*key, PrivateKeyDer::Pkcs8(_)));
            assert_eq!(key.secret_der(), der);
            let said = format!("{key:?}");
            assert!(!said.contains(char::is_numeric), "{said}");
        }
    }

    #[test]
    fn it_reads_what_others_write() {
        // As openssl does: parameters before, other ends of lines, and other kinds.
        let text = "-----BEGIN EC PARAMETERS-----\r\nBggqhkjOPQMBBw==\r\n-----END EC PARAMETERS-----\r\n\
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
    fn a_key_comes_through_a_fifo() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let through = |content: Vec<u8>, most: u64| {
            let other = path.clone();
            let writer = std::thread::spawn(move || {
                let mut fifo = File::options().write(true).open(other).unwrap();
                // In two pieces, and some time between them: the first is not all. A reader that has had enough is gone.
                let (first, rest) = content.split_at(content.len() / 2);
                let _ = fifo.write_all(first);
                std::thread::sleep(std::time::Duration::from_millis(20));
                let _ = fifo.write_all(rest);
            });
            let read = read(File::open(&path).unwrap(), most);
            writer.join().unwrap();
            read
        };
        let pem = to_pem(&[7; 100]);
        let content = through(pem.as_bytes().to_vec(), 1 << 20).unwrap();
        assert_eq!(content.as_slice(), pem.as_bytes());
        assert_eq!(from_pem(&content).unwrap().secret_der(), [7; 100]);
        assert_eq!(through(vec![b'x'; 300], 300).unwrap().len(), 300);
        for (bytes, most) in [(301, 300), (MOST_PIPED_BYTES as usize + 1, u64::MAX / 2)] {
            let error = through(vec![b'x'; bytes], most).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        }
    }

    #[test]
    fn a_key_that_is_overwritten_is_gone() {
        let mut key = from_pem(to_pem(&[7; 100]).as_bytes()).unwrap();
        key.zeroize();
        assert!(key.secret_der().is_empty());
    }
}
