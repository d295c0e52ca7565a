"""The IPv4 addresses of this host and their network interfaces."""

import array
import fcntl
import ipaddress
import socket
import struct

__all__ = ["address_on_route_to", "find_address", "interface_of", "local_addresses", "resolve_address"]

_SIOCGIFCONF = 0x8912
_ROW_BYTES = 40  # struct ifreq on 64-bit Linux: a name of 16 bytes, then a sockaddr_in
_MAX_ROWS = 1024


def local_addresses() -> dict[str, str]:
    """The interface of each IPv4 address of this host; interfaces that are down have none."""
    rows = array.array("B", bytes(_ROW_BYTES * _MAX_ROWS))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iL", len(rows), rows.buffer_info()[0])
        size = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
    data = rows.tobytes()[:size]
    found = {}
    for start in range(0, size, _ROW_BYTES):
        name = data[start : start + 16].partition(b"\0")[0].decode()
        address = socket.inet_ntoa(data[start + 20 : start + 24])
        found[address] = name.partition(":")[0]  # eth0:1 is a second address of eth0
    return found


def interface_of(address: str) -> str | None:
    """The interface that has this address; None if this host has no such address.

    Raises ValueError for what is no IPv4 address.
    """
    if ipaddress.IPv4Address(address).is_loopback:
        return "lo"
    return local_addresses().get(address)


def find_address(text: str) -> str:
    """The address of the interface called `text`, or `text` if it is an address of this host.

    Raises ValueError with what this host has.
    """
    found = local_addresses()
    for address, interface in found.items():
        if interface == text:
            return address
    try:
        if interface_of(text) is not None:
            return text
    except ValueError:
        pass
    has = ", ".join(f"{interface} {address}" for address, interface in sorted(found.items()))
    raise ValueError(f"this host has no interface or IPv4 address {text}; it has {has or 'none'}")


def resolve_address(host: str) -> str:
    """The IPv4 address of a host's name. Raises OSError."""
    return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def address_on_route_to(address: str) -> str:
    """The address of this host that `address` is reached from. Raises OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        any_socket.connect((address, 9))  # sends nothing
        return str(any_socket.getsockname()[0])
