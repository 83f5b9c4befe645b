"""The server: clustered federated learning as a state machine over rounds."""

from fedbranch.server.guard import Guard
from fedbranch.server.options import ServerOptions
from fedbranch.server.records import RoundRecord, Routing
from fedbranch.server.replies.intake import Intake
from fedbranch.server.server import Server

__all__ = ["Guard", "Intake", "RoundRecord", "Routing", "Server", "ServerOptions"]
