"""The real supervisor and the real router, with workers that have no model."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from mii.control import ControlChannel
from mii.deployment import Supervisor
from mii.launchers.local import LocalLauncher
from mii.registry import Registry


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    channel = ControlChannel.from_arguments(sys.argv[1:])
    config = channel.receive_start().config
    registry = Registry(Path(config.cache_path))
    logs = registry.logs(config.deployment_name)
    launcher = LocalLauncher(logs, worker_module="tests.system.fake_worker")
    sys.exit(Supervisor(config, channel, launcher, registry).run())


if __name__ == "__main__":
    main()
