"""`narwhal-attest`: the sidecar that serves an engine's attestation document (spec R7)."""
