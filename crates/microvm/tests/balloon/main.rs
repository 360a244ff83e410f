//! KVM guests with a balloon: with the correct driver, and with a hostile one.

mod free_pages;
mod lies;
mod support;
