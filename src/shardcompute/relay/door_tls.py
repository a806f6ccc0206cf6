"""TLS of a relay's door, with a certificate that is made for the moment and vouches for nobody.

Networks that let only the web out look for TLS. Members do not check this certificate and need not: what they say
through a relay is inside TLS of their own, with certificates of the cluster.
"""

from __future__ import annotations

import ssl
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shardcompute.security.certificates import certificate_pem, utc
from shardcompute.security.identity import private_key_pem

_DAYS = 3650


def throwaway_server_context() -> ssl.SSLContext:
    """For answering whoever wants TLS, with a key that is in memory only."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = utc(time.time())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=_DAYS))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # OpenSSL reads files only.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "door.pem")
        path.touch(mode=0o600)
        path.write_bytes(private_key_pem(key) + certificate_pem(certificate).encode())
        context.load_cert_chain(path)
    return context
