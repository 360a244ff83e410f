//! Whether a peer's certificate counts: what rustls says, within the clocks' difference, and the URI that is
//! asked for.

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

/// Dates in one chain that may lie between the clocks: a certificate, its authorities and their lists have two
/// each, and a chain is short.
const MAX_MOVES: usize = 8;

/// A verifier that overlooks dates that are missed by less than the clocks may differ. Everything else is
/// `inner`'s judgement, at the nearest time at which the dates are right.
#[derive(Debug)]
pub struct Tolerant<V: ?Sized> {
    skew: Duration,
    inner: Arc<V>,
}

impl<V: ?Sized> Tolerant<V> {
    pub fn new(inner: Arc<V>, skew: Duration) -> Self {
        Self { skew, inner }
    }
}

/// Verifies at `now`, and where a date is missed by at most `skew`, at that date instead.
fn tolerate<T>(
    skew: Duration,
    now: UnixTime,
    verify: impl Fn(UnixTime) -> Result<T, Error>,
) -> Result<T, Error> {
    let mut complaint = match verify(now) {
        Err(complaint) => complaint,
        verified => return verified,
    };
    // What is said in the end is how far off it is by this host's clock.
    let first = complaint.clone();
    let now = now.as_secs();
    let tolerated = now.saturating_sub(skew.as_secs())..=now.saturating_add(skew.as_secs());
    let mut asked = now;
    for _ in 0..MAX_MOVES {
        let Some(moment) = remedy(&complaint) else { return Err(complaint) };
        // Always the same way: two dates that exclude each other are never both right.
        let onwards = asked == now || (moment > asked) == (asked > now);
        if moment == asked || !tolerated.contains(&moment) || !onwards {
            return Err(first);
        }
        asked = moment;
        match verify(UnixTime::since_unix_epoch(Duration::from_secs(asked))) {
            Err(other) => complaint = other,
            verified => return verified,
        }
    }
    Err(first)
}

/// The second nearest to now at which this complaint about a date is none; nothing for another one.
fn remedy(complaint: &Error) -> Option<u64> {
    let Error::InvalidCertificate(complaint) = complaint else { return None };
    match complaint {
        CertificateError::NotValidYetContext { not_before, .. } => Some(not_before.as_secs()),
        CertificateError::ExpiredContext { not_after, .. } => Some(not_after.as_secs()),
        // A list counts until then, not at that second.
        CertificateError::ExpiredRevocationListContext { next_update, .. } => {
            next_update.as_secs().checked_sub(1)
        }
        _ => None,
    }
}

/// What a verifier says of signatures, which the one within knows: not a word of it is changed here.
macro_rules! signatures_as_inner {
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

impl<V: ServerCertVerifier + ?Sized> ServerCertVerifier for Tolerant<V> {
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

    signatures_as_inner!();
}

impl<V: ClientCertVerifier + ?Sized> ClientCertVerifier for Tolerant<V> {
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

    signatures_as_inner!();

    // `offer_client_auth` and `client_auth_mandatory` are true by default, as they must be here.
}

/// A verifier of servers that must have a URI in their certificate. The URI says who it is, so the certificate
/// need not be for the address as well: SPIFFE's are for no address.
#[derive(Debug)]
pub struct ExpectedUri {
    inner: Arc<dyn ServerCertVerifier>,
    uri: String,
}

impl ExpectedUri {
    pub fn new(inner: Arc<dyn ServerCertVerifier>, uri: &str) -> Self {
        Self { inner, uri: uri.to_owned() }
    }
}

impl ServerCertVerifier for ExpectedUri {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let name = server_name;
        // The name comes last: the chain, its dates and the revocation lists were found right before.
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

    signatures_as_inner!();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(seconds))
    }

    /// What webpki says of a certificate with these dates, under one with those, with a list until then.
    fn judge(
        own: (u64, u64),
        authority: (u64, u64),
        list: u64,
    ) -> impl Fn(UnixTime) -> Result<(), Error> {
        move |time| {
            let complaint = |error| Err(Error::InvalidCertificate(error));
            for (not_before, not_after) in [own, authority] {
                if time.as_secs() < not_before {
                    let not_before = at(not_before);
                    return complaint(CertificateError::NotValidYetContext { time, not_before });
                }
                if time.as_secs() > not_after {
                    let not_after = at(not_after);
                    return complaint(CertificateError::ExpiredContext { time, not_after });
                }
            }
            if time.as_secs() >= list {
                let next_update = at(list);
                let error = CertificateError::ExpiredRevocationListContext { time, next_update };
                return complaint(error);
            }
            Ok(())
        }
    }

    const SKEW: Duration = Duration::from_secs(300);

    #[test]
    fn dates_are_missed_by_the_skew_at_most() {
        const FAR: u64 = 100_000;
        let wide = (0, FAR);
        for (own, authority, list, expected) in [
            (wide, wide, FAR, true),
            ((1300, FAR), wide, FAR, true),
            ((1301, FAR), wide, FAR, false),
            ((0, 700), wide, FAR, true),
            ((0, 699), wide, FAR, false),
            // Both of a chain, and a list as well.
            ((1100, FAR), (1200, FAR), FAR, true),
            ((0, 900), (0, 800), 750, true),
            ((0, 900), (0, 800), 700, false),
            (wide, wide, 702, true),
            // One begins later than the other ends: never valid together.
            ((1100, FAR), (0, 900), FAR, false),
            ((0, 900), (1100, FAR), FAR, false),
            // Not yet valid, and by then the list is out of date.
            ((1100, FAR), wide, 1050, false),
        ] {
            let verified = tolerate(SKEW, at(1000), judge(own, authority, list));
            assert_eq!(verified.is_ok(), expected, "{own:?} {authority:?} {list}: {verified:?}");
        }
    }

    #[test]
    fn what_is_said_is_by_this_hosts_clock_and_no_other_fault_is_hidden() {
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
