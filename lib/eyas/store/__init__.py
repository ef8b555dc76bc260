"""Hidden states on disk: reader, writer, other projects' formats, mixtures, the certificate."""
