"""The command line: `detkern info | verify | replay | fingerprint`."""
