"""Throw-away certificates for tests: a CA, a server's for loopback, a client's, and a CA that signed none of them."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the files are; `stranger` is a CA that signed nothing here."""

    folder: Path

    @property
    def ca(self) -> Path:
        """The certificate of the CA."""
        return self.folder / "ca.pem"

    @property
    def stranger(self) -> Path:
        """The certificate of another CA."""
        return self.folder / "stranger.pem"

    def certificate(self, name: str) -> Path:
        """The certificate of `server` or `client`."""
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        """The private key of `server` or `client`."""
        return self.folder / f"{name}.key"

    def server_options(self, port: int, *, clients: str = "no") -> tuple[str, ...]:
        """Return the options of a server that speaks TLS on `port`; `clients` yes wants certificates of them."""
        return (
            *("--tls-port", str(port), "--tls-auth-clients", clients, "--tls-ca-cert-file", str(self.ca)),
            *("--tls-cert-file", str(self.certificate("server")), "--tls-key-file", str(self.key("server"))),
        )


def make_tls_files(folder: Path) -> TlsFiles:
    """Make all files in a folder."""
    files = TlsFiles(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    ca = _signed("a CA for a test", key.public_key(), "a CA for a test", key, is_ca=True)
    _write(files.ca, ca)
    other = ec.generate_private_key(ec.SECP256R1())
    _write(files.stranger, _signed("another CA", other.public_key(), "another CA", other, is_ca=True))
    for name in ("server", "client"):
        own = ec.generate_private_key(ec.SECP256R1())
        _write(files.certificate(name), _signed(name, own.public_key(), "a CA for a test", key, is_ca=False))
        files.key(name).write_bytes(
            own.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return files


def _signed(
    name: str, key: ec.EllipticCurvePublicKey, issuer: str, by: ec.EllipticCurvePrivateKey, *, is_ca: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .sign(by, hashes.SHA256())
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _write(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
