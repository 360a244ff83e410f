//! The link to the other host as the options describe it: its address, the certificates, the
//! protocol versions and the recording.

use vmferry_control::TlsFiles;
use vmferry_transport::{Address, Dialer, IdentityFiles, Recorder, RecordingSide};

use crate::args::{RecordOptions, SendOptions, TlsOptions};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// The recorder for `--record`, if it is given.
pub fn recorder(
    options: &RecordOptions,
    side: RecordingSide,
    output: &Output,
) -> Result<Option<Recorder>, Failure> {
    let Some(directory) = &options.record else { return Ok(None) };
    let recorder = Recorder::new(directory, side, options.record_limit)?;
    let output = output.clone();
    recorder.on_end(move |said| {
        let event = serde_json::json!({ "event": "recording", "message": said });
        output.event(&event, || said.to_owned());
    });
    Ok(Some(recorder))
}

/// The dialer for a destination address.
pub fn dialer(to: &str, tls: Option<&TlsFiles>) -> Result<Dialer, Failure> {
    let address: Address = to.parse().map_err(|error| Failure::of(Code::Usage, error))?;
    match tls {
        Some(files) => Ok(files.dialer(address)?),
        None => Ok(Dialer::new(address, None)),
    }
}

/// A source's TLS files, and the name or URI that it expects of the destination.
pub fn source_files(options: &SendOptions) -> Result<Option<TlsFiles>, Failure> {
    let mut files = tls_files(&options.tls)?;
    if let Some(files) = &mut files {
        files.server_name.clone_from(&options.server_name);
        files.destination_id.clone_from(&options.destination_id);
    } else if options.destination_id.is_some() {
        let text = "--destination-id names a certificate, and there is none without TLS: add \
                    --tls DIR";
        return Err(Failure::new(Code::Usage, text));
    }
    Ok(files)
}

/// The TLS files that the options name, or `None`.
pub fn tls_files(options: &TlsOptions) -> Result<Option<TlsFiles>, Failure> {
    // Absolute, because the VMM opens them and has another working directory.
    let absolute = |path: &std::path::Path| {
        std::path::absolute(path).map_err(|error| Failure::of(Code::Usage, error))
    };
    let mut files = match (&options.tls, &options.ca, &options.cert, &options.key) {
        (Some(directory), ..) => TlsFiles::in_directory(&absolute(directory)?),
        (None, Some(ca), Some(cert), Some(key)) => {
            IdentityFiles::new(&absolute(ca)?, &absolute(cert)?, &absolute(key)?).into()
        }
        _ if !options.crl.is_empty() => {
            let text = "--crl needs certificates, and there are none without TLS: add --tls DIR";
            return Err(Failure::new(Code::Usage, text));
        }
        _ => return Ok(None),
    };
    files.revocations = options.crl.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?;
    files.clock_skew = Some(options.clock_skew);
    Ok(Some(files))
}

/// An address with its scheme. `HOST:PORT` means TLS, or plain TCP with `--plain`.
pub fn address(text: &str, options: &TlsOptions) -> Result<String, Failure> {
    const SCHEMES: [&str; 6] = ["tls:", "grpc:", "grpc-ack:", "tcp:", "unix:", "fd:"];
    let scheme = SCHEMES.into_iter().find(|scheme| text.starts_with(scheme));
    let full = match scheme {
        None if options.plain => format!("tcp:{text}"),
        None => format!("tls:{text}"),
        Some(_) => text.to_owned(),
    };
    if full.starts_with("tcp:") && !options.plain {
        let text = "tcp: is neither encrypted nor authenticated: use tls:, or add --plain if \
                    the network is private to these hosts";
        return Err(Failure::new(Code::Usage, text));
    }
    let named = options.tls.is_some() || options.ca.is_some();
    let secured =
        ["tls:", "grpc:", "grpc-ack:"].into_iter().find(|scheme| full.starts_with(scheme));
    if let Some(scheme) = secured.filter(|_| !named) {
        let text = format!(
            "{scheme} needs this host's certificate: add --tls DIR, made by `vmferry pki`, or \
             --plain for an unprotected link"
        );
        return Err(Failure::new(Code::Usage, text));
    }
    Ok(full)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn options(plain: bool, tls: bool) -> TlsOptions {
        TlsOptions {
            tls: tls.then(|| "t".into()),
            ca: None,
            cert: None,
            key: None,
            crl: Vec::new(),
            clock_skew: Duration::ZERO,
            plain,
        }
    }

    #[test]
    fn address_without_a_scheme_is_tls_unless_plain() {
        assert_eq!(address("b:1", &options(false, true)).unwrap(), "tls:b:1");
        assert_eq!(address("b:1", &options(true, false)).unwrap(), "tcp:b:1");
        assert_eq!(address("unix:/x", &options(false, false)).unwrap(), "unix:/x");
        assert_eq!(address("fd:3,4", &options(false, false)).unwrap(), "fd:3,4");
        assert_eq!(address("grpc-ack:b:1", &options(false, true)).unwrap(), "grpc-ack:b:1");
        assert!(address("grpc:b:1", &options(true, false)).is_err());
        assert!(address("tcp:b:1", &options(false, true)).is_err());
        let error = address("b:1", &options(false, false)).unwrap_err();
        assert_eq!(error.code, Code::Usage);
    }
}
