"""Hosts as network namespaces: real TCP stacks on shaped links, on one machine.

    with Lab(["control", "h1", "h2"], rate_mbit=400) as lab:
        server = lab["h1"].spawn(["iperf3", "-s"])
        lab["h2"].run(["iperf3", "-c", lab["h1"].address])
        lab["h1"].cut()

The picture, for each host:

    host's namespace                         switch's namespace
    eth0 (10.77.0.N) ---- tbf: outgoing --->  portN --+
                     <--- tbf: incoming -----         +-- bridge0
"""

from tests.lab.host import Host
from tests.lab.iproute import LabError
from tests.lab.network import Lab

__all__ = ["Host", "Lab", "LabError"]
