//! Two proxies with a cable between them that tests can cut, and local programs at both ends.

mod carried;
mod cut;
mod probed;
mod refused;
mod support;
