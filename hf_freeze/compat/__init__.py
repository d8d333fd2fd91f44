"""What we use, override or replace of other libraries beyond their public interfaces: one file a library."""
