//! KVM guests with a balloon, whose driver is honest and whose driver lies.

mod free_pages;
mod lies;
mod support;
