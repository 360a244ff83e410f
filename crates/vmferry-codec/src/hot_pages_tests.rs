//! Tests of `hot_pages`.
