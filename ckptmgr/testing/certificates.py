"""A certificate authority for one test server, made at its start and trusted by nobody else."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509

_LIFE = datetime.timedelta(days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Files in PEM: what clients must trust, and what a server on 127.0.0.1 shows."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(directory: Path) -> Certificates:
    """New ones in `directory`, with keys that only this user can read.

    An authority and a certificate signed by it rather than one that signs itself: not every client takes one certificate in both roles.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def name_of(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def builder(common: str, key: ec.EllipticCurvePrivateKey, *, signs: bool) -> x509.CertificateBuilder:
        """What both have in common; Python 3.13 refuses certificates that do not say whose key is whose."""
        return (
            x509.CertificateBuilder()
            .subject_name(name_of(common))
            .issuer_name(name_of("ckptmgr test authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # Clocks of containers differ.
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + _LIFE)
            .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
            .add_extension(_key_usage(signs=signs), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    authority = builder("ckptmgr test authority", authority_key, signs=True).sign(authority_key, hashes.SHA256())
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    certificate = (
        builder("127.0.0.1", server_key, signs=False)
        .add_extension(names, critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    made = Certificates(
        authority=directory / "authority.pem", certificate=directory / "server.pem", key=directory / "server.key"
    )
    made.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.touch(mode=0o600)
    made.key.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
