//! A certificate without the expected URI.

/// The certificate does not have the expected URI.
#[derive(Debug, thiserror::Error)]
#[error("its certificate is for {}, not for {expected}", names(.presented))]
pub struct WrongIdentity {
    /// The expected URI.
    pub expected: String,
    /// All names in the certificate.
    pub presented: Vec<String>,
}

fn names(names: &[String]) -> String {
    if names.is_empty() { "no name".into() } else { names.join(", ") }
}
