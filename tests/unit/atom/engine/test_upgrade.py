from unittest.mock import Mock

import pytest

from atom.engine.upgrade import TakeOver, settings_of_sockets, without_upgrade
from atom.shared.config.cli import ConfigError
from atom.shared.config.server import ServerConfig
from atom.shared.messages.handover import ListeningSockets
from atom.supervisor import StartError
from atom.supervisor.handover import DeclinedError

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


def test_a_server_that_was_given_up_leaves_the_administration_to_the_running_one() -> None:
    socket, admin = Mock(), Mock(is_own=False)
    admin.socket = socket
    old = Mock(admin=("unix:/admin", socket))
    old.serving.side_effect = old.starting.side_effect = DeclinedError("it has given up")
    take_over = TakeOver(old, Mock(), admin)
    with pytest.raises(StartError, match="--upgrade-from: it has given up"):
        take_over.starting()
    with pytest.raises(StartError, match="--upgrade-from: it has given up"):
        take_over.finish({})
    assert not admin.is_own


def test_the_administration_is_the_old_servers_until_the_new_one_has_started() -> None:
    """A signal that ends the start ends it also while the old server leaves; then that goes on."""
    socket, admin = Mock(), Mock(is_own=False)
    admin.socket = socket
    old = Mock(admin=("unix:/admin", socket))
    old.serving.side_effect = SystemExit(0)
    take_over = TakeOver(old, Mock(), admin)
    with pytest.raises(SystemExit):
        take_over.finish({})
    assert not admin.is_own
    old.serving.side_effect = [""]
    take_over.finish({})
    take_over.started()
    assert admin.is_own
