//! A peer that is not who was asked for.

/// The certificate has another URI than the one that is asked for.
#[derive(Debug, thiserror::Error)]
#[error("its certificate is for {}, not for {expected}", names(.presented))]
pub struct WrongIdentity {
    /// The URI that is asked for.
    pub expected: String,
    /// All names in the certificate.
    pub presented: Vec<String>,
}

fn names(names: &[String]) -> String {
    if names.is_empty() { "nobody".into() } else { names.join(", ") }
}
