import pytest

from atom.engine.upgrade import settings_of_sockets, without_upgrade
from atom.shared.config.cli import ConfigError
from atom.shared.config.server import ServerConfig
from atom.shared.messages.handover import ListeningSockets

OFFER = ListeningSockets("127.0.0.1", 8123, [0, 1], 2, "", 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--upgrade-from", "12", "-tp", "2"],
        ["m", "--upgrade-from=12", "-tp", "2"],
        ["m", "--upgrade_from", "--admin", "-tp", "2"],
        ["m", "-tp", "2", "--upgrade_from=/run/atom/admin"],
    ],
)
def test_a_successor_has_the_command_line_without_what_it_replaces(arguments: list[str]) -> None:
    assert without_upgrade(arguments) == ["m", "-tp", "2"]


def test_the_settings_are_those_of_the_sockets() -> None:
    found = settings_of_sockets(ServerConfig(server_port=0), OFFER, {"server_port"})
    assert (found.host, found.server_port, found.api_server_count) == ("127.0.0.1", 8123, 2)


@pytest.mark.parametrize("name, value", [("host", "0.0.0.0"), ("server_port", 8000), ("api_server_count", 1)])
def test_other_settings_are_refused_by_name(name: str, value: object) -> None:
    server = ServerConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} {value}: .*leave"):
        settings_of_sockets(server, OFFER, {name})
