//! Tests of `decompress`.
