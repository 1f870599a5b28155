"""Runs pip with the given arguments, and tells every few seconds what it is doing.

pip's own bar needs a terminal, and shows nothing while archives are unpacked. The arguments are those of pip.
"""

import subprocess
import sys
import threading
import time

EVERY_S = 8.0
_TOLD = ("Collecting", "Downloading", "Using cached", "Building", "Preparing", "Installing collected packages")


def main() -> int:
    begin_s = time.monotonic()
    doing = "begins"
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(EVERY_S):
            print(f"setup: {time.monotonic() - begin_s:3.0f} s, pip: {doing}", flush=True)

    command = [sys.executable, "-m", "pip", *sys.argv[1:], "--disable-pip-version-check", "--progress-bar", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.strip().startswith(_TOLD):
            doing = line.strip()[:100]
        elif "Retrying" in line:
            doing = "retrying, since an index does not answer" + line.rpartition(":")[2].rstrip()[:60]
    status = process.wait()
    ended.set()
    if status:
        sys.stdout.writelines(said[-30:])
    return status


if __name__ == "__main__":
    sys.exit(main())
