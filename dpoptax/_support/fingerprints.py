"""Fingerprints of seeds and noise keys, which do not reveal them."""

import hashlib

_BYTES = 16


def seed_fingerprint(seed: int | bytes) -> str:
    """Returns a hash of a sampler's seed that does not reveal it."""
    if isinstance(seed, bytes):
        return _fingerprint("sampler seed of SHAKE-256", seed)
    return _fingerprint("sampler seed of PCG64", seed.to_bytes(seed.bit_length() // 8 + 1))


def key_fingerprint(words: bytes) -> str:
    """Returns a hash of a noise key that does not reveal it."""
    return _fingerprint("noise key", words)


def _fingerprint(use: str, secret: bytes) -> str:
    # The label ends where the zero byte is, so the hashes of different uses are independent.
    text = f"dpoptax fingerprint of a {use}\0".encode()
    return hashlib.shake_256(text + secret).hexdigest(_BYTES)
