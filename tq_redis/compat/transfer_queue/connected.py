"""What the generated client stands on: the one client of this process."""

from __future__ import annotations

from typing import Any

from tq_redis.client.portal import Portal
from tq_redis.compat.transfer_queue.row_calls import RowCalls
from tq_redis.compat.transfer_queue.session import running_client


class Connected:
    """Asks for the process's client at each call, so that it also works behind a fork, and behind
    ``close`` and another ``init``.

    Args:
        client_id: a name for it.
        controller_info: where transfer_queue's controller is. There is none here; like all further
            arguments, it is accepted and not used.
    """

    def __init__(
        self,
        client_id: str = "",
        controller_info: Any = None,
        zmq_io_threads: int | None = None,
        zmq_max_sockets: int | None = None,
    ) -> None:
        self.client_id = client_id

    def initialize_storage_manager(self, manager_type: str, config: Any) -> None:
        """Nothing to do: where the bytes are is a setting of the queue."""

    def close(self) -> None:
        """Nothing to do: connections are the process's, and :func:`close` ends them."""

    @property
    def _core(self) -> RowCalls:
        return RowCalls(running_client().core)

    @property
    def _portal(self) -> Portal:
        return running_client().portal
