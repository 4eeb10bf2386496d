"""Certificates that tests make for themselves."""

from pathlib import Path

import trustme


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """Make a certificate for this machine; return it, its key, and the authority to trust, as files."""
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    cert, key, trusted = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
    for pem in made.cert_chain_pems:
        pem.write_to_path(str(cert), append=True)
    made.private_key_pem.write_to_path(str(key))
    authority.cert_pem.write_to_path(str(trusted))
    return cert, key, trusted
