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
    doing, since_s = "begins", begin_s
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(EVERY_S):
            now_s = time.monotonic()
            lasts = f", for {now_s - since_s:.0f} s" if now_s - since_s > EVERY_S else ""
            print(f"setup: {now_s - begin_s:3.0f} s, pip: {doing}{lasts}", flush=True)

    command = [sys.executable, "-m", "pip", *sys.argv[1:], "--disable-pip-version-check", "--progress-bar", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if line.strip().startswith(_TOLD):
            doing, since_s = line.strip().removesuffix(": started")[:100], time.monotonic()
        elif "Retrying" in line:
            answer = line.rpartition(":")[2].rstrip()[:60]
            doing, since_s = f"retrying, since an index does not answer{answer}", time.monotonic()
    status = process.wait()
    ended.set()
    if status:
        sys.stdout.writelines(said[-30:])
    return status


if __name__ == "__main__":
    sys.exit(main())
