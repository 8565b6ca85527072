"""`headrace certs`: a certificate authority, and a certificate for each machine of a run."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.base.errors import ConfigError, HeadraceError
from headrace.net.credentials import write

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

# every certificate is also valid for its own machine under these names
_LOCAL = ("localhost", "127.0.0.1", "::1")
_BACKDATED = datetime.timedelta(hours=1)  # clocks differ


def certs(
    hosts: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST…",
            help="A machine that gets a certificate: the name or address at which others reach it, or several, NAME,NAME,…",
        ),
    ],
    directory: Annotated[Path, typer.Option("--dir", metavar="DIR", help="Where to write them.")] = Path("certs"),
    days: Annotated[int, typer.Option(min=1, help="Days for which they are valid.")] = 365,
) -> None:
    """Make DIR/HOST.pem and DIR/HOST.key for each HOST, signed by the authority DIR/ca.pem, which is made first if it doesn't exist.

    Each machine gets its own two files and ca.pem (security.tls_cert, tls_key, tls_ca). ca.key stays where this command runs.
    Running services use a new certificate as soon as it replaces the old file.
    """
    now = datetime.datetime.now(datetime.UTC)
    try:
        issuer = _authority(directory, now)
    except ModuleNotFoundError as error:
        raise HeadraceError(
            "certs needs the package 'cryptography', which is not installed: pip install 'headrace[service]'"
        ) from error
    typer.echo(f"{directory / 'ca.pem'}")
    for host in hosts:
        names = host.split(",")
        if not all(names):
            raise ConfigError(f"HOST {host!r}: an empty name; give NAME or NAME,NAME")
        _issue(directory / names[0], names, issuer, now, datetime.timedelta(days=days))
        typer.echo(f"{directory / names[0]}.pem")


def _authority(directory: Path, now: datetime.datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Return the authority in `directory`. If it has none, make one that is valid for ten years. Raises `ConfigError`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    chain, secret = directory / "ca.pem", directory / "ca.key"
    if chain.exists():
        try:
            key = serialization.load_pem_private_key(secret.read_bytes(), password=None)
            assert isinstance(key, ec.EllipticCurvePrivateKey)
            return x509.load_pem_x509_certificate(chain.read_bytes()), key
        except (OSError, ValueError, TypeError, AssertionError) as error:
            raise ConfigError(
                f"{chain} with {secret} can't be used ({error}); put the key back, or give another --dir"
            ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Headrace")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(directory / "ca", certificate, key)
    return certificate, key


def _issue(
    place: Path,
    names: list[str],
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey],
    now: datetime.datetime,
    valid: datetime.timedelta,
) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    authority, signing = issuer
    key = ec.generate_private_key(ec.SECP256R1())
    everything = dict.fromkeys([*names, *_LOCAL])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(min(now + valid, authority.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName([_general(name) for name in everything]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    _write(place, certificate, key)


def _general(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise ConfigError(f"HOST {name!r} is neither a name nor an address ({error})") from error


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(place: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    """Write the key, then the certificate. A service uses the pair once both match."""
    from cryptography.hazmat.primitives import serialization

    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write(place.with_name(place.name + ".key"), secret.decode())
    chain = place.with_name(place.name + ".pem")
    write(chain, certificate.public_bytes(pem).decode())
    chain.chmod(0o644)
