"""The commands of the laboratory, one file a command. As those of the library, they import what they need when they run."""
