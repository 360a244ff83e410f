//! Guest memory for live migration: slots, page bitmaps, copying pages out and in, finding populated pages.
