//! Tests of `entropy`.
