//! Verification of a peer's certificate: by rustls, with tolerance for clock differences, and with
//! an optional expected URI.

use crate::wrong_identity::WrongIdentity;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, SignatureScheme,
};

use super::names::names_of;

/// Maximum number of dates in one chain that may be tolerated. A certificate, its authorities and
/// their lists have two dates each, and chains are short.
const MAX_TOLERATED_DATES: usize = 8;

/// A verifier that tolerates validity dates that are missed by at most the clock skew. `inner`
/// verifies everything else, at the nearest time at which the dates are valid.
#[derive(Debug)]
pub struct SkewTolerantVerifier<V: ?Sized> {
    skew: Duration,
    inner: Arc<V>,
}

impl<V: ?Sized> SkewTolerantVerifier<V> {
    pub fn new(inner: Arc<V>, skew: Duration) -> Self {
        Self { skew, inner }
    }
}

/// Verifies at `now`. If a date is missed by at most `skew`, verifies at that date instead.
fn tolerate<T>(
    skew: Duration,
    now: UnixTime,
    verify: impl Fn(UnixTime) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut error_found = match verify(now) {
        Err(error_found) => error_found,
        verified => return verified,
    };
    // The reported error is the one at this host's time.
    let first = error_found.clone();
    let now = now.as_secs();
    let tolerated = now.saturating_sub(skew.as_secs())..=now.saturating_add(skew.as_secs());
    let mut asked = now;
    for _ in 0..MAX_TOLERATED_DATES {
        let Some(moment) = valid_time(&error_found) else { return Err(error_found) };
        // Move in one direction only: two dates that exclude each other are never both valid.
        let same_direction = asked == now || (moment > asked) == (asked > now);
        if moment == asked || !tolerated.contains(&moment) || !same_direction {
            return Err(first);
        }
        asked = moment;
        match verify(UnixTime::since_unix_epoch(Duration::from_secs(asked))) {
            Err(other) => error_found = other,
            verified => return verified,
        }
    }
    Err(first)
}

/// The time nearest to now at which this date error disappears; `None` for any other error.
fn valid_time(error_found: &Error) -> Option<u64> {
    let Error::InvalidCertificate(error_found) = error_found else { return None };
    match error_found {
        CertificateError::NotValidYetContext { not_before, .. } => Some(not_before.as_secs()),
        CertificateError::ExpiredContext { not_after, .. } => Some(not_after.as_secs()),
        // A list is valid until this second, exclusively.
        CertificateError::ExpiredRevocationListContext { next_update, .. } => {
            next_update.as_secs().checked_sub(1)
        }
        _ => None,
    }
}

/// Signature checks are delegated to the inner verifier unchanged.
macro_rules! delegate_signature_checks {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.inner.verify_tls12_signature(message, certificate, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.inner.verify_tls13_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.inner.supported_verify_schemes()
        }
    };
}

impl<V: ServerCertVerifier + ?Sized> ServerCertVerifier for SkewTolerantVerifier<V> {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        tolerate(self.skew, now, |time| {
            let name = server_name;
            self.inner.verify_server_cert(end_entity, intermediates, name, ocsp_response, time)
        })
    }

    delegate_signature_checks!();
}

impl<V: ClientCertVerifier + ?Sized> ClientCertVerifier for SkewTolerantVerifier<V> {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        tolerate(self.skew, now, |time| {
            self.inner.verify_client_cert(end_entity, intermediates, time)
        })
    }

    delegate_signature_checks!();

    // `offer_client_auth` and `client_auth_mandatory` are true by default, as required here.
}

/// A verifier that requires a URI in the server's certificate. The URI identifies the server, so
/// its certificate need not have the address: SPIFFE certificates have none.
#[derive(Debug)]
pub struct UriVerifier {
    inner: Arc<dyn ServerCertVerifier>,
    uri: String,
}

impl UriVerifier {
    pub fn new(inner: Arc<dyn ServerCertVerifier>, uri: &str) -> Self {
        Self { inner, uri: uri.to_owned() }
    }
}

impl ServerCertVerifier for UriVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let name = server_name;
        // rustls checks the name last: the chain, its dates and the revocation lists are valid if
        // only the name is wrong.
        match self.inner.verify_server_cert(end_entity, intermediates, name, ocsp_response, now) {
            Ok(_)
            | Err(Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => {}
            other => return other,
        }
        let presented = names_of(end_entity);
        if presented.contains(&self.uri) {
            return Ok(ServerCertVerified::assertion());
        }
        let wrong = WrongIdentity { expected: self.uri.clone(), presented };
        Err(Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(wrong)))))
    }

    delegate_signature_checks!();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    /// The errors that webpki reports for a certificate and its authority with these dates, and for
    /// a list that is valid until `list`.
    fn judge(
        own: (u64, u64),
        authority: (u64, u64),
        list: u64,
    ) -> impl Fn(UnixTime) -> Result<(), Error> {
        move |time| {
            let error_found = |error| Err(Error::InvalidCertificate(error));
            for (not_before, not_after) in [own, authority] {
                if time.as_secs() < not_before {
                    let not_before = at(not_before);
                    return error_found(CertificateError::NotValidYetContext { time, not_before });
                }
                if time.as_secs() > not_after {
                    let not_after = at(not_after);
                    return error_found(CertificateError::ExpiredContext { time, not_after });
                }
            }
            if time.as_secs() >= list {
                let next_update = at(list);
                let error = CertificateError::ExpiredRevocationListContext { time, next_update };
                return error_found(error);
            }
            Ok(())
        }
    }

    const SKEW: Duration = Duration::from_secs(300);

    #[test]
    fn tolerate_accepts_dates_within_the_skew_only() {
        const FAR: u64 = 100_000;
        let wide = (0, FAR);
        for (own, authority, list, expected) in [
            (wide, wide, FAR, true),
            ((1300, FAR), wide, FAR, true),
            ((1301, FAR), wide, FAR, false),
            ((0, 700), wide, FAR, true),
            ((0, 699), wide, FAR, false),
            // Both certificates of a chain, and a list as well.
            ((1100, FAR), (1200, FAR), FAR, true),
            ((0, 900), (0, 800), 750, true),
            ((0, 900), (0, 800), 700, false),
            (wide, wide, 702, true),
            // One certificate starts after the other ends: they are never valid together.
            ((1100, FAR), (0, 900), FAR, false),
            ((0, 900), (1100, FAR), FAR, false),
            // Not yet valid, and the list is outdated by then.
            ((1100, FAR), wide, 1050, false),
        ] {
            let verified = tolerate(SKEW, at(1000), judge(own, authority, list));
            assert_eq!(verified.is_ok(), expected, "{own:?} {authority:?} {list}: {verified:?}");
        }
    }

    #[test]
    fn tolerate_reports_this_hosts_time_and_hides_no_other_error() {
        let refused = tolerate(SKEW, at(1000), judge((0, 900), (0, 100), 9999)).unwrap_err();
        let Error::InvalidCertificate(CertificateError::ExpiredContext { time, .. }) = refused
        else {
            panic!("{refused:?}");
        };
        assert_eq!(time, at(1000));
        let revoked = Error::InvalidCertificate(CertificateError::Revoked);
        let verified: Result<(), Error> = tolerate(SKEW, at(1000), |time| {
            judge((0, 900), (0, 9999), 9999)(time).and(Err(revoked.clone()))
        });
        assert_eq!(verified.unwrap_err(), revoked);
    }
}
